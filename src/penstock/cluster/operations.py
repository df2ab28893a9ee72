"""Operations on a cluster: show its status, move a shard or a queue, drain a node."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeVar

import msgspec
import nats.errors
from nats.aio.client import Client

from penstock.clock import SystemClock
from penstock.cluster.address import SHARDS_MAX, ClusterAddress
from penstock.cluster.jetstream import JetStream, open_client
from penstock.cluster.known_queues import KnownQueues
from penstock.cluster.log import ReadRegister, ReadRegisters, Unanswered
from penstock.cluster.membership import (
    ANY_SHARDS,
    GROWTH,
    ClusterSettings,
    NodeInfo,
    check_settings_known,
    grow,
    read_cluster_settings,
    read_node,
    set_register,
)
from penstock.cluster.node_clock import open_clock
from penstock.cluster.resharding import Growth, Resharding
from penstock.cluster.shard_client import ShardClient
from penstock.cluster.spread_changes import SpreadChanges, SpreadStatus
from penstock.cluster.takeover import owner_key, read_ownership
from penstock.errors import BackendLost, InvalidField
from penstock.service import check_number

T = TypeVar("T")
_ASK_S: Final = 2.0
_MOVE_S: Final = 30.0
_DRAIN_S: Final = 60.0


class ShardStatus(msgspec.Struct, frozen=True):
    """One shard: its owner and term, and how many slots its standby lags."""

    shard: int
    owner: str | None
    is_live: bool
    term: int
    slot: int | None
    waiting_entries: int | None
    queues: int | None
    standby: str | None
    standby_lag: int | None
    unarchived_bytes: int = 0
    archive_error: str = ""
    # How often its owner and its standbys found slots missing in the log.
    gaps: int = 0
    # Why nothing can be appended to its log; empty if it can.
    stall: str = ""


class NodeStatus(msgspec.Struct, frozen=True):
    """One node: whether it answers, and how many shards it has."""

    node: str
    state: str
    is_live: bool
    endpoint: str
    owned: int
    standby: int
    gaps: int
    # How far the clock of its machine is ahead of the time that it uses; 0 if it is about right.
    clock_ahead_ms: int = 0


class ClusterStatus(msgspec.Struct, frozen=True):
    """All nodes and all shards."""

    nodes: list[NodeStatus]
    shards: list[ShardStatus]
    # If the cluster has more shards than it was created with.
    growth: Growth | None = None


class Operator:
    """A connection to a cluster for its operator."""

    def __init__(
        self, client: Client, replicated: JetStream, name: str, settings: ClusterSettings
    ) -> None:
        self._client = client
        self._replicated = replicated
        self._name = name
        self._settings = settings
        # Set before queues are asked for: versions of spreads are made of the time.
        self._now_ms: Callable[[], int] = SystemClock().now_ms

    async def status(self) -> ClusterStatus:
        """The status of all nodes and shards, from the registers and the nodes."""
        nodes = await self._nodes()
        names = list(nodes)
        answers = await asyncio.gather(*(self._node_status(node) for node in names))
        statuses = {n: each for n, each in zip(names, answers, strict=True) if each is not None}
        owners = {
            int(register.key.rpartition(".")[2]): register
            for register in await self._replicated.execute(ReadRegisters("owner."))
        }
        shards = [self._shard(shard, owners, statuses) for shard in range(self._settings.shards)]
        shown = [
            NodeStatus(
                node,
                # A node that was killed could not note in its register that it has stopped.
                info.state if node in statuses else "down",
                node in statuses,
                info.endpoint,
                len(statuses.get(node, {}).get("owned", ())),
                len(statuses.get(node, {}).get("standby", ())),
                sum(_gaps(statuses.get(node, {}), shard) for shard in range(self._settings.shards)),
                statuses.get(node, {}).get("clock_ahead_ms", 0),
            )
            for node, info in nodes.items()
            if info.state != "left"
        ]
        return ClusterStatus(shown, shards, await self._growth())

    async def _growth(self) -> Growth | None:
        """How far the growth of the cluster has come, if it has grown."""
        if not self._settings.created_shards:
            return None
        with suppress(BackendLost, Unanswered, TimeoutError):
            async with asyncio.timeout(_ASK_S), self._asking() as known:
                return await self._resharding(known).progress()
        return Growth(self._settings.homes, self._settings.shards)

    def _shard(
        self, shard: int, owners: dict[int, Any], statuses: dict[str, dict[str, Any]]
    ) -> ShardStatus:
        register = owners.get(shard)
        ownership = read_ownership(register)
        owner = None if ownership is None else ownership.node
        owned = statuses.get(owner or "", {}).get("owned", {}).get(str(shard), {})
        slot = owned.get("slot")
        standby, lag = None, None
        for node, each in statuses.items():
            reached = each["standby"].get(str(shard))
            if reached is not None:
                standby = node
                lag = None if slot is None else max(0, slot - reached["slot"])
        return ShardStatus(
            shard,
            owner,
            bool(owned),
            0 if register is None else register.revision,
            slot,
            owned.get("waiting_entries"),
            owned.get("queues"),
            standby,
            lag,
            owned.get("unarchived_bytes", 0),
            owned.get("archive_error", ""),
            sum(_gaps(each, shard) for each in statuses.values()),
            owned.get("stall", ""),
        )

    async def _nodes(self) -> dict[str, NodeInfo]:
        registers = await self._replicated.execute(ReadRegisters("node."))
        return {each.key.removeprefix("node."): read_node(each) for each in registers}

    async def _node_status(self, node: str) -> dict[str, Any] | None:
        try:
            answer = await self._client.request(
                f"{self._name}.node.{node}.ask", b"status", timeout=_ASK_S
            )
        except (TimeoutError, nats.errors.Error):
            return None
        status: dict[str, Any] = msgspec.json.decode(answer.data)
        return status

    @property
    def shards(self) -> int:
        """How many shards the cluster has."""
        return self._settings.shards

    async def owner(self, shard: int) -> str | None:
        """The node that owns a shard according to its register; it may have stopped."""
        ownership = read_ownership(await self._replicated.execute(ReadRegister(owner_key(shard))))
        return None if ownership is None else ownership.node

    async def move(self, shard: int, node: str) -> None:
        """Moves a shard to a node, and pins it there.

        Raises InvalidField if the shard or node does not exist, BackendLost if it takes too long.
        """
        if not 0 <= shard < self._settings.shards:
            raise InvalidField(f"shard: {shard} is outside 0 to {self._settings.shards - 1}")
        await self._check_node(node)
        await self._replicated.run(set_register(f"pin.{shard}", node.encode()))
        give_up = asyncio.get_running_loop().time() + _MOVE_S
        while True:
            status = await self._node_status(node)
            is_there = status is not None and str(shard) in status["owned"]
            if is_there and await self.owner(shard) == node:
                return
            if asyncio.get_running_loop().time() > give_up:
                raise BackendLost(f"shard {shard}: was not moved to {node!r} in {_MOVE_S:.0f} s")
            await asyncio.sleep(0.05)

    async def drain(self, node: str) -> int:
        """Moves a node's shards to other nodes, and gives it none; how many it still owns.

        Raises InvalidField if the node does not exist, BackendLost if it does not answer.
        """
        await self._check_node(node)
        try:
            answer = await self._client.request(
                f"{self._name}.node.{node}.ask", b"drain", timeout=_DRAIN_S
            )
        except (TimeoutError, nats.errors.Error) as error:
            raise BackendLost(f"node {node!r}: does not answer: {error or 'timeout'}") from error
        return int(answer.data)

    async def spread(self, queue: str, shards: int | None) -> SpreadStatus:
        """Spreads a queue over this many shards; with None, only returns how it is spread.

        Raises InvalidField or QueueNotFound.
        """
        async with self._asking() as known:
            queues = SpreadChanges(known, self._now_ms)
            if shards is None:
                return await queues.status(queue)
            return await queues.spread(queue, shards)

    async def move_queue(self, queue: str, to: Sequence[int]) -> SpreadStatus:
        """Moves a queue to these shards. Raises InvalidField or QueueNotFound."""
        registers = await self._replicated.execute(ReadRegisters("node."))
        check_settings_known([ANY_SHARDS], registers)
        async with self._asking() as known:
            return await SpreadChanges(known, self._now_ms).move(queue, to)

    async def reshard(self, shards: int, moved: Callable[[str], None]) -> Growth:
        """Adds shards until there are so many, and moves the queues that belong to them.

        `moved` is called after each queue. Raises InvalidField, StoreUnusable or BackendLost; what
        was done stays so, and the same call continues.
        """
        check_number("shards", shards, 1, SHARDS_MAX)
        registers = await self._replicated.execute(ReadRegisters("node."))
        check_settings_known([GROWTH], registers)
        if shards > self._settings.shards:
            # The streams first: a node takes a shard as soon as it knows of it.
            await self._replicated.prepare(shards, self._settings.replicas)
        self._settings = await self._replicated.run(grow(shards))
        async with self._asking() as known:
            resharding = self._resharding(known)
            await resharding.wait_for_owners()
            await resharding.place_queues(moved)
            return await resharding.progress()

    def _resharding(self, known: KnownQueues) -> Resharding:
        return Resharding(known, SpreadChanges(known, self._now_ms))

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[KnownQueues]:
        clock = await open_clock(self._replicated, self._settings.shards)
        self._now_ms = clock.now_ms
        shard_client = ShardClient(self._replicated, self._client, self._name)
        await shard_client.open()
        try:
            yield KnownQueues(shard_client, self._settings)
        finally:
            await shard_client.close()

    async def _check_node(self, node: str) -> None:
        nodes = await self._nodes()
        if node not in nodes or nodes[node].state == "left":
            known = ", ".join(name for name, info in nodes.items() if info.state != "left")
            raise InvalidField(f"node: there is no node {node!r}; known nodes: {known or 'none'}")


def _gaps(status: dict[str, Any], shard: int) -> int:
    """How often a node found slots of a shard missing, by its own answer."""
    held = (status.get(kind, {}).get(str(shard), {}) for kind in ("owned", "standby"))
    return sum(each.get("gaps", 0) for each in held)


async def operate(address: ClusterAddress, work: Callable[[Operator], Awaitable[T]]) -> T:
    """Runs `work` with a connection to a cluster. Raises BackendLost if it cannot be reached."""
    client = await open_client(address, "penstock operator")
    try:
        replicated = JetStream(client, address.name)
        try:
            found = await replicated.execute(ReadRegister("cluster"))
        except Unanswered:
            found = None
        if found is None:
            raise BackendLost(f"{address.shown}: there is no cluster named {address.name!r}")
        return await work(Operator(client, replicated, address.name, read_cluster_settings(found)))
    finally:
        await client.close()
