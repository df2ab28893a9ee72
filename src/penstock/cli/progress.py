"""A line on stderr that shows how far a command is: how much, how fast, and how long yet."""

import os
import sys
import time
from typing import Final

from penstock.cli.values import show_age, show_duration
from penstock.output import overwrite_line, printable

_CELLS: Final = 20
_EVERY_S: Final = 0.2
# Before this, a rate says nothing.
_KNOWN_S: Final = 0.5


def at_terminal() -> bool:
    """Whether stderr is a terminal, on which a line can be drawn."""
    return sys.stderr is not None and sys.stderr.isatty()


def draw_line(text: str) -> None:
    """Draws the line over the last one; a part that does not fit is left out.

    One that wraps would stay.
    """
    overwrite_line(text[: _columns() - 1])


def bar_line(name: str, part: float | None, *notes: str) -> str:
    """The text of the line; `part` is from 0 to 1, or None if it is not known."""
    filled = "━" * round(_CELLS * (part or 0.0))
    known = "" if part is None else f" {part:4.0%}"
    shown = ", ".join(note for note in notes if note)
    return f"{printable(name)} {filled:·<{_CELLS}}{known}{f', {shown}' if shown else ''}"


def show_left(seconds: float) -> str:
    """How long it takes yet; nothing for less than a second."""
    whole = round(seconds)
    if whole < 1:
        return ""
    return f"{show_duration(1_000 * whole) if whole < 60 else show_age(1_000 * whole)} left"


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:
        return 80


class Progress:
    """Counts what a command has done, and draws it a few times a second at a terminal.

    A context: the line is removed at its end.
    """

    def __init__(self, name: str, total: int, noun: str = "messages") -> None:
        self._name = name
        self._total = total
        self._noun = noun
        self.done = 0
        self._began_s = time.monotonic()
        self._drawn_s = 0.0
        self._draws = at_terminal()

    def advance(self, count: int = 1) -> None:
        """So many more are done."""
        self.done += count
        now_s = time.monotonic()
        if self._draws and now_s - self._drawn_s >= _EVERY_S:
            self._drawn_s = now_s
            draw_line(self.text(now_s - self._began_s))

    def text(self, passed_s: float) -> str:
        """The line, after so many seconds."""
        # More may have come since the total was counted.
        total = max(self._total, self.done)
        rate = left = ""
        if passed_s >= _KNOWN_S and self.done:
            per_s = self.done / passed_s
            rate = f"{per_s:,.0f}/s"
            left = show_left((total - self.done) / per_s)
        counted = f"{self.done:,} of {total:,} {self._noun}"
        return bar_line(self._name, self.done / total if total else 1.0, counted, rate, left)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn_s:
            draw_line("")
