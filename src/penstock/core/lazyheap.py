"""A heap of lines by a key of their first message, corrected only at its top.

When a line changes, its old entry is not searched for. An entry with the new key is added, and the
old one stays until it comes to the top, where it is dropped or replaced. So a line that can be
served always has an entry with its current key or a smaller one, and the first entry whose key is
current belongs to the line with the smallest key.
"""

from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from typing import Generic, Protocol, TypeVar

from penstock.core.delivery import Delivery

K = TypeVar("K")


class Listable(Protocol[K]):
    """Messages in order; `listed` holds the keys of the entries that the heap has for them."""

    listed: set[K]

    def first(self) -> Delivery | None:
        """The message whose key orders the line; it stays in its place."""
        ...


L = TypeVar("L", bound=Listable)  # type: ignore[type-arg]


class LazyHeap(list[tuple[K, str]], Generic[K, L]):
    """Entries (key, name of the line). A list, so that testing whether it is empty costs nothing.

    `lines` has the lines by name. A line that is removed from it is dropped from the heap when its
    entry comes up. `key` returns None for a first message that cannot be served now.
    """

    __slots__ = ("_key", "_lines")

    def __init__(self, lines: Mapping[str, L], key: Callable[[Delivery], K | None]) -> None:
        super().__init__()
        self._lines = lines
        self._key = key

    def enlist(self, name: str, line: L, first: Delivery) -> None:
        """Lists the line under the key of its first message, once for each key."""
        key = self._key(first)
        if key is not None and key not in line.listed:
            line.listed.add(key)
            heappush(self, (key, name))

    def first(self) -> tuple[Delivery, L] | None:
        """The line with the smallest key and its first message; the entry stays at the top."""
        while self:
            key, name = self[0]
            line = self._lines.get(name)
            first = None if line is None else line.first()
            if line is not None and first is not None and self._key(first) == key:
                return first, line
            heappop(self)
            if line is not None:
                line.listed.discard(key)
                if first is not None:
                    self.enlist(name, line, first)
        return None
