"""Ids remembered for a while: request ids against duplicates, attempt ids for repeated pulls.

Old ids are let go only when a new one is remembered, by the time that new one carries, so that a
replay forgets exactly what the living engine forgot.
"""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

V = TypeVar("V")
Key = str | tuple[str, str]


class Window(Generic[V]):
    """What each id stood for, if it was remembered within the window; at most `count_max` ids."""

    __slots__ = ("_by_key", "_count_max", "_order", "_window_ms")

    def __init__(self, window_ms: int, count_max: int) -> None:
        self._window_ms = window_ms
        self._count_max = count_max
        self._by_key: dict[Key, tuple[int, V]] = {}
        self._order: deque[tuple[int, Key]] = deque()

    def find(self, key: Key, now_ms: int) -> V | None:
        """What the id stands for now, if anything."""
        found = self._by_key.get(key)
        if found is None or found[0] + self._window_ms <= now_ms:
            return None
        return found[1]

    def remember(self, key: Key, value: V, at_ms: int) -> None:
        """Lets the id stand for the value from this instant on."""
        order = self._order
        by_key = self._by_key
        while order and (order[0][0] + self._window_ms <= at_ms or len(order) >= self._count_max):
            oldest_ms, oldest = order.popleft()
            found = by_key.get(oldest)
            if found is not None and found[0] == oldest_ms:
                del by_key[oldest]
        by_key[key] = (at_ms, value)
        order.append((at_ms, key))

    def keep(self, wanted: Callable[[V], bool]) -> None:
        """Forgets every id but those that stand for something wanted."""
        kept = [entry for entry in self.entries() if wanted(entry[2])]
        self._by_key = {key: (at_ms, value) for at_ms, key, value in kept}
        self._order = deque((at_ms, key) for at_ms, key, _ in kept)

    def entries(self) -> list[tuple[int, Key, V]]:
        """Everything remembered, oldest first, for a snapshot."""
        return [
            (at_ms, key, self._by_key[key][1])
            for at_ms, key in self._order
            if key in self._by_key and self._by_key[key][0] == at_ms
        ]
