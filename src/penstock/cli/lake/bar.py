"""One line on stderr that says how far, how fast and how long yet."""

import sys
import time

from penstock.cli.values import show_duration


class Bar:
    """The progress of one thing; nothing if nobody looks."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._first: tuple[float, int] | None = None
        self._shown = sys.stderr is not None and sys.stderr.isatty()

    def rate(self, done: int) -> float:
        """How much was done in a second, since this was first asked."""
        now_s = time.monotonic()
        since_s, begun = self._first = self._first or (now_s, done)
        return (done - begun) / max(0.001, now_s - since_s)

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
    return f", {show_duration(1_000 * round(left / rate))} left" if rate > 0 else ""
