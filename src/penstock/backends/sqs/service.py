"""Queues of Amazon SQS, or of any endpoint that speaks its API, as a queue service.

    sqs://REGION                                     Amazon's own; credentials as for the AWS tools
    sqs://REGION?endpoint=http://127.0.0.1:9324      another endpoint
    sqs://REGION?profile=NAME&account=DIGITS         another user, another account's queues

A queue's URL is looked up once and dropped when the queue is gone. Its attributes are cached for a
minute, which is how long Amazon takes to make a change of them visible.

A push is done at least once: the SDK repeats a request that got no answer, and only a FIFO queue
recognises the repetition.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Final, TypeVar, cast

import msgspec

from penstock.backends.portal import Portal
from penstock.backends.sqs.client import SqsClient, read_endpoint
from penstock.backends.sqs.lacks import LACKS
from penstock.backends.sqs.messages import SqsMessages
from penstock.backends.sqs.moves import SqsMoves
from penstock.backends.sqs.pulls import SqsPulls
from penstock.backends.sqs.queues import KnownQueue, QueueCache
from penstock.backends.sqs.settings import FIFO, attributes_of, check_settings, read_name
from penstock.clock import Clock, SystemClock
from penstock.errors import (
    InvalidField,
    QueueExists,
    QueueNotFound,
    RequestError,
    UnsupportedOperation,
)
from penstock.service import (
    PEEK_LIMIT_MAX,
    QUEUES_LIMIT_MAX,
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
    QueueSettings,
    QueueStats,
    Redrive,
    Release,
    Stats,
    changed_settings,
    check_number,
    check_unused,
    refuse_command,
)
from penstock.url import BackendUrl

R = TypeVar("R")
# Raised while an answer is read that does not have the form of SQS's.
_MALFORMED: Final = (LookupError, ValueError, TypeError, AttributeError)
_STATES: Final = ("visible", "delayed", "in_flight")
_DEPTHS: Final = (
    "ApproximateNumberOfMessages",
    "ApproximateNumberOfMessagesDelayed",
    "ApproximateNumberOfMessagesNotVisible",
)


def open_service(url: BackendUrl, clock: Clock | None = None) -> QueueService:
    """The blocking service at an `sqs:` URL. Raises RequestError."""
    read_endpoint(url)
    return Portal(lambda: open_async_service(url, clock))


async def open_async_service(url: BackendUrl, clock: Clock | None = None) -> "AsyncSqs":
    """The service at an `sqs:` URL, for the running event loop. Raises RequestError."""
    client = SqsClient(read_endpoint(url))
    await client.open()
    return AsyncSqs(client, clock)


class AsyncSqs:
    """An `AsyncQueueService` of SQS queues. It belongs to one event loop."""

    LACKS: ClassVar[Mapping[str, str]] = LACKS
    # A move task moves every message.
    redrive_max: int = 2**31

    def __init__(self, client: SqsClient, clock: Clock | None = None) -> None:
        clock = clock or SystemClock()
        self._client = client
        self._queues = QueueCache(client)
        self._pulls = SqsPulls(self._queues, clock)
        self._moves = SqsMoves(self._queues)
        self._messages = messages = SqsMessages(self._queues, clock)
        self._handlers: dict[type, Callable[[Any], Awaitable[Any]]] = {
            Push: messages.push,
            Pull: self._pulls.pull,
            Delete: messages.delete,
            Extend: messages.extend,
            Release: messages.release,
            Peek: self._peek,
            Stats: self._stats,
            Purge: self._purge,
            Redrive: self._redrive,
            CreateQueue: self._create,
            ConfigureQueue: self._configure,
            DeleteQueue: self._remove,
            DescribeQueue: self._describe,
            ListQueues: self._list,
            History: self._history,
            Batch: messages.batch,
            PushMany: self._push_many,
            DescribeQueues: self._describe_all,
        }

    async def execute(self, command: Command[R]) -> R:
        """Executes the command. Raises a PenstockError."""
        handler = self._handlers.get(type(command))
        if handler is None:
            refuse_command(command, self.LACKS, "the SQS adapter")
        try:
            return cast(R, await handler(command))
        except _MALFORMED as error:
            # Commands are checked before they are sent, so the answer is malformed.
            why = f"{type(error).__name__}: {error}"
            raise self._client.malformed_answer(why) from error

    async def close(self) -> None:
        """Ends every connection; pulls that wait fail with EngineClosed."""
        self._client.closed = True
        await self._pulls.close()
        await self._client.close()

    # Queries.

    async def _peek(self, command: Peek) -> list[Message]:
        await self._queues.find(command.queue)
        check_number("limit", command.limit, 1, PEEK_LIMIT_MAX)
        if command.state not in _STATES:
            raise InvalidField(f"state: {command.state!r} is none of {', '.join(_STATES)}")
        raise UnsupportedOperation(f"peek: {LACKS['peek']}")

    async def _history(self, command: History) -> list[Any]:
        raise UnsupportedOperation(f"history: {LACKS['history']}")

    async def _stats(self, command: Stats) -> QueueStats:
        queue = await self._queues.find(command.queue)
        shown = await self._queues.attributes(queue, *_DEPTHS)
        visible, delayed, in_flight = (int(shown.get(name, 0)) for name in _DEPTHS)
        return QueueStats(queue.name, visible, delayed, in_flight, None, None, 0)

    # Queues.

    async def _create(self, command: CreateQueue) -> QueueInfo:
        bare, account = read_name(command.queue)
        if account is not None:
            raise InvalidField(
                f"queue: {command.queue!r} belongs to another account; create it there"
            )
        given = command.settings
        if type(given) is dict and bare.endswith(FIFO):
            given = {"fifo": True, **given}
        settings = changed_settings(QueueSettings(), given)
        check_settings(bare, settings, given, LACKS)
        notes: dict[str, Any] = {"tags": settings.annotations} if settings.annotations else {}
        made: list[str] = []
        async with self._dead_letter(settings, made) as arn:
            attributes = attributes_of(given, settings.fifo, arn)
            if settings.fifo:
                attributes["FifoQueue"] = "true"
            answer = await self._client.call(
                "create_queue", bare, QueueName=bare, Attributes=attributes, **notes
            )
        info = await self._queues.described(self._queues.learn(bare, answer["QueueUrl"]))
        if "annotations" in given and info.settings.annotations != settings.annotations:
            raise QueueExists(
                f"queue: {bare!r} exists with other settings (annotations); configure it instead"
            )
        return msgspec.structs.replace(info, also_created=made)

    @asynccontextmanager
    async def _dead_letter(
        self, settings: QueueSettings, made: list[str]
    ) -> AsyncIterator[str | None]:
        """The ARN of the dead-letter queue, which is made if it is missing, and added to `made`.

        It is deleted again if the command that needed it is refused.
        """
        name = settings.dead_letter
        if name is None:
            yield None
            return
        was_there = True
        try:
            queue = await self._queues.find(name)
        except QueueNotFound:
            was_there = False
            await self._create(CreateQueue(name, {}))
            made.append(name)
            queue = await self._queues.find(name)
        try:
            yield await self._queues.arn(queue)
        except RequestError:
            if not was_there:
                await self._remove(DeleteQueue(name))
            raise

    async def _configure(self, command: ConfigureQueue) -> QueueInfo:
        queue = await self._queues.find(command.queue)
        before = (await self._queues.described(queue)).settings
        settings = changed_settings(before, command.settings)
        if settings.fifo != before.fifo:
            raise InvalidField(
                f"fifo: {queue.name!r} cannot be changed to or from fifo; make a new queue"
            )
        given = dict(command.settings)
        check_settings(queue.name.partition("@")[0], settings, given, LACKS)
        if "dead_letter" in given or "max_receives" in given:
            given |= {"dead_letter": settings.dead_letter, "max_receives": settings.max_receives}
        queue.drop_info()
        made: list[str] = []
        async with self._dead_letter(
            settings if "dead_letter" in given else QueueSettings(), made
        ) as arn:
            attributes = attributes_of(given, settings.fifo, arn)
            if attributes:
                await self._queues.call("set_queue_attributes", queue, Attributes=attributes)
        if settings.annotations != before.annotations:
            await self._annotate(queue, before.annotations, settings.annotations)
        return msgspec.structs.replace(await self._queues.described(queue), also_created=made)

    async def _annotate(
        self, queue: KnownQueue, before: Mapping[str, str], after: Mapping[str, str]
    ) -> None:
        gone = [name for name in before if name not in after]
        if gone:
            await self._queues.call("untag_queue", queue, TagKeys=gone)
        if after:
            await self._queues.call("tag_queue", queue, Tags=dict(after))

    async def _remove(self, command: DeleteQueue) -> None:
        queue = await self._queues.find(command.queue)
        if not command.force:
            check_unused(queue.name, await self._queues.sources(queue))
        await self._queues.call("delete_queue", queue)
        self._queues.forget(queue.name)

    async def _describe(self, command: DescribeQueue) -> QueueInfo:
        return await self._queues.described(await self._queues.find(command.queue))

    async def _list(self, command: ListQueues) -> list[str]:
        check_number("limit", command.limit, 1, QUEUES_LIMIT_MAX)
        if type(command.prefix) is not str or type(command.after) is not str:
            raise InvalidField("prefix, after: expected text")
        names = await self._queues.names(command.prefix)
        return [name for name in names if name > command.after][: command.limit]

    async def _describe_all(self, command: DescribeQueues) -> list[QueueInfo]:
        names = await self._list(ListQueues(command.prefix, command.after, command.limit))
        return [await self._describe(DescribeQueue(name)) for name in names]

    async def _push_many(self, command: PushMany) -> list[Any]:
        return await self._messages.batch(Batch(list(command.pushes())))

    async def _purge(self, command: Purge) -> int:
        stats = await self._stats(Stats(command.queue))
        await self._queues.call("purge_queue", await self._queues.find(command.queue))
        return stats.messages

    async def _redrive(self, command: Redrive) -> int:
        check_number("limit", command.limit, 1, 2**63 - 1)
        queue = await self._queues.find(command.queue)
        to = None if command.to is None else await self._queues.find(command.to)
        if to is not None and to.name == queue.name:
            raise InvalidField(f"to: {queue.name!r} is the queue the messages are in")
        if to is not None and to.fifo != queue.fifo:
            raise InvalidField(f"to: {to.name!r} and {queue.name!r} must both be fifo, or neither")
        visible = (await self._stats(Stats(queue.name))).visible
        if not visible:
            return 0
        if command.limit >= visible:
            return await self._moves.move_all(queue, to)
        return await self._moves.move_some(queue, to, command.limit)
