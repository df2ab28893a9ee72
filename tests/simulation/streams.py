"""A model of JetStream: the streams behind `cluster.log`, with their faults.

Each stream has three replicas, one of which leads. A message that is published goes through

    accepted      the leader has compared its expected sequence with all messages it has accepted so
                  far, kept or not, and has given it the next sequence. A mismatch is answered at
                  once (10071)
    kept          a majority has it. Only then is it answered, and only then can it be read
    vanished      the leader changed before that, and no replica has it; there is no answer

A direct read is answered by any replica, which may be behind; a damaged replica has lost some
messages in the middle without noticing. After `Demote` the leader answers. During an election there
is no leader, and nothing is accepted.

`ModelStream.messages` also has the messages that were purged: it is the true history.
"""

from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from penstock.cluster.log import (
    Append,
    Bounds,
    Demote,
    DropChunks,
    LogFull,
    LogRequest,
    LogSlot,
    Mismatch,
    PurgeSlots,
    PutChunk,
    ReadChunk,
    ReadRegister,
    ReadRegisters,
    ReadSlots,
    Register,
    SlotBounds,
    Swap,
)
from tests.simulation.schedule import Done, RunSchedule

REPLICAS: Final = 3
_BY_LEADER_MS: Final = 10_000


class _Proposal:
    """A message that was accepted and is neither kept nor has vanished yet."""

    __slots__ = ("answered", "data", "is_over", "subject")

    def __init__(self, subject: str, data: bytes, answered: Done) -> None:
        self.subject = subject
        self.data = data
        self.answered: Done | None = answered
        self.is_over = False


class _ReplicaView:
    """The view of one replica: when it received each message and each purge."""

    __slots__ = ("lost", "purges", "seen_ms", "stalled_until_ms")

    def __init__(self) -> None:
        self.seen_ms: list[int] = []
        self.purges: list[tuple[int, int]] = [(0, 1)]
        self.lost: dict[int, None] = {}
        self.stalled_until_ms = 0

    def learn(self, at_ms: int) -> int:
        """When this replica processes something that arrives at `at_ms`."""
        return max(at_ms, self.stalled_until_ms, self.seen_ms[-1] if self.seen_ms else 0)


class ModelStream:
    """One stream: `kept` is called with the sequence, subject and data of each message."""

    def __init__(self, schedule: RunSchedule, kept: Callable[[int, str, bytes], None]) -> None:
        self.messages: list[tuple[str, bytes]] = []
        self.first = 1
        # Whether the servers refuse messages because they have no room.
        self.is_full = False
        self._schedule = schedule
        self._kept = kept
        self._accepted: list[_Proposal] = []
        self._sequences: dict[str, list[int]] = {}
        self._views = [_ReplicaView() for _ in range(REPLICAS)]
        self._leader = 0
        self._no_leader_until_ms = 0
        self._by_leader_until_ms = 0
        self._dropped: dict[str, int] = {}

    # Writing.

    def publish(
        self,
        subject: str,
        data: bytes,
        answered: Done,
        after: int | None = None,
        after_of_subject: int | None = None,
    ) -> None:
        """A message reaches the leader, with the last sequence that it expects, if any.

        `after` is that of the whole stream, `after_of_subject` that of its subject.
        """
        if self._schedule.now_ms < self._no_leader_until_ms:
            return
        if self.is_full:
            answered(None, LogFull("maximum bytes exceeded"))
            return
        if after is not None and after != len(self.messages) + len(self._accepted):
            answered(None, Mismatch())
            return
        if after_of_subject is not None and after_of_subject != self._last_accepted(subject):
            answered(None, Mismatch())
            return
        proposal = _Proposal(subject, data, answered)
        self._accepted.append(proposal)
        slow = self._schedule.chance() < 0.03
        delay_ms = self._schedule.below(400 if slow else 4)
        self._schedule.after(delay_ms, partial(self._keep_up_to, proposal))

    def _last_accepted(self, subject: str) -> int:
        for index in range(len(self._accepted) - 1, -1, -1):
            if self._accepted[index].subject == subject:
                return len(self.messages) + index + 1
        return self.last_of(subject)

    def last_of(self, subject: str) -> int:
        """The last sequence of a subject that is kept; 0 if there is none."""
        found = self._sequences.get(subject)
        return found[-1] if found else 0

    def _keep_up_to(self, proposal: _Proposal) -> None:
        """A majority has this message, and so all before it."""
        if proposal.is_over:
            return
        while self._accepted and not proposal.is_over:
            self._keep(self._accepted.pop(0))

    def _keep(self, proposal: _Proposal) -> None:
        proposal.is_over = True
        self.messages.append((proposal.subject, proposal.data))
        sequence = len(self.messages)
        self._sequences.setdefault(proposal.subject, []).append(sequence)
        for number, view in enumerate(self._views):
            lag_ms = 0 if number == self._leader else self._schedule.below(6)
            view.seen_ms.append(view.learn(self._schedule.now_ms + lag_ms))
        self._kept(sequence, proposal.subject, proposal.data)
        if proposal.answered is not None:
            proposal.answered(sequence, None)

    def purge(self, before: int) -> None:
        """Removes the messages before a sequence, at each replica when it processes the purge."""
        self.first = max(self.first, before)
        for view in self._views:
            at_ms = max(view.learn(self._schedule.now_ms), view.purges[-1][0])
            view.purges.append((at_ms, self.first))

    def drop(self, prefix: str) -> None:
        """Removes the messages whose subjects begin with this."""
        self._dropped.setdefault(prefix, self._schedule.now_ms)

    # Reading.

    def _reader(self) -> int | None:
        """The replica that answers a read; None if that is the leader, and there is none."""
        if self._schedule.now_ms >= self._by_leader_until_ms:
            return self._schedule.below(REPLICAS)
        if self._schedule.now_ms < self._no_leader_until_ms:
            return None
        return self._leader

    def _bounds_at(self, replica: int) -> tuple[int, int]:
        view = self._views[replica]
        now_ms = self._schedule.now_ms
        first = next(before for at_ms, before in reversed(view.purges) if at_ms <= now_ms)
        return first, max(bisect_right(view.seen_ms, now_ms), first - 1)

    def read(self, first: int, limit: int, answered: Done) -> None:
        """Answers with the messages from a sequence on, as one replica has them."""
        replica = self._reader()
        if replica is None:
            return
        lowest, last = self._bounds_at(replica)
        lost = self._views[replica].lost
        numbers = [n for n in range(max(first, lowest), last + 1) if n not in lost]
        found = [LogSlot(n, self.messages[n - 1][1]) for n in numbers[:limit]]
        answered(found, None)

    def bounds(self, answered: Done) -> None:
        """Answers with the first and last sequence, as one replica knows them."""
        replica = self._reader()
        if replica is not None:
            answered(SlotBounds(*self._bounds_at(replica)), None)

    def read_last(self, subject: str, replica: int) -> tuple[int, bytes] | None:
        """The last message of a subject at a replica, with its sequence."""
        view = self._views[replica]
        sequences = self._sequences.get(subject, ())
        known = bisect_right(view.seen_ms, self._schedule.now_ms)
        index = bisect_right(sequences, known) - 1
        if index < 0 or sequences[index] in view.lost:
            return None
        return sequences[index], self.messages[sequences[index] - 1][1]

    def look(self, subject: str, answered: Done) -> None:
        """Answers with the last message of a subject, or None."""
        replica = self._reader()
        if replica is None:
            return
        gone = any(subject.startswith(prefix) for prefix in self._dropped)
        answered(None if gone else self.read_last(subject, replica), None)

    def look_all(self, prefix: str, answered: Done) -> None:
        """Answers with the last messages of all subjects that begin with this, in order."""
        replica = self._reader()
        if replica is None:
            return
        subjects = sorted(each for each in self._sequences if each.startswith(prefix))
        found = [(each, self.read_last(each, replica)) for each in subjects]
        answered([each for each in found if each[1] is not None], None)

    # Faults.

    def change_leader(self, election_ms: int) -> None:
        """Another replica leads, after an election; of the messages not kept, a part survives."""
        surviving = self._schedule.below(len(self._accepted) + 1)
        for proposal in self._accepted[surviving:]:
            proposal.is_over = True
        kept, self._accepted = self._accepted[:surviving], []
        for proposal in kept:
            proposal.answered = None
            self._keep(proposal)
        self._leader = (self._leader + 1 + self._schedule.below(REPLICAS - 1)) % REPLICAS
        self._no_leader_until_ms = self._schedule.now_ms + election_ms

    def demote(self) -> None:
        """Another replica leads, and the leader answers reads for some seconds."""
        self._by_leader_until_ms = self._schedule.now_ms + _BY_LEADER_MS
        self.change_leader(self._schedule.between(10, 30))

    def stall(self, replica: int, for_ms: int) -> None:
        """A replica receives nothing new for some time."""
        self._views[replica].stalled_until_ms = self._schedule.now_ms + for_ms

    def damage(self, replica: int, count: int) -> None:
        """A replica loses some messages that it had. No other may have lost any: two are whole."""
        if any(view.lost for view in self._views):
            return
        for _ in range(count):
            if self.messages:
                self._views[replica].lost[self._schedule.below(len(self.messages)) + 1] = None


class StreamsModel:
    """All streams of a cluster; `arrive` carries out the requests of `cluster.log`.

    `kept` is called with the shard, slot and extent of every append that is kept; `purged` with
    the shard and the slot before each purge is carried out.
    """

    def __init__(
        self,
        schedule: RunSchedule,
        shards: int,
        kept: Callable[[int, int, bytes], None],
        purged: Callable[[int, int], None],
    ) -> None:
        self._schedule = schedule
        self._purged = purged
        self.shards = [
            ModelStream(schedule, partial(_kept_in_shard, kept, shard)) for shard in range(shards)
        ]
        self.registers = ModelStream(schedule, self._note_register)
        self.chunks = ModelStream(schedule, _ignore)
        self.every = [*self.shards, self.registers, self.chunks]

    def _note_register(self, sequence: int, key: str, value: bytes) -> None:
        self._schedule.note("register", key, sequence, value.decode())

    def register(self, key: str) -> Register | None:
        """A register as it is by the last swap that was kept."""
        revision = self.registers.last_of(key)
        return (
            Register(key, self.registers.messages[revision - 1][1], revision) if revision else None
        )

    def arrive(self, request: LogRequest[Any], answered: Done) -> None:
        """A request reaches the servers; `answered` is called once they reply, if they do."""
        match request:
            case Append(shard, after, extent):
                self.shards[shard].publish("", extent, answered, after=after)
            case ReadSlots(shard, first, limit):
                self.shards[shard].read(first, limit, answered)
            case Bounds(shard):
                self.shards[shard].bounds(answered)
            case PurgeSlots(shard, before):
                self._purged(shard, before)
                self.shards[shard].purge(before)
                answered(None, None)
            case Demote(shard):
                self.shards[shard].demote()
                answered(None, None)
            case ReadRegister(key):
                self.registers.look(key, partial(_as_register, key, answered))
            case ReadRegisters(prefix):
                self.registers.look_all(prefix, partial(_as_registers, answered))
            case Swap(key, value, revision):
                self.registers.publish(key, value, answered, after_of_subject=revision)
            case PutChunk(shard, snapshot, index, data):
                self.chunks.publish(f"{shard}.{snapshot}.{index}", data, answered)
            case ReadChunk(shard, snapshot, index):
                self.chunks.look(f"{shard}.{snapshot}.{index}", partial(_as_chunk, answered))
            case DropChunks(shard, snapshot):
                self.chunks.drop(f"{shard}.{snapshot}.")
                answered(None, None)
            case _:
                raise AssertionError(f"the model has no request {request}")


def _kept_in_shard(
    kept: Callable[[int, int, bytes], None], shard: int, slot: int, subject: str, extent: bytes
) -> None:
    kept(shard, slot, extent)


def _ignore(sequence: int, subject: str, data: bytes) -> None:
    pass


def _as_register(key: str, answered: Done, found: Any, error: Exception | None) -> None:
    answered(None if found is None else Register(key, found[1], found[0]), error)


def _as_registers(answered: Done, found: Any, error: Exception | None) -> None:
    answered([Register(key, last[1], last[0]) for key, last in found], error)


def _as_chunk(answered: Done, found: Any, error: Exception | None) -> None:
    answered(None if found is None else found[1], error)
