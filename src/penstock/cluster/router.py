"""The cluster as one queue service: sends each command to the owners of its queue's shards.

`shard_client` finds the owner of a shard and repeats commands; `spread_queues` has the commands of
a queue that may be in several shards. This module has the commands that concern several queues, or
that contain their shard: batches, receipts, lists of all queues, dead letters and redrive.
"""

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final, TypeVar, cast

import msgspec
from nats.aio.client import Client

from penstock.clock import SystemClock
from penstock.cluster.histories import read_history
from penstock.cluster.jetstream import JetStream
from penstock.cluster.known_queues import gather_all
from penstock.cluster.log import ReadRegisters
from penstock.cluster.membership import ClusterSettings, check_settings_known, later_settings_in
from penstock.cluster.origins import as_redriven, as_shown
from penstock.cluster.placement import first_shard, shard_of_id
from penstock.cluster.retry import COMMAND_TIMEOUT_S, next_pause_s
from penstock.cluster.shard_client import ShardClient
from penstock.cluster.spread_pulls import pull_from_shard
from penstock.cluster.spread_queues import SpreadQueues
from penstock.cluster.spread_rules import SpreadChanged, without_note
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
    PART_QUEUES_MAX,
    PEEK_LIMIT_MAX,
    QUEUES_LIMIT_MAX,
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
    PeekFrom,
    PeekIds,
    Pull,
    PullIds,
    Purge,
    Push,
    PushMany,
    PushReply,
    QueueInfo,
    QueueStats,
    Redrive,
    RedriveIds,
    Release,
    ReturnIds,
    Stats,
    check_name,
    check_number,
    check_unused,
    refuse_command,
)

R = TypeVar("R")
# Many more than shards, so that each shard is the first as often as any other.
_TURNS: Final = 1 << 32
# How many messages a redrive may pass by because they have nowhere to go.
_UNMOVED_MAX: Final = 10_000
_BY_RECEIPT: Final = (Delete, Extend, Release)


class Router:
    """An `AsyncQueueService` over all shards of a cluster."""

    LACKS: ClassVar[Mapping[str, str]] = {
        "peek pages": "the shards of a queue have no order in common",
        "by id": "it is not known which shard has a message",
    }
    redrive_max: int = REDRIVE_MAX

    def __init__(
        self,
        shard_client: ShardClient,
        settings: ClusterSettings,
        connection: JetStream,
        now_ms: Callable[[], int] | None = None,
        draw: Callable[[int], int] = secrets.randbelow,
    ) -> None:
        """`connection` is closed with the router; `now_ms` replaces the system clock.

        `draw` gives a random number below its argument.
        """
        self.ask = shard_client.ask
        now_ms = now_ms or SystemClock().now_ms
        self.spread = SpreadQueues(shard_client, settings, now_ms, draw(_TURNS))
        self.finish_spread_change = self.spread.finish_spread_change
        self.remove_stale_copy = self.spread.remove_stale_copy
        self._shard_client = shard_client
        self._settings = settings
        self._connection = connection
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open(
        cls,
        replicated: JetStream,
        client: Client,
        name: str,
        settings: ClusterSettings,
        now_ms: Callable[[], int] | None = None,
        draw: Callable[[int], int] = secrets.randbelow,
    ) -> "Router":
        """Opens a router on a connection, which it closes when it is closed. Raises Unanswered."""
        shard_client = ShardClient(replicated, client, name)
        try:
            await shard_client.open()
        except BaseException:
            await shard_client.close()
            raise
        return cls(shard_client, settings, replicated, now_ms, draw)

    async def close(self) -> None:
        """Ends all commands in progress with EngineClosed, and closes the connection."""
        await self._shard_client.close()
        await self._connection.close()

    def shard_of(self, queue: object) -> int:
        """The home shard of a queue. Raises InvalidField if it is not a valid name."""
        return self.spread.home(queue)

    # Commands.

    async def execute(self, command: Command[R]) -> R:
        """Executes the command, and returns once its changes are in the replicated log."""
        kind = type(command)
        handler = _HANDLERS.get(kind)
        if handler is not None:
            return cast(R, await handler(self, command))
        if not hasattr(command, "queue") or kind in (
            PeekFrom,
            PeekIds,
            PullIds,
            ReturnIds,
            RedriveIds,
        ):
            refuse_command(command, self.LACKS, "a cluster")
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
                claims = await pull_from_shard(self._shard_client, home, command)
                return [_with_shard(claim, home) for claim in claims]
        return [_with_shard(claim, shard) for shard, claim in await self.spread.pull(command)]

    async def _peek(self, command: Peek) -> list[Message]:
        return [as_shown(message) for message in await self.spread.peek(command)]

    async def _stats(self, command: Stats) -> QueueStats:
        return await self.spread.stats(command)

    async def _purge(self, command: Purge) -> int:
        return await self.spread.purge(command)

    async def _by_receipt(self, command: Any) -> Any:
        shard, receipt = await self._read_receipt(command.receipt)
        home = self.shard_of(command.queue)
        try:
            return await self.ask(shard, msgspec.structs.replace(command, receipt=receipt))
        except QueueNotFound:
            if shard == home:
                raise
        # The queue is not, or no longer, in that shard.
        await self.ask(home, DescribeQueue(command.queue))
        raise _foreign_receipt()

    async def _read_receipt(self, receipt: object) -> tuple[int, str]:
        """The shard of a receipt, and the receipt for that shard. Raises InvalidReceipt."""
        shard, dash, rest = str(receipt).partition("-")
        if not dash or len(shard) != 3 or shard.strip("0123456789abcdef"):
            raise _foreign_receipt()
        number = int(shard, 16)
        if not await self.spread.known.has_shard(number):
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
                pause_s = next_pause_s(pause_s)
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
                    shard, receipt = await self._read_receipt(item.receipt)
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
        if shard is None or not await self.spread.known.has_shard(shard):
            raise MessageNotFound(
                f"id: {str(command.id)[:60]!r} is not the id of a message of this cluster"
            )
        identity, shards = self._settings.identity, self._settings.shards
        return await read_history(self.ask, identity, shards, shard, command)

    # Queues.

    async def _check_known(self, settings: object) -> None:
        """Raises InvalidField for a setting that a node of an older version does not know."""
        names = later_settings_in(settings)
        if names:
            check_settings_known(names, await self._connection.execute(ReadRegisters("node.")))

    async def _create(self, command: CreateQueue) -> QueueInfo:
        await self._check_known(command.settings)
        missing = await self._missing_dead_letter(command)
        return await self._also_create(missing, await self.spread.create(command))

    async def _configure(self, command: ConfigureQueue) -> QueueInfo:
        await self._check_known(command.settings)
        missing = await self._missing_dead_letter(command)
        return await self._also_create(missing, await self.spread.configure(command))

    async def _missing_dead_letter(
        self, command: CreateQueue | ConfigureQueue
    ) -> CreateQueue | None:
        """The creation of the dead-letter queue in these settings, if its home is another shard.

        None if it exists, or if its shard is that of its source, which creates both at once.
        """
        settings: Any = command.settings
        dead = settings.get("dead_letter") if type(settings) is dict else None
        if type(dead) is not str or dead == command.queue:
            return None
        shard = self.shard_of(command.queue)
        target = first_shard(check_name(dead, "dead_letter"), self._settings.homes)
        if target == shard:
            return None
        fifo = bool(settings.get("fifo", False))
        if type(command) is ConfigureQueue:
            info = await self.ask(shard, DescribeQueue(command.queue))
            fifo = info.settings.fifo
        try:
            found = await self.ask(target, DescribeQueue(dead))
        except QueueNotFound:
            return CreateQueue(dead, {"fifo": fifo})
        if found.settings.fifo != fifo:
            raise InvalidField(
                f"dead_letter: {command.queue!r} and {dead!r} must both be fifo, or neither"
            )
        return None

    async def _also_create(self, missing: CreateQueue | None, info: QueueInfo) -> QueueInfo:
        """Creates the dead-letter queue of a queue that was created or configured.

        It comes second, so that nothing must be removed if its source is refused. If it fails, its
        dead letters wait in the outbox of their shard, and the repeated command creates it.
        """
        if missing is None:
            return info
        await self.spread.create(missing)
        return msgspec.structs.replace(info, also_created=[missing.queue])

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
        lists = await gather_all(self.ask(home, command) for home in range(self._settings.homes))
        return sorted(set(itertools.chain.from_iterable(lists)))[: command.limit]

    async def _describe_all(self, command: DescribeQueues) -> list[QueueInfo]:
        found: dict[str, QueueInfo] = {}

        async def describe(shard: int) -> None:
            async for page in self._pages(shard, command):
                for info in page:
                    # The description of the home shard takes precedence.
                    if info.queue not in found or self.shard_of(info.queue) == shard:
                        found[info.queue] = without_note(info)

        await gather_all([describe(home) for home in range(self._settings.homes)])
        return [found[name] for name in sorted(found)[: command.limit]]

    async def _pages(
        self, shard: int, command: DescribeQueues
    ) -> AsyncIterator[Sequence[QueueInfo]]:
        """The settings of the queues in one shard: other work is done between the pages."""
        most = command.limit
        if type(most) is not int or not PART_QUEUES_MAX < most <= QUEUES_LIMIT_MAX:
            yield await self.ask(shard, command)
            return
        count, after = 0, command.after
        while count < most:
            limit = min(most - count, PART_QUEUES_MAX)
            page = await self.ask(shard, DescribeQueues(command.prefix, after, limit))
            yield page
            if len(page) < limit:
                return
            count, after = count + len(page), page[-1].queue

    # Between shards.

    async def push_dead_letter(self, push: Push) -> tuple[int, int]:
        """Pushes a dead letter to its queue; its shard and number there."""
        reply = await self._push(push)
        return shard_of_id(reply.id, self._settings.identity) or 0, reply.sequence

    async def _redrive(self, command: Redrive) -> int:
        give_up_s = self._loop.time() + COMMAND_TIMEOUT_S
        pause_s = 0.0
        while self._loop.time() < give_up_s:
            with suppress(SpreadChanged):
                return await self._try_redrive(command)
            await asyncio.sleep(pause_s)
            pause_s = next_pause_s(pause_s)
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
        # The receipts of claims that were not moved; a redrive that ends releases them.
        held: dict[str, None] = {}
        try:
            while carried < limit:
                wanted = min(100, limit - carried)
                pulled = await self.spread.pull(Pull(command.queue, wanted, wait_ms=0))
                if not pulled:
                    break
                claims = [(claim.id, _with_shard(claim, place)) for place, claim in pulled]
                held.update((claim.receipt, None) for _, claim in claims)
                for local_id, claim in claims:
                    to = command.to or claim.source
                    if to is None or to == command.queue:
                        continue
                    try:
                        await self._push(pushed_back(claim, to, local_id))
                    except QueueNotFound:
                        if to == command.to and not carried:
                            raise
                        if to == command.to:
                            # The next redrive says so: this one has moved some.
                            return carried
                        continue
                    del held[claim.receipt]
                    # If its claim has expired, it is pulled again, and that push adds nothing.
                    with suppress(StaleReceipt):
                        await self._by_receipt(Delete(command.queue, claim.receipt))
                        carried += 1
                if len(held) > _UNMOVED_MAX:
                    break
        finally:
            await self._release_if_possible(command.queue, [*held])
        if not carried and len(held) > _UNMOVED_MAX:
            raise InvalidField(
                f"to: the first {len(held)} messages in {command.queue!r} were not dead-lettered "
                "from a queue that still exists; name the queue to move them to"
            )
        return carried

    async def _release_if_possible(self, queue: str, receipts: list[str]) -> None:
        """Releases claims; those that cannot be released now end when they run out."""
        with suppress(PenstockError):
            for at in range(0, len(receipts), BATCH_ITEMS_MAX):
                some = receipts[at : at + BATCH_ITEMS_MAX]
                await self._batch(Batch([Release(queue, receipt) for receipt in some]))

    async def _exists(self, queue: str) -> bool:
        try:
            await self.ask(self.shard_of(queue), DescribeQueue(queue))
        except QueueNotFound:
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
    claim = as_shown(claim)
    return msgspec.structs.replace(claim, proof=f"{shard:03x}-{claim.proof}")


def pushed_back(claim: Claim, to: str, local_id: str) -> Push:
    """The push of a redriven message; if it is repeated, its dedup id makes it add nothing.

    That is made of its id in the shard it leaves: it gets another one whenever it comes back.
    """
    push = Push(
        to,
        claim.body,
        delay_ms=0,
        priority=claim.priority,
        dedup_id=f"redriven-{local_id}",
        group=claim.group,
        attributes=claim.attributes or None,
        context=claim.context,
    )
    return as_redriven(push, claim)


def _foreign_receipt() -> InvalidReceipt:
    return InvalidReceipt(
        "receipt: this cluster did not make it for this queue; use the one the pull returned"
    )
