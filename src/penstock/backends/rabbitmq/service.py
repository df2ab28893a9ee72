"""Queues of a RabbitMQ broker as a queue service.

    amqp://USER:PASSWORD@HOST:PORT/VHOST       `target` lists the options

A queue is an AMQP queue of the same name; `registry` has its settings. A pull gets a delivery
without acknowledging it (`line`), a claim is this process's entry about it (`claims`), a delete
acknowledges it (`messages`), a delay leads it through other queues (`delays`).
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, Final, TypeVar, cast

import msgspec

from penstock.backends.portal import Portal
from penstock.backends.rabbitmq.delays import Delays, level_names
from penstock.backends.rabbitmq.lacks import COMMON, LACKS
from penstock.backends.rabbitmq.line import AmqpDelivery, PullLine
from penstock.backends.rabbitmq.link import Link
from penstock.backends.rabbitmq.messages import RabbitMessages
from penstock.backends.rabbitmq.queues import RabbitQueues
from penstock.backends.rabbitmq.registry import RabbitQueue, Registry
from penstock.backends.rabbitmq.target import RabbitTarget, read_target
from penstock.clock import Clock, SystemClock
from penstock.core.window import Window
from penstock.errors import (
    AttemptLapsed,
    EngineClosed,
    InvalidField,
    PenstockError,
    UnsupportedOperation,
)
from penstock.service import (
    DEDUP_WINDOW_MS,
    PEEK_LIMIT_MAX,
    QUEUES_LIMIT_MAX,
    REDRIVE_MAX,
    Batch,
    Claim,
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
    check_name,
    check_number,
    check_pull,
)
from penstock.url import BackendUrl

R = TypeVar("R")
# A pull that is cancelled returns what it has got. All other commands are finished in the
# background if their callers are cancelled.
_CANCELLED_ANYWHERE: Final = frozenset({Pull, Push})
_STATES: Final = ("visible", "delayed", "in_flight")
_ATTEMPTS_MAX: Final = 100_000
# RabbitMQ allows 2,047 channels on a connection; each queue that is pulled has one.
_CHANNELS_MAX: Final = 1_500


def open_service(url: BackendUrl, clock: Clock | None = None) -> QueueService:
    """The blocking service at an `amqp:` URL. Raises RequestError or BackendLost."""
    read_target(url)
    return Portal(lambda: open_async_service(url, clock))


async def open_async_service(url: BackendUrl, clock: Clock | None = None) -> "AsyncRabbit":
    """The service at an `amqp:` URL, for the running event loop. Raises what opening it raises."""
    service = AsyncRabbit(read_target(url), clock)
    await service.open()
    return service


class AsyncRabbit:
    """An `AsyncQueueService` of RabbitMQ's queues. It belongs to one event loop."""

    LACKS: ClassVar[Mapping[str, str]] = COMMON
    redrive_max: int = REDRIVE_MAX

    def __init__(self, target: RabbitTarget, clock: Clock | None = None) -> None:
        # A class attribute of services; here it depends on the kind of queues.
        vars(self)["LACKS"] = LACKS[target.kind]
        self._clock = clock or SystemClock()
        self._puller = Link(target, "pull")
        self._pusher = Link(target, "push")
        self._registry = Registry(self._puller, self._pusher)
        self._queues = RabbitQueues(self._puller, self._registry, self._clock)
        delays = Delays(self._puller, self._registry)
        self._delays = delays
        self._messages = messages = RabbitMessages(
            self._pusher, self._registry, delays, self._clock, self._queues.find, self._line
        )
        self._lines: dict[str, PullLine] = {}
        self._attempts: Window[list[Claim]] = Window(DEDUP_WINDOW_MS, _ATTEMPTS_MAX)
        self._puller.on_open = self._registry.follow
        self._puller.on_lost = self._lost
        self._registry.on_dropped = self._dropped
        self._handlers: dict[type, Callable[[Any], Awaitable[Any]]] = {
            Push: messages.push,
            Pull: self._pull,
            Delete: messages.delete,
            Extend: messages.extend,
            Release: messages.release,
            Peek: self._peek,
            Stats: self._stats,
            Purge: self._purge,
            Redrive: self._redrive,
            CreateQueue: self._queues.create,
            ConfigureQueue: self._queues.configure,
            DeleteQueue: self._queues.remove,
            DescribeQueue: self._describe,
            ListQueues: self._list,
            History: self._history,
            Batch: messages.batch,
            PushMany: self._push_many,
            DescribeQueues: self._describe_all,
        }

    async def open(self) -> None:
        """Connects and reads the registry. Raises RequestError or BackendLost."""
        try:
            await self._puller.ready()
        except BaseException:
            await self.close()
            raise

    async def execute(self, command: Command[R]) -> R:
        """Executes a command. Raises a PenstockError."""
        handler = self._handlers.get(type(command))
        if handler is None:
            name = type(command).__name__
            raise InvalidField(f"command: {name} is not known to the RabbitMQ adapter")
        if self._puller.closed:
            raise EngineClosed("this service was closed")
        if type(command) in _CANCELLED_ANYWHERE:
            return cast(R, await handler(command))
        # Half of it could leave a message that nobody holds and the broker does not return.
        return cast(R, await self._messages.finish(handler(command)))

    async def close(self) -> None:
        """Closes the connections; waiting pulls fail with EngineClosed, and claims end."""
        self._puller.closed = self._pusher.closed = True
        for line in self._lines.values():
            line.fail(EngineClosed("this service was closed while this waited"))
        await self._messages.close()
        await self._puller.close()
        await self._pusher.close()

    def _lost(self, error: PenstockError) -> None:
        self._registry.lost(error)
        for line in self._lines.values():
            line.lost(error)

    # Lines.

    async def _line(self, queue: RabbitQueue) -> PullLine:
        line = self._lines.get(queue.name)
        if line is None or line.queue is not queue:
            if len(self._lines) >= _CHANNELS_MAX:
                await self._close_idle()
            line = self._lines[queue.name] = PullLine(
                queue,
                self._puller,
                self._messages.claims,
                self._clock,
                self._messages.move_dead_letter,
                self._messages.is_dead_letter,
                self._messages.start,
            )
        return line

    async def _close_idle(self) -> None:
        for name, line in list(self._lines.items()):
            if line.is_idle:
                del self._lines[name]
                await line.close_channel()

    def _dropped(self, queue: RabbitQueue) -> None:
        self._delays.forget(queue)
        line = self._lines.get(queue.name)
        if line is not None and line.queue.number == queue.number:
            del self._lines[queue.name]
            line.dropped()

    # Messages.

    async def _pull(self, command: Pull) -> list[Claim]:
        check_name(command.queue)
        check_pull(command)
        queue = await self._queues.find(command.queue)
        visibility_ms = command.visibility_ms
        if visibility_ms is None:
            visibility_ms = queue.settings.visibility_ms
        self._messages.check_hold("visibility", visibility_ms)
        wait_ms = queue.settings.wait_ms if command.wait_ms is None else command.wait_ms
        if command.attempt_id is not None:
            repeated = self._repeat(queue, command, visibility_ms)
            if repeated is not None:
                return repeated
        line = await self._line(queue)
        claims = await line.pull(command, visibility_ms, wait_ms)
        if not visibility_ms:
            await self._messages.finish(self._messages.return_all(line, claims))
        if claims and command.attempt_id is not None:
            key = (queue.name, command.attempt_id)
            self._attempts.remember(key, claims, self._clock.now_ms())
        return claims

    def _repeat(self, queue: RabbitQueue, command: Pull, visibility_ms: int) -> list[Claim] | None:
        """The claims of an earlier pull with the same attempt id. Raises AttemptLapsed."""
        key = (queue.name, str(command.attempt_id))
        given = self._attempts.find(key, self._clock.now_ms())
        if given is None or given[0].proof.queue != queue.number:
            return None
        claims = self._messages.claims
        live = [claims.get(claim) for claim in given]
        if not all(map(claims.is_live, live)):
            raise AttemptLapsed(
                f"attempt_id: {command.attempt_id!r} was answered before, and some of its claims "
                "have ended; pull with a new id"
            )
        if command.renew:
            for each in live:
                claims.extend(cast(Any, each), visibility_ms)
        return [
            msgspec.structs.replace(claim, deadline_ms=each.deadline_ms)
            for claim, each in zip(given, live, strict=True)
            if each is not None
        ]

    async def _push_many(self, command: PushMany) -> list[Any]:
        return await self._messages.batch(Batch(list(command.pushes())))

    async def _peek(self, command: Peek) -> list[Message]:
        await self._queues.find(command.queue)
        check_number("limit", command.limit, 1, PEEK_LIMIT_MAX)
        if command.state not in _STATES:
            raise InvalidField(f"state: {command.state!r} is none of {', '.join(_STATES)}")
        raise UnsupportedOperation(f"peek: {self.LACKS['peek']}")

    async def _history(self, command: History) -> list[Any]:
        raise UnsupportedOperation(f"history: {self.LACKS['history']}")

    # Queues.

    async def _describe(self, command: DescribeQueue) -> QueueInfo:
        return (await self._queues.find(command.queue)).info

    def _listed(self, command: ListQueues | DescribeQueues) -> list[str]:
        check_number("limit", command.limit, 1, QUEUES_LIMIT_MAX)
        if type(command.prefix) is not str or type(command.after) is not str:
            raise InvalidField("prefix, after: expected text")
        names = (name for name in self._registry.queues if name.startswith(command.prefix))
        return sorted(name for name in names if name > command.after)[: command.limit]

    async def _list(self, command: ListQueues) -> list[str]:
        await self._puller.ready()
        return self._listed(command)

    async def _describe_all(self, command: DescribeQueues) -> list[QueueInfo]:
        await self._puller.ready()
        return [self._registry.queues[name].info for name in self._listed(command)]

    async def _stats(self, command: Stats) -> QueueStats:
        queue = await self._queues.find(command.queue)
        line = await self._line(queue)
        visible = await self._queues.count(queue.name)
        delayed = len(line.held_back)
        for name in level_names(queue):
            delayed += await self._queues.count(name)
        return QueueStats(
            queue.name, visible, delayed, len(line.claims), None, None, line.waiting_count
        )

    async def _purge(self, command: Purge) -> int:
        queue = await self._queues.find(command.queue)
        line = await self._line(queue)
        # First the messages that this connection holds: they could return meanwhile.
        purged = await self._messages.purge_claims(line)
        for name in (queue.name, *level_names(queue)):
            purged += await self._queues.purge(name)
        return purged

    async def _redrive(self, command: Redrive) -> int:
        check_number("limit", command.limit, 1, 2**63 - 1)
        queue = await self._queues.find(command.queue)
        to = None if command.to is None else await self._queues.find(command.to)
        if to is not None and to.name == queue.name:
            raise InvalidField(f"to: {queue.name!r} is the queue the messages are in")
        line = await self._line(queue)
        moved = 0
        has_no_source = False
        staying: dict[int | None, AmqpDelivery] = {}
        try:
            while left := min(command.limit, REDRIVE_MAX) - moved:
                found = await line.fetch_directly(left)
                staying |= {each.delivery_tag: each for each in found}
                for delivery in found:
                    content = line.read(delivery)
                    target = to or self._registry.queues.get(content.source or "")
                    if target is None or target is queue:
                        has_no_source |= content.source is None
                    else:
                        await self._messages.move(target, line, content, delivery)
                        del staying[delivery.delivery_tag]
                        moved += 1
                if not found:
                    break
        finally:
            await line.return_all(staying.values())
        if staying:
            await line.flush()
        if not moved and has_no_source:
            raise InvalidField(
                f"to: the messages of {queue.name!r} have no source queue; name a target queue"
            )
        return moved
