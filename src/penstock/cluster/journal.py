"""The journal of a shard on the replicated log: collects appends, and knows which are kept.

The engine appends entries at any rate; they wait here until the extent before them is kept, and
then go together as the next extent: one append to the log is under way at a time (rule 5 of
`log`), so load makes the extents larger and not more. This class does no I/O: `next_extent` says
what is to be appended, `kept` and `fail` what came of it; `owner.append_steps` stands between.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from penstock.cluster.contents import Contents
from penstock.cluster.extent import OVERHEAD_BYTES, ChainPoint, Extent, pack_extent
from penstock.cluster.log import EXTENT_BYTES_MAX
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
# How much may wait for the log before commands are refused: without a majority nothing leaves.
WAITING_BYTES_MAX: Final = 64 * 1024 * 1024
MARK_BYTES: Final = 1024 * 1024
_RECENT_MAX: Final = 1_024
_RECENT_BYTES_MAX: Final = 8_192


class ReplicatedJournal:
    """A `StoredJournal` whose entries become durable in the slots of a replicated log."""

    keeps_nothing = False

    def __init__(
        self,
        shard: int,
        term: int,
        contents: Contents,
        end: ChainPoint,
        marks: Sequence[ChainPoint] = (),
        mark_bytes: int = MARK_BYTES,
    ) -> None:
        """`end` is where the next extent stands; `marks` are earlier points to begin at.

        There is a mark every `mark_bytes`: the log is purged in parts of about that size.
        """
        self.shard = shard
        self.term = term
        self.durable_sequence = end.sequence - 1
        self.slot = end.slot - 1
        self.failure: PenstockError | None = None
        # How far the archive is durable, which keeps the rest: there is none if this is so far off.
        self.archived_position = 1 << 62
        # Called when there is something to send and nothing was before.
        self.wake: Callable[[], object] = _nothing
        # Called whenever more of it is kept.
        self.advanced: Callable[[], object] = _nothing
        self.growth_limit = 1 << 62
        self.grown: Callable[[], None] = _nothing
        self._contents = contents
        self._sequence = end.sequence
        self._marks = deque(marks)
        self._mark_bytes = mark_bytes
        # What the log does not have: parts of the stream, each with the sequence it completes.
        self._unsent: deque[tuple[bytes, int]] = deque()
        self._unsent_bytes = 0
        self._sent_position = end.position
        self._sent_is_whole = True
        # The extent under way: its bytes, the sequence and the position it reaches.
        self._sending: bytes | None = None
        self._sending_ends = (0, 0, True)
        self._waiting: list[tuple[int, Callable[[], object]]] = []
        # Who waits for the next extent, and for the one under way, whatever is in it.
        self._to_confirm: list[Callable[[], object]] = []
        self._confirming: list[Callable[[], object]] = []
        self._recent: dict[int, Pushed] = {}

    # What the engine asks for: `Journal`.

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
                f"shard {self.shard}: {self._unsent_bytes} bytes wait for the replicated log; "
                "it has no majority, or is slower than the pushes; try again later"
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
            # Only the local copy is damaged, and the message is not lost: the log has it. So the
            # shard is opened anew, here or elsewhere.
            self.fail(JournalError(f"shard {self.shard}: {error}; it is opened anew"))
            raise self.failure or error from error

    def wait(self, sequence: int) -> None:
        """Raises what has failed; an entry that is merely not kept yet is not waited for here."""
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
        """Removes the local copy; what is not in the log by now will not be."""
        if self.failure is None:
            self.fail(JournalError(f"shard {self.shard}: the journal was closed"))
        self._contents.close()

    # What upkeep asks for: `StoredJournal`.

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
        """The sequence that is durable now. A snapshot counts only once it is in the log, and
        whoever puts it there waits for the entries it depends on (`snapshots`)."""
        return self.durable_sequence

    def entry_before(self, position: int) -> int:
        mark = self.mark_before(position)
        return self.first_position if mark is None else max(self.first_position, mark.position)

    def drop_before(self, position: int, archive: object = None) -> None:
        """Lets the local copy begin there; the log's slots are purged after the next snapshot.

        What is not archived stays.
        """
        self._contents.drop_before(min(position, self.archived_position))

    def mark_before(self, position: int) -> ChainPoint | None:
        """The last known point at or before `position` at which reading the log may begin."""
        found = None
        for mark in self._marks:
            if mark.position > position:
                break
            found = mark
        return found

    def forget_marks_before(self, slot: int) -> None:
        """The slots before this one are purged."""
        while self._marks and self._marks[0].slot < slot:
            self._marks.popleft()

    # What the owner asks for.

    @property
    def durable_position(self) -> int:
        """Up to where the stream is in the log; it may end within an entry."""
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
        """Whole entries from `position` on that are in the log: about so many bytes of them."""
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
        """The sequence of the last entry that was appended, kept or not."""
        return self._sequence - 1

    @property
    def has_unsent(self) -> bool:
        """Whether there is anything that the log does not have."""
        return bool(self._unsent or self._to_confirm) or self._sending is not None

    def confirm(self, done: Callable[[], object]) -> None:
        """Has `done` called once the log has kept an extent that is made after this, or failed.

        If there is nothing to append, the extent has no entries: the stream does not grow by it.
        Raises what has failed.
        """
        if self.failure is not None:
            raise self.failure
        is_first = not self.has_unsent
        self._to_confirm.append(done)
        if is_first:
            self.wake()

    def next_extent(self) -> bytes | None:
        """What is to be appended next; the same bytes until `kept` is called (rule 4)."""
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
            # If void extents come to stand before it, reading begins with them and passes over.
            self._marks.append(ChainPoint(self.slot + 1, position, first, self.term))
        self._sending_ends = (reached, position + size, not goes_on)
        self._unsent_bytes -= size
        data = b"".join(parts)
        return pack_extent(Extent(self.shard, self.term, position, first, data, goes_on=goes_on))

    def kept(self, slot: int) -> None:
        """The extent under way stands in this slot: its entries are durable."""
        assert self._sending is not None, "no extent is under way"
        self.slot = slot
        self._sending = None
        reached, self._sent_position, self._sent_is_whole = self._sending_ends
        self.durable_sequence = max(self.durable_sequence, reached)
        self._call_waiting()
        self._call_confirmed()
        self.advanced()

    def fail(self, error: PenstockError) -> None:
        """Nothing more will be kept: every append, and all who wait, get this error."""
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
