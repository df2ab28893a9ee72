"""Push, delete, extend and release, alone or in batches.

A batch is cut into runs of one verb on one queue, and these into requests of at most ten entries
and one MiB. The requests of a run of pushes are sent one after another, to keep their order; those
of the other verbs at the same time.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

from penstock.backends.sqs.client import MESSAGES_MAX
from penstock.backends.sqs.content import (
    MESSAGE_BYTES_MAX,
    check_push,
    encode,
    new_dedup_id,
    size_of,
)
from penstock.backends.sqs.errors import error_of
from penstock.backends.sqs.lacks import LACKS
from penstock.backends.sqs.queues import KnownQueue, QueueCache
from penstock.backends.sqs.settings import whole_seconds
from penstock.clock import Clock
from penstock.errors import (
    InvalidField,
    InvalidReceipt,
    MessageTooLarge,
    PenstockError,
    RequestError,
    UnavailableError,
    UnsupportedOperation,
)
from penstock.service import (
    BATCH_ITEMS_MAX,
    DELAY_MS_MAX,
    VISIBILITY_MS_MAX,
    Batch,
    Delete,
    Extend,
    Push,
    PushReply,
    Release,
    check_number,
)
from penstock.wire.sqs.attributes import NUMBERS

DELAY_S_MAX: Final = NUMBERS["DelaySeconds"].high
VISIBILITY_S_MAX: Final = VISIBILITY_MS_MAX // 1_000
RECEIPT_CHARS_MAX: Final = 8_192
REQUESTS_AT_ONCE: Final = 8
_UNANSWERED: Final = object()
_ACTIONS: Final[dict[type, str]] = {
    Push: "send_message_batch",
    Delete: "delete_message_batch",
    Extend: "change_message_visibility_batch",
    Release: "change_message_visibility_batch",
}


class Entry(NamedTuple):
    """One item of a batch: the parameters for SQS, and the function that makes the reply."""

    place: int
    sent: dict[str, Any]
    reply: Callable[[dict[str, Any]], Any]
    size_bytes: int = 0


def pushed(answer: Any) -> PushReply:
    """The reply to a push. SQS does not report whether the message is a duplicate."""
    return PushReply(answer["MessageId"], int(answer.get("SequenceNumber", 0)) % 2**63, False)


def check_receipt(receipt: object) -> str:
    """Refuses a receipt that SQS cannot have made. Raises InvalidReceipt."""
    if type(receipt) is not str or not receipt.isascii() or not receipt.isprintable():
        raise InvalidReceipt("receipt: not a receipt of Amazon SQS: expected printable ASCII text")
    if not 1 <= len(receipt) <= RECEIPT_CHARS_MAX:
        raise InvalidReceipt(
            f"receipt: has {len(receipt)} characters; Amazon SQS has 1 to {RECEIPT_CHARS_MAX}"
        )
    return receipt


class SqsMessages:
    """The commands that carry a message or a receipt."""

    def __init__(self, queues: QueueCache, clock: Clock) -> None:
        self._queues = queues
        self._clock = clock

    async def push(self, command: Push) -> PushReply:
        """SendMessage."""
        queue = await self._queues.find(command.queue)
        sent = await self._message(queue, command)
        return pushed(await self._queues.call("send_message", queue, **sent))

    async def delete(self, command: Delete) -> bool:
        """DeleteMessage."""
        queue = await self._queues.find(command.queue)
        receipt = check_receipt(command.receipt)
        await self._queues.call("delete_message", queue, ReceiptHandle=receipt)
        return True

    async def extend(self, command: Extend) -> int:
        """ChangeMessageVisibility; the new deadline is the reply."""
        queue = await self._queues.find(command.queue)
        sent, deadline_ms = self._extension(command)
        await self._queues.call("change_message_visibility", queue, **sent)
        return deadline_ms

    async def release(self, command: Release) -> None:
        """ChangeMessageVisibility to 0, or to the delay."""
        queue = await self._queues.find(command.queue)
        await self._queues.call("change_message_visibility", queue, **_return(command))

    async def _message(self, queue: KnownQueue, command: Push) -> dict[str, Any]:
        """The parameters of SendMessage for a push. Raises RequestError."""
        check_push(command)
        if command.priority:
            raise UnsupportedOperation(f"priority: {LACKS['priority order']}")
        if command.ttl_ms is not None:
            raise UnsupportedOperation(f"ttl: {LACKS['ttl']}")
        sent = encode(command)
        if command.group is not None:
            sent["MessageGroupId"] = command.group
        delay_s = None if command.delay_ms is None else whole_seconds(command.delay_ms)
        if delay_s is not None and delay_s > DELAY_S_MAX:
            raise InvalidField(f"delay: Amazon SQS takes 0 to {DELAY_S_MAX} s; got {delay_s} s")
        if queue.fifo:
            await self._order(queue, command, delay_s, sent)
        elif command.dedup_id is not None:
            raise UnsupportedOperation(f"dedup_id: {LACKS['dedup']}")
        elif delay_s is not None:
            sent["DelaySeconds"] = delay_s
        return sent

    async def _order(
        self, queue: KnownQueue, command: Push, delay_s: int | None, sent: dict[str, Any]
    ) -> None:
        """Adds the parameters that a FIFO queue needs. Raises RequestError."""
        if command.group is None:
            raise InvalidField(f"group: the fifo queue {queue.name!r} needs one with every push")
        settings = (await self._queues.info(queue)).settings
        if delay_s is not None and delay_s * 1_000 != settings.delay_ms:
            raise UnsupportedOperation(f"delay: {LACKS['fifo delay']}")
        if command.dedup_id is not None:
            sent["MessageDeduplicationId"] = command.dedup_id
        elif not settings.dedup_by_content:
            sent["MessageDeduplicationId"] = new_dedup_id()

    def _extension(self, command: Extend) -> tuple[dict[str, Any], int]:
        check_number("visibility_ms", command.visibility_ms, 1, VISIBILITY_MS_MAX)
        visibility_s = whole_seconds(command.visibility_ms)
        receipt = check_receipt(command.receipt)
        deadline_ms = self._clock.now_ms() + visibility_s * 1_000
        return {"ReceiptHandle": receipt, "VisibilityTimeout": visibility_s}, deadline_ms

    # Batches.

    async def batch(self, command: Batch) -> list[Any]:
        """Each item's reply, or the error that refused it.

        If the connection is lost half-way, the items that were not sent have that error. Raises
        UnavailableError if nothing could be sent.
        """
        items = command.items
        if type(items) is not list or len(items) > BATCH_ITEMS_MAX:
            raise InvalidField(f"items: expected a list of at most {BATCH_ITEMS_MAX} commands")
        replies: list[Any] = [_UNANSWERED] * len(items)
        valid: list[int] = []
        for place, item in enumerate(items):
            if type(item) in _ACTIONS and isinstance(item.queue, str):
                valid.append(place)
            else:
                kind = type(item).__name__
                replies[place] = InvalidField(f"items[{place}]: {kind} cannot be part of a batch")
        try:
            for (verb, name), places in groupby(
                valid, lambda place: (type(items[place]), items[place].queue)
            ):
                await self._run(verb, name, [(place, items[place]) for place in places], replies)
        except UnavailableError as lost:
            if not any(_succeeded(reply) for reply in replies):
                raise
            replies = [lost if reply is _UNANSWERED else reply for reply in replies]
        return replies

    async def _run(
        self, verb: type, name: str, items: Sequence[tuple[int, Any]], replies: list[Any]
    ) -> None:
        """Executes the items of one verb on one queue."""
        try:
            queue = await self._queues.find(name)
        except RequestError as refused:
            for place, _ in items:
                replies[place] = refused
            return
        entries: list[Entry] = []
        for place, item in items:
            try:
                entries.append(await self._entry(queue, place, item))
            except RequestError as refused:
                replies[place] = refused
        requests = list(_requests(entries))
        parallel = 1 if verb is Push else REQUESTS_AT_ONCE
        for first in range(0, len(requests), parallel):
            together = requests[first : first + parallel]
            outcomes = await asyncio.gather(
                *(self._request(_ACTIONS[verb], queue, each, replies) for each in together),
                return_exceptions=True,
            )
            for outcome in outcomes:
                if outcome is not None:
                    raise outcome

    async def _entry(self, queue: KnownQueue, place: int, item: Any) -> Entry:
        if type(item) is Push:
            sent = await self._message(queue, item)
            return Entry(place, sent, pushed, size_of(sent))
        if type(item) is Delete:
            return Entry(place, {"ReceiptHandle": check_receipt(item.receipt)}, _true)
        if type(item) is Release:
            return Entry(place, _return(item), _none)
        sent, deadline_ms = self._extension(item)
        return Entry(place, sent, lambda _: deadline_ms)

    async def _request(
        self, action: str, queue: KnownQueue, entries: Sequence[Entry], replies: list[Any]
    ) -> None:
        """Sends one request; if it is refused, so is each entry. Raises UnavailableError."""
        sent = [{"Id": str(number), **each.sent} for number, each in enumerate(entries)]
        try:
            answer = await self._queues.call(action, queue, Entries=sent)
        except MessageTooLarge as refused:
            if len(entries) == 1:
                replies[entries[0].place] = refused
                return
            # The limit of this endpoint is lower than Amazon's: try half as many.
            middle = len(entries) // 2
            await self._request(action, queue, entries[:middle], replies)
            await self._request(action, queue, entries[middle:], replies)
            return
        except RequestError as refused:
            for each in entries:
                replies[each.place] = refused
            return
        for granted in answer.get("Successful", []):
            entry = entries[int(granted["Id"])]
            replies[entry.place] = entry.reply(granted)
        for failed in answer.get("Failed", []):
            status = 400 if failed.get("SenderFault") else 500
            text = failed.get("Message", "")
            error = error_of(failed.get("Code", ""), text, status, queue.name)
            replies[entries[int(failed["Id"])].place] = error


def _return(command: Release) -> dict[str, Any]:
    check_number("delay_ms", command.delay_ms, 0, DELAY_MS_MAX)
    delay_s = whole_seconds(command.delay_ms)
    if delay_s > VISIBILITY_S_MAX:
        raise InvalidField(f"delay: Amazon SQS takes 0 to {VISIBILITY_S_MAX} s; got {delay_s} s")
    return {"ReceiptHandle": check_receipt(command.receipt), "VisibilityTimeout": delay_s}


def _requests(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """The entries in portions that SQS accepts."""
    portion: list[Entry] = []
    size_bytes = 0
    for entry in entries:
        is_full = len(portion) == MESSAGES_MAX or size_bytes + entry.size_bytes > MESSAGE_BYTES_MAX
        if portion and is_full:
            yield portion
            portion, size_bytes = [], 0
        portion.append(entry)
        size_bytes += entry.size_bytes
    if portion:
        yield portion


def _succeeded(reply: object) -> bool:
    return reply is not _UNANSWERED and not isinstance(reply, PenstockError)


def _true(_: Any) -> bool:
    return True


def _none(_: Any) -> None:
    return None
