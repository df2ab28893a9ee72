"""Retention: which messages of a queue have been there for too long.

`deliveries` is in order of arrival, which is also the order in which retention ends messages, so
only the first ones must be examined. Two kinds are passed over and stay: those with a TTL of their
own, and those in flight, which are examined again when their claim ends. They are counted, so that
the next examination begins behind them.
"""

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Final

from penstock.core.delivery import GONE, IN_FLIGHT, Delivery, expiry_ms
from penstock.core.due import NEVER_MS, RETENTION, Alarm, DueTime

if TYPE_CHECKING:
    from penstock.core.queue import QueueState

# How many messages are copied from the dict at once: each copy must first skip those passed over,
# which costs about a hundredth of a microsecond for each.
_PART: Final = 4_096


class Retention:
    """How far the messages of one queue have been examined, and when to continue."""

    __slots__ = ("_alarm", "_at", "_part", "examined", "noted_ms", "passed", "rank")

    def __init__(self, alarm: Alarm) -> None:
        self._alarm = alarm
        # When to examine again; NEVER_MS while no message can expire by retention.
        self.noted_ms = NEVER_MS
        # All messages up to `rank` have been passed over; `passed` of them are still in the queue.
        self.rank = 0
        self.passed = 0
        # Messages behind those, in order, and how many of them have been examined.
        self._part: list[Delivery] = []
        self._at = 0
        # How many messages the last examination covered, one more or less.
        self.examined = 0

    def note(self, queue: int, at_ms: int, number: int = 0) -> None:
        """Notes with the alarm when the queue is to be examined, and for which message if known."""
        self.noted_ms = at_ms
        self._alarm.add((at_ms, number, queue, RETENTION))

    def start_over(self) -> None:
        """Begins at the first message: the queue was emptied, or its retention has changed."""
        self.rank = self.passed = self._at = 0
        self._part = []

    def find_expired(
        self, queue: "QueueState", now_ms: int, limit: int, until: DueTime
    ) -> Iterator[Delivery]:
        """Messages that have expired; the caller must end each before it takes the next.

        Examines up to `limit` messages, none that expires after `until`, and notes when to
        continue.
        """
        retention_ms = queue.settings.retention_ms
        self.noted_ms = NEVER_MS
        for self.examined in range(limit):
            delivery = self._next(queue)
            if delivery is None:
                return
            at_ms = expiry_ms(delivery, retention_ms)
            if delivery.expires_at_ms or (delivery.state == IN_FLIGHT and at_ms <= now_ms):
                self.passed += 1
            elif at_ms > now_ms or (at_ms, delivery.number, queue.number, RETENTION) > until:
                self.note(queue.number, at_ms, delivery.number)
                return
            else:
                yield delivery
            self.rank = delivery.rank
            self._at += 1
        self.note(queue.number, now_ms)

    def _next(self, queue: "QueueState") -> Delivery | None:
        """The first message that was not passed over, which stays where it is."""
        while True:
            part = self._part
            while self._at < len(part) and part[self._at].state == GONE:
                self._at += 1
            if self._at < len(part):
                return part[self._at]
            following = islice(queue.deliveries.values(), self.passed, self.passed + _PART)
            self._part = list(following)
            self._at = 0
            if not self._part:
                return None
