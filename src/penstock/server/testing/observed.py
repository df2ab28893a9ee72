"""A store in memory that a test can look into: every message it ever had, and what became of it.

An engine in a test has a journal in memory that keeps its events and says when there are new ones.
What a test awaits is read from these events, so a message that was pushed, received and deleted
before the test looked is found, too.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from penstock.backends.engine.engine import Engine
from penstock.clock import ManualClock
from penstock.core.due import NEVER_MS
from penstock.core.events import AnyEvent, Claimed, Deleted, Moved, Pushed
from penstock.errors import InvalidField, MessageNotFound
from penstock.journal import MemoryJournal
from penstock.life import life, moment
from penstock.service import Attributes, Claim, DeleteQueue, History, QueueStats, Stats

# How many entries of the journal are kept: the events of older messages are forgotten.
ENTRIES_MAX: Final = 100_000
# What a message must have come to, to be awaited.
UNTIL: Final = ("pushed", "delivered", "deleted", "dead")
# How many messages of a queue have their story told.
STORIES_MAX: Final = 20
_BODY_CHARS_MAX: Final = 60
Match = Any


class SeenMessage(msgspec.Struct):
    """A message that a queue has, or had: what was pushed, and what became of it."""

    id: str
    queue: str
    body: bytes
    attributes: Attributes = {}
    group: str | None = None
    deliveries: int = 0
    is_deleted: bool = False
    is_dead: bool = False

    def has_come_to(self, until: str) -> bool:
        """Whether it was pushed, delivered, deleted, or became a dead letter."""
        match until:
            case "delivered":
                return self.deliveries > 0
            case "deleted":
                return self.is_deleted
            case "dead":
                return self.is_dead
        return True


class QueueDepth(msgspec.Struct, frozen=True):
    """How many messages of a queue are in which state, and where its dead letters go."""

    visible: int = 0
    delayed: int = 0
    in_flight: int = 0
    dead_letter: str | None = None

    @property
    def messages(self) -> int:
        """All messages."""
        return self.visible + self.delayed + self.in_flight


class ObservedJournal(MemoryJournal):
    """A journal in memory that keeps its entries and calls its listeners after each."""

    def __init__(self) -> None:
        super().__init__(ENTRIES_MAX)
        # How many entries there were when they were last forgotten.
        self._forgotten = 0
        self.listeners: set[Callable[[], None]] = set()

    @property
    def events(self) -> list[AnyEvent]:
        """All events that are kept, oldest first."""
        return [event for entry in self._kept or () for event in entry]

    @property
    def dropped(self) -> int:
        """How many entries had no room: what is kept begins in the middle then."""
        return self.durable_sequence - self._forgotten - len(self._kept or ())

    def append(self, events: Sequence[AnyEvent]) -> tuple[int, Sequence[int]]:
        appended = super().append(events)
        for changed in tuple(self.listeners):
            changed()
        return appended

    def forget(self) -> None:
        """Drops all entries."""
        self._forgotten = self.durable_sequence
        if self._kept is not None:
            self._kept.clear()


class ObservedStore:
    """An engine in memory for a test, and what its journal says of its messages."""

    def __init__(self, clock: ManualClock, *, identity: bytes | None = None) -> None:
        """With an `identity`, the ids of its messages are the same in every run."""
        self.clock = clock
        self.journal = ObservedJournal()
        self.engine = Engine(self.journal, clock, identity=identity)

    @property
    def queues(self) -> list[str]:
        """The names of its queues, in the order in which they were created."""
        return list(self.engine.shard.names)

    def messages(self, queue: str) -> list[SeenMessage]:
        """Every message that came into this queue, in order; none if there is no such queue."""
        found = self.engine.shard.names.get(queue)
        if found is None:
            return []
        seen: dict[int, SeenMessage] = {}
        here: dict[int, SeenMessage] = {}
        for event in self.journal.events:
            if type(event) is Pushed:
                seen[event.number] = message = self._seen(event)
                if event.queue == found.number:
                    here[event.number] = message
                continue
            known = seen.get(getattr(event, "number", 0))
            if known is None:
                continue
            if type(event) is Claimed:
                known.deliveries += 1
            elif type(event) is Deleted:
                known.is_deleted = True
            elif type(event) is Moved:
                known.is_dead = known.is_dead or event.dead
                if event.to == found.number:
                    here[event.number] = known
        return list(here.values())

    def _seen(self, event: Pushed) -> SeenMessage:
        queue = self.engine.shard.queues.get(event.queue)
        return SeenMessage(
            self.engine.message_id(event.number),
            "" if queue is None else queue.name,
            event.body,
            event.attributes or {},
            event.group,
        )

    def matching(self, queue: str, match: Match, until: str) -> list[SeenMessage]:
        """The messages of a queue that match and have come to this. Raises InvalidField."""
        if until not in UNTIL:
            raise InvalidField(f"until: {until!r} is none of {', '.join(UNTIL)}, empty")
        return [
            each
            for each in self.messages(queue)
            if each.has_come_to(until) and matches(match, each)
        ]

    def is_empty(self, queue: str) -> bool:
        """Whether a queue holds no message, in any state; one that does not exist holds none."""
        if queue not in self.engine.shard.names:
            return True
        stats: QueueStats = self.engine.submit(Stats(queue))
        return stats.messages == 0

    def story(self, queue: str) -> list[str]:
        """What happened to each of the last messages of a queue, in a line or two for each."""
        messages = self.messages(queue)
        left_out = len(messages) - STORIES_MAX
        lines = [f"… and {left_out} messages before these"] if left_out > 0 else []
        now_ms = self.clock.now_ms()
        for each in messages[-STORIES_MAX:]:
            try:
                events = self.engine.submit(History(each.id))
            except MessageNotFound:
                continue
            told = " ".join(life(events, now_ms).sentences)
            lines.append(f"{show_body(each.body)} ({each.id}): {told}")
        return lines

    def stories(self) -> dict[str, list[str]]:
        """The story of each queue, and of which time it is told."""
        return {queue: self.story(queue) for queue in self.queues}

    @property
    def changes(self) -> int:
        """How often anything has changed; while nothing happens, it stays the same."""
        return self.journal.durable_sequence

    def depths(self) -> dict[str, QueueDepth]:
        """How many messages each queue holds."""
        found = {}
        for name, queue in self.engine.shard.names.items():
            stats: QueueStats = self.engine.submit(Stats(name))
            dead = queue.settings.dead_letter
            found[name] = QueueDepth(stats.visible, stats.delayed, stats.in_flight, dead)
        return found

    def go_to_next_due(self) -> None:
        """Moves the clock to the next instant at which something is due, if anything ever is."""
        due_ms = self.engine.shard.alarm.next_ms
        if due_ms != NEVER_MS:
            self.clock.advance(ms=max(1, due_ms - self.clock.now_ms()))

    @property
    def moment(self) -> str:
        """The time of its clock, for people."""
        return moment(self.clock.now_ms())

    def reset(self) -> None:
        """Removes all queues with all messages, and forgets what was."""
        for queue in self.queues:
            self.engine.submit(DeleteQueue(queue, force=True))
        self.journal.forget()


def matches(match: Match, message: SeenMessage | Claim) -> bool:
    """Whether a message is the one that is meant.

    A text or bytes are its whole body; a mapping is a part of the JSON object that its body is; a
    function is asked; None is every message.
    """
    if match is None:
        return True
    if isinstance(match, str):
        return message.body == match.encode()
    if isinstance(match, bytes):
        return message.body == match
    if isinstance(match, Mapping):
        try:
            return _is_part(match, msgspec.json.decode(message.body))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return False
    if callable(match):
        return bool(match(message))
    raise InvalidField(
        f"match: expected a body, a part of a JSON body, or a function, got {type(match).__name__}"
    )


def _is_part(part: Any, whole: Any) -> bool:
    if isinstance(part, Mapping):
        return isinstance(whole, Mapping) and all(
            name in whole and _is_part(value, whole[name]) for name, value in part.items()
        )
    if isinstance(part, list | tuple):
        return (
            isinstance(whole, list) and len(part) == len(whole) and all(map(_is_part, part, whole))
        )
    return bool(part == whole) and isinstance(part, bool) == isinstance(whole, bool)


def show_body(body: bytes) -> str:
    """The beginning of a body, for people."""
    text = body.decode("utf-8", "replace")
    return repr(text if len(text) <= _BODY_CHARS_MAX else text[:_BODY_CHARS_MAX] + "…")
