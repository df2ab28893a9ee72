"""What people do with a cluster: look at it, move a shard, drain a node, spread a queue."""

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
from penstock.cluster.known import KnownQueues
from penstock.cluster.log import Look, LookAll, Unanswered
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
    """One shard: who owns it since which term, and how far its standby is behind."""

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
    """One node: whether it answers, and what it has."""

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
    """A connection to a cluster for whoever operates it."""

    def __init__(
        self, client: Client, replicated: JetStream, name: str, settings: ClusterSettings
    ) -> None:
        self._client = client
        self._replicated = replicated
        self._name = name
        self._settings = settings

    async def status(self) -> ClusterStatus:
        """What the registers and the nodes say now."""
        nodes = await self._nodes()
        names = list(nodes)
        answers = await asyncio.gather(*(self._ask(node) for node in names))
        told = {n: each for n, each in zip(names, answers, strict=True) if each is not None}
        owners = {
            int(register.key.rpartition(".")[2]): register
            for register in await self._replicated.execute(LookAll("owner."))
        }
        shards = [self._shard(shard, owners, told) for shard in range(self._settings.shards)]
        shown = [
            NodeStatus(
                node,
                info.state,
                node in told,
                info.endpoint,
                len(told.get(node, {}).get("owned", ())),
                len(told.get(node, {}).get("standby", ())),
                sum(_gaps(told.get(node, {}), shard) for shard in range(self._settings.shards)),
            )
            for node, info in nodes.items()
            if info.state != "left"
        ]
        return ClusterStatus(shown, shards)

    def _shard(
        self, shard: int, owners: dict[int, Any], told: dict[str, dict[str, Any]]
    ) -> ShardStatus:
        register = owners.get(shard)
        ownership = read_ownership(register)
        owner = None if ownership is None else ownership.node
        owned = told.get(owner or "", {}).get("owned", {}).get(str(shard), {})
        slot = owned.get("slot")
        standby, lag = None, None
        for node, each in told.items():
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
            sum(_gaps(each, shard) for each in told.values()),
        )

    async def _nodes(self) -> dict[str, NodeInfo]:
        registers = await self._replicated.execute(LookAll("node."))
        return {each.key.removeprefix("node."): read_node(each) for each in registers}

    async def _ask(self, node: str) -> dict[str, Any] | None:
        try:
            answer = await self._client.request(
                f"{self._name}.node.{node}.ask", b"status", timeout=_ASK_S
            )
        except (TimeoutError, nats.errors.Error):
            return None
        told: dict[str, Any] = msgspec.json.decode(answer.data)
        return told

    async def owner(self, shard: int) -> str | None:
        """The node that owns a shard by its register, whether it answers or not."""
        ownership = read_ownership(await self._replicated.execute(Look(owner_key(shard))))
        return None if ownership is None else ownership.node

    async def move(self, shard: int, node: str) -> None:
        """Moves a shard to a node, where it stays while the node lives.

        Raises InvalidField if there is none such, and BackendLost if it takes too long.
        """
        if not 0 <= shard < self._settings.shards:
            raise InvalidField(f"shard: {shard} is outside 0 to {self._settings.shards - 1}")
        await self._check_node(node)
        await self._replicated.run(set_register(f"pin.{shard}", node.encode()))
        give_up = asyncio.get_running_loop().time() + _MOVE_S
        while True:
            told = await self._ask(node)
            is_there = told is not None and str(shard) in told["owned"]
            if is_there and await self.owner(shard) == node:
                return
            if asyncio.get_running_loop().time() > give_up:
                raise BackendLost(f"shard {shard}: did not come to {node!r} in {_MOVE_S:.0f} s")
            await asyncio.sleep(0.05)

    async def drain(self, node: str) -> int:
        """Has a node give its shards to others and take none; how many it could not give away."""
        await self._check_node(node)
        try:
            answer = await self._client.request(
                f"{self._name}.node.{node}.ask", b"drain", timeout=_DRAIN_S
            )
        except (TimeoutError, nats.errors.Error) as error:
            raise BackendLost(f"node {node!r}: does not answer; {error}") from error
        return int(answer.data)

    async def spread(self, queue: str, shards: int | None) -> SpreadStatus:
        """Spreads a queue over so many shards; without a number, says how it is spread.

        Raises InvalidField, or QueueNotFound.
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
            raise InvalidField(f"node: there is no node {node!r}; there are {known or 'none'}")


def _gaps(status: dict[str, Any], shard: int) -> int:
    """How often a node found slots of a shard missing, by its own answer."""
    held = (status.get(kind, {}).get(str(shard), {}) for kind in ("owned", "standby"))
    return sum(each.get("gaps", 0) for each in held)


async def operate(address: ClusterAddress, work: Callable[[Operator], Awaitable[T]]) -> T:
    """Does something with a cluster. Raises BackendLost if there is none."""
    client = await open_client(address, "penstock operator")
    try:
        replicated = JetStream(client, address.name)
        try:
            found = await replicated.execute(Look("cluster"))
        except Unanswered:
            found = None
        if found is None:
            raise BackendLost(f"{address.shown}: there is no cluster {address.name!r} yet")
        return await work(Operator(client, replicated, address.name, read_cluster_settings(found)))
    finally:
        await client.close()
