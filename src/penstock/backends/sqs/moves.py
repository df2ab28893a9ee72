"""Redrive: a whole queue by a move task of SQS, a part of it message by message.

A move task has no limit of messages, and works only on the dead-letter queue of another queue.
Otherwise messages are received, sent to their target and deleted, ten at a time; a message is
duplicated if this is interrupted between the last two.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.backends.sqs.client import MESSAGES_MAX
from penstock.backends.sqs.queues import KnownQueue, QueueCache
from penstock.errors import InvalidField, QueueNotFound, RequestError, UnsupportedOperation

HELD_S: Final = 120
PAUSE_S_MIN: Final = 0.02
PAUSE_S_MAX: Final = 2.0
_ALL: Final = 2**63
_SOURCE_GONE: Final = "CouldNotDetermineMessageSource"
_RUNNING: Final = frozenset({"RUNNING", "CANCELLING"})


class SqsMoves:
    """The redrives of one connection."""

    def __init__(self, queues: QueueCache) -> None:
        self._queues = queues
        self._client = queues.client

    async def move_all(self, queue: KnownQueue, to: KnownQueue | None) -> int:
        """Moves every message, waits until that is done, and returns how many were moved.

        Raises InvalidField if their source is unknown and `to` is not given.
        """
        parameters: dict[str, Any] = {"SourceArn": await self._queues.arn(queue)}
        if to is not None:
            parameters["DestinationArn"] = await self._queues.arn(to)
        try:
            await self._client.call("start_message_move_task", queue.name, **parameters)
        except UnsupportedOperation:
            return await self.move_some(queue, to, _ALL)
        except InvalidField:
            if to is None:
                raise
            # Not a dead-letter queue: SQS has no move task for it.
            return await self.move_some(queue, to, _ALL)
        return await self._finished(queue, parameters["SourceArn"])

    async def _finished(self, queue: KnownQueue, arn: str) -> int:
        pause_s = PAUSE_S_MIN
        while True:
            answer = await self._client.call(
                "list_message_move_tasks", queue.name, SourceArn=arn, MaxResults=1
            )
            (task, *_) = answer.get("Results") or [{}]
            status = task.get("Status")
            if status not in _RUNNING:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
        moved = int(task.get("ApproximateNumberOfMessagesMoved", 0))
        why = task.get("FailureReason", "no reason was given")
        if status == "FAILED" and why != _SOURCE_GONE:
            raise RequestError(f"queue: the move task failed after {moved} messages: {why}")
        if status == "FAILED":
            # It stopped at the first message whose source is gone; others may follow it.
            try:
                moved += await self.move_some(queue, None, _ALL)
            except InvalidField:
                if not moved:
                    raise
        return moved

    async def move_some(self, queue: KnownQueue, to: KnownQueue | None, limit: int) -> int:
        """Moves up to `limit`, oldest first; returns how many. Raises as `move_all` does."""
        # Needed to name the sources of the messages, relative to its account.
        await self._queues.arn(queue)
        moved = 0
        kept: list[Mapping[str, Any]] = []
        while moved < limit:
            answer = await self._queues.call(
                "receive_message",
                queue,
                MaxNumberOfMessages=min(MESSAGES_MAX, limit - moved),
                VisibilityTimeout=HELD_S,
                WaitTimeSeconds=0,
                MessageAttributeNames=["All"],
                MessageSystemAttributeNames=["All"],
            )
            received = answer.get("Messages", [])
            if not received:
                break
            for target, messages in (await self._by_target(queue, to, received)).items():
                if target is None:
                    kept += messages
                else:
                    gone = await self._transfer(queue, target, messages)
                    moved += len(gone)
                    kept += [each for each in messages if each not in gone]
        for each in kept:
            await self._queues.call(
                "change_message_visibility",
                queue,
                ReceiptHandle=each["ReceiptHandle"],
                VisibilityTimeout=0,
            )
        if kept and not moved:
            raise InvalidField(
                f"to: none of the messages in {queue.name!r} came from a queue that still exists; "
                "name the queue to move them to"
            )
        return moved

    async def _by_target(
        self, queue: KnownQueue, to: KnownQueue | None, received: Sequence[Mapping[str, Any]]
    ) -> dict[KnownQueue | None, list[Mapping[str, Any]]]:
        found: dict[KnownQueue | None, list[Mapping[str, Any]]] = {}
        for each in received:
            target = to
            source = self._queues.source_of(queue, each)
            if to is None and source is not None:
                try:
                    target = await self._queues.find(source)
                except QueueNotFound:
                    target = None
            found.setdefault(target, []).append(each)
        return found

    async def _transfer(
        self, queue: KnownQueue, target: KnownQueue, messages: Sequence[Mapping[str, Any]]
    ) -> list[Mapping[str, Any]]:
        """Sends messages to the target and deletes them here; the messages that were moved."""
        entries = [{"Id": str(number), **_copy(each)} for number, each in enumerate(messages)]
        answer = await self._queues.call("send_message_batch", target, Entries=entries)
        gone = [messages[int(granted["Id"])] for granted in answer.get("Successful", [])]
        if gone:
            ended = [
                {"Id": str(number), "ReceiptHandle": each["ReceiptHandle"]}
                for number, each in enumerate(gone)
            ]
            await self._queues.call("delete_message_batch", queue, Entries=ended)
        return gone


def _copy(received: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that send a received message again."""
    sent: dict[str, Any] = {"MessageBody": received["Body"]}
    system = received.get("Attributes", {})
    if received.get("MessageAttributes"):
        sent["MessageAttributes"] = received["MessageAttributes"]
    if "MessageGroupId" in system:
        sent["MessageGroupId"] = system["MessageGroupId"]
    if "SequenceNumber" in system:
        # The same for the same message: moved twice within five minutes, it arrives once.
        sent["MessageDeduplicationId"] = f"penstock-{received['MessageId']}"
    if "AWSTraceHeader" in system:
        header = {"DataType": "String", "StringValue": system["AWSTraceHeader"]}
        sent["MessageSystemAttributes"] = {"AWSTraceHeader": header}
    return sent
