"""What becomes due, and when: instants in buckets of about a second.

Each queue has an index for each kind of instant (`Due`); the `Alarm`, which all of them share, says
which index has something due first. Each bucket of later instants is a dict, where adding and
discarding are O(1). A bucket's deliveries are put in exact order, in a heap (`_near`), only when
its time comes.

A bucket may hold a million deliveries, so it is opened some thousands at a time, in the order in
which they were added. What is due then comes out in exact order within each such part.

Once a bucket is being opened, an instant that is discarded is not removed from it: `pop` may
return deliveries that are not due any more, and the caller must compare the instant with the
delivery's own.
"""

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Final

from penstock.core.delivery import Delivery
from penstock.core.discards import Container, Discards

NEVER_MS: Final = 1 << 62
BUCKET_BITS: Final = 10
SMALL_BYTES_MAX: Final = 4_096
# How many deliveries of a bucket are put in order at once. Ordering _OPENED_PER_POPPED of them
# costs as much as taking one out and settling it.
OPENED_MAX: Final = 4_096
_OPENED_PER_POPPED: Final = 16
# What becomes due.
DEADLINE: Final = 0
EXPIRY: Final = 1
RETENTION: Final = 2

# When, the rank of the first message then (0 if not known yet), the queue, and what is due.
DueTime = tuple[int, int, int, int]
NO_DUE_TIME: Final[DueTime] = (NEVER_MS, 0, 0, 0)


class Alarm:
    """Which queue has something due next, and when; `next_ms` is never later than it should be.

    A due time that was replaced by an earlier one stays in the heap. It is out of date if its
    instant is not the one (`noted_ms`) that its queue keeps.
    """

    __slots__ = ("heap", "next_ms")

    def __init__(self) -> None:
        self.heap: list[DueTime] = []
        self.next_ms = NEVER_MS

    def add(self, due: DueTime) -> None:
        """Notes that something is due; lowers `next_ms` to its instant."""
        heappush(self.heap, due)
        if due[0] < self.next_ms:
            self.next_ms = due[0]


class Due:
    """The deliveries of one queue by an instant of theirs."""

    __slots__ = (
        "_alarm",
        "_buckets",
        "_discards",
        "_instant",
        "_kind",
        "_near",
        "_opened",
        "_opening",
        "_queue",
        "_rest",
        "_starts",
        "is_spent",
        "noted_ms",
    )

    def __init__(
        self,
        queue: int,
        kind: int,
        instant: Callable[[Delivery], int],
        alarm: Alarm,
        discards: Discards,
    ) -> None:
        self._queue = queue
        self._kind = kind
        self._instant = instant
        self._alarm = alarm
        self._discards = discards
        self._buckets: dict[int, dict[int, Delivery]] = {}
        self._starts: list[int] = []
        self._near: list[tuple[int, int, Delivery]] = []
        # The last bucket whose time has come, and those of it that are not in the heap yet.
        self._opened = -1
        self._opening: dict[int, Delivery] = {}
        self._rest: Iterator[Delivery] = iter(())
        # The instant noted with the alarm for this index; any other is out of date.
        self.noted_ms = NEVER_MS
        # Whether the last `pop` stopped at its limit.
        self.is_spent = False

    def add(self, at_ms: int, delivery: Delivery) -> None:
        """Notes that the delivery is due at that instant."""
        key = at_ms >> BUCKET_BITS
        bucket = self._buckets.get(key)
        if bucket is not None:
            bucket[delivery.number] = delivery
        elif key <= self._opened:
            heappush(self._near, (at_ms, delivery.rank, delivery))
            # Also if another of the same instant is noted: among queues the rank decides then.
            if at_ms <= self.noted_ms and self._near[0][2] is delivery:
                self._note(at_ms, delivery.rank)
        else:
            self._buckets[key] = {delivery.number: delivery}
            heappush(self._starts, key)
            if key << BUCKET_BITS < self.noted_ms:
                self._note(key << BUCKET_BITS, 0)

    def add_all(self, at_ms: int, deliveries: list[Delivery]) -> None:
        """Notes that all of these are due at that instant."""
        for delivery in deliveries:
            self.add(at_ms, delivery)
            bucket = self._buckets.get(at_ms >> BUCKET_BITS)
            if bucket is not None:
                # The first `add` has made the bucket and noted it with the alarm if necessary.
                bucket.update({each.number: each for each in deliveries})
                return

    def discard(self, at_ms: int, delivery: Delivery) -> None:
        """Removes an instant that was added."""
        bucket = self._buckets.get(at_ms >> BUCKET_BITS)
        if bucket is not None:
            bucket.pop(delivery.number, None)
            # An emptied dict keeps its table, clear() frees it; a small table may stay.
            if not bucket and bucket.__sizeof__() > SMALL_BYTES_MAX:
                bucket.clear()

    def pop(
        self, now_ms: int, limit: int = NEVER_MS, until: DueTime = NO_DUE_TIME
    ) -> list[tuple[int, Delivery]]:
        """Takes out what is due, earliest first, with the instant each was added for.

        At most `limit` deliveries, or fewer if many had to be put in order first; and none after
        `until`, the due time of another index.
        """
        due: list[tuple[int, Delivery]] = []
        near = self._near
        work = 0
        self.is_spent = False
        while True:
            if len(due) + work >= limit:
                self.is_spent = True
                break
            is_ready = bool(near) and near[0][0] <= now_ms
            if not (is_ready and len(near) >= OPENED_MAX) and self._has_unopened(now_ms):
                work += self._open() // _OPENED_PER_POPPED
            elif is_ready and self._is_before(near[0], until):
                at_ms, _, delivery = heappop(near)
                due.append((at_ms, delivery))
            else:
                break
        return due

    def _is_before(self, entry: tuple[int, int, Delivery], until: DueTime) -> bool:
        at_ms, rank, _ = entry
        return at_ms < until[0] or (at_ms, rank, self._queue, self._kind) <= until

    def _has_unopened(self, now_ms: int) -> bool:
        """Whether a bucket whose time has come is not completely in the heap yet."""
        starts = self._starts
        return bool(self._opening) or (bool(starts) and starts[0] << BUCKET_BITS <= now_ms)

    def _open(self) -> int:
        """Puts the next deliveries of the first bucket into the heap; returns how many."""
        if not self._opening:
            self._opened = heappop(self._starts)
            # Nothing is added to it or removed from it any more, so it can be walked in parts.
            self._opening = self._buckets.pop(self._opened)
            self._rest = iter(self._opening.values())
        part = list(islice(self._rest, OPENED_MAX))
        if len(part) < OPENED_MAX:
            self._discards.add(self._opening)
            self._opening = {}
        instant, opened = self._instant, self._opened
        entries = [
            (at_ms, each.rank, each)
            for each in part
            # One whose instant was discarded or changed since the bucket was opened is left out.
            if (at_ms := instant(each)) >> BUCKET_BITS == opened
        ]
        near = self._near
        if len(near) < 2 * len(entries):
            near.extend(entries)
            heapify(near)
        else:
            for entry in entries:
                heappush(near, entry)
        return len(part)

    def note_next(self, now_ms: int) -> None:
        """Notes with the alarm what is due next.

        If the last `pop` stopped at its limit, what is still due here is put after everything that
        is due by now in other queues.
        """
        at_ms, rank = NEVER_MS, 0
        if self._near and (self._near[0][0] <= now_ms or not self._opening):
            at_ms, rank, _ = self._near[0]
        elif self._opening:
            at_ms = self._opened << BUCKET_BITS
        elif self._starts:
            at_ms = self._starts[0] << BUCKET_BITS
        if self.is_spent and at_ms < now_ms:
            at_ms, rank = now_ms, 0
        self.noted_ms = NEVER_MS
        if at_ms < NEVER_MS:
            self._note(at_ms, rank)

    def _note(self, at_ms: int, rank: int) -> None:
        self.noted_ms = at_ms
        self._alarm.add((at_ms, rank, self._queue, self._kind))

    @property
    def next_ms(self) -> int:
        """No later than the first instant noted."""
        first_ms = self._near[0][0] if self._near else NEVER_MS
        if self._opening:
            return min(first_ms, self._opened << BUCKET_BITS)
        return min(first_ms, self._starts[0] << BUCKET_BITS if self._starts else NEVER_MS)

    def parts(self) -> Iterator[Container]:
        """The containers, for `Discards`."""
        yield from (self._near, self._opening, self._buckets)
