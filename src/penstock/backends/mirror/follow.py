"""Follows the journal of a store and repeats its events on a mirror.

At the first start the messages in the store are copied: its state is restored from a snapshot and
the journal, in this process. From there on, events are read as they become durable. Only files are
read: the store is not locked, and the process that holds it receives no requests. A named reader
keeps journal files from being dropped before they were read.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Final, NamedTuple

from penstock.backends.mirror.batches import MESSAGE_EVENTS, EventBatch
from penstock.backends.mirror.calls import ITEMS_MAX, slices
from penstock.backends.mirror.state import MirrorFile, require_store, wall_clock_ms
from penstock.backends.mirror.target import MirrorTarget
from penstock.core.delivery import IN_FLIGHT, Delivery
from penstock.core.events import (
    AnyEvent,
    Moved,
    Pushed,
    QueueConfigured,
    QueueCreated,
    QueuePurged,
    QueueRemoved,
)
from penstock.core.shard import ShardState
from penstock.errors import CorruptEntry, InvalidField, StoreUnusable
from penstock.journal import codec, reader_positions
from penstock.journal.entry import StoredEntry
from penstock.journal.place import position_of
from penstock.journal.reader import JournalReader
from penstock.journal.restore import Recovery, newest_snapshot
from penstock.journal.store import open_reader
from penstock.service import QueueService

_GATHER_S: Final = 0.02
_SAVE_S: Final = 1.0
_SEARCH_S: Final = 10.0
# How often messages that were not found are searched again.
_SEARCHES_MAX: Final = 30


class MirrorProgress(NamedTuple):
    """The position of a mirror in the primary's journal, and what it has done.

    `behind_bytes` is the size of the durable events that are not mirrored yet, also while the other
    service cannot be reached; `behind_ms` is the age of the oldest of them. `late_ms` is how old
    the last mirrored events were when they were mirrored.
    """

    position: int
    behind_bytes: int
    behind_ms: int
    late_ms: int
    pushed: int
    deleted: int
    refused: int
    unmatched: int
    error: str | None


class MirrorFollower:
    """A mirror of one store. Not thread-safe, except for `progress`."""

    def __init__(
        self,
        path: str,
        service: QueueService,
        name: str = "mirror",
        pause: Callable[[float], None] = time.sleep,
        now_ms: Callable[[], int] = wall_clock_ms,
        target: str = "",
        *,
        has_moved: bool = False,
    ) -> None:
        """Raises StoreUnusable, StoreInUse or InvalidField; then the service is closed.

        `pause` is called while there is nothing to do; it may raise to end the mirror. `now_ms` is
        the primary's clock. `target` and `has_moved` are as in `MirrorFile.read`.
        """
        with ExitStack() as undo:
            undo.callback(service.close)
            self._store = require_store(path)
            self._file = MirrorFile(self._store, name)
            undo.callback(self._file.close)
            self._reader: JournalReader = open_reader(path)
            undo.callback(self._reader.close)
            journal = self._reader.identity.hex()
            self._state = self._file.read(journal, target, has_moved=has_moved)
            undo.pop_all()
        self._pause = pause
        self._now_ms = now_ms
        self._target = MirrorTarget(service, self._state, pause, now_ms)
        # Pushes up to this offset may have been made by an earlier process that was killed.
        self._uncertain_end = 0
        # The offset at which the next step begins to read; None: where the last one ended.
        self._start_offset: int | None = None
        self._is_amid_step = False
        # Whether the last step ended because its batch was full.
        self._has_more = False
        # The time of the oldest event of the current step; 0 between steps.
        self._step_event_ms = 0
        self._late_ms = 0
        self._saved_s = 0.0
        self._search_at_s = time.monotonic() + _SEARCH_S
        self._searches = 0
        self.is_started = False

    # Starting.

    def start(self) -> None:
        """Copies the store at the first start; later resumes. Raises PenstockError."""
        state = self._state
        if state.is_complete:
            self._resume()
        else:
            self._copy_all()
        self._target.uncertain |= set() if state.is_clean else set(state.queues.values())
        self._save()
        self.is_started = True

    def _resume(self) -> None:
        position = self._state.position
        if not self._reader.first_offset <= position <= self._reader.durable_offset:
            raise StoreUnusable(
                f"{self._store}: the mirror stopped at offset {position}, which the journal no "
                "longer has; the mirror's reader was removed. To start again, remove the "
                f"mirror's queues and the file mirrors/{self._file.name}.json"
            )
        if not self._state.is_clean:
            self._uncertain_end = self._reader.durable_offset
        self._start_offset = position

    def _copy_all(self) -> None:
        """Creates the primary's queues on the mirror, with their current messages."""
        target, state, file = self._target, self._state, self._file
        # Before the state is restored, so that no file that it needs is dropped meanwhile.
        reader_positions.register(
            self._store, file.name, self._reader.first_offset, wall_clock_ms()
        )
        for name in state.queues.values():
            # A copy that was interrupted starts again.
            target.remove(name)
        shard = self._restore()
        state.queues = {}
        for queue in shard.queues.values():
            if not target.is_empty(queue.name):
                raise InvalidField(
                    f"mirror: its queue {queue.name!r} has messages already; purge or remove it "
                    "there, or mirror to another service"
                )
        state.queues = {queue.number: queue.name for queue in shard.queues.values()}
        file.save(state)
        for queue in shard.queues.values():
            target.create(queue.name, queue.settings)
            ordered = sorted(queue.deliveries.values(), key=lambda each: each.rank)
            for some in slices(ordered, ITEMS_MAX):
                target.push(queue.name, list(self._contents(some)))
            in_flight = [each for each in ordered if each.state == IN_FLIGHT]
            for some in slices(in_flight, ITEMS_MAX):
                target.hide(queue.name, {each.number: each.due_at_ms for each in some})
        state.position = self._reader.position
        state.is_complete = True
        state.is_clean = True

    def _restore(self) -> ShardState:
        """The state of the store at the watermark, which is then the reader's position."""
        reader = self._reader
        reader.refresh()
        taken = newest_snapshot(self._store, reader.first_offset, reader.durable_offset)
        recovery = Recovery(taken)
        start = reader.first_offset if taken is None else taken.outline.offset
        for entry in reader.entries(start):
            if entry.version == codec.VERSION:
                recovery.apply_entry(entry)
        return recovery.finish()

    def _contents(self, deliveries: Iterable[Delivery]) -> Iterator[Pushed]:
        for delivery in deliveries:
            content = delivery.content
            if isinstance(content, int):
                try:
                    content = self._load(content)
                except CorruptEntry:
                    continue
            yield Pushed(
                content.at_ms,
                delivery.queue,
                delivery.number,
                content.body,
                content.attributes,
                delivery.priority,
                delivery.group,
                None,
                # The end of its delay; the end of a claim is not one.
                delivery.due_at_ms if delivery.due_at_ms and delivery.state != IN_FLIGHT else 0,
                0,
                content.context,
                content.size_bytes,
            )

    def _load(self, place: int) -> Pushed:
        """The content of a message. Raises CorruptEntry."""
        offset = position_of(place)
        fields = codec.read_header(self._reader.read(offset, codec.EVENT_BYTES))
        payload = self._reader.read(offset + fields.payload_at, fields.payload_bytes)
        return codec.read_pushed(fields, payload, offset)

    # Following.

    def step(self) -> bool:
        """Mirrors the next durable events; returns False if there are none."""
        reader = self._reader
        reader.refresh()
        self._is_amid_step = True
        batch = EventBatch()
        any_entry = self._has_more = False
        done_events = self._state.done_events
        for entry in reader.entries(self._start_offset):
            any_entry = True
            batch = self._add_entry(batch, entry, done_events)
            done_events = 0
            if batch.is_full:
                self._has_more = True
                break
        self._start_offset = None
        self._apply(batch)
        if reader.position >= self._uncertain_end:
            self._uncertain_end = 0
            self._target.end_uncertainty()
        self._target.recover()
        self._state.position = reader.position
        self._state.done_events = 0
        self._is_amid_step = False
        if self._step_event_ms:
            self._late_ms = max(0, self._now_ms() - self._step_event_ms)
            self._step_event_ms = 0
        self._save_and_search()
        return any_entry

    def _add_entry(self, batch: EventBatch, entry: StoredEntry, done_events: int) -> EventBatch:
        """Adds an entry's events to a batch, except the first `done_events`.

        An event about a queue, or a move of messages, is applied alone: after the batch before it,
        and then the state is saved. Returns the batch that is not applied yet.
        """
        events = [event for event, _ in self._reader.plain(entry)]
        place = done_events
        while place < len(events):
            event = events[place]
            self._step_event_ms = self._step_event_ms or event.at_ms
            place += 1
            if type(event) in MESSAGE_EVENTS:
                batch.add(event)
                continue
            batch = self._apply(batch)
            if type(event) is Moved:
                place = self._move(events, place - 1)
            elif not self._apply_queue_event(event):
                continue
            self._state.position = entry.offset
            self._state.done_events = place
            self._save(is_floor=False)
        return batch

    def _apply(self, batch: EventBatch) -> EventBatch:
        """Repeats the events of a batch on the mirror; returns an empty batch."""
        for number, queue in batch.queues.items():
            name = self._state.queues.get(number)
            if name is not None:
                self._target.apply(name, queue)
        return batch if not batch.queues else EventBatch()

    def _apply_queue_event(self, event: AnyEvent) -> bool:
        """Repeats an event about a queue; returns whether the state must be saved."""
        queues, target = self._state.queues, self._target
        if isinstance(event, QueueCreated):
            queues[event.queue] = event.name
            target.create(event.name, event.settings)
            return True
        name = queues.get(event.queue)
        if name is None:
            return False
        if isinstance(event, QueueConfigured):
            target.configure(name, event.settings)
        elif isinstance(event, QueuePurged):
            target.purge(name)
        elif isinstance(event, QueueRemoved):
            del queues[event.queue]
            target.remove(name)
        return isinstance(event, QueuePurged | QueueRemoved)

    def _move(self, events: list[AnyEvent], place: int) -> int:
        """Repeats the moves between the same two queues from `place` on; returns their end."""
        first = events[place]
        assert isinstance(first, Moved)
        ranks: dict[int, int] = {}
        while place < len(events):
            event = events[place]
            if not isinstance(event, Moved) or (event.queue, event.to) != (first.queue, first.to):
                break
            ranks[event.number] = event.rank
            place += 1
        names = self._state.queues
        if first.queue in names and first.to in names:
            self._target.move(names[first.queue], names[first.to], ranks)
        return place

    def _save_and_search(self) -> None:
        """Saves the state and searches for missing messages, if it is time for either."""
        now_s = time.monotonic()
        if now_s - self._saved_s > _SAVE_S:
            self._save()
        if now_s > self._search_at_s:
            self._searches = self._searches + 1 if self._target.has_missing else 0
            self._target.search_missing(forget=self._searches >= _SEARCHES_MAX)
            self._target.forget_old_deletes()
            self._search_at_s = now_s + _SEARCH_S

    def catch_up(self) -> None:
        """Mirrors all events that are durable now."""
        while self.step():
            pass

    def run(self) -> None:
        """Follows the journal until `pause` raises."""
        while True:
            self.step()
            # The pause lets events gather: a batch costs little more than a single event.
            self._pause(0 if self._has_more else _GATHER_S)

    # Progress and closing.

    @property
    def progress(self) -> MirrorProgress:
        """The mirror's position and counts; safe to read from another thread."""
        counts = self._target.counts
        position = self._state.position
        behind = max(0, self._reader.writer_offset() - position)
        oldest_ms = self._step_event_ms
        behind_ms = max(0, self._now_ms() - oldest_ms) if oldest_ms else 0
        error = counts.last_error
        return MirrorProgress(
            position,
            behind,
            behind_ms,
            self._late_ms,
            counts.pushed,
            counts.deleted,
            counts.refused,
            counts.unmatched,
            None if error is None else f"{type(error).__name__}: {error}",
        )

    def _save(self, *, is_clean: bool = False, is_floor: bool = True) -> None:
        self._state.held = self._target.held(is_last=is_clean)
        self._file.save(self._state, is_clean=is_clean, is_floor=is_floor)
        self._saved_s = time.monotonic()

    def close(self) -> None:
        """Saves the state and closes everything, the mirror's service too."""
        try:
            if self.is_started:
                self._save(is_clean=not self._is_amid_step)
        finally:
            self._reader.close()
            self._file.close()
            self._target.close()
