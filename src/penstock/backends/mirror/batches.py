"""What a stretch of the primary's journal comes to, for each of its queues.

Events of messages are gathered into batches. On the mirror a batch is done in the order pushes,
ends of claims that are held, claims, deletes, so that each of these is one command: of a single
message that is the order in which it happened, and pushes keep theirs. A message that was claimed
and released within a batch ends as it was. Events of queues stand between batches.
"""

from typing import Final, NamedTuple

from penstock.core.events import (
    AnyEvent,
    Claimed,
    ClaimExpired,
    Deleted,
    Departed,
    Expired,
    Extended,
    Lost,
    Pushed,
    Released,
)

BATCH_EVENTS_MAX: Final = 2_000
BATCH_BYTES_MAX: Final = 8 * 1024 * 1024

_ENDS: Final = frozenset({Deleted, Expired, Lost, Departed})
_RETURNS: Final = frozenset({Released, ClaimExpired})


class LentUntil(NamedTuple):
    """A message that is claimed on the primary, until this instant."""

    deadline_ms: int


class ReturnedAt(NamedTuple):
    """A message whose claim has ended; it is visible from this instant on, 0 for at once."""

    visible_at_ms: int


class QueueBatch:
    """What happened to the messages of one queue."""

    __slots__ = ("ended", "lent", "pushed", "returned")

    def __init__(self) -> None:
        self.pushed: list[Pushed] = []
        # By message, in order; each message is in one of them at most.
        self.lent: dict[int, LentUntil] = {}
        self.returned: dict[int, ReturnedAt] = {}
        self.ended: dict[int, None] = {}

    def add(self, event: AnyEvent) -> None:
        """Adds an event of a message."""
        kind = type(event)
        if kind is Pushed:
            self.pushed.append(event)  # type: ignore[arg-type]
            return
        number: int = event.number  # type: ignore[union-attr]
        if kind in _ENDS:
            self.lent.pop(number, None)
            self.returned.pop(number, None)
            self.ended[number] = None
        elif kind is Claimed or kind is Extended:
            self.returned.pop(number, None)
            self.lent[number] = LentUntil(event.deadline_ms)  # type: ignore[union-attr]
        elif kind in _RETURNS:
            self.lent.pop(number, None)
            self.returned[number] = ReturnedAt(getattr(event, "visible_at_ms", 0))


class EventBatch:
    """Events of messages, by queue in the order in which the queues first appear."""

    def __init__(self) -> None:
        self.queues: dict[int, QueueBatch] = {}
        self.events = 0
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether it should be done before more is added."""
        return self.events >= BATCH_EVENTS_MAX or self._bytes >= BATCH_BYTES_MAX

    def add(self, event: AnyEvent) -> None:
        """Adds an event of a message."""
        queue = self.queues.get(event.queue)
        if queue is None:
            queue = self.queues[event.queue] = QueueBatch()
        queue.add(event)
        self.events += 1
        if type(event) is Pushed:
            self._bytes += event.size_bytes


MESSAGE_EVENTS: Final = frozenset(
    {Pushed, Claimed, Extended, Released, ClaimExpired, Deleted, Expired, Lost, Departed}
)
