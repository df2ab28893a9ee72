"""The choice of owners: which shards a node takes, asks for, and is the standby of.

Every node decides on its own from the same information: the registers (owners, nodes, pins), and
which nodes answer a ping. These nodes are ranked for each shard; the first should own it, the
second is its standby. Wrong information causes an unnecessary takeover and nothing worse: if two
nodes consider themselves the owner of a shard, the replicated log refuses the older one.

    the owner does not answer    the first in rank takes the shard over
    the owner is not the first   the first asks it to hand the shard over, one shard at a time

A node that stops hands its shards over first. A draining node takes no shards. This module uses
only a connection, an event loop and a `ShardHolder`, so that the simulation runs it as it is.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any, Final, Protocol

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from penstock.cluster.jetstream import JetStream
from penstock.cluster.log import ReadRegister, ReadRegisters, Register, Unanswered
from penstock.cluster.membership import (
    LATER_SETTINGS,
    REFUSED_MAX,
    SILENT_S,
    NodeInfo,
    NodeState,
    Peer,
    read_node,
    set_register,
    shards_in,
)
from penstock.cluster.owned_shard import end_tasks
from penstock.cluster.placement import ranked, read_shard
from penstock.cluster.replica import ShardReplica
from penstock.cluster.takeover import read_ownership
from penstock.errors import PenstockError, StoreInUse

# The pause between two rounds. A round pings all nodes and decides which shards this node takes.
_ROUND_S: Final = 0.1
# How long a round waits for answers to its pings. An answer that comes later counts, too.
_PING_S: Final = 0.12
# The pause before the next round while a node has refused fewer than REFUSED_MAX pings.
_REFUSED_S: Final = 0.06
_NAME_TAKEN_S: Final = 0.25
_REGISTERS_S: Final = 1.0
# Shards are moved to the first in rank once the set of nodes has not changed for so long.
_SETTLED_S: Final = 2.0
# After this time the owner is asked again: its answer may be lost, and the shard has no owner then.
_YIELD_S: Final = 3.0
# How long a move waits for the standby to catch up, before other shards are moved.
_CATCH_UP_S: Final = 10.0
_NOT_OWNED: Final = b"? not owned here"
_REQUEST_BYTES_MAX: Final = 100
_FAILURES_MAX: Final = 5
# For how long a node does not take a shard back that it has handed over.
_HANDED_OVER_S: Final = 1.0


class HeldShard(Protocol):
    """A shard that a node owns."""

    @property
    def term(self) -> int:
        """The term of its owner."""
        ...

    def replaced_by(self, term: int) -> None:
        """Stops serving, because the register has an owner of a higher term."""
        ...

    def seen_as_owner(self, at_s: float) -> None:
        """Notes that the register had no owner of a higher term at this time."""
        ...


class ShardHolder(Protocol):
    """The shards that a node owns or is the standby of; `node.ClusterNode` implements it."""

    @property
    def owned(self) -> Mapping[int, HeldShard]:
        """The shards that this node serves."""
        ...

    @property
    def has_new_standby(self) -> bool:
        """Whether a standby has not read its log to the end yet."""
        ...

    def stand_by(self, shard: int) -> None:
        """Makes this node a standby of the shard, if it is not yet."""
        ...

    def resume_standby(self, replica: ShardReplica) -> None:
        """Makes this node a standby again, with a replica that `end_standby` has returned."""
        ...

    def is_standby(self, shard: int) -> bool:
        """Whether this node is a standby of the shard."""
        ...

    async def catch_up(self, shard: int) -> None:
        """Waits until the standby has read what the log has."""
        ...

    def reading_paused(self) -> AbstractContextManager[None]:
        """Has long reads of standbys wait meanwhile: clients wait for a shard without an owner."""
        ...

    async def end_standby(self, shard: int) -> ShardReplica | None:
        """Ends a standby; its replica, if it has one that may be used."""
        ...

    async def drop_standby(self, shard: int) -> None:
        """Ends a standby and discards its replica."""
        ...

    async def take_over(
        self,
        shard: int,
        seen_revision: int,
        seen_slot: int = 0,
        replica: ShardReplica | None = None,
    ) -> None:
        """Takes a shard over and serves it. Raises PenstockError."""
        ...

    async def hand_over(self, shard: int) -> tuple[int, int]:
        """Stops serving a shard; its term and its last slot. Raises PenstockError."""
        ...

    def status(self) -> dict[str, Any]:
        """The state of this node, for `penstock cluster status`."""
        ...


class OwnerChoice:
    """One node's part in the choice of owners."""

    def __init__(
        self,
        node: str,
        replicated: JetStream,
        client: Client,
        name: str,
        shards: int,
        holder: ShardHolder,
    ) -> None:
        """`name` is that of the cluster."""
        self.state: NodeState = "up"
        self.endpoint = ""
        # The last ones, for `penstock cluster status`.
        self.failures: deque[str] = deque(maxlen=_FAILURES_MAX)
        # The nodes that answer pings, and those of them that take shards.
        self.live: frozenset[str] = frozenset()
        self.takers: frozenset[str] = frozenset()
        self._node = node
        self._replicated = replicated
        self._client = client
        self._name = name
        self._shards = shards
        self._holder = holder
        self._loop = asyncio.get_running_loop()
        # All nodes that have a register, and those of them to ping.
        self._nodes: frozenset[str] = frozenset()
        self._peers: dict[str, Peer] = {}
        self._changed_s = self._loop.time()
        self._owners: dict[int, Register] = {}
        # When the request for them was sent.
        self._owners_read_s = -math.inf
        self._pins: dict[int, str] = {}
        self._busy: set[int] = set()
        self._moving: int | None = None
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._subscriptions: list[Subscription] = []
        self._stopping = False
        self._announcing = asyncio.Lock()
        self._has_registers = asyncio.Event()
        # Set when an owner may have changed: the registers are read at once.
        self._read_now = asyncio.Event()
        # Set whenever a shard has left this node, and when the nodes that take shards have changed.
        self._shard_left = asyncio.Event()

    async def join(self) -> None:
        """Joins the cluster; from then on this node takes shards.

        Raises StoreInUse if another node with this name answers: each of the two would take the
        shards of the other for its own.
        """
        subject = f"{self._name}.node.{self._node}"
        with suppress(TimeoutError, nats.errors.Error):
            await self._client.request(f"{subject}.ping", timeout=_NAME_TAKEN_S)
            raise StoreInUse(
                f"node: a node named {self._node!r} is already running; choose another name"
            )
        for listened, take in (
            (f"{subject}.ping", self._answer_ping),
            (f"{subject}.ask", self._answer_request),
            (f"{self._name}.owned.*", self._take_owned),
        ):
            self._subscriptions.append(await self._client.subscribe(listened, cb=take))
        await self.announce("up")
        self._run(self._watch_registers())
        self._run(self._watch_nodes())

    async def announce(self, state: NodeState) -> None:
        """Writes the node's register: its state, and the URL of its endpoint."""
        self.state = state
        # One at a time, with the state of that instant: an earlier announcement that takes long
        # must not replace a later one.
        async with self._announcing:
            value = msgspec.json.encode(NodeInfo(self.state, self.endpoint, LATER_SETTINGS))
            await self._replicated.run(set_register(f"node.{self._node}", value))

    def stop(self) -> None:
        """Takes no more shards."""
        self._stopping = True

    async def end(self) -> None:
        """Ends all tasks and subscriptions at once."""
        self._stopping = True
        await end_tasks([*self._tasks])
        for subscription in self._subscriptions:
            with suppress(Exception):
                await subscription.unsubscribe()

    def _run(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = self._loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.pop(task, None)

    # Messages from other nodes.

    async def _answer_ping(self, message: Msg) -> None:
        await message.respond(self.state.encode())

    async def _take_owned(self, message: Msg) -> None:
        self._read_now.set()

    async def _answer_request(self, message: Msg) -> None:
        """Answers a request of another node, or of `penstock cluster`."""
        text = message.data[:_REQUEST_BYTES_MAX].decode(errors="replace")
        verb, _, rest = text.partition(" ")
        shard = read_shard(rest)
        if verb == "yield" and shard is not None:
            self._run(self._yield(shard, message))
        elif text == "drain":
            self._run(self._drain_for(message))
        elif text == "status":
            await message.respond(msgspec.json.encode(self._holder.status()))
        else:
            await message.respond(b"? unknown request")

    # Which nodes there are.

    async def _watch_nodes(self) -> None:
        """Pings all nodes, again and again; also while the registers cannot be read."""
        await self._has_registers.wait()
        while not self._stopping:
            pings = [self._run(self._ping(node, peer)) for node, peer in self._peers.items()]
            if pings:
                await asyncio.wait(pings, timeout=_PING_S)
            self._count_live()
            self.decide()
            is_refused = any(0 < peer.refused < REFUSED_MAX for peer in self._peers.values())
            await asyncio.sleep(_REFUSED_S if is_refused else _ROUND_S)

    async def _watch_registers(self) -> None:
        """Reads the registers, again and again; at once if an owner may have changed."""
        while not self._stopping:
            self._read_now.clear()
            pause_s = _ROUND_S
            with suppress(Unanswered):
                await self._read_registers()
                # A node that was not known before counts as live until it does not answer.
                self._count_live()
                self._has_registers.set()
                self.decide()
                pause_s = _REGISTERS_S
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._read_now.wait()

    async def _read_registers(self) -> None:
        nodes: dict[str, NodeInfo] = {}
        owners: dict[int, Register] = {}
        pins: dict[int, str] = {}
        asked_s = self._loop.time()
        # Owners first: a node announces itself before it takes shards.
        for kind in ("owner.", "pin.", "node."):
            for register in await self._replicated.execute(ReadRegisters(kind)):
                rest = register.key.removeprefix(kind)
                if kind == "node.":
                    nodes[rest] = read_node(register)
                elif kind == "owner.":
                    owners[int(rest)] = register
                else:
                    pins[int(rest)] = register.value.decode()
        settings = await self._replicated.execute(ReadRegister("cluster"))
        if settings is not None:
            # A replica that lags may show fewer than there are.
            self._shards = max(self._shards, shards_in(settings))
        self._owners, self._pins = owners, pins
        self._owners_read_s = asked_s
        self._nodes = frozenset(nodes)
        for node, info in nodes.items():
            if node == self._node:
                continue
            if info.state == "left":
                self._peers.pop(node, None)
            elif node in self._peers:
                self._peers[node].info = info
            else:
                self._peers[node] = Peer(info)

    async def _ping(self, node: str, peer: Peer) -> None:
        peer.ask(self._loop.time())
        try:
            await self._client.request(f"{self._name}.node.{node}.ping", timeout=SILENT_S)
        except nats.errors.NoRespondersError:
            peer.refused += 1
        except (TimeoutError, nats.errors.Error):
            # `Peer.is_live` counts the time since it was asked.
            pass
        else:
            peer.answer()

    def _count_live(self) -> None:
        now_s = self._loop.time()
        live = {node for node, peer in self._peers.items() if peer.is_live(now_s)}
        self.live = frozenset({*live, self._node})
        takers = {node for node in live if self._peers[node].info.state == "up"}
        if self.state == "up":
            takers.add(self._node)
        if takers != self.takers:
            self.takers = frozenset(takers)
            self._changed_s = now_s
            self._shard_left.set()

    # Which shards this node takes.

    def decide(self) -> None:
        """Starts whatever this node has to do now for each shard."""
        if self._stopping:
            return
        is_settled = self._loop.time() - self._changed_s > _SETTLED_S
        holder = self._holder
        to_follow: list[int] = []
        for shard in range(self._shards):
            if shard in self._busy:
                continue
            if shard in holder.owned:
                # An owner that appends nothing would not notice that it was replaced.
                newest = self._owners.get(shard)
                if newest is not None and newest.revision > holder.owned[shard].term:
                    holder.owned[shard].replaced_by(newest.revision)
                elif newest is not None:
                    holder.owned[shard].seen_as_owner(self._owners_read_s)
                continue
            order = ranked(shard, self.takers, self._pins.get(shard))
            is_first = order[:1] == [self._node]
            register = self._owners.get(shard)
            ownership = read_ownership(register)
            # A shard of this node by its register that is not in `owned` was lost, or was owned
            # before this node was restarted.
            owner = None if ownership is None or ownership.node == self._node else ownership.node
            # An owner whose register was not read yet is not one that has stopped.
            has_stopped = owner in self._nodes and owner not in self.live
            if is_first and (owner is None or has_stopped):
                self._start_work(
                    shard, self._take_over, 0 if register is None else register.revision
                )
            elif is_first and self._moving is None and (is_settled or owner not in self.takers):
                assert owner is not None
                self._moving = shard
                self._start_work(shard, self._request_shard, owner)
            elif self._node in order[:2]:
                to_follow.append(shard)
            elif holder.is_standby(shard):
                self._start_work(shard, holder.drop_standby)
        for shard in to_follow:
            # One at a time, and after all moves: a new standby has a whole log to read, on the
            # event loop that serves the shards of this node.
            if self._moving is None and not holder.has_new_standby:
                holder.stand_by(shard)

    def shard_left(self) -> None:
        """Reads the registers at once: this node has lost a shard."""
        self._shard_left.set()
        self._read_now.set()

    def _start_work(
        self, shard: int, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any
    ) -> None:
        """Starts a task for a shard; until it ends, no other one is started for that shard.

        `work` is called inside the task: if the task is cancelled before its first step, a
        coroutine that was created outside would never be awaited.
        """
        self._busy.add(shard)
        self._run(self._run_exclusively(shard, work, *arguments))

    async def _run_exclusively(
        self, shard: int, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any
    ) -> None:
        try:
            await work(shard, *arguments)
        except PenstockError as error:
            # Another node was first, or the log does not answer. The next round decides again.
            self.failures.append(f"shard {shard}: {error}")
        finally:
            self._busy.discard(shard)

    async def _take_over(
        self,
        shard: int,
        seen_revision: int,
        seen_slot: int = 0,
        replica: ShardReplica | None = None,
    ) -> None:
        try:
            with self._holder.reading_paused():
                await self._holder.take_over(shard, seen_revision, seen_slot, replica)
        except BaseException:
            self._read_now.set()
            raise

    # Planned moves.

    async def _request_shard(self, shard: int, owner: str) -> None:
        """Asks the owner to hand a shard over, once the standby of this node has caught up.

        Until then the owner serves it; little is left to read while the shard has no owner.
        """
        holder = self._holder
        try:
            holder.stand_by(shard)
            try:
                async with asyncio.timeout(_CATCH_UP_S):
                    await holder.catch_up(shard)
            except TimeoutError:
                # The standby continues to read; a later round tries again.
                return
            # Before the owner stops: from then on clients wait.
            replica = await holder.end_standby(shard)
            with holder.reading_paused():
                await self._move_here(shard, owner, replica)
        finally:
            self._moving = None

    async def _move_here(self, shard: int, owner: str, replica: ShardReplica | None) -> None:
        answer = await self._ask_to_yield(shard, owner)
        if answer == _NOT_OWNED:
            # It was handed over to a node that never took it.
            register = self._owners.get(shard)
            revision = 0 if register is None else register.revision
            await self._take_over(shard, revision, replica=replica)
        elif not answer.startswith(b"?"):
            term, slot = map(int, answer.split())
            await self._take_over(shard, term, slot, replica)
        elif replica is not None:
            self._holder.resume_standby(replica)

    async def _ask_to_yield(self, shard: int, owner: str) -> bytes:
        """The owner's answer: its term and last slot once it has stopped, or `?` and a reason."""
        asking = self._loop.create_task(
            self._client.request(
                f"{self._name}.node.{owner}.ask", f"yield {shard}".encode(), timeout=_YIELD_S
            )
        )
        try:
            while not asking.done():
                await asyncio.wait([asking], timeout=_ROUND_S)
                if owner not in self.live:
                    return b"? the owner has stopped"
            return asking.result().data
        except (TimeoutError, nats.errors.Error):
            return b"? no answer"
        finally:
            asking.cancel()

    async def _yield(self, shard: int, message: Msg) -> None:
        """Hands a shard over to the node that asked for it, the next owner."""
        if shard in self._busy:
            await message.respond(b"? busy")
            return
        if shard not in self._holder.owned:
            await message.respond(_NOT_OWNED)
            return
        self._busy.add(shard)
        try:
            with self._holder.reading_paused():
                term, slot = await self._holder.hand_over(shard)
            self._shard_left.set()
            await message.respond(f"{term} {slot}".encode())
        except PenstockError as error:
            await message.respond(f"? {error}".encode())
        finally:
            # This node does not take it back: the next owner is taking it over.
            self._loop.call_later(_HANDED_OVER_S, self._busy.discard, shard)

    async def drain(self) -> None:
        """Announces that this node takes no shards, and waits until the others have its own."""
        await self.announce("draining")
        self.takers -= {self._node}
        while self.takers and self._holder.owned:
            self._shard_left.clear()
            await self._shard_left.wait()

    async def _drain_for(self, message: Msg) -> None:
        await self.drain()
        await message.respond(str(len(self._holder.owned)).encode())
