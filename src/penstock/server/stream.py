"""Connections with many requests each: the code that the frame server and Carrot share.

All answers that are made within one callback of the event loop are sent in one write per
connection. A connection pauses reading while its peer does not read answers, or while too many of
its requests wait for the disk. It is closed if it makes no progress for too long. When it breaks,
everything pending for it is cancelled: waits end, and claims that were made for it are released.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple, cast

from penstock.backends.engine.loop import engine_fault
from penstock.backends.loop import LoopService, Pending
from penstock.errors import PenstockError, UnavailableError
from penstock.server.faults import Faults

# An incomplete frame up to this size is not counted.
SMALL_BYTES: Final = 64 * 1024


class Limits(NamedTuple):
    """The limits for clients: sizes, counts and times."""

    frame_bytes_max: int = 65 * 1024 * 1024
    connections_max: int = 10_000
    waits_max: int = 1_024
    deferred_max: int = 4_096
    unsent_bytes_max: int = 1024 * 1024
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
        # Connections with something to send.
        self.dirty: list[Any] = []
        self.failed = failed
        self.faults = faults or Faults()
        self.service = service
        self.loop = asyncio.get_running_loop()
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

    # Sending.

    def plan_flush(self) -> None:
        """Plans a flush at the end of this turn of the event loop, for all its answers."""
        if not self._flush_is_planned:
            self._flush_is_planned = True
            self.loop.call_soon(self.flush)

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
        self.fail(engine_fault(fault))

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

    def __init__(self, server: StreamServer) -> None:
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
        self.writing_paused = False
        self._stream = server
        self._out: list[bytes] = []
        self._unfinished_bytes = 0
        self._reading_paused = False
        # The progress at the last sweep, and the time of the first sweep with this progress.
        self._standstill: tuple[int, int] | None = None
        self._standstill_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=self._stream.limits.unsent_bytes_max)
        self.since_s = self._stream.loop.time()

    # Implemented by each protocol.

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

    def flush(self) -> None:
        """Writes all queued answers to the transport at once."""
        out = self._out
        if not out or self.is_gone:
            return
        self._out = []
        self.transport.write(out[0] if len(out) == 1 else b"".join(out))
        if self.ending:
            self.transport.close()
        elif self._reading_paused:
            self.resume_if_able()

    def _is_behind(self) -> bool:
        return self.deferred > self._stream.limits.deferred_max // 2

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
        self.transport.abort()

    # Limits.

    def reserve(self, frame_bytes: int) -> bool:
        """Counts the incomplete frame against the limit of all connections; False if over it."""
        stream = self._stream
        wanted = frame_bytes if frame_bytes > SMALL_BYTES else 0
        stream.unfinished_bytes += wanted - self._unfinished_bytes
        self._unfinished_bytes = wanted
        return stream.unfinished_bytes <= stream.limits.unfinished_bytes_max

    @property
    def has_reserved(self) -> bool:
        """Whether an incomplete frame of this connection is counted."""
        return bool(self._unfinished_bytes)

    def pause_if_behind(self) -> None:
        """Pauses reading while too many requests wait for the disk."""
        if self.deferred > self._stream.limits.deferred_max:
            self.pause_reading()

    def pause_reading(self) -> None:
        """Stops reading until `resume_if_able` allows it again."""
        if not self._reading_paused and not self.transport.is_closing():
            self._reading_paused = True
            self.transport.pause_reading()

    def resume_if_able(self) -> None:
        """Resumes reading, unless too many answers or requests are still waiting."""
        if (
            self._reading_paused
            and not self.ending
            and not self.writing_paused
            and not self._is_behind()
            and not self.has_backlog
        ):
            self._reading_paused = False
            self.transport.resume_reading()

    @property
    def has_backlog(self) -> bool:
        """Whether requests were read that are still to be executed."""
        return False

    def pause_writing(self) -> None:
        self.writing_paused = True
        self.pause_reading()

    def resume_writing(self) -> None:
        self.writing_paused = False
        self.resume_if_able()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.is_gone = True
        self.ending = True
        self._out = []
        self.reserve(0)
        self._stream.leave(self)

    def check_standstill(self, now_s: float, is_amid_frame: bool, seen: tuple[int, int]) -> None:
        """Closes the connection if a frame does not arrive, or answers are not read.

        `seen` changes while the frame arrives.
        """
        if not (is_amid_frame or self.writing_paused):
            self._standstill = None
            return
        if self.writing_paused:
            seen = (-1, self.transport.get_write_buffer_size())
        if seen != self._standstill:
            self._standstill, self._standstill_s = seen, now_s
        elif now_s - self._standstill_s > self._stream.limits.stall_s_max:
            self.abort()


def ignore_reply(reply: Any, error: Exception | None) -> None:
    """The callback of a pull that is cancelled at once."""
