"""A journal in segment files: events become durable here, many of them with one sync.

Three promises can be chosen from, each named for what an answer means:

    sync      what was answered is on the disk: it survives a power cut
    interval  it is on the disk within the interval: a power cut costs at most that much
    os        it is with the operating system: it survives the process, a power cut costs more

Many who wait for the disk share a sync (`commit`). Bodies are read back from the mapped files;
those pushed lately are kept at hand, because most messages are pulled soon after they were pushed.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, cast, get_args

from penstock.core.delivery import pack_place, position_of
from penstock.core.events import AnyEvent, Pushed
from penstock.core.runs import Run
from penstock.errors import CorruptEntry, InvalidField, StoreFull, StoreUnusable
from penstock.forked import start_over_when_forked
from penstock.journal import codec, concerns
from penstock.journal.commit import GroupCommit
from penstock.journal.entry import HEADER_BYTES, StoredEntry
from penstock.journal.segments import Segments
from penstock.service import (
    PULL_LIMIT_MAX,
    Batch,
    Command,
    Delete,
    Pull,
    Push,
    PushMany,
    Redrive,
    check_number,
)

Durability = Literal["sync", "interval", "os"]

_INTERVAL_MS_MAX: Final = 60 * 60 * 1_000
# Under `os` a sync now and then lets readers of the files see how far the stream has come.
_OS_SYNC_MS: Final = 1_000
_RECENT_MAX: Final = 1_024
_RECENT_BYTES_MAX: Final = 8_192
# More than any entry needs beside the bodies: headers, texts and extras of one event.
_EVENT_ROOM_BYTES: Final = 2_048
# An entry says its size in four bytes, and is put together in memory first.
_BATCH_BYTES_MAX: Final = 1024 * 1024 * 1024
_COMMAND_ROOM_BYTES: Final = 256 * 1_024
_SMALL_BODY_BYTES_MAX: Final = 64 * 1024
_AMPLE_BYTES: Final = 1024 * 1024
# What the smallest messages need that are written before anyone looks again: once to come, twice
# as much to leave.
_UNTIL_THE_NEXT_LOOK_BYTES: Final = 3 * _AMPLE_BYTES
_MARK_BYTES: Final = 1024 * 1024
_LEAVING_BYTES: Final = 2 * (HEADER_BYTES + codec.BLOCK_BYTES + codec.EVENT_BYTES)


def check_durability(text: str) -> Durability:
    """The durability of this name. Raises InvalidField."""
    if text not in get_args(Durability):
        raise InvalidField(f"durability: {text!r} is none of {', '.join(get_args(Durability))}")
    return text  # type: ignore[return-value]


def check_interval(interval_ms: int) -> int:
    """The interval, if one can keep its promise by it. Raises InvalidField."""
    return check_number("interval_ms", interval_ms, 1, _INTERVAL_MS_MAX)


class FileJournal:
    """A `Journal` over segments; an entry's id is its sequence."""

    keeps_nothing = False

    def __init__(
        self, segments: Segments, durability: Durability = "sync", interval_ms: int = 50
    ) -> None:
        self.segments = segments
        self.durability: Durability = durability
        self.durable_sequence = segments.next_id - 1
        self._append_data = segments.append_data
        # Who may use the last room is decided here, before a command, and not at the append.
        segments.reserve_bytes = 0
        self._end_offset = segments.end_offset
        self._room_until = 0
        self._ample_until = 0
        # Offsets at which entries begin, about a megabyte apart: the stream can be cut at them.
        self._marks: deque[int] = deque()
        self._next_mark = 0
        self._answers_before_sync = durability != "sync"
        self._recent: dict[int, Pushed] = {}
        self._syncing = threading.Lock()
        period_ms = {"interval": interval_ms, "os": _OS_SYNC_MS}.get(durability, 0)
        self._commit = GroupCommit(self.sync, period_ms / 1_000)
        self._commit.start()
        start_over_when_forked(self)
        # Called once when the stream passes `growth_limit`; set by whoever keeps house.
        self.growth_limit = 1 << 62
        self.grown: Callable[[], None] = _nothing
        # How many messages live in the journal; told by whoever knows.
        self.held: Callable[[], int] = lambda: 0

    def start_over(self) -> None:
        """In the child of a fork: nobody is left to let go of a lock, nor to sync."""
        self._syncing = threading.Lock()
        self._commit = GroupCommit(self.sync)

    def append(self, events: Sequence[AnyEvent]) -> tuple[int, Sequence[int]]:
        # Most commands append one plain event, which is written without being copied together.
        event = events[0] if len(events) == 1 else None
        block = b"" if event is None else codec.encode_one(event)
        body = b""
        messages: Sequence[tuple[int, int]] = ()
        if not block:
            event = None
            if type(events) is Run:
                block = codec.encode_run(events)
            else:
                block, messages = codec.encode(events)
        elif type(event) is Pushed:
            body = event.body
        # Room was made before the command was decided: what is left may be used to the last byte.
        sequence, data_offset = self._append_data(block, body, codec.VERSION, True)
        self._end_offset = data_offset + len(block) + len(body)
        if self._answers_before_sync:
            self.durable_sequence = sequence
        if data_offset > self._next_mark:
            self._mark(data_offset)
        if type(event) is Pushed:
            place = pack_place(data_offset + codec.BLOCK_BYTES, event.size_bytes)
            if event.size_bytes <= _RECENT_BYTES_MAX:
                if len(self._recent) >= _RECENT_MAX:
                    self._recent.clear()
                self._recent[place] = event
            return sequence, (place,)
        if type(events) is Run:
            places = codec.places_of(events, data_offset)
            self._keep_at_hand(events, places)
            return sequence, places
        if not messages:
            return sequence, ()
        places = [pack_place(data_offset + at, size) for at, size in messages]
        self._keep_at_hand([event for event in events if type(event) is Pushed], places)
        return sequence, places

    def _keep_at_hand(self, pushed: list[Pushed], places: list[int]) -> None:
        recent = self._recent
        if len(recent) + len(places) > _RECENT_MAX:
            recent.clear()
        for place, event in zip(places[: _RECENT_MAX - len(recent)], pushed, strict=False):
            if event.size_bytes <= _RECENT_BYTES_MAX:
                recent[place] = event

    def _mark(self, data_offset: int) -> None:
        """Notes where an entry begins, every so often, and tells when the stream has grown."""
        self._marks.append(data_offset - HEADER_BYTES)
        self._next_mark = data_offset + _MARK_BYTES
        self.segments.unload()
        if data_offset > self.growth_limit:
            self.growth_limit = 1 << 62
            self.grown()

    def entry_before(self, offset: int) -> int:
        """Where some entry at or not long before `offset` begins; the stream's start if unknown."""
        while len(self._marks) > 1 and self._marks[1] <= offset:
            self._marks.popleft()
        if self._marks and self._marks[0] <= offset:
            return self._marks[0]
        return self.segments.first_offset

    def make_room(self, command: Command[Any]) -> None:
        """Sees to it that what the command may append will fit. Raises StoreFull or InvalidField.

        Pushes leave the reserve alone, so that on a full disk pulls and deletes still find room.
        """
        if self._end_offset <= self._ample_until:
            # Most commands need little, and mostly there is plenty.
            kind = type(command)
            if kind is Delete or (kind is Pull and cast(Pull, command).limit == 1):
                return
            if kind is Push and _is_small(cast(Push, command)):
                return
        size, reserved = _room_needed(command)
        if self._end_offset + size > self._room_until:
            self._find_room(size, reserved)

    def _find_room(self, size: int, reserved: bool) -> None:
        segments = self.segments
        # What is held must be able to leave: room for a claim and a delete of each is kept back,
        # and beside it what a command asks for to be on the safe side. The background makes it
        # ahead of time; a push waits for it only if there may not be enough on the disk.
        leaving = _LEAVING_BYTES * self.held() + 2 * _COMMAND_ROOM_BYTES
        kept_back = max(segments.payload_bytes // 2, leaving)
        segments.ahead_bytes = kept_back
        missing = size + kept_back - segments.free_bytes
        grows = missing > 0 and segments.can_grow(missing + _UNTIL_THE_NEXT_LOOK_BYTES)
        insisted = 0 if grows else kept_back
        needed = size if reserved else size + insisted
        if segments.free_bytes < needed:
            try:
                segments.ensure_room(needed, reserved=True)
            except StoreFull:
                self.grown()
                raise
        ample = min(segments.free_bytes - insisted, _AMPLE_BYTES)
        self._room_until = self._end_offset + max(0, ample)
        self._ample_until = self._room_until - _COMMAND_ROOM_BYTES - _SMALL_BODY_BYTES_MAX

    def has_room(self, events: int) -> bool:
        try:
            self.segments.ensure_room(_COMMAND_ROOM_BYTES + events * codec.EVENT_BYTES, True)
        except StoreFull:
            return False
        return True

    def load(self, place: int) -> Pushed:
        recent = self._recent.get(place)
        if recent is not None:
            return recent
        offset = position_of(place)
        try:
            fields = codec.read_header(self.segments.read(offset, codec.EVENT_BYTES))
            payload = self.segments.read(offset + fields.payload_at, fields.payload_bytes)
        except InvalidField:
            raise CorruptEntry(f"the message at offset {offset} is not where it was put") from None
        return codec.read_pushed(fields, payload, offset)

    def wait(self, sequence: int) -> None:
        """Blocks until that entry is durable. Raises JournalError if it never will be."""
        if self.durable_sequence < sequence:
            self._commit.wait(sequence)
            if self.durable_sequence < sequence:
                # The sync failed, or the journal is being closed: this says which.
                with self._syncing:
                    if self.durable_sequence < sequence:
                        self._sync()

    def notify(self, sequence: int, done: Callable[[], None]) -> None:
        self._commit.notify(sequence, done)

    def sync(self) -> int:
        """Puts everything appended so far on the disk, whatever was promised.

        Returns the sequence that is durable then.
        """
        with self._syncing:
            self._sync()
        return self.durable_sequence

    def _sync(self) -> None:
        self.segments.sync()
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

    def history(self, number: int) -> list[AnyEvent]:
        # Most entries do not even hold the number's bytes, and need not be read as events.
        wanted = codec.number_bytes(number)
        return [
            event
            for entry in self.segments.entries(end=self.segments.end_offset)
            if wanted in entry.data and entry.version == codec.VERSION
            for event, _ in codec.decode(entry.data, entry.data_offset, bodies=False)
            if concerns(event, number)
        ]

    def close(self) -> None:
        self._commit.close()
        with self._syncing:
            self.segments.close()
            self.durable_sequence = self.segments.durable_next_id - 1


def _is_small(push: Push) -> bool:
    if push.attributes is not None or push.context is not None:
        return False
    return type(push.body) is bytes and len(push.body) <= _SMALL_BODY_BYTES_MAX


def _room_needed(command: Command[Any]) -> tuple[int, bool]:
    """How many bytes the command may append at most, and whether it may use the reserve for it.

    Nothing is validated yet, so this looks at types and otherwise assumes the largest there is.
    """
    kind = type(command)
    if kind is Push:
        return _message_bytes(cast(Push, command)) + _COMMAND_ROOM_BYTES, False
    if kind is PushMany:
        many = cast(PushMany, command)
        try:
            size = sum(map(len, many.bodies)) + _EVENT_ROOM_BYTES * len(many.bodies)
        except TypeError:
            raise InvalidField("bodies: expected a list of bytes") from None
        if many.attributes is not None:
            size += 8 * len(repr(many.attributes)) * len(many.bodies)
        if many.each_attributes is not None:
            size += 8 * len(repr(many.each_attributes))
        return size + _COMMAND_ROOM_BYTES, False
    if kind is Batch:
        items = cast(Batch, command).items
        if type(items) is not list:
            return _COMMAND_ROOM_BYTES, True
        pushes = [item for item in items if type(item) is Push]
        size = sum(map(_message_bytes, pushes)) + _EVENT_ROOM_BYTES * (len(items) - len(pushes))
        if size > _BATCH_BYTES_MAX:
            raise InvalidField(
                f"items: a batch of about {size} bytes; one may have {_BATCH_BYTES_MAX}, so push "
                "these in several"
            )
        return size + _COMMAND_ROOM_BYTES, not pushes
    if isinstance(command, Pull | Redrive):
        limit = command.limit
        count = limit if type(limit) is int and 0 < limit <= PULL_LIMIT_MAX else 0
        texts = 0
        if isinstance(command, Pull):
            texts = len(str(command.attempt_id)) + len(str(command.holder))
        return count * (codec.EVENT_BYTES + 4 * texts) + _COMMAND_ROOM_BYTES, True
    return _COMMAND_ROOM_BYTES, True


def _message_bytes(push: Push) -> int:
    """More than the message can need, without looking closely: it is not validated yet."""
    size = _EVENT_ROOM_BYTES + (len(push.body) if type(push.body) is bytes else 0)
    if push.attributes is not None or push.context is not None:
        size += 8 * len(repr((push.attributes, push.context)))
    return size


def _nothing() -> None:
    pass
