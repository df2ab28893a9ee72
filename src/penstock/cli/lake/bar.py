"""A line on stderr that shows what a command waits for: the step, how much of it, how long yet."""

import threading
from typing import ClassVar, Final

from penstock.cli.progress import at_terminal, bar_line, draw_line, show_left
from penstock.spark.progress import StepStatus, show_steps, status

_EVERY_S: Final = 0.3


class ProgressLine:
    """Draws the innermost step while there is one, and removes the line when there is none."""

    _shown: ClassVar["ProgressLine | None"] = None

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._drawn = False
        self._wanted = threading.Event()
        show_steps(self._update)
        threading.Thread(target=self._draw_often, daemon=True).start()

    @classmethod
    def show(cls) -> None:
        """Begins to draw, once a process, if stderr is a terminal."""
        if cls._shown is None and at_terminal():
            cls._shown = cls()

    def _update(self) -> None:
        """Draws at once, so that what is printed after a step is on a line of its own."""
        found = status()
        with self._lock:
            if found is not None:
                self._wanted.set()
                self._draw(found)
            else:
                self._wanted.clear()
                self._clear()

    def _draw_often(self) -> None:
        while True:
            self._wanted.wait()
            found = status()
            with self._lock:
                if found is not None and self._wanted.is_set():
                    self._draw(found)
            threading.Event().wait(_EVERY_S)

    def _draw(self, found: StepStatus) -> None:
        # A program that calls a command may have put something else in the place of stderr since.
        if at_terminal():
            draw_line(line_of(found))
            self._drawn = True

    def _clear(self) -> None:
        if self._drawn:
            draw_line("")
            self._drawn = False


def line_of(found: StepStatus) -> str:
    """The text of the line."""
    rows = f"{found.rows:,} rows" if found.rows else ""
    left = "waiting for an executor" if found.waits else show_left(found.left_s or 0)
    return bar_line(found.name, found.part, rows, left)
