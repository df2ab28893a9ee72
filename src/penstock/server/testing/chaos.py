"""Faults that the delivery contract allows, made in front of an engine, as a seed decides.

Each command of a client that could meet a fault is numbered, and the seed and the number decide
which one it meets: so a run can be repeated, with all of its faults or with some of them. A fault
is only what a consumer must expect of a queue:

    throttled        nothing is done, and the client is told to try again later
    lost             the command is done, and its answer is lost: a push is then sent again
    killed           the consumer dies after its work and before its delete is done
    forgotten        a delete is answered, and the message is delivered again (standard queues)
    ran out          the claim ends while its holder still works
    slow             the answer comes late, when a part of the claim's time has passed
    empty, fewer     a receive gives nothing, or not all that there is (standard queues)
    reordered        a receive gives other messages than the first ones (standard queues)
    partly           some items of a batch fail

The engine knows nothing of it: all it sees are commands, and a clock that moves.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Final, NamedTuple, TypeVar, cast

import msgspec

from penstock.backends.loop import LoopService, Pending, Steps, each_by
from penstock.clock import ManualClock
from penstock.errors import BackendLost, Overloaded
from penstock.service import (
    Batch,
    Claim,
    Command,
    Delete,
    DescribeQueue,
    Extend,
    Message,
    PeekFrom,
    Pull,
    PullIds,
    Push,
    PushMany,
    QueueInfo,
    Release,
)

R = TypeVar("R")
_ANY: Final = ("throttled", "lost")
_KINDS: Final[dict[type, tuple[str, ...]]] = {
    Push: (*_ANY, "slow"),
    Pull: (*_ANY, "slow"),
    Delete: (*_ANY, "killed", "ran out"),
    Extend: (*_ANY, "ran out"),
    Release: _ANY,
    Batch: (*_ANY, "partly", "ran out"),
    PushMany: (*_ANY, "partly"),
}
# Those of standard queues only: FIFO queues promise more.
_STANDARD_KINDS: Final[dict[type, tuple[str, ...]]] = {
    Pull: ("empty", "fewer", "reordered", "reordered"),
    Delete: ("forgotten", "forgotten"),
}
# How many of the commands meet a fault: each seed has one of these.
_RATES: Final = (0.04, 0.12, 0.3)
_SEED_STEP: Final = 1_000_003
_REORDERED_MAX: Final = 100


class ConsumerKilled(BaseException):
    """The process of a consumer ends here, as by a SIGKILL; no code of a consumer catches it."""


class MadeFault(NamedTuple):
    """One fault that was made: the number of its command, and what it was."""

    number: int
    kind: str
    command: str
    queue: str

    def __str__(self) -> str:
        return f"{self.number:>4}  {self.command} of {self.queue}: {_TEXTS[self.kind]}"


_TEXTS: Final = {
    "throttled": "refused, to be tried again later",
    "lost": "done, and the answer was lost",
    "killed": "the consumer was killed before it was done",
    "forgotten": "answered, and the message is delivered again",
    "ran out": "the claim had ended before",
    "slow": "the answer came late",
    "empty": "gave nothing, though there were messages",
    "fewer": "gave one message, though there were more",
    "reordered": "gave another message than the first",
    "partly": "some of the items failed",
}


class FaultPlan:
    """Which commands meet which faults, by a seed; `made` has those that were made."""

    def __init__(
        self, seed: int, *, only: frozenset[int] | None = None, faults_max: int | None = None
    ) -> None:
        """`only` are the numbers of the commands that may meet a fault; None are all."""
        self.seed = seed
        self.made: list[MadeFault] = []
        self._only = only
        self._faults_max = faults_max
        self._count = 0
        self._rate = Random(seed).choice(_RATES)

    def draw(self, command: Command[Any], kinds: Sequence[str]) -> tuple[str, Random] | None:
        """The fault that the next command meets, and the dice for its details; mostly None."""
        number = self._count
        self._count += 1
        if self._only is not None and number not in self._only:
            return None
        if self._faults_max is not None and len(self.made) >= self._faults_max:
            return None
        dice = Random(self.seed * _SEED_STEP + number)
        if dice.random() >= self._rate:
            return None
        kind = dice.choice(kinds)
        queue = getattr(command, "queue", "") or _queue_of(command)
        self.made.append(MadeFault(number, kind, type(command).__name__, queue))
        return kind, dice


class Chaos:
    """Executes commands with faults: each is a generator of the commands that are done instead."""

    def __init__(self, plan: FaultPlan, clock: ManualClock, *, kills: bool = False) -> None:
        """With `kills`, a killed consumer gets ConsumerKilled; without, its request is lost."""
        self.plan = plan
        self._clock = clock
        self._kills = kills
        # When the last claim of each queue ends.
        self._deadlines_ms: dict[str, int] = {}
        self._is_fifo: dict[str, bool] = {}

    def execute(self, command: Command[R]) -> Steps[R]:
        """The reply to a command, which may meet a fault. Raises PenstockError."""
        kinds = _KINDS.get(type(command))
        if kinds is None:
            return cast(R, (yield command))
        more = _STANDARD_KINDS.get(type(command), ())
        if more and not (yield from self._fifo(command.queue)):  # type: ignore[attr-defined]
            kinds = (*kinds, *more)
        drawn = self.plan.draw(command, kinds)
        if drawn is None:
            reply = yield command
        else:
            reply = yield from self._meet(command, *drawn)
        if type(command) is Pull and reply:
            self._note_claims(command.queue, reply)
        return cast(R, reply)

    def _fifo(self, queue: str) -> Steps[bool]:
        known = self._is_fifo.get(queue)
        if known is None:
            info: QueueInfo = yield DescribeQueue(queue)
            known = self._is_fifo[queue] = info.settings.fifo
        return known

    def _note_claims(self, queue: str, claims: Sequence[Claim]) -> None:
        ends_ms = max(claim.deadline_ms for claim in claims)
        self._deadlines_ms[queue] = max(ends_ms, self._deadlines_ms.get(queue, 0))

    def _meet(self, command: Any, kind: str, dice: Random) -> Steps[Any]:
        match kind:
            case "throttled":
                raise Overloaded("chaos: the request was throttled; try again later")
            case "killed":
                if self._kills:
                    raise ConsumerKilled
                raise BackendLost("chaos: the connection was lost")
            case "forgotten":
                return True
            case "empty":
                return []
            case "ran out":
                self._end_claims(_queue_of(command))
            case "fewer" | "reordered":
                return (yield from self._pull_other(command, kind, dice))
            case "partly":
                return (yield from self._do_some(command, dice))
        reply = yield command
        if kind == "lost":
            if type(command) is Pull and reply:
                self._note_claims(command.queue, reply)
            raise BackendLost("chaos: the answer was lost; whether it was done is unknown")
        if kind == "slow":
            self._pass_time(command, reply, dice)
        return reply

    def _end_claims(self, queue: str) -> None:
        """Time passes until the claims of a queue have ended."""
        left_ms = self._deadlines_ms.get(queue, 0) + 1 - self._clock.now_ms()
        if left_ms > 0:
            self._clock.advance(ms=left_ms)

    def _pass_time(self, command: Any, reply: Any, dice: Random) -> None:
        """Time passes before an answer arrives: at most nine tenths of what claims have left."""
        longest_ms = 5_000
        if type(command) is Pull and reply:
            ends_ms = min(claim.deadline_ms for claim in reply)
            longest_ms = max(0, (ends_ms - self._clock.now_ms()) * 9 // 10)
        self._clock.advance(ms=int(longest_ms * dice.random()))

    def _pull_other(self, command: Pull, kind: str, dice: Random) -> Steps[Any]:
        if command.attempt_id is not None or (kind == "fewer" and command.limit == 1):
            return (yield command)
        if kind == "fewer":
            return (yield msgspec.structs.replace(command, limit=1))
        found: list[Message] = yield PeekFrom(command.queue, 0, _REORDERED_MAX, "visible")
        ids = [message.id for message in found]
        dice.shuffle(ids)
        chosen = ids[: min(command.limit, 10)]
        if not chosen:
            return (yield command)
        claims: list[Claim] = yield PullIds(
            command.queue, chosen, command.visibility_ms, command.holder
        )
        places = {message_id: place for place, message_id in enumerate(chosen)}
        return sorted(claims, key=lambda claim: places[claim.id])

    def _do_some(self, command: Batch | PushMany, dice: Random) -> Steps[list[Any]]:
        items = command.items if isinstance(command, Batch) else command.pushes()
        fails = [dice.random() < 0.5 for _ in items]
        kept = [item for item, fail in zip(items, fails, strict=True) if not fail]
        done: list[Any] = (yield Batch(kept)) if kept else []
        replies = iter(done)
        refused = Overloaded("chaos: this item was throttled; send it again")
        return [refused if fail else next(replies) for fail in fails]


def _queue_of(command: Any) -> str:
    """The queue of a command, or of the first item of a batch."""
    items = getattr(command, "items", None)
    return str(getattr(items[0] if items else command, "queue", ""))


class ChaoticLoopService:
    """A LoopService in front of another one, whose commands meet the faults of a plan, if any."""

    def __init__(self, service: LoopService, clock: ManualClock) -> None:
        self._service = service
        self._clock = clock
        self._chaos: Chaos | None = None
        # While it is paused, commands meet no fault and get no number.
        self.is_paused = False
        self.redrive_max = service.redrive_max
        self.now_ms = service.now_ms
        self.history = service.history
        self.view = service.view
        self.abandon = service.abandon
        self.on_failure = service.on_failure
        self.close = service.close

    @property
    def LACKS(self) -> Mapping[str, str]:  # noqa: N802
        return self._service.LACKS

    @property
    def upkeep_error(self) -> Exception | None:
        return self._service.upkeep_error

    @property
    def plan(self) -> FaultPlan | None:
        """The plan by which faults are made now."""
        return None if self._chaos is None else self._chaos.plan

    def use(self, plan: FaultPlan | None) -> None:
        """Makes the faults of a plan from now on; of None, none."""
        self._chaos = None if plan is None else Chaos(plan, self._clock)

    def submit(self, command: Command[R]) -> R | Pending:
        if self._chaos is None or self.is_paused or type(command) not in _KINDS:
            return self._service.submit(command)
        return self._service.run(self._chaos.execute(command))

    def run(self, steps: Steps[R]) -> R | Pending:
        if self._chaos is None or self.is_paused:
            return self._service.run(steps)
        try:
            command = next(steps)
        except StopIteration as stop:
            return cast(R, stop.value)
        return self._service.run(each_by(steps, self._chaos.execute, command))
