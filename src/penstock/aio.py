"""Penstock for asyncio: the same methods as `penstock.connect` gives, awaited.

queues = await penstock.aio.connect("memory:")
await queues.push("orders", b"hello")
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

from penstock.backends import open_async_service
from penstock.client import (
    check_is_dead_letter_queue,
    check_results,
    claimed,
    make_create,
    make_deletes,
    make_pull,
    make_push,
    make_push_many,
    redrive_steps,
    to_list,
    to_ms,
    to_settings,
    with_public_names,
)
from penstock.clock import Clock, SystemClock
from penstock.consumer.awaited import AsyncConsumer
from penstock.consumer.options import ConsumerOptions
from penstock.errors import RequestError
from penstock.service import (
    AsyncQueueService,
    Attributes,
    Batch,
    BatchItem,
    Claim,
    ConfigureQueue,
    Delete,
    DeleteQueue,
    DescribeQueue,
    DescribeQueues,
    Extend,
    History,
    HistoryEvent,
    ListQueues,
    Message,
    Peek,
    Purge,
    QueueInfo,
    QueueStats,
    Release,
    State,
    Stats,
)


async def connect(url: str, *, clock: Clock | None = None) -> "AsyncQueues":
    """Opens the queues at a URL, as `penstock.connect` does, for the running event loop."""
    return AsyncQueues(await open_async_service(url, clock), clock)


class AsyncQueues:
    """Every queue of one backend, awaited. It belongs to one event loop."""

    def __init__(self, service: AsyncQueueService, clock: Clock | None = None) -> None:
        self.service = service
        self.clock = clock or SystemClock()
        self._execute = service.execute

    async def create(self, queue: str, **settings: Any) -> QueueInfo:
        """Makes a queue, or returns it if it exists with these settings.

        Settings: visibility_timeout, delay, wait, retention, priority_age (seconds); max_messages,
        max_bytes, max_body_bytes, max_in_flight; dead_letter with max_receives; fifo,
        dedup_by_content, dedup_per_group; annotations; paused. A name that ends in .fifo makes a
        FIFO queue. A dead-letter queue that does not exist is made, and named in the reply's
        `also_created`.
        """
        command = make_create(queue, settings)
        try:
            return await self._execute(command)
        except RequestError as error:
            raise with_public_names(error) from None

    async def configure(self, queue: str, **settings: Any) -> QueueInfo:
        """Changes some settings of a queue."""
        command = ConfigureQueue(queue, to_settings(settings))
        try:
            return await self._execute(command)
        except RequestError as error:
            raise with_public_names(error) from None

    async def pause(self, queue: str) -> QueueInfo:
        """Pauses delivery: pulls get nothing until `resume`, also after a restart.

        Pushes go on, and so do the claims that are held.
        """
        return await self.configure(queue, paused=True)

    async def resume(self, queue: str) -> QueueInfo:
        """Resumes delivery; pulls that wait are served."""
        return await self.configure(queue, paused=False)

    async def remove(self, queue: str, *, force: bool = False) -> None:
        """Deletes a queue with all its messages; pulls that wait on it fail with QueueDeleted.

        Raises QueueInUse, without `force`, if other queues send their dead letters to it.
        """
        await self._execute(DeleteQueue(queue, force))

    async def describe(self, queue: str) -> QueueInfo:
        """A queue's settings and dates."""
        return await self._execute(DescribeQueue(queue))

    async def names(self, prefix: str = "", *, after: str = "", limit: int = 1_000) -> list[str]:
        """Names of queues, in alphabetical order."""
        return await self._execute(ListQueues(prefix, after, limit))

    async def push(
        self,
        queue: str,
        body: bytes | str,
        *,
        delay: float | None = None,
        priority: int = 0,
        ttl: float | None = None,
        dedup_id: str | None = None,
        group: str | None = None,
        attributes: Attributes | None = None,
    ) -> str:
        """Adds a message and returns its id; the message is durable when this returns."""
        command = make_push(queue, body, delay, priority, ttl, dedup_id, group, attributes)
        return (await self._execute(command)).id

    async def pull(
        self,
        queue: str,
        *,
        wait: float | None = None,
        visibility: float | None = None,
        attempt_id: str | None = None,
        holder: str | None = None,
    ) -> Claim | None:
        """Claims the next message, waiting up to `wait` seconds for one."""
        command = make_pull(queue, 1, wait, visibility, attempt_id, holder)
        claims = await self._execute(command)
        return claims[0] if claims else None

    async def pull_many(
        self,
        queue: str,
        limit: int = 10,
        *,
        wait: float | None = None,
        visibility: float | None = None,
        attempt_id: str | None = None,
        holder: str | None = None,
    ) -> list[Claim]:
        """Claims up to `limit` messages, waiting up to `wait` seconds for the first.

        Through a server, a pull with an `attempt_id` gives 2,000 messages or 8 MiB at most.
        """
        return await self._execute(make_pull(queue, limit, wait, visibility, attempt_id, holder))

    async def extend(
        self, claim: Claim | str, seconds: float, *, receipt: str | None = None
    ) -> int:
        """Holds a claim for `seconds` from now; returns the new deadline in milliseconds."""
        queue, proof = claimed(claim, receipt)
        return await self._execute(Extend(queue, proof, to_ms("seconds", seconds)))

    async def release(
        self, claim: Claim | str, *, delay: float = 0, receipt: str | None = None
    ) -> None:
        """Returns a message to its place in the queue, at once or after `delay` seconds."""
        queue, proof = claimed(claim, receipt)
        await self._execute(Release(queue, proof, to_ms("delay", delay)))

    async def delete(self, claim: Claim | str, *, receipt: str | None = None) -> bool:
        """Deletes a claimed message; False if it was gone already."""
        queue, proof = claimed(claim, receipt)
        return await self._execute(Delete(queue, proof))

    async def batch(self, items: Iterable[BatchItem]) -> list[Any]:
        """Runs several commands in one append; each reply, or the error that refused that item."""
        return await self._execute(Batch(to_list("items", items)))

    async def push_many(
        self,
        queue: str,
        bodies: Iterable[bytes | str | Mapping[str, Any]],
        *,
        delay: float | None = None,
        priority: int = 0,
        ttl: float | None = None,
        dedup_id: str | None = None,
        group: str | None = None,
        attributes: Attributes | None = None,
        return_errors: bool = False,
    ) -> Sequence[Any]:
        """Pushes several messages in one append; returns the PushReply of each.

        An item is a body, or a dict of `body` and options of its own, which replace those given
        for all; a `dedup_id` can only be an item's own. Raises BatchRefused if some are refused,
        or with `return_errors` returns the error of each in the place of its reply.
        """
        command = make_push_many(queue, bodies, delay, priority, ttl, dedup_id, group, attributes)
        return check_results(await self._execute(command), return_errors)

    async def delete_many(
        self, claims: Iterable[Claim], *, return_errors: bool = False
    ) -> Sequence[Any]:
        """Deletes several claimed messages; the result of `delete` for each.

        Raises BatchRefused if some are refused, or with `return_errors` returns the error of each
        in the place of its reply.
        """
        return check_results(await self.batch(make_deletes(claims)), return_errors)

    def consume(
        self,
        queue: str,
        *,
        visibility: float | None = None,
        wait: float = 1.0,
        idle: float | None = None,
        hold_max: float = 43_200.0,
        backoff: float = 1.0,
        backoff_max: float = 300.0,
        holder: str | None = None,
    ) -> AsyncConsumer:
        """A loop over the queue's messages: each claim is extended while the loop's body runs.

        The next iteration deletes the current claim's message. Leaving the loop releases it: at
        once, or after an exception with a delay of `backoff` seconds, doubled at each further
        failure of the message up to `backoff_max`. The loop ends by `stop()`, within `wait`
        seconds, or after `idle` seconds without a message. No claim is held for longer than
        `hold_max` seconds.
        """
        return AsyncConsumer(
            self,
            ConsumerOptions(queue, visibility, wait, idle, hold_max, backoff, backoff_max, holder),
        )

    async def peek(self, queue: str, limit: int = 1, *, state: State = "visible") -> list[Message]:
        """Reads messages without claiming them."""
        return await self._execute(Peek(queue, limit, state))

    async def stats(self, queue: str) -> QueueStats:
        """The counts of a queue's messages, and the age of the oldest."""
        return await self._execute(Stats(queue))

    async def purge(self, queue: str) -> int:
        """Removes every message of a queue; returns how many."""
        return await self._execute(Purge(queue))

    async def redrive(self, queue: str, *, to: str | None = None, limit: int | None = None) -> int:
        """Moves dead letters back to their source queues, or to `to`; returns how many.

        Raises InvalidField for a queue that has no dead letters and is no dead-letter queue.
        """
        moved = 0
        step = self.service.redrive_max
        for command in redrive_steps(queue, to, limit, (await self.stats(queue)).visible, step):
            count = await self._execute(command)
            moved += count
            if count < command.limit:
                break
            # A service in this process may answer without suspending: other tasks need a turn.
            await asyncio.sleep(0)
        if not moved and to is None:
            check_is_dead_letter_queue(queue, [info async for info in self._every_info()])
        return moved

    async def _every_info(self) -> AsyncIterator[QueueInfo]:
        page = await self._execute(DescribeQueues())
        while page:
            for info in page:
                yield info
            page = await self._execute(DescribeQueues(after=page[-1].queue))

    async def history(self, message_id: str) -> list[HistoryEvent]:
        """The events of a message that the journal still has."""
        return await self._execute(History(message_id))

    async def close(self) -> None:
        """Closes the backend."""
        await self.service.close()

    async def __aenter__(self) -> "AsyncQueues":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
