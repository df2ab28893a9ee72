"""Clients with ledgers: they push, pull, extend, release and delete, and check every answer.

A client executes one command at a time. It sends it to the last owner it has learned of, and
repeats it by the rules of the package, in the same code (`cluster.attempts`).

Each answer is checked when it arrives, against the slots that are kept in the log (`truth`):

- a push that was answered is kept, once, with its body; a dedup id gives one id
- a claim that was answered is kept, and no other client was given that message with that epoch
- a delete, extension or release that was answered is kept, with the epoch of the receipt
- a receipt is refused only if its claim has ended
- no message comes back after its delete was answered
"""

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.cluster import calls
from penstock.cluster.attempts import Attempts, MayBeDone, NotDone, read_answer
from penstock.cluster.log import LogRequest, Look, Pause, Register, Unanswered
from penstock.cluster.owner import owner_key
from penstock.core.events import Deleted
from penstock.core.receipts import MessageIds
from penstock.errors import BackendLost, PenstockError, RequestError, StaleReceipt
from penstock.service import (
    Claim,
    Command,
    CreateQueue,
    Delete,
    Extend,
    Peek,
    Pull,
    Push,
    PushReply,
    Release,
)
from penstock.testing.simulation.nodes import EPOCH_MS, identity_of
from penstock.testing.simulation.schedule import Host, Process
from penstock.testing.simulation.truth import GONE, IN_FLIGHT, Life

if TYPE_CHECKING:
    from penstock.testing.simulation.cluster import SimulatedCluster

R = TypeVar("R")
ClientSteps = Generator[LogRequest[Any], Any, R]
_SILENCE_MS: Final = round(calls.SILENCE_S * 1_000)
# How old an answer that changes nothing may be; see `nodes`.
_STALE_MS: Final = 100


@dataclass(frozen=True, slots=True)
class Call(LogRequest[tuple[bytes, bytes]]):
    """A command for the owner of this term; the reply is the kind of the answer and its body."""

    shard: int
    term: int
    command: Command[Any]
    data: bytes


class _SimulatedCall(calls.CallUnderWay):
    __slots__ = ("process",)

    def __init__(self, process: Process, call: Call) -> None:
        super().__init__(call.shard, call.term, call.command)
        self.process = process


@dataclass(frozen=True, slots=True)
class AnsweredClaim:
    """A claim that was answered."""

    shard: int
    number: int
    claim: Claim


class ClusterLedger:
    """The answers that all clients got."""

    def __init__(self, cluster: "SimulatedCluster") -> None:
        self._cluster = cluster
        self._schedule = cluster.schedule
        self._ids = [MessageIds(identity_of(shard)) for shard in range(cluster.profile.shards)]
        # The id that was answered for each dedup id, and the pull that was given each claim.
        self._dedups: dict[tuple[int, str], str] = {}
        self._given: dict[tuple[int, int, int], str] = {}
        # When each delete was answered, and how often the message had been claimed by then.
        self._deleted: dict[tuple[int, int], tuple[int, int]] = {}
        self.pushed: dict[tuple[int, int], bytes] = {}
        self.answers = 0

    def _life(self, shard: int, number: int) -> Life | None:
        return self._cluster.truths[shard].lives.get(number)

    def note_pushed(self, shard: int, push: Push, reply: PushReply) -> None:
        """A push was answered."""
        self.answers += 1
        life = self._life(shard, reply.sequence)
        if life is None:
            self._schedule.violate(f"a push was answered that is not kept: {reply}")
        elif push.dedup_id is None and life.body != push.body:
            self._schedule.violate(f"a push was answered with the id of another: {reply}")
        if push.dedup_id is not None:
            first = self._dedups.setdefault((shard, push.dedup_id), reply.id)
            if first != reply.id:
                self._schedule.violate(
                    f"two pushes with the dedup id {push.dedup_id} are {first} and {reply.id}"
                )
        if life is not None:
            self.pushed[shard, reply.sequence] = life.body

    def note_claimed(self, shard: int, who: str, claim: Claim) -> AnsweredClaim:
        """A claim was answered; `who` is the same for an attempt that is repeated."""
        self.answers += 1
        number = self._ids[shard].read(claim.id)
        life = self._life(shard, number)
        if life is None or life.epoch < claim.epoch:
            self._schedule.violate(f"a claim was answered that is not kept: {claim}")
        elif life.body != claim.body:
            self._schedule.violate(f"a claim has the body of another message: {claim}")
        first = self._given.setdefault((shard, number, claim.epoch), who)
        if first != who:
            self._schedule.violate(
                f"message {number} was given out twice under epoch {claim.epoch}: to {first} "
                f"and to {who}"
            )
        if claim.epoch > self._deleted.get((shard, number), (0, claim.epoch))[1]:
            self._schedule.violate(f"message {number} came back after its delete was answered")
        return AnsweredClaim(shard, number, claim)

    def note_shown(self, shard: int, message_id: str, asked_ms: int) -> None:
        """A message was returned by a peek that was sent at `asked_ms`."""
        deleted = self._deleted.get((shard, self._ids[shard].read(message_id)))
        if deleted is not None and deleted[0] < asked_ms - _STALE_MS:
            self._schedule.violate(f"{message_id} is shown, and its delete was answered")

    def note_deleted(self, held: AnsweredClaim, was_there: bool) -> None:
        """A delete was answered."""
        self.answers += 1
        life = self._life(held.shard, held.number)
        by = None if life is None else life.ended_by
        if life is None or life.state != GONE:
            self._schedule.violate(f"a delete was answered that is not kept: {held}")
        elif was_there and not (type(by) is Deleted and by.epoch == held.claim.epoch):
            self._schedule.violate(f"an old receipt has deleted a message: {held}")
        epoch = held.claim.epoch if life is None else life.epoch
        self._deleted[held.shard, held.number] = (self._schedule.now_ms, epoch)

    def note_released(self, held: AnsweredClaim) -> None:
        """A release was answered."""
        self.answers += 1
        if self._is_live(held):
            self._schedule.violate(f"a release was answered that is not kept: {held}")

    def note_extended(self, held: AnsweredClaim, deadline_ms: int) -> None:
        """An extension was answered."""
        self.answers += 1
        life = self._life(held.shard, held.number)
        is_held = life is not None and (life.state, life.epoch) == (IN_FLIGHT, held.claim.epoch)
        if life is None or (is_held and life.deadline_ms < deadline_ms):
            self._schedule.violate(f"an extension was answered that is not kept: {held}")

    def note_refused(self, held: AnsweredClaim) -> None:
        """A receipt was refused as stale."""
        if self._is_live(held):
            self._schedule.violate(f"the receipt of a valid claim was refused: {held}")

    def _is_live(self, held: AnsweredClaim) -> bool:
        """Whether a claim is the current one, and has not run out by any node's clock."""
        life = self._life(held.shard, held.number)
        now_ms = EPOCH_MS + self._schedule.now_ms + self._cluster.profile.skew_ms_max
        return (
            life is not None
            and (life.state, life.epoch) == (IN_FLIGHT, held.claim.epoch)
            and life.deadline_ms > now_ms
        )


class SimulatedClient(Host):
    """A process that uses queues."""

    def __init__(self, cluster: "SimulatedCluster", name: str) -> None:
        super().__init__(cluster.schedule, name)
        self.cluster = cluster
        self.held: list[AnsweredClaim] = []
        self.is_working = False
        self._terms: dict[int, int] = {}
        self._calls: dict[int, _SimulatedCall] = {}
        self._tokens = 0
        self._count = 0
        self._old_dedups: list[tuple[int, str]] = []
        self._is_sweeping = False

    # Asking.

    def execute(self, process: Process, request: LogRequest[Any]) -> None:
        if type(request) is Call:
            self._tokens += 1
            self._calls[self._tokens] = _SimulatedCall(process, request)
            self.cluster.call(self, request.shard, request.term, self._tokens, request.data)
            if not self._is_sweeping:
                self._is_sweeping = True
                self.later(_SILENCE_MS, self._sweep)
        elif type(request) is Pause:
            super().execute(process, request)
        else:
            self.cluster.request(self, process, request)

    def take_answer(self, token: int, data: bytes) -> None:
        """An item of an answer has come (`calls`)."""
        call = self._calls.get(token)
        if call is None:
            return
        kind = data[:1]
        call.sweeps = 0
        if kind != calls.AT_IT:
            del self._calls[token]
            call.process.resume((kind, data[1:]), None)

    def take_ownership(self, shard: int, term: int) -> None:
        """A new owner has announced its term."""
        self._terms[shard] = max(self._terms.get(shard, 0), term)
        self._leave_silent(shard)

    def _sweep(self) -> None:
        """Looks for another owner if one has been silent for some time."""
        self._is_sweeping = bool(self._calls)
        if not self._calls:
            return
        self.later(_SILENCE_MS, self._sweep)
        for call in list(self._calls.values()):
            call.sweeps += 1
            if call.is_silent:
                self.start("look", self._look(call.shard), partial(self._looked, call.shard))

    def _look(self, shard: int) -> ClientSteps[None]:
        try:
            found: Register | None = yield Look(owner_key(shard))
        except Unanswered:
            return
        if found is not None:
            self._terms[shard] = max(self._terms.get(shard, 0), found.revision)

    def _looked(self, shard: int, _: Any, error: Exception | None) -> None:
        self._leave_silent(shard)

    def _leave_silent(self, shard: int) -> None:
        for token, call in list(self._calls.items()):
            if call.is_given_up(shard, self._terms.get(shard)):
                self.take_answer(token, calls.LOST)

    def ask(self, shard: int, command: Command[R]) -> ClientSteps[R]:
        """Sends a command to the shard's owner until it is answered. Raises PenstockError."""
        (data,) = calls.write_command(command)
        attempts = Attempts(shard, command, self.schedule.now_ms / 1_000)
        while True:
            term = self._terms.get(shard)
            kind, body = calls.NOT_OWNER, b""
            if term is not None:
                kind, body = yield Call(shard, term, command, data)
            try:
                return attempts.settle(read_answer(command, kind, body))
            except StaleReceipt as error:
                return attempts.settle(error)
            except (NotDone, MayBeDone) as error:
                pause_s = attempts.pause_s(error, self.schedule.now_ms / 1_000)
            yield Pause(round(1_000 * pause_s))
            yield from self._look(shard)

    # Working.

    def work(self) -> None:
        """Uses the queues until the cluster sets `is_ending`."""
        self.is_working = True
        self.start("work", self._work(), self._worked)

    def _worked(self, _: Any, error: Exception | None) -> None:
        self.is_working = False
        if error is not None:
            self.schedule.violate(f"a client raised {type(error).__name__}: {error}")

    def _work(self) -> ClientSteps[None]:
        cluster = self.cluster
        for shard in range(cluster.profile.shards):
            yield from self._try("create", self.ask(shard, CreateQueue(_queue(shard))))
        actions = [self._push, self._push, self._pull, self._pull, self._delete, self._delete]
        actions += [self._extend, self._release, self._peek]
        while not cluster.is_ending:
            yield Pause(self.schedule.below(2 * cluster.profile.think_ms))
            action = self.schedule.pick(actions)
            yield from self._try(action.__name__, action(), cluster.is_ending)

    def _try(self, what: str, steps: ClientSteps[Any], is_last: bool = False) -> ClientSteps[None]:
        """Runs an operation; the expected errors of a request are only noted."""
        self.schedule.note(self.name, what)
        try:
            yield from steps
        except (RequestError, BackendLost) as error:
            self.schedule.note(self.name, what, "failed", type(error).__name__)

    def _shard(self) -> int:
        return self.schedule.below(self.cluster.profile.shards)

    def _push(self) -> ClientSteps[None]:
        shard, dedup_id = self._shard(), None
        self._count += 1
        body = f"{self.name}-{self._count}"
        chance = self.schedule.chance()
        if chance < 0.3 and self._old_dedups:
            shard, dedup_id = self.schedule.pick(self._old_dedups)
        elif chance < 0.8:
            dedup_id = body
            self._old_dedups.append((shard, body))
        delay_ms = self.schedule.below(300) if self.schedule.chance() < 0.1 else None
        push = Push(_queue(shard), body.encode(), delay_ms, dedup_id=dedup_id)
        reply = yield from self.ask(shard, push)
        self.cluster.ledger.note_pushed(shard, push, reply)

    def _pull(self) -> ClientSteps[None]:
        shard = self._shard()
        self._count += 1
        who = f"{self.name}-{self._count}"
        chance = self.schedule.chance()
        command = Pull(
            _queue(shard),
            1 + self.schedule.below(3),
            visibility_ms=self.schedule.between(50, 1_500),
            wait_ms=self.schedule.below(400) if chance < 0.3 else 0,
            attempt_id=who if chance > 0.7 else None,
        )
        for claim in (yield from self.ask(shard, command)):
            self.held.append(self.cluster.ledger.note_claimed(shard, who, claim))

    def _some_claim(self) -> AnsweredClaim | None:
        """A claim to use: most often the newest, sometimes one that has ended."""
        if not self.held:
            return None
        if self.schedule.chance() < 0.7:
            return self.held.pop()
        return self.schedule.pick(self.held)  # type: ignore[no-any-return]

    def _delete(self) -> ClientSteps[None]:
        held = self._some_claim()
        if held is not None:
            command = Delete(_queue(held.shard), held.claim.receipt)
            was_there = yield from self._with_receipt(held, command)
            if was_there is not None:
                self.cluster.ledger.note_deleted(held, was_there)

    def _extend(self) -> ClientSteps[None]:
        held = self._some_claim()
        if held is not None:
            self.held.append(held)
            visibility_ms = self.schedule.between(50, 1_500)
            command = Extend(_queue(held.shard), held.claim.receipt, visibility_ms)
            deadline_ms = yield from self._with_receipt(held, command)
            if deadline_ms is not None:
                self.cluster.ledger.note_extended(held, deadline_ms)

    def _release(self) -> ClientSteps[None]:
        held = self._some_claim()
        if held is not None:
            delay_ms = self.schedule.below(200) if self.schedule.chance() < 0.3 else 0
            command = Release(_queue(held.shard), held.claim.receipt, delay_ms)
            try:
                yield from self.ask(held.shard, command)
            except StaleReceipt:
                self.cluster.ledger.note_refused(held)
            else:
                self.cluster.ledger.note_released(held)

    def _with_receipt(self, held: AnsweredClaim, command: Command[R]) -> ClientSteps[R | None]:
        try:
            return (yield from self.ask(held.shard, command))
        except StaleReceipt:
            self.cluster.ledger.note_refused(held)
            return None

    def _peek(self) -> ClientSteps[None]:
        shard = self._shard()
        asked_ms = self.schedule.now_ms
        for message in (yield from self.ask(shard, Peek(_queue(shard), 20))):
            self.cluster.ledger.note_shown(shard, message.id, asked_ms)

    # The end.

    def drain(self, shard: int) -> ClientSteps[None]:
        """Pulls and deletes until the shard is empty."""
        truth = self.cluster.truths[shard]
        while not truth.is_empty:
            self._count += 1
            who = f"{self.name}-{self._count}"
            try:
                pull = Pull(_queue(shard), 10, visibility_ms=2_000, wait_ms=1_500)
                for claim in (yield from self.ask(shard, pull)):
                    held = self.cluster.ledger.note_claimed(shard, who, claim)
                    was_there = yield from self.ask(shard, Delete(pull.queue, claim.receipt))
                    self.cluster.ledger.note_deleted(held, was_there)
            except PenstockError as error:
                self.schedule.note(self.name, "drain", type(error).__name__)
                yield Pause(100)


def _queue(shard: int) -> str:
    return f"q{shard}"
