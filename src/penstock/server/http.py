"""HTTP/1.1 connections without a web framework: the parser calls the function that answers.

An `HttpConnection` reads requests, in order, and passes each to the server's `answer`, which
returns the response's bytes at once, or None and calls `finish` later: for a long poll, or when a
disk must sync first. Requests that arrive meanwhile wait, so pipelining keeps its order.

`request` limits the size of a request. This module limits time and memory:

    a head              HEAD_TIMEOUT_S from its first byte
    a body              BODY_TIMEOUT_S from the first byte of the head
    an answer           the client must read WRITE_PROGRESS_BYTES of it every WRITE_TIMEOUT_S
    a pipeline          about WAITING_REQUESTS_MAX requests or WAITING_BYTES_MAX wait; then reading
                        stops until some are answered
    all connections     HELD_BYTES_MAX of unfinished and waiting requests and of unsent answers;
                        over that, the connections that hold the most are aborted, largest first
    a turn of the loop  about 5 ms of requests that take long (`scheduler`)
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Any, Final, cast

from penstock.backends.scheduler import SLOW_S, STEP_BYTES, TURN_S, run_queue
from penstock.server.faults import Faults
from penstock.server.held import COUNTED_BYTES_MIN, WRITE_PROGRESS_BYTES, HeldBytes
from penstock.server.lines import REQUEST_FAILED, REQUEST_REFUSED, ServerLines
from penstock.server.request import BODY_BYTES_MAX as BODY_BYTES_MAX
from penstock.server.request import Request as Request
from penstock.server.request import RequestReader, Unacceptable
from penstock.server.response import CONTINUE, with_connection
from penstock.server.response import first_lines as first_lines
from penstock.server.response import response as response

HEAD_TIMEOUT_S: Final = 10.0
BODY_TIMEOUT_S: Final = 30.0
WRITE_TIMEOUT_S: Final = 30.0
SWEEP_S: Final = 1.0
IDLE_SWEEP_S: Final = 60.0
IDLE_SWEEPS_MAX: Final = 10
WAITING_REQUESTS_MAX: Final = 32
WAITING_BYTES_MAX: Final = 256 * 1024
HELD_BYTES_MAX: Final = 256 * 1024 * 1024

# Where the status begins in a response, and the first digit of those that are no refusal.
STATUS_AT: Final = len("HTTP/1.1 ")
_SUCCESS: Final = ord("2")

Answer = Callable[[Request, "HttpConnection"], bytes | None]


class HttpConnection(RequestReader, asyncio.Protocol):
    """One client's connection: at most one request of it is being answered at a time."""

    __slots__ = (
        "_answer",
        "_answer_bytes",
        "_answered",
        "_body_timed",
        "_busy",
        "_closing",
        "_completed_idle",
        "_completed_timed",
        "_idle_sweeps",
        "_loop",
        "_must_say_keep_alive",
        "_reading",
        "_refused",
        "_route",
        "_run_queue",
        "_server",
        "_transport",
        "_unparsed",
        "_unsent_bytes",
        "_waiting",
        "_waiting_bytes",
        "_writable",
        "began_s",
        "caller",
        "held_bytes",
        "on_gone",
        "read_deadline_s",
        "refusal",
        "write_deadline_s",
    )

    def __init__(self, server: "HttpServer") -> None:
        super().__init__()
        self._server = server
        self._loop = server.loop
        self._answer = server.answer
        self._route = server.route
        self._run_queue = server.run_queue
        self._transport: asyncio.Transport | None = None
        # Data that came behind too many waiting requests; reading has stopped.
        self._unparsed = b""
        self._reading = True
        # The requests that wait while another is answered; the last element may be the response to
        # bytes that could not be read as a request.
        self._waiting: deque[Request | bytes] = deque()
        self._waiting_bytes = 0
        self._busy = False
        self._must_say_keep_alive = False
        self._refused = False
        self._closing = False
        self._writable = True
        # Deadlines, and the progress at the time when they were set.
        self.read_deadline_s: float | None = None
        self._body_timed = False
        self._completed_timed = 0
        self.write_deadline_s: float | None = None
        self._unsent_bytes = 0
        self._answer_bytes = 0
        self._idle_sweeps = 0
        self._completed_idle = 0
        # The part of this connection in the server's count against HELD_BYTES_MAX.
        self.held_bytes = 0
        # When the request that is being answered was begun.
        self.began_s = 0.0
        # Who sent an earlier request, as `Access` notes it.
        self.caller: tuple[Any, ...] | None = None
        # The request that is being answered, and what is known of its refusal, for its line.
        self._answered: Request | None = None
        self.refusal: dict[str, object] = {}
        # Called if the client disconnects while its request is being answered.
        self.on_gone: Callable[[], None] | None = None

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Above this, `pause_writing` is called, and the time to read the answer is limited.
        self._transport.set_write_buffer_limits(COUNTED_BYTES_MIN)
        self._server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._waiting.clear()
        self._waiting_bytes = 0
        self._unparsed = b""
        self.stop_reading()
        self._server.forget(self)
        gone, self.on_gone = self.on_gone, None
        if gone is not None:
            gone()

    def pause_writing(self) -> None:
        self._writable = False
        self._time_answer()
        self._count_held()

    def resume_writing(self) -> None:
        self._writable = True
        if not self._closing:
            self.write_deadline_s = None
            self._unwatch()
        self._count_held()
        self._next()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if not self._reading:
            if not self._refused:
                self._unparsed += data
            return
        try:
            if len(data) > STEP_BYTES:
                self._feed_pieces(data)
            else:
                request = self.feed(data)
                if request is not None:
                    self.receive(request)
        except Unacceptable as error:
            self._refuse(error.status, str(error))
        except Exception as error:
            self._server.faults.report("reading a request", error)
            self._refuse(500, "the request could not be served")
        else:
            if self.in_message or self.read_deadline_s is not None:
                self._time_request()

    def _feed_pieces(self, data: bytes) -> None:
        """Parses data in pieces.

        After one that completed a request, or when parsing took too long, the rest waits for the
        next turn of the loop: thousands of small requests, or chunks, must not delay others.
        """
        view = memoryview(data)
        completed = self.completed
        until_s = perf_counter() + TURN_S
        for at in range(0, len(data), STEP_BYTES):
            self.parse(view[at : at + STEP_BYTES])
            if self._closing:
                return
            if self.completed != completed or not self._reading or perf_counter() > until_s:
                self._unparsed = data[at + STEP_BYTES :]
                break
        else:
            if perf_counter() <= until_s:
                return
        # Pausing also ends the reads of this turn: libuv would read up to 32 times.
        if self._reading:
            self._pause_reading()
            self._loop.call_soon(self._resume_reading)
        self._count_held()

    # Deadlines.

    def _time_request(self) -> None:
        """Sets or ends the deadline of the request that is arriving; called after each part."""
        if not self.in_message or self._closing:
            self.read_deadline_s = None
            self._unwatch()
        else:
            if self.read_deadline_s is None or self._completed_timed != self.completed:
                self.read_deadline_s = self._loop.time() + HEAD_TIMEOUT_S
                self._completed_timed = self.completed
                self._body_timed = False
                self._server.watched.add(self)
            if self.in_body and not self._body_timed:
                # The head is complete: the limit for head and body together applies now.
                self._body_timed = True
                self.read_deadline_s += BODY_TIMEOUT_S - HEAD_TIMEOUT_S
        if self.held_bytes or len(self._body) > COUNTED_BYTES_MIN:
            self._count_held()

    def _time_answer(self) -> None:
        """Sets the deadline by which the client must have read more of the unsent answer."""
        if self._transport is not None:
            self._unsent_bytes = self._transport.get_write_buffer_size()
            self.write_deadline_s = self._loop.time() + WRITE_TIMEOUT_S
            self._server.watched.add(self)

    def _unwatch(self) -> None:
        if self.read_deadline_s is None and self.write_deadline_s is None:
            self._server.watched.discard(self)

    def sweep(self, now_s: float) -> None:
        """Ends the connection if a request does not arrive, or an answer is not read, in time."""
        if self.write_deadline_s is not None and self._transport is not None:
            unsent_bytes = self._transport.get_write_buffer_size()
            if unsent_bytes == 0 and not self._closing:
                self.write_deadline_s = None
                self._unwatch()
            elif unsent_bytes <= self._unsent_bytes - WRITE_PROGRESS_BYTES:
                self._time_answer()
            elif now_s >= self.write_deadline_s:
                self.abort()
                return
            if self.held_bytes:
                self._count_held()
        if self.read_deadline_s is None:
            return
        if not self._reading:
            # The rest of the request may be in the socket: its time begins when reading resumes.
            self.read_deadline_s = now_s + (BODY_TIMEOUT_S if self._body_timed else HEAD_TIMEOUT_S)
        elif now_s >= self.read_deadline_s:
            self.read_deadline_s = None
            self._refuse(408, "the request did not arrive in time")

    def sweep_idle(self) -> None:
        """Closes the connection if no request has come for many of these sweeps."""
        completed = self.completed
        self._idle_sweeps = self._idle_sweeps + 1 if completed == self._completed_idle else 0
        self._completed_idle = completed
        if self._transport is None or self.write_deadline_s is not None:
            return
        if self._transport.get_write_buffer_size() > 0:
            # An answer below the limit for `pause_writing` that the client does not read.
            self._time_answer()
        elif self._idle_sweeps > IDLE_SWEEPS_MAX and self.is_idle:
            self.close()

    # Memory.

    def _count_held(self) -> None:
        """Updates the server's count of what this connection holds."""
        held_bytes = len(self._body) + self._waiting_bytes + len(self._unparsed)
        if not self._writable and self._transport is not None:
            # An answer stays in memory whole until its last byte is sent.
            unsent_bytes = self._transport.get_write_buffer_size()
            held_bytes += max(self._answer_bytes, unsent_bytes)
        self._server.held.count(self, held_bytes if held_bytes > COUNTED_BYTES_MIN else 0)

    # Answering.

    def receive(self, request: Request, in_turn: bool = False) -> None:
        """Answers a complete request, now or after those before it."""
        if not in_turn and (
            self._busy
            or self._waiting
            or not self._writable
            or self._closing
            or (self._run_queue.means_s and self._run_queue.is_slow(kind_of(request)))
        ):
            self._enqueue(request)
            return
        self.began_s = began_s = perf_counter()
        if not request.keep_alive or self._server.stopping:
            self._closing = True
        self._busy = True
        self._answered = request
        self._must_say_keep_alive = request.must_say_keep_alive
        try:
            # Almost every request: it goes to the endpoint without a call in between.
            is_action = request.path == "/" and request.method == "POST"
            answer = self._answer(request, self) if is_action else self._route(request, self)
        except Exception as error:
            self._server.faults.report("answering a request", error)
            self._closing = True
            answer = response(500, b"", b"", self._loop.time())
        if answer is not None:
            self.finish(answer)
        took_s = perf_counter() - began_s
        if took_s > SLOW_S or self._run_queue.means_s:
            self._run_queue.note(kind_of(request), took_s)

    def _enqueue(self, request: Request) -> None:
        if self._closing:
            return
        waiting = self._waiting
        waiting.append(request)
        self._waiting_bytes += len(request.body)
        if len(waiting) >= WAITING_REQUESTS_MAX or self._waiting_bytes >= WAITING_BYTES_MAX:
            self._pause_reading()
        if self._waiting_bytes > COUNTED_BYTES_MIN:
            self._count_held()
        self._next()

    def _pause_reading(self) -> None:
        if self._reading and self._transport is not None:
            self._reading = False
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if (
            self._reading
            or self._refused
            or len(self._waiting) >= WAITING_REQUESTS_MAX
            or self._waiting_bytes >= WAITING_BYTES_MAX
        ):
            return
        self._reading = True
        unparsed, self._unparsed = self._unparsed, b""
        if unparsed:
            self.data_received(unparsed)
        if self._reading and self._transport is not None and not self._closing:
            self._transport.resume_reading()

    def finish(self, answer: bytes) -> None:
        """Sends the response of the request that is being answered."""
        self._busy = False
        self.on_gone = None
        if answer[STATUS_AT] > _SUCCESS:
            self._tell_refused(answer)
        self._answered = None
        transport = self._transport
        if transport is None:
            return
        if self._closing:
            self._send_last(with_connection(b"close", answer))
            return
        if self._must_say_keep_alive:
            answer = with_connection(b"keep-alive", answer)
        self._answer_bytes = len(answer)
        transport.write(answer)
        if self._waiting:
            self._next()
        elif self._server.stopping:
            self._close_when_sent(transport)

    def _tell_refused(self, answer: bytes) -> None:
        """Writes the line of a request that is answered with an error."""
        status = int(answer[STATUS_AT : STATUS_AT + 3])
        if status < 400:
            return
        refusal, self.refusal = self.refusal, {}
        event = refusal.pop("event", REQUEST_REFUSED if status < 500 else REQUEST_FAILED)
        request = self._answered
        if request is not None:
            # The path of an action is that of a queue, or "/"; a query may hold anything.
            refusal |= {"method": request.method, "path": request.path}
            refusal["agent"] = request.headers.get("user-agent")
        self._server.lines.tell(str(event), status=status, peer=self.peer_address, **refusal)

    def begin_stream(self, head: bytes) -> None:
        """Sends the head of a response that has no length and ends with the connection.

        Its parts are sent by `send_part`; `close` ends it.
        """
        # Until it ends, the deadline for reading it is that of an answer that goes on.
        self._closing = False
        if self._transport is not None:
            self._transport.write(with_connection(b"close", head))

    def send_part(self, part: bytes) -> bool:
        """Sends a part of a stream; False if the client has not read those before it."""
        if self._transport is None or not self._writable:
            return False
        self._answer_bytes = len(part)
        self._transport.write(part)
        return True

    def _next(self) -> None:
        # One request in each turn of the loop: a long pipeline must not delay other connections.
        if self._waiting and not self._busy and self._writable and self._transport is not None:
            self._busy = True
            following = self._waiting[0]
            kind = kind_of(following) if type(following) is Request else None
            if kind is not None and self._run_queue.is_slow(kind):
                self._run_queue.add(kind, self._begin_next)
            else:
                self._loop.call_soon(self._begin_next)

    def _begin_next(self) -> None:
        if self._transport is None or not self._waiting:
            self._busy = False
            return
        request = self._waiting.popleft()
        if type(request) is bytes:
            self._send_last(request)
            return
        assert isinstance(request, Request)
        self._waiting_bytes -= len(request.body)
        if self.held_bytes:
            self._count_held()
        self.receive(request, in_turn=True)
        if not self._reading:
            self._resume_reading()

    def expects_continue(self) -> None:
        if self._transport is not None and not self._busy and not self._waiting:
            self._transport.write(CONTINUE)

    # Ending.

    def _refuse(self, status: int, reason: str) -> None:
        """Answers with an error and closes, once the requests before this one are answered.

        Later bytes of this connection cannot be interpreted.
        """
        self._refused = True
        self.read_deadline_s = None
        self._pause_reading()
        body = f"{reason}\n".encode("latin-1", "replace")
        headers = b"Content-Type: text/plain\r\nConnection: close\r\n"
        refusal = response(status, headers, body, self._loop.time())
        self._server.lines.tell(
            REQUEST_REFUSED, status=status, peer=self.peer_address, reason=reason
        )
        if self._busy or self._waiting:
            self._waiting.append(refusal)
            self._next()
        else:
            self._send_last(refusal)

    def _send_last(self, answer: bytes) -> None:
        if self._transport is not None:
            self._answer_bytes = len(answer)
            self._transport.write(answer)
            self._close_when_sent(self._transport)

    def _close_when_sent(self, transport: asyncio.Transport) -> None:
        """Closes the connection when the client has read everything, or its time is over."""
        self._closing = True
        self._waiting.clear()
        transport.close()
        self._time_answer()

    def close(self) -> None:
        """Closes the connection, once what was written is sent."""
        if self._transport is not None:
            self._close_when_sent(self._transport)

    def abort(self) -> None:
        """Ends the connection now; what is unsent is lost."""
        self._closing = True
        self.read_deadline_s = self.write_deadline_s = None
        self._unwatch()
        self._server.held.count(self, 0)
        if self._transport is not None:
            self._transport.abort()

    @property
    def is_idle(self) -> bool:
        """Whether the connection has no request, complete or in part."""
        return not self._busy and not self._waiting and not self.in_message

    @property
    def peer(self) -> str:
        """The address the connection came from."""
        name = self._transport.get_extra_info("peername") if self._transport is not None else None
        return str(name[0]) if name else ""

    @property
    def peer_address(self) -> str:
        """The address and the port that the connection came from."""
        name = self._transport.get_extra_info("peername") if self._transport is not None else None
        return f"{name[0]}:{name[1]}" if name else ""


def kind_of(request: Request) -> str:
    """The line of a request (`scheduler`); all large ones are of one kind."""
    if len(request.body) > STEP_BYTES:
        return "large"
    target = request.headers.get("x-amz-target")
    if target is not None:
        return target
    if request.path.startswith("/console/"):
        return request.path
    return "form" if request.body or request.query else request.path


class HttpServer:
    """The connections of one server, and the time and memory they may use."""

    def __init__(
        self, answer: Answer, faults: Faults | None = None, lines: ServerLines | None = None
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.lines = lines if lines is not None else ServerLines()
        # What answers a POST to /, which is all that most clients send; and everything else.
        self.answer = self.route = answer
        self.faults = faults if faults is not None else Faults()
        self.connections: set[HttpConnection] = set()
        # Connections with a deadline: only these are checked every second.
        self.watched: set[HttpConnection] = set()
        # What is held by connections that hold more than COUNTED_BYTES_MIN.
        self.held = HeldBytes(self.loop, HELD_BYTES_MAX)
        self.run_queue = run_queue(self.loop)
        self.stopping = False
        self._emptied = asyncio.Event()
        self._timers = [
            self.loop.call_later(SWEEP_S, self._sweep),
            self.loop.call_later(IDLE_SWEEP_S, self._sweep_idle),
        ]

    def __call__(self) -> HttpConnection:
        return HttpConnection(self)

    def forget(self, connection: HttpConnection) -> None:
        """Drops a connection that has ended."""
        self.connections.discard(connection)
        self.watched.discard(connection)
        self.held.count(connection, 0)
        if self.stopping and not self.connections:
            self._emptied.set()

    def _sweep(self) -> None:
        # A deadline that would pass before the next sweep counts as passed now.
        now_s = self.loop.time() + SWEEP_S
        for connection in list(self.watched):
            connection.sweep(now_s)
        self._timers[0] = self.loop.call_later(SWEEP_S, self._sweep)

    def _sweep_idle(self) -> None:
        for connection in list(self.connections):
            connection.sweep_idle()
        self._timers[1] = self.loop.call_later(IDLE_SWEEP_S, self._sweep_idle)

    async def drain(self, within_s: float) -> None:
        """Accepts no more requests, waits for those being answered, and closes every connection."""
        self.stopping = True
        for connection in list(self.connections):
            if connection.is_idle:
                connection.close()
        if self.connections:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), within_s)
        for connection in list(self.connections):
            connection.abort()
        for timer in self._timers:
            timer.cancel()
