"""Faults: unexpected exceptions, counted and reported in one line each.

A fault is always a mistake in Penstock, never in a request. The code that catches it answers the
client; here it is counted, for `penstock_faults_total`, and written to the standard error: the
class of the exception, and where it was raised. Its text is left out, because it can contain a
message, a receipt or a key. At most one line a second is written; the next line has the number of
those left out.
"""

import time
from asyncio import AbstractEventLoop
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from penstock.output import report

LINE_PERIOD_S: Final = 1.0


class Faults:
    """The faults of one process."""

    def __init__(self) -> None:
        self.total = 0
        self._left_out = 0
        self._next_line_s = 0.0

    def report(self, what: str, error: BaseException) -> None:
        """Counts a fault; `what` names what failed, such as "SendMessage"."""
        self.total += 1
        now_s = time.monotonic()
        if now_s < self._next_line_s:
            self._left_out += 1
            return
        self._next_line_s = now_s + LINE_PERIOD_S
        more = f" ({self._left_out} more since the last line)" if self._left_out else ""
        self._left_out = 0
        place = _place(error.__traceback__)
        report(f"fault in {what}: {type(error).__name__} at {place}{more}")

    def from_loop(self, loop: AbstractEventLoop, context: dict[str, Any]) -> None:
        """The same, for an event loop: give it to `set_exception_handler`."""
        error = context.get("exception")
        what = str(context.get("message", "the event loop"))
        self.report(what, error if isinstance(error, BaseException) else RuntimeError())


def _place(traceback: TracebackType | None) -> str:
    """Where an exception was raised, as a file and a line."""
    if traceback is None:
        return "an unknown place"
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    path = Path(traceback.tb_frame.f_code.co_filename)
    return f"{'/'.join(path.parts[-3:])}:{traceback.tb_lineno}"
