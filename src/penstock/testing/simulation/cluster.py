"""A whole simulated cluster: nodes, clients, streams and network, and the faults of a run.

A seed decides a profile first: how many of each, how lossy the network is, and which faults this
run has. Then clients work while faults occur; then all faults end, the clients finish, and every
queue is drained. A run passes if no rule was broken (`truth`, `clients`, `nodes`), if it comes to
its end, and if every push that was answered was drained or deleted.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.cluster import calls
from penstock.cluster.log import Append, LogRequest, Unanswered
from penstock.cluster.owner import owner_key, read_ownership
from penstock.cluster.snapshots import SnapshotManifest, manifest_key
from penstock.testing.simulation.clients import ClusterLedger, SimulatedClient
from penstock.testing.simulation.nodes import OwnedPart, SimulatedNode
from penstock.testing.simulation.schedule import Host, Process, RunSchedule
from penstock.testing.simulation.streams import REPLICAS, StreamsModel
from penstock.testing.simulation.truth import GONE, ShardTruth

_APPEND_MS: Final = 500
_REQUEST_MS: Final = 2_000
_END_MS_MAX: Final = 240_000
_decode_manifest = msgspec.json.Decoder(SnapshotManifest).decode


@dataclass(frozen=True)
class Profile:
    """The parameters of a run, which the seed decides first."""

    nodes: int
    clients: int
    shards: int
    busy_ms: int
    think_ms: int
    # The share of messages that are lost, and of those that take very long.
    loss: float
    late: float
    skew_ms_max: int
    fault_every_ms: int
    faults: tuple[str, ...]


def make_profile(schedule: RunSchedule) -> Profile:
    """The profile of a run."""
    chosen = [name for name in FAULTS if schedule.chance() < 0.6]
    return Profile(
        nodes=schedule.between(2, 4),
        clients=schedule.between(2, 4),
        shards=1 + (schedule.chance() < 0.25),
        busy_ms=schedule.between(800, 2_500),
        think_ms=schedule.between(5, 50),
        loss=schedule.pick([0.0, 0.0, 0.01, 0.05]),
        late=schedule.pick([0.0, 0.01, 0.03]),
        skew_ms_max=schedule.pick([0, 5, 300]),
        fault_every_ms=schedule.between(60, 300),
        faults=tuple(chosen),
    )


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
        self.truths = [ShardTruth(schedule, shard) for shard in range(profile.shards)]
        self.streams = StreamsModel(schedule, profile.shards, self._kept, self._check_purge)
        self.is_ending = False
        # The newest term of each node and shard.
        self.terms_of: dict[tuple[str, int], int] = {}
        self._node_class = node_class
        self._names = 0
        self._listeners: dict[tuple[int, int], OwnedPart] = {}
        self.nodes: list[SimulatedNode] = [self._new_node(n) for n in range(profile.nodes)]
        self.ledger = ClusterLedger(self)
        self.clients = [SimulatedClient(self, f"client{n}") for n in range(profile.clients)]
        self._clients_by_name = {client.name: client for client in self.clients}
        self._is_healthy = False

    def _new_node(self, number: int) -> SimulatedNode:
        most = self.profile.skew_ms_max
        skew_ms = self.schedule.below(most + 1) - most // 2
        return self._node_class(self, f"node{number}", skew_ms)

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
        start = 1 if register is None else _decode_manifest(register.value).start.slot
        if before > len(self.streams.shards[shard].messages) + 1:
            self.schedule.violate(f"shard {shard}: a purge before {before} is above the last slot")
        elif before > start:
            self.schedule.violate(
                f"shard {shard}: slots before {before} are purged, and the snapshots that are "
                f"listed need those from {start} on"
            )

    # The network.

    def _transit_ms(self) -> int | None:
        """How long the network takes for a message; None if the message is lost."""
        chance = self.schedule.chance()
        if chance < self.profile.loss:
            return None
        if chance > 1 - self.profile.late:
            return self.schedule.below(self.schedule.pick([60, 800, 3_000]))
        return self.schedule.below(4)

    def request(self, host: Host, process: Process, request: LogRequest[Any]) -> None:
        """Sends a request to the servers and the reply back; or Unanswered, after a time."""
        exchange = _SimulatedExchange(self, host, process)
        limit_ms = _APPEND_MS if type(request) is Append else _REQUEST_MS
        exchange.timer = host.later(limit_ms, exchange.time_out)
        transit_ms = self._transit_ms()
        if transit_ms is not None and not host.is_unheard:
            arrive = partial(self.streams.arrive, request, exchange.answer)
            self.schedule.after(transit_ms, arrive)

    def send(self, sender: Host, receiver: Host, action: Any) -> None:
        """Runs an action on the receiver after a transit time, unless the message is lost."""
        transit_ms = self._transit_ms()
        if transit_ms is not None and not sender.is_unheard and not receiver.is_deaf:
            self.schedule.after(transit_ms, partial(receiver.run, action))

    def call(self, client: SimulatedClient, shard: int, term: int, token: int, data: bytes) -> None:
        """Sends a command to the owner of this term; if there is none, the servers reply that."""
        part = self._listeners.get((shard, term))
        if part is None:
            self.send(client, client, partial(client.take_answer, token, calls.NOT_OWNER))
        else:
            take = partial(part.answers.take, (client.name, token), data)
            self.send(client, part.node, take)

    def answer(self, node: SimulatedNode, client: str, token: int, data: bytes) -> None:
        """Sends an answer to a client."""
        receiver = self._clients_by_name[client]
        self.send(node, receiver, partial(receiver.take_answer, token, data))

    def serving(self, part: OwnedPart) -> None:
        """A node begins to listen, and announces that to the clients."""
        self._listeners[part.shard, part.term] = part
        for client in self.clients:
            self.send(part.node, client, partial(client.take_ownership, part.shard, part.term))

    def silent(self, part: OwnedPart) -> None:
        """A node no longer listens."""
        self._listeners.pop((part.shard, part.term), None)

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
        """Decides which node takes which shard, as real nodes decide for themselves."""
        self.schedule.after(self.schedule.between(20, 150), self._direct)
        for shard in range(self.profile.shards):
            owner, node = self._owner(shard), self._usable_node()
            chance = self.schedule.chance()
            if node is None:
                continue
            if owner is None:
                if chance < 0.6:
                    node.run(partial(node.take, shard))
            elif chance < 0.25:
                node.run(partial(node.stand_by, shard))
            elif chance < 0.35:
                owner.run(partial(owner.look_whether_replaced, shard))
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
        owner = self._owner(self.schedule.below(self.profile.shards))
        if owner is not None and self.schedule.chance() < 0.7:
            return owner
        return self.schedule.pick(self.nodes)  # type: ignore[no-any-return]

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
        host.is_unheard, host.is_deaf = way != 1, way != 0
        self.schedule.note(host.name, "is cut off", host.is_unheard, host.is_deaf)
        self.schedule.after(self.schedule.between(20, 2_000), partial(self._mend, host))

    def _mend(self, host: Host) -> None:
        host.is_unheard = host.is_deaf = False
        self.schedule.note(host.name, "is connected")

    def take(self) -> None:
        """A node takes a shard from an owner that works."""
        node, shard = self._usable_node(), self.schedule.below(self.profile.shards)
        if node is not None:
            node.run(partial(node.take, shard))

    def move(self) -> None:
        """A shard is handed over to another node."""
        shard = self.schedule.below(self.profile.shards)
        owner, node = self._owner(shard), self._usable_node()
        if owner is not None and node is not None and node is not owner:
            then = partial(self._taken_from, owner, node, shard)
            owner.run(partial(owner.hand_over, shard, then))

    def _taken_from(
        self, owner: Host, node: SimulatedNode, shard: int, term: int, slot: int
    ) -> None:
        self.send(owner, node, partial(node.take, shard, term, slot))

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
        schedule = self.schedule
        schedule.after(0, self._direct)
        schedule.after(schedule.below(300), self._fault)
        for client in self.clients:
            schedule.after(schedule.below(50), partial(client.run, client.work))
        schedule.after(self.profile.busy_ms, self._heal)
        while schedule.step():
            if self.is_ending and not any(client.is_working for client in self.clients):
                break
            if schedule.now_ms > _END_MS_MAX:
                schedule.violate("the clients do not finish after all faults have ended")
        if schedule.violation is None:
            self._drain()
        for node in self.nodes:
            node.stop()

    def _heal(self) -> None:
        """All faults end; a replica that lost messages stays so."""
        self.schedule.note("healed")
        self._is_healthy = self.is_ending = True
        for number in range(len(self.nodes)):
            self._restart(number)
            self.nodes[number].resume()
        for host in (*self.nodes, *self.clients):
            host.is_unheard = host.is_deaf = False

    def _drain(self) -> None:
        schedule = self.schedule
        left = list(range(self.profile.shards))

        def drained(shard: int, _: Any, error: Exception | None) -> None:
            left.remove(shard)
            if error is not None:
                schedule.violate(f"draining raised {type(error).__name__}: {error}")

        drainer = self.clients[0]
        for shard in range(self.profile.shards):
            drainer.start("drain", drainer.drain(shard), partial(drained, shard))
        while left and schedule.step():
            if schedule.now_ms > _END_MS_MAX:
                schedule.violate(f"shards {left} are not drained after all faults have ended")
        for (shard, number), body in self.ledger.pushed.items():
            life = self.truths[shard].lives[number]
            if life.state != GONE:
                schedule.violate(f"message {number} ({body!r}) was answered, and is {life.state}")


class _SimulatedExchange:
    """A request to the servers, and its reply."""

    __slots__ = ("_cluster", "_host", "_process", "timer")

    def __init__(self, cluster: SimulatedCluster, host: Host, process: Process) -> None:
        self._cluster = cluster
        self._host = host
        self._process: Process | None = process
        self.timer: Any = None

    def answer(self, reply: Any, error: Exception | None) -> None:
        """The servers reply."""
        transit_ms = self._cluster._transit_ms()
        if transit_ms is not None and not self._host.is_deaf:
            finish = partial(self._host.run, partial(self._finish, reply, error))
            self._cluster.schedule.after(transit_ms, finish)

    def time_out(self) -> None:
        """No reply has come."""
        self._finish(None, Unanswered("no answer"))

    def _finish(self, reply: Any, error: Exception | None) -> None:
        process, self._process = self._process, None
        if process is not None:
            self.timer.cancel()
            process.resume(reply, error)


def _is_usable(node: SimulatedNode) -> bool:
    return not (node.is_stopped or node.is_paused or node.is_unheard or node.is_deaf)


FAULTS: Final = {
    "crash": SimulatedCluster.crash,
    "pause": SimulatedCluster.pause,
    "cut": SimulatedCluster.cut,
    "take": SimulatedCluster.take,
    "move": SimulatedCluster.move,
    "elect": SimulatedCluster.elect,
    "stall": SimulatedCluster.stall,
    "damage": SimulatedCluster.damage,
}
