"""A node of the simulated cluster: the real takeovers, engines, answers, snapshots and routers.

Only what starts tasks and uses NATS in `cluster.node` and `cluster.owned_shard` is replaced
here: steps are run by the schedule, and messages go through the simulated network. In most runs it
is random which node takes which shard, and when: any node may take over at any time, and no rule
may be broken by it. In the others the nodes choose owners as real ones do (`placing`). Each node
has a router, which carries dead letters to other shards, tends spread queues, and executes the
commands of clients that ask this node. It may archive the shards that it owns (`archives`).

The methods of the first part may be overridden to plant a fault, which the simulation must find.
"""

import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from penstock.backends.engine.engine import Engine
from penstock.backends.engine.upkeep import Upkeep
from penstock.cluster.archive import keep_archive, permit_purges
from penstock.cluster.journal import ReplicatedJournal
from penstock.cluster.log import LogRequest, LogSteps, Pause, ReadRegister, Register, until_answered
from penstock.cluster.membership import ARCHIVE_KEY, ARCHIVE_ON, set_register
from penstock.cluster.other_shards import deliver_departures, maintain_spread_queues
from penstock.cluster.owned_shard import Caller, ShardServer
from penstock.cluster.ownership import OwnerChoice
from penstock.cluster.placement import Elsewhere, shard_identity, shard_key
from penstock.cluster.replica import ShardReplica
from penstock.cluster.router import Router
from penstock.cluster.sender import Sender, in_slices
from penstock.cluster.snapshots import keep_snapshot
from penstock.cluster.spread_rules import SpreadGuard
from penstock.cluster.stream_copy import MemoryCopy
from penstock.cluster.takeover import append_steps, owner_key, take_over
from penstock.errors import Fenced, NotOwner, PenstockError, StoreUnusable
from penstock.service import Pull
from penstock.wire import shard_protocol as protocol
from tests.simulation.archives import SimulatedArchive
from tests.simulation.network import EPOCH_MS, NAME, RoutingHost
from tests.simulation.placing import SimulatedHolder
from tests.simulation.schedule import Done, Process
from tests.simulation.truth import state_bytes

if TYPE_CHECKING:
    from tests.simulation.cluster import SimulatedCluster

# A mark every few messages, so that a short run purges slots.
MARK_BYTES: Final = 1_500
# The answer to a pull that found nothing, however long it waited.
_NO_CLAIMS: Final = protocol.write_reply(Pull("q"), [])[0]
# How old an answer that changed nothing may be (docs/decisions/142).
_CONFIRMED_MS: Final = 100
_REDIRECT_MS: Final = 500


def endpoint_of(node: str) -> str:
    """The subject on which a node takes the commands of clients that ask it."""
    return f"{NAME}.endpoint.{node}"


class SimulatedClock:
    """The clock of an owner, like `SystemClock`: wall time at the start, then monotonic."""

    def __init__(self, node: "SimulatedNode", last_ms: int) -> None:
        self._schedule = node.schedule
        start_ms = max(EPOCH_MS + self._schedule.now_ms + node.skew_ms, last_ms)
        self._shift_ms = start_ms - self._schedule.now_ms

    def now_ms(self) -> int:
        return self._schedule.now_ms + self._shift_ms

    def timeout_s(self, until_ms: int) -> float | None:
        return max(0, until_ms + 1 - self.now_ms()) / 1_000

    def waiter_timeout_s(self, until_ms: int, *, blocks_thread: bool) -> float | None:
        return self.timeout_s(until_ms)

    def subscribe(self, moved: Callable[[], None]) -> Callable[[], None]:
        return _nothing


class WatchedServer(ShardServer):
    """The server of a shard; stores when each answer was made that changed nothing."""

    made_ms: dict[Caller, int]
    now_ms: Callable[[], int]

    def _send_durable(self, caller: Caller, parts: list[bytes], is_confirmed: bool = True) -> None:
        if is_confirmed:
            self.made_ms[caller] = self.now_ms()
        super()._send_durable(caller, parts, is_confirmed)

    def _send_confirmed(self, caller: Caller, parts: list[bytes]) -> None:
        self.made_ms[caller] = self.now_ms()
        super()._send_confirmed(caller, parts)


class OwnedPart:
    """A shard that a node serves."""

    def __init__(
        self, node: "SimulatedNode", replica: ShardReplica, journal: ReplicatedJournal
    ) -> None:
        self.shard = journal.shard
        self.term = journal.term
        self.node = node
        self.journal = journal
        self.directory = replica.directory
        settings = node.cluster.settings
        self.engine: Engine = replica.engine(
            journal,
            partial(SimulatedClock, node),
            shard_identity(settings.identity, self.shard),
            shard_key(settings.key, self.shard),
        )
        self.guard = SpreadGuard(self.engine.shard, settings.homes)
        self.engine.shard.elsewhere = Elsewhere(self.shard, settings.homes)
        self.engine.shard.spread = self.guard.names
        self._sender = Sender(node.connection)
        self.upkeep = node.make_upkeep(self.engine, journal, self.directory)
        self.made_ms: dict[Caller, int] = {}
        self.appending: Process | None = None
        self.snapshot: Process | None = None
        journal.wake = self._append
        self.server = node.make_server(self)
        self.server.made_ms = self.made_ms
        self.server.now_ms = lambda: node.schedule.now_ms
        # As `ClusterNode` does it.
        journal.archived_position = journal.first_position
        self.archive = node.make_archive(self) if node.archives else None
        self.has_archive_error = False
        self._archiving = node.begin(node.keep_archive(self), self._archived)
        self._carrying = node.begin(node.carry(self), self._carried)
        subject = f"{NAME}.serve.{self.shard}.{self.term}"
        self._listening = node.cluster.network.listen(node, subject, self._take)
        # As `OwnedShard.start` does: a router that gets the announcement can ask the owner.
        node.cluster.network.publish(
            node, f"{NAME}.owned.{self.shard}", str(self.term).encode(), ""
        )

    async def _take(self, message: Any) -> None:
        """A message with commands has come, as in `OwnedShard`."""
        back = message.reply.rpartition(".")[0] + protocol.REPLIES
        async for token, data in in_slices(message.data):
            self.server.receive((back, token), data)

    def _carried(self, _: Any, error: Exception | None) -> None:
        if error is not None:
            self.node.schedule.violate(f"carrying raised {type(error).__name__}: {error}")

    def note_archive_error(self, error: str) -> None:
        """Adds to the trace whether the last attempt to archive has failed."""
        if bool(error) != self.has_archive_error:
            self.has_archive_error = bool(error)
            what = "cannot archive" if error else "archives"
            self.node.schedule.note(self.node.name, what, self.shard)

    def _archived(self, _: Any, error: Exception | None) -> None:
        if error is not None:
            self.node.schedule.violate(f"archiving raised {type(error).__name__}: {error}")

    @property
    def is_serving(self) -> bool:
        """Whether it takes commands."""
        return not self.server.is_closing

    def _append(self) -> None:
        if self.appending is None:
            steps = self.node.append(self.journal)
            # Not at once: this is called within a command of the engine.
            self.node.loop.call_soon(self._start_appending, steps)

    def _start_appending(self, steps: LogSteps[None]) -> None:
        if self.appending is None and self.journal.failure is None:
            self.appending = self.node.start("append", steps, self._appended)
            if self.appending.is_over:
                self.appending = None

    def _appended(self, _: Any, error: Exception | None) -> None:
        self.appending = None
        if error is not None:
            if not isinstance(error, PenstockError):
                self.node.schedule.violate(f"appending raised {type(error).__name__}: {error}")
                return
            self.server.fail(error)
        elif self.journal.has_unsent:
            self._append()
        if self.engine.shard.departed.deliveries:
            self.server.has_departures.set()

    def send(self, subject: str, token: int, data: bytes) -> None:
        """Sends an answer; for `ShardServer`."""
        kind = data[:1]
        if kind in (protocol.REPLY_WHOLE, protocol.REFUSED):
            made_ms = self.made_ms.pop((subject, token), None)
            if made_ms is None and (kind == protocol.REFUSED or data == _NO_CLAIMS):
                made_ms = self.node.schedule.now_ms
            self._check_fresh(made_ms)
        self._sender.send(subject, token, data)

    def _check_fresh(self, made_ms: int | None) -> None:
        replaced_ms = self.node.cluster.truths[self.shard].replaced_ms(self.term)
        if (
            made_ms is not None
            and replaced_ms is not None
            and made_ms > replaced_ms + _CONFIRMED_MS
        ):
            self.node.schedule.violate(
                f"shard {self.shard}: the owner of term {self.term} was replaced at {replaced_ms} "
                f"and sent an answer that it made at {made_ms}"
            )

    def replaced_by(self, term: int) -> None:
        """Stops serving, as `OwnedShard` does: there is an owner of a higher term."""
        text = f"term {self.term} was replaced by term {term}"
        self.server.fail(Fenced(f"shard {self.shard}: {text}"))

    def seen_as_owner(self, at_s: float) -> None:
        """Notes that the register had no later owner, as `OwnedShard` does."""
        self.server.seen_as_owner_s = at_s

    def discard(self) -> None:
        """Discards the state, as `OwnedShard.close` does."""
        self._listening.end()
        self._carrying.cancel()
        self._archiving.cancel()
        if self.archive is not None:
            self.archive.close()
        self.server.stop()
        for process in (self.appending, self.snapshot):
            if process is not None:
                process.end()
                self.node.ended(process)
        self.journal.fail(NotOwner(f"shard {self.shard}: its owner has stopped"))
        closing = self.server.service.close()
        with suppress(StopIteration, PenstockError):
            closing.send(None)
        self.server.leave_unanswered()
        shutil.rmtree(self.directory, ignore_errors=True)


class SimulatedNode(RoutingHost):
    """A process that owns shards."""

    server_class: ClassVar[type[WatchedServer]] = WatchedServer
    # The routers of nodes and of clients.
    router_class: ClassVar[type[Router]] = Router

    def __init__(
        self, cluster: "SimulatedCluster", name: str, skew_ms: int, archives: bool = False
    ) -> None:
        super().__init__(cluster, name, skew_ms)
        self.owned: dict[int, OwnedPart] = {}
        # Whether it archives its shards, and the revision of the archive's register, once known.
        self.archives = archives
        self.archive_revision = 0
        # Chooses owners as real nodes do; None if the run decides by chance.
        self.choice: OwnerChoice | None = None
        # Shards that were lost or handed over and are not discarded yet.
        self._leaving: list[OwnedPart] = []
        self._taking: dict[int, None] = {}
        self._standbys: dict[int, tuple[ShardReplica, Process | None]] = {}

    # A planted fault overrides these.

    def take_over(
        self, replica: ShardReplica, claim_id: str, revision: int, seen_slot: int
    ) -> LogSteps[ReplicatedJournal]:
        """The steps by which this node becomes the owner of a shard."""
        return take_over(replica, self.name, claim_id, revision, seen_slot)

    def append(self, journal: ReplicatedJournal) -> LogSteps[None]:
        """The steps that append the waiting entries of a journal."""
        return append_steps(journal)

    def make_upkeep(self, engine: Engine, journal: ReplicatedJournal, directory: Path) -> Upkeep:
        """The upkeep that takes snapshots of a shard."""
        return Upkeep(engine, journal, directory, None)

    def make_server(self, part: OwnedPart) -> WatchedServer:
        """The object that answers commands to a shard."""
        lost = partial(self._lost, part)
        return self.server_class(part.journal, part.engine, part.guard, part, self.event_loop, lost)

    def keep_snapshot(self, part: OwnedPart, name: str) -> LogSteps[bool]:
        """The steps of a snapshot."""
        return keep_snapshot(part.journal, part.upkeep, part.directory, name)

    def make_archive(self, part: OwnedPart) -> SimulatedArchive:
        """The archive of a shard."""
        return self.cluster.archives.make(part.shard)

    async def keep_archive(self, part: OwnedPart) -> None:
        """Archives a shard; without an archive, permits purges."""
        connection, journal = self.connection, part.journal
        if part.archive is None:
            await connection.run(permit_purges(journal))
        else:
            revision = self.archive_revision
            await keep_archive(connection, journal, part.archive, revision, part.note_archive_error)

    def make_choice(self) -> OwnerChoice:
        """The node's part in the choice of owners."""
        connection, shards = self.connection, self.cluster.settings.shards
        return OwnerChoice(self.name, connection, connection, NAME, shards, SimulatedHolder(self))

    async def carry(self, part: OwnedPart) -> None:
        """Brings dead letters of a shard to other shards."""
        await deliver_departures(part.server, await self.opened_router())

    # Clients that ask this node, and queues that are spread.

    async def _open_router(self) -> Router:
        if self.archives:
            self.archive_revision = await self.connection.run(set_register(ARCHIVE_KEY, ARCHIVE_ON))
        return await super()._open_router()

    @property
    def is_ready(self) -> bool:
        """Whether it may take shards: a node that archives has noted that before."""
        return not self.archives or self.archive_revision > 0

    def _opened(self, router: Any, error: Exception | None) -> None:
        super()._opened(router, error)
        if error is None:
            self.cluster.network.listen(self, endpoint_of(self.name), self._take_request)
            maintenance = maintain_spread_queues(self.owned, self.cluster.settings.homes, router)
            self.begin(maintenance, self._maintenance_ended)
            if self.cluster.profile.is_placed:
                self.choice = self.make_choice()
                self.begin(self.choice.join(), self._joined)

    def _joined(self, _: Any, error: Exception | None) -> None:
        if error is not None:
            self.schedule.violate(f"joining raised {type(error).__name__}: {error}")

    def _maintenance_ended(self, _: Any, error: Exception | None) -> None:
        self.schedule.violate(f"maintenance has ended: {type(error).__name__}: {error}")

    async def _take_request(self, message: Any) -> None:
        self.begin(self._answer_request(message), self._answered_request)

    async def _answer_request(self, message: Any) -> None:
        command, _ = protocol.read_command(message.data[1:])
        router = await self.opened_router()
        try:
            (answer,) = protocol.write_reply(command, await router.execute(command))
        except PenstockError as error:
            answer = protocol.write_error(error)
        self.cluster.network.publish(self, message.reply, answer, "")

    def _answered_request(self, _: Any, error: Exception | None) -> None:
        if error is not None:
            self.schedule.violate(f"a router raised {type(error).__name__}: {error}")

    # Requests.

    def execute(self, process: Process, request: LogRequest[Any]) -> None:
        if type(request) is Pause:
            super().execute(process, request)
        else:
            self.cluster.network.request(self, process, request)

    # Taking over.

    def _replica(self, shard: int) -> ShardReplica:
        path = self.cluster.directory / self.cluster.next_name(f"{self.name}-{shard}")
        return ShardReplica(shard, path, MemoryCopy, MARK_BYTES)

    def stand_by(self, shard: int) -> None:
        """Reads a shard's log up to its current end."""
        if shard in self.owned or shard in self._taking or not self.is_ready:
            return
        replica, process = self._standbys.get(shard, (None, None))
        if process is not None:
            return
        replica = replica or self._replica(shard)
        process = self.start("standby", replica.catch_up(), partial(self._caught_up, shard))
        under_way = None if process.is_over else process
        self._standbys[shard] = (replica, under_way)

    def _caught_up(self, shard: int, _: Any, error: Exception | None) -> None:
        if shard in self._standbys:
            self._standbys[shard] = (self._standbys[shard][0], None)
        if error is not None and not isinstance(error, StoreUnusable):
            self.schedule.violate(f"a standby raised {type(error).__name__}: {error}")

    def is_standby(self, shard: int) -> bool:
        """Whether it has a replica of a shard that it does not own."""
        return shard in self._standbys

    def is_reading(self, shard: int) -> bool:
        """Whether a standby is being read."""
        return self._standbys.get(shard, (None, None))[1] is not None

    def end_standby(self, shard: int) -> ShardReplica | None:
        """Ends a standby; its replica, if there is one."""
        replica, process = self._standbys.pop(shard, (None, None))
        if process is not None:
            process.end()
            self.ended(process)
        return replica

    def resume_standby(self, replica: ShardReplica) -> None:
        """Makes this node a standby again."""
        self._standbys[replica.shard] = (replica, None)

    def take(
        self,
        shard: int,
        revision: int | None = None,
        seen_slot: int = 0,
        replica: ShardReplica | None = None,
        done: Done | None = None,
    ) -> None:
        """Takes a shard over: from any owner, or from one that has sent its term and last slot.

        `done` is called with the journal or the error.
        """
        if shard in self.owned or shard in self._taking or not self.is_ready:
            if done is not None:
                done(None, NotOwner(f"shard {shard}: is being taken, or cannot be"))
            return
        self._taking[shard] = None
        replica = replica or self.end_standby(shard) or self._replica(shard)
        self.schedule.note(self.name, "takes", shard)
        steps = self._take_steps(replica, revision, seen_slot)
        self.start("takeover", steps, partial(self._taken, replica, done))

    def _take_steps(
        self, replica: ShardReplica, seen: int | None, seen_slot: int
    ) -> LogSteps[ReplicatedJournal]:
        revision = seen
        if revision is None:
            register = ReadRegister(owner_key(replica.shard))
            found: Register | None = yield from until_answered(register)
            revision = 0 if found is None else found.revision
        claim_id = self.cluster.next_name("claim")
        return (yield from self.take_over(replica, claim_id, revision, seen_slot))

    def _taken(
        self, replica: ShardReplica, done: Done | None, journal: Any, error: Exception | None
    ) -> None:
        shard = replica.shard
        del self._taking[shard]
        if done is not None:
            self.loop.call_soon(done, journal, error)
        if error is not None:
            self.schedule.note(self.name, "does not take", shard, type(error).__name__)
            if isinstance(error, Fenced):
                self._check_fenced(shard, self._last_term(shard))
            elif not isinstance(error, NotOwner | StoreUnusable):
                self.schedule.violate(f"a takeover raised {type(error).__name__}: {error}")
            replica.close()
            shutil.rmtree(replica.directory, ignore_errors=True)
            return
        self._serve(replica, journal)

    def _last_term(self, shard: int) -> int:
        """The newest term that this node was ever given."""
        return self.cluster.terms_of.get((self.name, shard), 0)

    def _serve(self, replica: ShardReplica, journal: ReplicatedJournal) -> None:
        shard = replica.shard
        truth = self.cluster.truths[shard]
        part = OwnedPart(self, replica, journal)
        if truth.term == journal.term and state_bytes(part.engine.shard) != truth.state():
            self.schedule.violate(
                f"shard {shard}: the owner of term {journal.term} begins with another state than "
                "that of the log"
            )
        self.owned[shard] = part
        self.schedule.note(self.name, "serves", shard, f"term {journal.term}")

    def _check_fenced(self, shard: int, term: int) -> None:
        """Checks that an owner was fenced by another owner, and by nothing else."""
        register = self.cluster.streams.register(owner_key(shard))
        newest = 0 if register is None else register.revision
        if max(newest, self.cluster.truths[shard].term) <= term:
            self.schedule.violate(
                f"shard {shard}: the owner of term {term} stopped as fenced, and there is no later "
                "owner"
            )

    def _lost(self, part: OwnedPart, error: PenstockError) -> None:
        self.schedule.note(self.name, "loses", part.shard, f"term {part.term}", str(error))
        if isinstance(error, Fenced):
            self._check_fenced(part.shard, part.term)
        else:
            self.schedule.violate(f"shard {part.shard}: its owner stopped: {error}")
        if self.owned.get(part.shard) is part:
            # Not of one that was handed over, and may still have had something to append.
            self.cluster.check_lost(part.shard)
        self._leave(part, 1)
        if self.choice is not None:
            self.choice.shard_left()

    def _leave(self, part: OwnedPart, after_ms: int) -> None:
        if self.owned.get(part.shard) is part:
            del self.owned[part.shard]
        if part not in self._leaving:
            self._leaving.append(part)
        self.later(after_ms, partial(self._discard, part))

    def _discard(self, part: OwnedPart) -> None:
        if part in self._leaving:
            self._leaving.remove(part)
            part.discard()

    # Other work on owned shards.

    def check_if_replaced(self, shard: int) -> None:
        """Reads the register of a shard, as nodes do now and then."""
        part = self.owned.get(shard)
        if part is not None:
            steps = until_answered(ReadRegister(owner_key(shard)))
            self.start("read the register", steps, partial(self._register_read, part))

    def _register_read(
        self, part: OwnedPart, found: Register | None, error: Exception | None
    ) -> None:
        if found is not None and found.revision > part.term:
            part.replaced_by(found.revision)

    def take_snapshot(self, shard: int) -> None:
        """Takes a snapshot of a shard, if none is under way."""
        part = self.owned.get(shard)
        if part is None or part.snapshot is not None or not part.is_serving:
            return
        self.schedule.note(self.name, "snapshots", shard)
        steps = self.keep_snapshot(part, self.cluster.next_name("snapshot"))
        process = self.start("snapshot", steps, partial(self._snapshot_ended, part))
        part.snapshot = None if process.is_over else process

    def _snapshot_ended(self, part: OwnedPart, listed: Any, error: Exception | None) -> None:
        part.snapshot = None
        self.schedule.note(self.name, "snapshot ended", part.shard, listed, type(error).__name__)
        if error is not None and not isinstance(error, PenstockError):
            self.schedule.violate(f"a snapshot raised {type(error).__name__}: {error}")

    def hand_over(self, shard: int, done: Done) -> None:
        """Hands a shard over; `done` gets the term and the last slot, or an error."""
        part = self.owned.get(shard)
        if part is None or not part.is_serving:
            done(None, NotOwner(f"shard {shard}: is not served here"))
            return
        self.schedule.note(self.name, "hands over", shard)
        handed_over = partial(self._handed_over, part, done)
        self.start("hand over", part.server.hand_over(), handed_over)

    def _handed_over(self, part: OwnedPart, done: Done, _: Any, error: Exception | None) -> None:
        if error is None and self.owned.get(part.shard) is part:
            self._leave(part, _REDIRECT_MS)
            done((part.term, part.journal.slot), None)
            return
        if error is not None and not isinstance(error, NotOwner):
            self.schedule.violate(f"handing over raised {type(error).__name__}: {error}")
        done(None, error or NotOwner(f"shard {part.shard}: was lost while it was handed over"))

    def stop(self) -> None:
        """Ends the node as a crash would: the locks of its archives end with it."""
        for part in (*self.owned.values(), *self._leaving):
            if part.archive is not None:
                part.archive.crash()
        super().stop()


def _nothing() -> None:
    pass
