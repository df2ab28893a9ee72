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
from penstock.backends.remote.pulls import rest_of
from penstock.backends.remote.retry import (
    RECONNECT_S,
    REOPEN_PAUSE_S,
    TIMEOUT_S,
    ConnectionLost,
    Repetition,
)
from penstock.backends.remote.session import ClientSession
from penstock.errors import BackendLost, EngineClosed, PenstockError, StaleReceipt
from penstock.service import REDRIVE_MAX, Claim, Command, Pull, Release
from penstock.wire.frames.bodies import DECODE_REPLY
from penstock.wire.frames.frames import (
    CANCEL,
    REPLY,
    STATUS,
    Body,
    decode_answer,
    decode_status,
    pack,
)

R = TypeVar("R")
Answer = tuple[int, Body]
_UNSENT_BYTES_MAX: Final = 4 * 1024 * 1024


class _Link(asyncio.Protocol):
    """One connection, used by the callers of one event loop; once lost it stays lost."""

    def __init__(self, endpoint: ServerEndpoint, timeout_s: float) -> None:
        self.lost: str | None = None
        self._session = ClientSession(endpoint)
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._pending: dict[int, asyncio.Future[Answer]] = {}
        self._pulls: set[int] = set()
        self._abandoned: set[int] = set()
        self._unsent: set[int] = set()
        self._out: list[bytes] = []
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._bytes_received = True
        self._silent_ticks = 0
        self._tick_s = timeout_s / 3
        self._watch: asyncio.TimerHandle | None = None
        self.welcomed: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_UNSENT_BYTES_MAX)
        self._transport.write(self._session.hello())
        self._watch = self._loop.call_later(self._tick_s, self._check_silence)

    # Requests.

    async def exchange(self, command: Command[R]) -> R:
        """Sends a command and waits for its reply.

        Raises ConnectionLost, UnsupportedOperation if the server is too old, or what the server
        raised.
        """
        request = self._next_request()
        frame, decode = self._session.encode(request, command)
        kind, body = await self.request(request, frame, is_pull=type(command) is Pull)
        return cast(R, decode_answer(kind, body, decode))

    async def status(self) -> dict[str, Any]:
        """The server's own figures."""
        request = self._next_request()
        kind, body = await self.request(request, pack(STATUS, request))
        status: dict[str, Any] = decode_answer(kind, body, decode_status)
        return status

    def _next_request(self) -> int:
        return self._session.next_number(self._pending, self._abandoned)

    async def request(self, request: int, frame: bytes, *, is_pull: bool = False) -> Answer:
        """Sends a frame and waits for its answer."""
        if not self._may_write.is_set():
            await self._may_write.wait()
        started_s = time.monotonic()
        if self.lost is not None:
            raise ConnectionLost(self, False, self.lost, started_s)
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._pending[request] = answer
        if is_pull:
            self._pulls.add(request)
        self._unsent.add(request)
        self._send(frame)
        try:
            return await answer
        except asyncio.CancelledError:
            if self._pending.pop(request, None) is not None:
                if is_pull and self.lost is None:
                    self._abandoned.add(request)
                    self._send(pack(CANCEL, request))
            elif is_pull and answer.done() and not answer.cancelled() and not answer.exception():
                self._release_claims(*answer.result())
            raise
        except _GoneError as gone:
            if self._session.refused is not None:
                raise self._session.refused from None
            may_be_done = gone.sent and not self._session.goodbye_received
            raise ConnectionLost(self, may_be_done, cast(str, self.lost), started_s) from None

    def _send(self, frame: bytes) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(frame)

    def _flush(self) -> None:
        out, self._out = self._out, []
        self._unsent.clear()
        if self.lost is None and out:
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))

    def _release_claims(self, kind: int, body: Body) -> None:
        """Releases the claims in an answer whose caller was cancelled."""
        if kind == REPLY:
            self.release(DECODE_REPLY[Pull](body))

    def release(self, claims: list[Claim]) -> None:
        """Releases claims without waiting for the answers."""
        if self.lost is not None:
            return
        for claim in claims:
            frame, _ = self._session.encode(self._next_request(), Release(claim.queue, claim.proof))
            self._send(frame)

    # Answers.

    def data_received(self, data: bytes) -> None:
        self._bytes_received = True
        session = self._session
        frames = session.decoder.feed(data)
        if not self.welcomed.done() and frames:
            self._take_welcome(frames.pop(0))
        for kind, request, body in frames:
            answer = self._pending.pop(request, None)
            if answer is not None:
                is_pull = request in self._pulls
                self._pulls.discard(request)
                if not answer.done():
                    answer.set_result((kind, body))
                elif is_pull:
                    # Its caller was cancelled, and has not noticed it yet.
                    self._release_claims(kind, body)
            elif request in self._abandoned:
                self._abandoned.discard(request)
                self._pulls.discard(request)
                self._release_claims(kind, body)
            elif not request:
                session.note(kind, body)
        if session.decoder.error is not None:
            session.refused = session.decoder.error
            self.drop(str(session.refused))

    def _take_welcome(self, frame: tuple[int, int, Body]) -> None:
        try:
            self._session.accept(frame)
        except PenstockError as error:
            self._session.refused = error
            self.drop(str(error))
        else:
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
        """Sends a STATUS after a tick without bytes; drops the connection after three."""
        self._watch = self._loop.call_later(self._tick_s, self._check_silence)
        if self._bytes_received or (not self._pending and self.welcomed.done()):
            self._bytes_received = False
            self._silent_ticks = 0
            return
        self._silent_ticks += 1
        if self._silent_ticks >= 3:
            self.drop("the server has stopped answering")
        elif self.welcomed.done():
            self._send(pack(STATUS, self._next_request()))

    def drop(self, reason: str) -> None:
        """Closes the connection, and fails every caller that waits for an answer."""
        if self.lost is not None:
            return
        self.lost = reason
        if self._watch is not None:
            self._watch.cancel()
        pending, self._pending = self._pending, {}
        self._may_write.set()
        if not self.welcomed.done():
            self.welcomed.set_exception(
                self._session.refused or BackendLost(f"{self._endpoint.shown}: {reason}")
            )
        for request, answer in pending.items():
            if not answer.done():
                answer.set_exception(_GoneError(request not in self._unsent))
        self._out = []
        if self._transport is not None:
            self._transport.abort()


class _GoneError(Exception):
    """The connection was dropped; `sent` if the request may have left this process."""

    def __init__(self, sent: bool) -> None:
        super().__init__(sent)
        self.sent = sent


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
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._reconnect_s = reconnect_s
        self._opening = asyncio.Lock()
        self._closed = False
        self._link: _Link | None = None

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
        remote._link = await remote._open_link(0)
        return remote

    async def execute(self, command: Command[R]) -> R:
        """Executes a command, on a new connection if the last one was lost."""
        link = self._link
        if link is None or link.lost is not None:
            link = await self._reopen(link)
        try:
            reply = await link.exchange(command)
        except ConnectionLost as lost:
            return cast(R, await self._repeat(command, lost))
        if type(command) is Pull and command.limit > 1:
            await self._pull_rest(link, command, cast("list[Claim]", reply))
        return reply

    async def _pull_rest(self, link: _Link, pull: Pull, claims: list[Claim]) -> None:
        """Adds the claims that did not fit into one answer (`pulls`)."""
        answer = claims
        while (rest := rest_of(pull, answer, len(claims))) is not None:
            try:
                answer = await link.exchange(rest)
            except asyncio.CancelledError:
                link.release(claims)
                raise
            except (PenstockError, ConnectionLost):
                return
            claims += answer

    async def status(self) -> dict[str, Any]:
        """The server's own figures. Raises BackendLost."""
        link = self._link or await self._reopen(None)
        try:
            return await link.status()
        except ConnectionLost as lost:
            return cast("dict[str, Any]", await self._repeat(STATUS, lost))

    async def _repeat(self, command: Any, lost: ConnectionLost) -> Any:
        """Sends a request again on a new connection, if `retry` allows it."""
        repetition = Repetition(self._endpoint, command, self._reconnect_s)
        while True:
            self._check_open()
            to_send = repetition.after(lost)
            await asyncio.sleep(repetition.pause_s())
            link = await self._reopen(lost.channel)
            try:
                if to_send is STATUS:
                    return await link.status()
                return repetition.outcome(await link.exchange(to_send))
            except StaleReceipt as stale:
                return repetition.outcome(stale)
            except ConnectionLost as lost_again:
                lost = lost_again

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed(f"{self._endpoint.shown}: was closed")

    async def _reopen(self, lost: object) -> _Link:
        async with self._opening:
            self._check_open()
            link = self._link
            if link is None or link is lost or link.lost is not None:
                self._link = link = await self._open_link(self._reconnect_s)
            return link

    async def _open_link(self, reconnect_s: float) -> _Link:
        deadline_s = time.monotonic() + max(reconnect_s, self._endpoint.reconnect_s_min)
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            try:
                return await self._connect(min(left_s, reconnect_s))
            except BackendLost:
                if time.monotonic() + REOPEN_PAUSE_S > deadline_s:
                    raise
            await asyncio.sleep(REOPEN_PAUSE_S)

    async def _connect(self, connect_s: float) -> _Link:
        loop = asyncio.get_running_loop()
        raw = await loop.run_in_executor(None, self._endpoint.open, connect_s)
        raw.setblocking(False)
        link = _Link(self._endpoint, self._timeout_s)
        try:
            await loop.create_connection(
                lambda: link,
                sock=raw,
                ssl=self._endpoint.tls,
                server_hostname=self._endpoint.server_name,
            )
        except OSError as error:
            raw.close()
            reason = error.strerror or str(error)
            raise BackendLost(f"{self._endpoint.shown}: cannot be used: {reason}") from None
        await link.welcomed
        return link

    async def close(self) -> None:
        """Ends the connection; waiting commands fail with EngineClosed."""
        self._closed = True
        link, self._link = self._link, None
        if link is not None:
            link.drop("the client closed it")
            await link.ended
