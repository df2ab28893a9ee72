"""Pull: one long poll after another; messages received for a cancelled caller are released."""

import asyncio
from typing import Any, Final

from penstock.backends.sqs.client import MESSAGES_MAX, POLL_S_MAX
from penstock.backends.sqs.content import check_plain_id, decode, new_dedup_id
from penstock.backends.sqs.lacks import LACKS
from penstock.backends.sqs.queues import KnownQueue, QueueCache
from penstock.backends.sqs.settings import whole_seconds
from penstock.clock import Clock
from penstock.errors import (
    PenstockError,
    QueueDeleted,
    QueueNotFound,
    UnsupportedOperation,
)
from penstock.service import (
    Claim,
    Pull,
    check_pull,
)

# An endpoint that gives an empty answer sooner than this did not wait: pause before the next
# request.
_WAITED_S_MIN: Final = 1.0
_PAUSE_S: Final = 0.1


class SqsPulls:
    """The pulls of one connection."""

    def __init__(self, queues: QueueCache, clock: Clock) -> None:
        self._queues = queues
        self._clock = clock
        self._polls: set[asyncio.Task[Any]] = set()

    async def pull(self, command: Pull) -> list[Claim]:
        """ReceiveMessage, repeated until the limit is reached or the queue is empty."""
        check_pull(command)
        if command.attempt_id is not None:
            check_plain_id("attempt_id", command.attempt_id)
        queue = await self._queues.find(command.queue)
        if command.attempt_id is not None and not queue.fifo:
            raise UnsupportedOperation(f"attempt_id: {LACKS['attempts']}")
        settings = (await self._queues.info(queue)).settings
        wait_ms = settings.wait_ms if command.wait_ms is None else command.wait_ms
        visibility_ms = command.visibility_ms
        if visibility_ms is None:
            visibility_ms = settings.visibility_ms
        visibility_s = whole_seconds(visibility_ms)
        claims = await self._first(queue, command, visibility_s, wait_ms)
        if command.attempt_id is not None or not visibility_s:
            # An attempt id is for a single request. Without a visibility timeout, the next request
            # would receive the same messages again.
            return claims
        try:
            while claims and len(claims) % MESSAGES_MAX == 0 and len(claims) < command.limit:
                limit = min(MESSAGES_MAX, command.limit - len(claims))
                more = await self._receive(queue, limit, visibility_s, 0, None)
                if not more:
                    break
                claims += more
        except PenstockError:
            # The claims of the answers before it are made: the caller gets them.
            return claims
        except asyncio.CancelledError:
            self._release(queue, [claim.receipt for claim in claims])
            raise
        return claims

    async def _first(
        self, queue: KnownQueue, command: Pull, visibility_s: int, wait_ms: int
    ) -> list[Claim]:
        """The first messages, after a wait of up to `wait_ms`."""
        limit = min(MESSAGES_MAX, command.limit)
        until_ms = self._clock.now_ms() + wait_ms
        left_ms = wait_ms
        loop = asyncio.get_running_loop()
        while True:
            wait_s = min(POLL_S_MAX, whole_seconds(left_ms))
            sent_at_s = loop.time()
            try:
                claims = await self._receive(queue, limit, visibility_s, wait_s, command.attempt_id)
            except QueueNotFound:
                if not wait_s:
                    raise
                raise QueueDeleted(f"queue: {queue.name!r} was deleted") from None
            left_ms = until_ms - self._clock.now_ms()
            if claims or left_ms <= 0:
                return claims
            if loop.time() - sent_at_s < _WAITED_S_MIN:
                await asyncio.sleep(_PAUSE_S)

    async def _receive(
        self, queue: KnownQueue, limit: int, visibility_s: int, wait_s: int, attempt_id: str | None
    ) -> list[Claim]:
        parameters: dict[str, Any] = {
            "MaxNumberOfMessages": limit,
            "VisibilityTimeout": visibility_s,
            "WaitTimeSeconds": wait_s,
            "MessageAttributeNames": ["All"],
            "MessageSystemAttributeNames": ["All"],
        }
        if queue.fifo:
            # With an id, a request that the SDK repeats is given the same messages again.
            parameters["ReceiveRequestAttemptId"] = attempt_id or new_dedup_id()
        poll = self._start(self._queues.call("receive_message", queue, wait_s, **parameters))
        try:
            answer = await asyncio.shield(poll)
        except asyncio.CancelledError:
            # Messages that it still receives would be hidden until their visibility timeout.
            poll.add_done_callback(lambda done: self._release_received(queue, done))
            raise
        deadline_ms = self._clock.now_ms() + visibility_s * 1_000
        return [
            decode(queue.name, received, self._queues.source_of(queue, received), deadline_ms)
            for received in answer.get("Messages", [])
        ]

    def _start(self, request: Any) -> "asyncio.Task[Any]":
        task = asyncio.get_running_loop().create_task(request)
        self._polls.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._polls.discard(task)
        if not task.cancelled():
            # Otherwise asyncio would log an exception that no caller has retrieved.
            task.exception()

    def _release_received(self, queue: KnownQueue, poll: "asyncio.Task[Any]") -> None:
        if not poll.cancelled() and poll.exception() is None:
            received = poll.result().get("Messages", [])
            self._release(queue, [each["ReceiptHandle"] for each in received])

    def _release(self, queue: KnownQueue, receipts: list[str]) -> None:
        """Makes messages visible whose caller was cancelled, without waiting for the answers."""
        if self._queues.client.closed:
            return
        for at in range(0, len(receipts), MESSAGES_MAX):
            entries = [
                {"Id": str(number), "ReceiptHandle": receipt, "VisibilityTimeout": 0}
                for number, receipt in enumerate(receipts[at : at + MESSAGES_MAX])
            ]
            request = self._queues.call("change_message_visibility_batch", queue, Entries=entries)
            self._start(request)

    async def close(self) -> None:
        """Cancels every poll; their callers get EngineClosed."""
        polls = list(self._polls)
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)
