"""Keeping house while the engine lives on: snapshots, old content carried forward, files dropped.

A pass goes over all messages a slice at a time, by their numbers. Each slice is taken exclusively,
in well under the 50 ms that nobody may be held up; what happens between the slices is in the
journal, and a replay tells it apart (`core.replay`). Messages whose content lies in old, mostly
dead files are appended again on the way, so that those files can go: the disk holds at most about
twice what lives.

A pass is due when the journal has grown, or when much of what it holds has left.
Dropping never goes past the snapshot before the newest one, nor past a registered reader's floor.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from penstock.backends.engine.engine import Engine
from penstock.core.delivery import Delivery, pack_place, position_of, size_bytes
from penstock.core.events import AnyEvent, Carried
from penstock.core.queue import QueueState
from penstock.errors import CorruptEntry, PenstockError, StoreFull
from penstock.journal import readers
from penstock.journal.file import FileJournal
from penstock.journal.snapshot import (
    Outline,
    SnapshotWriter,
    offset_of,
    pack_slice,
    snapshot_paths,
)

T = TypeVar("T")

SLICE: Final = 4_000
# A range of numbers of which fewer than one in so many is a message's is not worth going through.
_SPARSE: Final = 8
CARRY_BYTES_MAX: Final = 1024 * 1024
CARRY_MESSAGES_MAX: Final = 1_000
GROWTH_BYTES_MIN: Final = 32 * 1024 * 1024
# What has come since a snapshot is replayed by the next opening: not much beside the snapshot.
_GROWTH_PART: Final = 8
# What a message costs the journal beside its own bytes, roughly: headers of its events.
MESSAGE_BYTES: Final = 320
_DENSE_ENOUGH: Final = 2 / 3
_RETRY_S: Final = 5.0
_LOOK_S: Final = 1.0
_WORTH_A_SNAPSHOT_BYTES: Final = 1024 * 1024


class Upkeep:
    """The housekeeping of one engine on a file journal; runs in a thread of its own."""

    def __init__(
        self, engine: Engine, journal: FileJournal, store: Path, archive: Path | None
    ) -> None:
        self._engine = engine
        self._journal = journal
        self._segments = journal.segments
        self._store = store
        self._archive = archive
        self._woken = threading.Event()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._exclusive: Callable[[Callable[[], object]], object] = _at_once
        # Up to where the pass under way wants to empty the stream; less if there is no room.
        self._cutoff = 0
        # What lived when last the journal was shrunk, or the most seen since; at first, anything.
        self._shrunk_from = 1 << 62
        # What the last pass failed of; None when it was well.
        self.last_error: Exception | None = None
        self._journal.grown = self._woken.set
        self._journal.held = self._count_messages
        newest = snapshot_paths(store)
        self._begun_at = offset_of(newest[0]) if newest else self._segments.first_offset
        self._plan_next()

    def start(self, exclusive: Callable[[Callable[[], object]], object]) -> None:
        """Begins; `exclusive` runs a function while nobody else touches the engine."""
        self._exclusive = exclusive
        self._thread = threading.Thread(target=self._run, name="penstock-upkeep", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, and leaves a fresh snapshot so that the next start is quick.

        A pass under way is left unfinished, which does no harm; so is a last one that fails.
        """
        self._ending.set()
        self._woken.set()
        if self._thread is not None:
            self._thread.join()
        self._ending.clear()
        if self._segments.end_offset - self._begun_at > _WORTH_A_SNAPSHOT_BYTES:
            with suppress(PenstockError):
                self.run_pass()

    def _run(self) -> None:
        while not self._ending.is_set():
            is_asked = self._woken.wait(_LOOK_S)
            self._woken.clear()
            if self._ending.is_set():
                return
            try:
                if is_asked:
                    self.run_pass()
                elif self._is_worth_shrinking():
                    self._shrink()
                else:
                    continue
                self.last_error = None
            except Exception as error:
                # A full disk, most likely. The engine goes on; so does this, a little later.
                self.last_error = error
                if not self._ending.wait(_RETRY_S):
                    self._woken.set()

    def _is_wasteful(self) -> bool:
        """Whether the journal is much larger than what lives in it."""
        stream_bytes = self._segments.end_offset - self._segments.first_offset
        return stream_bytes > 2 * self._live_bytes() + 2 * GROWTH_BYTES_MIN

    def _is_worth_shrinking(self) -> bool:
        """Whether so much has left since the last try that another may free some of it.

        A few deletes can end gigabytes, and then nothing may be appended for a long time.
        """
        live_bytes = self._live_bytes()
        self._shrunk_from = max(self._shrunk_from, live_bytes)
        has_left = self._shrunk_from - live_bytes >= GROWTH_BYTES_MIN
        return has_left and self._is_wasteful()

    def _shrink(self) -> None:
        """Passes until what has left is gone from the disk, as far as readers let it go."""
        self._shrunk_from = self._live_bytes()
        self.run_pass()
        if self._is_wasteful() and not self._ending.is_set():
            # Files go up to the snapshot before the newest. An entry of nothing lets there be one
            # more snapshot, behind all that has left.
            self._in_turn(self._append_nothing)
            self.run_pass()

    def _append_nothing(self) -> None:
        self._segments.ensure_room(0, reserved=False)
        self._journal.append(())

    def _plan_next(self) -> None:
        live_bytes = self._live_bytes()
        self._shrunk_from = max(self._shrunk_from, live_bytes)
        growth = max(GROWTH_BYTES_MIN, live_bytes // _GROWTH_PART)
        self._journal.growth_limit = self._segments.end_offset + growth

    def _count_messages(self) -> int:
        return sum(len(queue.deliveries) for queue in self._engine.shard.queues.values())

    def _live_bytes(self) -> int:
        return sum(
            queue.stored_bytes + MESSAGE_BYTES * len(queue.deliveries)
            for queue in list(self._engine.shard.queues.values())
        )

    def run_pass(self) -> None:
        """Takes a snapshot, carries old content forward, and drops what nobody needs."""
        shard = self._engine.shard
        before = snapshot_paths(self._store)
        previous_offset = offset_of(before[0]) if before else self._segments.first_offset
        writer: SnapshotWriter | None = None
        try:
            outline, numbers = self._in_turn(self._begin)
            self._cutoff = self._choose_cutoff(numbers, min(previous_offset, outline.offset))
            writer = SnapshotWriter(self._store, outline)
            for queue, listed in numbers.items():
                for at in range(0, len(listed), SLICE):
                    part = listed[at : at + SLICE]
                    while not self._ending.is_set() and self._carry_some(queue, part):
                        pass
                    if self._ending.is_set():
                        writer.abandon()
                        return
                    writer.add(self._in_turn(partial(self._take_slice, queue, part)))
                    # Leave the interpreter to those who answer: a pass is never in a hurry.
                    time.sleep(0)
            self._journal.sync()
            writer.finish()
            self._begun_at = outline.offset
        except BaseException:
            if writer is not None:
                writer.abandon()
            raise
        finally:
            shard.moves = None
            self._plan_next()
        self._drop_before(self._cutoff)

    def _in_turn(self, step: Callable[[], T]) -> T:
        def unless_stopped() -> T:
            # The memory of an engine that has stopped may be ahead of its journal.
            self._engine.check()
            self._segments.require_usable()
            return step()

        return self._exclusive(unless_stopped)  # type: ignore[return-value]

    def _begin(self) -> tuple[Outline, dict[int, Sequence[int]]]:
        shard = self._engine.shard
        shard.moves = {}
        outline = Outline(self._segments.end_offset, self._engine.clock.now_ms(), shard.outline())
        numbers = {
            queue.number: _numbers(queue, shard.next_number) for queue in shard.queues.values()
        }
        return outline, numbers

    def _listed(self, queue: int, numbers: Sequence[int]) -> list[Delivery]:
        """Those that were in the queue when the pass began and still live, wherever they are."""
        shard = self._engine.shard
        moves = shard.moves
        if not moves:
            if queue not in shard.queues:
                return []
            get = shard.queues[queue].deliveries.get
            return [found for number in numbers if (found := get(number)) is not None]
        deliveries = []
        for number in numbers:
            origin, now_in = moves.get(number, (queue, queue))
            to = shard.queues.get(now_in) if origin == queue else None
            found = None if to is None else to.deliveries.get(number)
            if found is not None:
                deliveries.append(found)
        return deliveries

    def _take_slice(self, queue: int, numbers: Sequence[int]) -> bytes:
        return pack_slice(self._listed(queue, numbers))

    def _carry_some(self, queue: int, numbers: Sequence[int]) -> bool:
        """Carries as many of these messages forward as may be done at once; whether any is left."""
        if self._cutoff <= self._segments.first_offset:
            return False
        with suppress(StoreFull):
            # Here and not while the engine is held up: making a file takes its time.
            self._segments.prepare()
        return self._in_turn(partial(self._carry, queue, numbers))

    def _carry(self, queue: int, numbers: Sequence[int]) -> bool:
        """Appends the content of messages in old files again, at the end of the stream."""
        now_ms = self._engine.clock.now_ms()
        limit = pack_place(self._cutoff, 0)
        carried: list[AnyEvent] = []
        moving: list[Delivery] = []
        size = 0
        is_all = True
        for delivery in self._listed(queue, numbers):
            content = delivery.content
            if not isinstance(content, int) or content >= limit:
                continue
            if size > CARRY_BYTES_MAX or len(carried) == CARRY_MESSAGES_MAX:
                is_all = False
                break
            try:
                pushed = self._journal.load(content)
            except CorruptEntry:
                # It stays where it is and is told as lost when someone pulls it.
                continue
            carried.append(Carried(now_ms, delivery.queue, delivery.number, pushed))
            moving.append(delivery)
            size += pushed.size_bytes
        if not carried:
            return False
        try:
            self._append_carried(carried, moving)
        except StoreFull:
            # What cannot be carried keeps its file; those before it can still go.
            self._cutoff = min(
                position_of(each.content) for each in moving if isinstance(each.content, int)
            )
            return True
        return not is_all

    def _append_carried(self, carried: list[AnyEvent], moving: list[Delivery]) -> None:
        size = sum(
            event.pushed.size_bytes + 2_048 for event in carried if isinstance(event, Carried)
        )
        self._segments.ensure_room(size, reserved=False)
        _, places = self._journal.append(carried)
        for delivery, place in zip(moving, places, strict=True):
            delivery.content = place

    def _choose_cutoff(self, numbers: dict[int, Sequence[int]], limit: int) -> int:
        """How far the stream should be emptied: what is left behind it is mostly alive."""
        stream_bytes = self._segments.end_offset - self._segments.first_offset
        if self._live_bytes() >= _DENSE_ENOUGH * stream_bytes:
            return self._segments.first_offset
        file_bytes = self._segments.payload_bytes
        live: dict[int, int] = {}
        for queue, listed in numbers.items():
            for at in range(0, len(listed), SLICE):
                for delivery in self._listed(queue, listed[at : at + SLICE]):
                    content = delivery.content
                    if isinstance(content, int):
                        file = position_of(content) // file_bytes
                        size = size_bytes(delivery) + MESSAGE_BYTES
                        live[file] = live.get(file, 0) + size
                time.sleep(0)
        first = self._segments.first_offset // file_bytes
        last = limit // file_bytes
        alive = sum(size for file, size in live.items() if first <= file < last)
        cutoff = first
        while cutoff < last and alive < _DENSE_ENOUGH * (last - cutoff) * file_bytes:
            alive -= live.get(cutoff, 0)
            cutoff += 1
        # Where all files are to be emptied, all goes up to the snapshot: an entry begins there,
        # which is known also right after opening. For the sake of one file nothing is carried.
        return limit if first < cutoff == last else cutoff * file_bytes

    def _drop_before(self, cutoff: int) -> None:
        floors = [reader.floor_offset for reader in readers.registered(self._store)]
        kept = [offset_of(path) for path in snapshot_paths(self._store)]
        offset = min([cutoff, *kept, *floors])
        start = self._journal.entry_before(offset)
        if start > self._segments.first_offset:
            self._segments.drop_before(start, archive=self._archive)


def _numbers(queue: QueueState, next_number: int) -> Sequence[int]:
    """Numbers among which are those of all messages in the queue, and of none yet to come.

    A list of a million takes tens of milliseconds, and the collector goes through it again; so
    where most numbers in a range are messages of this queue, the range will do.
    """
    deliveries = queue.deliveries
    if len(deliveries) > SLICE:
        # Messages arrive in the order of their numbers, unless they come from another queue.
        lowest = min(next(iter(deliveries)), queue.lowest_moved)
        if next_number - lowest <= _SPARSE * len(deliveries):
            return range(lowest, next_number)
    return list(deliveries)


def _at_once(step: Callable[[], object]) -> object:
    return step()
