"""HTTP/1.1 requests from bytes, each part within its limit.

A request that can be read in two ways (two lengths, a length and chunks, bare line feeds, unknown
encodings) is `Unacceptable`, and so is one over a limit: the connection ends with its answer.

    head        HEAD_BYTES_MAX, and HEADERS_MAX headers
    body        BODY_BYTES_MAX; if it is chunked, with the sizes of the chunks and the trailers
    trailers    HEAD_BYTES_MAX, and HEADERS_MAX headers; they are checked and dropped

httptools joins the pieces of a header, so a header that does not end costs quadratic time and is
not seen here before it is complete. What it may hold is therefore counted by what was fed.
"""

from collections.abc import Callable
from typing import Final

import httptools

HEAD_BYTES_MAX: Final = 16 * 1024
BODY_BYTES_MAX: Final = 8 * 1024 * 1024
HEADERS_MAX: Final = 100

# Headers that most requests do not have, and that need a closer look.
_UNUSUAL: Final = frozenset({"upgrade", "transfer-encoding", "content-encoding", "expect"})
# If one of these came twice, it would be unclear which one counts.
_SINGLE: Final = frozenset(
    {"host", "content-type", "content-encoding", "authorization", "x-amz-target", "x-amz-date"}
)
# The names that most clients send, in lower case.
_LOWERED_MAX: Final = 1_024
_LOWERED: Final[dict[bytes, str]] = {}


class Request:
    """One request, complete.

    Header names are in lower case; the values of one that came several times are joined by commas.
    `must_say_keep_alive` is for clients of HTTP/1.0, which close a connection unless its answer
    says that it stays open.
    """

    __slots__ = ("body", "headers", "keep_alive", "method", "must_say_keep_alive", "path", "query")

    def __init__(self, method: str, path: str, query: str, headers: dict[str, str]) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.body: bytes | bytearray = b""
        self.keep_alive = True
        self.must_say_keep_alive = False


class Unacceptable(Exception):
    """The request must be answered with this status, and the connection closed."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def _lower(name: bytes) -> str:
    lowered = name.decode("latin-1").lower()
    if len(_LOWERED) < _LOWERED_MAX and len(name) <= 64:
        _LOWERED[name] = lowered
    return lowered


def _ignore(*_: object) -> None:
    """Does nothing."""


class RequestReader:
    """Turns the bytes of one connection into requests.

    Each is given to `take` when it is complete; `expects_continue` is called when a client waits
    for permission to send a body.
    """

    __slots__ = (
        "_body",
        "_body_bytes",
        "_expects_continue",
        "_fed_bytes",
        "_head_bytes",
        "_headers",
        "_parser",
        "_repeated",
        "_request",
        "_seen_bytes",
        "_stuck_bytes",
        "_take",
        "_trailer_bytes",
        "_trailers",
        "_url",
        "completed",
        "in_body",
        "in_message",
    )

    def __init__(
        self, take: Callable[[Request], None], expects_continue: Callable[[], None]
    ) -> None:
        self._take = take
        self._expects_continue = expects_continue
        self._parser = httptools.HttpRequestParser(self)
        # How many requests were read; whether one has begun, and whether its head is complete.
        self.completed = 0
        self.in_message = False
        self.in_body = False
        self._url = b""
        self._headers: dict[str, str] = {}
        self._request: Request | None = None
        # A body most often comes in one piece. A second piece makes it a buffer that grows: a list
        # of small pieces would take many times their bytes.
        self._body: bytes | bytearray = b""
        self._fed_bytes = 0
        self._head_bytes = 0
        self._repeated = 0
        # Of a body that came in several feeds: its bytes, chunk sizes included; the content there
        # was after the last feed; and the bytes that came since there was more content.
        self._body_bytes = 0
        self._seen_bytes = 0
        self._stuck_bytes = 0
        self._trailers = 0
        self._trailer_bytes = 0

    @property
    def held_bytes(self) -> int:
        """How much of a body has come that is not complete."""
        return len(self._body)

    def close(self) -> None:
        """Drops everything; the parser refers to its reader, and would otherwise keep it."""
        self._parser = None  # type: ignore[assignment]
        self._take = _ignore
        self._expects_continue = _ignore
        self._request = None
        self._body = b""

    def feed(self, data: bytes | memoryview) -> None:
        """Reads on. Raises Unacceptable."""
        self._fed_bytes = len(data)
        completed = self.completed
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            raise cause if isinstance(cause, Unacceptable) else error from None
        except httptools.HttpParserError as error:
            raise Unacceptable(400, str(error)) from None
        except httptools.HttpParserUpgrade:
            raise Unacceptable(400, "this server upgrades to no other protocol") from None
        if self.in_message:
            self._count_unfinished(completed)

    def _count_unfinished(self, completed: int) -> None:
        """Limits what came of a request that is not complete. Raises Unacceptable."""
        if not self.in_body:
            if completed == self.completed:
                self._head_bytes += self._fed_bytes
            if self._head_bytes > HEAD_BYTES_MAX:
                raise Unacceptable(431, f"the head is over {HEAD_BYTES_MAX} bytes")
            return
        self._body_bytes += self._fed_bytes
        if self._body_bytes > BODY_BYTES_MAX + HEAD_BYTES_MAX:
            raise Unacceptable(
                413, f"the body is over {BODY_BYTES_MAX} bytes, chunk sizes included"
            )
        if len(self._body) != self._seen_bytes:
            self._seen_bytes = len(self._body)
            self._stuck_bytes = 0
            return
        # No content: this is the inside of a chunk's size, of its extension or of a trailer.
        self._stuck_bytes += self._fed_bytes
        if self._stuck_bytes > HEAD_BYTES_MAX:
            raise Unacceptable(431, f"the trailers are over {HEAD_BYTES_MAX} bytes")

    # What the parser calls.

    def on_message_begin(self) -> None:
        self.in_message = True

    def on_url(self, url: bytes) -> None:
        self._url = self._url + url if self._url else url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.in_body:
            self._count_trailer(name, value)
            return
        key = _LOWERED.get(name)
        if key is None:
            self._count_headers()
            key = _lower(name)
        if key in self._headers:
            self._repeat_header(key, value)
        else:
            self._headers[key] = value.decode("latin-1")

    def _repeat_header(self, key: str, value: bytes) -> None:
        if key in _SINGLE:
            raise Unacceptable(400, f"the header {key} came twice")
        self._repeated += 1
        self._count_headers()
        self._headers[key] += "," + value.decode("latin-1")

    def _count_headers(self) -> None:
        """Raises Unacceptable if there are too many headers so far."""
        if len(self._headers) + self._repeated > HEADERS_MAX:
            raise Unacceptable(431, f"there are over {HEADERS_MAX} headers")

    def _count_trailer(self, name: bytes, value: bytes) -> None:
        """Trailers are limited like a head, and dropped: nothing may depend on them."""
        self._trailers += 1
        self._body_bytes += 1
        self._trailer_bytes += len(name) + len(value) + 4
        if self._trailers > HEADERS_MAX:
            raise Unacceptable(431, f"there are over {HEADERS_MAX} trailers")
        if self._trailer_bytes > HEAD_BYTES_MAX:
            raise Unacceptable(431, f"the trailers are over {HEAD_BYTES_MAX} bytes")

    def on_headers_complete(self) -> None:
        headers = self._headers
        if self._repeated or len(headers) > HEADERS_MAX:
            self._count_headers()
            self._repeated = 0
        self.in_body = True
        if self._head_bytes + self._fed_bytes > HEAD_BYTES_MAX:
            self._weigh_head()
        method = self._parser.get_method()
        if self._url == b"/" and method == b"POST":
            self._request = request = Request("POST", "/", "", headers)
        else:
            self._request = request = self._unusual_request(method, headers)
        if "host" not in headers and self._parser.get_http_version() != "1.0":
            raise Unacceptable(400, "a request needs a Host header")
        if not _UNUSUAL.isdisjoint(headers):
            self._check_unusual(request)
        length = headers.get("content-length", "")
        if len(length) > 6 and int(length) > BODY_BYTES_MAX:
            raise Unacceptable(413, f"the body is over {BODY_BYTES_MAX} bytes")

    def _unusual_request(self, method: bytes, headers: dict[str, str]) -> Request:
        path, _, query = self._url.decode("latin-1").partition("?")
        # After CONNECT, whatever it names, the parser would read no more requests.
        if not path.startswith("/") or method == b"CONNECT":
            raise Unacceptable(400, "the request names no path of this server")
        return Request(method.decode(), path, query, headers)

    def _weigh_head(self) -> None:
        head_bytes = len(self._url) + sum(len(n) + len(v) + 4 for n, v in self._headers.items())
        if head_bytes > HEAD_BYTES_MAX:
            raise Unacceptable(431, f"the head is over {HEAD_BYTES_MAX} bytes")

    def _check_unusual(self, request: Request) -> None:
        headers = request.headers
        if "upgrade" in headers:
            raise Unacceptable(400, "this server upgrades to no other protocol")
        if headers.get("transfer-encoding", "chunked").lower() != "chunked":
            raise Unacceptable(400, "the only transfer encoding is chunked")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise Unacceptable(415, "compressed bodies are not supported")
        expectation = headers.get("expect")
        if expectation is not None:
            if expectation.lower() != "100-continue":
                raise Unacceptable(417, "the only expectation supported is 100-continue")
            self._expects_continue()

    def on_body(self, body: bytes) -> None:
        if not self._body:
            self._body = body
            return
        if type(self._body) is not bytearray:
            self._body = bytearray(self._body)
        self._body += body
        if len(self._body) > BODY_BYTES_MAX:
            raise Unacceptable(413, f"the body is over {BODY_BYTES_MAX} bytes")

    def on_message_complete(self) -> None:
        request = self._request
        if request is None:
            return
        request.body = self._body
        request.keep_alive = self._parser.should_keep_alive()
        if "connection" in request.headers:
            request.must_say_keep_alive = self._parser.get_http_version() == "1.0"
        self.completed += 1
        self.in_message = self.in_body = False
        self._request = None
        self._headers = {}
        self._url = self._body = b""
        self._head_bytes = 0
        if self._body_bytes:
            self._body_bytes = self._seen_bytes = self._stuck_bytes = 0
            self._trailers = self._trailer_bytes = 0
        self._take(request)
