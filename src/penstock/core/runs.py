"""Runs: many plain pushes to one queue at one instant.

A push is plain if it has a body, perhaps a dedup id, and nothing else. Where many come together,
what they share is looked at once and the rest goes by columns, without a step in Python for each.
A run does exactly what its pushes would do one after another.
"""

from collections.abc import Sequence
from itertools import repeat
from typing import Any, Final

from penstock.core.delivery import Arrivals, Delivery
from penstock.core.events import Pushed
from penstock.service import Push, PushMany

# Fewer are cheaper one by one: the columns have to be set up first.
RUN_MIN: Final = 20
# What is not this very object is left to those who look at each push by itself.
_ZERO: Final = 0
_ZEROS: Final = repeat(0)
_NONE: Final = repeat(None)


class Run(list[Pushed]):
    """The events of a run, in order, with their columns beside them."""

    __slots__ = (
        "_known",
        "at_ms",
        "bodies",
        "dedup_ids",
        "deliveries",
        "numbers",
        "queue",
        "size_bytes",
        "sizes",
    )

    def __init__(
        self,
        at_ms: int,
        queue: int,
        first: int,
        bodies: Sequence[bytes],
        dedup_ids: Sequence[str] | None,
        sizes: list[int],
        size_bytes: int,
    ) -> None:
        self.at_ms = at_ms
        self.queue = queue
        self.numbers = range(first, first + len(bodies))
        self.bodies = bodies
        self.dedup_ids = dedup_ids
        self.sizes = sizes
        self.size_bytes = size_bytes
        # The messages, once they have arrived; the journal's places are for these, in order.
        self.deliveries: list[Delivery] = []
        # One object for each number, wherever it stands: a message keeps it for long.
        self._known = list(self.numbers)
        super().__init__(
            map(
                Pushed,
                repeat(at_ms),
                repeat(queue),
                self._known,
                bodies,
                _NONE,
                _ZEROS,
                _NONE,
                _NONE if dedup_ids is None else dedup_ids,
                _ZEROS,
                _ZEROS,
                _NONE,
                sizes,
            )
        )

    def arrivals(self) -> Arrivals:
        """The messages, where they stand at first."""
        numbers = self._known
        self.deliveries = list(
            map(Delivery, repeat(self.queue), numbers, numbers, self, repeat(self.at_ms))
        )
        return Arrivals(self.queue, numbers, self.deliveries, self.size_bytes)


def as_run(items: list[Any]) -> PushMany | None:
    """What a batch is if it has nothing but many plain pushes to one queue; None if not."""
    first = items[0] if len(items) >= RUN_MIN else None
    if type(first) is not Push:
        return None
    queue = first.queue
    named = first.dedup_id is not None
    bodies = [
        item.body
        for item in items
        if type(item) is Push
        and item.delay_ms is None
        and item.group is None
        and item.attributes is None
        and item.context is None
        and item.ttl_ms is None
        and item.priority is _ZERO
        and (item.dedup_id is not None) is named
        and item.queue == queue
    ]
    if len(bodies) != len(items):
        return None
    return PushMany(queue, bodies, [item.dedup_id for item in items] if named else None)
