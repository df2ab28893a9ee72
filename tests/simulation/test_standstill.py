"""Row 27 of the scorecard: a process that stood still for 0.1 s to 1 h goes on as it should.

Random commands, pulls that wait, and a clock that jumps, on each store and behind each face of the
engine. Commands come between a jump and the moment when the face notices it; callers act on their
answers at once, in the callback that brings them. One step settles, moves and answers only a few
messages, so that a handful of due ones is already more than fits into one step.

After every step: the engine has not stopped and no callback has failed; everything due is settled;
a claim lives exactly if it was given to one caller, who has not ended it; nobody waits behind a
message that he could have, or longer than he wanted; of a queue's waiters the first was served
first. Opening a store again gives the same state.

About 20,000 steps; a million with the full figures. PENSTOCK_STANDSTILL_LIVES is their number / 50
for each of the six.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.backends.engine import engine as engine_module
from penstock.backends.engine import loop as loop_module
from penstock.backends.engine.engine import Engine
from penstock.backends.engine.store import open_engine
from penstock.core import due, pulling
from penstock.core.delivery import IN_FLIGHT, Delivery
from penstock.core.receipts import Ticket
from penstock.errors import InFlightLimit, RequestError
from penstock.journal import MemoryJournal
from penstock.service import (
    WAIT_MS_MAX,
    Batch,
    Claim,
    Command,
    ConfigureQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    Extend,
    Peek,
    Pull,
    Purge,
    Push,
    PushMany,
    Redrive,
    Release,
    Stats,
)
from tests.conftest import FULL, MEMORY
from tests.simulation.faces import FACES, PLAIN, STEPS, TASK, Call, StoppableClock
from tests.simulation.test_model import Recording

LIVES = int(os.environ.get("PENSTOCK_STANDSTILL_LIVES", "3400" if FULL else "68"))
STEPS_OF_LIFE = 50
pytestmark = pytest.mark.timeout(120 + 4 * LIVES)
FILE_BYTES = 65_536
PAGE_BYTES = 4_096
# Read from the disk and not from the cache of recent messages.
LARGE = bytes(9_000)
# How many messages are settled, moved or answered in one step.
FEW = 5

SETTINGS: dict[str, dict[str, Any]] = {
    "std": {"dead_letter": "dead", "max_receives": 2, "visibility_ms": 5_000},
    "fifo": {"fifo": True, "dead_letter": "dead.fifo", "max_receives": 2, "visibility_ms": 700},
    "short": {"retention_ms": 60_000, "delay_ms": 1_000, "in_flight_max": 4},
    "dead": {},
    "dead.fifo": {"fifo": True},
}
NAMES = st.sampled_from(["std", "fifo", "std", "fifo", "short", "dead", "dead.fifo"])
TIMES_MS = st.sampled_from([1, 250, 1_000, 1_024, 5_000, 60_000])
STANDSTILLS_MS = st.sampled_from([100, 250, 700, 1_100, 5_000, 30_000, 600_000, 3_600_000])
WAITS_MS = st.sampled_from([250, 20_000, 20_000, WAIT_MS_MAX])
GROUPS = st.sampled_from(["a", "b", "c", None])
# What a caller does as soon as it has its answer.
THEN = st.sampled_from(
    ["nothing"] * 4 + ["pull again", "delete", "release", "push", "purge", "remove", "cancel"]
)
Key = tuple[int, int]  # of a claim: the message's number, and the epoch


class Standstills(RuleBasedStateMachine):
    """One life of a store; subclasses say where it is and who drives it."""

    is_on_disk = False
    face_name = "engine"
    steps: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(engine_module, "SETTLE_MAX", FEW)
        self.patches.setattr(loop_module, "_WOKEN_MAX", 2)
        self.patches.setattr(loop_module, "_RELEASED_MAX", 2)
        self.patches.setattr(pulling, "SKIPPED_MAX", FEW)
        self.patches.setattr(due, "OPENED_MAX", FEW)
        self.patches.setattr(due, "_OPENED_PER_POPPED", 1)
        self.clock = StoppableClock()
        self.root = None
        if self.is_on_disk:
            parent = MEMORY if MEMORY.is_dir() else None
            self.root = Path(tempfile.mkdtemp(prefix="penstock-", dir=parent))
        self.durability = "os"
        self.journal: MemoryJournal | None = None
        # Every claim that a caller was given, those that should live, and those that were purged.
        self.given: dict[Key, object] = {}
        self.held: dict[Key, Claim] = {}
        self.gone: set[Key] = set()
        self.claims: list[Claim] = []
        self.calls: list[Call] = []
        self.served: list[Call] = []
        self.joined = 0
        self.bodies = 0
        self.is_closing = False
        self.is_damaged = False
        self.face: Any = None

    # The store.

    @initialize(durability=st.sampled_from(["os", "os", "sync"]), keeps=st.booleans())
    def begin(self, durability: str, keeps: bool) -> None:
        self.durability = durability
        if self.root is None:
            self.journal = Recording() if keeps else MemoryJournal()
        self.open()
        for name in SETTINGS:
            self.attempt(CreateQueue(name, SETTINGS[name]))

    def open(self) -> None:
        if self.root is None:
            engine = Engine(self.journal, self.clock)
        else:
            engine = open_engine(
                self.root / "store",
                clock=self.clock,
                file_bytes=FILE_BYTES,
                durability=self.durability,  # type: ignore[arg-type]
            )
        self.face = FACES[self.face_name](engine, self.ended)
        engine.settle_max = engine.own_settle_max = FEW

    @property
    def engine(self) -> Engine:
        return self.face.engine

    def queue_of(self, name: str) -> Any:
        return self.engine.shard.names.get(name)

    # Commands.

    def attempt(self, command: Command[Any]) -> Any:
        """The reply, or the refusal; anything else that is raised is a failure."""
        self.note_gone(command)
        try:
            return self.face.run(command)
        except RequestError as error:
            self.engine.check()
            return error

    def note_gone(self, command: Command[Any]) -> None:
        """A purge ends the claims of its queue, also those that are on their way to a caller."""
        if isinstance(command, Purge | DeleteQueue):
            # The command itself would settle what is due first, and make claims of it.
            self.face.catch_up()
            queue = self.queue_of(command.queue)
            claimed = [] if queue is None else in_flight(queue)
            self.gone.update((each.number, each.epoch) for each in claimed)

    def ended(self, call: Call) -> None:
        """A call has its answer: a claim is given to one caller, who then does something."""
        assert not call.done
        call.done = True
        self.calls.remove(call)
        if self.is_closing:
            return
        assert call.error is None or isinstance(call.error, RequestError), call.error
        if call.claims and call.pull.attempt_id is None and not call.may_overtake:
            self.served.append(call)
        for claim in call.claims:
            self.give(claim, call.holder)
        act: Callable[[Call], None] = getattr(self, "then_" + call.then.replace(" ", "_"))
        act(call)

    def give(self, claim: Claim, holder: object) -> None:
        key = key_of(claim)
        # A second call with the same attempt id may bring it when the first has ended it.
        is_new = key not in self.given
        assert self.given.setdefault(key, holder) == holder, f"{key} was given to two callers"
        self.claims.append(claim)
        if is_new and key not in self.gone:
            self.held[key] = claim

    def send(self, command: Command[Any]) -> None:
        self.note_gone(command)
        with suppress(RequestError):
            self.face.send(command)

    def then_nothing(self, call: Call) -> None: ...

    def then_pull_again(self, call: Call) -> None:
        self.begin_pull(call.pull, call.how, "nothing")

    def then_delete(self, call: Call) -> None:
        for claim in call.claims:
            self.held.pop(key_of(claim), None)
            self.send(Delete(claim.queue, claim.receipt))

    def then_release(self, call: Call) -> None:
        for claim in call.claims:
            self.held.pop(key_of(claim), None)
            self.send(Release(claim.queue, claim.receipt))

    def then_push(self, call: Call) -> None:
        self.send(Push(call.pull.queue, b"in a callback", group="a"))

    def then_purge(self, call: Call) -> None:
        self.send(Purge(call.pull.queue))

    def then_remove(self, call: Call) -> None:
        self.send(DeleteQueue(call.pull.queue))

    def then_cancel(self, call: Call) -> None:
        if waiting := self.cancellable():
            self.cancel(waiting[-1])

    # What happens by itself, and what must hold then.

    def settle(self) -> None:
        """After each rule: lets everything happen that can, and checks what must hold."""
        type(self).steps += 1
        self.face.settle()
        self.engine.check()
        now_ms = self.clock.now_ms()
        queues = self.engine.shard.queues
        for queue in queues.values():
            for each in queue.deliveries.values():
                assert (
                    not each.due_at_ms
                    or each.state not in (0, IN_FLIGHT)
                    or (each.due_at_ms > now_ms)
                ), f"{each} is due and not settled"
                assert each.state == IN_FLIGHT or not queue.is_expired(each, now_ms), each
        self.check_claims(now_ms)
        self.check_waits(now_ms)

    def check_claims(self, now_ms: int) -> None:
        living: dict[Key, int] = {
            (each.number, each.epoch): each.due_at_ms
            for queue in self.engine.shard.queues.values()
            for each in in_flight(queue)
        }
        self.held = {
            key: claim
            for key, claim in self.held.items()
            if claim.deadline_ms > now_ms and key not in self.gone
        }
        held = {key: claim.deadline_ms for key, claim in self.held.items()}
        unheld, ended = living.items() - held.items(), held.items() - living.items()
        assert not unheld, f"claims that nobody holds: {unheld}"
        assert not ended, f"claims that have ended too early: {ended}"

    def check_waits(self, now_ms: int) -> None:
        for call in self.calls:
            assert call.deadline_ms > now_ms, f"{call} waits for too long"
        first: dict[str, Call] = {}
        for call in self.calls:
            first.setdefault(call.pull.queue, call)
        for call in self.served:
            waiting = first.get(call.pull.queue)
            assert waiting is None or waiting.joined > call.joined, f"{call} before {waiting}"
        self.served = []
        for name in first:
            try:
                found = self.face.run(Pull(name, wait_ms=0))
            except InFlightLimit:
                continue
            assert found == [], f"{first[name]} could have had {found}"

    # Rules: queues.

    @rule(name=NAMES)
    @precondition(lambda self: self.bodies % 7 == 6)
    def remove_and_create_a_queue(self, name: str) -> None:
        self.attempt(DeleteQueue(name))
        self.attempt(CreateQueue(name, SETTINGS[name]))
        self.settle()

    @rule()
    def create_what_was_removed(self) -> None:
        for name in SETTINGS:
            if self.queue_of(name) is None:
                self.attempt(CreateQueue(name, SETTINGS[name]))
        self.settle()

    @rule(
        name=NAMES,
        changes=st.fixed_dictionaries(
            {},
            optional={
                "visibility_ms": TIMES_MS,
                "retention_ms": st.sampled_from([60_000, 345_600_000]),
                "in_flight_max": st.sampled_from([2, None]),
                "max_receives": st.integers(1, 3),
            },
        ),
    )
    @precondition(lambda self: self.bodies % 3 == 2)
    def configure_a_queue(self, name: str, changes: dict[str, Any]) -> None:
        if "dead_letter" not in SETTINGS[name]:
            changes.pop("max_receives", None)
        self.attempt(ConfigureQueue(name, changes))
        self.settle()

    @rule(name=NAMES)
    @precondition(lambda self: self.bodies % 5 == 4)
    def purge_a_queue(self, name: str) -> None:
        self.attempt(Purge(name))
        self.settle()

    @rule(name=NAMES, to=st.none() | NAMES, limit=st.integers(1, 20))
    def redrive_some(self, name: str, to: str | None, limit: int) -> None:
        self.attempt(Redrive(name, to, limit))
        self.settle()

    # Rules: messages.

    @rule(
        name=NAMES,
        count=st.sampled_from([1, 1, 2, 7, 30]),
        group=GROUPS,
        delay_ms=st.none() | TIMES_MS,
        ttl_ms=st.none() | TIMES_MS,
        dedup_id=st.none() | st.none() | st.sampled_from(["x", "y"]),
        large=st.booleans(),
        settled=st.booleans(),
    )
    def push_some(
        self, name: str, count: int, group: str | None, large: bool, settled: bool, **options: Any
    ) -> None:
        fifo = name.endswith("fifo")
        group = group or ("a" if fifo else None)
        body = LARGE if large and self.root is not None and count < 7 else b""
        pushes = [
            Push(name, body + b"%d" % number, group=group, **options) for number in range(count)
        ]
        self.bodies += 1
        if count > 1 and self.bodies % 2:
            self.attempt(Batch(pushes))  # type: ignore[arg-type]
        elif count > 2 and options["delay_ms"] is None and not fifo:
            self.attempt(PushMany(name, [push.body for push in pushes]))
        else:
            for push in pushes:
                self.attempt(push)
        if settled:
            self.settle()

    @rule(
        name=NAMES,
        limit=st.sampled_from([1, 1, 3, 8]),
        wait_ms=st.just(0) | WAITS_MS | WAITS_MS,
        visibility_ms=st.none() | TIMES_MS,
        attempt_id=st.none() | st.none() | st.none() | st.sampled_from(["p", "q"]),
        how=st.sampled_from([PLAIN, PLAIN, STEPS, TASK]),
        then=THEN,
    )
    def pull(self, name: str, how: str, then: str, **options: Any) -> None:
        self.begin_pull(Pull(name, **options), how, then)
        self.settle()

    @rule(name=NAMES, count=st.integers(2, 4), then=st.lists(THEN, min_size=4, max_size=4))
    def several_wait(self, name: str, count: int, then: list[str]) -> None:
        for number in range(count):
            self.begin_pull(Pull(name, wait_ms=20_000), PLAIN, then[number])
        self.settle()

    def begin_pull(self, pull: Pull, how: str, then: str) -> None:
        self.joined += 1
        deadline_ms = self.clock.now_ms() + (pull.wait_ms or 0)
        # While the line is behind, because a step has moved or ended as many messages as it may,
        # a pull that comes may find what the line has not come to.
        is_behind = bool(self.engine._line._noted)
        call = Call(pull, self.joined, deadline_ms, how, then, is_behind)
        self.calls.append(call)
        self.face.pull(call)

    def cancellable(self) -> list[Call]:
        """Calls that wait, or whose claims are on their way; an attempt's claims would stay."""
        return [call for call in self.calls if call.waits and call.pull.attempt_id is None]

    def cancel(self, call: Call) -> None:
        if self.face.cancel(call):
            self.calls.remove(call)

    @rule(back=st.integers(0, 5), served=st.booleans())
    @precondition(lambda self: self.face.cancels and self.cancellable())
    def cancel_a_wait(self, back: int, served: bool) -> None:
        calls = self.cancellable()
        call = calls[back % len(calls)]
        if served:
            # Its claims are made, and it has not got them.
            self.send(Push(call.pull.queue, b"for a call that is cancelled", group="a"))
        if not call.done:
            self.cancel(call)
        self.settle()

    @rule(
        back=st.integers(0, 9),
        end=st.sampled_from(["delete", "release", "extend"]),
        ms=st.just(0) | TIMES_MS,
    )
    @precondition(lambda self: self.claims)
    def use_a_claim(self, back: int, end: str, ms: int) -> None:
        self.end_claim(self.claims[-1 - back % len(self.claims)], end, ms)
        self.settle()

    def end_claim(self, claim: Claim, end: str, ms: int) -> None:
        """A receipt is valid exactly as long as the claim lives."""
        key = key_of(claim)
        held = None if key in self.gone else self.held.get(key)
        holds = held is not None and held.deadline_ms > self.clock.now_ms()
        if end == "extend":
            ms = ms or 1
            reply = self.attempt(Extend(claim.queue, claim.receipt, ms))
            if holds:
                assert reply == self.clock.now_ms() + ms
                self.held[key] = msgspec.structs.replace(claim, deadline_ms=reply)
        elif end == "delete":
            reply = self.attempt(Delete(claim.queue, claim.receipt))
            assert reply is True or not holds, reply
            self.held.pop(key, None)
        else:
            reply = self.attempt(Release(claim.queue, claim.receipt, ms))
            assert reply is None or not holds, reply
            self.held.pop(key, None)
        assert holds or isinstance(reply, RequestError) or reply is False, reply

    # Rules: time, damage, another process.

    @rule(
        ms=STANDSTILLS_MS,
        then=st.lists(
            st.sampled_from(["push", "pull", "wait", "peek", "stats", "use"]), max_size=3
        ),
        name=NAMES,
    )
    def stand_still(self, ms: int, then: list[str], name: str) -> None:
        """Time passes, and some commands come before anything else has noticed it."""
        self.clock.pass_unnoticed(ms)
        for each in then:
            if each == "push":
                self.attempt(Push(name, b"late", group="a"))
            elif each == "pull":
                self.begin_pull(Pull(name, 2, wait_ms=0), PLAIN, "nothing")
            elif each == "wait":
                self.begin_pull(Pull(name, wait_ms=20_000), PLAIN, "nothing")
            elif each == "use" and self.claims:
                self.end_claim(self.claims[-1], "delete", 0)
            else:
                self.attempt(Peek(name) if each == "peek" else Stats(name))
        self.settle()

    @rule(
        name=st.sampled_from(["std", "fifo"]),
        count=st.integers(1, 3),
        limit=st.sampled_from([1, 3]),
        kinds=st.lists(st.sampled_from(["lasting", "short", "dead", "large"]), min_size=1),
        how=st.sampled_from([PLAIN, STEPS, TASK]),
    )
    def fall_due_while_pulls_wait(
        self, name: str, count: int, limit: int, kinds: list[str], how: str
    ) -> None:
        """Much is due at once for pulls that wait; they end, move or lose some of it themselves."""
        self.attempt(ConfigureQueue(name, {"max_receives": 2}))
        dead = [Push(name, b"dead", group=str(n)) for n in range(12)] if "dead" in kinds else []
        self.attempt(Batch(dead))  # type: ignore[arg-type]
        claims = self.attempt(Pull(name, 20, wait_ms=0)) if dead else []
        for claim in claims if isinstance(claims, list) else []:
            self.attempt(Release(name, claim.receipt, 1_000))
        for _ in range(count):
            self.begin_pull(Pull(name, limit, wait_ms=20_000), how, "nothing")
        pushes = [
            Push(
                name,
                LARGE if kind == "large" and self.is_on_disk else kind.encode(),
                1_000,
                ttl_ms=1_500 if kind == "short" else None,
                group="b",
            )
            for kind in kinds * 4
        ]
        self.attempt(Batch(pushes))  # type: ignore[arg-type]
        self.attempt(ConfigureQueue(name, {"max_receives": 1}))
        if "large" in kinds:
            self.damage_a_message(0, 3)
        self.clock.pass_unnoticed(2_000)
        self.settle()

    @rule(ms=STANDSTILLS_MS)
    def let_time_pass(self, ms: int) -> None:
        self.clock.advance(ms=ms)
        self.settle()

    @rule(back=st.integers(0, 9), bit=st.integers(0, 7))
    @precondition(lambda self: self.is_on_disk)
    def damage_a_message(self, back: int, bit: int) -> None:
        """Flips a bit in one of the messages that are not in memory any more."""
        places = [
            each.content
            for queue in self.engine.shard.queues.values()
            for each in queue.deliveries.values()
            if isinstance(each.content, int) and each.content & 0xFFFFFFFF > len(LARGE)
        ]
        if places and self.root is not None:
            journal: Any = self.engine.journal
            offset = (places[-1 - back % len(places)] >> 32) + 200
            number, within = divmod(offset, journal.segments.payload_bytes)
            path = self.root / "store" / "journal" / f"{number:012d}.seg"
            with path.open("r+b") as file:
                file.seek(PAGE_BYTES + within)
                (byte,) = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 1 << bit]))
            self.is_damaged = True

    @rule()
    @precondition(lambda self: self.is_on_disk and self.bodies % 4 == 3)
    def open_again(self) -> None:
        """Whoever waited has lost touch; claims live on."""
        self.close()
        before = everything(self.engine)
        self.is_closing = False
        self.open()
        after = everything(self.engine)
        if self.is_damaged:
            # Whole entries are lost, and the messages that were pushed by them.
            lost = {number for number in before if number not in after}
            assert after == {number: before[number] for number in before if number not in lost}
            self.gone.update(key for key in self.held if key[0] in lost)
        else:
            assert after == before
        self.is_damaged = False
        self.settle()

    def close(self) -> None:
        self.settle()
        self.is_closing = True
        self.face.close()
        assert self.calls == []

    def teardown(self) -> None:
        try:
            if self.face is not None:
                self.is_closing = True
                self.face.close()
        finally:
            self.patches.undo()
            if self.root is not None:
                shutil.rmtree(self.root)


def in_flight(queue: Any) -> list[Delivery]:
    return [each for each in queue.deliveries.values() if each.state == IN_FLIGHT]


def key_of(claim: Claim) -> Key:
    ticket: Any = claim.proof
    assert isinstance(ticket, Ticket)
    return ticket.number, ticket.epoch


def everything(engine: Engine) -> dict[int, object]:
    return {
        each.number: (each.queue, each.rank, each.state, each.epoch, each.due_at_ms)
        for queue in engine.shard.queues.values()
        for each in queue.deliveries.values()
    }


@pytest.mark.parametrize("face", list(FACES))
@pytest.mark.parametrize("store", ["memory", "file"])
def test_random_lives_with_standstills(store, face, record_property):
    machine: Any = type(
        f"{store}_{face}",
        (Standstills,),
        {"is_on_disk": store == "file", "face_name": face, "steps": 0},
    )
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=LIVES, stateful_step_count=STEPS_OF_LIFE, suppress_health_check=checks
        ),
    )
    record_property("figure", f"{machine.steps:,} steps")
