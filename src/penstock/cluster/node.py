"""A node of the cluster: the shards that it owns, and those for which it is the standby.

`ownership` decides which shards these are. A node that stops hands its shards over first.
"""

import asyncio
import secrets
import shutil
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from penstock.clock import Clock
from penstock.cluster.archive import ShardArchive, permit_purges, shard_directory
from penstock.cluster.jetstream import JetStream
from penstock.cluster.journal import ReplicatedJournal
from penstock.cluster.membership import ClusterSettings
from penstock.cluster.node_clock import NodeClock
from penstock.cluster.node_directory import NodeDirectory
from penstock.cluster.other_shards import OtherShards, maintain_spread_queues
from penstock.cluster.owned_shard import OwnedShard, end_tasks
from penstock.cluster.ownership import OwnerChoice
from penstock.cluster.placement import Elsewhere, read_shard, shard_identity, shard_key
from penstock.cluster.replica import ShardReplica
from penstock.cluster.spread_rules import SpreadGuard
from penstock.cluster.standby import Standby
from penstock.cluster.takeover import take_over
from penstock.errors import PenstockError

_TAKEOVERS_MAX: Final = 8
_DRAIN_S: Final = 10.0
_LEAVE_S: Final = 5.0
# For how long standbys do not read while a shard changes its owner. A shard whose log does not
# answer must not keep the standbys of other shards from reading.
_READING_PAUSED_S: Final = 1.0
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
        directory: NodeDirectory,
        clock: NodeClock,
        own_clock: Clock | None = None,
        archive: Path | None = None,
        archive_revision: int = 0,
    ) -> None:
        """`archive_revision` is that of the archive's register, if there is an `archive`.

        `own_clock` replaces that of all shards.
        """
        self.node = node
        self.owned: dict[int, OwnedShard] = {}
        self._replicated = replicated
        self._client = client
        self._name = name
        self._settings = settings
        self._directory = directory
        self._archive = archive
        self._archive_revision = archive_revision
        self._clock = clock
        self._own_clock = own_clock
        self._loop = asyncio.get_running_loop()
        self._standbys: dict[int, Standby] = {}
        self._reading_paused_until_s: list[float] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._subscription: Subscription | None = None
        self._others: OtherShards | None = None
        self._takeovers = asyncio.Semaphore(_TAKEOVERS_MAX)
        self._stopping = False
        self.choice = OwnerChoice(node, replicated, client, name, settings.shards, self)
        self.failures = self.choice.failures

    async def start(self, others: OtherShards) -> None:
        """Joins the cluster. Raises StoreInUse if another node with this name answers."""
        self._others = others
        await self.choice.join()
        self._subscription = await self._client.subscribe(
            f"{self._name}.grown.*", cb=self._take_grown
        )
        self._run(maintain_spread_queues(self.owned, self._settings.homes, others))

    async def announce(self, endpoint: str) -> None:
        """Publishes the URL of this process's endpoint, for `penstock cluster status`."""
        self.choice.endpoint = endpoint
        await self.choice.announce(self.choice.state)

    def _run(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def status(self) -> dict[str, Any]:
        """The state of this node, for `penstock cluster status`."""
        return {
            "node": self.node,
            "state": self.choice.state,
            "clock_ahead_ms": self._clock.ahead_ms,
            "endpoint": self.choice.endpoint,
            "live": sorted(self.choice.live),
            "takers": sorted(self.choice.takers),
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
                    "stall": owned.stall,
                }
                for shard, owned in sorted(self.owned.items())
            },
            "standby": {
                str(shard): {"slot": standby.replica.next_slot - 1, "gaps": standby.replica.gaps}
                for shard, standby in sorted(self._standbys.items())
            },
            "failures": list(self.failures),
        }

    # Standbys.

    async def _take_grown(self, message: Msg) -> None:
        shard = read_shard(message.subject.rpartition(".")[2])
        standby = None if shard is None else self._standbys.get(shard)
        if standby is not None:
            standby.wake()

    @property
    def has_new_standby(self) -> bool:
        """Whether a standby has not read its log to the end yet."""
        return any(standby.is_new for standby in self._standbys.values())

    def is_standby(self, shard: int) -> bool:
        """Whether this node is a standby of the shard."""
        return shard in self._standbys

    def stand_by(self, shard: int) -> None:
        """Makes this node a standby of the shard, if it is not yet."""
        if shard not in self._standbys:
            self.resume_standby(ShardReplica(shard, self._path(shard)))

    def resume_standby(self, replica: ShardReplica) -> None:
        """Starts a standby with this replica."""

        def failed(error: PenstockError) -> None:
            self.failures.append(f"shard {replica.shard}: {error}")

        # The next standby is started once this one has read its log.
        standby = Standby(
            replica, self._replicated, self.choice.decide, failed, self._is_reading_paused
        )
        self._standbys[replica.shard] = standby

    @contextmanager
    def reading_paused(self) -> Iterator[None]:
        """Has long reads of standbys wait meanwhile, for at most `_READING_PAUSED_S`."""
        until_s = self._loop.time() + _READING_PAUSED_S
        self._reading_paused_until_s.append(until_s)
        try:
            yield
        finally:
            self._reading_paused_until_s.remove(until_s)

    def _is_reading_paused(self) -> bool:
        return self._loop.time() < max(self._reading_paused_until_s, default=0.0)

    async def catch_up(self, shard: int) -> None:
        """Waits until the standby has read everything that was in the log before this call."""
        await self._standbys[shard].catch_up()

    def _path(self, shard: int) -> Path:
        return self._directory.path / f"shard-{shard}-{secrets.token_hex(4)}"

    async def end_standby(self, shard: int) -> ShardReplica | None:
        """Ends a standby; its replica, if it has one that may be used."""
        standby = self._standbys.pop(shard, None)
        return None if standby is None else await standby.end()

    async def drop_standby(self, shard: int) -> None:
        """Ends a standby and discards its replica."""
        replica = await self.end_standby(shard)
        if replica is not None:
            replica.close()
            shutil.rmtree(replica.directory, ignore_errors=True)

    # Owned shards.

    async def take_over(
        self,
        shard: int,
        seen_revision: int,
        seen_slot: int = 0,
        replica: ShardReplica | None = None,
    ) -> None:
        """Takes a shard over and serves it. Raises PenstockError."""
        async with self._takeovers:
            replica = replica or await self.end_standby(shard)
            replica = replica or ShardReplica(shard, self._path(shard))
            try:
                claim_id = secrets.token_hex(8)
                steps = take_over(replica, self.node, claim_id, seen_revision, seen_slot)
                journal = await self._replicated.run(steps)
            except BaseException:
                replica.close()
                shutil.rmtree(replica.directory, ignore_errors=True)
                raise
            settings = self._settings
            engine = replica.engine(
                journal,
                self._make_clock,
                shard_identity(settings.identity, shard),
                shard_key(settings.key, shard),
            )
            archive = self._open_archive(journal)
            guard = SpreadGuard(engine.shard, settings.homes)
            engine.shard.elsewhere = Elsewhere(shard, settings.homes)
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
            await owned.start(self._others, self._archive_revision)

    def _open_archive(self, journal: ReplicatedJournal) -> ShardArchive | None:
        """The archive of a shard, if this node has one. Nothing is purged that is not archived."""
        journal.archived_position = journal.first_position
        if self._archive is None:
            # The shard is served meanwhile.
            self._run(self._replicated.run(permit_purges(journal)))
            return None
        identity = shard_identity(self._settings.identity, journal.shard)
        return ShardArchive(shard_directory(self._archive, journal.shard), identity)

    def _make_clock(self, last_ms: int) -> Clock:
        return self._own_clock or self._clock.for_shard(last_ms)

    async def hand_over(self, shard: int) -> tuple[int, int]:
        """Stops serving a shard; its term and its last slot. Raises NotOwner."""
        owned = self.owned[shard]
        await owned.hand_over()
        self.owned.pop(shard, None)
        self._run(self._redirect(owned))
        return owned.term, owned.journal.slot

    async def _redirect(self, owned: OwnedShard) -> None:
        try:
            await asyncio.sleep(_REDIRECT_S)
        finally:
            await self._discard(owned)

    def _lost(self, owned: OwnedShard, error: PenstockError) -> None:
        """Discards a shard that another node has taken, or whose journal has failed."""
        self.failures.append(f"shard {owned.shard}: {error}")
        if self.owned.get(owned.shard) is owned:
            del self.owned[owned.shard]
        self.choice.shard_left()
        self._run(self._discard(owned))

    async def _discard(self, owned: OwnedShard) -> None:
        await owned.close()
        shutil.rmtree(owned.directory, ignore_errors=True)

    # Ending.

    async def stop(self) -> None:
        """Hands all shards over to the other nodes, if there are any, and leaves the cluster."""
        if self._stopping:
            return
        with suppress(PenstockError, TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                await self.choice.drain()
        self._stopping = True
        self.choice.stop()
        for owned in list(self.owned.values()):
            with suppress(PenstockError):
                await owned.hand_over()
        with suppress(PenstockError, TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await self.choice.announce("left")
        await self.abandon()

    async def abandon(self) -> None:
        """Ends everything at once, without handing over, as a crash would."""
        self._stopping = True
        await self.choice.end()
        await end_tasks(self._tasks)
        for shard in list(self._standbys):
            await self.drop_standby(shard)
        for owned in list(self.owned.values()):
            await self._discard(owned)
        self.owned.clear()
        if self._subscription is not None:
            with suppress(Exception):
                await self._subscription.unsubscribe()
        self._directory.remove()
