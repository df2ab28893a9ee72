"""A journal in segment files: events become durable here, many of them with one sync.

Three promises can be chosen from, each named for what an answer means:

    sync      what was answered is on the disk: it survives a power cut
    interval  it is on the disk within the interval: a power cut costs at most that much
    os        it is with the operating system: it survives the process, a power cut costs more

Whoever waits for the disk first syncs for all who wait. Bodies are read back from the mapped files;
those pushed lately are kept at hand, because most messages are pulled soon after they were pushed.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, cast, get_args

from penstock.core.delivery import PLACE_SIZE_BITS
from penstock.core.events import AnyEvent, Pushed
from penstock.errors import CorruptEntry, InvalidField, JournalError, StoreFull, StoreUnusable
from penstock.journal import codec, concerns
from penstock.journal.entry import HEADER_BYTES
from penstock.journal.segments import Segments
from penstock.service import PULL_LIMIT_MAX, Batch, Command, Delete, Pull, Push, Redrive

Durability = Literal["sync", "interval", "os"]

# Under `os` a sync now and then lets readers of the files see how far the stream has come.
_OS_SYNC_MS: Final = 1_000
_RECENT_MAX: Final = 1_024
_RECENT_BYTES_MAX: Final = 8_192
# More than any entry needs beside the bodies: headers, texts and extras of one event.
_EVENT_ROOM_BYTES: Final = 2_048
_COMMAND_ROOM_BYTES: Final = 256 * 1_024
_SMALL_BODY_BYTES_MAX: Final = 64 * 1024
_AMPLE_BYTES: Final = 1024 * 1024
_MARK_BYTES: Final = 1024 * 1024
_LEAVING_BYTES: Final = 2 * (HEADER_BYTES + codec.BLOCK_BYTES + codec.EVENT_BYTES)


def check_durability(text: str) -> Durability:
    """The durability of this name. Raises InvalidField."""
    if text not in get_args(Durability):
        raise InvalidField(f"durability: {text!r} is none of {', '.join(get_args(Durability))}")
    return text  # type: ignore[return-value]


class _Follower:
    """A thread that waits for another's sync; woken when its entry is durable, or to lead."""

    __slots__ = ("leads", "sequence", "woken")

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.leads = False
        self.woken = threading.Lock()
        self.woken.acquire()


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
        # Guarded by `_turn`: whether someone is syncing for all, and who waits for that.
        self._turn = threading.Lock()
        self._has_leader = False
        self._followers: list[_Follower] = []
        # Guarded by its own lock: callbacks for when a sequence is durable, and the thread's end.
        self._wanted = threading.Condition()
        self._callbacks: list[tuple[int, Callable[[], None]]] = []
        self._closing = False
        self._failed = False
        self._period_s = {"interval": interval_ms, "os": _OS_SYNC_MS}.get(durability, 0) / 1_000
        self._thread: threading.Thread | None = None
        if self._period_s:
            self._start()
        # Called once when the stream passes `growth_limit`; set by whoever keeps house.
        self.growth_limit = 1 << 62
        self.grown: Callable[[], None] = _nothing
        # How many messages live in the journal; told by whoever knows.
        self.held: Callable[[], int] = lambda: 0

    def append(self, events: Sequence[AnyEvent]) -> tuple[int, Sequence[int]]:
        single = codec.encode_single(events[0]) if len(events) == 1 else None
        data, messages = single or codec.encode(events)
        # Room was made before the command was decided: what is left may be used to the last byte.
        sequence, data_offset = self._append_data(data, codec.VERSION, True)
        self._end_offset = data_offset + len(data)
        if self._answers_before_sync:
            self.durable_sequence = sequence
        if data_offset > self._next_mark:
            self._mark(data_offset)
        if not messages:
            return sequence, ()
        if len(events) == 1:
            at, size = messages[0]
            place = data_offset + at << PLACE_SIZE_BITS | size
            event = events[0]
            if size <= _RECENT_BYTES_MAX and type(event) is Pushed:
                if len(self._recent) >= _RECENT_MAX:
                    self._recent.clear()
                self._recent[place] = event
            return sequence, (place,)
        places = [codec.place(data_offset + at, size) for at, size in messages]
        self._keep_at_hand(events, places)
        return sequence, places

    def _keep_at_hand(self, events: Sequence[AnyEvent], places: list[int]) -> None:
        recent = self._recent
        if len(recent) + len(places) > _RECENT_MAX:
            recent.clear()
        pushed = [event for event in events if type(event) is Pushed]
        for place, event in zip(places, pushed, strict=False):
            if event.size_bytes <= _RECENT_BYTES_MAX and len(recent) < _RECENT_MAX:
                recent[place] = event

    def _mark(self, data_offset: int) -> None:
        """Notes where an entry begins, every so often, and tells when the stream has grown."""
        self._marks.append(data_offset - HEADER_BYTES)
        self._next_mark = data_offset + _MARK_BYTES
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
        """Sees to it that what the command may append will fit. Raises StoreFull.

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
        # and beside it what a command asks for to be on the safe side. It is made in the
        # background; only on a disk that is known to be full is it insisted on.
        leaving = _LEAVING_BYTES * self.held() + 2 * _COMMAND_ROOM_BYTES
        kept_back = max(segments.payload_bytes // 2, leaving)
        segments.ahead_bytes = kept_back
        insisted = 0 if reserved else kept_back if segments.is_full else size
        if segments.free_bytes < size + insisted:
            try:
                segments.ensure_room(size + insisted, reserved=True)
            except StoreFull:
                self.grown()
                raise
        ample = min(segments.free_bytes - kept_back, _AMPLE_BYTES)
        if not segments.is_full and ample < _AMPLE_BYTES:
            ample = min(segments.free_bytes, _AMPLE_BYTES)
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
        offset = codec.offset_of(place)
        try:
            fields = codec.read_header(self.segments.read(offset, codec.EVENT_BYTES))
            payload = self.segments.read(offset + fields.payload_at, fields.payload_bytes)
        except InvalidField:
            raise CorruptEntry(f"the message at offset {offset} is not where it was put") from None
        return codec.read_pushed(fields, payload, offset)

    def wait(self, sequence: int) -> None:
        """Blocks until that entry is durable.

        Whoever comes first syncs for all who came before the sync began; the others sleep, each
        on a lock of its own. After the sync those whose entry is durable are woken, and one whose
        entry is not syncs next.
        """
        with self._turn:
            if self.durable_sequence >= sequence:
                return
            follower = _Follower(sequence) if self._has_leader else None
            if follower is None:
                self._has_leader = True
            else:
                self._followers.append(follower)
        if follower is not None:
            follower.woken.acquire()
            if not follower.leads:
                return
        try:
            # Another sync may have reached this entry meanwhile; the turn goes on all the same.
            if self.durable_sequence < sequence:
                self.sync()
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Wakes the followers whose entry is durable, and one whose is not, to lead."""
        with self._turn:
            durable = self.durable_sequence
            woken = [each for each in self._followers if each.sequence <= durable]
            self._followers = [each for each in self._followers if each.sequence > durable]
            self._has_leader = bool(self._followers)
            if self._followers:
                following = self._followers.pop(0)
                following.leads = True
                woken.append(following)
        for each in woken:
            each.woken.release()

    def sync(self) -> None:
        """Puts everything appended so far on the disk, whatever was promised."""
        with self._syncing:
            self._sync()

    def _sync(self) -> None:
        self.segments.sync()
        if not self._answers_before_sync:
            self.durable_sequence = self.segments.durable_next_id - 1

    def notify(self, sequence: int, done: Callable[[], None]) -> None:
        with self._wanted:
            ended = self._closing or self._failed
            if not ended:
                self._callbacks.append((sequence, done))
                self._wanted.notify()
        if ended:
            done()
        elif self._thread is None:
            self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(
            target=self._keep_syncing, name="penstock-sync", daemon=True
        )
        self._thread.start()

    def _keep_syncing(self) -> None:
        """Syncs when someone asks to be told, or every so often; ends with the journal."""
        while True:
            with self._wanted:
                if not self._callbacks and not self._closing:
                    self._wanted.wait(self._period_s or None)
                if self._closing:
                    return
                if not self._callbacks and not self._period_s:
                    continue
            failed = False
            try:
                self.sync()
            except JournalError:
                # Everyone who asked is told; `wait` then says to each what happened.
                failed = True
            with self._wanted:
                self._failed = failed
                reached = 1 << 62 if failed else self.durable_sequence
                due = [call for call in self._callbacks if call[0] <= reached]
                self._callbacks = [call for call in self._callbacks if call[0] > reached]
            for _, done in due:
                done()
            if failed:
                return

    def replayed(self, start_offset: int | None) -> Iterator[tuple[AnyEvent, int]]:
        """The events from there to the end, without bodies, each with its place: for opening."""
        for entry in self.segments.entries(start_offset, self.segments.end_offset):
            if entry.data_offset > self._next_mark:
                self._mark(entry.data_offset)
            if entry.version != codec.VERSION:
                raise StoreUnusable(
                    f"{self.segments.path}: the entry at {entry.offset} is of the format "
                    f"{entry.version!r}; this version of Penstock reads {codec.VERSION!r}"
                )
            yield from codec.decode(entry.data, entry.data_offset, bodies=False)

    def history(self, number: int) -> list[AnyEvent]:
        return [
            event
            for entry in self.segments.entries(end=self.segments.end_offset)
            if entry.version == codec.VERSION
            for event, _ in codec.decode(entry.data, entry.data_offset, bodies=False)
            if concerns(event, number)
        ]

    def close(self) -> None:
        with self._wanted:
            self._closing = True
            self._wanted.notify()
        if self._thread is not None:
            self._thread.join()
        with self._syncing:
            self.segments.close()
            if not self._failed:
                self.durable_sequence = self.segments.durable_next_id - 1
        for _, done in self._callbacks:
            done()
        self._callbacks = []


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
    if kind is Batch:
        items = cast(Batch, command).items
        pushes = [item for item in items if type(item) is Push]
        size = sum(map(_message_bytes, pushes)) + _EVENT_ROOM_BYTES * (len(items) - len(pushes))
        return size + _COMMAND_ROOM_BYTES, not pushes
    if kind is Redrive or kind is Pull:
        limit = cast(Pull | Redrive, command).limit
        count = limit if type(limit) is int and 0 < limit <= PULL_LIMIT_MAX else 0
        texts = 0
        if kind is Pull:
            pull = cast(Pull, command)
            texts = len(str(pull.attempt_id)) + len(str(pull.holder))
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
