"""A server's lines on stderr: one for each start, stop, reload, refused or slow request.

A line has the instant, the name of an event, and fields. None of them is ever a message's body, a
receipt, or a key, and none is the text of an error, which could contain one. What clients choose,
such as a path, is cut and escaped (`output.report_event`).

Nothing is formatted for a request that gets no line. A client that causes thousands of them gets
LINES_PER_S of each event; the next line has the number of those left out. A line is also left out
while stderr has no room for it, so that a stuck reader of a pipe does not stop the server.
"""

import select
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Final

from penstock.output import report_event

LINES_PER_S: Final = 10
TEXT_CHARS_MAX: Final = 200

STARTED: Final = "started"
STOPPING: Final = "stopping"
STOPPED: Final = "stopped"
RELOADED: Final = "reloaded"
RELOAD_REFUSED: Final = "reload-refused"
REQUEST_REFUSED: Final = "request-refused"
REQUEST_FAILED: Final = "request-failed"
REQUEST_SLOW: Final = "request-slow"
SIGNATURE_REFUSED: Final = "signature-refused"
TOKEN_REFUSED: Final = "token-refused"
READY: Final = "ready"
READY_FAILED: Final = "ready-failed"
READER_ABANDONED: Final = "reader-abandoned"


class ServerLines:
    """The lines of one server."""

    def __init__(self, clock_s: Callable[[], float] = monotonic) -> None:
        self._clock_s = clock_s
        self._second = 0
        # How many lines of each event were written in this second, and left out since the last.
        self._written: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()

    def tell(self, event: str, **fields: object) -> None:
        """Writes a line, or counts it as left out."""
        second = int(self._clock_s())
        if second != self._second:
            self._second = second
            self._written.clear()
        if self._written[event] >= LINES_PER_S or not _has_room():
            self._left_out[event] += 1
            return
        self._written[event] += 1
        left_out = self._left_out.pop(event, 0)
        shown = {
            name: value[:TEXT_CHARS_MAX] if isinstance(value, str) else value
            for name, value in fields.items()
            if value is not None
        }
        # A terminal that was closed refuses the line, which must not stop the server.
        with suppress(OSError):
            report_event(event, shown | ({"left_out": left_out} if left_out else {}))


def _has_room() -> bool:
    """Whether a line can be written to stderr without waiting for its reader."""
    try:
        waiting = select.poll()
        waiting.register(sys.stderr.fileno(), select.POLLOUT)
        return any(ready & select.POLLOUT for _, ready in waiting.poll(0))
    except (AttributeError, OSError, ValueError):
        # There is no stderr, or one that is no file: writing to it does not wait.
        return True
