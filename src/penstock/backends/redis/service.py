"""Queues in Redis as a queue service.

    redis://HOST:PORT/DATABASE?prefix=penstock    one server; rediss:// for TLS
    redis+cluster://HOST:PORT,HOST:PORT           a Redis Cluster
    redis+sentinel://HOST:PORT,HOST:PORT/MASTER   the master that Sentinels name

A command is one call of a Lua script, which Redis runs to its end before anything else. Unless the
caller passes a clock, every process uses the time of Redis.
"""

from collections.abc import Awaitable, Callable, Mapping
from importlib.util import find_spec
from typing import Any, ClassVar, Final, TypeVar, cast

from penstock.backends.portal import Portal
from penstock.backends.redis.address import RedisTarget, read_target
from penstock.backends.redis.cluster import ClusterLink
from penstock.backends.redis.history import RedisHistory
from penstock.backends.redis.lacks import LACKS
from penstock.backends.redis.layout import decode_message
from penstock.backends.redis.link import RedisLink, SingleLink
from penstock.backends.redis.messages import RedisMessages
from penstock.backends.redis.moves import RedisMoves
from penstock.backends.redis.pulls import RedisPulls
from penstock.backends.redis.queues import RedisQueues
from penstock.backends.redis.sweeper import Sweeper
from penstock.backends.redis.waiting import RedisWaits
from penstock.clock import Clock
from penstock.errors import BackendLost, InvalidField
from penstock.service import (
    PEEK_LIMIT_MAX,
    REDRIVE_MAX,
    Batch,
    Command,
    ConfigureQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    DescribeQueue,
    DescribeQueues,
    Extend,
    History,
    ListQueues,
    Message,
    Peek,
    Pull,
    Purge,
    Push,
    PushMany,
    QueueInfo,
    QueueService,
    QueueStats,
    Redrive,
    Release,
    Stats,
    check_number,
    refuse_command,
)
from penstock.url import BackendUrl

R = TypeVar("R")
_STATES: Final = ("visible", "delayed", "in_flight")
# How often `stats` is repeated while more messages are due than one call settles.
_TICKS_MAX: Final = 20
_ATTEMPTS_MAX: Final = 20


def open_service(url: BackendUrl, clock: Clock | None = None) -> QueueService:
    """The blocking service at a URL of Redis. Raises RequestError or BackendLost."""
    target = read_target(url)
    is_plain = url.scheme == "redis" and not target.tls and not target.replicas
    if not is_plain or find_spec("hiredis") is None:
        return Portal(lambda: open_async_service(url, clock))
    from penstock.backends.redis.blocking import BlockingRedis

    return BlockingRedis(lambda: open_async_service(url, clock), target, clock)


async def open_async_service(url: BackendUrl, clock: Clock | None = None) -> "AsyncRedis":
    """The service at a URL of Redis, for the running event loop.

    Raises RequestError, BackendLost if there is no answer.
    """
    target = read_target(url)
    link: RedisLink = ClusterLink(target) if url.scheme == "redis+cluster" else SingleLink(target)
    service = AsyncRedis(link, target, clock)
    try:
        await service.check()
    except BaseException:
        await service.close()
        raise
    return service


class AsyncRedis:
    """An `AsyncQueueService` of queues in Redis. It belongs to one event loop."""

    LACKS: ClassVar[Mapping[str, str]] = LACKS
    redrive_max: int = REDRIVE_MAX

    def __init__(self, link: RedisLink, target: RedisTarget, clock: Clock | None = None) -> None:
        self._link = link
        self._queues = queues = RedisQueues(link, target, clock)
        self._moves = RedisMoves(queues)
        self._waits = RedisWaits(link, queues, self._moves, clock)
        self._messages = messages = RedisMessages(queues, self._moves)
        self._pulls = RedisPulls(queues, messages, self._moves, self._waits)
        self._history = RedisHistory(link, queues)
        self._sweeper = Sweeper(link, queues, self._moves, clock)
        if target.history_max:
            # In the protocol it is a class attribute; here it depends on the URL.
            vars(self)["LACKS"] = {key: reason for key, reason in LACKS.items() if key != "history"}
        self._unsubscribe = None if clock is None else clock.subscribe(self._waits.clock_moved)
        self._handlers: dict[type, Callable[[Any], Awaitable[Any]]] = {
            Push: messages.push,
            Pull: self._pulls.pull,
            Delete: messages.delete,
            Extend: messages.extend,
            Release: messages.release,
            Peek: self._peek,
            Stats: self._stats,
            Purge: self._purge,
            Redrive: self._moves.redrive,
            CreateQueue: queues.create,
            ConfigureQueue: queues.configure,
            DeleteQueue: self._remove,
            DescribeQueue: self._describe,
            ListQueues: self._list,
            History: self._history.read,
            Batch: messages.batch,
            PushMany: messages.push_many,
            DescribeQueues: queues.describe_all,
        }

    async def check(self) -> None:
        """Checks that the server answers and can keep queues; raises what opening does."""
        await self._queues.check_server()
        await self._queues.describe_all(DescribeQueues(limit=1))

    async def execute(self, command: Command[R]) -> R:
        """Executes the command. Raises a PenstockError."""
        handler = self._handlers.get(type(command))
        if handler is None:
            refuse_command(command, self.LACKS, "the Redis adapter")
        if self._sweeper.is_due:
            await self._sweeper.catch_up()
        return cast(R, await handler(command))

    async def close(self) -> None:
        """Ends every connection; pulls that wait fail with EngineClosed."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        await self._sweeper.close()
        await self._waits.close()
        await self._link.close()

    async def _peek(self, command: Peek) -> list[Message]:
        queue = await self._queues.find(command.queue)
        limit = check_number("limit", command.limit, 1, PEEK_LIMIT_MAX)
        if command.state not in _STATES:
            raise InvalidField(f"state: {command.state!r} is none of {', '.join(_STATES)}")
        bytes_max = -1
        if command.bytes_max is not None:
            bytes_max = check_number("bytes_max", command.bytes_max, 1, 2**63 - 1)
        reply = await self._queues.run_on(queue, "peek", limit, command.state, bytes_max)
        queue = await self._queues.same_as(queue, reply)
        await self._moves.carry_owed(queue, reply)
        return [
            decode_message(queue, number, stored, state)
            for number, stored, state in zip(reply[3::3], reply[4::3], reply[5::3], strict=True)
        ]

    async def _stats(self, command: Stats) -> QueueStats:
        queue = await self._queues.find(command.queue)
        reply = await self._queues.run_on(queue, "stats")
        for _ in range(_TICKS_MAX):
            if not (await self._moves.carry_owed(queue, reply) or reply[3]):
                break
            reply = await self._queues.run_on(queue, "stats")
        if reply[0] != queue.identity:
            queue = await self._queues.find(queue.name)
        now_ms = int(reply[1])
        visible, delayed, in_flight, stored_bytes, oldest_ms, waiting = reply[4:]
        age_ms = None if oldest_ms == b"0" else now_ms - int(oldest_ms)
        return QueueStats(
            queue.name,
            visible,
            delayed,
            in_flight,
            int(stored_bytes),
            age_ms,
            waiting,
            paused=queue.info.settings.paused,
        )

    async def _purge(self, command: Purge) -> int:
        return await self._remove_from(command.queue, "messages")

    async def _remove(self, command: DeleteQueue) -> None:
        queue = await self._queues.read(command.queue)
        if not command.force:
            await self._queues.check_unused(queue)
        await self._remove_from(command.queue, "queue")
        await self._queues.drop_name(queue.name)

    async def _remove_from(self, name: str, what: str) -> int:
        """Removes messages, or the queue; messages in its outbox are carried first."""
        queue = await self._queues.find(name)
        for _ in range(_ATTEMPTS_MAX):
            reply = await self._queues.run_on(queue, "remove", what)
            if reply[3] >= 0:
                return int(reply[3])
            await self._moves.carry(queue)
        raise BackendLost(f"queue: {name!r} keeps sending messages to other queues; try again")

    async def _describe(self, command: DescribeQueue) -> QueueInfo:
        return (await self._queues.read(command.queue)).info

    async def _list(self, command: ListQueues) -> list[str]:
        return [info.queue for info in await self._queues.describe_all(command)]
