"""What becomes due when: deadlines in buckets of about a second, so that waiting costs nothing.

Far deadlines lie in one dict a bucket, where adding and discarding are O(1) and leave nothing
behind. Only when a bucket's time comes are its deadlines put in exact order (the near heap).
Entries of the near heap are not removed when a deadline is called off; `pop` hands them out all
the same, and the caller asks the delivery whether it still means it.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Final

from penstock.core.delivery import Delivery

NEVER_MS: Final = 1 << 62
BUCKET_BITS: Final = 10
SMALL_BYTES_MAX: Final = 4_096


class Alarm:
    """The first instant at which any of several things may be due; never later than it should."""

    __slots__ = ("next_ms",)

    def __init__(self) -> None:
        self.next_ms = NEVER_MS


class Due:
    """Deliveries by an instant of theirs; lowers the alarm to the first one."""

    __slots__ = ("_alarm", "_buckets", "_instant", "_near", "_opened", "_starts")

    def __init__(self, instant: Callable[[Delivery], int], alarm: Alarm) -> None:
        self._instant = instant
        self._alarm = alarm
        self._buckets: dict[int, dict[int, Delivery]] = {}
        self._starts: list[int] = []
        self._near: list[tuple[int, int, Delivery]] = []
        self._opened = -1

    def add(self, at_ms: int, delivery: Delivery) -> None:
        """Notes that the delivery is due at that instant."""
        key = at_ms >> BUCKET_BITS
        if key <= self._opened:
            heappush(self._near, (at_ms, delivery.number, delivery))
            if at_ms < self._alarm.next_ms:
                self._alarm.next_ms = at_ms
            return
        bucket = self._buckets.get(key)
        if bucket is None:
            self._buckets[key] = {delivery.number: delivery}
            heappush(self._starts, key)
            if key << BUCKET_BITS < self._alarm.next_ms:
                self._alarm.next_ms = key << BUCKET_BITS
        else:
            bucket[delivery.number] = delivery

    def add_all(self, at_ms: int, deliveries: list[Delivery]) -> None:
        """Notes that all of these are due at that instant."""
        for delivery in deliveries:
            self.add(at_ms, delivery)
            bucket = self._buckets.get(at_ms >> BUCKET_BITS)
            if bucket is not None:
                # The first has made the bucket, and lowered the alarm if need be.
                bucket.update({each.number: each for each in deliveries})
                return

    def discard(self, at_ms: int, delivery: Delivery) -> None:
        """Forgets a deadline noted before."""
        bucket = self._buckets.get(at_ms >> BUCKET_BITS)
        if bucket is not None:
            bucket.pop(delivery.number, None)
            # An emptied dict keeps its table, a cleared one gives it back; a small one may stay.
            if not bucket and bucket.__sizeof__() > SMALL_BYTES_MAX:
                bucket.clear()

    def pop(self, now_ms: int, limit: int = NEVER_MS) -> list[tuple[int, Delivery]]:
        """Takes out what is due, earliest first, with the instant each was noted for."""
        while self._starts and self._starts[0] << BUCKET_BITS <= now_ms:
            self._opened = heappop(self._starts)
            bucket = self._buckets.pop(self._opened)
            self._near.extend([(self._instant(d), number, d) for number, d in bucket.items()])
            heapify(self._near)
        due: list[tuple[int, Delivery]] = []
        near = self._near
        while near and near[0][0] <= now_ms and len(due) < limit:
            at_ms, _, delivery = heappop(near)
            due.append((at_ms, delivery))
        return due

    @property
    def next_ms(self) -> int:
        """No later than the first instant noted."""
        if self._near:
            return self._near[0][0]
        return self._starts[0] << BUCKET_BITS if self._starts else NEVER_MS
