"""A whole simulated cluster: nodes, clients, streams and network, and the faults of a run.

A seed decides a profile first: how many of each, how lossy the network is, and which faults this
run has. Then clients work while faults occur; then all faults end, the clients finish, and every
queue is drained. A run passes if no rule was broken (`truth`, `lineage`, `ledger`, `nodes`,
`archives`, `placing`), if it comes to its end, and if every push that was answered was drained or
deleted.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.cluster.membership import ClusterSettings, shards_in
from penstock.cluster.placement import first_shard
from penstock.cluster.snapshots import NO_SNAPSHOTS, SnapshotManifest, manifest_key
from penstock.cluster.spread_rules import places_in, spread_of
from penstock.cluster.takeover import owner_key, read_ownership
from penstock.service import DEDUP_WINDOW_MS
from tests.simulation.archives import ClusterArchives
from tests.simulation.clients import SimulatedClient
from tests.simulation.ledger import ClusterLedger
from tests.simulation.lineage import MessageLineage
from tests.simulation.network import SimulatedNetwork
from tests.simulation.nodes import SimulatedNode
from tests.simulation.placing import PlacementRules
from tests.simulation.queues import SimulatedQueue, make_queues
from tests.simulation.schedule import Host, RunSchedule
from tests.simulation.streams import REPLICAS, StreamsModel
from tests.simulation.truth import ShardTruth

IDENTITY: Final = b"simulate"
KEY: Final = b"k" * 32
_END_MS_MAX: Final = 240_000
_ARCHIVED_MS_MAX: Final = 30_000
_ARCHIVE_LOOK_MS: Final = 200
_IDLE_MS: Final = DEDUP_WINDOW_MS + 20_000
_decode_manifest = msgspec.json.Decoder(SnapshotManifest).decode


@dataclass(frozen=True)
class Profile:
    """The parameters of a run, which the seed decides first."""

    nodes: int
    clients: int
    # How many shards there may be.
    shards: int
    busy_ms: int
    think_ms: int
    # The share of messages that are lost, and of those that take very long.
    loss: float
    late: float
    skew_ms_max: int
    fault_every_ms: int
    faults: tuple[str, ...]
    queues: tuple[SimulatedQueue, ...]
    # So many of the clients ask nodes, whose routers execute their commands.
    node_clients: int = 0
    # How long nothing happens between two parts of the run; if it is 0, there is only one part.
    idle_ms: int = 0
    # Which nodes archive their shards: none of them, some, or all.
    archive: str = "none"
    # Whether the nodes choose owners as real ones do.
    is_placed: bool = False
    # With how many shards the cluster is created, if it may grow.
    created_shards: int = 0

    @property
    def homes(self) -> int:
        """With how many shards the cluster is created."""
        return self.created_shards or self.shards

    @property
    def is_calm(self) -> bool:
        """Whether nothing goes wrong: shards only move because an operator wants it."""
        has_faults = any(name not in PLANNED for name in self.faults)
        return self.is_placed and not (has_faults or self.loss or self.late)


def make_profile(schedule: RunSchedule) -> Profile:
    """The profile of a run."""
    chosen = [name for name in FAULTS if schedule.chance() < 0.6]
    shards = schedule.pick([1, 1, 2, 3])
    created_shards = schedule.between(1, shards) if shards > 1 and schedule.chance() < 0.4 else 0
    profile = Profile(
        nodes=schedule.between(2, 4),
        clients=schedule.between(2, 4),
        shards=shards,
        busy_ms=schedule.between(800, 2_500),
        think_ms=schedule.between(5, 50),
        loss=schedule.pick([0.0, 0.0, 0.01, 0.05]),
        late=schedule.pick([0.0, 0.01, 0.03]),
        skew_ms_max=schedule.pick([0, 5, 300]),
        fault_every_ms=schedule.between(60, 300),
        faults=tuple(chosen),
        queues=make_queues(schedule, created_shards or shards, shards),
        node_clients=schedule.below(3),
        idle_ms=_IDLE_MS if shards > 1 and schedule.chance() < 0.08 else 0,
        archive=schedule.pick(["none", "none", "all", "some"]),
        created_shards=created_shards,
    )
    if profile.idle_ms:
        # Nothing is archived then, and looking for that costs most of the run.
        profile = replace(profile, archive="none")
    if schedule.chance() < 0.06:
        # Longer, because a node that is silent counts as live for two seconds.
        busy_ms = schedule.between(3_000, 6_000)
        profile = replace(profile, is_placed=True, idle_ms=0, busy_ms=busy_ms)
        if schedule.chance() < 0.3:
            profile = replace(profile, faults=PLANNED, loss=0.0, late=0.0)
    return profile


class SimulatedCluster:
    """One run."""

    def __init__(
        self,
        seed: int,
        directory: Path,
        node_class: type[SimulatedNode] = SimulatedNode,
        profile: Profile | None = None,
    ) -> None:
        """`node_class` may plant a fault; `profile` replaces the one that the seed decides."""
        self.directory = directory
        self.schedule = schedule = RunSchedule(seed)
        self.profile = profile = profile or make_profile(schedule)
        schedule.note("profile", str(profile))
        # As it was created; it may have grown since.
        self.settings = ClusterSettings(profile.homes, REPLICAS, KEY, IDENTITY)
        self.lineage = lineage = MessageLineage(schedule)
        self.truths = [ShardTruth(schedule, shard, lineage) for shard in range(profile.shards)]
        self.streams = StreamsModel(schedule, profile.shards, self._kept, self._check_purge)
        settings = msgspec.json.encode(self.settings)
        self.streams.registers.publish("cluster", settings, _ignore, after_of_subject=0)
        self.network = SimulatedNetwork(schedule, profile, self.streams)
        self.archives = ClusterArchives(self, directory / "archive")
        self.placement = PlacementRules(self)
        self.router_class = node_class.router_class
        self.is_ending = False
        # Whether all queues were empty at some instant, after the clients have ended.
        self.is_drained = False
        # The newest term of each node and shard.
        self.terms_of: dict[tuple[str, int], int] = {}
        self._node_class = node_class
        self._names = 0
        self.nodes: list[SimulatedNode] = [self._new_node(n) for n in range(profile.nodes)]
        self.ledger = ClusterLedger(self)
        self.clients = [
            SimulatedClient(self, f"client{n}", 0 < n <= profile.node_clients)
            for n in range(profile.clients)
        ]
        self._is_healthy = False

    def _new_node(self, number: int) -> SimulatedNode:
        most = self.profile.skew_ms_max
        skew_ms = self.schedule.below(most + 1) - most // 2
        archive = self.profile.archive
        archives = archive == "all" or (archive == "some" and number % 2 == 0)
        return self._node_class(self, f"node{number}", skew_ms, archives)

    @property
    def shards(self) -> int:
        """How many shards the cluster has now."""
        register = self.streams.register("cluster")
        return self.settings.shards if register is None else shards_in(register)

    def next_name(self, what: str) -> str:
        """A name that was not used in this run."""
        self._names += 1
        return f"{what}-{self._names}"

    # What is kept.

    def _kept(self, shard: int, slot: int, extent: bytes) -> None:
        register = self.streams.register(owner_key(shard))
        ownership = read_ownership(register)
        if register is not None and ownership is not None:
            self.terms_of[ownership.node, shard] = register.revision
        self.truths[shard].keep(slot, extent)

    def _check_purge(self, shard: int, before: int) -> None:
        self.schedule.note("purge", shard, before)
        register = self.streams.register(manifest_key(shard))
        manifest = NO_SNAPSHOTS if register is None else _decode_manifest(register.value)
        start = manifest.start.slot
        if before > len(self.streams.shards[shard].messages) + 1:
            self.schedule.violate(f"shard {shard}: a purge before {before} is above the last slot")
        elif before > start:
            self.schedule.violate(
                f"shard {shard}: slots before {before} are purged, and the snapshots that are "
                f"listed need those from {start} on"
            )
        elif manifest.archived or self.profile.archive == "all":
            self.archives.check_purge(shard, before)

    def check_lost(self, shard: int) -> None:
        """Checks that an owner had a reason to stop: another one has come."""
        if self.profile.is_calm:
            self.schedule.violate(f"shard {shard}: its owner was replaced, and it was not asked")

    # Owners and faults.

    def _owner(self, shard: int) -> SimulatedNode | None:
        """A node that serves the shard and can be reached; the newest if there are several."""
        parts = [node.owned[shard] for node in self.nodes if shard in node.owned]
        usable = [part for part in parts if part.is_serving and _is_usable(part.node)]
        return max(usable, key=lambda part: part.term).node if usable else None

    def _usable_node(self) -> SimulatedNode | None:
        usable = [node for node in self.nodes if _is_usable(node)]
        return self.schedule.pick(usable) if usable else None

    def _direct(self) -> None:
        """Decides which node takes which shard, unless the nodes do, and when to take snapshots."""
        self.schedule.after(self.schedule.between(20, 150), self._direct)
        for shard in range(self.shards):
            owner, node = self._owner(shard), self._usable_node()
            chance = self.schedule.chance()
            if self.profile.is_placed:
                if owner is not None and chance < 0.15 and not self._is_healthy:
                    owner.run(partial(owner.take_snapshot, shard))
                continue
            if node is None:
                continue
            if owner is None:
                if chance < 0.6:
                    node.run(partial(node.take, shard))
            elif chance < 0.25:
                node.run(partial(node.stand_by, shard))
            elif chance < 0.35:
                # Also an owner that was replaced and has not noticed it.
                holder = self.schedule.pick([each for each in self.nodes if shard in each.owned])
                holder.run(partial(holder.check_if_replaced, shard))
            elif chance < 0.5 and not self._is_healthy:
                owner.run(partial(owner.take_snapshot, shard))

    def _fault(self) -> None:
        if self._is_healthy:
            return
        self.schedule.after(self.schedule.between(1, 2 * self.profile.fault_every_ms), self._fault)
        if self.profile.faults:
            name = self.schedule.pick(list(self.profile.faults))
            FAULTS[name](self)

    def _victim(self) -> SimulatedNode:
        """A node for a fault: most often one that owns a shard."""
        owner = self._owner(self.schedule.below(self.shards))
        if owner is not None and self.schedule.chance() < 0.7:
            return owner
        return self.schedule.pick(self.nodes)

    def crash(self) -> None:
        """A node is killed, and started again after a while."""
        node = self._victim()
        if not node.is_stopped:
            self.schedule.note(node.name, "crashes")
            node.stop()
            number = self.nodes.index(node)
            self.schedule.after(self.schedule.between(50, 1_500), partial(self._restart, number))

    def _restart(self, number: int) -> None:
        if self.nodes[number].is_stopped:
            self.nodes[number] = self._new_node(number)
            self.schedule.note(self.nodes[number].name, "starts")

    def replace_node(self, number: int) -> None:
        """Ends a node and starts it again."""
        self.schedule.note(self.nodes[number].name, "is restarted")
        self.nodes[number].stop()
        self._restart(number)

    def pause(self) -> None:
        """A node is suspended, and resumed later: it still acts as the owner of its shards."""
        node = self._victim()
        if not node.is_paused and not node.is_stopped:
            self.schedule.note(node.name, "is paused")
            node.pause()
            self.schedule.after(self.schedule.between(20, 2_500), partial(self._resume, node))

    def _resume(self, node: SimulatedNode) -> None:
        self.schedule.note(node.name, "is resumed")
        node.resume()

    def cut(self) -> None:
        """A node or a client can no longer send, or receive, or both."""
        host: Host = self._victim()
        if self.schedule.chance() < 0.3:
            host = self.schedule.pick(self.clients)
        way = self.schedule.below(3)
        host.is_outbound_cut, host.is_inbound_cut = way != 1, way != 0
        self.schedule.note(host.name, "is cut off", host.is_outbound_cut, host.is_inbound_cut)
        self.schedule.after(self.schedule.between(20, 2_000), partial(self._mend, host))

    def _mend(self, host: Host) -> None:
        host.is_outbound_cut = host.is_inbound_cut = False
        self.schedule.note(host.name, "is connected")

    def take(self) -> None:
        """A node takes a shard from an owner that works, as no real node does."""
        if self.profile.is_placed:
            return
        node, shard = self._usable_node(), self.schedule.below(self.shards)
        if node is not None:
            node.run(partial(node.take, shard))

    def move(self) -> None:
        """A shard is handed over to another node."""
        if self.profile.is_placed:
            self.placement.move()
            return
        shard = self.schedule.below(self.shards)
        owner, node = self._owner(shard), self._usable_node()
        if owner is not None and node is not None and node is not owner:
            then = partial(self._taken_from, owner, node, shard)
            owner.run(partial(owner.hand_over, shard, then))

    def _taken_from(
        self, owner: Host, node: SimulatedNode, shard: int, at: Any, error: Exception | None
    ) -> None:
        if error is None:
            self.network.send(owner, node, partial(node.take, shard, *at))

    def drain_node(self) -> None:
        """A node is drained, if nodes choose owners."""
        if self.profile.is_placed:
            self.placement.drain()

    def fill(self) -> None:
        """The disk of the archives is full for a while."""
        self.schedule.note("archive", "is full")
        self.archives.disk.is_full = True
        self.schedule.after(self.schedule.between(50, 2_000), self._empty)

    def _empty(self) -> None:
        self.schedule.note("archive", "has room")
        self.archives.disk.is_full = False

    def elect(self) -> None:
        """The leader of a stream changes: by request, or because its server was killed."""
        stream = self.schedule.pick(self.streams.every)
        is_killed = self.schedule.chance() < 0.3
        election_ms = self.schedule.between(300, 3_000) if is_killed else 20
        self.schedule.note("election", self.streams.every.index(stream), election_ms)
        stream.change_leader(election_ms)

    def stall(self) -> None:
        """A replica falls behind."""
        stream = self.schedule.pick(self.streams.every)
        replica, for_ms = self.schedule.below(REPLICAS), self.schedule.between(20, 2_000)
        self.schedule.note("stall", self.streams.every.index(stream), replica, for_ms)
        stream.stall(replica, for_ms)

    def damage(self) -> None:
        """A replica of a shard's stream loses messages in the middle, for good."""
        stream = self.schedule.pick(self.streams.shards)
        replica = self.schedule.below(REPLICAS)
        self.schedule.note("damage", replica)
        stream.damage(replica, 1 + self.schedule.below(3))

    # The run.

    def run(self) -> None:
        """Runs to the end, or to the first rule that is broken; `schedule.violation` says which."""
        self.schedule.after(0, self._direct)
        try:
            self._work_and_drain()
            if self.profile.idle_ms:
                self._idle()
                self._work_and_drain()
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends all hosts."""
        for host in (*self.nodes, *self.clients):
            host.stop()

    def _work_and_drain(self) -> None:
        """The clients work while faults occur, and drain all queues once they have ended."""
        schedule = self.schedule
        self._is_healthy = self.is_ending = False
        give_up_ms = schedule.now_ms + _END_MS_MAX
        schedule.after(schedule.below(300), self._fault)
        for client in self.clients:
            schedule.after(schedule.below(50), partial(client.run, client.work))
        schedule.after(self.profile.busy_ms, self._heal)
        while schedule.step():
            if self.is_ending and not any(client.is_working for client in self.clients):
                break
            if schedule.now_ms > give_up_ms:
                schedule.violate("the clients do not finish after all faults have ended")
        if schedule.violation is None:
            self._drain(give_up_ms)
        if schedule.violation is None and self.profile.is_placed:
            self.placement.check_settled()
        if schedule.violation is None and self.profile.archive != "none":
            self._check_archives()

    def _check_archives(self) -> None:
        """Checks that all entries come to be archived, if the owners of their shards do that."""
        give_up_ms = self.schedule.now_ms + _ARCHIVED_MS_MAX
        shards = [*range(self.shards)]
        while shards and self.schedule.now_ms < give_up_ms and self.schedule.violation is None:
            until_ms = self.schedule.now_ms + _ARCHIVE_LOOK_MS
            while self.schedule.now_ms < until_ms and self.schedule.step():
                pass
            shards = [each for each in shards if not self._is_archived(each)]
        for shard in shards:
            self.schedule.violate(f"shard {shard}: is not archived after all faults have ended")
        for shard in range(self.shards):
            self.archives.check_entries(shard)

    def _is_archived(self, shard: int) -> bool:
        """Whether a shard's archive is complete, or its owner has none."""
        owner = self._owner(shard)
        if owner is None:
            return False
        return not owner.archives or self.archives.is_complete(shard)

    def _idle(self) -> None:
        """Nothing happens for longer than dedup ids are kept: changes of spread queues settle."""
        schedule = self.schedule
        schedule.note("clients", "idle")
        until_ms = schedule.now_ms + self.profile.idle_ms
        while schedule.now_ms < until_ms and schedule.step():
            pass
        for queue in self.profile.queues:
            self._check_settled(queue.name)

    def _check_settled(self, name: str) -> None:
        """Checks that a queue is where its home shard says, with the same settings, and nowhere
        else."""
        found = {truth.shard: truth.settings_of(name) for truth in self.truths}
        home = first_shard(name, self.profile.homes)
        settings = found[home]
        if settings is None:
            return
        spread = spread_of(settings)
        places = [home, *places_in(name, spread, self.profile.homes)]
        if spread.before or any(
            each != (settings if shard in places else None) for shard, each in found.items()
        ):
            self.schedule.violate(f"queue {name} is not settled: {spread}, {found}")

    def _heal(self) -> None:
        """All faults end; a replica that lost messages stays so."""
        self.schedule.note("healed")
        self._is_healthy = self.is_ending = True
        self.archives.disk.is_full = False
        for number in range(len(self.nodes)):
            self._restart(number)
            self.nodes[number].resume()
        for host in (*self.nodes, *self.clients):
            host.is_outbound_cut = host.is_inbound_cut = False

    @property
    def is_empty(self) -> bool:
        """Whether every message has ended."""
        return all(truth.is_empty for truth in self.truths)

    def _drain(self, give_up_ms: int) -> None:
        schedule = self.schedule
        left: list[str] = []
        self.is_drained = False

        def drained(queue: str, _: Any, error: Exception | None) -> None:
            left.remove(queue)
            if error is not None:
                schedule.violate(f"draining raised {type(error).__name__}: {error}")

        def drain() -> None:
            for queue in self.profile.queues:
                left.append(queue.name)
                drainer.begin(drainer.drain(queue.name), partial(drained, queue.name))

        drainer = self.clients[0]
        drainer.run(drain)
        while (left or not self.is_empty) and schedule.step():
            self.is_drained = self.is_drained or self.is_empty
            if not left and not self.is_empty:
                # A push was carried out after its client had given it up.
                self.is_drained = False
                drainer.run(drain)
            if schedule.now_ms > give_up_ms:
                schedule.violate("the queues are not drained after all faults have ended")
        if schedule.violation is None:
            self.ledger.check_drained()


def _ignore(reply: Any, error: Exception | None) -> None:
    """The answer to a swap that is only made once."""


def _is_usable(node: SimulatedNode) -> bool:
    return not (node.is_stopped or node.is_paused or node.is_outbound_cut or node.is_inbound_cut)


FAULTS: Final = {
    "crash": SimulatedCluster.crash,
    "pause": SimulatedCluster.pause,
    "cut": SimulatedCluster.cut,
    "take": SimulatedCluster.take,
    "move": SimulatedCluster.move,
    "elect": SimulatedCluster.elect,
    "stall": SimulatedCluster.stall,
    "damage": SimulatedCluster.damage,
    "fill": SimulatedCluster.fill,
    "drain": SimulatedCluster.drain_node,
}
# What an operator does, and no fault.
PLANNED: Final = ("move", "drain")
