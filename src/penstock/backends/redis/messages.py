"""Push, delete, extend, release and batches of them: one script call for each run of a queue.

Checks that need no settings of the queue are made here; the scripts make the others, so that a
change of settings counts at once for every process.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any, Final

from msgspec.structs import astuple

from penstock.backends.redis.layout import (
    PlainItem,
    RedisQueue,
    encode_bare,
    encode_claim,
    encode_plain,
    encode_push,
    plain_head,
)
from penstock.backends.redis.link import checked_reply
from penstock.backends.redis.moves import RedisMoves
from penstock.backends.redis.queues import RedisQueues
from penstock.core.receipts import Ticket
from penstock.errors import (
    ClaimTooLong,
    InvalidField,
    InvalidReceipt,
    MessageGone,
    MessageTooLarge,
    PenstockError,
    QueueFull,
    RequestError,
    StaleReceipt,
    UnavailableError,
)
from penstock.service import (
    BATCH_ITEMS_MAX,
    DELAY_MS_MAX,
    PRIORITY_MAX,
    TTL_MS_MAX,
    VISIBILITY_MS_MAX,
    Batch,
    Delete,
    Extend,
    NumberedReplies,
    Push,
    PushMany,
    PushReply,
    Release,
    check_id,
    check_number,
    check_pairs,
)

# A refusal, or the item for the script.
_Item = bytes | RequestError
_BYTES: Final = {bytes}
# Pushes of one script call, during which Redis does nothing else.
_PART_BYTES_MAX: Final = 16 * 1024 * 1024
# Redis takes no argument of over 512 MiB.
_ARGUMENT_BYTES_MAX: Final = 256 * 1024 * 1024
_UNANSWERED: Final = object()
# Of a push that is repeated with a dedup id: no caller sees it.
_NEEDS_CONTENT_ID: Final = RequestError("dedup_id: the queue needs one")
_GONE: Final = (
    "receipt: the message of this claim is gone from the queue: deleted, expired, purged or moved "
    "to another queue"
)
_ENDED: Final = {
    b"again": "the message was claimed again",
    b"ended": "it was released, or its visibility ran out",
}


class RedisMessages:
    """The commands on single messages."""

    def __init__(self, queues: RedisQueues, moves: RedisMoves) -> None:
        self._queues = queues
        self._moves = moves

    async def push(self, command: Push) -> PushReply:
        """Adds a message."""
        queue = await self._queues.find(command.queue)
        item = plain_item(queue, command)
        if item is None:
            reply: PushReply = raised((await self._push_all(command.queue, [command]))[0])
            return reply
        calls = [self._queues.plain_push(queue, item)]
        (answer,) = await self._queues.send(queue.keys[0], calls)
        return await self.pushed(queue, command, answer)

    async def pushed(self, queue: RedisQueue, command: Push, answer: Any) -> PushReply:
        """The reply to a message that was sent to `push_plain.lua`. Raises PenstockError."""
        if type(answer) is int:
            return PushReply(queue.ids.show(answer), answer, False)
        reply: PushReply = raised((await self._pushed_all(queue, [command], [b""], [answer]))[0])
        return reply

    async def push_many(self, command: PushMany) -> Sequence[Any]:
        """Adds messages; each PushReply, or the RequestError that refused it."""
        bodies = command.bodies
        if len(bodies) > BATCH_ITEMS_MAX:
            raise InvalidField(
                f"bodies: {len(bodies)} of them; at most {BATCH_ITEMS_MAX} in one go"
            )
        if not (
            command.dedup_ids is None and command.is_plain and set(map(type, bodies)) == _BYTES
        ):
            return await self._push_each(command.pushes())
        queue = await self._queues.find(command.queue)
        if queue.info.settings.dedup_by_content:
            return await self._push_each(command.pushes())
        answers = await self._send(queue, list(map(encode_bare, bodies)))
        queue, results = await self._results(queue, answers)
        if type(results[0]) is int and type(results[-1]) is int:
            numbers = range(results[0], results[-1] + 1)
            if results[0] > 0 and len(numbers) == len(results):
                return NumberedReplies(queue.ids.prefix, numbers)
        if b"content" in results:
            pushes = command.pushes()
            return await self._pushed_all(queue, pushes, [b""] * len(pushes), answers)
        sizes = list(map(len, bodies))
        return [_pushed(queue, size, each) for size, each in zip(sizes, results, strict=True)]

    async def _push_each(self, pushes: list[Push]) -> list[Any]:
        return await self._push_all(pushes[0].queue, pushes) if pushes else []

    async def _push_all(self, name: str, commands: Sequence[Push]) -> list[Any]:
        queue = await self._queues.find(name)
        items = [_push_item(queue, command) for command in commands]
        sent = [item for item in items if isinstance(item, bytes)]
        answers = await self._send(queue, sent) if sent else []
        return await self._pushed_all(queue, commands, items, answers)

    async def _pushed_all(
        self,
        queue: RedisQueue,
        commands: Sequence[Push],
        items: Sequence[_Item],
        answers: Sequence[Any],
    ) -> list[Any]:
        """The results of pushes, from the answers to those that were not refused here."""
        queue, results = await self._results(queue, answers)
        given = iter(results)
        replies = [
            item
            if isinstance(item, RequestError)
            else _pushed(queue, check_push(command), next(given))
            for command, item in zip(commands, items, strict=True)
        ]
        refused = [place for place, reply in enumerate(replies) if reply is _NEEDS_CONTENT_ID]
        if refused:
            # The queue has just been set to dedup by content.
            hashed = [_with_content_id(commands[place]) for place in refused]
            for place, reply in zip(refused, await self._run_of(queue.name, hashed), strict=True):
                replies[place] = reply
        return replies

    async def _send(self, queue: RedisQueue, items: list[bytes]) -> list[Any]:
        """The answers to pushes: to one call, or to several if they are large."""
        calls = [("push", [part]) for part in _parts(items)]
        return await self._queues.run_all(queue.keys, calls)

    async def _results(
        self, queue: RedisQueue, answers: Sequence[Any]
    ) -> tuple[RedisQueue, list[Any]]:
        """The result of `push.lua` for each message, and their queue.

        Raises RequestError or UnavailableError; then some of several calls may have been done.
        """
        results: list[Any] = []
        for answer in answers:
            reply = self._queues.checked(queue, checked_reply(self._queues.target, answer))
            queue = await self._queues.same_as(queue, reply)
            await self._moves.carry_owed(queue, reply)
            results += reply[3:]
        return queue, results

    async def delete(self, command: Delete) -> bool:
        """Ends a claim and its message."""
        return bool(raised((await self._claims(command.queue, [command]))[0]))

    async def extend(self, command: Extend) -> int:
        """Moves a claim's deadline."""
        return int(raised((await self._claims(command.queue, [command]))[0]))

    async def release(self, command: Release) -> None:
        """Ends a claim; its message returns."""
        raised((await self._claims(command.queue, [command]))[0])

    async def _claims(self, name: str, commands: Sequence[Delete | Extend | Release]) -> list[Any]:
        queue = await self._queues.find(name)
        items = [_claim_item(queue, command) for command in commands]
        (answer,) = await self._queues.run_all(queue.keys, [_claims_call(queue, items)])
        return await self._changed_all(queue, commands, items, answer)

    async def _changed_all(
        self, queue: RedisQueue, commands: Sequence[Any], items: Sequence[_Item], answer: Any
    ) -> list[Any]:
        """The results of claims, from the answer to those that were not refused here."""
        reply = self._queues.checked(queue, checked_reply(self._queues.target, answer))
        now = await self._queues.same_as(queue, reply)
        await self._moves.carry_owed(now, reply)
        given = iter(reply[3:])
        replies = [
            item if isinstance(item, RequestError) else _changed(queue, command, next(given))
            for command, item in zip(commands, items, strict=True)
        ]
        refused = [place for place, item in enumerate(items) if isinstance(item, RequestError)]
        if refused and now is not queue:
            # The queue was removed and made again since it was read: they may be for the new one.
            again = await self._run_of(queue.name, [commands[place] for place in refused])
            for place, result in zip(refused, again, strict=True):
                replies[place] = result
        return replies

    async def batch(self, command: Batch) -> list[Any]:
        """Runs each item; its reply, or the error that refused it, in its place.

        An item whose answer did not come has that error. Raises UnavailableError if none came.
        """
        items: Any = command.items
        if type(items) is not list or len(items) > BATCH_ITEMS_MAX:
            raise InvalidField(f"items: expected a list of at most {BATCH_ITEMS_MAX} commands")
        results: list[Any] = [_UNANSWERED] * len(items)
        by_queue: dict[str, list[int]] = {}
        for place, item in enumerate(items):
            if type(item) not in (Push, Delete, Extend, Release):
                kind = type(item).__name__
                results[place] = InvalidField(f"items[{place}]: {kind} cannot be part of a batch")
            else:
                by_queue.setdefault(item.queue if type(item.queue) is str else "", []).append(place)
        await asyncio.gather(
            *(self._batch_of(name, places, items, results) for name, places in by_queue.items())
        )
        if results and all(isinstance(result, UnavailableError) for result in results):
            raise results[0]
        return results

    async def _batch_of(
        self, name: str, places: list[int], items: list[Any], results: list[Any]
    ) -> None:
        """The items of one queue: runs of pushes and runs of claims, in one pipeline."""
        runs = _runs(places, items)
        try:
            if len(runs) > 1 and not any(_is_large(items[place]) for place in places):
                await self._pipeline(await self._queues.find(name), runs, items, results)
                return
            for run in runs:
                replies = await self._run_of(name, [items[place] for place in run])
                for place, reply in zip(run, replies, strict=True):
                    results[place] = reply
        except PenstockError as error:
            for place in places:
                if results[place] is _UNANSWERED:
                    results[place] = error

    async def _run_of(self, name: str, run: list[Any]) -> list[Any]:
        """The results of pushes, or of claims. Raises UnavailableError."""
        try:
            if type(run[0]) is Push:
                return await self._push_all(name, run)
            return await self._claims(name, run)
        except RequestError as refused:
            return [refused] * len(run)

    async def _pipeline(
        self, queue: RedisQueue, runs: list[list[int]], items: list[Any], results: list[Any]
    ) -> None:
        commands = [[items[place] for place in run] for run in runs]
        calls: list[tuple[str, Sequence[Any]]] = []
        encoded: list[list[_Item]] = []
        for run in commands:
            if type(run[0]) is Push:
                made = [_push_item(queue, command) for command in run]
                calls.append(("push", [_joined(made)]))
            else:
                made = [_claim_item(queue, command) for command in run]
                calls.append(_claims_call(queue, made))
            encoded.append(made)
        answers = await self._queues.run_all(queue.keys, calls)
        for places, run, made, answer in zip(runs, commands, encoded, answers, strict=True):
            try:
                if type(run[0]) is Push:
                    done = await self._pushed_all(queue, run, made, [answer])
                else:
                    done = await self._changed_all(queue, run, made, answer)
            except PenstockError as error:
                done = [error] * len(run)
            for place, result in zip(places, done, strict=True):
                results[place] = result


def raised(result: Any) -> Any:
    """The result itself. Raises it if it is a refusal."""
    if isinstance(result, RequestError):
        raise result
    return result


def _parts(items: list[bytes]) -> list[bytes]:
    """The items as arguments: one, unless together they are too large for one."""
    if sum(map(len, items)) <= _PART_BYTES_MAX:
        return [b"".join(items)]
    parts: list[list[bytes]] = [[]]
    size = 0
    for item in items:
        if parts[-1] and size + len(item) > _PART_BYTES_MAX:
            parts.append([])
            size = 0
        parts[-1].append(item)
        size += len(item)
    return [b"".join(part) for part in parts]


def _joined(items: Sequence[_Item]) -> bytes:
    """The items that were not refused already, as one argument."""
    return b"".join(item for item in items if isinstance(item, bytes))


def _is_large(command: Any) -> bool:
    """Whether a push may be too large to be one of many in an argument."""
    body = getattr(command, "body", b"")
    return type(body) is bytes and len(body) * BATCH_ITEMS_MAX > _ARGUMENT_BYTES_MAX


def _runs(places: list[int], items: list[Any]) -> list[list[int]]:
    """Consecutive places that are all pushes, or all claims."""
    runs: list[list[int]] = []
    for place in places:
        is_push = type(items[place]) is Push
        if runs and (type(items[runs[-1][-1]]) is Push) == is_push:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


def _push_item(queue: RedisQueue, command: Push) -> _Item:
    try:
        size = check_push(command)
    except RequestError as refused:
        return refused
    dedup_id = command.dedup_id
    if dedup_id is None and queue.info.settings.dedup_by_content:
        dedup_id = content_id(command.body)
    return encode_push(command, size, dedup_id)


def plain_item(queue: RedisQueue, command: Push) -> PlainItem | None:
    """The item of a push for `push_plain.lua`; None if that script cannot do it."""
    _, body, delay_ms, priority, ttl_ms, dedup_id, group, attributes, context = astuple(command)
    if (
        delay_ms
        or ttl_ms is not None
        or dedup_id is not None
        or group is not None
        or not queue.has_plain_pushes
    ):
        return None
    if (
        attributes is None
        and context is None
        and delay_ms is None
        and type(body) is bytes
        and type(priority) is int
        and 0 <= priority <= PRIORITY_MAX
    ):
        item = plain_head(len(body), priority), body
    else:
        try:
            item = encode_plain(command, check_push(command))
        except RequestError:
            return None
    # A message that may be too large is refused by `push.lua`.
    return item if len(item[0]) + len(item[1]) <= queue.body_bytes_max else None


def _with_content_id(command: Push) -> Push:
    if command.dedup_id is not None or type(command.body) is not bytes:
        return command
    return Push(
        command.queue,
        command.body,
        command.delay_ms,
        command.priority,
        command.ttl_ms,
        content_id(command.body),
        command.group,
        command.attributes,
        command.context,
    )


def content_id(body: bytes) -> str:
    """The dedup id of a body on a queue with dedup by content."""
    return hashlib.sha256(body).hexdigest()


def check_push(command: Push) -> int:
    """The size of the message. Raises InvalidField for a field outside its limits."""
    if type(command.body) is not bytes:
        raise InvalidField(f"body: expected bytes, got {type(command.body).__name__}")
    size = len(command.body)
    if command.context is not None:
        check_pairs("context", command.context, allow_bytes=False)
    if command.attributes is not None:
        size += check_pairs("attributes", command.attributes, allow_bytes=True)
    check_number("priority", command.priority, 0, PRIORITY_MAX)
    if command.delay_ms is not None:
        check_number("delay_ms", command.delay_ms, 0, DELAY_MS_MAX)
    if command.ttl_ms is not None:
        check_number("ttl_ms", command.ttl_ms, 1, TTL_MS_MAX)
    if command.group is not None:
        check_id("group", command.group)
    if command.dedup_id is not None:
        check_id("dedup_id", command.dedup_id)
    return size


def _pushed(queue: RedisQueue, size: int, reply: Any) -> PushReply | RequestError:
    """The result of one push; `_NEEDS_CONTENT_ID` if it is to be sent with a dedup id."""
    if type(reply) is int:
        number = abs(reply)
        return PushReply(queue.ids.show(number), number, reply < 0)
    name = queue.name
    why, *figures = reply.decode().split(":")
    if why == "content":
        return _NEEDS_CONTENT_ID
    if why == "large":
        return MessageTooLarge(
            f"body: {figures[0]} bytes with its attributes; the queue {name!r} "
            f"takes at most {figures[1]}"
        )
    if why == "group":
        return InvalidField(f"group: the fifo queue {name!r} needs one with every push")
    if why == "priority":
        return InvalidField(f"priority: the fifo queue {name!r} keeps strict order and takes none")
    if why == "messages":
        return QueueFull(
            f"queue: {name!r} is full with {figures[0]} messages "
            f"(max_messages={figures[1]}); delete some, or raise the limit"
        )
    return QueueFull(
        f"queue: {name!r} is full with {figures[0]} bytes, {size} more do "
        f"not fit (max_bytes={figures[1]}); delete some, or raise the limit"
    )


def _claims_call(queue: RedisQueue, items: Sequence[_Item]) -> tuple[str, Sequence[Any]]:
    return "receipts", [queue.identity.partition(b":")[0], _joined(items)]


def _claim_item(queue: RedisQueue, command: Delete | Extend | Release) -> _Item:
    try:
        ticket = read_receipt(queue, command.receipt)
        if isinstance(command, Delete):
            return encode_claim(b"D", ticket, 0, -1, command.late)
        if isinstance(command, Release):
            delay_ms = check_number("delay_ms", command.delay_ms, 0, DELAY_MS_MAX)
            return encode_claim(b"R", ticket, delay_ms, -1, command.late)
        visibility_ms = check_number("visibility_ms", command.visibility_ms, 1, VISIBILITY_MS_MAX)
        held_ms_max = -1 if command.held_ms_max is None else command.held_ms_max
        return encode_claim(b"E", ticket, visibility_ms, held_ms_max, command.late)
    except RequestError as refused:
        return refused


def read_receipt(queue: RedisQueue, receipt: object) -> Ticket:
    """The ticket of a receipt of this queue. Raises InvalidReceipt."""
    ticket = queue.receipts.read(receipt)
    if ticket.queue != queue.number:
        raise InvalidReceipt(f"receipt: it is for a claim in another queue than {queue.name!r}")
    return ticket


def _changed(queue: RedisQueue, command: Delete | Extend | Release, reply: Any) -> Any:
    if type(reply) is int:
        if isinstance(command, Delete):
            return reply == 1
        return reply if isinstance(command, Extend) else None
    why = reply.partition(b":")[0]
    if why == b"gone":
        return MessageGone(_GONE)
    if why == b"other":
        return InvalidReceipt(
            f"receipt: it is for a claim in another queue than {queue.name!r}, of the same name"
        )
    if why == b"long":
        return ClaimTooLong(
            f"visibility_ms: the message would be held for {reply[5:].decode()} ms in all; "
            f"at most {getattr(command, 'held_ms_max', None)} are allowed"
        )
    epoch = queue.receipts.read(command.receipt).epoch
    return StaleReceipt(
        f"receipt: claim {epoch} of this message has ended ({_ENDED[why]}); "
        "pull the message again for a new receipt"
    )
