"""A connection to one Redis server: commands that come at the same time go as one pipeline.

    callers → waiting requests → (one pipeline at a time, on one connection) → replies, in order

After a lost connection the next request opens another. While the server cannot be reached, or
replies that it cannot answer yet, requests are repeated until the timeout. A request that was sent
and got no reply is not repeated, because it may have taken effect: it fails with BackendLost.
"""

import asyncio
import os
import re
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol

from redis import exceptions as faults
from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from penstock.backends.redis.address import HostPort, RedisTarget
from penstock.backends.redis.scripts import SCRIPTS
from penstock.errors import (
    BackendLost,
    EngineClosed,
    Overloaded,
    PenstockError,
    RequestError,
    StoreFull,
)

# Text, bytes, whole numbers, and `Packed` parts.
RedisCommand = tuple[Any, ...]
# redis-py does not annotate its connections.
RedisConnection = Any
# Commands of one pipeline; those that come after them go with the next.
_PIPELINE_MAX: Final = 1_000
_PAUSE_S_MIN: Final = 0.02
_PAUSE_S_MAX: Final = 0.5
# Replies of a server that has done nothing, and for a reason that will pass.
_TEMPORARY: Final = ("LOADING", "MASTERDOWN", "TRYAGAIN", "CLUSTERDOWN", "BUSY", "READONLY")
_TEMPORARY_ERRORS: Final = (
    faults.BusyLoadingError,
    faults.MasterDownError,
    faults.TryAgainError,
    faults.ClusterDownError,
    faults.ReadOnlyError,
)
_REFUSED_ERRORS: Final = (
    faults.AuthenticationError,
    faults.AuthenticationWrongNumberOfArgsError,
    faults.NoPermissionError,
)


class Packed(NamedTuple):
    """Some arguments of a command as the bytes that are sent: made once, sent often."""

    text: bytes
    arguments: int


def packed(*arguments: Any) -> Packed:
    """These arguments as one part of a command."""
    return Packed(b"".join(map(_argument, arguments)), len(arguments))


def _argument(value: Any) -> bytes:
    if type(value) is not bytes:
        value = value.encode() if type(value) is str else b"%d" % value
    return b"$%d\r\n%b\r\n" % (len(value), value)


def pack(command: RedisCommand) -> bytes:
    """A command as the bytes that are sent."""
    count = len(command)
    parts = [b""]
    for each in command:
        if type(each) is Packed:
            count += each.arguments - 1
            parts.append(each.text)
        else:
            parts.append(_argument(each))
    parts[0] = b"*%d\r\n" % count
    return b"".join(parts)


class RedisLink(Protocol):
    """How commands reach the servers."""

    async def send(self, key: str, commands: Sequence[RedisCommand]) -> list[Any]:
        """The replies to commands on the server that has this key, in order.

        An error that a command met is in its reply's place. Raises UnavailableError.
        """
        ...

    async def find(self, key: str) -> HostPort:
        """The address of the server that has this key. Raises UnavailableError."""
        ...

    async def listen(self, key: str) -> RedisConnection:
        """A connection of its own to the server that has this key. Raises UnavailableError."""
        ...

    async def close(self) -> None:
        """Ends every connection; requests under way fail with EngineClosed."""
        ...


class _Pipelined:
    __slots__ = ("commands", "replies")

    def __init__(self, commands: Sequence[RedisCommand], replies: "asyncio.Future[Any]") -> None:
        self.commands = commands
        self.replies = replies


class Server:
    """The connection to one server. `find` gives its address whenever it is to be connected."""

    def __init__(self, target: RedisTarget, find: Callable[[], Awaitable[HostPort]]) -> None:
        self._target = target
        self._find = find
        self._connection: RedisConnection | None = None
        self._waiting: deque[_Pipelined] = deque()
        self._pump: asyncio.Task[None] | None = None
        self._closed = False

    async def send(self, commands: Sequence[RedisCommand]) -> list[Any]:
        """The replies in order, an error in the place of the command that met it.

        Raises UnavailableError, RequestError if the server refuses the connection.
        """
        if self._closed:
            raise EngineClosed("this service was closed")
        loop = asyncio.get_running_loop()
        request = _Pipelined(commands, loop.create_future())
        self._waiting.append(request)
        if self._pump is None or self._pump.done():
            self._pump = loop.create_task(self._send_all())
        replies: list[Any] = await request.replies
        return replies

    async def _send_all(self) -> None:
        while self._waiting:
            taken: list[_Pipelined] = []
            count = 0
            while self._waiting and count < _PIPELINE_MAX:
                taken.append(self._waiting.popleft())
                count += len(taken[-1].commands)
            try:
                replies = await self._exchange(
                    [command for request in taken for command in request.commands]
                )
            except asyncio.CancelledError:
                _fail(taken, EngineClosed("this service was closed"))
                raise
            except Exception as error:
                _fail(taken, self._translate(error))
                continue
            at = 0
            for request in taken:
                if not request.replies.done():
                    request.replies.set_result(replies[at : at + len(request.commands)])
                at += len(request.commands)

    async def _exchange(self, commands: list[RedisCommand]) -> list[Any]:
        connection = await self._connected()
        try:
            async with asyncio.timeout(self._target.timeout_s):
                await connection.send_packed_command(
                    b"".join(map(pack, commands)), check_health=False
                )
                return [await _reply(connection) for _ in commands]
        except BaseException:
            self._connection = None
            await _disconnect(connection)
            raise

    async def _connected(self) -> RedisConnection:
        connection = self._connection
        if connection is not None:
            with suppress(faults.RedisError, OSError):
                if not await connection.can_read_destructive():
                    return connection
            # The server has closed it meanwhile.
            self._connection = None
            await _disconnect(connection)
        self._connection = await self.connect()
        return self._connection

    async def connect(self) -> RedisConnection:
        """A new connection, tried again until the timeout. Raises BackendLost or RequestError."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._target.timeout_s
        pause_s = _PAUSE_S_MIN
        while True:
            connection = None
            try:
                async with asyncio.timeout_at(give_up_s):
                    host, port = await self._find()
                    connection = make_connection(self._target, host, port)
                    await connection.connect()
                    return connection
            except _REFUSED_ERRORS as error:
                raise RequestError(f"{self._target.shown}: {error}") from None
            except (faults.RedisError, OSError) as error:
                if connection is not None:
                    await _disconnect(connection)
                refusal = _tls_refusal(error)
                if refusal is not None:
                    raise RequestError(f"{self._target.shown}: {refusal}") from None
                if loop.time() + pause_s >= give_up_s:
                    raise BackendLost(
                        f"{self._target.shown}: cannot connect: {_system_reason(error)}"
                    ) from None
            if self._closed:
                raise EngineClosed("this service was closed")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    def _translate(self, error: Exception) -> PenstockError:
        if self._closed:
            return EngineClosed("this service was closed")
        if isinstance(error, PenstockError):
            return error
        if isinstance(error, TimeoutError):
            return BackendLost(
                f"{self._target.shown}: no answer within {self._target.timeout_s:g} s"
            )
        return BackendLost(f"{self._target.shown}: {_reason(error)}")

    async def drop_connection(self) -> None:
        """Closes the connection, as to a former master; the next request opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await _disconnect(connection)

    async def close(self) -> None:
        """Ends the connection; requests under way fail with EngineClosed."""
        self._closed = True
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        _fail(self._waiting, EngineClosed("this service was closed"))
        self._waiting.clear()
        await self.drop_connection()


class SingleLink:
    """One server, or the master that Sentinels name."""

    def __init__(self, target: RedisTarget) -> None:
        self._target = target
        self._sentinel = _sentinel(target) if target.master is not None else None
        self.server = Server(target, self._find)

    async def _find(self) -> HostPort:
        if self._sentinel is None:
            return self._target.hosts[0]
        found: HostPort = await self._sentinel.discover_master(self._target.master)
        return found

    async def send(self, key: str, commands: Sequence[RedisCommand]) -> list[Any]:
        """The replies; see RedisLink."""
        return await send_until_done(self._target, lambda: self.server, commands)

    async def find(self, key: str) -> HostPort:
        """The first address of the URL: there is one server at a time."""
        return self._target.hosts[0]

    async def listen(self, key: str) -> RedisConnection:
        """A connection of its own; see RedisLink."""
        return await self.server.connect()

    async def close(self) -> None:
        """Ends the connections."""
        await self.server.close()
        if self._sentinel is not None:
            for client in self._sentinel.sentinels:
                await client.aclose()


async def load_scripts(server: Server) -> None:
    """Loads every script into a server, so that it can be called by its SHA."""
    await server.send([("SCRIPT", "LOAD", script.text) for script in SCRIPTS.values()])


async def send_until_done(
    target: RedisTarget, find: Callable[[], Server], commands: Sequence[RedisCommand]
) -> list[Any]:
    """Sends commands, and repeats those that the server could not do yet, until the timeout.

    Raises UnavailableError.
    """
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + target.timeout_s
    pause_s = _PAUSE_S_MIN
    server = find()
    replies = await server.send(commands)
    while again := [place for place, reply in enumerate(replies) if is_temporary(reply)]:
        if any(isinstance(replies[place], faults.NoScriptError) for place in again):
            await load_scripts(server)
        else:
            if loop.time() + pause_s >= give_up_s:
                break
            if any(isinstance(replies[place], faults.ReadOnlyError) for place in again):
                await server.drop_connection()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)
            server = find()
        for place, reply in zip(
            again, await server.send([commands[place] for place in again]), strict=True
        ):
            replies[place] = reply
    return replies


def checked_reply(target: RedisTarget, reply: Any) -> Any:
    """The reply itself. Raises the PenstockError for a reply that is an error of Redis."""
    if not isinstance(reply, faults.RedisError):
        return reply
    text = f"{target.shown}: {_reason(reply)}"
    if isinstance(reply, faults.OutOfMemoryError) or str(reply).startswith("OOM"):
        raise StoreFull(f"{text} (its maxmemory is reached: pulls and deletes go on working)")
    if isinstance(reply, _REFUSED_ERRORS):
        raise RequestError(text)
    if is_temporary(reply) or str(reply).startswith(("MISCONF", "NOREPLICAS")):
        raise Overloaded(text)
    raise BackendLost(text)


def is_temporary(reply: Any) -> bool:
    """Whether the server did nothing, and the same command may succeed soon."""
    return isinstance(reply, faults.RedisError) and (
        isinstance(reply, (*_TEMPORARY_ERRORS, faults.NoScriptError))
        or str(reply).startswith(_TEMPORARY)
    )


def make_connection(target: RedisTarget, host: str, port: int) -> RedisConnection:
    """A connection that is not connected yet."""
    kind: Any = SSLConnection if target.tls else Connection
    return kind(
        host=host,
        port=port,
        db=target.database,
        client_name="penstock",
        socket_keepalive=True,
        # The callers limit how long an answer may take.
        socket_connect_timeout=target.timeout_s,
        socket_timeout=None,
        retry=Retry(NoBackoff(), 0),
        **target.credentials,
        **target.tls,
    )


def _sentinel(target: RedisTarget) -> Any:
    options: dict[str, Any] = {"socket_timeout": min(2.0, target.timeout_s)}
    if target.tls:
        options |= {"ssl": True, **target.tls}
    make: Any = Sentinel
    return make(list(target.hosts), sentinel_kwargs=options)


async def _reply(connection: RedisConnection) -> Any:
    try:
        return await connection.read_response(disconnect_on_error=False)
    except faults.ConnectionError as error:
        # Some of these are answers: a server that is loading, for example.
        if isinstance(error, _TEMPORARY_ERRORS):
            return error
        raise
    except faults.ResponseError as error:
        return error


async def _disconnect(connection: RedisConnection) -> None:
    with suppress(faults.RedisError, OSError, TimeoutError):
        await connection.disconnect(nowait=True)


def _fail(requests: Any, error: PenstockError) -> None:
    for request in requests:
        if not request.replies.done():
            request.replies.set_exception(error)


def _tls_refusal(error: BaseException | None) -> str | None:
    """Why a connection over TLS cannot be made, if trying again would not help; else None."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return (
                f"the server's certificate is not trusted: {error.verify_message}; "
                "give the certificate of its authority with ca_file=PATH"
            )
        if isinstance(error, ssl.SSLError) and "CERTIFICATE_REQUIRED" in str(error):
            return "the server asks for a certificate: give cert_file=PATH and key_file=PATH"
        if isinstance(error, ssl.SSLError) and "UNKNOWN_CA" in str(error):
            return "the server does not trust the certificate in cert_file"
        error = error.__cause__ or error.__context__
    return None


def _system_reason(error: BaseException) -> str:
    """The operating system's text for an error, without what redis-py adds to it."""
    found = re.search(r"\[Errno ([0-9]+)\]|^Error ([0-9]+) connecting", str(error))
    if found is None:
        return _reason(error)
    return os.strerror(int(found[1] or found[2]))


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
