"""Runs: many plain pushes to one queue at one instant.

A push is plain if it has a body, optionally a dedup id, and nothing else. Fields that all pushes of
a run share are checked once; bodies, ids and sizes are handled as columns, without a Python loop. A
run has exactly the effect of its pushes one after another.
"""

from collections.abc import Sequence
from itertools import repeat
from typing import Any, Final

from penstock.core.delivery import Arrivals, Delivery
from penstock.core.events import Pushed
from penstock.service import Push, PushMany

# A smaller batch is pushed one by one: the columns have a fixed cost.
RUN_MIN: Final = 4
# A priority that is not this object (0.0, False) is left to the checks of a single push.
_ZERO: Final = 0
_ZEROS: Final = repeat(0)
_NONE: Final = repeat(None)


class Run(list[Pushed]):
    """The events of a run, in order, with their columns beside them."""

    __slots__ = (
        "_number_objects",
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
        # Set by `arrivals`; the places that the journal returns belong to these, in order.
        self.deliveries: list[Delivery] = []
        # One int object for each number, shared by the event and the message that keeps it.
        self._number_objects = list(self.numbers)
        super().__init__(
            map(
                Pushed,
                repeat(at_ms),
                repeat(queue),
                self._number_objects,
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
        """Makes the messages of the run in their first state."""
        numbers = self._number_objects
        self.deliveries = list(
            map(Delivery, repeat(self.queue), numbers, numbers, self, repeat(self.at_ms))
        )
        return Arrivals(self.queue, numbers, self.deliveries, self.size_bytes)


def as_run(items: list[Any]) -> PushMany | None:
    """The run that a batch of plain pushes to one queue makes; None for any other batch."""
    first = items[0] if len(items) >= RUN_MIN else None
    if type(first) is not Push:
        return None
    queue = first.queue
    has_dedup_ids = first.dedup_id is not None
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
        and (item.dedup_id is not None) is has_dedup_ids
        and item.queue == queue
    ]
    if len(bodies) != len(items):
        return None
    return PushMany(queue, bodies, [item.dedup_id for item in items] if has_dedup_ids else None)
