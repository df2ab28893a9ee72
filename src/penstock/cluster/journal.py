"""The journal of a shard on the replicated log: collects entries into extents.

The engine appends entries at any rate. While one extent is being appended to the log, new entries
wait here; together they are the next extent. Only one append is in flight at a time (rule 5 of
`log`), so load makes extents larger, not more frequent. This class does no I/O on the log:
`next_extent` returns what to append, and `takeover.append_steps` reports the result by `kept` or
`fail`.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from penstock.cluster.extent import OVERHEAD_BYTES, ChainPoint, Extent, pack_extent
from penstock.cluster.log import EXTENT_BYTES_MAX, LogFull, Unanswered
from penstock.cluster.stream_copy import StreamCopy
from penstock.core.events import AnyEvent, Pushed
from penstock.core.runs import Run
from penstock.errors import (
    CorruptEntry,
    JournalError,
    Overloaded,
    PenstockError,
)
from penstock.journal import codec, concerns
from penstock.journal.entry import HEADER_BYTES, join, unpack_header
from penstock.journal.place import pack_place, position_of
from penstock.service import Command

DATA_BYTES_MAX: Final = EXTENT_BYTES_MAX - OVERHEAD_BYTES
# If more waits for the log, commands are refused: without a majority, nothing can be appended.
WAITING_BYTES_MAX: Final = 64 * 1024 * 1024
MARK_BYTES: Final = 1024 * 1024
# Larger than any position: all of a stream without an archive may be dropped.
NO_ARCHIVE: Final = 1 << 62
_RECENT_MAX: Final = 1_024
_RECENT_BYTES_MAX: Final = 8_192


class ReplicatedJournal:
    """A `StoredJournal` whose entries become durable in the slots of a replicated log."""

    keeps_nothing = False
    # A snapshot is stored in the log. Its local file is temporary, and is written by the owner's
    # event loop, which must not wait for a disk.
    syncs_snapshots = False

    def __init__(
        self,
        shard: int,
        term: int,
        contents: StreamCopy,
        end: ChainPoint,
        marks: Sequence[ChainPoint] = (),
        mark_bytes: int = MARK_BYTES,
    ) -> None:
        """`end` is the point of the next extent; `marks` are earlier points to begin reading at.

        There is a mark every `mark_bytes`: the log is purged up to a mark.
        """
        self.shard = shard
        self.term = term
        self.durable_sequence = end.sequence - 1
        self.slot = end.slot - 1
        self.failure: PenstockError | None = None
        # Up to where the archive is durable; nothing after it is dropped.
        self.archived_position = NO_ARCHIVE
        # The revision of the register that ended the archive of the cluster; 0 if none did.
        self.archive_ended = 0
        # Why the extent in flight is not durable yet; None if its first attempt is under way. A
        # full log stays the reason: while NATS elects leaders, later attempts get no answer.
        self.delay: Unanswered | None = None
        # Called when there is something to append and there was nothing before.
        self.wake: Callable[[], object] = _nothing
        # Called whenever an extent has become durable.
        self.advanced: Callable[[], object] = _nothing
        self.growth_limit = 1 << 62
        self.grown: Callable[[], None] = _nothing
        self._contents = contents
        self._sequence = end.sequence
        self._marks = deque(marks)
        self._mark_bytes = mark_bytes
        # Parts of the stream that are in no extent yet, each with the sequence of its entry.
        self._unsent: deque[tuple[bytes, int]] = deque()
        self._unsent_bytes = 0
        self._sent_position = end.position
        self._sent_is_whole = True
        # The extent in flight; the sequence and position at its end, and whether it ends an entry.
        self._sending: bytes | None = None
        self._sending_ends = (0, 0, True)
        self._waiting: list[tuple[int, Callable[[], object]]] = []
        # Callbacks for when the next extent, and the one in flight, are durable or have failed.
        self._to_confirm: list[Callable[[], object]] = []
        self._confirming: list[Callable[[], object]] = []
        self._recent: dict[int, Pushed] = {}

    # For the engine: `Journal`.

    def append(self, events: Sequence[AnyEvent]) -> tuple[int, Sequence[int]]:
        if self.failure is not None:
            raise self.failure
        data_position = self._contents.end_position + HEADER_BYTES
        pushed: Sequence[Pushed]
        places: list[int]
        if type(events) is Run:
            block = codec.encode_run(events, self.shard, self.term)
            pushed, places = events, codec.places_of(events, data_position)
        else:
            block, messages = codec.encode(events, self.shard, self.term)
            pushed = [event for event in events if type(event) is Pushed]
            places = [pack_place(data_position + at, size) for at, size in messages]
        sequence = self._sequence
        packed = join(codec.VERSION, sequence, block, b"")
        self._contents.append(packed)
        self._sequence += 1
        is_first = not self._unsent and self._sending is None
        self._unsent.append((packed, sequence))
        self._unsent_bytes += len(packed)
        if len(pushed) == len(places):
            self._cache_recent(pushed, places)
        if data_position > self.growth_limit:
            self.growth_limit = 1 << 62
            self.grown()
        if is_first:
            self.wake()
        return sequence, places

    def _cache_recent(self, pushed: Sequence[Pushed], places: list[int]) -> None:
        recent = self._recent
        if len(recent) + len(places) > _RECENT_MAX:
            recent.clear()
        for place, event in zip(places[:_RECENT_MAX], pushed, strict=False):
            if event.size_bytes <= _RECENT_BYTES_MAX:
                recent[place] = event

    def make_room(self, command: Command[Any]) -> None:
        if self._unsent_bytes > WAITING_BYTES_MAX:
            raise Overloaded(
                f"shard {self.shard}: {self._unsent_bytes} bytes wait for the replicated log "
                f"(limit {WAITING_BYTES_MAX}); NATS has no majority, or is slower than the pushes; "
                "try again later"
            )

    def has_room(self, events: int) -> bool:
        return self._unsent_bytes <= WAITING_BYTES_MAX

    def load(self, place: int) -> Pushed:
        recent = self._recent.get(place)
        if recent is not None:
            return recent
        position = position_of(place)
        try:
            fields = codec.read_header(self._contents.read(position, codec.EVENT_BYTES))
            payload = self._contents.read(position + fields.payload_at, fields.payload_bytes)
            return codec.read_pushed(fields, payload, position)
        except CorruptEntry as error:
            # Only the local copy is damaged: the log has the message. The shard ends here, and is
            # taken over again, by this node or another.
            self.fail(JournalError(f"shard {self.shard}: {error}; the shard is restarted"))
            raise self.failure or error from error

    def wait(self, sequence: int) -> None:
        """Raises JournalError if the entry is not durable; it does not wait for that."""
        if sequence > self.durable_sequence:
            raise self.failure or JournalError(
                f"shard {self.shard}: entry {sequence} is not in the replicated log yet"
            )

    def notify(self, sequence: int, done: Callable[[], None]) -> None:
        if sequence <= self.durable_sequence or self.failure is not None:
            done()
        else:
            self._waiting.append((sequence, done))

    def history(self, number: int) -> Iterator[AnyEvent | None]:
        for data, data_position in self._blocks():
            events = codec.decode_number(data, data_position, number)
            yield from (event for event in events if concerns(event, number))
            yield None

    def index_rest(self) -> Iterator[None]:
        """Nothing: the local copy is read as it is."""
        return iter(())

    def _blocks(self) -> Iterator[tuple[bytes, int]]:
        position = self._contents.first_position
        while position < self._contents.end_position:
            header = unpack_header(self._contents.read(position, HEADER_BYTES))
            if header is None:
                raise CorruptEntry(f"the local copy of the stream is damaged at {position}")
            yield (
                self._contents.read(position + HEADER_BYTES, header.size_bytes),
                (position + HEADER_BYTES),
            )
            position += HEADER_BYTES + header.size_bytes

    def close(self) -> None:
        """Removes the local copy; entries that are not in the log yet are discarded."""
        if self.failure is None:
            self.fail(JournalError(f"shard {self.shard}: the journal was closed"))
        self._contents.close()

    # For upkeep: `StoredJournal`.

    @property
    def first_position(self) -> int:
        return self._contents.first_position

    @property
    def end_position(self) -> int:
        return self._contents.end_position

    @property
    def region_bytes(self) -> int:
        return self._mark_bytes

    def set_message_counter(self, count: Callable[[], int]) -> None:
        pass

    def check_usable(self) -> None:
        if self.failure is not None:
            raise self.failure

    def ensure_room(self, size_bytes: int, *, reserved: bool = False) -> None:
        pass

    def prepare_room(self) -> None:
        pass

    def sync(self) -> int:
        """The last durable sequence, without waiting: `snapshots.keep_snapshot` waits before it
        lists a snapshot."""
        return self.durable_sequence

    def entry_before(self, position: int) -> int:
        mark = self.mark_before(position)
        return self.first_position if mark is None else max(self.first_position, mark.position)

    def drop_before(self, position: int, archive: object = None) -> None:
        """Drops the local copy before this position; the next snapshot purges the log's slots.

        What is not archived is not dropped.
        """
        self._contents.drop_before(min(position, self.archived_position))

    def may_purge(self, archived: int) -> bool:
        """Whether slots may be purged, of a shard whose manifest has this `archived`.

        If this owner archives the shard, `archived_position` limits what is purged.
        """
        return self.archived_position != NO_ARCHIVE or archived <= self.archive_ended

    def mark_before(self, position: int) -> ChainPoint | None:
        """The last known point at or before `position` at which reading the log may begin."""
        found = None
        for mark in self._marks:
            if mark.position > position:
                break
            found = mark
        return found

    def forget_marks_before(self, slot: int) -> None:
        """Removes the marks of slots that were purged."""
        while self._marks and self._marks[0].slot < slot:
            self._marks.popleft()

    # For the owner.

    @property
    def durable_position(self) -> int:
        """The end of what the log has of the stream; it may be within an entry."""
        return self._sent_position

    def sequence_at(self, position: int) -> int:
        """The sequence of the entry that begins there. Raises CorruptEntry."""
        if position >= self._contents.end_position:
            return self._sequence
        header = unpack_header(self._contents.read(position, HEADER_BYTES))
        if header is None:
            raise CorruptEntry(f"the local copy of the stream is damaged at {position}")
        return header.entry_id

    def durable_entries(self, position: int, size_bytes: int) -> bytes:
        """Whole entries from `position` on that are in the log, about `size_bytes` of them."""
        end = position
        durable = self.durable_position
        while end < durable and end - position < size_bytes:
            header = unpack_header(self._contents.read(end, HEADER_BYTES))
            if header is None:
                raise CorruptEntry(f"the local copy of the stream is damaged at {end}")
            following = end + HEADER_BYTES + header.size_bytes
            if following > durable:
                break
            end = following
        return self._contents.read(position, end - position) if end > position else b""

    @property
    def last_sequence(self) -> int:
        """The sequence of the last entry that the engine appended, durable or not."""
        return self._sequence - 1

    @property
    def has_unsent(self) -> bool:
        """Whether an extent is in flight, or another one is to follow."""
        return bool(self._unsent or self._to_confirm) or self._sending is not None

    def confirm(self, done: Callable[[], object]) -> None:
        """Calls `done` once the next extent is durable, or the journal has failed.

        If there are no entries to append, that extent is empty. Raises the error of a journal that
        has failed.
        """
        if self.failure is not None:
            raise self.failure
        is_first = not self.has_unsent
        self._to_confirm.append(done)
        if is_first:
            self.wake()

    def next_extent(self) -> bytes | None:
        """The extent to append next; the same bytes until `kept` is called (rule 4 of `log`)."""
        if self._sending is None and (self._unsent or self._to_confirm):
            self._sending = self._make_extent()
        return self._sending

    def _make_extent(self) -> bytes:
        self._confirming, self._to_confirm = self._to_confirm, []
        unsent = self._unsent
        first = unsent[0][1] if unsent else self._sequence
        is_empty = not unsent
        reached = first - 1
        parts: list[bytes] = []
        size = 0
        while unsent and size + len(unsent[0][0]) <= DATA_BYTES_MAX:
            part, reached = unsent.popleft()
            parts.append(part)
            size += len(part)
        goes_on = not parts and not is_empty
        if goes_on:
            large, sequence = unsent.popleft()
            parts.append(large[:DATA_BYTES_MAX])
            unsent.appendleft((large[DATA_BYTES_MAX:], sequence))
            size = DATA_BYTES_MAX
        position = self._sent_position
        if self._sent_is_whole and (
            not self._marks or position - self._marks[-1].position >= self._mark_bytes
        ):
            # Void extents may take this slot first; a reader that begins here skips them.
            self._marks.append(ChainPoint(self.slot + 1, position, first, self.term))
        self._sending_ends = (reached, position + size, not goes_on)
        self._unsent_bytes -= size
        data = b"".join(parts)
        return pack_extent(Extent(self.shard, self.term, position, first, data, goes_on=goes_on))

    def delayed(self, error: Unanswered) -> None:
        """Notes why an attempt to append the extent in flight was not answered."""
        if type(self.delay) is not LogFull:
            self.delay = error

    def kept(self, slot: int) -> None:
        """Notes that the extent in flight has this slot: its entries are durable."""
        assert self._sending is not None, "no extent is in flight"
        self.slot = slot
        self.delay = None
        self._sending = None
        reached, self._sent_position, self._sent_is_whole = self._sending_ends
        self.durable_sequence = max(self.durable_sequence, reached)
        self._call_waiting()
        self._call_confirmed()
        self.advanced()

    def fail(self, error: PenstockError) -> None:
        """Ends the journal: every later append and everything that waits gets this error."""
        if self.failure is None:
            self.failure = error
            self._unsent.clear()
            self._call_waiting()
            self._confirming += self._to_confirm
            self._to_confirm = []
            self._call_confirmed()

    def _call_confirmed(self) -> None:
        confirmed, self._confirming = self._confirming, []
        for done in confirmed:
            done()

    def _call_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for sequence, done in waiting:
            if sequence <= self.durable_sequence or self.failure is not None:
                done()
            else:
                self._waiting.append((sequence, done))


def _nothing() -> None:
    pass
