"""The cluster as one queue service: each command goes to the owner of its queue's shard.
This module is long because how one shard is asked, and what a command over several does, are here.

`asking` finds the owner and repeats what may be repeated. Here is which shards a command concerns,
and what happens between shards: lists of all queues, batches, dead letters and their redrive.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final, TypeVar, cast

import msgspec
from nats.aio.client import Client

from penstock.cluster.asking import ShardAsker
from penstock.cluster.jetstream import JetStream
from penstock.cluster.membership import ClusterSettings
from penstock.cluster.placement import first_shard, shard_of_id
from penstock.errors import (
    InvalidField,
    InvalidReceipt,
    MessageNotFound,
    PenstockError,
)
from penstock.service import (
    PEEK_LIMIT_MAX,
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
    Push,
    QueueInfo,
    Redrive,
    Release,
    check_name,
    check_number,
    check_unused,
)

R = TypeVar("R")
# How long a command is tried before it fails: a shard is without an owner for less than this.
PATIENCE_S: Final = 25.0
# Without a word from an owner for once or twice so long, the router looks whether there is another.
_SILENCE_S: Final = 0.35
_RETRY_S: Final = 0.02
_RETRY_S_MAX: Final = 0.25
# The note in a message's context that says which queue it was dead-lettered from.
SOURCE_NOTE: Final = ".source"
_BY_RECEIPT: Final = (Delete, Extend, Release)


class Router:
    """An `AsyncQueueService` over all shards of a cluster."""

    LACKS: ClassVar[Mapping[str, str]] = {
        "dead-letter id": "a dead letter whose queue is in another shard is a new message there",
    }
    redrive_max: int = REDRIVE_MAX

    def __init__(self, asker: ShardAsker, settings: ClusterSettings, connection: JetStream) -> None:
        """The router ends the connection when it is closed."""
        self.ask = asker.ask
        self._asker = asker
        self._settings = settings
        self._connection = connection
        if settings.shards == 1:
            # A class attribute of services; what is lacking here is lacking between shards only.
            vars(self)["LACKS"] = {}

    @classmethod
    async def open(
        cls, replicated: JetStream, client: Client, name: str, settings: ClusterSettings
    ) -> "Router":
        """A router on a connection, which it ends when it is closed."""
        asker = ShardAsker(replicated, client, name)
        await asker.open()
        return cls(asker, settings, replicated)

    async def close(self) -> None:
        """Ends all commands under way with EngineClosed, and the connection."""
        await self._asker.close()
        await self._connection.close()

    def shard_of(self, queue: object) -> int:
        """The shard of a queue. Raises InvalidField for what is no name."""
        return first_shard(check_name(queue), self._settings.shards)

    # Commands.

    async def execute(self, command: Command[R]) -> R:
        """Executes the command, and returns once its changes are in the replicated log."""
        kind = type(command)
        special = _SPECIAL.get(kind)
        if special is not None:
            return cast(R, await special(self, command))
        if not hasattr(command, "queue"):
            raise InvalidField(f"command: {kind.__name__} is not one the cluster knows")
        return await self.ask(self.shard_of(command.queue), command)

    async def _pull(self, command: Pull) -> list[Claim]:
        shard = self.shard_of(command.queue)
        claims = await self.ask(shard, command)
        return [_shown(claim, shard) for claim in claims]

    async def _peek(self, command: Peek) -> list[Message]:
        found = await self.ask(self.shard_of(command.queue), command)
        return [_with_source(message) for message in found]

    async def _by_receipt(self, command: Any) -> Any:
        shard, receipt = self._read_receipt(command.receipt)
        if shard != self.shard_of(command.queue):
            raise _not_ours()
        return await self.ask(shard, msgspec.structs.replace(command, receipt=receipt))

    def _read_receipt(self, receipt: object) -> tuple[int, str]:
        """The shard of a receipt, and the receipt as that shard knows it. Raises InvalidReceipt."""
        shard, dash, rest = str(receipt).partition("-")
        if not dash or len(shard) != 3 or shard.strip("0123456789abcdef"):
            raise _not_ours()
        number = int(shard, 16)
        if number >= self._settings.shards:
            raise _not_ours()
        return number, rest

    async def _batch(self, command: Batch) -> list[Any]:
        items: Any = command.items
        if type(items) is not list:
            return await self.ask(0, command)
        by_shard: dict[int, list[tuple[int, Any]]] = {}
        replies: list[Any] = [None] * len(items)
        for place, item in enumerate(items):
            try:
                shard, item = self._locate(item)
                by_shard.setdefault(shard, []).append((place, item))
            except PenstockError as error:
                replies[place] = error
        if len(items) > 10_000 or not by_shard:
            # The engine says what is wrong with it, or that there is nothing to do.
            return await self.ask(0, command)

        async def ask_one(shard: int, placed: list[tuple[int, Any]]) -> None:
            results = await self.ask(shard, Batch([item for _, item in placed]))
            for (place, _), result in zip(placed, results, strict=True):
                replies[place] = result

        await _all(ask_one(shard, placed) for shard, placed in by_shard.items())
        return replies

    def _locate(self, item: Any) -> tuple[int, Any]:
        """The shard an item of a batch is for, and the item as that shard knows it."""
        if isinstance(item, _BY_RECEIPT):
            shard, receipt = self._read_receipt(item.receipt)
            if shard != self.shard_of(item.queue):
                raise _not_ours()
            return shard, msgspec.structs.replace(item, receipt=receipt)
        return self.shard_of(getattr(item, "queue", None)), item

    async def _history(self, command: History) -> Any:
        shard = shard_of_id(command.id, self._settings.identity)
        if shard is None or shard >= self._settings.shards:
            raise MessageNotFound(f"id: {str(command.id)[:60]!r} names no message of this cluster")
        return await self.ask(shard, command)

    # Queues.

    async def _create(self, command: CreateQueue) -> QueueInfo:
        made = await self._make_dead_letter(command)
        try:
            info = await self.ask(self.shard_of(command.queue), command)
        except PenstockError:
            for name in made:
                await self._unmake(name)
            raise
        return msgspec.structs.replace(info, also_created=made) if made else info

    async def _make_dead_letter(self, command: CreateQueue | ConfigureQueue) -> list[str]:
        """Makes the dead-letter queue that a queue names, if it is in another shard and missing."""
        settings: Any = command.settings
        dead = settings.get("dead_letter") if type(settings) is dict else None
        if type(dead) is not str or dead == command.queue:
            return []
        shard = self.shard_of(command.queue)
        target = first_shard(check_name(dead, "dead_letter"), self._settings.shards)
        if target == shard:
            return []
        fifo = bool(settings.get("fifo", False))
        if type(command) is ConfigureQueue:
            info = await self.ask(shard, DescribeQueue(command.queue))
            fifo = info.settings.fifo
        try:
            found = await self.ask(target, DescribeQueue(dead))
        except PenstockError:
            await self.ask(target, CreateQueue(dead, {"fifo": fifo}))
            return [dead]
        if found.settings.fifo != fifo:
            raise InvalidField(
                f"dead_letter: {command.queue!r} and {dead!r} must both be fifo, or neither"
            )
        return []

    async def _unmake(self, name: str) -> None:
        with suppress(PenstockError):
            await self.ask(self.shard_of(name), DeleteQueue(name))

    async def _configure(self, command: ConfigureQueue) -> QueueInfo:
        made = await self._make_dead_letter(command)
        info = await self.ask(self.shard_of(command.queue), command)
        return msgspec.structs.replace(info, also_created=made) if made else info

    async def _remove(self, command: DeleteQueue) -> None:
        shard = self.shard_of(command.queue)
        if not command.force:
            await self.ask(shard, DescribeQueue(command.queue))
            every = await self._describe_all(DescribeQueues(limit=2**31))
            check_unused(
                command.queue,
                [
                    info.queue
                    for info in every
                    if info.settings.dead_letter == command.queue and info.queue != command.queue
                ],
            )
        await self.ask(shard, command)

    async def _list(self, command: ListQueues) -> list[str]:
        lists = await self._ask_all(command)
        return sorted(itertools.chain.from_iterable(lists))[: command.limit]

    async def _describe_all(self, command: DescribeQueues) -> list[QueueInfo]:
        lists = await self._ask_all(command)
        every = sorted(itertools.chain.from_iterable(lists), key=lambda info: info.queue)
        return every[: command.limit]

    async def _ask_all(self, command: Command[R]) -> Sequence[R]:
        shards = range(self._settings.shards)
        return await _all(self.ask(shard, command) for shard in shards)

    # Between shards.

    async def push_to(self, shard: int, push: Push, source: str | None) -> None:
        """Brings a dead letter to its shard, with a note of where it came from."""
        if source is not None:
            context = {**(push.context or {}), SOURCE_NOTE: source}
            push = msgspec.structs.replace(push, context=context)
        await self.ask(shard, push)

    async def _redrive(self, command: Redrive) -> int:
        """Redrives within the shard, then message by message what has to go to another."""
        shard = self.shard_of(command.queue)
        if command.to is not None and self.shard_of(command.to) == shard:
            return await self.ask(shard, command)
        check_number("limit", command.limit, 1, 10_000)
        info = await self.ask(shard, DescribeQueue(command.queue))
        if command.to is not None:
            other = await self.ask(self.shard_of(command.to), DescribeQueue(command.to))
            if other.settings.fifo != info.settings.fifo:
                raise InvalidField(
                    f"to: {command.to!r} and {command.queue!r} must both be fifo, or neither"
                )
        moved = 0
        if command.to is None:
            try:
                moved = await self.ask(shard, command)
            except InvalidField:
                # No message knows a source in this shard; some may have a note of another.
                if not await self._has_notes(shard, command.queue):
                    raise
        return moved + await self._carry_back(shard, command, command.limit - moved)

    async def _has_notes(self, shard: int, queue: str) -> bool:
        """Whether a message came from a queue in another shard that still exists."""
        ahead = await self.ask(shard, Peek(queue, PEEK_LIMIT_MAX))
        notes = {(message.context or {}).get(SOURCE_NOTE) for message in ahead} - {None}
        return any([await self._exists(cast(str, source)) for source in notes])

    async def _carry_back(self, shard: int, command: Redrive, limit: int) -> int:
        """Pulls, pushes and deletes messages that go to another shard; how many did."""
        carried = 0
        left: list[Claim] = []
        try:
            while carried < limit:
                wanted = min(100, limit - carried)
                claims = await self.ask(shard, Pull(command.queue, wanted, wait_ms=0))
                if not claims:
                    break
                for claim in claims:
                    source = (claim.context or {}).get(SOURCE_NOTE)
                    to = command.to or source
                    if to is None or not await self._exists(to):
                        left.append(claim)
                        continue
                    await self.ask(self.shard_of(to), _pushed_back(claim, to))
                    await self.ask(shard, Delete(command.queue, claim.receipt))
                    carried += 1
        finally:
            for claim in left:
                with suppress(PenstockError):
                    await self.ask(shard, Release(command.queue, claim.receipt))
        return carried

    async def _exists(self, queue: str) -> bool:
        try:
            await self.ask(self.shard_of(queue), DescribeQueue(queue))
        except PenstockError:
            return False
        return True


_SPECIAL: Final[Mapping[type, Callable[[Router, Any], Awaitable[Any]]]] = {
    Pull: Router._pull,
    Peek: Router._peek,
    Delete: Router._by_receipt,
    Extend: Router._by_receipt,
    Release: Router._by_receipt,
    Batch: Router._batch,
    History: Router._history,
    CreateQueue: Router._create,
    ConfigureQueue: Router._configure,
    DeleteQueue: Router._remove,
    ListQueues: Router._list,
    DescribeQueues: Router._describe_all,
    Redrive: Router._redrive,
}


def _shown(claim: Claim, shard: int) -> Claim:
    """A claim as callers see it: its receipt names the shard."""
    claim = cast(Claim, _with_source(claim))
    return msgspec.structs.replace(claim, proof=f"{shard:03x}-{claim.proof}")


def _with_source(message: Message) -> Message:
    """A message with the queue it was dead-lettered from, if that is noted."""
    if message.context is None or SOURCE_NOTE not in message.context:
        return message
    context = {name: text for name, text in message.context.items() if name != SOURCE_NOTE}
    source = message.source or message.context[SOURCE_NOTE]
    return msgspec.structs.replace(message, source=source, context=context or None)


def _pushed_back(claim: Claim, to: str) -> Push:
    """The push that brings a dead letter back; repeated, it adds nothing."""
    context = {name: text for name, text in (claim.context or {}).items() if name != SOURCE_NOTE}
    return Push(
        to,
        claim.body,
        delay_ms=0,
        priority=claim.priority,
        dedup_id=f"redriven-{claim.id}",
        group=claim.group,
        attributes=claim.attributes or None,
        context=context or None,
    )


def _not_ours() -> InvalidReceipt:
    return InvalidReceipt(
        "receipt: not one that this cluster has made for this queue; use the one the pull gave"
    )


async def _all(works: Any) -> list[Any]:
    """The results of all; if one raises, the others are ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
