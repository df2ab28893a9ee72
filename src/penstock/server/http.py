"""HTTP/1.1 with nothing between the parser and whoever answers.

A `Connection` reads requests, in order, and hands each to the server's `answer`, which returns the
response's bytes at once, or None and calls `finish` later: for a long poll, or when a disk must
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
# Of these, a second one would leave it open which is meant.
_SINGLE: Final = frozenset(
    {"host", "content-type", "content-encoding", "authorization", "x-amz-target", "x-amz-date"}
)


class Request:
    """One request, complete."""

    __slots__ = ("body", "headers", "keep_alive", "method", "path", "query")

    def __init__(self, method: str, path: str, query: str) -> None:
        self.method = method
        self.path = path
        self.query = query
        # Names in lower case; a header that came several times has its values joined by commas.
        self.headers: dict[str, str] = {}
        self.body = b""
        self.keep_alive = True


Answer = Callable[[Request, "Connection"], bytes | None]


class _Unacceptable(Exception):
    """What is being read must be answered with this status, and the connection closed."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class DateHeader:
    """The present time as a header, made anew at most once a second."""

    def __init__(self) -> None:
        self._second = -1
        self._line = b""

    def line(self, loop_time_s: float) -> bytes:
        """The header's line."""
        second = int(loop_time_s)
        if second != self._second:
            self._second = second
            self._line = f"Date: {formatdate(usegmt=True)}\r\n".encode()
        return self._line


_date = DateHeader()


def response(status: int, headers: bytes, body: bytes, loop_time_s: float) -> bytes:
    """A whole response; `headers` are complete lines."""
    return b"%s%s%sContent-Length: %d\r\n\r\n%s" % (
        _STATUS_LINES[status],
        _date.line(loop_time_s),
        headers,
        len(body),
        body,
    )


class Connection(asyncio.Protocol):
    """One client's connection: at most one request of it is being answered at a time."""

    __slots__ = (
        "_answer",
        "_body_bytes",
        "_body_timed",
        "_busy",
        "_chunks",
        "_closing",
        "_head_bytes",
        "_idle_sweeps",
        "_in_head",
        "_in_message",
        "_loop",
        "_open",
        "_parser",
        "_request",
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
        self._url = b""
        self._headers_started()
        self._in_message = False
        self._busy = False
        self._closing = False
        self._writable = True
        self._waiting: deque[Request] = deque()
        self.deadline_s: float | None = None
        self._idle_sweeps = 0
        # What to call if the client goes away while its request is being answered.
        self.on_gone: Callable[[], None] | None = None

    def _headers_started(self) -> None:
        self._request: Request | None = None
        self._open: list[tuple[bytes, bytes]] = []
        self._chunks: list[bytes] = []
        self._head_bytes = 0
        self._body_bytes = 0
        self._body_timed = False
        self._in_head = True

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
        if self._in_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
            if self._in_message and self._in_head and self._head_bytes > HEAD_BYTES_MAX:
                raise _Unacceptable(431, f"the head is over {HEAD_BYTES_MAX} bytes")
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if not isinstance(cause, _Unacceptable):
                raise
            self._refuse(cause.status, str(cause))
        except _Unacceptable as error:
            self._refuse(error.status, str(error))
        except httptools.HttpParserError as error:
            self._refuse(400, str(error))
        if self._in_message:
            self._set_deadline()
        elif self.deadline_s is not None:
            self.deadline_s = None
            self._server.slow.discard(self)

    def _set_deadline(self) -> None:
        """A request is half here: the rest of it must come in time."""
        if self.deadline_s is None:
            self.deadline_s = self._loop.time() + HEAD_TIMEOUT_S
            self._server.slow.add(self)
        if not self._in_head and not self._body_timed:
            # The head is complete: from here on the clock of the body runs.
            self._body_timed = True
            self.deadline_s = self._loop.time() + BODY_TIMEOUT_S

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._in_message = True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self._open.append((name, value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        head_bytes = len(self._url)
        path, _, query = self._url.decode("latin-1").partition("?")
        self._request = request = Request(self._parser.get_method().decode(), path, query)
        headers = request.headers
        for name_bytes, value_bytes in self._open:
            head_bytes += len(name_bytes) + len(value_bytes) + 4
            name = name_bytes.decode("latin-1").lower()
            value = value_bytes.decode("latin-1")
            if name in headers:
                if name in _SINGLE:
                    raise _Unacceptable(400, f"the header {name} came twice")
                value = f"{headers[name]},{value}"
            headers[name] = value
        if head_bytes > HEAD_BYTES_MAX or len(self._open) > HEADERS_MAX:
            raise _Unacceptable(431, f"the head is over {HEAD_BYTES_MAX} bytes")
        self._check_head(request)

    def _check_head(self, request: Request) -> None:
        headers = request.headers
        if not request.path.startswith("/"):
            raise _Unacceptable(400, "the request names no path of this server")
        if "upgrade" in headers or request.method == "CONNECT":
            raise _Unacceptable(400, "this server upgrades to no other protocol")
        if headers.get("transfer-encoding", "chunked").lower() != "chunked":
            raise _Unacceptable(400, "the only transfer encoding is chunked")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise _Unacceptable(415, "compressed bodies are not taken")
        if int(headers.get("content-length", "0")) > BODY_BYTES_MAX:
            raise _Unacceptable(413, f"the body is over {BODY_BYTES_MAX} bytes")
        if "host" not in headers and self._parser.get_http_version() == "1.1":
            raise _Unacceptable(400, "a request needs a Host header")
        expected = headers.get("expect")
        if expected is not None:
            if expected.lower() != "100-continue":
                raise _Unacceptable(417, "the only expectation met is 100-continue")
            if self._transport is not None and not self._busy:
                self._transport.write(_CONTINUE)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > BODY_BYTES_MAX:
            raise _Unacceptable(413, f"the body is over {BODY_BYTES_MAX} bytes")
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        request = self._request
        if request is None or self._closing:
            return
        request.body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        request.keep_alive = self._parser.should_keep_alive()
        self._in_message = False
        self._idle_sweeps = 0
        self._url = b""
        self._headers_started()
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
        transport.write(answer)
        if self._closing:
            transport.close()
            return
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
        self._idle_sweeps += 1
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
        self.connections: set[Connection] = set()
        # Those that have sent half a request: the only ones worth looking at every second.
        self.slow: set[Connection] = set()
        self.stopping = False
        self._emptied = asyncio.Event()
        self._timers = [
            self.loop.call_later(SWEEP_S, self._sweep),
            self.loop.call_later(IDLE_SWEEP_S, self._sweep_idle),
        ]

    def __call__(self) -> Connection:
        return Connection(self)

    def forget(self, connection: Connection) -> None:
        """A connection is gone."""
        self.connections.discard(connection)
        if self.stopping and not self.connections:
            self._emptied.set()

    def _sweep(self) -> None:
        now_s = self.loop.time()
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
