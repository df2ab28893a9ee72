"""A node of the cluster: which shards it owns, for which it is the standby, when it takes over.

Every node decides on its own from the same information: the registers (owners, nodes, pins), and
which nodes answer a ping. These nodes are ranked for each shard; the first should own it, the
second is its standby. Wrong information causes an unnecessary takeover and nothing worse: if two
nodes consider themselves the owner of a shard, the replicated log refuses the older one.

    the owner does not answer    the first in rank takes the shard over
    the owner is not the first   the first asks it to hand the shard over, one shard at a time

A node that stops hands its shards over first. A draining node takes no shards.
"""

import asyncio
import secrets
import shutil
from collections import deque
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
from penstock.cluster.jetstream import JetStream
from penstock.cluster.journal import NO_ARCHIVE, ReplicatedJournal
from penstock.cluster.log import ReadRegister, ReadRegisters, Register, Unanswered, until_answered
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
from penstock.cluster.other_shards import OtherShards, maintain_spread_queues
from penstock.cluster.owner import read_ownership, take_over
from penstock.cluster.placement import (
    Elsewhere,
    ranked,
    read_shard,
    shard_identity,
    shard_key,
)
from penstock.cluster.replica import ShardReplica
from penstock.cluster.serving import OwnedShard, end_tasks
from penstock.cluster.spread import SpreadGuard
from penstock.cluster.standby import Standby
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
_TAKEOVERS_MAX: Final = 8
_DRAIN_S: Final = 10.0
_YIELD_S: Final = 15.0
# How long a move waits for the standby to catch up, before other shards are moved.
_CATCH_UP_S: Final = 10.0
_NOT_OWNED: Final = b"? not owned here"
_REQUEST_BYTES_MAX: Final = 100
_FAILURES_MAX: Final = 5
_LEAVE_S: Final = 5.0
# For how long a node answers NOT_OWNER for a shard that it has handed over.
_REDIRECT_S: Final = 2.0


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
        # The last ones, for `penstock cluster status`.
        self.failures: deque[str] = deque(maxlen=_FAILURES_MAX)
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
        # The nodes that answer pings, and those of them that take shards.
        self._live: frozenset[str] = frozenset()
        self._takers: frozenset[str] = frozenset()
        self._changed_s = self._loop.time()
        self._owners: dict[int, Register] = {}
        self._pins: dict[int, str] = {}
        self._standbys: dict[int, Standby] = {}
        self._busy: set[int] = set()
        self._moving: int | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._subscriptions: list[Subscription] = []
        self._others: OtherShards | None = None
        self._takeovers = asyncio.Semaphore(_TAKEOVERS_MAX)
        self._stopping = False
        self._round_now = asyncio.Event()
        # Set whenever a shard has left this node, and when the nodes that take shards have changed.
        self._shard_left = asyncio.Event()

    async def start(self, others: OtherShards) -> None:
        """Joins the cluster; from then on this node takes shards.

        Raises StoreInUse if another node with this name answers: each of the two would take the
        shards of the other for its own.
        """
        self._others = others
        with suppress(TimeoutError, nats.errors.Error):
            await self._client.request(f"{self._name}.node.{self.node}.ping", timeout=_NAME_TAKEN_S)
            raise StoreInUse(
                f"node: a node named {self.node!r} is already running; choose another name"
            )
        for subject, take in (
            (f"{self._name}.node.{self.node}.ping", self._answer_ping),
            (f"{self._name}.node.{self.node}.ask", self._answer_request),
            (f"{self._name}.grown.*", self._take_grown),
            (f"{self._name}.owned.*", self._take_owned),
        ):
            self._subscriptions.append(await self._client.subscribe(subject, cb=take))
        await self._announce("up")
        self._run(self._watch_nodes())
        self._run(maintain_spread_queues(self.owned, self._settings.shards, others))

    async def announce(self, endpoint: str) -> None:
        """Publishes the URL of this process's endpoint, for `penstock cluster status`."""
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

    # Messages from other nodes.

    async def _answer_ping(self, message: Msg) -> None:
        await message.respond(self._state.encode())

    async def _take_grown(self, message: Msg) -> None:
        shard = read_shard(message.subject.rpartition(".")[2])
        standby = None if shard is None else self._standbys.get(shard)
        if standby is not None:
            standby.wake()

    async def _take_owned(self, message: Msg) -> None:
        self._round_now.set()

    async def _answer_request(self, message: Msg) -> None:
        """Answers a request of another node, or of `penstock cluster`."""
        text = message.data[:_REQUEST_BYTES_MAX].decode(errors="replace")
        verb, _, rest = text.partition(" ")
        shard = read_shard(rest)
        if verb == "yield" and shard is not None:
            self._run(self._hand_over(shard, message))
        elif text == "drain":
            self._run(self._drain(message))
        elif text == "status":
            await message.respond(msgspec.json.encode(self.status()))
        else:
            await message.respond(b"? unknown request")

    def status(self) -> dict[str, Any]:
        """The state of this node, for `penstock cluster status`."""
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
            "failures": list(self.failures),
        }

    # Which nodes there are.

    async def _watch_nodes(self) -> None:
        registers_s = 0.0
        while not self._stopping:
            now_s = self._loop.time()
            with suppress(Unanswered):
                if now_s - registers_s > _REGISTERS_S or self._round_now.is_set():
                    self._round_now.clear()
                    await self._read_registers()
                    registers_s = now_s
            pings = [self._run(self._ping(node, peer)) for node, peer in self._peers.items()]
            if pings:
                await asyncio.wait(pings, timeout=_PING_S)
            self._count_live()
            self._decide()
            is_refused = any(0 < peer.refused < REFUSED_MAX for peer in self._peers.values())
            with suppress(TimeoutError):
                async with asyncio.timeout(_REFUSED_S if is_refused else _ROUND_S):
                    await self._round_now.wait()

    async def _read_registers(self) -> None:
        nodes: dict[str, NodeInfo] = {}
        owners: dict[int, Register] = {}
        pins: dict[int, str] = {}
        for kind in ("node.", "owner.", "pin."):
            for register in await self._replicated.execute(ReadRegisters(kind)):
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
            # `Peer.is_live` compares with the time of the last answer.
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
            self._shard_left.set()

    # Which shards this node takes.

    def _decide(self) -> None:
        if self._stopping:
            return
        is_settled = self._loop.time() - self._changed_s > _SETTLED_S
        for shard in range(self._settings.shards):
            if shard in self._busy:
                continue
            if shard in self.owned:
                # An owner that appends nothing would not notice that it was replaced.
                newest = self._owners.get(shard)
                if newest is not None and newest.revision > self.owned[shard].term:
                    self.owned[shard].replaced_by(newest.revision)
                continue
            order = ranked(shard, self._takers, self._pins.get(shard))
            is_first = order[:1] == [self.node]
            register = self._owners.get(shard)
            ownership = read_ownership(register)
            # A shard of this node by its register that is not in `owned` was lost, or was owned
            # before this node was restarted.
            owner = None if ownership is None or ownership.node == self.node else ownership.node
            if is_first and (owner is None or owner not in self._live):
                self._start_work(shard, self._take, 0 if register is None else register.revision)
            elif is_first and self._moving is None and (is_settled or owner not in self._takers):
                assert owner is not None
                self._moving = shard
                self._start_work(shard, self._request_shard, owner)
            elif self.node in order[:2]:
                # One at a time, and not during a move: a new standby has a whole log to read, on
                # the event loop that serves the shards of this node.
                if self._moving is None and not self._has_new_standby():
                    self._stand_by(shard)
            else:
                self._leave_standby(shard)

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

    def _has_new_standby(self) -> bool:
        return any(standby.is_new for standby in self._standbys.values())

    def _stand_by(self, shard: int) -> None:
        if shard not in self._standbys:
            self._start_standby(ShardReplica(shard, self._path(shard)))

    def _start_standby(self, replica: ShardReplica) -> None:
        def failed(error: PenstockError) -> None:
            self.failures.append(f"shard {replica.shard}: {error}")

        # The next standby is started once this one has read its log.
        standby = Standby(replica, self._replicated, self._decide, failed)
        self._standbys[replica.shard] = standby

    def _path(self, shard: int) -> Path:
        return self._directory / f"shard-{shard}-{secrets.token_hex(4)}"

    async def _end_standby(self, shard: int) -> ShardReplica | None:
        """Ends a standby; its replica, if it has one that may be used."""
        standby = self._standbys.pop(shard, None)
        return None if standby is None else await standby.end()

    def _leave_standby(self, shard: int) -> None:
        if shard in self._standbys:
            self._start_work(shard, self._drop_standby)

    async def _drop_standby(self, shard: int) -> None:
        replica = await self._end_standby(shard)
        if replica is not None:
            replica.close()
            shutil.rmtree(replica.directory, ignore_errors=True)

    async def _take(
        self,
        shard: int,
        seen_revision: int,
        seen_slot: int = 0,
        replica: ShardReplica | None = None,
    ) -> None:
        """Takes a shard over and serves it. Raises PenstockError."""
        async with self._takeovers:
            replica = replica or await self._end_standby(shard)
            replica = replica or ShardReplica(shard, self._path(shard))
            try:
                claim_id = secrets.token_hex(8)
                steps = take_over(replica, self.node, claim_id, seen_revision, seen_slot)
                journal = await self._replicated.run(steps)
            except BaseException:
                replica.close()
                shutil.rmtree(replica.directory, ignore_errors=True)
                self._round_now.set()
                raise
            settings = self._settings
            engine = replica.engine(
                journal,
                self._make_clock,
                shard_identity(settings.identity, shard),
                shard_key(settings.key, shard),
            )
            archive = self._open_archive(journal)
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
            assert self._others is not None
            await owned.start(self._others)

    def _open_archive(self, journal: ReplicatedJournal) -> ShardArchive | None:
        """The archive of a shard, if this node has one. Nothing is purged that is not archived."""
        journal.archived_position = journal.first_position
        if self._archive is None:
            self._run(self._permit_purges(journal))
            return None
        identity = shard_identity(self._settings.identity, journal.shard)
        return ShardArchive(shard_directory(self._archive, journal.shard), identity)

    async def _permit_purges(self, journal: ReplicatedJournal) -> None:
        """Lets a shard be purged, unless other nodes archive it; the shard is served meanwhile."""
        steps = until_answered(ReadRegister(ARCHIVE_KEY))
        found: Register | None = await self._replicated.run(steps)
        if found is None or found.value != ARCHIVE_ON:
            journal.archived_position = NO_ARCHIVE

    def _make_clock(self, last_ms: int) -> Clock:
        return self._clock or SystemClock(not_before_ms=last_ms)

    def _lost(self, owned: OwnedShard, error: PenstockError) -> None:
        """Discards a shard that another node has taken, or whose journal has failed."""
        self.failures.append(f"shard {owned.shard}: {error}")
        if self.owned.get(owned.shard) is owned:
            del self.owned[owned.shard]
        self._shard_left.set()
        self._round_now.set()
        self._run(self._discard(owned))

    async def _discard(self, owned: OwnedShard) -> None:
        await owned.close()
        shutil.rmtree(owned.directory, ignore_errors=True)

    # Planned moves.

    async def _request_shard(self, shard: int, owner: str) -> None:
        """Asks the owner to hand a shard over, once the standby of this node has caught up.

        Until then the owner serves it; little is left to read while the shard has no owner.
        """
        try:
            self._stand_by(shard)
            try:
                async with asyncio.timeout(_CATCH_UP_S):
                    await self._standbys[shard].catch_up()
            except TimeoutError:
                # The standby continues to read; a later round tries again.
                return
            # Before the owner stops: from then on clients wait.
            replica = await self._end_standby(shard)
            answer = await self._ask_to_yield(shard, owner)
            if answer == _NOT_OWNED:
                # It was handed over to a node that never took it.
                register = self._owners.get(shard)
                revision = 0 if register is None else register.revision
                await self._take(shard, revision, replica=replica)
            elif not answer.startswith(b"?"):
                term, slot = map(int, answer.split())
                await self._take(shard, term, slot, replica)
            elif replica is not None:
                self._start_standby(replica)
        finally:
            self._moving = None

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
                if owner not in self._live:
                    return b"? the owner has stopped"
            return asking.result().data
        except (TimeoutError, nats.errors.Error):
            return b"? no answer"
        finally:
            asking.cancel()

    async def _hand_over(self, shard: int, message: Msg) -> None:
        """Stops serving a shard and answers the node that asked for it, the next owner."""
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
            self._shard_left.set()
            await message.respond(f"{owned.term} {owned.journal.slot}".encode())
            self._run(self._redirect(owned))
        except PenstockError as error:
            await message.respond(f"? {error}".encode())
        finally:
            # For a second this node does not take it back: the next owner is taking it over.
            self._loop.call_later(1.0, self._busy.discard, shard)

    async def _redirect(self, owned: OwnedShard) -> None:
        try:
            await asyncio.sleep(_REDIRECT_S)
        finally:
            await self._discard(owned)

    async def _drain(self, message: Msg | None = None) -> None:
        """Announces that this node takes no shards, and waits until the others have its own."""
        await self._announce("draining")
        self._takers -= {self.node}
        while self._takers and self.owned:
            self._shard_left.clear()
            await self._shard_left.wait()
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
        """Ends everything at once, without handing over, as a crash would."""
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
