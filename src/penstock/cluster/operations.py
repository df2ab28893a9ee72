"""Operations on a cluster: show its status, move a shard, drain a node, spread a queue."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import msgspec
import nats.errors
from nats.aio.client import Client

from penstock.clock import SystemClock
from penstock.cluster.address import ClusterAddress
from penstock.cluster.asking import ShardAsker
from penstock.cluster.jetstream import JetStream, open_client
from penstock.cluster.known_queues import KnownQueues
from penstock.cluster.log import ReadRegister, ReadRegisters, Unanswered
from penstock.cluster.membership import (
    ClusterSettings,
    NodeInfo,
    read_cluster_settings,
    read_node,
    set_register,
)
from penstock.cluster.owner import owner_key, read_ownership
from penstock.cluster.respreading import Respreading, SpreadStatus
from penstock.errors import BackendLost, InvalidField

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


class NodeStatus(msgspec.Struct, frozen=True):
    """One node: whether it answers, and how many shards it has."""

    node: str
    state: str
    is_live: bool
    endpoint: str
    owned: int
    standby: int
    gaps: int


class ClusterStatus(msgspec.Struct, frozen=True):
    """All nodes and all shards."""

    nodes: list[NodeStatus]
    shards: list[ShardStatus]


class Operator:
    """A connection to a cluster for its operator."""

    def __init__(
        self, client: Client, replicated: JetStream, name: str, settings: ClusterSettings
    ) -> None:
        self._client = client
        self._replicated = replicated
        self._name = name
        self._settings = settings

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
                info.state,
                node in statuses,
                info.endpoint,
                len(statuses.get(node, {}).get("owned", ())),
                len(statuses.get(node, {}).get("standby", ())),
                sum(_gaps(statuses.get(node, {}), shard) for shard in range(self._settings.shards)),
            )
            for node, info in nodes.items()
            if info.state != "left"
        ]
        return ClusterStatus(shown, shards)

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
        asker = ShardAsker(self._replicated, self._client, self._name)
        await asker.open()
        try:
            queues = Respreading(KnownQueues(asker, self._settings.shards), SystemClock().now_ms)
            if shards is None:
                return await queues.status(queue)
            return await queues.spread(queue, shards)
        finally:
            await asker.close()

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
