"""How often frame servers answered each kind of command, and with which result.

Counting a reply is one addition in a list, because it is part of every request.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from penstock.wire.frames.frames import BULK_PUSH, CANCEL, KIND_OF, STATUS

# A request that is refused before its kind is known, such as one without a number.
NO_KIND: Final = 0
OK: Final = "ok"
_NAMES: Final[dict[int, str]] = {
    **{kind: command.__name__ for command, kind in KIND_OF.items()},
    BULK_PUSH: "PushMany",
    CANCEL: "Cancel",
    STATUS: "Status",
    NO_KIND: "unknown",
}


class CommandCounts:
    """The counts of one process."""

    def __init__(self) -> None:
        # By kind: how many were answered with a reply. By kind and error: how many were refused.
        self.ok = [0] * (max(_NAMES) + 1)
        self._refused: Counter[tuple[int, str]] = Counter()

    def refuse(self, kind: int, error: Exception) -> None:
        """Counts a command that was answered with an error."""
        self._refused[kind if kind in _NAMES else NO_KIND, type(error).__name__] += 1

    def items(self) -> Iterator[tuple[str, str, int]]:
        """Each command's name, its result (`ok`, or the name of the error) and how often."""
        for kind, name in _NAMES.items():
            if self.ok[kind]:
                yield name, OK, self.ok[kind]
        for (kind, error), count in sorted(self._refused.items()):
            yield _NAMES[kind], error, count
