"""A queue service at the other end of a socket, for asyncio callers.

The frames that callers send in one turn of the event loop are sent with one write. When the caller
of a waiting pull is cancelled, a CANCEL is sent to the server; claims that still arrive for this
pull are released.

`retry` has the rules for what is sent again when the connection breaks.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Final, TypeVar, cast

from penstock.backends.remote.endpoints import ServerEndpoint
from penstock.backends.remote.pulls import add_rest
from penstock.backends.remote.retry import (
    RECONNECT_S,
    TIMEOUT_S,
    ConnectionLost,
    opened,
    repeated,
)
from penstock.backends.remote.session import ClientCall, ClientSession
from penstock.errors import BackendLost, EngineClosed
from penstock.service import REDRIVE_MAX, Claim, Command, Pull, Release
from penstock.steps import Calls, await_calls
from penstock.wire.frames.frames import CANCEL, REPLY, STATUS, pack

R = TypeVar("R")
_UNSENT_BYTES_MAX: Final = 4 * 1024 * 1024


class _AwaitedCall(ClientCall):
    """A request of a task, which waits for a future."""

    __slots__ = ("answered",)

    answered: asyncio.Future[None]

    def wake(self) -> None:
        """Wakes the task, unless it was cancelled."""
        if not self.answered.done():
            self.answered.set_result(None)


class _CancelledPull(ClientCall):
    """A pull whose caller was cancelled: claims that still come for it are released."""

    __slots__ = ("_channel",)

    def __init__(self, pull: ClientCall, channel: "_AwaitedChannel") -> None:
        super().__init__(pull.started_s)
        self.number, self.decode, self.is_pull = pull.number, pull.decode, True
        self._channel = channel

    def wake(self) -> None:
        """Releases the claims."""
        self._channel.release_claims_of(self)


class _AwaitedChannel(asyncio.Protocol):
    """One connection, used by the callers of one event loop; once lost it stays lost."""

    def __init__(self, endpoint: ServerEndpoint, timeout_s: float) -> None:
        self._session = ClientSession(endpoint)
        self._shown = endpoint.shown
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._unsent: list[ClientCall] = []
        self._out: list[bytes] = []
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._bytes_received = True
        self._tick_s = timeout_s / 3
        self._watch: asyncio.TimerHandle | None = None
        self.welcomed: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()

    @property
    def lost(self) -> str | None:
        """Why the connection was lost."""
        return self._session.lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_UNSENT_BYTES_MAX)
        self._transport.write(self._session.hello())
        self._watch = self._loop.call_later(self._tick_s, self._check_silence)

    # Requests.

    async def exchange(self, command: Any) -> Any:
        """Sends a command, or STATUS, and waits for its reply.

        Raises ConnectionLost, UnsupportedOperation if the server is too old, or what the server
        raised.
        """
        if not self._may_write.is_set():
            await self._may_write.wait()
        session = self._session
        call = _AwaitedCall(time.monotonic())
        call.answered = self._loop.create_future()
        frame = session.prepare(call, command)
        if session.lost is not None:
            call.sent = False
            return session.outcome(call)
        session.pending[call.number] = call
        self._unsent.append(call)
        self._send(frame)
        try:
            await call.answered
        except asyncio.CancelledError:
            if call.done:
                self.release_claims_of(call)
            elif call.is_pull:
                session.pending[call.number] = _CancelledPull(call, self)
                self._send(pack(CANCEL, call.number))
            raise
        return session.outcome(call)

    def _send(self, frame: bytes) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(frame)

    def _flush(self) -> None:
        out, self._out = self._out, []
        self._unsent.clear()
        if self._session.lost is None and out:
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))

    def release_claims_of(self, call: ClientCall) -> None:
        """Releases the claims in the answer to a pull whose caller was cancelled."""
        if call.is_pull and call.kind == REPLY:
            self.release(call.decode(call.body))

    def release(self, claims: list[Claim]) -> None:
        """Releases claims without waiting for the answers."""
        if self._session.lost is not None:
            return
        for claim in claims:
            command = Release(claim.queue, claim.proof)
            self._send(self._session.prepare(ClientCall(0), command))

    # Answers.

    def data_received(self, data: bytes) -> None:
        self._bytes_received = True
        fault = self._session.receive(data)
        if fault is not None:
            self.drop(fault)
        elif self._session.welcome is not None and not self.welcomed.done():
            self.welcomed.set_result(None)

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def connection_lost(self, error: Exception | None) -> None:
        reason = "the server closed the connection"
        if error is not None:
            reason = f"the connection broke: {getattr(error, 'strerror', None) or error}"
        self.drop(reason)
        if not self.ended.done():
            self.ended.set_result(None)

    def _check_silence(self) -> None:
        """Asks the server for an answer, after a tick without bytes; drops one that gives none."""
        self._watch = self._loop.call_later(self._tick_s, self._check_silence)
        is_idle = self.welcomed.done() and not self._session.pending
        if self._bytes_received or is_idle:
            self._bytes_received = False
            return
        frame = self._session.silence()
        if not frame:
            self.drop("the server has stopped answering")
        elif self.welcomed.done():
            self._send(frame)

    def drop(self, reason: str) -> None:
        """Closes the connection, and fails every caller that waits for an answer."""
        if self._session.lost is not None:
            return
        if self._watch is not None:
            self._watch.cancel()
        for call in self._unsent:
            call.sent = False
        self._session.lose(reason)
        self._may_write.set()
        if not self.welcomed.done():
            self.welcomed.set_exception(
                self._session.refused or BackendLost(f"{self._shown}: {reason}")
            )
        self._out = []
        if self._transport is not None:
            self._transport.abort()


class AsyncRemote:
    """An `AsyncQueueService` at the other end of a socket. It belongs to one event loop."""

    LACKS: ClassVar[Mapping[str, str]] = {}
    redrive_max: int = REDRIVE_MAX

    def __init__(
        self,
        endpoint: ServerEndpoint,
        *,
        timeout_s: float = TIMEOUT_S,
        reconnect_s: float = RECONNECT_S,
    ) -> None:
        self.endpoint: Final = endpoint
        self.reconnect_s: Final = reconnect_s
        self._timeout_s = timeout_s
        self._opening = asyncio.Lock()
        self._closed = False
        self._channel: _AwaitedChannel | None = None

    @classmethod
    async def open(
        cls,
        endpoint: ServerEndpoint,
        *,
        timeout_s: float = TIMEOUT_S,
        reconnect_s: float = RECONNECT_S,
    ) -> "AsyncRemote":
        """Connects. Raises BackendLost, or why the server refuses."""
        remote = cls(endpoint, timeout_s=timeout_s, reconnect_s=reconnect_s)
        remote._channel = await await_calls(opened(remote, 0))
        return remote

    async def execute(self, command: Command[R]) -> R:
        """Executes a command, on a new connection if the last one was lost."""
        channel = self._channel
        if channel is None or channel.lost is not None:
            channel = await self.reopen(channel)
        try:
            reply = await channel.exchange(command)
        except ConnectionLost as lost:
            return cast(R, await await_calls(repeated(self, command, channel, lost)))
        if type(command) is Pull and command.limit > 1:
            try:
                await await_calls(add_rest(channel, command, reply))
            except asyncio.CancelledError:
                channel.release(reply)
                raise
        return cast(R, reply)

    async def status(self) -> dict[str, Any]:
        """The server's own figures. Raises BackendLost."""
        request: Any = STATUS
        status: dict[str, Any] = await self.execute(request)
        return status

    def check_open(self) -> None:
        """Raises EngineClosed if this client was closed."""
        if self._closed:
            raise EngineClosed(f"{self.endpoint.shown}: was closed")

    async def connect(self, connect_s: float) -> _AwaitedChannel:
        """A new channel. Raises BackendLost, or why the server refuses."""
        loop = asyncio.get_running_loop()
        raw = await loop.run_in_executor(None, self.endpoint.open, connect_s)
        raw.setblocking(False)
        channel = _AwaitedChannel(self.endpoint, self._timeout_s)
        try:
            await loop.create_connection(
                lambda: channel,
                sock=raw,
                ssl=self.endpoint.tls,
                server_hostname=self.endpoint.server_name,
            )
        except OSError as error:
            raw.close()
            reason = error.strerror or str(error)
            raise BackendLost(f"{self.endpoint.shown}: cannot be used: {reason}") from None
        await channel.welcomed
        return channel

    async def reopen(self, lost: _AwaitedChannel | None) -> _AwaitedChannel:
        """The channel that replaces the lost one; the first caller opens it."""
        async with self._opening:
            self.check_open()
            channel = self._channel
            if channel is not None and channel is not lost and channel.lost is None:
                return channel
            opening: Calls[_AwaitedChannel] = opened(self, self.reconnect_s)
            self._channel = channel = await await_calls(opening)
            return channel

    async def sleep(self, seconds: float) -> None:
        """Waits."""
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        """Ends the connection; waiting commands fail with EngineClosed."""
        self._closed = True
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.drop("the client closed it")
            await channel.ended
