"""Upkeep while the engine is running: takes snapshots, carries old content, drops files.

A pass goes over all messages a slice at a time, by their numbers. Each slice is taken exclusively,
in well under the 50 ms for which commands may be delayed; changes between the slices are in the
journal, and a replay applies those that the slices do not contain (`core.replay`). Messages whose
content is in an old region, where most messages were deleted, are appended again (carried), so that
the region can be dropped: the disk holds at most about twice the size of the messages.

A pass is due when the journal has grown, or when many of its messages were deleted. While no
command comes, what is due is settled here, and made durable for those who read the journal.
Nothing is dropped behind the snapshot before the newest one, or behind a registered reader's floor.
Before a drop, `QueueStated` is appended for every queue, so that the events that remain still have
their queues' names.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from penstock.backends.engine.engine import Engine
from penstock.core.delivery import OUTBOX, Delivery, size_bytes
from penstock.core.events import AnyEvent, Carried, QueueStated
from penstock.core.pieces import NumberPieces
from penstock.core.queue import QueueState
from penstock.errors import CorruptEntry, PenstockError, StoreFull
from penstock.journal import StoredJournal, reader_positions
from penstock.journal.place import pack_place, position_of
from penstock.journal.snapshot import (
    Outline,
    SnapshotWriter,
    offset_of,
    pack_dedups,
    pack_slice,
    snapshot_paths,
)

T = TypeVar("T")

SLICE: Final = 4_000
# A range of numbers is used in place of a list if at least one in so many is a message's.
_SPARSE: Final = 8
CARRY_BYTES_MAX: Final = 4 * 1024 * 1024
CARRY_MESSAGES_MAX: Final = 1_000
GROWTH_BYTES_MIN: Final = 32 * 1024 * 1024
# A pass is due when the journal has grown by this part of the messages' size, so that the next
# opening has little to replay compared with the snapshot.
_GROWTH_PART: Final = 8
# A pass carries this part of the messages' size at most, and the next one follows at once. What is
# carried is on the disk twice until the pass ends, so carrying all of it could double the journal.
_CARRY_PART: Final = 8
# Roughly what the journal needs for a message beside its content: the headers of its events.
MESSAGE_BYTES: Final = 320
DENSE_ENOUGH: Final = 2 / 3
_RETRY_S: Final = 5.0
# How often it looks whether something is due in a store that nobody uses, or can be freed.
_CHECK_S: Final = 0.5
_SNAPSHOT_BYTES_MIN: Final = 1024 * 1024
_INDEX_PAUSE_RATIO: Final = 10
_INDEXED: Final = object()
# How many QueueStated events are in one entry, and the room for each.
_STATED_QUEUES_MAX: Final = 200
_STATED_BYTES_MAX: Final = 4_096


class Upkeep:
    """The upkeep of one engine and its journal; runs in a thread of its own."""

    def __init__(
        self, engine: Engine, journal: StoredJournal, store: Path, archive: Path | None
    ) -> None:
        self._engine = engine
        self._journal = journal
        self._store = store
        self._archive = archive
        self._woken = threading.Event()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._exclusive: Callable[[Callable[[], object]], object] = _at_once
        # What of the journal is still to be indexed for histories.
        self._unindexed: Iterator[None] | None = None
        # The position up to which this pass carries content; lowered if there is no room.
        self._cutoff = 0
        # Whether this pass has left content to be carried by the next one.
        self._is_partial = False
        # The live bytes when the journal was last shrunk, or the most since then; unknown at first.
        self._live_bytes_max = 1 << 62
        # Why the last pass failed; None if it did not.
        self.last_error: Exception | None = None
        self._journal.grown = self._woken.set
        self._journal.set_message_counter(self._count_messages)
        newest = snapshot_paths(store)
        self._last_snapshot_at = offset_of(newest[0]) if newest else self._journal.first_position
        self._plan_next()

    def start(
        self, exclusive: Callable[[Callable[[], object]], object], *, indexes: bool = False
    ) -> None:
        """Begins; `exclusive` runs a function while no other thread uses the engine.

        With `indexes`, what the journal had at the start is indexed, so that the first question for
        a message's history need not read all of it.
        """
        self._exclusive = exclusive
        if indexes:
            self._unindexed = self._journal.index_rest()
        self._thread = threading.Thread(target=self._run, name="penstock-upkeep", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, and takes a last snapshot so that the next start is fast.

        A pass that is running is abandoned, which does no harm; so is a last one that fails.
        """
        self._ending.set()
        self._woken.set()
        if self._thread is not None:
            self._thread.join()
        self._ending.clear()
        if self._journal.end_position - self._last_snapshot_at > _SNAPSHOT_BYTES_MIN:
            with suppress(PenstockError):
                self.run_pass()

    def _run(self) -> None:
        while not self._ending.is_set():
            is_woken = self._woken.wait(_CHECK_S)
            self._woken.clear()
            if self._ending.is_set():
                return
            try:
                if self._engine.has_due_work:
                    self._settle_all()
                if is_woken:
                    self.run_pass()
                elif self._is_worth_shrinking():
                    self._shrink()
                else:
                    self._index_some()
                    continue
                self.last_error = None
            except Exception as error:
                # Most likely a full disk. The engine goes on, and upkeep tries again later.
                self.last_error = error
                if not self._ending.wait(_RETRY_S):
                    self._woken.set()

    def _index_some(self) -> None:
        """Indexes slices of the journal until there is other work; takes a tenth of the time."""
        while self._unindexed is not None and not self._woken.is_set():
            began_s = time.perf_counter()
            if self._run_exclusively(partial(next, self._unindexed, _INDEXED)) is _INDEXED:
                self._unindexed = None
            self._woken.wait(_INDEX_PAUSE_RATIO * (time.perf_counter() - began_s))

    def _settle_all(self) -> None:
        """Settles what is due, some at a time; a server on an event loop has done so before."""
        while self._engine.has_due_work and not self._ending.is_set():
            self._run_exclusively(self._engine.tick)
        self._journal.sync()

    def _is_wasteful(self) -> bool:
        """Whether the journal is much larger than its live messages."""
        stream_bytes = self._journal.end_position - self._journal.first_position
        return stream_bytes > 2 * self._live_bytes() + 2 * GROWTH_BYTES_MIN

    def _is_worth_shrinking(self) -> bool:
        """Whether so much was deleted since the last try that another one may free room.

        A few deletes can free gigabytes, and the journal may then not grow for a long time.
        """
        live_bytes = self._live_bytes()
        self._live_bytes_max = max(self._live_bytes_max, live_bytes)
        has_left = self._live_bytes_max - live_bytes >= GROWTH_BYTES_MIN
        return has_left and self._is_wasteful()

    def _shrink(self) -> None:
        """Runs passes until the room of deleted messages is free, as far as readers permit."""
        self._live_bytes_max = self._live_bytes()
        self.run_pass()
        if self._is_wasteful() and not self._ending.is_set():
            # Files are dropped up to the snapshot before the newest. One more entry allows one
            # more snapshot, behind all deleted messages.
            self._run_exclusively(self._append_another)
            self.run_pass()

    def _append_another(self) -> None:
        """Appends an entry that changes nothing: the settings of one of the queues.

        Without any queue it has no events, and an audit counts it as missing.
        """
        numbers = list(self._engine.shard.queues)[:1]
        if numbers:
            self._append_stated(numbers)
        else:
            self._journal.ensure_room(0)
            self._journal.append(())

    def _plan_next(self) -> None:
        live_bytes = self._live_bytes()
        self._live_bytes_max = max(self._live_bytes_max, live_bytes)
        # Sooner if a third of the journal is not needed: the next pass may free some of it.
        journal_bytes = self._journal.end_position - self._journal.first_position
        is_dense = live_bytes >= DENSE_ENOUGH * journal_bytes
        growth = max(GROWTH_BYTES_MIN, live_bytes // _GROWTH_PART // (1 if is_dense else 2))
        self._journal.growth_limit = self._journal.end_position + growth

    def _count_messages(self) -> int:
        shard = self._engine.shard
        count = sum(len(queue.deliveries) for queue in list(shard.queues.values()))
        return count + len(shard.departed.deliveries)

    def _live_bytes(self) -> int:
        shard = self._engine.shard
        stored_bytes = sum(queue.stored_bytes for queue in list(shard.queues.values()))
        return stored_bytes + shard.departed.stored_bytes + MESSAGE_BYTES * self._count_messages()

    @property
    def is_due(self) -> bool:
        """Whether the journal has grown enough for a pass since the last one began."""
        return self._woken.is_set()

    def run_pass(self) -> None:
        """Takes a snapshot, carries old content forward, and drops what is no longer needed."""
        for _ in self.pass_steps():
            # Yield the interpreter to the threads that answer: a pass is never urgent.
            time.sleep(0)

    def pass_steps(self) -> Iterator[None]:
        """A pass in steps, for a caller without a thread: commands may run between the steps."""
        self._woken.clear()
        shard = self._engine.shard
        before = snapshot_paths(self._store)
        previous_offset = offset_of(before[0]) if before else self._journal.first_position
        writer: SnapshotWriter | None = None
        try:
            outline, numbers, dedups = self._run_exclusively(self._begin)
            limit = min(previous_offset, outline.offset)
            self._cutoff = yield from self._find_cutoff(numbers, limit)
            writer = SnapshotWriter(self._store, outline, syncs=self._journal.syncs_snapshots)
            for step in self._snapshot_steps(outline, numbers, dedups):
                if self._ending.is_set():
                    writer.abandon()
                    return
                if step is not None:
                    writer.add(self._run_exclusively(step))
                yield
            self._journal.sync()
            writer.finish()
            self._last_snapshot_at = outline.offset
        except BaseException:
            if writer is not None:
                writer.abandon()
            raise
        finally:
            shard.moves = None
            self._plan_next()
        before_drop = self._journal.first_position
        self._drop_before(self._cutoff)
        # If a reader holds the files, the next pass would only carry the same content again.
        if self._is_partial and self._journal.first_position > before_drop:
            self._woken.set()

    def _snapshot_steps(
        self,
        outline: Outline,
        numbers: dict[int, Sequence[int]],
        dedups: dict[int, tuple[int, int]],
    ) -> Iterator[Callable[[], bytes] | None]:
        """The slices of a snapshot, each to be taken exclusively; content is carried in between.

        None after a step that has carried content, if more is left.
        """
        for queue, (first, end) in dedups.items():
            for at in range(first, end, SLICE):
                yield partial(self._take_dedups, queue, at, min(at + SLICE, end), outline)
        for queue, listed in numbers.items():
            for at in range(0, len(listed), SLICE):
                part = listed[at : at + SLICE]
                while not self._ending.is_set() and self._carry_some(queue, part):
                    yield None
                yield partial(self._take_slice, queue, part)

    def _run_exclusively(self, step: Callable[[], T]) -> T:
        def unless_stopped() -> T:
            # The state of an engine that has stopped may differ from its journal.
            self._engine.check()
            self._journal.check_usable()
            return step()

        return self._exclusive(unless_stopped)  # type: ignore[return-value]

    def _begin(
        self,
    ) -> tuple[Outline, dict[int, Sequence[int]], dict[int, tuple[int, int]]]:
        """The outline; of each queue, the numbers of its messages and the span of its dedup ids."""
        shard = self._engine.shard
        shard.moves = NumberPieces({})
        outline = Outline(
            self._journal.end_position,
            self._engine.clock.now_ms(),
            shard.outline(with_dedups=False),
            self._journal.shard,
            self._journal.term,
        )
        numbers = {
            queue.number: _numbers(queue, shard.next_number) for queue in shard.queues.values()
        }
        numbers[OUTBOX] = list(shard.departed.deliveries)
        dedups = {queue.number: queue.dedups.indexes() for queue in shard.queues.values()}
        return outline, numbers, dedups

    def _listed(self, queue: int, numbers: Sequence[int]) -> list[Delivery]:
        """The messages that were in the queue when the pass began, in whichever queue they are."""
        shard = self._engine.shard
        moves = shard.moves
        if not moves:
            get = shard.deliveries_in(queue).get
            return [found for number in numbers if (found := get(number)) is not None]
        deliveries = []
        for number in numbers:
            origin, now_in = moves.get(number, (queue, queue))
            found = shard.deliveries_in(now_in).get(number) if origin == queue else None
            if found is not None:
                deliveries.append(found)
        return deliveries

    def _take_slice(self, queue: int, numbers: Sequence[int]) -> bytes:
        return pack_slice(self._listed(queue, numbers))

    def _take_dedups(self, number: int, first: int, end: int, outline: Outline) -> bytes:
        queue = self._engine.shard.queues.get(number)
        entries = [] if queue is None else queue.dedups.entries_between(first, end)
        # Ids of later messages are in the journal behind the outline.
        before = outline.shard.next_number
        return pack_dedups(number, [entry for entry in entries if entry[2] < before])

    def _carry_some(self, queue: int, numbers: Sequence[int]) -> bool:
        """Carries as many of these messages as one exclusive step may; returns if any is left."""
        if self._cutoff <= self._journal.first_position:
            return False
        with suppress(StoreFull):
            # Outside the exclusive step, because making a file takes time.
            self._journal.prepare_room()
        return self._run_exclusively(partial(self._carry, queue, numbers))

    def _carry(self, queue: int, numbers: Sequence[int]) -> bool:
        """Appends the content of messages in old regions again, at the end of the journal."""
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
                # Damaged content is not carried; the next pull of the message makes it Lost.
                continue
            departed_from = delivery.move if delivery.queue == OUTBOX else None
            source = delivery.queue if departed_from is None else departed_from.source
            carried.append(Carried(now_ms, source, delivery.number, pushed))
            moving.append(delivery)
            size += pushed.size_bytes
        if not carried:
            return False
        try:
            self._append_carried(carried, moving)
        except StoreFull:
            # The file of content that cannot be carried stays; those before it can be dropped.
            self._cutoff = min(
                position_of(each.content) for each in moving if isinstance(each.content, int)
            )
            return True
        return not is_all

    def _append_carried(self, carried: list[AnyEvent], moving: list[Delivery]) -> None:
        size = sum(
            event.pushed.size_bytes + 2_048 for event in carried if isinstance(event, Carried)
        )
        self._journal.ensure_room(size)
        _, places = self._journal.append(carried)
        for delivery, place in zip(moving, places, strict=True):
            delivery.content = place

    def _find_cutoff(
        self, numbers: dict[int, Sequence[int]], limit: int
    ) -> Generator[None, None, int]:
        """The position up to which the journal is to be emptied, at most `limit`; in steps."""
        journal = self._journal
        self._is_partial = False
        live_bytes = self._live_bytes()
        if live_bytes >= DENSE_ENOUGH * (journal.end_position - journal.first_position):
            return journal.first_position
        region_bytes = journal.region_bytes
        live: dict[int, int] = {}
        for queue, listed in numbers.items():
            for at in range(0, len(listed), SLICE):
                for delivery in self._listed(queue, listed[at : at + SLICE]):
                    content = delivery.content
                    if isinstance(content, int):
                        region = position_of(content) // region_bytes
                        live[region] = live.get(region, 0) + size_bytes(delivery) + MESSAGE_BYTES
                if at + SLICE < len(listed):
                    yield
        wanted = choose_cutoff(live, journal.first_position, limit, region_bytes)
        carried_bytes_max = max(GROWTH_BYTES_MIN, live_bytes // _CARRY_PART)
        cutoff = limit_cutoff(live, journal.first_position, wanted, region_bytes, carried_bytes_max)
        self._is_partial = cutoff < wanted
        return cutoff

    def _drop_before(self, cutoff: int) -> None:
        floors = [reader.floor_offset for reader in reader_positions.registered(self._store)]
        kept = [offset_of(path) for path in snapshot_paths(self._store)]
        start = self._journal.entry_before(min([cutoff, *kept, *floors]))
        if start > self._journal.first_position:
            self._state_queues()
            self._journal.drop_before(start, self._archive)

    def _state_queues(self) -> None:
        """Appends QueueStated for every queue: its QueueCreated may be about to be dropped."""
        numbers = list(self._engine.shard.queues)
        for at in range(0, len(numbers), _STATED_QUEUES_MAX):
            part = numbers[at : at + _STATED_QUEUES_MAX]
            # If there is no room even for this, the files must be dropped to make some.
            with suppress(StoreFull):
                self._run_exclusively(partial(self._append_stated, part))
        self._journal.sync()

    def _append_stated(self, numbers: Sequence[int]) -> None:
        now_ms = self._engine.clock.now_ms()
        queues = self._engine.shard.queues
        stated: list[AnyEvent] = [
            QueueStated(
                now_ms,
                queue.number,
                queue.name,
                queue.settings,
                queue.created_at_ms,
                queue.configured_at_ms,
            )
            for number in numbers
            if (queue := queues.get(number)) is not None
        ]
        if stated:
            self._journal.ensure_room(_STATED_BYTES_MAX * len(stated), reserved=True)
            self._journal.append(stated)


def choose_cutoff(
    live_bytes: Mapping[int, int], first_position: int, limit: int, region_bytes: int
) -> int:
    """The position before which content should be carried: the rest has few deleted messages.

    `live_bytes` is the size of the messages in each region, by its number. `limit`, where an entry
    begins, is the largest result. The first position means that nothing need be carried.
    """
    first = first_position // region_bytes
    last = limit // region_bytes
    alive = sum(size for region, size in live_bytes.items() if first <= region < last)
    cutoff = first
    while cutoff < last and alive < DENSE_ENOUGH * (last - cutoff) * region_bytes:
        alive -= live_bytes.get(cutoff, 0)
        cutoff += 1
    if cutoff == first:
        return first_position
    # If all regions are to be emptied, the limit is the result: an entry is known to begin there,
    # even right after opening.
    return limit if cutoff == last else cutoff * region_bytes


def limit_cutoff(
    live_bytes: Mapping[int, int],
    first_position: int,
    cutoff: int,
    region_bytes: int,
    carried_bytes_max: int,
) -> int:
    """The cutoff, or an earlier one before which no more content than this is to be carried.

    It is behind at least one region with content, so that every pass frees something.
    """
    carried_bytes = 0
    region = first_position // region_bytes
    while region * region_bytes < cutoff:
        live = live_bytes.get(region, 0)
        if live and carried_bytes and carried_bytes + live > carried_bytes_max:
            return region * region_bytes
        carried_bytes += live
        region += 1
    return cutoff


def _numbers(queue: QueueState, next_number: int) -> Sequence[int]:
    """The numbers of all messages in the queue, perhaps with others, but none of later messages.

    A list of a million takes tens of milliseconds, and the garbage collector scans it again. If
    many numbers of a range are messages of this queue, the range is returned instead.
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
