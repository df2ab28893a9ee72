"""HTTP/1.1 responses as bytes."""

from email.utils import formatdate
from typing import Final

_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    417: "Expectation Failed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_STATUS_LINES: Final = {
    status: f"HTTP/1.1 {status} {reason}\r\n".encode() for status, reason in _REASONS.items()
}
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class _FirstLines:
    """The first lines of responses, with the date: made again at most once a second."""

    def __init__(self) -> None:
        self._second = -1
        self._by_status: dict[int, bytes] = {}

    def first_lines(self, status: int, loop_time_s: float) -> bytes:
        """The status line and the date."""
        if int(loop_time_s) != self._second:
            self._second = int(loop_time_s)
            date = f"Date: {formatdate(usegmt=True)}\r\n".encode()
            self._by_status = {each: line + date for each, line in _STATUS_LINES.items()}
        return self._by_status[status]


first_lines = _FirstLines().first_lines


def response(status: int, headers: bytes, body: bytes, loop_time_s: float) -> bytes:
    """A whole response; `headers` are complete lines."""
    return b"%s%sContent-Length: %d\r\n\r\n%s" % (
        first_lines(status, loop_time_s),
        headers,
        len(body),
        body,
    )


def with_connection(value: bytes, answer: bytes) -> bytes:
    """A response with a Connection header of this value."""
    status_line, _, rest = answer.partition(b"\r\n")
    return b"%s\r\nConnection: %s\r\n%s" % (status_line, value, rest)
