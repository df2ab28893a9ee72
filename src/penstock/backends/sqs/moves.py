"""Redrives: a whole queue by a move task of SQS, a part of it by hand.

A move task cannot be told how many, and wants a queue that is somebody's dead-letter queue. Where
it does not serve, messages are pulled, sent on and deleted, ten at a time; one may come twice if
this is cut short between the last two.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.backends.sqs.client import MESSAGES_MAX
from penstock.backends.sqs.queues import Known, QueueBook
from penstock.errors import InvalidField, QueueNotFound, RequestError, UnsupportedOperation

HELD_S: Final = 120
PAUSE_S_MIN: Final = 0.02
PAUSE_S_MAX: Final = 2.0
_ALL: Final = 2**63
_SOURCE_GONE: Final = "CouldNotDetermineMessageSource"
_UNDER_WAY: Final = frozenset({"RUNNING", "CANCELLING"})


class SqsMoves:
    """The redrives of one connection."""

    def __init__(self, book: QueueBook) -> None:
        self._book = book
        self._client = book.client

    async def move_all(self, queue: Known, to: Known | None) -> int:
        """SqsMoves everything, and returns when that is done; how many were moved.

        Raises InvalidField if they came from nowhere and `to` is not given.
        """
        asked: dict[str, Any] = {"SourceArn": await self._book.arn(queue)}
        if to is not None:
            asked["DestinationArn"] = await self._book.arn(to)
        try:
            await self._client.call("start_message_move_task", queue.name, **asked)
        except UnsupportedOperation:
            return await self.move_some(queue, to, _ALL)
        except InvalidField:
            if to is None:
                raise
            # Nobody's dead-letter queue: SQS has no task for it.
            return await self.move_some(queue, to, _ALL)
        return await self._finished(queue, asked["SourceArn"])

    async def _finished(self, queue: Known, arn: str) -> int:
        pause_s = PAUSE_S_MIN
        while True:
            answer = await self._client.call(
                "list_message_move_tasks", queue.name, SourceArn=arn, MaxResults=1
            )
            (task, *_) = answer.get("Results") or [{}]
            status = task.get("Status")
            if status not in _UNDER_WAY:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
        moved = int(task.get("ApproximateNumberOfMessagesMoved", 0))
        why = task.get("FailureReason", "no reason was given")
        if status == "FAILED" and why != _SOURCE_GONE:
            raise RequestError(f"queue: the move ended after {moved} messages: {why}")
        if status == "FAILED":
            # It stopped at the first message whose queue is gone; there may be others behind it.
            try:
                moved += await self.move_some(queue, None, _ALL)
            except InvalidField:
                if not moved:
                    raise
        return moved

    async def move_some(self, queue: Known, to: Known | None, limit: int) -> int:
        """SqsMoves up to so many, oldest first; how many were moved. Raises as `move_all` does."""
        # By it, and seen from its account, the messages' sources are named.
        await self._book.arn(queue)
        moved = 0
        kept: list[Mapping[str, Any]] = []
        while moved < limit:
            answer = await self._book.ask(
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
                    gone = await self._hand_over(queue, target, messages)
                    moved += len(gone)
                    kept += [each for each in messages if each not in gone]
        for each in kept:
            await self._book.ask(
                "change_message_visibility",
                queue,
                ReceiptHandle=each["ReceiptHandle"],
                VisibilityTimeout=0,
            )
        if kept and not moved:
            raise InvalidField(
                f"to: none of the messages in {queue.name!r} came from a queue that still exists; "
                "say where they should go"
            )
        return moved

    async def _by_target(
        self, queue: Known, to: Known | None, received: Sequence[Mapping[str, Any]]
    ) -> dict[Known | None, list[Mapping[str, Any]]]:
        found: dict[Known | None, list[Mapping[str, Any]]] = {}
        for each in received:
            target = to
            source = self._book.source_of(queue, each)
            if to is None and source is not None:
                try:
                    target = await self._book.find(source)
                except QueueNotFound:
                    target = None
            found.setdefault(target, []).append(each)
        return found

    async def _hand_over(
        self, queue: Known, target: Known, messages: Sequence[Mapping[str, Any]]
    ) -> list[Mapping[str, Any]]:
        """Sends messages on and deletes them here; those that went."""
        entries = [{"Id": str(number), **_copy(each)} for number, each in enumerate(messages)]
        answer = await self._book.ask("send_message_batch", target, Entries=entries)
        gone = [messages[int(granted["Id"])] for granted in answer.get("Successful", [])]
        if gone:
            ended = [
                {"Id": str(number), "ReceiptHandle": each["ReceiptHandle"]}
                for number, each in enumerate(gone)
            ]
            await self._book.ask("delete_message_batch", queue, Entries=ended)
        return gone


def _copy(received: Mapping[str, Any]) -> dict[str, Any]:
    """A received message as it is to be sent again."""
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
