"""A journal in segment files: events become durable here, many of them with one sync.

`durability` chooses what an answer means:

    sync      the change is on the disk: it survives a power cut
    interval  the change will be on the disk within the interval: a power cut loses at most that
    os        the operating system has the change: it survives the process, but a power cut may
              lose more

Threads that wait for the disk share a sync (`commit`). Bodies are read back from the mapped files;
recent ones are cached, because most messages are pulled soon after they were pushed.
"""

import os
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from math import inf
from time import perf_counter
from typing import Final, Literal, get_args

from penstock.core.events import AnyEvent, Arrived, Deleted, Expired, Lost, Pushed
from penstock.core.runs import Run
from penstock.durations import Durations
from penstock.errors import CorruptEntry, InvalidField, Overloaded, StoreUnusable
from penstock.forked import start_over_when_forked
from penstock.journal import codec, concerns
from penstock.journal.commit import GroupCommit
from penstock.journal.entry import HEADER_BYTES, StoredEntry
from penstock.journal.index import NumberIndex
from penstock.journal.place import pack_place, position_of
from penstock.journal.room import RoomBudget
from penstock.journal.segments import Segments
from penstock.service import check_number

Durability = Literal["sync", "interval", "os"]

_INTERVAL_MS_MAX: Final = 60 * 60 * 1_000
# How long an entry for which no answer waits may be unsynced: readers of the files see it then.
_UNSYNCED_MS_MAX: Final = 500
_BLOCK_BYTES: Final = codec.BLOCK_BYTES
_RECENT_MAX: Final = 1_024
_RECENT_BYTES_MAX: Final = 8_192
_MARK_BYTES: Final = 1024 * 1024
# How much `history` reads between two breaks. A small entry takes longer to pass than its bytes.
_HISTORY_BYTES: Final = 1024 * 1024
_HISTORY_ENTRIES: Final = 1_000
_HISTORY_EVENTS: Final = 1_000
# How long one history reads what is not indexed. It is indexed then, and the next one goes on.
_UNINDEXED_S_MAX: Final = 2.0
# Nothing happens to a message after one of these.
_LAST_EVENTS: Final = (Deleted, Expired, Lost, Arrived)
# A number that no message has: its history indexes the journal.
_NO_MESSAGE: Final = 2**63 - 1


def check_durability(text: str) -> Durability:
    """The durability of this name. Raises InvalidField."""
    if text not in get_args(Durability):
        raise InvalidField(f"durability: {text!r} is none of {', '.join(get_args(Durability))}")
    return text  # type: ignore[return-value]


def check_interval(interval_ms: int) -> int:
    """The interval, if it is within its limits. Raises InvalidField."""
    return check_number("interval_ms", interval_ms, 1, _INTERVAL_MS_MAX)


class FileJournal:
    """A `Journal` over segments; an entry's id is its sequence."""

    keeps_nothing = False
    syncs_snapshots = True

    def __init__(
        self,
        segments: Segments,
        durability: Durability = "sync",
        interval_ms: int = 50,
        *,
        shard: int = 0,
        term: int = 0,
        background: bool = True,
    ) -> None:
        """`shard` and `term` are written into every entry; on one machine both are 0.

        Without `background` it syncs only for those who wait for it, and when it is closed.
        """
        self.segments = segments
        self.durability: Durability = durability
        self.durable_sequence = segments.next_id - 1
        self.shard = shard
        self.term = term
        self._one_event = codec.block_header(1, shard, term)
        # `make_room` decides before a command who may use the reserve, not the append.
        segments.reserve_bytes = 0
        # Called once when the stream passes `growth_limit`, and when there is no room; upkeep sets
        # both.
        self.growth_limit = 1 << 62
        self.grown: Callable[[], None] = _nothing
        self._room = RoomBudget(segments, lambda: self.grown())
        self.make_room = self._room.make_room
        self.has_room = self._room.has_room
        # Offsets at which entries begin, about a megabyte apart: the stream can be cut at them.
        self._marks: deque[int] = deque()
        self._next_mark = 0
        self._index = NumberIndex()
        self.unindexed_s_max = _UNINDEXED_S_MAX
        self._numbers = self._index.numbers
        self._answers_before_sync = durability != "sync"
        self._recent: dict[int, Pushed] = {}
        # How long syncs took that had something to sync.
        self.syncs = Durations()
        self._syncing = threading.Lock()
        period_ms = interval_ms if durability == "interval" else _UNSYNCED_MS_MAX
        period_s = period_ms / 1_000 if background else 0
        self._commit = GroupCommit(self.sync, self._sync_idle, period_s)
        self._commit.start()
        start_over_when_forked(self)

    def start_over(self) -> None:
        """In the child of a fork: the threads that held the locks and synced are not there."""
        self._syncing = threading.Lock()
        self._commit = GroupCommit(self.sync)

    def append(self, events: Sequence[AnyEvent]) -> tuple[int, Sequence[int]]:
        # Most commands append one plain event, which is written without being copied together.
        event: AnyEvent | None = None
        header = body = b""
        messages: Sequence[tuple[int, int]] = ()
        if len(events) == 1:
            event = events[0]
            header, body = codec.pack_plain(event, codec.EVENT_BYTES)
        if header:
            block = self._one_event + header
        elif type(events) is Run:
            block = codec.encode_run(events, self.shard, self.term)
        else:
            block, messages = codec.encode(events, self.shard, self.term)
        # Room was made before the command was decided: what is left may be used to the last byte.
        sequence, data_offset = self.segments.append_data(block, body, codec.VERSION, True)
        self._room.end_offset = data_offset + len(block) + len(body)
        if self._answers_before_sync:
            self.durable_sequence = sequence
        if data_offset > self._next_mark:
            self._mark(data_offset)
            self._index.drop_before(self.segments.first_offset)
            self._index.close_part(data_offset - HEADER_BYTES)
        if header:
            self._numbers.append(event.number)  # type: ignore[union-attr]
            if type(event) is not Pushed:
                return sequence, ()
            size = event.size_bytes
            place = pack_place(data_offset + _BLOCK_BYTES, size)
            if size <= _RECENT_BYTES_MAX:
                recent = self._recent
                if len(recent) >= _RECENT_MAX:
                    recent.clear()
                recent[place] = event
            return sequence, (place,)
        if type(events) is Run:
            self._numbers.extend(events.numbers)
            places = codec.places_of(events, data_offset)
            self._cache_recent(events, places)
            return sequence, places
        self._numbers += [getattr(each, "number", 0) for each in events]
        if not messages:
            return sequence, ()
        places = [pack_place(data_offset + at, size) for at, size in messages]
        self._cache_recent([event for event in events if type(event) is Pushed], places)
        return sequence, places

    def _cache_recent(self, pushed: list[Pushed], places: list[int]) -> None:
        recent = self._recent
        if len(recent) + len(places) > _RECENT_MAX:
            recent.clear()
        for place, event in zip(places[: _RECENT_MAX - len(recent)], pushed, strict=False):
            if event.size_bytes <= _RECENT_BYTES_MAX:
                recent[place] = event

    def _mark(self, data_offset: int) -> None:
        """Notes where an entry begins, about every megabyte, and calls `grown` at its limit."""
        self._marks.append(data_offset - HEADER_BYTES)
        self._next_mark = data_offset + _MARK_BYTES
        self.segments.unload()
        if data_offset > self.growth_limit:
            self.growth_limit = 1 << 62
            self.grown()

    # What upkeep needs: `StoredJournal`. A position is an offset in the stream.

    @property
    def first_position(self) -> int:
        return self.segments.first_offset

    @property
    def end_position(self) -> int:
        return self.segments.end_offset

    @property
    def region_bytes(self) -> int:
        return self.segments.payload_bytes

    def set_message_counter(self, count: Callable[[], int]) -> None:
        self._room.held = count

    def check_usable(self) -> None:
        self.segments.require_usable()

    def ensure_room(self, size_bytes: int, *, reserved: bool = False) -> None:
        self.segments.ensure_room(size_bytes, reserved)

    def prepare_room(self) -> None:
        self.segments.prepare()

    def entry_before(self, position: int) -> int:
        while len(self._marks) > 1 and self._marks[1] <= position:
            self._marks.popleft()
        if self._marks and self._marks[0] <= position:
            return self._marks[0]
        return self.segments.first_offset

    def drop_before(self, position: int, archive: str | os.PathLike[str] | None = None) -> None:
        self.segments.drop_before(position, archive=archive)

    def load(self, place: int) -> Pushed:
        recent = self._recent.get(place)
        if recent is not None:
            return recent
        offset = position_of(place)
        try:
            fields = codec.read_header(self.segments.read(offset, codec.EVENT_BYTES))
            payload = self.segments.read(offset + fields.payload_at, fields.payload_bytes)
        except InvalidField:
            raise CorruptEntry(f"offset {offset} of the journal holds no message") from None
        return codec.read_pushed(fields, payload, offset)

    def wait(self, sequence: int) -> None:
        """Blocks until that entry is durable. Raises JournalError if it never will be."""
        if self.durable_sequence < sequence:
            self._commit.wait(sequence)
            if self.durable_sequence < sequence:
                # The sync failed, or the journal is being closed: this raises the error.
                with self._syncing:
                    if self.durable_sequence < sequence:
                        self._sync()

    def notify(self, sequence: int, done: Callable[[], None]) -> None:
        self._commit.notify(sequence, done)

    def sync(self) -> int:
        """Writes everything appended so far to the disk, whatever the durability.

        Returns the sequence that is durable then.
        """
        with self._syncing:
            self._sync()
        return self.durable_sequence

    def _sync_idle(self) -> int:
        """The same; if that is done already, the watermark that says so is made durable."""
        if self.segments.durable_offset == self.segments.end_offset:
            self.segments.sync_watermark()
        return self.sync()

    def _sync(self) -> None:
        durable, began_s = self.segments.durable_offset, perf_counter()
        if self.segments.sync() > durable:
            self.syncs.add(perf_counter() - began_s)
        if not self._answers_before_sync:
            self.durable_sequence = self.segments.durable_next_id - 1

    def replayed(self, start_offset: int | None) -> Iterator[StoredEntry]:
        """The entries from there to the end: for opening. Raises StoreUnusable."""
        for entry in self.segments.entries(start_offset, self.segments.end_offset):
            if entry.data_offset > self._next_mark:
                self._mark(entry.data_offset)
            if entry.version != codec.VERSION:
                raise StoreUnusable(
                    f"{self.segments.path}: the entry at {entry.offset} is of the format "
                    f"{entry.version!r}; this version of Penstock reads {codec.VERSION!r}"
                )
            yield entry

    def history(self, number: int) -> Iterator[AnyEvent | None]:
        return self._history(number, perf_counter() + self.unindexed_s_max)

    def _history(self, number: int, give_up_s: float) -> Iterator[AnyEvent | None]:
        index = self._index
        offset, end = self.segments.first_offset, self.segments.end_offset
        indexed_until = 0
        while offset < end:
            part = index.part_at(offset)
            if part is not None:
                if not part.has(number):
                    offset = part.end
                    continue
                indexed_until = part.end
            is_open = index.open_start is not None and offset >= index.open_start
            if is_open and number not in index.numbers:
                return
            stop = indexed_until if offset < indexed_until else index.known_after(offset, end)
            is_unknown = not is_open and offset >= indexed_until
            start, seen = offset, array("Q")
            break_at, offset = offset + _HISTORY_BYTES, stop
            found, is_over = 0, False
            for entry in islice(self.segments.entries(start, stop), _HISTORY_ENTRIES):
                if entry.version == codec.VERSION:
                    if is_unknown:
                        seen.extend(codec.numbers_in(entry.data))
                    for event in codec.decode_number(entry.data, entry.data_offset, number):
                        if concerns(event, number):
                            found += 1
                            is_over |= isinstance(event, _LAST_EVENTS)
                            yield event
                offset = entry.end_offset
                if offset >= break_at or found >= _HISTORY_EVENTS:
                    break
            if is_unknown:
                index.add(start, offset, seen)
            if is_over:
                return
            yield None
            # Upkeep may have dropped the files that were to be read next.
            offset = max(offset, self.segments.first_offset)
            if is_unknown and offset < end and perf_counter() > give_up_s:
                raise Overloaded(self._how_far(offset, end))

    def index_rest(self) -> Iterator[None]:
        for _ in self._history(_NO_MESSAGE, inf):
            yield None

    def _how_far(self, offset: int, end: int) -> str:
        """Why a history ends before its end."""
        first = self.segments.first_offset
        part = (offset - first) / max(1, end - first)
        return (
            f"history: what happened before the store was opened is being read, {part:.0%} so far; "
            "ask again, and it goes on from there"
        )

    def close(self) -> None:
        self._commit.close()
        with self._syncing:
            self.segments.close()
            self.durable_sequence = self.segments.durable_next_id - 1


def _nothing() -> None:
    pass
