"""Which parts of a journal have events of a message, so that its history is read without the rest.

A part is about a megabyte of the stream, from the beginning of one entry to that of another, with
the numbers of its messages in order: about four bytes for each. It is in memory only. What is
appended is added as it comes; what was there before is added in the background, by `index_rest`, or
by a history that comes before that.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Final, NamedTuple

_UINT_MAX: Final = 2**32 - 1


class IndexedPart(NamedTuple):
    """A part of the stream and the numbers in it, less the lowest of them."""

    start: int
    end: int
    base: int
    numbers: "array[int]"

    def has(self, number: int) -> bool:
        """Whether the part has an event of this message."""
        at = bisect_left(self.numbers, number - self.base)
        return at < len(self.numbers) and self.numbers[at] == number - self.base


class NumberIndex:
    """The parts of one journal. `numbers` are those of the part that is being written."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        # Where the part that is being written begins; None before the first append.
        self.open_start: int | None = None
        self._starts: list[int] = []
        self._parts: dict[int, IndexedPart] = {}

    def close_part(self, offset: int) -> None:
        """The entry at this offset begins another part."""
        if self.open_start is not None and self.open_start < offset:
            self.add(self.open_start, offset, self.numbers)
        self.numbers.clear()
        self.open_start = offset

    def add(self, start: int, end: int, numbers: Iterable[int]) -> None:
        """Adds a part."""
        ordered = sorted(set(numbers))
        base = ordered[0] if ordered else 0
        kind = "I" if not ordered or ordered[-1] - base <= _UINT_MAX else "Q"
        if start not in self._parts:
            self._starts.insert(bisect_left(self._starts, start), start)
        self._parts[start] = IndexedPart(
            start, end, base, array(kind, [number - base for number in ordered])
        )

    def part_at(self, offset: int) -> IndexedPart | None:
        """The part that begins here, if it is known."""
        return self._parts.get(offset)

    def known_after(self, offset: int, end: int) -> int:
        """Where the next known part begins, or the one that is being written, or the end."""
        at = bisect_right(self._starts, offset)
        following = self._starts[at] if at < len(self._starts) else end
        if self.open_start is not None and self.open_start > offset:
            following = min(following, self.open_start)
        return min(following, end)

    def drop_before(self, offset: int) -> None:
        """Forgets the parts that end before this offset, because their files are gone."""
        kept = bisect_right(self._starts, offset)
        # The part before it may reach behind the offset; it is read from its beginning only.
        for start in self._starts[:kept]:
            if start < offset:
                del self._parts[start]
        self._starts = [start for start in self._starts[:kept] if start >= offset] + self._starts[
            kept:
        ]
