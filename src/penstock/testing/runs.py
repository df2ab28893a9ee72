"""A test of a consumer, run once for each seed, with the faults of that seed.

    @penstock.testing.chaos(seeds=200)
    def test_every_order_is_charged_once(chaos):
        chaos.calm.create("orders", visibility_timeout=30)
        chaos.calm.push("orders", "order 1")
        charged = []
        chaos.consume("orders", lambda claim: charged.append(claim.body))
        assert charged == [b"order 1"]

Each seed has queues of its own in this process, on a clock that takes no time. When the test has
passed, the audit's checks judge the queues. The first seed that fails is run again with fewer and
fewer of its faults; the error names those that are enough, and how to repeat the run.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import cached_property, partial
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

from penstock.client import Queues
from penstock.core.receipts import IDENTITY_BYTES
from penstock.errors import InvalidField, PenstockError
from penstock.server.testing.chaos import Chaos, ConsumerKilled, FaultPlan, MadeFault
from penstock.server.testing.clock import MovableClock
from penstock.server.testing.judge import judge
from penstock.server.testing.observed import ObservedStore, QueueDepth
from penstock.service import Claim, Command, QueueService
from penstock.steps import run_steps
from penstock.testing.awaiting import story_text
from penstock.testing.places import (
    TestAccount,
    TestQueues,
    entered,
    in_environment,
    next_account,
    opened,
    own_url,
)

R = TypeVar("R")
SEEDS: Final = 200
SEED_VARIABLE: Final = "PENSTOCK_CHAOS_SEED"
# More would only repeat what the first ones have shown, and a consumer must end some time.
FAULTS_MAX: Final = 25
ROUNDS_MAX: Final = 500
_TRIES_MAX: Final = 100
_START_MS: Final = 1_800_000_000_000


class ChaosFailure(AssertionError):
    """A test does not hold under the faults of a seed; its text names them."""


class ChaoticService:
    """A QueueService in front of another one, whose commands meet the faults of a plan."""

    LACKS: ClassVar[Mapping[str, str]] = {}

    def __init__(self, service: QueueService, chaos: Chaos) -> None:
        self.redrive_max = service.redrive_max
        self._service = service
        self._chaos = chaos

    def execute(self, command: Command[R]) -> R:
        steps: Any = self._chaos.execute(command)  # of which none is a pause
        reply: R = run_steps(self._service.execute, steps)
        return reply

    def close(self) -> None:
        self._service.close()


class ChaosRun:
    """The queues of one seed, in this process; and over the SQS API, if the test asks for `sqs`.

    `queues` are for the code under test; `calm` ones meet no faults, and are for the test itself.
    """

    def __init__(self, seed: int, only: frozenset[int] | None = None) -> None:
        self.seed = seed
        self.clock = MovableClock("auto", start_ms=_START_MS)
        self.store = ObservedStore(self.clock, identity=seed.to_bytes(IDENTITY_BYTES, "big"))
        self.calm = TestQueues(store=self.store)
        self.plan = FaultPlan(seed, only=only, faults_max=FAULTS_MAX)
        chaotic = ChaoticService(self.calm.service, Chaos(self.plan, self.clock, kills=True))
        self.queues = Queues(chaotic, self.clock)
        # How often the consumer was killed, and how often it ended with an error of a queue.
        self.kills = 0
        self.crashes = 0
        self._only = only
        self._undo = ExitStack()

    @cached_property
    def account(self) -> TestAccount:
        """An account on a server for tests. Its requests meet faults while `run` lasts.

        The environment leads AWS's SDKs to it, and they repeat no request by themselves.
        """
        account = TestAccount(own_url(), next_account())
        self._undo.enter_context(opened(account, "auto"))
        self._undo.enter_context(in_environment(account, AWS_MAX_ATTEMPTS="1"))
        asked = {"seed": self.seed, "max": FAULTS_MAX, "paused": True}
        only = {} if self._only is None else {"only": sorted(self._only)}
        account.done("chaos", {**asked, **only})
        return account

    @cached_property
    def sqs(self) -> Any:
        """A boto3 client of the account."""
        # First, so that it is in the environment when the client is made.
        account = self.account
        client = account.client()
        self._undo.callback(client.close)
        return client

    @property
    def _has_account(self) -> bool:
        return "account" in self.__dict__

    @property
    def made(self) -> list[MadeFault]:
        """The faults that were made, in order."""
        return self.plan.made + (self.account.faults() if self._has_account else [])

    def consume(self, queue: str, work: Callable[[Claim], object]) -> None:
        """Does the work of every message of a queue, and deletes it, until the queue is empty.

        If the work raises, the message is released. The consumer is killed and begins again, as
        the seed wants it. An AssertionError ends the test.
        """

        def consume_visible() -> None:
            while (claim := self.queues.pull(queue)) is not None:
                try:
                    work(claim)
                except (AssertionError, PenstockError):
                    raise
                except Exception:
                    self.queues.release(claim)
                    return
                self.queues.delete(claim)

        self.run(consume_visible, queue)

    def run(self, consumer: Callable[[], object], *queues: str) -> None:
        """Calls a consumer again and again until these queues are empty.

        Without names, until all are that are no dead-letter queues. A consumer that is killed, or
        ends with an error of Penstock or boto3, is called again, as a supervisor does. When a call
        has changed nothing, time moves to the next instant at which a claim or a delay ends.
        """
        places: list[TestQueues | TestAccount] = [self.calm]
        if self._has_account:
            places.append(self.account)
            self.account.done("chaos", {"paused": False})
        try:
            self._run(consumer, queues, places)
        finally:
            if self._has_account:
                self.account.done("chaos", {"paused": True})

    def _run(
        self,
        consumer: Callable[[], object],
        queues: Sequence[str],
        places: Sequence[TestQueues | TestAccount],
    ) -> None:
        left: dict[str, QueueDepth] = {}
        changes = [0 for _ in places]
        for _ in range(ROUNDS_MAX):
            self._call(consumer)
            left = {}
            for at, place in enumerate(places):
                depths, now = place.depths()
                dead = {each.dead_letter for each in depths.values()}
                chosen = queues or [name for name in depths if name not in dead]
                here = {name: depths[name] for name in chosen if name in depths}
                here = {name: each for name, each in here.items() if each.messages}
                # Never on to the end of a retention: messages that wait are there to be consumed.
                has_due = any(each.in_flight or each.delayed for each in here.values())
                if has_due and now == changes[at]:
                    place.go_to_next_due()
                changes[at] = now
                left |= here
            if not left:
                return
        told = ", ".join(f"{each.messages} in {name}" for name, each in left.items())
        raise AssertionError(
            f"the consumer was called {ROUNDS_MAX} times, and messages are left: {told}"
        )

    def _call(self, consumer: Callable[[], object]) -> None:
        try:
            consumer()
        except ConsumerKilled:
            self.kills += 1
        except PenstockError:
            self.crashes += 1
        except Exception as error:
            # Its classes are made when a client is, and boto3 need not be installed.
            if not type(error).__module__.startswith("botocore."):
                raise
            self.crashes += 1

    def broken(self) -> list[str]:
        """The checks of the audit that do not hold."""
        here = [*map(str, judge(self.store))]
        return here + (self.account.broken() if self._has_account else [])

    def stories(self) -> dict[str, list[str]]:
        """What happened to the messages of each queue."""
        return self.calm.stories() | (self.account.stories() if self._has_account else {})

    def close(self) -> None:
        """Ends the run."""
        self._undo.close()
        self.calm.close()


def chaos(
    function: Callable[..., Any] | None = None,
    /,
    *,
    seeds: int | Iterable[int] = SEEDS,
    seed: int | None = None,
) -> Any:
    """Runs a test once for each seed: `@chaos`, `@chaos(seeds=1000)`, or `@chaos(seed=17)`.

    The test takes a parameter `chaos`, a ChaosRun. `seeds` is how many, from 0 on, or which ones.
    The variable PENSTOCK_CHAOS_SEED is the one seed of a run. Fixtures of the test are made once
    for all seeds. Raises ChaosFailure for the first seed that fails.
    """
    chosen = _seeds(seeds, seed)

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        signature = inspect.signature(function)
        if "chaos" not in signature.parameters:
            raise InvalidField(f"chaos: {function.__name__} has no parameter chaos")

        def run_seeds(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            only = os.environ.get(SEED_VARIABLE)
            test = partial(function, *args, **kwargs)
            for each in chosen if only is None else [_read_seed(only)]:
                first = _attempt(test, each, None)
                if first.error is not None:
                    least = _shrink(test, first)
                    raise ChaosFailure(_report(first, least)) from least.error

        run_seeds.__name__, run_seeds.__doc__ = function.__name__, function.__doc__
        run_seeds.__module__, run_seeds.__qualname__ = function.__module__, function.__qualname__
        # What is left for pytest to fill in.
        left = [each for name, each in signature.parameters.items() if name != "chaos"]
        run_seeds.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        run_seeds.__dict__.update(function.__dict__)
        return run_seeds

    return decorate if function is None else decorate(function)


def _seeds(seeds: int | Iterable[int], seed: int | None) -> list[int]:
    if seed is not None:
        seeds = [seed]
    elif isinstance(seeds, int):
        seeds = range(seeds)
    chosen = list(seeds)
    if not chosen:
        raise InvalidField("seeds: there is no seed to run")
    if not all(type(each) is int and 0 <= each < 2**63 for each in chosen):
        raise InvalidField(f"seeds: a seed is a whole number from 0 to {2**63 - 1}")
    return chosen


def _read_seed(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InvalidField(f"{SEED_VARIABLE}: {text[:40]!r} is not a seed; give a whole number")
    return int(text)


class Attempt(NamedTuple):
    """What became of a test under the faults of a seed."""

    seed: int
    error: Exception | None
    made: list[MadeFault]
    stories: dict[str, list[str]]


def _attempt(test: Callable[..., Any], seed: int, only: frozenset[int] | None) -> Attempt:
    """Runs a test with the faults of a seed, or with some of them."""
    with closing(ChaosRun(seed, only)) as run:
        error = _error_of(test, run)
        if error is None:
            return Attempt(seed, None, [], {})
        return Attempt(seed, error, run.made, run.stories())


def _error_of(test: Callable[..., Any], run: ChaosRun) -> Exception | None:
    """What the test raises under these faults, or what the audit finds; None if nothing."""
    try:
        with entered(run.calm):
            test(chaos=run)
    except ConsumerKilled as killed:
        text = (
            "the consumer was killed in the test itself; let chaos.consume or chaos.run call it, "
            "and use chaos.calm for what the test does"
        )
        return AssertionError(text).with_traceback(killed.__traceback__)
    except Exception as error:
        return error
    broken = run.broken()
    return AssertionError("\n".join(broken)) if broken else None


def _shrink(test: Callable[..., Any], first: Attempt) -> Attempt:
    """The attempt with as few of the faults as still lead to an error of this kind."""
    least = first
    size = max(1, len(first.made))
    tries = 0
    while tries < _TRIES_MAX and least.made:
        numbers = [each.number for each in least.made]
        size = min(size, len(numbers))
        for start in range(0, len(numbers), size):
            tries += 1
            kept = frozenset(numbers[:start] + numbers[start + size :])
            smaller = _attempt(test, first.seed, kept)
            if type(smaller.error) is type(first.error):
                least = smaller
                break
        else:
            if size == 1:
                break
            size //= 2
    return least


def _report(first: Attempt, least: Attempt) -> str:
    """Which seed, which of its faults are enough, what became of the messages, and what to do."""
    lines = [f"seed {first.seed}: {type(least.error).__name__}: {least.error}"]
    if least.made:
        lines += [f"{len(least.made)} of its {len(first.made)} faults are enough:"]
        lines += map(str, least.made)
    else:
        lines.append("it fails without any fault, too")
    lines += [
        "what happened to each message:",
        story_text(least.stories),
        f"to repeat it: {SEED_VARIABLE}={first.seed}, or @chaos(seed={first.seed})",
    ]
    return "\n".join(lines)
