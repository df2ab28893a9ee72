"""Events of the primary's journal, gathered into one batch for each queue.

A batch is repeated on the mirror in four steps, each of which is one command: pushes, releases of
held claims, new claims, deletes. For a single message this is the order in which its events
happened, and pushes keep their order. A message that was claimed and released within one batch
needs neither step. Events about queues, such as a purge, are applied between two batches.
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
_RELEASES: Final = frozenset({Released, ClaimExpired})


class ClaimedUntil(NamedTuple):
    """A message is claimed on the primary until this time."""

    deadline_ms: int


class ReleasedAt(NamedTuple):
    """A message whose claim has ended; it is visible from this time on, or now if it is 0."""

    visible_at_ms: int


class QueueBatch:
    """What happened to the messages of one queue."""

    __slots__ = ("claimed", "ended", "pushed", "released")

    def __init__(self) -> None:
        self.pushed: list[Pushed] = []
        # By message number, in order; a message is in at most one of the three.
        self.claimed: dict[int, ClaimedUntil] = {}
        self.released: dict[int, ReleasedAt] = {}
        self.ended: dict[int, None] = {}

    def add(self, event: AnyEvent) -> None:
        """Adds an event of a message."""
        kind = type(event)
        if kind is Pushed:
            self.pushed.append(event)  # type: ignore[arg-type]
            return
        number: int = event.number  # type: ignore[union-attr]
        if kind in _ENDS:
            self.claimed.pop(number, None)
            self.released.pop(number, None)
            self.ended[number] = None
        elif kind is Claimed or kind is Extended:
            self.released.pop(number, None)
            self.claimed[number] = ClaimedUntil(event.deadline_ms)  # type: ignore[union-attr]
        elif kind in _RELEASES:
            self.claimed.pop(number, None)
            self.released[number] = ReleasedAt(getattr(event, "visible_at_ms", 0))


class EventBatch:
    """Events of messages, by queue in the order in which the queues first appear."""

    def __init__(self) -> None:
        self.queues: dict[int, QueueBatch] = {}
        self.events = 0
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether it should be applied before more events are added."""
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
