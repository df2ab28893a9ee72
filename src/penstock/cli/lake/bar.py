"""A line on stderr that shows progress: how much is done, how fast, and how long the rest takes."""

import sys
import time
from typing import Self

from penstock.cli.values import show_duration


class Bar:
    """The progress of one piece of work; leaving the context removes the line.

    Nothing is shown if stderr is not a terminal.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._first: tuple[float, int] | None = None
        self._shown = sys.stderr is not None and sys.stderr.isatty()

    def rate(self, done: int) -> float:
        """How much was done a second, on average since the first call."""
        now_s = time.monotonic()
        since_s, begun = self._first = self._first or (now_s, done)
        return (done - begun) / max(0.001, now_s - since_s)

    def show(self, part: float, text: str) -> None:
        """Shows the fraction that is done, and a text."""
        if self._shown:
            filled = "━" * round(20 * part)
            sys.stderr.write(f"\r\x1b[K{self._label} {filled:·<20} {part:4.0%} {text}")
            sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Also after an error: the sentence about it must not follow the bar on its line.
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def show_left(left: int, rate: float) -> str:
    """How long the rest will take at this rate; nothing if the rate is not known yet."""
    return f", {show_duration(1_000 * round(left / rate))} left" if rate > 0 else ""
