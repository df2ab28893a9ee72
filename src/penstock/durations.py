"""Durations counted in buckets, cheaply enough for every request and every sync.

A bucket counts the durations up to its bound, its bound included, and above the bound before it;
the last one counts the rest.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

BOUNDS_S: Final = (
    *(0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
_SHORTEST_S: Final = BOUNDS_S[0]


class Durations:
    """How often something took how long."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, duration_s: float) -> float:
        """Counts one duration, and returns it."""
        # Most are in the first bucket.
        self.counts[0 if duration_s <= _SHORTEST_S else bisect_left(BOUNDS_S, duration_s)] += 1
        self.sum_s += duration_s
        return duration_s

    @property
    def total(self) -> int:
        """How many durations were counted."""
        return sum(self.counts)

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """For each bound, as text, how many were not above it; the last bound is `+Inf`."""
        count = 0
        for bound, more in zip((*map(str, BOUNDS_S), "+Inf"), self.counts, strict=True):
            count += more
            yield bound, count
