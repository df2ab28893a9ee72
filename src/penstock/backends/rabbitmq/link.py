"""The connections to a broker: opened when needed, closed when the broker does not answer.

With several nodes in the URL, a link that cannot connect to one tries the next.

There are two `Link`s, as RabbitMQ recommends: one for pushes, one for everything else. A broker
that is short of memory or disk stops reading from connections that push; the other still works.

An `AmqpSession` is one connection from its opening to its loss. A claim belongs to a channel of one
session. A link that has lost its session opens the next one at the next command: nothing is
retried in the background. Every exception of the AMQP client becomes a PenstockError here.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar

import aiormq
from aiormq import exceptions as faults
from aiormq.connection import TransportFactory
from pamqp.commands import Basic

from penstock.backends.rabbitmq.target import RabbitTarget
from penstock.errors import BackendLost, EngineClosed, Overloaded, PenstockError, RequestError
from penstock.url import why_not_connected

T = TypeVar("T")
# The client library logs errors that it also raises; without a handler they would go to stderr.
logging.getLogger("aiormq").addHandler(logging.NullHandler())
CLOSE_S: Final = 3.0
CONNECT_S: Final = 10.0
# A push of more than this waits until the socket has taken it.
_DRAIN_BYTES: Final = 65_536
_CHANNEL_NUMBER_MAX: Final = 65_535
NOT_FOUND: Final = 404
_CODES: Final[dict[type, int]] = {
    faults.ChannelAccessRefused: 403,
    faults.ChannelNotFoundEntity: NOT_FOUND,
    faults.ChannelLockedResource: 405,
    faults.ChannelPreconditionFailed: 406,
}


class RefusedByBroker(RequestError):
    """The broker closed a channel because of a request; `code` is AMQP's, 404 for not found."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class Unroutable(RequestError):
    """A published message reached no queue, and the broker returned it."""


class _AbortableTransport(TransportFactory):
    """Opens the socket, and keeps it so that it can be aborted."""

    def __init__(self, target: RabbitTarget) -> None:
        self._target = target
        self.writer: asyncio.StreamWriter | None = None

    async def create(self, url: Any, **_: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        target = self._target
        reader, self.writer = await asyncio.open_connection(
            target.host, target.port, ssl=target.tls()
        )
        return reader, self.writer

    def abort(self) -> None:
        """Closes the socket without sending what is left."""
        if self.writer is not None:
            self.writer.transport.abort()


class AmqpSession:
    """One connection, from its opening to its loss."""

    def __init__(
        self,
        target: RabbitTarget,
        connection: Any,
        transport: _AbortableTransport,
        on_lost: Callable[[PenstockError], None],
    ) -> None:
        self.loss: PenstockError | None = None
        self.publisher: Any = None
        self._target = target
        self._connection = connection
        self._transport = transport
        self._on_lost = on_lost
        self._control: Any = None
        self._control_lock = asyncio.Lock()
        self._last_number = 0

    async def channel(self, *, confirms: bool = False) -> Any:
        """Opens a channel. Raises PenstockError."""
        number = self._free_number()
        return await self.call(self._connection.channel(number, publisher_confirms=confirms))

    def _free_number(self) -> int:
        """The number of a new channel: each in turn, so that none is used again soon.

        The client library may open a channel with the number of one that the broker has closed
        before it has confirmed that to the broker, which then closes the connection.
        """
        most = self._connection.connection_tune.channel_max or _CHANNEL_NUMBER_MAX
        used = self._connection.channels
        for _ in range(most):
            self._last_number = self._last_number % most + 1
            if self._last_number not in used:
                break
        return self._last_number

    async def control(self, request: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        """Sends a request about queues or exchanges on a channel that holds no claims.

        Raises RefusedByBroker; the next request has a new channel then.
        """
        async with self._control_lock:
            if self._control is None or self._control.is_closed:
                self._control = await self.channel()
            return await self.call(request(self._control))

    async def call(self, request: Coroutine[Any, Any, T]) -> T:
        """Sends a request and waits for its answer. Raises BackendLost or RefusedByBroker.

        If the caller is cancelled, the request continues: the client library would otherwise close
        the channel, and all claims on it would end.
        """
        if self.loss is not None:
            request.close()
            raise self.loss
        task = asyncio.ensure_future(request)
        task.add_done_callback(_retrieve)
        done, _ = await asyncio.wait({task}, timeout=self._target.timeout_s)
        if not done:
            raise self.drop(f"no answer within {self._target.timeout_s:g} s")
        if task.cancelled():
            raise self._lost("the connection was closed")
        error = task.exception()
        if error is not None:
            raise self._as_penstock_error(error) from None
        return task.result()

    async def publish(
        self, exchange: str, key: str, body: bytes, properties: Basic.Properties
    ) -> None:
        """Publishes a message and waits for the broker's confirm.

        Raises Unroutable, Overloaded if the broker refused it, or BackendLost.
        """
        if self.loss is not None:
            raise self.loss
        try:
            async with asyncio.timeout(self._target.timeout_s):
                await self.publisher.basic_publish(
                    body,
                    exchange=exchange,
                    routing_key=key,
                    properties=properties,
                    mandatory=True,
                    wait=len(body) > _DRAIN_BYTES,
                )
        except TimeoutError:
            raise self.drop(
                f"a push was not confirmed within {self._target.timeout_s:g} s; "
                "the broker may be out of memory or disk"
            ) from None
        except faults.PublishError:
            raise Unroutable(f"queue: RabbitMQ has no queue for {key!r}") from None
        except faults.DeliveryError:
            raise Overloaded(
                f"{self._target.shown}: RabbitMQ refused the message, because the queue is full or "
                "has failed; it was not stored"
            ) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The client library cancels the requests of a connection that it closes.
            raise self._lost("the connection was closed") from None
        except Exception as error:
            raise self._as_penstock_error(error) from None

    def _as_penstock_error(self, error: BaseException) -> PenstockError:
        if isinstance(error, PenstockError):
            return error
        if isinstance(error, faults.AMQPChannelError):
            text = " ".join(str(part) for part in error.args if part)
            return RefusedByBroker(f"RabbitMQ refuses this: {text}", _CODES.get(type(error), 0))
        # All other errors of the client library mean that the connection is closed or closing.
        return self._lost(" ".join(str(error).split()) or "the connection was closed")

    def _lost(self, why: str) -> PenstockError:
        return self.loss or BackendLost(f"{self._target.shown}: {why}")

    def drop(self, why: str) -> PenstockError:
        """Closes the connection at once; returns the error for the callers that use it."""
        error = self.lose(BackendLost(f"{self._target.shown}: {why}"))
        self._transport.abort()
        return error

    def lose(self, error: PenstockError) -> PenstockError:
        """Notes why the connection was lost, and calls `on_lost`; later calls change nothing."""
        if self.loss is None:
            self.loss = error
            self._on_lost(error)
        return self.loss

    async def close(self) -> None:
        """Closes the connection after sending what was written."""
        with suppress(Exception):
            async with asyncio.timeout(CLOSE_S):
                await self._connection.close()
        self._transport.abort()


class Link:
    """Opens one session after another to the same broker.

    `on_open` is awaited with each new session before it is used; `on_lost` is called with the error
    when it is lost.
    """

    def __init__(self, target: RabbitTarget, name: str) -> None:
        self.target = target
        self.closed = False
        self.on_open: Callable[[AmqpSession], Awaitable[None]] | None = None
        self.on_lost: Callable[[PenstockError], None] = _ignore
        self._name = name
        self._session: AmqpSession | None = None
        self._opening: asyncio.Task[AmqpSession] | None = None
        self._opened = False
        self._nodes = target.nodes

    @property
    def session(self) -> AmqpSession | None:
        """The session, while it is open."""
        session = self._session
        return None if session is None or session.loss is not None else session

    async def ready(self) -> AmqpSession:
        """The open session, or a new one. Raises RequestError, BackendLost or EngineClosed."""
        session = self._session
        if session is not None and session.loss is None:
            return session
        if self.closed:
            raise EngineClosed("this service was closed")
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
            self._opening.add_done_callback(self._opening_ended)
        return await asyncio.shield(self._opening)

    def _opening_ended(self, task: "asyncio.Task[AmqpSession]") -> None:
        self._opening = None
        _retrieve(task)

    async def _open(self) -> AmqpSession:
        """Opens a session at the first node that can be reached, beginning with the last used."""
        for place in range(len(self._nodes)):
            node = self._nodes[0]
            try:
                return await self._open_at(node)
            except BackendLost:
                self._nodes.append(self._nodes.pop(0))
                if place == len(self._nodes) - 1:
                    raise
        raise AssertionError("a target has one node at least")

    async def _open_at(self, node: RabbitTarget) -> AmqpSession:
        transport = _AbortableTransport(node)
        connection = aiormq.Connection(
            node.url(f"penstock-{self._name}"), transport_factory=transport
        )
        try:
            async with asyncio.timeout(min(CONNECT_S, node.timeout_s)):
                await connection.connect()
        except BaseException as error:
            transport.abort()
            if isinstance(error, Exception):
                raise self._refused(node, error) from None
            raise
        self._opened = True
        session = AmqpSession(node, connection, transport, lambda e: self.on_lost(e))
        connection.closing.add_done_callback(lambda closing: self._closed(session, closing))
        try:
            session.publisher = await session.channel(confirms=True)
            if self.on_open is not None:
                await self.on_open(session)
            if self.closed:
                raise EngineClosed("this service was closed")
        except BaseException as error:
            session.lose(BackendLost(f"{node.shown}: {error}"))
            await session.close()
            raise
        self._session = session
        return session

    def _refused(self, target: RabbitTarget, error: Exception) -> PenstockError:
        """The error for a connection that could not be opened."""
        if isinstance(error, PenstockError):
            return error
        if isinstance(error, TimeoutError):
            return BackendLost(f"{target.shown}: no connection within {CONNECT_S:g} s")
        if isinstance(error, faults.ProbableAuthenticationError | faults.AuthenticationError):
            return RequestError(
                f"credentials: RabbitMQ at {target.shown} refuses the user {target.user!r} with "
                "this password"
            )
        text = " ".join(str(error).split())
        if isinstance(error, faults.ConnectionClosed) or "OpenOk" in text:
            if self._opened:
                # There was a session before: the broker is starting, without the vhost as yet.
                return BackendLost(f"{target.shown}: the vhost {target.vhost!r} is not available")
            return RequestError(
                f"url: RabbitMQ at {target.shown} has no vhost {target.vhost!r}, or the user "
                f"{target.user!r} may not use it"
            )
        if isinstance(error, faults.AMQPError) and not isinstance(error, OSError):
            return BackendLost(f"{target.shown}: the server there does not speak AMQP 0-9-1")
        if isinstance(error, OSError):
            text = why_not_connected(error)
        return BackendLost(f"{target.shown}: cannot connect: {text}")

    def _closed(self, session: AmqpSession, closing: "asyncio.Future[Any]") -> None:
        if self.closed:
            session.lose(EngineClosed("this service was closed"))
            return
        why = None if closing.cancelled() else closing.exception()
        text = " ".join(str(part) for part in getattr(why, "args", ()) if part)
        session.lose(
            BackendLost(f"{self.target.shown}: the connection was closed{text and ': '}{text}")
        )

    async def close(self) -> None:
        """Closes the session; no other is opened."""
        self.closed = True
        if self._opening is not None:
            await asyncio.wait({self._opening}, timeout=CLOSE_S)
        if self._session is not None:
            await self._session.close()


def _ignore(_: PenstockError) -> None:
    pass


def _retrieve(task: "asyncio.Future[Any]") -> None:
    if not task.cancelled():
        task.exception()
