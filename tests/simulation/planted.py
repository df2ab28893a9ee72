"""Nodes with a fault planted into them, each of which the simulation has to find."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.backends.engine.upkeep import Upkeep
from penstock.backends.loop import Pending
from penstock.cluster.extent import BrokenChain, ChainPoint, Extent, pack_extent, split_entries
from penstock.cluster.journal import NO_ARCHIVE, ReplicatedJournal
from penstock.cluster.log import (
    RETRY_MS,
    Append,
    Bounds,
    LogRequest,
    Mismatch,
    Pause,
    PurgeSlots,
    Unanswered,
    until_answered,
)
from penstock.cluster.membership import NodeInfo, set_register
from penstock.cluster.other_shards import deliver_departures
from penstock.cluster.ownership import OwnerChoice
from penstock.cluster.replica import ShardReplica
from penstock.cluster.router import Router, pushed_back
from penstock.cluster.snapshots import keep_snapshot, list_snapshot, put_chunks
from penstock.cluster.spread_queues import SpreadQueues
from penstock.cluster.spread_rules import SpreadGuard
from penstock.cluster.takeover import Ownership, append_extent, read_ownership, swap_ownership
from penstock.core.events import Claimed
from penstock.errors import Fenced, StaleReceipt
from penstock.journal.snapshot import pack_dedups, snapshot_paths
from penstock.service import Delete, Pull, Redrive
from penstock.wire import shard_protocol as protocol
from tests.simulation.archives import SimulatedArchive
from tests.simulation.nodes import MARK_BYTES, SimulatedNode, WatchedServer


@dataclass(frozen=True)
class SeveralRequests(LogRequest[list[Any]]):
    """Requests that are under way at once; the reply is a list of replies and errors."""

    requests: tuple[LogRequest[Any], ...]


class OneOfSeveral:
    """One of several requests that some steps wait for."""

    def __init__(self, outcomes, index, done):
        self.outcomes = outcomes
        self.index = index
        self.done = done

    def resume(self, reply, error):
        self.outcomes[self.index] = (reply, error)
        if None not in self.outcomes:
            self.done(self.outcomes)


class TwoAppendsInFlight(SimulatedNode):
    """Sends the next extent before the one before it is known to be kept: a window of two."""

    def append(self, journal):
        while True:
            first = next_entry(journal)
            if first is None:
                return
            first_ends, journal._sent_position = journal._sending_ends, journal._sending_ends[1]
            requests = [Append(journal.shard, journal.slot, first)]
            ends = [first_ends]
            if journal._unsent:
                journal._sending = None
                requests.append(Append(journal.shard, journal.slot + 1, next_entry(journal)))
                ends.append(journal._sending_ends)
            outcomes = yield SeveralRequests(tuple(requests))
            for request, end, (slot, error) in zip(requests, ends, outcomes, strict=True):
                if error is not None and request is requests[0] and outcomes[-1][1] is None:
                    continue
                if error is not None:
                    slot = yield from append_extent(
                        journal.shard, journal.term, journal.slot, request.extent
                    )
                journal._sending, journal._sending_ends = request.extent, end
                journal.kept(slot)

    def execute(self, process, request):
        if type(request) is not SeveralRequests:
            super().execute(process, request)
            return
        outcomes = [None] * len(request.requests)
        done = lambda found: process.resume(found, None)  # noqa: E731
        for index, each in enumerate(request.requests):
            waiting: Any = OneOfSeveral(outcomes, index, done)
            self.cluster.network.request(self, waiting, each)


def next_entry(journal):
    """An extent of one entry, or of none if only the ownership is to be proved."""
    if journal._sending is None and journal.has_unsent:
        later = [journal._unsent.pop() for _ in range(max(0, len(journal._unsent) - 1))]
        waiting = journal._confirming
        journal._sending = journal._make_extent()
        journal._confirming = waiting + journal._confirming
        journal._unsent.extend(reversed(later))
    return journal._sending


def append_with(journal, on_mismatch):
    """Appends as `takeover.append_steps` does, but for what a refusal is taken for."""
    while (extent := journal.next_extent()) is not None:
        after = journal.slot
        slot = None
        while slot is None:
            try:
                slot = yield Append(journal.shard, after, extent)
            except Unanswered:
                yield Pause(RETRY_MS)
            except Mismatch:
                after, slot = yield from on_mismatch(journal, after)
        journal.kept(slot)


class RefusalIsAFence(SimulatedNode):
    """Treats error 10071 as the proof that there is another owner."""

    def append(self, journal):
        def stop(journal, after):
            yield Pause(0)
            journal.fail(Fenced("refused"))
            raise Fenced("refused")

        return append_with(journal, stop)


class RefusalIsIgnored(SimulatedNode):
    """Treats error 10071 as the answer to its own earlier attempt."""

    def append(self, journal):
        def take_for_kept(journal, after):
            yield Pause(0)
            return after, after + 1

        return append_with(journal, take_for_kept)


class RefusalMeansTheNextSlot(SimulatedNode):
    """After error 10071, appends after the last slot that is there by then."""

    def append(self, journal):
        def go_on_behind(journal, after):
            bounds = yield from until_answered(Bounds(journal.shard))
            return max(after, bounds.last), None

        return append_with(journal, go_on_behind)


def open_term(replica, node, claim_id, revision):
    """The first part of a takeover: the term, and the slot that opens it."""
    value = msgspec.json.encode(Ownership(node, claim_id))
    term = yield from swap_ownership(replica.shard, value, revision)
    opening = pack_extent(Extent(replica.shard, term, 0, 0, node.encode(), opens_term=True))
    bounds = yield from until_answered(Bounds(replica.shard))
    slot = yield from append_extent(replica.shard, term, bounds.last, opening)
    return term, slot


class ServesBeforeItHasReplayed(SimulatedNode):
    """Serves with what the replica that answered knew, and not with all up to its own term."""

    def take_over(self, replica, claim_id, revision, seen_slot):
        term, slot = yield from open_term(replica, self.name, claim_id, revision)
        yield from replica.catch_up()
        chain = replica._chain
        end = ChainPoint(slot + 1, chain.position, chain.sequence, term)
        return ReplicatedJournal(
            replica.shard, term, replica._contents, end, replica._marks, MARK_BYTES
        )


class TakesOverWithoutOpeningATerm(SimulatedNode):
    """Reads the log to its end and serves: the owner before it can still append."""

    def take_over(self, replica, claim_id, revision, seen_slot):
        value = msgspec.json.encode(Ownership(self.name, claim_id))
        term = yield from swap_ownership(replica.shard, value, revision)
        bounds = yield from until_answered(Bounds(replica.shard))
        yield from replica.catch_up(bounds.last)
        chain = replica._chain
        chain.term = term
        end = ChainPoint(chain.slot, chain.position, chain.sequence, term)
        return ReplicatedJournal(
            replica.shard, term, replica._contents, end, replica._marks, MARK_BYTES
        )


class UpkeepWithoutDedups(Upkeep):
    def _take_dedups(self, number, first, end, outline):
        return pack_dedups(number, [])


class SnapshotsOmitDedupIds(SimulatedNode):
    """Leaves the dedup window out of snapshots."""

    def make_upkeep(self, engine, journal, directory):
        return UpkeepWithoutDedups(engine, journal, directory, None)


class JournalWithoutClaims(ReplicatedJournal):
    def append(self, events):
        return super().append([each for each in events if type(each) is not Claimed])


class ClaimsAreNotReplicated(SimulatedNode):
    """Keeps claims in memory alone."""

    def take_over(self, replica, claim_id, revision, seen_slot):
        journal = yield from super().take_over(replica, claim_id, revision, seen_slot)
        journal.__class__ = JournalWithoutClaims
        return journal


class ServiceAnsweringPullsAtOnce:
    def __init__(self, service):
        self._service = service

    def submit(self, command):
        result = self._service.submit(command)
        if type(command) is Pull and isinstance(result, Pending) and result.is_known:
            return result.reply
        return result

    def __getattr__(self, name):
        return getattr(self._service, name)


class AnswersSentBeforeTheyAreKept(WatchedServer):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        hasty: Any = ServiceAnsweringPullsAtOnce(self.service)
        self.service = hasty


def send_all(answers, caller, parts):
    """Sends an answer at once."""
    for part in parts:
        answers._sender.send(caller[0], caller[1], part)


class UnconfirmedAnswers(WatchedServer):
    def _send_confirmed(self, caller, parts):
        self.made_ms[caller] = self.now_ms()
        send_all(self, caller, parts)


class AnswersClaimsBeforeTheyAreKept(SimulatedNode):
    """Sends claims at once, and appends them at the same time."""

    server_class = AnswersSentBeforeTheyAreKept


class AnswersAreNotConfirmed(SimulatedNode):
    """Answers what changes nothing without a proof that it is still the owner."""

    server_class = UnconfirmedAnswers


class ConfirmedAtOnce(WatchedServer):
    def _confirm(self):
        super()._confirm()
        while self._unconfirmed:
            _, caller, parts = self._unconfirmed.popleft()
            send_all(self, caller, parts)


class OneProofServesAllWhoWait(SimulatedNode):
    """Uses an entry as the proof of answers that were made long after it was appended."""

    server_class = ConfirmedAtOnce


class ConfirmedFromTheStart(WatchedServer):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._confirmed_s = self._loop.time()


class ATakeoverIsAProof(SimulatedNode):
    """Uses the end of its takeover as the instant at which it was the owner."""

    server_class = ConfirmedFromTheStart


class WaitsEndUnconfirmed(WatchedServer):
    def _answer(self, caller, command, result):
        send_all(self, caller, protocol.write_reply(command, result))


class WaitsEndWithoutAProof(SimulatedNode):
    """Ends a pull that found nothing while it waited without a proof of ownership."""

    server_class = WaitsEndUnconfirmed


class PurgesBeforeItLists(SimulatedNode):
    """Purges what a snapshot makes superfluous before the snapshot is listed."""

    def keep_snapshot(self, part, name):
        start = part.journal.mark_before(part.journal.end_position)
        if start is not None:
            yield from until_answered(PurgeSlots(part.shard, start.slot))
        return (yield from keep_snapshot(part.journal, part.upkeep, part.directory, name))


class ListsSnapshotsOfWhatIsNotKept(SimulatedNode):
    """Lists a snapshot without waiting for the entries that it holds."""

    def keep_snapshot(self, part, name):
        journal = part.journal
        for _ in part.upkeep.pass_steps():
            yield Pause(0)
        path = snapshot_paths(part.directory)[0]
        kept = yield from put_chunks(journal.shard, name, path)
        return (yield from list_snapshot(journal, kept)) is not None


class ReplicaIgnoringGaps(ShardReplica):
    def _read_slot(self, chain, number, extent):
        chain.slot = number
        with suppress(BrokenChain):
            super()._read_slot(chain, number, extent)


class ReadsOverGaps(SimulatedNode):
    """Does not check that slots follow on each other."""

    def _replica(self, shard):
        replica = super()._replica(shard)
        replica.__class__ = ReplicaIgnoringGaps
        return replica


# Routers, dead letters and spread queues.


class UnawaitedCarrier:
    def __init__(self, node, router):
        self._node = node
        self._router = router

    async def push_dead_letter(self, push):
        self._node.begin(self._router.push_dead_letter(push), lambda reply, error: None)
        return 0, 0


class EndsADepartureBeforeItsPushIsAnswered(SimulatedNode):
    """Ends a dead letter at its source as soon as its push to the target was sent."""

    async def carry(self, part):
        carrier: Any = UnawaitedCarrier(self, await self.opened_router())
        await deliver_departures(part.server, carrier)


class CarrierOmittingRepeatedDedupIds:
    def __init__(self, router, sent):
        self._router = router
        self._sent = sent

    async def push_dead_letter(self, push):
        if push.dedup_id in self._sent:
            push = msgspec.structs.replace(push, dedup_id=None)
        else:
            self._sent[push.dedup_id] = None
        return await self._router.push_dead_letter(push)


class CarrierOmittingOrigins:
    def __init__(self, router):
        self._router = router

    async def push_dead_letter(self, push):
        context = {name: text for name, text in push.context.items() if name != ".origin"}
        push = msgspec.structs.replace(push, context=context)
        return await self._router.push_dead_letter(push)


class DeadLettersGetNewIds(SimulatedNode):
    """Pushes a dead letter to its target as a message of its own."""

    async def carry(self, part):
        carrier: Any = CarrierOmittingOrigins(await self.opened_router())
        await deliver_departures(part.server, carrier)


class RepeatsADepartureWithoutItsDedupId(SimulatedNode):
    """Leaves the dedup id out when a dead letter is pushed to its target again."""

    async def carry(self, part):
        sent = vars(self.cluster).setdefault("sent", {})
        carrier: Any = CarrierOmittingRepeatedDedupIds(await self.opened_router(), sent)
        await deliver_departures(part.server, carrier)


class QueuesIgnoringEarlierPlaces(SpreadQueues):
    async def _push_to_places(self, command, places):
        spread = msgspec.structs.replace(places.spread, before=())
        return await super()._push_to_places(command, places._replace(spread=spread))


class RouterIgnoringEarlierPlaces(Router):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.spread.__class__ = QueuesIgnoringEarlierPlaces


class GroupsMoveBeforeTheyAreEmpty(SimulatedNode):
    """After a change of k, pushes to the new shard while the old one has messages of the group."""

    router_class = RouterIgnoringEarlierPlaces


class GuardIgnoringVersions(SpreadGuard):
    def _check_version(self, name, version):
        return self._shard.names.get(name)


class TakesPushesByAnOldMap(SimulatedNode):
    """Does not compare the version of the spread that a request goes by."""

    def make_server(self, part):
        part.guard.__class__ = GuardIgnoringVersions
        return super().make_server(part)


class RouterDeletingFirst(Router):
    async def _redrive_between_shards(self, command, limit):
        claims = await self._pull(Pull(command.queue, min(limit, 10), wait_ms=0))
        for claim in claims:
            local_id = str(claim.receipt)
            to = command.to or claim.source
            if to is not None:
                with suppress(StaleReceipt):
                    await self._by_receipt(Delete(command.queue, claim.receipt))
                    await self._push(pushed_back(claim, to, local_id))
        return len(claims)


class RedriveDeletesBeforeItPushes(SimulatedNode):
    """Deletes a message from its dead-letter queue before it is in the other queue."""

    router_class = RouterDeletingFirst


class RouterOmittingRedriveDedupIds(Router):
    async def _push(self, command):
        if (command.dedup_id or "").startswith("redriven-"):
            command = msgspec.structs.replace(command, dedup_id=None)
        return await super()._push(command)


class RedriveWithoutDedupIds(SimulatedNode):
    """Pushes a redriven message without the dedup id of its dead letter."""

    router_class = RouterOmittingRedriveDedupIds


class AnswersShowingUnkeptState(WatchedServer):
    def _send_durable(self, caller, parts, is_confirmed=True):
        self._send_confirmed(caller, parts)


class ShowsStateThatIsNotKept(SimulatedNode):
    """Says that it has no messages of a group before their deletes are kept."""

    server_class = AnswersShowingUnkeptState


class GuardIgnoringRedriveTargets(SpreadGuard):
    def check(self, command, version, now_ms):
        if type(command) is Redrive:
            command = msgspec.structs.replace(command, to=None)
        super().check(command, version, now_ms)


class RedriveIgnoresTheMapOfItsTarget(SimulatedNode):
    """Redrives within a shard without comparing how the target is spread."""

    def make_server(self, part):
        part.guard.__class__ = GuardIgnoringRedriveTargets
        return super().make_server(part)


class QueuesOfferingAtOnce(SpreadQueues):
    async def _find_push(self, command, shards, places):
        return None


class RouterOfferingAtOnce(Router):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.spread.__class__ = QueuesOfferingAtOnce


class OffersAPushBeforeItLooks(SimulatedNode):
    """Pushes to the shard of a group without asking the others whether they know the dedup id."""

    router_class = RouterOfferingAtOnce


class QueuesIgnoringContents(SpreadQueues):
    async def _find_push(self, command, shards, places):
        if command.dedup_id is None:
            return None
        return await super()._find_push(command, shards, places)


class RouterIgnoringContents(Router):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.spread.__class__ = QueuesIgnoringContents


class OffersAContentBeforeItLooks(SimulatedNode):
    """Looks in other shards for the dedup id of a push, but not for its content."""

    router_class = RouterIgnoringContents


# Archives.


class WithJournalClass(SimulatedNode):
    """A node whose journals are of another class."""

    journal_class: type[ReplicatedJournal] = ReplicatedJournal

    def take_over(self, replica, claim_id, revision, seen_slot):
        journal = yield from super().take_over(replica, claim_id, revision, seen_slot)
        journal.__class__ = self.journal_class
        return journal


class JournalIgnoringItsArchive(ReplicatedJournal):
    def drop_before(self, position, archive=None):
        self._contents.drop_before(position)


class PurgesBeforeItHasArchived(WithJournalClass):
    """Drops and purges what a snapshot makes superfluous, archived or not."""

    journal_class = JournalIgnoringItsArchive


class JournalArchivingWhatIsNotKept(ReplicatedJournal):
    @property
    def durable_position(self):
        return self._contents.end_position


class ArchivesWhatIsNotKept(WithJournalClass):
    """Writes entries to the archive before the log has them."""

    journal_class = JournalArchivingWhatIsNotKept


class ArchiveWithoutSyncs(SimulatedArchive):
    _segments: Any

    def write(self, data):
        for entry in split_entries(data, self._segments.end_offset, self._segments.next_id):
            self._segments.append([entry.data], version=entry.version, reserved=True)
        return self._segments.end_offset


class ArchivesWithoutSyncs(SimulatedNode):
    """Takes what it has written to the archive for durable."""

    def make_archive(self, part):
        archive = super().make_archive(part)
        archive.__class__ = ArchiveWithoutSyncs
        return archive


class JournalIgnoringOtherArchives(ReplicatedJournal):
    def may_purge(self, archived):
        return True


class PurgesWhatOthersArchive(WithJournalClass):
    """Without an archive, goes by the register as it read it once, and not by the manifest."""

    journal_class = JournalIgnoringOtherArchives

    async def keep_archive(self, part):
        if part.archive is None:
            part.journal.archived_position = NO_ARCHIVE
        else:
            await super().keep_archive(part)


class PurgesByTheRegisterAlone(WithJournalClass):
    """As it was: without an archive, goes by the register, of which a read may lag."""

    journal_class = JournalIgnoringOtherArchives


class ArchiveGoingOnAfterErrors(SimulatedArchive):
    """Writes entries again that were written before an error."""

    _segments: Any
    reached = 0
    next_id = 0

    def write(self, data):
        for entry in split_entries(data, self.reached, self.next_id):
            self._segments.append([entry.data], version=entry.version, reserved=True)
        self._segments.sync()
        self.reached, self.next_id = self._segments.end_offset, self._segments.next_id
        return self._segments.durable_offset

    def open(self, *begin):
        is_open = self._segments is not None
        found = super().open(*begin)
        if is_open:
            return self.reached
        self.reached, self.next_id = found, self._segments.next_id
        return found


class AFullDiskEndsTheArchive(SimulatedNode):
    """After an error in the middle of a part, writes the whole part again."""

    def make_archive(self, part):
        archive = super().make_archive(part)
        archive.__class__ = ArchiveGoingOnAfterErrors
        return archive


# The choice of owners.


class WithChoiceClass(SimulatedNode):
    """A node that chooses owners in another way."""

    choice_class: type[OwnerChoice] = OwnerChoice

    def make_choice(self):
        choice = super().make_choice()
        choice.__class__ = self.choice_class
        return choice


class ChoiceTakingByForce(OwnerChoice):
    async def _request_shard(self, shard, owner):
        self._moving = None
        await self._take_over(shard, self._owners[shard].revision)


class TakesShardsWithoutAsking(WithChoiceClass):
    """Takes a shard from an owner that answers, and does not ask for it."""

    choice_class = ChoiceTakingByForce


class ChoiceOfDrainingNodes(OwnerChoice):
    def _count_live(self):
        super()._count_live()
        self.takers = self.live


class DrainedNodesTakeShards(WithChoiceClass):
    """Ranks draining nodes, too."""

    choice_class = ChoiceOfDrainingNodes


class ChoiceWithoutRegisters(OwnerChoice):
    def decide(self):
        owners, self._owners = self._owners, {}
        for shard, register in owners.items():
            if shard not in self._holder.owned:
                self._owners[shard] = register
        super().decide()
        self._owners = owners


class DoesNotNoticeThatItWasReplaced(WithChoiceClass):
    """An owner that appends nothing does not look whether there is another one."""

    choice_class = ChoiceWithoutRegisters


class ChoiceOfItself(OwnerChoice):
    def _count_live(self):
        super()._count_live()
        self.takers = frozenset({self._node})


class EachNodeRanksItselfFirst(WithChoiceClass):
    """Ranks only itself, so that all nodes want all shards."""

    choice_class = ChoiceOfItself


class ChoiceOfNodesThatStopped(OwnerChoice):
    def _count_live(self):
        for peer in self._peers.values():
            peer.answer()
        super()._count_live()


class NoNodeEverCountsAsStopped(WithChoiceClass):
    """Counts a node that does not answer as live."""

    choice_class = ChoiceOfNodesThatStopped


class ChoiceAnnouncingAtOnce(OwnerChoice):
    async def announce(self, state):
        self.state = state
        value = msgspec.json.encode(NodeInfo(state, self.endpoint))
        await self._replicated.run(set_register(f"node.{self._node}", value))


class AnnouncementsOvertakeEachOther(WithChoiceClass):
    """As it was: an announcement that is sent again may replace a later one."""

    choice_class = ChoiceAnnouncingAtOnce


class ChoiceReadingBeforeItPings(OwnerChoice):
    async def _watch_registers(self):
        """Nothing: `_watch_nodes` reads them."""

    async def _watch_nodes(self):
        while True:
            with suppress(Unanswered):
                await self._read_registers()
            pings = [self._run(self._ping(node, peer)) for node, peer in self._peers.items()]
            if pings:
                await asyncio.wait(pings, timeout=0.12)
            self._count_live()
            self.decide()
            await asyncio.sleep(0.1)


class PingsWaitForRegisters(WithChoiceClass):
    """As it was: sends no ping while the registers are not answered."""

    choice_class = ChoiceReadingBeforeItPings


class ChoiceTakingFromUnknownNodes(OwnerChoice):
    def decide(self):
        # Every owner counts as known.
        owners = (read_ownership(register) for register in self._owners.values())
        self._nodes |= {each.node for each in owners if each is not None}
        super().decide()


class ANodeThatIsNotKnownYetCountsAsStopped(WithChoiceClass):
    """As it was: replaces an owner whose own register it has not read."""

    choice_class = ChoiceTakingFromUnknownNodes


class ChoiceTakingWithoutAnAnswer(OwnerChoice):
    async def _ask_to_yield(self, shard, owner):
        answer = await super()._ask_to_yield(shard, owner)
        return b"? not owned here" if answer == b"? no answer" else answer


class AnOwnerThatDoesNotAnswerIsReplaced(WithChoiceClass):
    """Takes a shard if its owner was asked for it and has not answered."""

    choice_class = ChoiceTakingWithoutAnAnswer
