"""Connections with many requests each: the code that the frame server and Carrot share.
Long, because the order of requests and every limit of a connection are here, beside each other.

All answers that are made within one callback of the event loop are sent in one write per
connection. A connection pauses reading while its peer does not read answers, or while too many of
its requests wait for the disk; requests that were read by then are its backlog. Requests of a kind
that takes long wait in the run queue (`scheduler`), and with them the later ones of their
connection. It is closed if it makes no progress for too long, or if it holds the most when all
connections together hold too much (`held`). When it breaks, everything pending for it is cancelled:
waits end, and claims that were made for it are released.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, Final, NamedTuple, cast

from penstock.backends.loop import LoopService, Pending
from penstock.backends.scheduler import SLOW_S, TURN_S, run_queue
from penstock.errors import PenstockError, UnavailableError
from penstock.server.faults import Faults
from penstock.server.held import COUNTED_BYTES_MIN, WRITE_PROGRESS_BYTES, HeldBytes
from penstock.server.lines import TOKEN_REFUSED, ServerLines
from penstock.service import Message

# An incomplete frame up to this size is not counted.
SMALL_BYTES: Final = 64 * 1024


class Limits(NamedTuple):
    """The limits for clients: sizes, counts and times."""

    frame_bytes_max: int = 65 * 1024 * 1024
    connections_max: int = 10_000
    waits_max: int = 1_024
    deferred_max: int = 4_096
    # With more unsent answers than this, a connection is not read, and its requests wait.
    unsent_bytes_max: int = 1024 * 1024
    # Memory for unsent answers and for requests that wait for them, on all connections together.
    held_bytes_max: int = 256 * 1024 * 1024
    # Memory for large frames that are incomplete, on all connections together.
    unfinished_bytes_max: int = 512 * 1024 * 1024
    hello_s_max: float = 10.0
    # How long an incomplete frame, or answers that are not read, may make no progress.
    stall_s_max: float = 30.0


class StreamServer:
    """The connections of one server, in front of one service.

    `failed` is called once if the service has to stop; the owner of the server should end it then.
    The service stays open when the server stops: it may have other users.
    """

    def __init__(
        self,
        service: LoopService,
        limits: Limits | None = None,
        failed: Callable[[PenstockError], None] | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.connections: set[Any] = set()
        self.connections_seen = 0
        self.requests_seen = 0
        self.unfinished_bytes = 0
        self.held = HeldBytes(asyncio.get_running_loop(), self.limits.held_bytes_max)
        # Connections with something to send.
        self.dirty: list[Any] = []
        self.failed = failed
        self.faults = faults or Faults()
        self.lines = ServerLines()
        self.service = service
        self.loop = asyncio.get_running_loop()
        self.run_queue = run_queue(self.loop)
        self.started_s = self.loop.time()
        self.idle_since_s = self.started_s
        # Answers that are not durable yet, or come from another service.
        self.deferred = 0
        self.stopping = False
        self.broken: PenstockError | None = None
        self._flush_is_planned = False
        self._drained = asyncio.Event()
        self._emptied = asyncio.Event()
        self._sweep_s = min(self.limits.hello_s_max, self.limits.stall_s_max) / 4
        self._sweep_timer = self.loop.call_later(self._sweep_s, self._sweep)
        service.on_failure(self.fail)

    def tell_refused_token(self, protocol: str, transport: asyncio.BaseTransport) -> None:
        """Writes the line of a client whose token is missing or wrong."""
        name = transport.get_extra_info("peername")
        peer = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else None
        self.lines.tell(TOKEN_REFUSED, protocol=protocol, peer=peer)

    # Sending.

    def plan_flush(self) -> None:
        """Plans a flush at the end of this turn of the event loop, for all its answers."""
        if not self._flush_is_planned:
            self._flush_is_planned = True
            self.loop.call_soon(self.flush)

    def flush_deferred(self) -> None:
        """Sends the answers to requests that were deferred: at once if no other is deferred."""
        if self.deferred:
            self.plan_flush()
        else:
            self.flush()

    def flush(self) -> None:
        """Sends all queued answers; to be called after answers were made."""
        self._flush_is_planned = False
        if self.dirty:
            dirty, self.dirty = self.dirty, []
            for connection in dirty:
                connection.flush()
        if self.stopping:
            self._check_drained()

    def _check_drained(self) -> None:
        if not self.deferred and not any(each.waits for each in self.connections):
            self._drained.set()

    def give_up(self, fault: Exception) -> None:
        """Stops the service: after an unexpected exception its state is unknown."""
        self.faults.report("the engine", fault)
        self.fail(PenstockError(f"the engine failed and was stopped: {type(fault).__name__}"))

    def fail(self, error: PenstockError) -> None:
        """Sends every client the error that stopped the service, and ends the connections."""
        if self.broken is not None:
            return
        self.broken = error
        for connection in list(self.connections):
            connection.send_failure(error)
            connection.end()
        self.plan_flush()
        failed, self.failed = self.failed, None
        if failed is not None:
            failed(error)

    def shown_error(self, error: Exception, what: str = "a request") -> PenstockError:
        """The error for a client; an unexpected exception is reported and not shown."""
        if isinstance(error, PenstockError):
            return error
        self.faults.report(what, error)
        return UnavailableError("the request could not be served")

    # Connections.

    def enter(self, connection: "StreamConnection") -> PenstockError | None:
        """Adds a new connection; or returns the error, if there is no room for it."""
        if self.broken is not None:
            return self.broken
        if len(self.connections) >= self.limits.connections_max:
            return UnavailableError(f"the server has {len(self.connections)} connections already")
        self.connections.add(connection)
        self.connections_seen += 1
        return None

    def leave(self, connection: "StreamConnection") -> None:
        """Removes a connection: its waits end, and claims that it was not sent are released."""
        for pending in list(connection.waits.values()):
            pending.cancel()
        for pending in list(connection.claiming.values()):
            pending.cancel()
            self.deferred -= 1
        connection.waits.clear()
        connection.claiming.clear()
        self.connections.discard(connection)
        if not self.connections:
            self.idle_since_s = self.loop.time()
            if self.stopping:
                self._emptied.set()
        self.flush()

    def _sweep(self) -> None:
        """Closes connections that make no progress; one timer serves all of them."""
        now_s = self.loop.time()
        for connection in list(self.connections):
            connection.check_progress(now_s)
        self._sweep_timer = self.loop.call_later(self._sweep_s, self._sweep)

    async def stop(self, reason: str, timeout_s: float = 10.0) -> None:
        """Answers the requests that were read, sends a goodbye, and closes every connection."""
        self.stopping = True
        for connection in list(self.connections):
            connection.ignores_requests = True
            for request, pending in list(connection.waits.items()):
                if pending.waits:
                    pending.cancel()
                    del connection.waits[request]
                    connection.send_wait_ended(request, reason)
        self.flush()
        if not self._drained.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), timeout_s)
        for connection in list(self.connections):
            connection.send_goodbye(reason)
            connection.end()
        self.flush()
        if self.connections:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), timeout_s)
        for connection in list(self.connections):
            connection.abort()
        self._sweep_timer.cancel()


class StreamConnection(asyncio.Protocol):
    """The connection of one client; its answers are sent in one write per turn of the loop.

    A subclass adds `data_received`, and the bytes to send when a wait or the connection ends.
    """

    # Attributes beyond the thirtieth of an object without slots make all of them slower to read.
    __slots__ = (
        "_backlog",
        "_backlog_bytes",
        "_backlog_is_planned",
        "_deferred_bytes",
        "_deferred_max",
        "_delayed_bytes",
        "_execute",
        "_is_counted",
        "_is_held",
        "_out",
        "_out_bytes",
        "_reading_paused",
        "_run_queue",
        "_standstill",
        "_standstill_s",
        "_stream",
        "_unsent_bytes",
        "_unsent_bytes_max",
        "_written_bytes",
        "claiming",
        "deferred",
        "ending",
        "held_bytes",
        "ignores_requests",
        "is_gone",
        "reserved_bytes",
        "since_s",
        "transport",
        "waits",
        "writing_paused",
    )

    def __init__(self, server: StreamServer, execute: Callable[[Any, Any], None]) -> None:
        """`execute(connection, request)` takes a tuple whose last element is the body."""
        self._execute = execute
        # By request: pulls that wait for a message, and pulls whose claims are not durable yet.
        self.waits: dict[int, Pending] = {}
        self.claiming: dict[int, Pending] = {}
        # Requests whose answers come later, without pulls that wait for a message.
        self.deferred = 0
        self.is_gone = False
        # Set when the server stops: requests that arrive now are ignored.
        self.ignores_requests = False
        self.since_s = 0.0
        self.ending = False
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        # Whether more than `unsent_bytes_max` is unsent.
        self.writing_paused = False
        # The part of this connection in the server's count (`HeldBytes`).
        self.held_bytes = 0
        # The size of an incomplete large frame, which `reserve` has counted.
        self.reserved_bytes = 0
        self._stream = server
        self._run_queue = server.run_queue
        self._unsent_bytes_max = server.limits.unsent_bytes_max
        self._deferred_max = server.limits.deferred_max
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._written_bytes = 0
        # Whether more than COUNTED_BYTES_MIN is unsent, and the most it was since then.
        self._is_counted = False
        self._unsent_bytes = 0
        # Messages in replies that are not durable yet.
        self._deferred_bytes = 0
        # Requests that were read and are not begun yet.
        self._backlog: deque[Any] = deque()
        self._backlog_bytes = 0
        self._backlog_is_planned = False
        # A request is executed in steps, or waits in the run queue: later ones wait in the backlog.
        self._is_held = False
        # The size of the request that waits in the run queue.
        self._delayed_bytes: int | None = None
        self._reading_paused = False
        # The progress at the last sweep, and the time of the first sweep with this progress.
        self._standstill: tuple[int, int] | None = None
        self._standstill_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # Above this, `pause_writing` is called.
        self.transport.set_write_buffer_limits(COUNTED_BYTES_MIN)
        self.since_s = self._stream.loop.time()

    # Implemented by each protocol.

    def line_of(self, request: Any) -> Hashable:
        """The request's line in the run queue: those of one line take about as long."""
        raise NotImplementedError

    def end_requests(self) -> None:
        """Called when all requests that were read are begun: bytes behind them may be wrong."""

    def send_failure(self, error: PenstockError) -> None:
        """Queues the error of a service that has failed."""
        raise NotImplementedError

    def send_goodbye(self, reason: str) -> None:
        """Queues the last bytes before the server stops."""

    def send_wait_ended(self, request: int, reason: str) -> None:
        """Queues the answer to a pull whose wait ends because the server stops."""

    # Sending.

    def send(self, answer: bytes) -> None:
        """Queues an answer for the next flush."""
        if not self._out:
            self._stream.dirty.append(self)
        self._out.append(answer)
        self._out_bytes += len(answer)

    def flush(self) -> None:
        """Writes all queued answers to the transport at once."""
        out = self._out
        if not out or self.is_gone:
            return
        self._out = []
        self._out_bytes = 0
        data = out[0] if len(out) == 1 else b"".join(out)
        self._written_bytes += len(data)
        self.transport.write(data)
        if self._is_counted:
            self._count_unsent(len(data))
        if self.ending:
            self.transport.close()
        elif self._reading_paused:
            self.resume_if_able()

    def end(self) -> None:
        """Closes the connection once everything has been sent."""
        self.ending = True
        if self.is_gone:
            return
        self.pause_reading()
        if self._out:
            self._stream.dirty.append(self)
        else:
            self.transport.close()

    def abort(self) -> None:
        """Closes the connection at once."""
        self.ending = True
        self._stream.held.count(self, 0)
        self.transport.abort()

    # Limits.

    def reserve(self, frame_bytes: int) -> bool:
        """Counts the incomplete frame against the limit of all connections; False if over it."""
        stream = self._stream
        wanted = frame_bytes if frame_bytes > SMALL_BYTES else 0
        stream.unfinished_bytes += wanted - self.reserved_bytes
        self.reserved_bytes = wanted
        return stream.unfinished_bytes <= stream.limits.unfinished_bytes_max

    def pause_reading(self) -> None:
        """Stops reading until `resume_if_able` allows it again."""
        if not self._reading_paused and not self.transport.is_closing():
            self._reading_paused = True
            self.transport.pause_reading()

    def resume_if_able(self) -> None:
        """Takes the backlog or reads again, unless too many answers or requests are waiting."""
        if (
            not self._reading_paused
            or self.ending
            or self.writing_paused
            or self.deferred > self._deferred_max // 2
            or self._deferred_bytes > self._unsent_bytes_max
        ):
            return
        if self._backlog:
            self.plan_backlog()
        else:
            self._reading_paused = False
            self.transport.resume_reading()

    # Requests, which are executed in order.

    def accept(self, requests: Sequence[Any], read_bytes: int) -> None:
        """Executes requests that were read, or adds them to the backlog.

        Some of many stay there for a later turn of the event loop, or until there is room for their
        answers. `read_bytes` is the size of what they are a part of.
        """
        backlog = self._backlog
        if backlog or self._is_held:
            backlog.extend(requests)
        elif len(requests) == 1:
            request = requests[0]
            if self._run_queue.means_s:
                self._begin(request)
            else:
                # The same as `_begin`, with fewer calls.
                began_s = perf_counter()
                self._execute(self, request)
                took_s = perf_counter() - began_s
                if took_s > SLOW_S:
                    self._run_queue.note(self.line_of(request), took_s)
        else:
            backlog.extend(requests)
            self._take_backlog()
        if backlog:
            self.pause_reading()
            self.count_backlog(read_bytes)
            self.plan_backlog()
        elif self.deferred and self.is_full():
            self.pause_reading()

    def _begin(self, request: Any, in_turn: bool = False) -> None:
        """Executes a request, or lets it wait in the run queue if its kind is slow."""
        queue = self._run_queue
        if queue.means_s and not in_turn:
            line = self.line_of(request)
            if queue.is_slow(line):
                self._is_held = True
                self._delayed_bytes = len(request[-1])
                self.count_deferred(1, self._delayed_bytes)
                queue.add(line, partial(self._begin_delayed, request))
                return
        began_s = perf_counter()
        self._execute(self, request)
        took_s = perf_counter() - began_s
        if took_s > SLOW_S or queue.means_s:
            queue.note(self.line_of(request), took_s)

    def _begin_delayed(self, request: Any) -> None:
        if self._delayed_bytes is None:
            return
        self._end_delay()
        # The request may hold the later ones again.
        self.resume_requests()
        # If the server stops, the goodbye says that what is not answered was not done.
        if not (self.ending or self.ignores_requests):
            self._begin(request, in_turn=True)
        self._stream.flush()

    def _end_delay(self) -> None:
        size_bytes, self._delayed_bytes = self._delayed_bytes, None
        if size_bytes is not None:
            self.count_deferred(-1, -size_bytes)

    def _take_backlog(self) -> None:
        """Executes requests of the backlog until the connection must wait, or for TURN_S."""
        backlog = self._backlog
        until_s = perf_counter() + TURN_S
        while backlog and not self._is_held:
            self._begin(backlog.popleft())
            if self.is_full() or perf_counter() > until_s:
                return

    @property
    def must_wait(self) -> bool:
        """Whether no request of the backlog is to be executed before others are done."""
        return self._is_held or self.writing_paused or self.is_full()

    def hold_requests(self) -> None:
        """Leaves later requests in the backlog, so that they are executed in order."""
        self._is_held = True

    def resume_requests(self) -> None:
        """Takes the backlog in the next turn of the event loop, if requests were held."""
        if self._is_held:
            self._is_held = False
            self.plan_backlog()

    def is_full(self) -> bool:
        """Whether so much is to be sent, or waits for the disk, that the next request waits."""
        return (
            self._out_bytes + self._unsent_bytes + self._deferred_bytes > self._unsent_bytes_max
            or self.deferred > self._deferred_max
        )

    def count_deferred(self, replies: int, size_bytes: int) -> None:
        """Adds to the replies that wait for the disk, or takes from them by negative numbers."""
        self.deferred += replies
        self._stream.deferred += replies
        if size_bytes:
            self._deferred_bytes += size_bytes
            if abs(size_bytes) > COUNTED_BYTES_MIN:
                self._count_held()

    def plan_backlog(self) -> None:
        """Plans to take the backlog in the next turn of the loop: others have their turn."""
        if not self._backlog_is_planned:
            self._backlog_is_planned = True
            self._stream.loop.call_soon(self._continue_backlog)

    def _continue_backlog(self) -> None:
        self._backlog_is_planned = False
        if self.ending:
            return
        backlog = self._backlog
        if self.ignores_requests:
            # The goodbye says that what is not answered was not done.
            backlog.clear()
        if not (backlog and self.must_wait):
            self._take_backlog()
            if not (backlog or self._is_held):
                self.end_requests()
            self._stream.flush()
            self.resume_if_able()
        if backlog:
            self.pause_reading()
            if not self.must_wait:
                self.plan_backlog()
        else:
            self.count_backlog(0)

    def count_backlog(self, read_bytes: int) -> None:
        """Counts the bytes of which the requests of the backlog are a part."""
        if read_bytes != self._backlog_bytes:
            self._backlog_bytes = read_bytes
            self._count_held()

    # Unsent answers.

    def pause_writing(self) -> None:
        self._is_counted = True
        self._count_unsent(0)

    def resume_writing(self) -> None:
        self._is_counted = False
        self._unsent_bytes = 0
        self.writing_paused = False
        self._count_held()
        self.resume_if_able()

    def _count_unsent(self, written_bytes: int) -> None:
        """Counts the unsent answers, and pauses reading if they are too many."""
        unsent_bytes = self.transport.get_write_buffer_size()
        # What was written at once stays in memory until its last byte is sent.
        held_bytes = max(unsent_bytes, written_bytes)
        if held_bytes > self._unsent_bytes:
            self._unsent_bytes = held_bytes
            self._count_held()
        if unsent_bytes > self._unsent_bytes_max and not self.writing_paused:
            self.writing_paused = True
            self.pause_reading()

    def _count_held(self) -> None:
        if not self.is_gone:
            held_bytes = self._unsent_bytes + self._backlog_bytes + self._deferred_bytes
            self._stream.held.count(self, held_bytes if held_bytes > COUNTED_BYTES_MIN else 0)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.is_gone = True
        self.ending = True
        self._out = []
        self._backlog.clear()
        self._end_delay()
        self._stream.held.count(self, 0)
        self.reserve(0)
        self._stream.leave(self)

    def check_standstill(self, now_s: float, is_amid_frame: bool, seen: tuple[int, int]) -> None:
        """Closes the connection if a frame does not arrive, or answers are not read.

        `seen` changes while the frame arrives.
        """
        unsent_bytes = self.transport.get_write_buffer_size()
        if unsent_bytes:
            # What was sent, not what is left: further requests may add to it.
            seen = (-1, (self._written_bytes - unsent_bytes) // WRITE_PROGRESS_BYTES)
        elif not is_amid_frame:
            self._standstill = None
            return
        if seen != self._standstill:
            self._standstill, self._standstill_s = seen, now_s
        elif now_s - self._standstill_s > self._stream.limits.stall_s_max:
            self.abort()


def bodies_bytes(messages: Sequence[Message]) -> int:
    """How large messages are, as far as they can be large."""
    if len(messages) == 1:
        return len(messages[0].body)
    return sum([len(each.body) for each in messages])


def ignore_reply(reply: Any, error: Exception | None) -> None:
    """The callback of a pull that is cancelled at once."""
