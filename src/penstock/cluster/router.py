"""The cluster as one queue service: sends each command to the owners of its queue's shards.

`asking` finds the owner of a shard and repeats commands; `spreading` has the commands of a queue
that may be in several shards. This module has the commands that concern several queues, or that
contain their shard: batches, receipts, lists of all queues, dead letters and redrive.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final, TypeVar, cast

import msgspec
from nats.aio.client import Client

from penstock.backends.parts import PAGE_QUEUES, takes_pages
from penstock.clock import SystemClock
from penstock.cluster.asking import ShardAsker
from penstock.cluster.attempts import COMMAND_TIMEOUT_S
from penstock.cluster.jetstream import JetStream
from penstock.cluster.known_queues import gather_all
from penstock.cluster.log import ReadRegisters
from penstock.cluster.membership import ClusterSettings, check_settings_known, later_settings_in
from penstock.cluster.placement import first_shard, shard_of_id
from penstock.cluster.pulling import pull_from_shard
from penstock.cluster.spread import SpreadChanged, without_note
from penstock.cluster.spreading import SpreadQueues
from penstock.errors import (
    BackendLost,
    InvalidField,
    InvalidReceipt,
    MessageNotFound,
    PenstockError,
    QueueNotFound,
    RequestError,
    StaleReceipt,
)
from penstock.service import (
    BATCH_ITEMS_MAX,
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
    Purge,
    Push,
    PushMany,
    PushReply,
    QueueInfo,
    QueueStats,
    Redrive,
    Release,
    Stats,
    check_name,
    check_number,
    check_unused,
)

R = TypeVar("R")
# The key in a message's context of the queue that it was dead-lettered from.
SOURCE_NOTE: Final = ".source"
_RETRY_S: Final = 0.01
_RETRY_S_MAX: Final = 0.25
_BY_RECEIPT: Final = (Delete, Extend, Release)


class Router:
    """An `AsyncQueueService` over all shards of a cluster."""

    LACKS: ClassVar[Mapping[str, str]] = {
        "dead-letter id": "a dead letter whose queue is in another shard is a new message there",
    }
    redrive_max: int = REDRIVE_MAX

    def __init__(
        self,
        asker: ShardAsker,
        settings: ClusterSettings,
        connection: JetStream,
        now_ms: Callable[[], int] | None = None,
    ) -> None:
        """`connection` is closed with the router; `now_ms` replaces the system clock."""
        self.ask = asker.ask
        self.spread = SpreadQueues(asker, settings.shards, now_ms or SystemClock().now_ms)
        self.finish_spread_change = self.spread.finish_spread_change
        self.remove_stale_copy = self.spread.remove_stale_copy
        self._asker = asker
        self._settings = settings
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        if settings.shards == 1:
            # What LACKS lists is missing between shards only; it is a class attribute of services.
            vars(self)["LACKS"] = {}

    @classmethod
    async def open(
        cls,
        replicated: JetStream,
        client: Client,
        name: str,
        settings: ClusterSettings,
        now_ms: Callable[[], int] | None = None,
    ) -> "Router":
        """Opens a router on a connection, which it closes when it is closed. Raises Unanswered."""
        asker = ShardAsker(replicated, client, name)
        try:
            await asker.open()
        except BaseException:
            await asker.close()
            raise
        return cls(asker, settings, replicated, now_ms)

    async def close(self) -> None:
        """Ends all commands in progress with EngineClosed, and closes the connection."""
        await self._asker.close()
        await self._connection.close()

    def shard_of(self, queue: object) -> int:
        """The home shard of a queue. Raises InvalidField if it is not a valid name."""
        return first_shard(check_name(queue), self._settings.shards)

    # Commands.

    async def execute(self, command: Command[R]) -> R:
        """Executes the command, and returns once its changes are in the replicated log."""
        kind = type(command)
        handler = _HANDLERS.get(kind)
        if handler is not None:
            return cast(R, await handler(self, command))
        if not hasattr(command, "queue"):
            raise InvalidField(f"command: a cluster does not support {kind.__name__}")
        return await self.ask(self.shard_of(command.queue), command)

    async def _push(self, command: Push) -> PushReply:
        """Fast path of `SpreadQueues.push` for a queue that is in one shard."""
        home = self.shard_of(command.queue)
        if self.spread.places(command.queue) is None:
            with suppress(SpreadChanged):
                return await self.ask(home, command)
        return await self.spread.push(command)

    async def _push_many(self, command: PushMany) -> Sequence[Any]:
        replies = await self.spread.push_many(command)
        # The messages have keys: each goes to the shard of its key.
        return await self._batch(Batch([*command.pushes()])) if replies is None else replies

    async def _pull(self, command: Pull) -> list[Claim]:
        """Fast path of `SpreadQueues.pull` for a queue that is in one shard."""
        home = self.shard_of(command.queue)
        if self.spread.places(command.queue) is None and not command.wait_ms:
            with suppress(SpreadChanged):
                claims = await pull_from_shard(self._asker, home, command)
                return [_with_shard(claim, home) for claim in claims]
        return [_with_shard(claim, shard) for shard, claim in await self.spread.pull(command)]

    async def _peek(self, command: Peek) -> list[Message]:
        return [_with_source(message) for message in await self.spread.peek(command)]

    async def _stats(self, command: Stats) -> QueueStats:
        return await self.spread.stats(command)

    async def _purge(self, command: Purge) -> int:
        return await self.spread.purge(command)

    async def _by_receipt(self, command: Any) -> Any:
        shard, receipt = self._read_receipt(command.receipt)
        home = self.shard_of(command.queue)
        try:
            return await self.ask(shard, msgspec.structs.replace(command, receipt=receipt))
        except QueueNotFound:
            if shard == home:
                raise
        # The queue is not, or no longer, in that shard.
        await self.ask(home, DescribeQueue(command.queue))
        raise _foreign_receipt()

    def _read_receipt(self, receipt: object) -> tuple[int, str]:
        """The shard of a receipt, and the receipt for that shard. Raises InvalidReceipt."""
        shard, dash, rest = str(receipt).partition("-")
        if not dash or len(shard) != 3 or shard.strip("0123456789abcdef"):
            raise _foreign_receipt()
        number = int(shard, 16)
        if number >= self._settings.shards:
            raise _foreign_receipt()
        return number, rest

    async def _batch(self, command: Batch) -> list[Any]:
        items: Any = command.items
        if type(items) is not list:
            return await self.ask(0, command)
        if len(items) > BATCH_ITEMS_MAX or not items:
            # The engine refuses it with the proper error, or answers the empty batch.
            return await self.ask(0, command)
        replies: list[Any] = [None] * len(items)
        left = list(range(len(items)))
        give_up_s = self._loop.time() + COMMAND_TIMEOUT_S
        pause_s = 0.0
        while left:
            left = await self._try_batch(items, left, replies)
            if left and self._loop.time() > give_up_s:
                raise BackendLost(
                    "items: the spread of their queues is being changed, and not all shards "
                    "answer; try again later"
                )
            for queue in dict.fromkeys(items[place].queue for place in left):
                with suppress(QueueNotFound):
                    await self.spread.describe(queue)
            if left:
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s + _RETRY_S, _RETRY_S_MAX)
        return replies

    async def _try_batch(
        self, items: list[Any], places: list[int], replies: list[Any]
    ) -> list[int]:
        """Executes the items of a batch at these indexes, grouped by shard.

        Writes their replies; returns the indexes of those that must be tried again.
        """
        groups: dict[tuple[int, int], list[tuple[int, Any]]] = {}
        alone: list[int] = []
        turns: dict[str, int] = {}
        for place in places:
            item = items[place]
            try:
                if isinstance(item, Push):
                    found = self.spread.place_in_batch(item, turns)
                    if found is None:
                        alone.append(place)
                    else:
                        groups.setdefault(found, []).append((place, item))
                elif isinstance(item, _BY_RECEIPT):
                    shard, receipt = self._read_receipt(item.receipt)
                    self.shard_of(item.queue)
                    placed = (place, msgspec.structs.replace(item, receipt=receipt))
                    groups.setdefault((shard, 0), []).append(placed)
                else:
                    # A shard refuses it with the proper error.
                    shard = self.shard_of(getattr(item, "queue", None))
                    groups.setdefault((shard, 0), []).append((place, item))
            except PenstockError as error:
                replies[place] = error
        left: list[int] = []

        async def ask_one(shard: int, version: int, placed: list[tuple[int, Any]]) -> None:
            try:
                results = await self.ask(shard, Batch([item for _, item in placed]), version)
            except SpreadChanged:
                left.extend(place for place, _ in placed)
                return
            for (place, item), result in zip(placed, results, strict=True):
                replies[place] = self._item_reply(shard, item, result)

        await gather_all([ask_one(*key, placed) for key, placed in groups.items()])
        for place in alone:
            # One after another, so that pushes of a group keep their order.
            try:
                replies[place] = await self.spread.push(items[place])
            except RequestError as error:
                replies[place] = error
        return sorted(left)

    def _item_reply(self, shard: int, item: Any, result: Any) -> Any:
        """The reply for one item; a receipt of a shard without its queue is not valid."""
        is_missing = isinstance(result, QueueNotFound) and isinstance(item, _BY_RECEIPT)
        return _foreign_receipt() if is_missing and shard != self.shard_of(item.queue) else result

    async def _history(self, command: History) -> Any:
        shard = shard_of_id(command.id, self._settings.identity)
        if shard is None or shard >= self._settings.shards:
            raise MessageNotFound(
                f"id: {str(command.id)[:60]!r} is not the id of a message of this cluster"
            )
        return await self.ask(shard, command)

    # Queues.

    async def _check_known(self, settings: object) -> None:
        """Raises InvalidField for a setting that a node of an older version does not know."""
        names = later_settings_in(settings)
        if names:
            check_settings_known(names, await self._connection.execute(ReadRegisters("node.")))

    async def _create(self, command: CreateQueue) -> QueueInfo:
        await self._check_known(command.settings)
        made = await self._create_dead_letter_queue(command)
        try:
            info = await self.spread.create(command)
        except PenstockError:
            for name in made:
                await self._delete_if_possible(name)
            raise
        return msgspec.structs.replace(info, also_created=made) if made else info

    async def _create_dead_letter_queue(self, command: CreateQueue | ConfigureQueue) -> list[str]:
        """Creates the dead-letter queue in a queue's settings, if its home is another shard.

        Returns the names of the queues that it has created.
        """
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

    async def _delete_if_possible(self, name: str) -> None:
        with suppress(PenstockError):
            await self.ask(self.shard_of(name), DeleteQueue(name))

    async def _configure(self, command: ConfigureQueue) -> QueueInfo:
        await self._check_known(command.settings)
        made = await self._create_dead_letter_queue(command)
        info = await self.spread.configure(command)
        return msgspec.structs.replace(info, also_created=made) if made else info

    async def _describe(self, command: DescribeQueue) -> QueueInfo:
        return without_note(await self.ask(self.shard_of(command.queue), command))

    async def _remove(self, command: DeleteQueue) -> None:
        self.shard_of(command.queue)
        if not command.force:
            await self._describe(DescribeQueue(command.queue))
            infos = await self._describe_all(DescribeQueues(limit=2**31))
            check_unused(
                command.queue,
                [
                    info.queue
                    for info in infos
                    if info.settings.dead_letter == command.queue and info.queue != command.queue
                ],
            )
        await self.spread.remove(command)

    async def _list(self, command: ListQueues) -> list[str]:
        lists = await self._ask_all(command)
        return sorted(set(itertools.chain.from_iterable(lists)))[: command.limit]

    async def _describe_all(self, command: DescribeQueues) -> list[QueueInfo]:
        found: dict[str, QueueInfo] = {}

        async def describe(shard: int) -> None:
            async for page in self._pages(shard, command):
                for info in page:
                    # The description of the home shard takes precedence.
                    if info.queue not in found or self.shard_of(info.queue) == shard:
                        found[info.queue] = without_note(info)

        await gather_all([describe(shard) for shard in range(self._settings.shards)])
        return [found[name] for name in sorted(found)[: command.limit]]

    async def _pages(
        self, shard: int, command: DescribeQueues
    ) -> AsyncIterator[Sequence[QueueInfo]]:
        """The settings of the queues in one shard: other work is done between the pages."""
        if not takes_pages(command):
            yield await self.ask(shard, command)
            return
        count, after = 0, command.after
        while count < command.limit:
            limit = min(command.limit - count, PAGE_QUEUES)
            page = await self.ask(shard, DescribeQueues(command.prefix, after, limit))
            yield page
            if len(page) < limit:
                return
            count, after = count + len(page), page[-1].queue

    async def _ask_all(self, command: Command[R]) -> Sequence[R]:
        shards = range(self._settings.shards)
        return await gather_all(self.ask(shard, command) for shard in shards)

    # Between shards.

    async def push_dead_letter(self, push: Push, source: str | None) -> None:
        """Pushes a dead letter to its queue in another shard; its context names its source."""
        if source is not None:
            context = {**(push.context or {}), SOURCE_NOTE: source}
            push = msgspec.structs.replace(push, context=context)
        await self._push(push)

    async def _redrive(self, command: Redrive) -> int:
        give_up_s = self._loop.time() + COMMAND_TIMEOUT_S
        while self._loop.time() < give_up_s:
            with suppress(SpreadChanged):
                return await self._try_redrive(command)
            await asyncio.sleep(_RETRY_S)
        raise BackendLost(
            f"queue: the spread of {command.queue!r} is being changed, and not all shards answer; "
            "try again later"
        )

    async def _try_redrive(self, command: Redrive) -> int:
        """Redrives within the shard, then moves messages for other shards one by one.

        Raises SpreadChanged before it has changed anything.
        """
        shard = self.shard_of(command.queue)
        check_number("limit", command.limit, 1, 10_000)
        info = await self.spread.describe(command.queue)
        is_here = self.spread.places(command.queue) is None
        if command.to is not None:
            other = await self.spread.describe(command.to)
            if command.to == command.queue:
                raise InvalidField(f"to: {command.queue!r} is the queue the messages are in")
            if other.settings.fifo != info.settings.fifo:
                raise InvalidField(
                    f"to: {command.to!r} and {command.queue!r} must both be fifo, or neither"
                )
            is_here = is_here and self.spread.places(command.to) is None
        # In a fifo queue that is spread, groups may belong to another shard by now.
        is_here = is_here and not (info.settings.fifo and command.to is None)
        if is_here and command.to is not None and self.shard_of(command.to) == shard:
            return await self.ask(shard, command)
        moved = 0
        if command.to is None and is_here:
            try:
                moved = await self.ask(shard, command)
            except InvalidField:
                # No message has a source in this shard; some may have one in another shard.
                await self._check_sources(command.queue)
        elif command.to is None:
            await self._check_sources(command.queue)
        return moved + await self._redrive_between_shards(command, command.limit - moved)

    async def _check_sources(self, queue: str) -> None:
        """Raises InvalidField if no message came from another queue that still exists."""
        ahead = await self._peek(Peek(queue, PEEK_LIMIT_MAX))
        sources = dict.fromkeys(each.source for each in ahead if each.source is not None)
        if ahead and not any([await self._exists(source) for source in sources]):
            raise InvalidField(
                f"to: the messages in {queue!r} were not dead-lettered from a queue that still "
                "exists; name the queue to move them to"
            )

    async def _redrive_between_shards(self, command: Redrive, limit: int) -> int:
        """Pulls, pushes and deletes messages whose target is another shard; how many were moved.

        If it is repeated after a crash, its pushes have the same dedup ids and add nothing.
        """
        carried = 0
        left: list[Claim] = []
        try:
            while carried < limit:
                wanted = min(100, limit - carried)
                claims = await self._pull(Pull(command.queue, wanted, wait_ms=0))
                if not claims:
                    break
                for claim in claims:
                    to = command.to or claim.source
                    if to is None or to == command.queue or not await self._exists(to):
                        left.append(claim)
                        continue
                    await self._push(_pushed_back(claim, to))
                    # If its claim has expired, it is pulled again, and that push adds nothing.
                    with suppress(StaleReceipt):
                        await self._by_receipt(Delete(command.queue, claim.receipt))
                        carried += 1
        finally:
            for claim in left:
                with suppress(PenstockError):
                    await self._by_receipt(Release(command.queue, claim.receipt))
        return carried

    async def _exists(self, queue: str) -> bool:
        try:
            await self.ask(self.shard_of(queue), DescribeQueue(queue))
        except PenstockError:
            return False
        return True


_HANDLERS: Final[Mapping[type, Callable[[Router, Any], Awaitable[Any]]]] = {
    Push: Router._push,
    PushMany: Router._push_many,
    Pull: Router._pull,
    Stats: Router._stats,
    Purge: Router._purge,
    DescribeQueue: Router._describe,
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


def _with_shard(claim: Claim, shard: int) -> Claim:
    """The claim for the caller: its receipt contains the shard."""
    claim = cast(Claim, _with_source(claim))
    return msgspec.structs.replace(claim, proof=f"{shard:03x}-{claim.proof}")


def _with_source(message: Message) -> Message:
    """The message with the source that is in its context, if any."""
    if message.context is None or SOURCE_NOTE not in message.context:
        return message
    context = {name: text for name, text in message.context.items() if name != SOURCE_NOTE}
    source = message.source or message.context[SOURCE_NOTE]
    return msgspec.structs.replace(message, source=source, context=context or None)


def _pushed_back(claim: Claim, to: str) -> Push:
    """The push of a redriven message; if it is repeated, its dedup id makes it add nothing."""
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


def _foreign_receipt() -> InvalidReceipt:
    return InvalidReceipt(
        "receipt: this cluster did not make it for this queue; use the one the pull returned"
    )
