"""A node of the cluster: which shards it owns, which it stands by for, and when it takes over.

Every node decides for itself, from the same facts: the registers (who owns what, which nodes there
are), and which nodes answer a ping. The nodes that answer are ranked for each shard; the first
should own it, the second stands by. A wrong view costs a takeover too many and nothing else: two
nodes that both think they own a shard are told apart by the replicated log.

    owner does not answer      the first in rank takes over
    another is first in rank   it asks the owner to hand the shard over, one shard at a time

A node that is stopped hands its shards over first; one that drains takes none.
"""

import asyncio
import secrets
import shutil
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from penstock.clock import Clock, SystemClock
from penstock.cluster.archive import ShardArchive, shard_directory
from penstock.cluster.between import Carrier, tend_spread_queues
from penstock.cluster.jetstream import JetStream
from penstock.cluster.journal import ReplicatedJournal
from penstock.cluster.log import Look, LookAll, Register, Unanswered
from penstock.cluster.membership import (
    ARCHIVE_KEY,
    ARCHIVE_ON,
    REFUSED_MAX,
    SILENT_S,
    ClusterSettings,
    NodeInfo,
    NodeState,
    Peer,
    read_node,
    set_register,
)
from penstock.cluster.owner import read_ownership, take_over
from penstock.cluster.placement import Elsewhere, ranked, shard_identity, shard_key
from penstock.cluster.replica import ShardReplica
from penstock.cluster.serving import OwnedShard, end_tasks
from penstock.cluster.spread import SpreadGuard
from penstock.errors import PenstockError, StoreInUse

_LOOK_S: Final = 0.1
# How long a look waits for the pings it has sent. A ping that was under way when a node was killed
# is never answered; a busy node answers late, which counts as well.
_PING_S: Final = 0.12
# How soon a node is asked again that has refused once.
_REFUSED_S: Final = 0.06
_NAME_TAKEN_S: Final = 0.25
_REGISTERS_S: Final = 1.0
# Without a change of membership for so long, shards are moved to the nodes they belong to.
_SETTLED_S: Final = 2.0
_TAIL_S: Final = 5.0
_TAKEOVERS_MAX: Final = 8
_DRAIN_S: Final = 10.0
_YIELD_S: Final = 15.0
# How long a move waits for the standby to catch up before other shards have their turn.
_CATCH_UP_S: Final = 10.0
_NOT_OWNED: Final = b"? not owned here"
_LEAVE_S: Final = 5.0
# How long a shard that was handed over answers that it is not here any more.
_REDIRECT_S: Final = 2.0


class _Standby:
    """A shard that another node owns, read along with its log."""

    __slots__ = ("caught_up", "replica", "task", "woken")

    def __init__(self, replica: ShardReplica) -> None:
        self.replica = replica
        self.woken = asyncio.Event()
        # Set whenever a reading has come to the end of the log, as it was then.
        self.caught_up = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    async def catch_up(self) -> None:
        """Waits until a reading that begins after this call has come to the end of the log."""
        # One may be under way that began before.
        for _ in range(2):
            self.caught_up.clear()
            self.woken.set()
            await self.caught_up.wait()


class ClusterNode:
    """One process of a cluster that owns shards."""

    def __init__(
        self,
        node: str,
        replicated: JetStream,
        client: Client,
        name: str,
        settings: ClusterSettings,
        directory: Path,
        clock: Clock | None = None,
        archive: Path | None = None,
    ) -> None:
        self.node = node
        self.owned: dict[int, OwnedShard] = {}
        self.failures: list[str] = []
        self._replicated = replicated
        self._client = client
        self._name = name
        self._settings = settings
        self._directory = directory
        self._archive = archive
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._state: NodeState = "up"
        self._endpoint = ""
        self._peers: dict[str, Peer] = {}
        # The nodes that answer, and those of them that take shards.
        self._live: frozenset[str] = frozenset()
        self._takers: frozenset[str] = frozenset()
        self._changed_s = self._loop.time()
        self._owners: dict[int, Register] = {}
        self._pins: dict[int, str] = {}
        self._standbys: dict[int, _Standby] = {}
        self._busy: set[int] = set()
        self._moving: int | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._subscriptions: list[Subscription] = []
        self._carrier: Carrier | None = None
        self._takeovers = asyncio.Semaphore(_TAKEOVERS_MAX)
        self._stopping = False
        self._must_look = asyncio.Event()
        # Set whenever this node owns a shard less.
        self._given_up = asyncio.Event()

    async def start(self, carrier: Carrier) -> None:
        """Joins the cluster; shards come to this node from here on.

        Raises StoreInUse if a node of this name answers already: the two would take each
        other's shards for their own.
        """
        self._carrier = carrier
        with suppress(TimeoutError, nats.errors.Error):
            await self._client.request(f"{self._name}.node.{self.node}.ping", timeout=_NAME_TAKEN_S)
            raise StoreInUse(f"node: a node {self.node!r} runs already; give this one another name")
        for subject, take in (
            (f"{self._name}.node.{self.node}.ping", self._answer_ping),
            (f"{self._name}.node.{self.node}.ask", self._answer_ask),
            (f"{self._name}.grown.*", self._take_grown),
            (f"{self._name}.owned.*", self._take_owned),
        ):
            self._subscriptions.append(await self._client.subscribe(subject, cb=take))
        await self._announce("up")
        self._run(self._keep_looking())
        self._run(tend_spread_queues(self.owned, self._settings.shards, carrier))

    async def announce(self, endpoint: str) -> None:
        """Says where this process answers, for `penstock cluster status`."""
        self._endpoint = endpoint
        await self._announce(self._state)

    async def _announce(self, state: NodeState) -> None:
        self._state = state
        value = msgspec.json.encode(NodeInfo(state, self._endpoint))
        await self._replicated.run(set_register(f"node.{self.node}", value))

    def _run(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # What this node hears.

    async def _answer_ping(self, message: Msg) -> None:
        await message.respond(self._state.encode())

    async def _take_grown(self, message: Msg) -> None:
        standby = self._standbys.get(int(message.subject.rpartition(".")[2]))
        if standby is not None:
            standby.woken.set()

    async def _take_owned(self, message: Msg) -> None:
        self._must_look.set()

    async def _answer_ask(self, message: Msg) -> None:
        """Another node, or the command line, asks for something."""
        words = message.data.decode(errors="replace").split()
        if words[:1] == ["yield"] and len(words) == 2:
            self._run(self._hand_over(int(words[1]), message))
        elif words == ["drain"]:
            self._run(self._drain(message))
        elif words == ["status"]:
            await message.respond(msgspec.json.encode(self.status()))
        else:
            await message.respond(b"? not known")

    def status(self) -> dict[str, Any]:
        """What this node does, for `penstock cluster status`."""
        return {
            "node": self.node,
            "state": self._state,
            "endpoint": self._endpoint,
            "live": sorted(self._live),
            "takers": sorted(self._takers),
            "owned": {
                str(shard): {
                    "term": owned.term,
                    "slot": owned.journal.slot,
                    "position": owned.journal.end_position,
                    "waiting_entries": owned.journal.last_sequence - owned.journal.durable_sequence,
                    "queues": len(owned.engine.shard.names),
                    "gaps": owned.gaps,
                    "unarchived_bytes": owned.unarchived_bytes,
                    "archive_error": owned.archive_error,
                }
                for shard, owned in sorted(self.owned.items())
            },
            "standby": {
                str(shard): {"slot": standby.replica.next_slot - 1, "gaps": standby.replica.gaps}
                for shard, standby in sorted(self._standbys.items())
            },
            "failures": self.failures[-5:],
        }

    # What this node sees.

    async def _keep_looking(self) -> None:
        registers_s = 0.0
        while not self._stopping:
            now_s = self._loop.time()
            with suppress(Unanswered):
                if now_s - registers_s > _REGISTERS_S or self._must_look.is_set():
                    self._must_look.clear()
                    await self._read_registers()
                    registers_s = now_s
            pings = [self._run(self._ping(node, peer)) for node, peer in self._peers.items()]
            if pings:
                await asyncio.wait(pings, timeout=_PING_S)
            self._count_live()
            self._decide()
            is_refused = any(0 < peer.refused < REFUSED_MAX for peer in self._peers.values())
            with suppress(TimeoutError):
                async with asyncio.timeout(_REFUSED_S if is_refused else _LOOK_S):
                    await self._must_look.wait()

    async def _read_registers(self) -> None:
        nodes: dict[str, NodeInfo] = {}
        owners: dict[int, Register] = {}
        pins: dict[int, str] = {}
        for kind in ("node.", "owner.", "pin."):
            for register in await self._replicated.execute(LookAll(kind)):
                rest = register.key.removeprefix(kind)
                if kind == "node.":
                    nodes[rest] = read_node(register)
                elif kind == "owner.":
                    owners[int(rest)] = register
                else:
                    pins[int(rest)] = register.value.decode()
        self._owners, self._pins = owners, pins
        for node, info in nodes.items():
            if node == self.node:
                continue
            if info.state == "left":
                self._peers.pop(node, None)
            elif node in self._peers:
                self._peers[node].info = info
            else:
                self._peers[node] = Peer(info, self._loop.time())

    async def _ping(self, node: str, peer: Peer) -> None:
        try:
            await self._client.request(f"{self._name}.node.{node}.ping", timeout=SILENT_S)
        except nats.errors.NoRespondersError:
            peer.refused += 1
        except (TimeoutError, nats.errors.Error):
            # Silence is judged by when it was last heard of.
            pass
        else:
            peer.refused = 0
            peer.seen_s = self._loop.time()

    def _count_live(self) -> None:
        now_s = self._loop.time()
        live = {node for node, peer in self._peers.items() if peer.is_live(now_s)}
        self._live = frozenset({*live, self.node})
        takers = {node for node in live if self._peers[node].info.state == "up"}
        if self._state == "up":
            takers.add(self.node)
        if takers != self._takers:
            self._takers = frozenset(takers)
            self._changed_s = now_s
            self._given_up.set()

    # What this node does about it.

    def _decide(self) -> None:
        is_settled = self._loop.time() - self._changed_s > _SETTLED_S
        for shard in range(self._settings.shards):
            if shard in self._busy:
                continue
            if shard in self.owned:
                # One that was stopped, and has nothing to append, learns here that it was replaced.
                newest = self._owners.get(shard)
                if newest is not None and newest.revision > self.owned[shard].term:
                    self.owned[shard].replaced_by(newest.revision)
                continue
            order = ranked(shard, self._takers, self._pins.get(shard))
            is_first = order[:1] == [self.node]
            register = self._owners.get(shard)
            ownership = read_ownership(register)
            # What this node owned by the register it has lost since, or before it was started.
            owner = None if ownership is None or ownership.node == self.node else ownership.node
            if is_first and (owner is None or owner not in self._live):
                self._start(shard, self._take, 0 if register is None else register.revision)
            elif is_first and self._moving is None and (is_settled or owner not in self._takers):
                assert owner is not None
                self._moving = shard
                self._start(shard, self._ask_for, owner)
            elif self.node in order[:2]:
                self._stand_by(shard)
            else:
                self._leave_standby(shard)

    def _start(
        self, shard: int, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any
    ) -> None:
        """Starts what is done to a shard, which nothing else is done to until then.

        It is called inside the task: a task that is cancelled before its first step would leave
        a coroutine that was made outside it unawaited.
        """
        self._busy.add(shard)
        self._run(self._then_free(shard, work, *arguments))

    async def _then_free(
        self, shard: int, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any
    ) -> None:
        try:
            await work(shard, *arguments)
        except PenstockError as error:
            # Another node was first, or the log does not answer: the next look decides again.
            self.failures.append(f"shard {shard}: {error}")
        finally:
            self._busy.discard(shard)

    def _stand_by(self, shard: int) -> None:
        if shard not in self._standbys:
            replica = ShardReplica(shard, self._path(shard))
            standby = self._standbys[shard] = _Standby(replica)
            standby.task = self._loop.create_task(self._tail(standby))

    def _path(self, shard: int) -> Path:
        return self._directory / f"shard-{shard}-{secrets.token_hex(4)}"

    async def _tail(self, standby: _Standby) -> None:
        while True:
            try:
                await self._replicated.run(standby.replica.catch_up())
                standby.caught_up.set()
            except PenstockError as error:
                self.failures.append(f"shard {standby.replica.shard}: {error}")
                await asyncio.sleep(1)
            with suppress(TimeoutError):
                async with asyncio.timeout(_TAIL_S):
                    await standby.woken.wait()
            standby.woken.clear()

    async def _end_standby(self, shard: int) -> ShardReplica | None:
        """Ends the reading along; the replica is left as it is."""
        standby = self._standbys.pop(shard, None)
        if standby is None:
            return None
        is_reading = standby.task is not None and not standby.task.done()
        if standby.task is not None:
            await end_tasks([standby.task])
        return standby.replica if is_reading else None

    def _leave_standby(self, shard: int) -> None:
        if shard in self._standbys:
            self._start(shard, self._drop_standby)

    async def _drop_standby(self, shard: int) -> None:
        replica = await self._end_standby(shard)
        if replica is not None:
            replica.close()
            shutil.rmtree(replica.directory, ignore_errors=True)

    async def _take(self, shard: int, seen_revision: int, seen_slot: int = 0) -> None:
        """Takes a shard over and serves it."""
        async with self._takeovers:
            replica = await self._end_standby(shard) or ShardReplica(shard, self._path(shard))
            try:
                claim_id = secrets.token_hex(8)
                steps = take_over(replica, self.node, claim_id, seen_revision, seen_slot)
                journal = await self._replicated.run(steps)
            except BaseException:
                replica.close()
                shutil.rmtree(replica.directory, ignore_errors=True)
                self._must_look.set()
                raise
            settings = self._settings
            engine = replica.engine(
                journal,
                self._make_clock,
                shard_identity(settings.identity, shard),
                shard_key(settings.key, shard),
            )
            archive = await self._open_archive(journal)
            guard = SpreadGuard(engine.shard, settings.shards)
            engine.shard.elsewhere = Elsewhere(shard, settings.shards)
            engine.shard.spread = guard.names
            owned = OwnedShard(
                self._replicated,
                self._client,
                self._name,
                replica,
                journal,
                engine,
                guard,
                archive,
                self._lost,
            )
            self.owned[shard] = owned
            assert self._carrier is not None
            await owned.start(self._carrier)

    async def _open_archive(self, journal: ReplicatedJournal) -> ShardArchive | None:
        """The archive of a shard, if this node has one; if only others do, nothing is purged."""
        if self._archive is not None:
            journal.archived_position = journal.first_position
            identity = shard_identity(self._settings.identity, journal.shard)
            return ShardArchive(shard_directory(self._archive, journal.shard), identity)
        with suppress(Unanswered):
            found = await self._replicated.execute(Look(ARCHIVE_KEY))
            if found is not None and found.value == ARCHIVE_ON:
                journal.archived_position = journal.first_position
        return None

    def _make_clock(self, last_ms: int) -> Clock:
        return self._clock or SystemClock(not_before_ms=last_ms)

    def _lost(self, owned: OwnedShard, error: PenstockError) -> None:
        """A shard was taken by another node, or cannot go on here: its state is discarded."""
        self.failures.append(f"shard {owned.shard}: {error}")
        if self.owned.get(owned.shard) is owned:
            del self.owned[owned.shard]
        self._given_up.set()
        self._must_look.set()
        self._run(self._discard(owned))

    async def _discard(self, owned: OwnedShard) -> None:
        await owned.close()
        shutil.rmtree(owned.directory, ignore_errors=True)

    # Planned moves.

    async def _ask_for(self, shard: int, owner: str) -> None:
        """Has the owner hand a shard over to this node, once the standby here has caught up.

        Until then the owner serves: what is left to read in the pause of the shard is little.
        """
        try:
            self._stand_by(shard)
            try:
                async with asyncio.timeout(_CATCH_UP_S):
                    await self._standbys[shard].catch_up()
            except TimeoutError:
                # It goes on reading; the next look asks again.
                return
            answer = await self._ask_to_yield(shard, owner)
            if answer == _NOT_OWNED:
                # It was handed over to somebody who never took it.
                register = self._owners.get(shard)
                await self._take(shard, 0 if register is None else register.revision)
            elif not answer.startswith(b"?"):
                term, slot = map(int, answer.split())
                await self._take(shard, term, slot)
        finally:
            self._moving = None

    async def _ask_to_yield(self, shard: int, owner: str) -> bytes:
        """The owner's answer once it has ended: its term and its last slot; or `?` and why not."""
        asking = self._loop.create_task(
            self._client.request(
                f"{self._name}.node.{owner}.ask", f"yield {shard}".encode(), timeout=_YIELD_S
            )
        )
        try:
            while not asking.done():
                await asyncio.wait([asking], timeout=_LOOK_S)
                if owner not in self._live:
                    return b"? gone"
            return asking.result().data
        except (TimeoutError, nats.errors.Error):
            return b"? no answer"
        finally:
            asking.cancel()

    async def _hand_over(self, shard: int, message: Msg) -> None:
        """Ends serving a shard and tells the node that asked; it is the next owner."""
        owned = self.owned.get(shard)
        if shard in self._busy:
            await message.respond(b"? busy")
            return
        if owned is None:
            await message.respond(_NOT_OWNED)
            return
        self._busy.add(shard)
        try:
            await owned.hand_over()
            self.owned.pop(shard, None)
            self._given_up.set()
            await message.respond(f"{owned.term} {owned.journal.slot}".encode())
            self._run(self._redirect(owned))
        except PenstockError as error:
            await message.respond(f"? {error}".encode())
        finally:
            # For a moment this node does not want it back: the next owner is taking over.
            self._loop.call_later(1.0, self._busy.discard, shard)

    async def _redirect(self, owned: OwnedShard) -> None:
        try:
            await asyncio.sleep(_REDIRECT_S)
        finally:
            await self._discard(owned)

    async def _drain(self, message: Msg | None = None) -> None:
        """Gives all shards to other nodes and takes none; returns once it has none."""
        await self._announce("draining")
        self._takers -= {self.node}
        while self._takers and self.owned:
            self._given_up.clear()
            await self._given_up.wait()
        if message is not None:
            await message.respond(str(len(self.owned)).encode())

    async def stop(self) -> None:
        """Hands all shards over to the other nodes, if there are any, and leaves the cluster."""
        if self._stopping:
            return
        with suppress(PenstockError, TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                await self._drain()
        self._stopping = True
        for owned in list(self.owned.values()):
            with suppress(PenstockError):
                await owned.hand_over()
        with suppress(PenstockError, TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await self._announce("left")
        await self.abandon()

    async def abandon(self) -> None:
        """Ends everything at once, as a crash would."""
        self._stopping = True
        await end_tasks(self._tasks)
        for shard in list(self._standbys):
            await self._drop_standby(shard)
        for owned in list(self.owned.values()):
            await self._discard(owned)
        self.owned.clear()
        for subscription in self._subscriptions:
            with suppress(Exception):
                await subscription.unsubscribe()
        shutil.rmtree(self._directory, ignore_errors=True)
