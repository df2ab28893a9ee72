"""Ids kept for a limited time: dedup ids of pushes, attempt ids of pulls.

Old ids are dropped only when a new one is added, by the time of the new one, so that a replay drops
exactly the ids that the running engine dropped.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, repeat
from operator import is_
from typing import Generic, TypeVar

from penstock.core.discards import Container

T = TypeVar("T")
V = TypeVar("V")
Key = str | tuple[str, str]


class Window(Generic[V]):
    """A value for each id remembered within the window; at most `count_max` ids."""

    __slots__ = ("_by_key", "_count_max", "_forgotten", "_keys", "_times", "_window_ms")

    def __init__(self, window_ms: int, count_max: int) -> None:
        self._window_ms = window_ms
        self._count_max = count_max
        self._by_key: dict[Key, tuple[int, V]] = {}
        # In order of time; both have the same length.
        self._times: deque[int] = deque()
        self._keys: deque[Key] = deque()
        # How many were dropped: the index of the oldest one kept, counted from the first.
        self._forgotten = 0

    def find(self, key: Key, now_ms: int) -> V | None:
        """The value of the id, if it is still remembered."""
        entry = self._by_key.get(key)
        if entry is None or entry[0] + self._window_ms <= now_ms:
            return None
        return entry[1]

    def remember(self, key: Key, value: V, at_ms: int) -> None:
        """Stores the value of the id for the length of the window, from this instant on."""
        times = self._times
        if times and (times[0] + self._window_ms <= at_ms or len(times) >= self._count_max):
            self._forget(at_ms, 1)
        self._by_key[key] = (at_ms, value)
        times.append(at_ms)
        self._keys.append(key)

    def remember_new(self, keys: Sequence[Key], values: Iterable[V], at_ms: int) -> bool:
        """Remembers many ids as `remember` would one after another, if all of them are new.

        False, and nothing has changed, if one is known, even an expired one, or comes twice.
        """
        by_key = self._by_key
        entries = list(zip(repeat(at_ms), values, strict=False))
        # One lookup for each id: the dict may be too large for the processor's cache.
        stored = list(map(by_key.setdefault, keys, entries))
        if not all(map(is_, stored, entries)):
            for key, one, other in zip(keys, stored, entries, strict=True):
                if one is other:
                    del by_key[key]
            return False
        self._forget(at_ms, len(keys))
        self._times.extend(repeat(at_ms, len(keys)))
        self._keys.extend(keys)
        return True

    def _forget(self, at_ms: int, coming: int) -> None:
        """Drops ids that are too old, and the oldest if there is no room for `coming` more."""
        times = self._times
        by_key = self._by_key
        while times and (
            times[0] + self._window_ms <= at_ms or len(times) + coming > self._count_max
        ):
            oldest_ms, oldest = times.popleft(), self._keys.popleft()
            self._forgotten += 1
            entry = by_key.get(oldest)
            if entry is not None and entry[0] == oldest_ms:
                del by_key[oldest]

    def keep(self, wanted: Callable[[V], bool]) -> None:
        """Drops every id whose value is not wanted."""
        kept = [entry for entry in self.entries() if wanted(entry[2])]
        self._forgotten += len(self._keys)
        self._by_key = {key: (at_ms, value) for at_ms, key, value in kept}
        self._times = deque(at_ms for at_ms, _, _ in kept)
        self._keys = deque(key for _, key, _ in kept)

    def entries(self) -> list[tuple[int, Key, V]]:
        """Everything remembered, oldest first, for a snapshot."""
        return self.entries_between(*self.indexes())

    def indexes(self) -> tuple[int, int]:
        """The index of the oldest entry and of the next one to come, counted from the first."""
        return self._forgotten, self._forgotten + len(self._keys)

    def entries_between(self, start: int, stop: int) -> list[tuple[int, Key, V]]:
        """The entries of these indexes that are still remembered, oldest first."""
        begin, end = max(0, start - self._forgotten), max(0, stop - self._forgotten)
        times, keys = _between(self._times, begin, end), _between(self._keys, begin, end)
        return [
            (at_ms, key, entry[1])
            for at_ms, key in zip(times, keys, strict=True)
            if (entry := self._by_key.get(key)) is not None and entry[0] == at_ms
        ]

    def parts(self) -> Iterator[Container]:
        """The containers, for `Discards`."""
        yield from (self._by_key, self._times, self._keys)


def _between(items: deque[T], begin: int, end: int) -> list[T]:
    """Some items of a deque, reached from its nearer end: it has no slices."""
    count = len(items)
    if begin + end <= count:
        return list(islice(items, begin, end))
    chosen = list(islice(reversed(items), max(0, count - end), max(0, count - begin)))
    chosen.reverse()
    return chosen
