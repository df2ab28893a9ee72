"""Containers that are no longer needed, emptied some items at a time.

Freeing a dict with a million messages takes a tenth of a second in one step. A purge therefore
replaces its containers by empty ones, and the old ones are emptied here, a part with each command.
While a journal is replayed no command waits: without `is_deferred` everything is freed at once.
"""

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

if TYPE_CHECKING:
    from penstock.core.due import Alarm

TRIMMED_MAX: Final = 2_000

Container = dict[Any, Any] | list[Any] | deque[Any]


@runtime_checkable
class Composite(Protocol):
    """An object that holds containers."""

    def parts(self) -> Iterator[Container]:
        """The containers that may hold many items."""
        ...


class Discards:
    """Containers to be emptied. Their items may be containers or composites themselves."""

    __slots__ = ("_alarm", "_waiting", "is_deferred")

    def __init__(self, alarm: "Alarm") -> None:
        self.is_deferred = False
        # Set to the past while a container is to be emptied, so that the next command trims.
        self._alarm = alarm
        self._waiting: list[Container] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, *discarded: Container | Composite) -> None:
        """Takes over containers that nothing else refers to."""
        if not self.is_deferred:
            return
        for each in discarded:
            if isinstance(each, dict | list | deque):
                self._waiting.append(each)
            else:
                self._waiting.extend(each.parts())
        self._alarm.next_ms = 0

    def trim(self, limit: int = TRIMMED_MAX) -> None:
        """Frees up to `limit` items."""
        waiting = self._waiting
        composites: dict[type, bool] = {}
        for _ in range(limit):
            if not waiting:
                return
            container = waiting[-1]
            if not container:
                waiting.pop()
                continue
            item = container.popitem()[1] if isinstance(container, dict) else container.pop()
            kind = type(item)
            if kind not in composites:
                composites[kind] = issubclass(kind, dict | list | deque | Composite)
            if composites[kind]:
                self.add(item)
