"""One line on stderr that says how far, how fast and how long yet."""

import sys
import time

from penstock.cli.values import show_duration


class Bar:
    """The progress of one thing; nothing if nobody looks."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._start_s = time.monotonic()
        self._shown = sys.stderr is not None and sys.stderr.isatty()

    def rate(self, done: int) -> float:
        """How much of something was done in a second, since the bar began."""
        return max(0, done) / max(0.001, time.monotonic() - self._start_s)

    def show(self, part: float, text: str) -> None:
        """Shows a part of the whole."""
        if self._shown:
            filled = "━" * round(20 * part)
            sys.stderr.write(f"\r\x1b[K{self._label} {filled:·<20} {part:4.0%} {text}")
            sys.stderr.flush()

    def end(self) -> None:
        """Takes the line away."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")


def show_left(left: int, rate: float) -> str:
    """How long the rest will take at this rate, if that can be said."""
    return f", {show_duration(1_000 * round(left / rate))} left" if rate else ""
