"""Penstock for asyncio: the same methods as `penstock.connect` gives, awaited.

queues = await penstock.aio.connect("memory:")
await queues.push("orders", b"hello")
"""

import asyncio
from builtins import list as List  # noqa: N812 - in the classes, `list` is a method
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

from penstock.backends import open_async_service
from penstock.client import (
    check_is_dead_letter_queue,
    check_results,
    make_create,
    make_deletes,
    make_pull,
    make_push,
    make_push_many,
    redrive_steps,
)
from penstock.clock import Clock, SystemClock
from penstock.consumer.awaited import AsyncConsumer
from penstock.consumer.options import read_options
from penstock.errors import RequestError
from penstock.public import (
    AnyClaim,
    QueueDescription,
    QueueStatistics,
    Seconds,
    claimed,
    public_info,
    public_stats,
    to_ms,
    to_settings,
    with_public_names,
)
from penstock.service import (
    AsyncQueueService,
    Attributes,
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
    PushReply,
    QueueInfo,
    Release,
    State,
    Stats,
)


async def connect(url: str, *, clock: Clock | None = None) -> "AsyncQueues":
    """Opens the queues at a URL, as `penstock.connect` does, for the running event loop."""
    return AsyncQueues(await open_async_service(url, clock), clock)


class AsyncQueues:
    """Every queue of one backend, awaited. It belongs to one event loop.

    The methods and their errors are those of `Queues`.
    """

    def __init__(self, service: AsyncQueueService, clock: Clock | None = None) -> None:
        self.service = service
        self.clock = clock or SystemClock()
        self._execute = service.execute

    async def create(self, queue: str, **settings: Any) -> QueueDescription:
        """Makes a queue, or returns it if it exists with these settings; else raises QueueExists.

        Settings: visibility_timeout, delay, wait, retention, priority_age (seconds); max_messages,
        max_bytes, max_body_bytes, max_in_flight; dead_letter with max_receives; fifo,
        dedup_by_content, dedup_per_group; annotations; paused. A name that ends in .fifo makes a
        FIFO queue. A dead-letter queue that does not exist is made, and named in the reply's
        `also_created`.
        """
        command = make_create(queue, settings)
        try:
            return public_info(await self._execute(command))
        except RequestError as error:
            raise with_public_names(error) from None

    async def configure(self, queue: str, **settings: Any) -> QueueDescription:
        """Changes some settings of a queue; returns all."""
        command = ConfigureQueue(queue, to_settings(settings))
        try:
            return public_info(await self._execute(command))
        except RequestError as error:
            raise with_public_names(error) from None

    async def pause(self, queue: str) -> QueueDescription:
        """Pauses delivery: pulls get nothing until `resume`, also after a restart.

        Pushes go on, and so do the claims that are held.
        """
        return await self.configure(queue, paused=True)

    async def resume(self, queue: str) -> QueueDescription:
        """Resumes delivery; pulls that wait are served."""
        return await self.configure(queue, paused=False)

    async def remove(self, queue: str, *, force: bool = False) -> None:
        """Deletes a queue with all its messages; pulls that wait on it fail with QueueDeleted.

        Raises QueueInUse, without `force`, if other queues send their dead letters to it.
        """
        await self._execute(DeleteQueue(queue, force))

    async def describe(self, queue: str) -> QueueDescription:
        """Returns a queue's settings and dates."""
        return public_info(await self._execute(DescribeQueue(queue)))

    async def push(
        self,
        queue: str,
        body: bytes | str,
        *,
        delay: Seconds | None = None,
        priority: int = 0,
        ttl: Seconds | None = None,
        dedup_id: str | None = None,
        group: str | None = None,
        attributes: Attributes | None = None,
    ) -> PushReply:
        """Adds a message; it is durable when this returns.

        `delay` and `ttl` are seconds. A `dedup_id` that was used within five minutes adds nothing.
        Raises QueueFull, MessageTooLarge and StoreFull.
        """
        command = make_push(queue, body, delay, priority, ttl, dedup_id, group, attributes)
        return await self._execute(command)

    async def pull(
        self,
        queue: str,
        *,
        wait: Seconds | None = None,
        visibility_timeout: Seconds | None = None,
        attempt_id: str | None = None,
        holder: str | None = None,
    ) -> Claim | None:
        """Claims the next message, waiting up to `wait` seconds for one.

        Raises InFlightLimit, QueueDeleted while it waits, and AttemptLapsed for an `attempt_id`
        whose claims have ended.
        """
        command = make_pull(queue, 1, wait, visibility_timeout, attempt_id, holder)
        claims = await self._execute(command)
        return claims[0] if claims else None

    async def pull_many(
        self,
        queue: str,
        limit: int = 10,
        *,
        wait: Seconds | None = None,
        visibility_timeout: Seconds | None = None,
        attempt_id: str | None = None,
        holder: str | None = None,
    ) -> List[Claim]:
        """Claims up to `limit` messages, waiting up to `wait` seconds for the first; as `pull`.

        Through a server, a pull with an `attempt_id` gives 2,000 messages or 8 MiB at most.
        """
        return await self._execute(
            make_pull(queue, limit, wait, visibility_timeout, attempt_id, holder)
        )

    async def extend(self, claim: AnyClaim, duration: Seconds) -> int:
        """Holds a claim for `duration` seconds from now; returns its new `deadline_ms`.

        Raises StaleReceipt if the claim has ended.
        """
        return await self._execute(Extend(*claimed(claim), to_ms("duration", duration)))

    async def release(self, claim: AnyClaim, *, delay: Seconds = 0) -> None:
        """Returns a message to its place in the queue, at once or after `delay` seconds.

        Raises StaleReceipt if the claim has ended.
        """
        await self._execute(Release(*claimed(claim), to_ms("delay", delay)))

    async def delete(self, claim: AnyClaim) -> bool:
        """Deletes a claimed message; False if it was gone already.

        Raises StaleReceipt if the claim has ended.
        """
        return await self._execute(Delete(*claimed(claim)))

    async def push_many(
        self,
        queue: str,
        bodies: Iterable[bytes | str | Mapping[str, Any]],
        *,
        delay: Seconds | None = None,
        priority: int = 0,
        ttl: Seconds | None = None,
        dedup_id: str | None = None,
        group: str | None = None,
        attributes: Attributes | None = None,
    ) -> Sequence[PushReply]:
        """Pushes several messages in one append; returns the reply to each.

        An item is a body, or a dict of `body` and options of its own, which replace those given
        for all; a `dedup_id` can only be an item's own. Raises BatchRefused if some are refused:
        the others are pushed, and its `results` has the reply of each, or the error.
        """
        command = make_push_many(queue, bodies, delay, priority, ttl, dedup_id, group, attributes)
        return check_results(await self._execute(command))

    async def delete_many(self, claims: Iterable[AnyClaim]) -> Sequence[bool]:
        """Deletes several claimed messages; returns for each whether it was still there.

        Raises BatchRefused if some are refused: the others are deleted, and its `results` has the
        reply of each, or the error.
        """
        return check_results(await self._execute(make_deletes(claims)))

    def consume(
        self,
        queue: str,
        *,
        visibility_timeout: Seconds | None = None,
        wait: Seconds = 1.0,
        idle: Seconds | None = None,
        max_hold: Seconds = 43_200.0,
        backoff: Seconds = 1.0,
        max_backoff: Seconds = 300.0,
        holder: str | None = None,
    ) -> AsyncConsumer:
        """Makes a loop over the queue's messages: a claim is extended while the loop's body runs.

        The next iteration deletes the current claim's message. Leaving the loop releases it: at
        once, or after an exception with a delay of `backoff` seconds, doubled at each further
        failure of the message up to `max_backoff`. The loop ends by `stop()`, within `wait`
        seconds, or after `idle` seconds without a message. No claim is held for longer than
        `max_hold` seconds.
        """
        return AsyncConsumer(
            self,
            read_options(
                queue, visibility_timeout, wait, idle, max_hold, backoff, max_backoff, holder
            ),
        )

    async def peek(self, queue: str, limit: int = 1, *, state: State = "visible") -> List[Message]:
        """Reads messages that are `visible`, `delayed` or `in_flight`, without claiming them."""
        return await self._execute(Peek(queue, limit, state))

    async def stats(self, queue: str) -> QueueStatistics:
        """Counts a queue's messages by state; also the age of the oldest."""
        return public_stats(await self._execute(Stats(queue)))

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

    async def history(self, message_id: str) -> List[HistoryEvent]:
        """Returns the events of a message that the journal still has.

        Raises MessageNotFound, and UnsupportedOperation if the backend keeps no history.
        """
        return await self._execute(History(message_id))

    async def list(self, prefix: str = "", *, after: str = "", limit: int = 1_000) -> List[str]:
        """Returns names in alphabetical order: those with this prefix that follow `after`."""
        return await self._execute(ListQueues(prefix, after, limit))

    async def close(self) -> None:
        """Closes the backend."""
        await self.service.close()

    async def __aenter__(self) -> "AsyncQueues":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
