"""The blocking service of Redis: single commands use a socket directly, others use a portal.

Through a portal a push costs two switches between threads and some turns of an event loop, which is
more than the push itself (decision 020). So a caller that finds the direct connection free sends
its command and reads the reply in its own thread. It runs the same coroutines as the asyncio
service, over a link whose `send` blocks, so that they end without suspending. A caller that finds
the connection in use takes the portal, where commands at the same time share a pipeline.
"""

import select
import socket
import struct
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, ClassVar, Final, TypeVar, cast

import hiredis
from redis import exceptions as faults
from redis._parsers import BaseParser
from redis.backoff import NoBackoff
from redis.connection import Connection
from redis.retry import Retry

from penstock.backends.portal import Portal
from penstock.backends.redis.address import HostPort, RedisTarget
from penstock.backends.redis.layout import RedisQueue
from penstock.backends.redis.link import RedisCommand, is_temporary, pack
from penstock.backends.redis.messages import RedisMessages, plain_item
from penstock.backends.redis.moves import RedisMoves
from penstock.backends.redis.queues import RedisQueues
from penstock.clock import Clock
from penstock.errors import BackendLost
from penstock.service import Command, Delete, Extend, Push, PushMany, PushReply, Release

R = TypeVar("R")
_RECEIVE_BYTES: Final = 65_536
# Enough for a number, and so little that Python has a free block of this size.
_NUMBER_BYTES: Final = 64
_COLON: Final = ord(":")
_NEWLINE: Final = ord("\n")
# A connection that has answered so recently is not checked before it is used again.
FRESH_S: Final = 0.0001
_PLAIN_MAX: Final = 1_000
_ITEM: Final = b"$4\r\nitem"


class NothingSent(Exception):
    """The direct connection could not be used, and nothing was done: the portal is used instead."""


class DirectLink:
    """A `RedisLink` to one server whose coroutines do not suspend: the thread itself waits.

    redis-py connects; then replies are parsed by hiredis, on a socket whose timeouts are
    the kernel's, because Python's own cost a poll before each call.
    """

    def __init__(self, target: RedisTarget) -> None:
        self._target = target
        self._socket: socket.socket | None = None
        # The connection of redis-py, which keeps the socket open and closes it.
        self._connection: Any = None
        self._reader: Any = None
        self._answered_s = 0.0
        # Shows without waiting whether the socket is readable.
        self._poll = select.poll()
        # Whether a script has run for the current command, which then must not be repeated.
        self.has_changed = False

    async def send(self, key: str, commands: Sequence[RedisCommand]) -> list[Any]:
        """The replies; see RedisLink. Raises NothingSent or BackendLost."""
        replies = self.exchange(b"".join(map(pack, commands)), len(commands))
        # All but the reading of a queue's settings are calls of scripts.
        self.has_changed = self.has_changed or any(each[0] != "HMGET" for each in commands)
        return replies

    def exchange(self, sent: bytes, count: int) -> list[Any]:
        """The replies to so many packed commands. Raises NothingSent or BackendLost."""
        link = self._checked()
        try:
            link.sendall(sent)
            replies = self._receive(link, link.recv(_RECEIVE_BYTES), count)
        except BaseException as error:
            raise self._failed(error) from None
        return self._done(replies)

    def ask(self, sent: bytes) -> Any:
        """The reply to one packed command, as `exchange` gives it; a number needs no parser."""
        link = self._checked()
        try:
            link.sendall(sent)
            part = link.recv(_NUMBER_BYTES)
            self._answered_s = monotonic()
            if part and part[0] == _COLON and part[-1] == _NEWLINE:
                return int(part[1:])
            replies = self._receive(link, part, 1)
        except BaseException as error:
            raise self._failed(error) from None
        return self._done(replies)[0]

    def _failed(self, error: BaseException) -> BaseException:
        """What is raised for an error after something was sent; ends the connection.

        Also for an interrupt: a reply that still comes must not be read as that of the next one.
        """
        self.forget()
        if isinstance(error, OSError | hiredis.HiredisError):
            return BackendLost(f"{self._target.shown}: {self._reason(error)}")
        return error

    def _done(self, replies: list[Any]) -> list[Any]:
        """The replies. Raises NothingSent or BackendLost if the server did nothing, for now."""
        if isinstance(replies[0], Exception) and all(map(is_temporary, replies)):
            # The scripts are missing or the server cannot answer yet; the portal handles both.
            raise self._unusable("it cannot answer yet")
        return replies

    def _unusable(self, reason: str) -> Exception:
        """NothingSent, or BackendLost if the command has taken some effect already."""
        if self.has_changed:
            return BackendLost(f"{self._target.shown}: {reason}")
        return NothingSent()

    def _receive(self, link: socket.socket, part: bytes, count: int) -> list[Any]:
        """So many replies, which begin with this part."""
        reader, replies = self._reader, []
        while True:
            if not part:
                raise ConnectionResetError("the server has closed the connection")
            reader.feed(part)
            while (reply := reader.gets()) is not False:
                replies.append(reply)
                if len(replies) == count:
                    return replies
            part = link.recv(_RECEIVE_BYTES)

    def _reason(self, error: Exception) -> str:
        if isinstance(error, BlockingIOError):
            return f"no answer within {self._target.timeout_s:g} s"
        return " ".join(str(error).split()) or type(error).__name__

    def _checked(self) -> socket.socket:
        """The socket, which the server has not closed. Raises NothingSent.

        Right after an answer, as between pushes one after another, this is not checked: closing it
        at just that moment is no more likely than between the check and the command.
        """
        link = self._socket
        if link is None:
            return self._connect()
        if monotonic() - self._answered_s < FRESH_S or not self._poll.poll(0):
            return link
        # No request is open, so a readable socket means that the server has closed it.
        self.forget()
        raise self._unusable("the server has closed the connection")

    def _connect(self) -> socket.socket:
        host, port = self._target.hosts[0]
        make: Any = Connection
        connection = make(
            host=host,
            port=port,
            db=self._target.database,
            client_name="penstock",
            socket_keepalive=True,
            socket_timeout=self._target.timeout_s,
            retry=Retry(NoBackoff(), 0),
            **self._target.credentials,
        )
        try:
            connection.connect()
        except (faults.RedisError, OSError) as error:
            raise self._unusable(self._reason(error)) from None
        link: socket.socket = connection._sock
        link.settimeout(None)
        seconds = int(self._target.timeout_s)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            link.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))
        self._connection, self._socket = connection, link
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)
        self._reader = hiredis.Reader(replyError=BaseParser.parse_error)
        return link

    def forget(self) -> None:
        """Ends the connection; the next command opens another."""
        connection, self._connection, self._socket = self._connection, None, None
        if connection is not None:
            with suppress(faults.RedisError, OSError):
                connection.disconnect()

    async def find(self, key: str) -> HostPort:
        """The address of the server."""
        return self._target.hosts[0]

    async def listen(self, key: str) -> Any:
        """Not available: a pull that waits uses the portal."""
        raise NothingSent

    async def close(self) -> None:
        """Ends the connection."""
        self.forget()


class BlockingRedis:
    """A `QueueService` of queues in Redis, safe for many threads."""

    LACKS: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self, open_async: Callable[[], Any], target: RedisTarget, clock: Clock | None
    ) -> None:
        """Opens the service. Raises what opening it raises."""
        self._portal = Portal(open_async)
        vars(self)["LACKS"] = self._portal.LACKS
        self.redrive_max = self._portal.redrive_max
        self._link = DirectLink(target)
        self._queues = queues = RedisQueues(self._link, target, clock)
        self._messages = messages = RedisMessages(queues, RedisMoves(queues))
        self._has_clock = clock is not None
        # What is sent before and after a plain item, by the identity of its queue.
        self._plain: dict[bytes, tuple[bytes, bytes]] = {}
        # The direct connection while no thread uses it. Popping it is atomic, as taking a lock is,
        # and costs a tenth of that.
        self._idle = [self._link]
        self._run: dict[type, Callable[[Any], Coroutine[Any, Any, Any]]] = {
            Push: messages.push,
            PushMany: messages.push_many,
            Delete: messages.delete,
            Extend: messages.extend,
            Release: messages.release,
        }

    def execute(self, command: Command[R]) -> R:
        """Executes the command."""
        run, portal, idle = self._run.get(type(command)), self._portal, self._idle
        if run is None or portal.is_unusable:
            return portal.execute(command)
        try:
            link = idle.pop()
        except IndexError:
            return portal.execute(command)
        try:
            link.has_changed = False
            reply = self._push_plain(command) if type(command) is Push else None
            return cast(R, _finished(run(command)) if reply is None else reply)
        except NothingSent:
            pass
        finally:
            idle.append(link)
            if self._portal.is_unusable:
                self._end_link()
        return portal.execute(command)

    def _push_plain(self, command: Push) -> PushReply | None:
        """The fast path of `RedisMessages.push`; None, and nothing is sent, if it cannot be used.

        It is a plain function: between two round trips the processor's caches hold little of this
        program, so that each call and each coroutine costs several microseconds.
        """
        queue = self._queues.known(command.queue)
        if queue is None or self._has_clock:
            return None
        sent = self._packed_push(queue, command)
        if sent is None:
            return None
        answer = self._link.ask(sent)
        if type(answer) is int:
            return PushReply(queue.ids.show(answer), answer, False)
        self._link.has_changed = True
        return _finished(self._messages.pushed(queue, command, answer))

    def _packed_push(self, queue: RedisQueue, command: Push) -> bytes | None:
        """The bytes of a push; None if `push_plain.lua` cannot do it."""
        item = plain_item(queue, command)
        if item is None:
            return None
        ends = self._plain.get(queue.identity)
        if ends is None:
            if len(self._plain) >= _PLAIN_MAX:
                self._plain.clear()
            start, _, end = pack(self._queues.plain_push(queue, (_ITEM, b""))).partition(_ITEM)
            ends = self._plain[queue.identity] = (start, end)
        return b"".join((ends[0], *item, ends[1]))

    def close(self) -> None:
        """Closes the service and ends its thread."""
        try:
            self._portal.close()
        finally:
            self._end_link()

    def _end_link(self) -> None:
        """Ends the direct connection, unless a thread uses it, which does this afterwards."""
        with suppress(IndexError):
            self._idle.pop().forget()


def _finished(coroutine: Coroutine[Any, Any, R]) -> R:
    """The result of a coroutine that does not suspend."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return cast(R, stop.value)
    coroutine.close()
    raise AssertionError("a coroutine over a DirectLink does not suspend")
