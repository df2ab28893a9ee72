"""What a stream must have and lacks: files, synced bytes, or the list of its files.

`recovery` finds it out. A stream that lacks something does not open unless the loss is accepted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, NamedTuple

from penstock.journal.manifest import NAME
from penstock.journal.stream_files import name_of


class Cut(NamedTuple):
    """A range of the stream below the watermark, behind the end of its file."""

    number: int
    begin: int
    end: int


@dataclass(frozen=True)
class Loss:
    """What is lacking; false if nothing is. `last` is the last file that is known to belong here.

    `emptied` are files without a header page to which the stream leads: how much of them was
    synced is unknown, because the watermark that said so was in that page.
    `manifest` says why the manifest cannot tell whether there were files behind the last one.
    """

    payload_bytes: int
    last: int
    missing: list[int] = field(default_factory=list)
    emptied: list[int] = field(default_factory=list)
    cut: list[Cut] = field(default_factory=list)
    manifest: Literal["", "missing", "damaged"] = ""

    def __bool__(self) -> bool:
        return bool(self.missing or self.emptied or self.cut or self.manifest)

    @property
    def replaced(self) -> list[int]:
        """The numbers of the files that hold nothing if the loss is accepted."""
        return sorted({*self.missing, *self.emptied})

    @property
    def names(self) -> list[str]:
        """The files whose content is lacking, by name."""
        numbers = {*self.replaced, *(each.number for each in self.cut)}
        return [*([NAME] if self.manifest else []), *map(name_of, sorted(numbers))]

    def summary(self) -> str:
        """How many files are concerned, and which offsets of the stream they held, in one line."""
        kind = "missing"
        if self.emptied or self.cut or self.manifest == "damaged":
            kind = "missing or damaged"
        return f"{len(self.names)} of its files are {kind}: {self.describe()}"

    def describe(self) -> str:
        """The names of the files and the offsets of the stream that they held."""
        return " and ".join(self._parts())

    def _parts(self) -> Iterator[str]:
        last = name_of(self.last)
        if self.manifest == "missing":
            yield f"{NAME} (which listed the files, and any behind {last})"
        elif self.manifest:
            yield f"{NAME} (damaged; it listed the files, and any behind {last})"
        for first, last_number in runs(self.missing):
            to = f" to {name_of(last_number)}" if last_number > first else ""
            yield f"{name_of(first)}{to} ({self._offsets(first, last_number)})"
        for number in self.emptied:
            yield f"{name_of(number)} (emptied; {self._offsets(number, number)})"
        for number, begin, end in self.cut:
            yield f"{name_of(number)} (cut; offsets {begin} to {end})"

    def findings(self) -> Iterator[str]:
        """One sentence about each file, for a report."""
        last = name_of(self.last)
        if self.manifest:
            yield (
                f"{NAME} is {self.manifest}; it listed the files, so any behind {last} may be "
                "missing too"
            )
        for number in self.missing:
            held = self._offsets(number, number)
            yield f"file {name_of(number)} is missing; it held {held}"
        for number in self.emptied:
            held = self._offsets(number, number)
            yield f"file {name_of(number)} was emptied; it held {held}, or a part of them"
        for number, begin, end in self.cut:
            yield f"file {name_of(number)} was cut; it held offsets {begin} to {end}"

    def _offsets(self, first: int, last: int) -> str:
        return f"offsets {first * self.payload_bytes} to {(last + 1) * self.payload_bytes}"


def runs(numbers: list[int]) -> list[tuple[int, int]]:
    """The first and the last of each run of numbers without a gap."""
    found = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ]
    return [(run[0], run[-1]) for run in found]
