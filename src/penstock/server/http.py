"""HTTP/1.1 with nothing between the parser and whoever answers.

An `HttpConnection` reads requests, in order, and hands each to the server's `answer`, which returns
the response's bytes at once, or None and calls `finish` later: for a long poll, or when a disk must
sync first. Requests that arrive meanwhile wait their turn, so pipelining keeps its order.

Everything that comes in has a limit: the head in bytes and seconds, the body in bytes and seconds,
the requests that wait, the answers nobody reads. What cannot be told apart safely (two lengths, a
length and chunks, bare line feeds, odd encodings) is answered 400, and the connection is closed.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from email.utils import formatdate
from typing import Final, cast

import httptools

HEAD_BYTES_MAX: Final = 16 * 1024
BODY_BYTES_MAX: Final = 8 * 1024 * 1024
HEAD_TIMEOUT_S: Final = 10.0
BODY_TIMEOUT_S: Final = 30.0
SWEEP_S: Final = 1.0
IDLE_SWEEP_S: Final = 60.0
IDLE_SWEEPS_MAX: Final = 10
HEADERS_MAX: Final = 100
WAITING_REQUESTS_MAX: Final = 32

_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    417: "Expectation Failed",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
_STATUS_LINES: Final = {
    status: f"HTTP/1.1 {status} {reason}\r\n".encode() for status, reason in _REASONS.items()
}
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
# Headers that most requests do not have, and that need a closer look.
_UNUSUAL: Final = frozenset({"upgrade", "transfer-encoding", "content-encoding", "expect"})
# Of these, a second one would leave it open which is meant.
_SINGLE: Final = frozenset(
    {"host", "content-type", "content-encoding", "authorization", "x-amz-target", "x-amz-date"}
)


class Request:
    """One request, complete.

    Header names are in lower case; one that came several times has its values joined by commas.
    A client of HTTP/1.0 that asks for the connection to stay must be told that it does.
    """

    __slots__ = ("body", "headers", "keep_alive", "method", "must_tell", "path", "query")

    def __init__(self, method: str, path: str, query: str, headers: dict[str, str]) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.body = b""
        self.keep_alive = True
        self.must_tell = False


Answer = Callable[[Request, "HttpConnection"], bytes | None]


class _Unacceptable(Exception):
    """What is being read must be answered with this status, and the connection closed."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _Heads:
    """The first lines of responses, with the date: made anew at most once a second."""

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


first_lines = _Heads().first_lines


def response(status: int, headers: bytes, body: bytes, loop_time_s: float) -> bytes:
    """A whole response; `headers` are complete lines."""
    return b"%s%sContent-Length: %d\r\n\r\n%s" % (
        first_lines(status, loop_time_s),
        headers,
        len(body),
        body,
    )


def _saying(what: bytes, answer: bytes) -> bytes:
    """A response that also says what becomes of the connection."""
    status_line, _, rest = answer.partition(b"\r\n")
    return b"%s\r\nConnection: %s\r\n%s" % (status_line, what, rest)


def _lower(name: bytes) -> str:
    """A header's name in lower case; the names everybody sends are remembered."""
    lowered = name.decode("latin-1").lower()
    if len(_LOWERED) < _LOWERED_MAX and len(name) <= 64:
        _LOWERED[name] = lowered
    return lowered


_LOWERED_MAX: Final = 1_024
_LOWERED: Final[dict[bytes, str]] = {}


class HttpConnection(asyncio.Protocol):
    """One client's connection: at most one request of it is being answered at a time."""

    __slots__ = (
        "_answer",
        "_body",
        "_body_timed",
        "_busy",
        "_chunk_bytes",
        "_closing",
        "_head_bytes",
        "_headers",
        "_idle_sweeps",
        "_in_head",
        "_in_message",
        "_loop",
        "_more",
        "_must_tell",
        "_parser",
        "_repeated",
        "_request",
        "_seen",
        "_seen_idle",
        "_server",
        "_transport",
        "_url",
        "_waiting",
        "_writable",
        "deadline_s",
        "on_gone",
    )

    def __init__(self, server: "HttpServer") -> None:
        self._server = server
        self._loop = server.loop
        self._answer = server.answer
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        # The request being read: first its head, then its body, which most often comes whole.
        self._in_message = False
        self._in_head = True
        self._url = b""
        self._headers: dict[str, str] = {}
        self._request: Request | None = None
        self._body = b""
        self._more: list[bytes] = []
        self._body_timed = False
        self._head_bytes = 0
        self._repeated = 0
        self._chunk_bytes = 0
        # The requests that were read, one of which may be being answered.
        self._seen = 0
        self._seen_idle = 0
        self._idle_sweeps = 0
        self._busy = False
        self._must_tell = False
        self._closing = False
        self._writable = True
        self._waiting: deque[Request] = deque()
        self.deadline_s: float | None = None
        # What to call if the client goes away while its request is being answered.
        self.on_gone: Callable[[], None] | None = None

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.forget(self)
        self._server.slow.discard(self)
        self._transport = None
        self._waiting.clear()
        gone, self.on_gone = self.on_gone, None
        if gone is not None:
            gone()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._next()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        self._chunk_bytes = len(data)
        seen = self._seen
        try:
            self._parser.feed_data(data)
            if self._in_message:
                self._half_read(seen)
            elif self.deadline_s is not None:
                self.deadline_s = None
                self._server.slow.discard(self)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if not isinstance(cause, _Unacceptable):
                raise
            self._refuse(cause.status, str(cause))
        except _Unacceptable as error:
            self._refuse(error.status, str(error))
        except httptools.HttpParserError as error:
            self._refuse(400, str(error))

    def _half_read(self, seen: int) -> None:
        """A request is half here: the rest of it must come in time, and not be too much."""
        if self._in_head and seen == self._seen:
            self._head_bytes += self._chunk_bytes
            if self._head_bytes > HEAD_BYTES_MAX:
                raise _Unacceptable(431, f"the head is over {HEAD_BYTES_MAX} bytes")
        if self.deadline_s is None or seen != self._seen:
            self.deadline_s = self._loop.time() + HEAD_TIMEOUT_S
            self._server.slow.add(self)
        if not self._in_head and not self._body_timed:
            # The head is complete: the body has the rest of its own time, from the first byte on.
            self._body_timed = True
            self.deadline_s += BODY_TIMEOUT_S - HEAD_TIMEOUT_S

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._in_message = True

    def on_url(self, url: bytes) -> None:
        self._url = self._url + url if self._url else url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # after the last chunk: nothing that came that late may matter
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
            raise _Unacceptable(400, f"the header {key} came twice")
        self._repeated += 1
        self._count_headers()
        self._headers[key] += "," + value.decode("latin-1")

    def _count_headers(self) -> None:
        """Called for names that are not known, repeated names, and in the end: that is enough."""
        if len(self._headers) + self._repeated > HEADERS_MAX:
            raise _Unacceptable(431, f"there are over {HEADERS_MAX} headers")

    def on_headers_complete(self) -> None:
        self._count_headers()
        self._in_head = False
        self._repeated = 0
        headers = self._headers
        if self._head_bytes + self._chunk_bytes > HEAD_BYTES_MAX:
            self._weigh_head()
        raw_method = self._parser.get_method()
        method = "POST" if raw_method == b"POST" else raw_method.decode()
        if self._url == b"/":
            self._request = request = Request(method, "/", "", headers)
        else:
            path, _, query = self._url.decode("latin-1").partition("?")
            self._request = request = Request(method, path, query, headers)
            if not path.startswith("/"):
                raise _Unacceptable(400, "the request names no path of this server")
        if "host" not in headers and self._parser.get_http_version() != "1.0":
            raise _Unacceptable(400, "a request needs a Host header")
        if not _UNUSUAL.isdisjoint(headers):
            self._check_unusual(request)
        length = headers.get("content-length", "")
        if len(length) > 6 and int(length) > BODY_BYTES_MAX:
            raise _Unacceptable(413, f"the body is over {BODY_BYTES_MAX} bytes")

    def _weigh_head(self) -> None:
        head_bytes = len(self._url) + sum(len(n) + len(v) + 4 for n, v in self._headers.items())
        if head_bytes > HEAD_BYTES_MAX:
            raise _Unacceptable(431, f"the head is over {HEAD_BYTES_MAX} bytes")

    def _check_unusual(self, request: Request) -> None:
        headers = request.headers
        if "upgrade" in headers:
            raise _Unacceptable(400, "this server upgrades to no other protocol")
        if headers.get("transfer-encoding", "chunked").lower() != "chunked":
            raise _Unacceptable(400, "the only transfer encoding is chunked")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise _Unacceptable(415, "compressed bodies are not taken")
        expected = headers.get("expect")
        if expected is not None:
            if expected.lower() != "100-continue":
                raise _Unacceptable(417, "the only expectation met is 100-continue")
            if self._transport is not None and not self._busy:
                self._transport.write(_CONTINUE)

    def on_body(self, body: bytes) -> None:
        if not self._body:
            self._body = body
            return
        if not self._more:
            self._more = [self._body]
            self._head_bytes = len(self._body)
        # Once the head is read its count is free to count the body.
        self._head_bytes += len(body)
        self._more.append(body)
        if self._head_bytes > BODY_BYTES_MAX:
            raise _Unacceptable(413, f"the body is over {BODY_BYTES_MAX} bytes")

    def on_message_complete(self) -> None:
        request = self._request
        if request is None or self._closing:
            return
        request.body = b"".join(self._more) if self._more else self._body
        request.keep_alive = self._parser.should_keep_alive()
        if "connection" in request.headers:
            request.must_tell = self._parser.get_http_version() == "1.0"
        self._seen += 1
        self._in_message = False
        self._in_head = True
        self._body_timed = False
        self._request = None
        self._headers = {}
        self._url = self._body = b""
        self._head_bytes = 0
        if self._more:
            self._more = []
        if self._busy or self._waiting or not self._writable:
            self._waiting.append(request)
            if len(self._waiting) >= WAITING_REQUESTS_MAX and self._transport is not None:
                self._transport.pause_reading()
        else:
            self._begin(request)

    # Answering.

    def _begin(self, request: Request) -> None:
        if not request.keep_alive or self._server.stopping:
            self._closing = True
        self._busy = True
        self._must_tell = request.must_tell
        answer = self._answer(request, self)
        if answer is not None:
            self.finish(answer)

    def finish(self, answer: bytes) -> None:
        """Sends the response of the request that is being answered."""
        self._busy = False
        self.on_gone = None
        transport = self._transport
        if transport is None:
            return
        if self._closing:
            transport.write(_saying(b"close", answer))
            transport.close()
            return
        transport.write(_saying(b"keep-alive", answer) if self._must_tell else answer)
        if self._waiting:
            self._next()
        elif self._server.stopping:
            transport.close()

    def _next(self) -> None:
        # One turn of the loop each: a long pipeline must not hold everyone else up.
        if self._waiting and not self._busy and self._writable and self._transport is not None:
            self._busy = True
            self._loop.call_soon(self._begin_next)

    def _begin_next(self) -> None:
        if self._transport is None or not self._waiting:
            self._busy = False
            return
        request = self._waiting.popleft()
        if len(self._waiting) == WAITING_REQUESTS_MAX - 1:
            self._transport.resume_reading()
        self._begin(request)

    def _refuse(self, status: int, reason: str) -> None:
        """Answers with an error and closes: what follows on this connection means nothing."""
        self._closing = True
        self._in_message = False
        transport = self._transport
        if transport is None:
            return
        if self._busy:
            # An earlier request is still being answered; its answer is the last.
            return
        body = f"{reason}\n".encode("latin-1", "replace")
        headers = b"Content-Type: text/plain\r\nConnection: close\r\n"
        transport.write(response(status, headers, body, self._loop.time()))
        transport.close()

    def sweep(self, now_s: float) -> None:
        """Closes the connection if a request takes too long to arrive."""
        if self.deadline_s is not None and now_s >= self.deadline_s:
            self._server.slow.discard(self)
            self._refuse(408, "the request did not arrive in time")

    def sweep_idle(self) -> None:
        """Closes the connection if nothing has come over it for many of these sweeps."""
        self._idle_sweeps = self._idle_sweeps + 1 if self._seen == self._seen_idle else 0
        self._seen_idle = self._seen
        if self._idle_sweeps > IDLE_SWEEPS_MAX and self.is_idle:
            self.close()

    @property
    def is_idle(self) -> bool:
        """Whether no request is here, whole or in part."""
        return not self._busy and not self._waiting and not self._in_message

    @property
    def peer(self) -> str:
        """The address the connection came from."""
        name = self._transport.get_extra_info("peername") if self._transport is not None else None
        return str(name[0]) if name else ""

    def close(self) -> None:
        """Closes the connection, once what was written is sent."""
        self._closing = True
        if self._transport is not None:
            self._transport.close()


class HttpServer:
    """The connections of one server, and the time they are given."""

    def __init__(self, answer: Answer) -> None:
        self.loop = asyncio.get_running_loop()
        self.answer = answer
        self.connections: set[HttpConnection] = set()
        # Those that have sent half a request: the only ones worth looking at every second.
        self.slow: set[HttpConnection] = set()
        self.stopping = False
        self._emptied = asyncio.Event()
        self._timers = [
            self.loop.call_later(SWEEP_S, self._sweep),
            self.loop.call_later(IDLE_SWEEP_S, self._sweep_idle),
        ]

    def __call__(self) -> HttpConnection:
        return HttpConnection(self)

    def forget(self, connection: HttpConnection) -> None:
        """A connection is gone."""
        self.connections.discard(connection)
        if self.stopping and not self.connections:
            self._emptied.set()

    def _sweep(self) -> None:
        # A deadline that would pass before the next look is kept now.
        now_s = self.loop.time() + SWEEP_S
        for connection in list(self.slow):
            connection.sweep(now_s)
        self._timers[0] = self.loop.call_later(SWEEP_S, self._sweep)

    def _sweep_idle(self) -> None:
        for connection in list(self.connections):
            connection.sweep_idle()
        self._timers[1] = self.loop.call_later(IDLE_SWEEP_S, self._sweep_idle)

    async def drain(self, within_s: float) -> None:
        """Takes no more requests, waits for those being answered, and closes every connection."""
        self.stopping = True
        for connection in list(self.connections):
            if connection.is_idle:
                connection.close()
        if self.connections:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), within_s)
        for connection in list(self.connections):
            connection.close()
        for timer in self._timers:
            timer.cancel()
