"""Row 8 of the scorecard: the engine against the plainest model of the contract, in random lives.

After every step: both agree on every message; nothing is lost; a message has one live claim at
most; deciding changed nothing; replaying the events, and restoring the snapshot, give the living
state byte for byte. Now and then the engine is replaced by one restored or replayed, and must go
on as if nothing had happened.

About 10,000 steps; a million with the full figures. PENSTOCK_SIMULATION_LIVES is their number / 50.
"""

import os
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.backends.engine.engine import Engine
from penstock.backends.engine.waiting import Waiter
from penstock.clock import ManualClock
from penstock.core.delivery import DELAYED, IN_FLIGHT, VISIBLE
from penstock.core.events import (
    AnyEvent,
    ClaimExpired,
    Deleted,
    Expired,
    Extended,
    Moved,
    Pushed,
    QueuePurged,
    QueueRemoved,
    Released,
)
from penstock.core.events import Claimed as ClaimedEvent
from penstock.core.receipts import MessageIds, Receipts
from penstock.core.shard import ShardSnapshot, ShardState, replay
from penstock.errors import InvalidReceipt
from penstock.journal import MemoryJournal
from penstock.service import (
    Batch,
    BatchItem,
    Claim,
    Command,
    ConfigureQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    Extend,
    ListQueues,
    Peek,
    Pull,
    Purge,
    Push,
    PushReply,
    Redrive,
    Release,
    Stats,
)
from tests.conftest import FULL
from tests.simulation.model import KnownReceipt, Model, Wait, outcome

LIVES = int(os.environ.get("PENSTOCK_SIMULATION_LIVES", "20000" if FULL else "250"))
STEPS = 50
pytestmark = pytest.mark.timeout(120 + LIVES)
IDENTITY = b"\x01" * 7
KEY = b"\x02" * 32
SETTINGS: dict[str, dict[str, Any]] = {
    "std": {"dead_letter": "dead", "max_receives": 3},
    "fifo": {"dead_letter": "dead.fifo", "max_receives": 2, "fifo": True},
    "dead": {},
    "dead.fifo": {"fifo": True},
}
NAMES = st.sampled_from(["std", "fifo"] * 4 + ["dead", "dead.fifo"])
DEAD_NAMES = st.sampled_from(["dead", "dead.fifo"] * 2 + ["std", "fifo"])
STATES = {"delayed": DELAYED, "visible": VISIBLE, "in_flight": IN_FLIGHT}
GROUPS = st.sampled_from(["a", "b", "c"])
SHORT_MS = st.sampled_from([1, 300, 700, 1_024, 5_000, 30_000])
# Around the length of a claim, of the dedup window, of the retention, of the attempt window.
TIMES_MS = st.sampled_from([1, 200, 500, 1_024, 5_000, 30_000, 60_000, 300_000])
LONG_MS = st.sampled_from([3_600_000, 4 * 86_400_000, 15 * 86_400_000])


class Recording(MemoryJournal):
    """A memory journal that keeps every event, and a ledger of what the events say."""

    def __init__(self) -> None:
        super().__init__(history_entries=1)
        self.events: list[AnyEvent] = []
        self.live: dict[int, int] = {}
        self.held: dict[int, int] = {}
        self.epochs: dict[int, int] = {}

    def append(self, events: Sequence[AnyEvent]) -> tuple[int, Sequence[int]]:
        for event in events:
            self.events.append(event)
            self._note(event)
        return super().append(events)

    def _note(self, event: AnyEvent) -> None:
        """Follows each message by its events alone; one live claim a message, or this fails."""
        if isinstance(event, Pushed):
            assert event.number not in self.epochs
            self.live[event.number] = event.queue
            self.epochs[event.number] = 0
        elif isinstance(event, ClaimedEvent):
            assert self.live[event.number] == event.queue
            assert event.number not in self.held
            assert event.epoch == self.epochs[event.number] + 1
            self.held[event.number] = self.epochs[event.number] = event.epoch
        elif isinstance(event, Extended):
            # Of the last claim, which may have run out: then it lives again.
            assert self.live[event.number] == event.queue
            assert self.epochs[event.number] == event.epoch
            self.held[event.number] = event.epoch
        elif isinstance(event, Released | ClaimExpired):
            assert self.held.pop(event.number) == event.epoch
        elif isinstance(event, Deleted):
            assert self.held.pop(event.number) == event.epoch
            assert self.live.pop(event.number) == event.queue
        elif isinstance(event, Expired):
            assert event.number not in self.held
            assert self.live.pop(event.number) == event.queue
        elif isinstance(event, Moved):
            assert event.number not in self.held
            assert self.live[event.number] == event.queue
            self.live[event.number] = event.to
        elif isinstance(event, QueuePurged | QueueRemoved):
            gone = [number for number, queue in self.live.items() if queue == event.queue]
            assert len(gone) == event.count
            for number in gone:
                del self.live[number]
                self.held.pop(number, None)


def as_bytes(shard: ShardState) -> bytes:
    return msgspec.msgpack.encode(shard.snapshot())


def restored(shard: ShardState) -> ShardState:
    """The shard that a snapshot of this one gives, sharing nothing with it that can change."""
    kept = shard.snapshot()
    queues = [
        msgspec.structs.replace(
            queue,
            deliveries=[copy(delivery) for delivery in queue.deliveries],
            attempts=[(at_ms, key, [*pairs]) for at_ms, key, pairs in queue.attempts],
        )
        for queue in kept.queues
    ]
    return ShardState.restore(ShardSnapshot(kept.next_number, kept.next_queue, queues))


class Lives(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.journal = Recording()
        self.ids = MessageIds(IDENTITY)
        self.receipts = Receipts(KEY)
        self.model = Model()
        self.model.now_ms = self.clock.now_ms()
        self.replica = ShardState()
        self.replayed = 0
        self.claims: list[KnownReceipt] = []
        self.waits: list[tuple[Waiter, Wait]] = []
        self.bodies = 0
        self.engine = self.started(ShardState())

    def started(self, shard: ShardState) -> Engine:
        return Engine(self.journal, self.clock, shard=shard, identity=IDENTITY, key=KEY)

    @initialize()
    def make_queues(self) -> None:
        for name in ("std", "fifo"):
            self.create(name)

    # Running a command on both.

    def run(self, command: Command[Any], expected: Callable[[], object]) -> Any:
        """Submits the command; its outcome must be the model's, and a refusal changes nothing."""
        self.engine.submit(ListQueues())
        self.model.settle()
        self.model.serve()
        before = as_bytes(self.engine.shard)
        self.decide(command)
        assert as_bytes(self.engine.shard) == before, "deciding changed something"
        reply = outcome(lambda: self.engine.submit(command))
        said = outcome(expected)
        if isinstance(reply, type):
            assert as_bytes(self.engine.shard) == before, "a refusal changed something"
        assert self.shown(reply) == said
        self.model.serve()
        self.meet_waits()
        return reply

    def decide(self, command: Command[Any]) -> None:
        """Asks the shard what it would do."""
        shard, now_ms = self.engine.shard, self.clock.now_ms()
        match command:
            case Push():
                outcome(lambda: shard.decide_push(command, now_ms))
            case Delete(queue, receipt):
                late, ticket = command.late, self.receipts.read
                outcome(lambda: shard.decide_delete(queue, ticket(receipt), now_ms, late))
            case Extend(queue, receipt, for_ms):
                late, ticket = command.late, self.receipts.read
                outcome(lambda: shard.decide_extend(queue, ticket(receipt), for_ms, now_ms, late))
            case Release(queue, receipt, delay_ms):
                late, ticket = command.late, self.receipts.read
                outcome(
                    lambda: shard.decide_release(queue, ticket(receipt), delay_ms, now_ms, late)
                )
            case CreateQueue():
                outcome(lambda: shard.decide_create(command, now_ms))
            case ConfigureQueue():
                outcome(lambda: shard.decide_configure(command, now_ms))
            case DeleteQueue(queue):
                outcome(lambda: shard.decide_remove(queue, now_ms))
            case Purge(queue):
                outcome(lambda: shard.decide_purge(queue, now_ms))

    def shown(self, reply: Any) -> Any:
        """A reply of the engine in the model's terms; claims are noted for later."""
        if isinstance(reply, PushReply):
            return self.ids.read(reply.id), reply.duplicate
        if isinstance(reply, list):
            return [self.shown(each) for each in reply]
        if isinstance(reply, Claim):
            return self.noted(reply)
        if isinstance(reply, Exception):
            return type(reply)
        return reply

    def noted(self, claim: Claim) -> tuple[int, int, int]:
        number = self.ids.read(claim.id)
        queue = self.model.queues[claim.queue]
        item = queue.find(number)
        known = KnownReceipt(claim.queue, queue.number, number, claim.epoch, claim.receipt)
        self.claims.append(known)
        if item is not None:
            assert (claim.body, claim.priority, claim.group) == (
                item.body,
                item.priority,
                item.group,
            )
        return number, claim.epoch, claim.deadline_ms

    def meet_waits(self) -> None:
        """Those who waited were served by both alike."""
        for waiter, wait in self.waits:
            assert waiter.done == wait.done
            if wait.done:
                assert (waiter.error and type(waiter.error)) == wait.error
                assert self.shown(waiter.claims) == wait.given
        self.waits = [pair for pair in self.waits if not pair[1].done]

    # Queues.

    def create(self, name: str) -> None:
        reply = outcome(lambda: self.engine.submit(CreateQueue(name, SETTINGS[name])))
        if not isinstance(reply, type):
            self.model.create(name, SETTINGS[name])

    @rule(name=NAMES)
    def create_again_what_was_removed(self, name: str) -> None:
        if name not in self.model.queues:
            self.create(name)

    @rule(name=NAMES, again=st.booleans())
    @precondition(lambda self: self.bodies % 7 == 6)
    def remove_a_queue(self, name: str, again: bool) -> None:
        self.run(DeleteQueue(name), lambda: self.model.remove(name))
        if again:
            self.create(name)

    @rule(
        name=NAMES,
        changes=st.fixed_dictionaries(
            {},
            optional={
                "visibility_ms": SHORT_MS,
                "retention_ms": st.sampled_from([30_000, 345_600_000]),
                "messages_max": st.sampled_from([3, 10, None]),
                "in_flight_max": st.sampled_from([2, None]),
                "priority_age_ms": st.sampled_from([1, 700, 30_000, None]),
            },
        ),
        max_receives=st.none() | st.integers(1, 3),
        per_group=st.booleans(),
    )
    @precondition(lambda self: self.bodies % 4 == 3)
    def configure_a_queue(
        self, name: str, changes: dict[str, Any], max_receives: int | None, per_group: bool
    ) -> None:
        if "dead" in SETTINGS[name].get("dead_letter", "") and max_receives is not None:
            changes["max_receives"] = max_receives
        if SETTINGS[name].get("fifo"):
            changes["dedup_per_group"] = per_group
            changes.pop("priority_age_ms", None)
        reply = outcome(lambda: self.configured(name, changes))
        self.run(ConfigureQueue(name, changes), lambda: reply)

    def configured(self, name: str, changes: dict[str, Any]) -> object:
        """The reply of a configure is the queue's settings; they are compared as such."""
        self.engine.submit(ListQueues())
        self.model.settle()
        self.model.serve()
        queue = self.model.queue(name)
        before = queue.settings
        wanted = msgspec.structs.replace(before, **changes)
        known = set(self.model.queues)
        if wanted != before:
            self.model.configure(name, changes)
        # A dead-letter queue that was removed is created again.
        created = sorted(set(self.model.queues) - known)
        info = self.engine.shard.info(self.engine.shard.queue(name))
        at_ms = self.clock.now_ms() if wanted != before else info.configured_at_ms
        return msgspec.structs.replace(
            info, settings=wanted, configured_at_ms=at_ms, also_created=created
        )

    @rule(name=NAMES)
    @precondition(lambda self: self.bodies % 5 == 4)
    def purge_a_queue(self, name: str) -> None:
        self.run(Purge(name), lambda: self.model.purge(name))

    # Messages.

    def pushing(self, name: str, group: str | None, **options: Any) -> Push:
        self.bodies += 1
        if "fifo" in name:
            group = group or "a"
            options.pop("priority", None)
        return Push(name, f"m{self.bodies}".encode(), group=group, **options)

    @rule(name=NAMES, group=st.none() | GROUPS, count=st.integers(1, 6))
    def push_some(self, name: str, group: str | None, count: int) -> None:
        for _ in range(count):
            command = self.pushing(name, group)
            self.run(command, lambda command=command: self.model.push(command))  # type: ignore[misc]

    @rule(
        name=NAMES,
        group=st.none() | GROUPS,
        delay_ms=st.none() | SHORT_MS,
        ttl_ms=st.none() | st.none() | SHORT_MS,
        priority=st.sampled_from([0, 0, 1, 9]),
        dedup_id=st.none() | st.sampled_from(["x", "y"]),
    )
    def push_with_options(self, name: str, group: str | None, **options: Any) -> None:
        command = self.pushing(name, group, **options)
        self.run(command, lambda: self.model.push(command))

    @rule()
    @precondition(lambda self: self.bodies % 11 == 10 and self.bodies < 150)
    def flood_with_one_group(self) -> None:
        """More than thirty in flight at once: that group is noisy now."""
        items: list[BatchItem] = [self.pushing("std", "a") for _ in range(34)]
        pushes = [item for item in items if isinstance(item, Push)]
        self.run(Batch(items), lambda: [outcome(lambda p=p: self.model.push(p)) for p in pushes])  # type: ignore[misc]
        command = Pull("std", 34, visibility_ms=30_000)
        self.run(command, lambda: self.model.pull(command))

    @rule(name=NAMES, limit=st.integers(1, 5))
    @precondition(lambda self: self.has_visible())
    def pull_some(self, name: str, limit: int) -> None:
        command = Pull(name, limit)
        self.run(command, lambda: self.model.pull(command))

    @rule(name=NAMES, ends=st.lists(st.sampled_from(["delete", "release", "keep"]), max_size=4))
    @precondition(lambda self: self.has_visible())
    def pull_and_end_some(self, name: str, ends: list[str]) -> None:
        """What consumers mostly do: the claims that were just made end one way or the other."""
        command = Pull(name, 4)
        before = len(self.claims)
        self.run(command, lambda: self.model.pull(command))
        for claim, end in zip(self.claims[before:], ends, strict=False):
            if end == "delete":
                delete = Delete(claim.name, claim.receipt)
                self.run(delete, lambda claim=claim: self.model.delete(claim.name, claim))  # type: ignore[misc]
            elif end == "release":
                release = Release(claim.name, claim.receipt)
                self.run(release, lambda claim=claim: self.model.release(claim.name, claim, 0))  # type: ignore[misc]

    def has_visible(self) -> bool:
        return any(queue.in_state("visible") for queue in self.model.queues.values())

    @rule(
        name=NAMES,
        limit=st.integers(1, 3),
        visibility_ms=st.none() | SHORT_MS | st.just(0),
        attempt_id=st.none() | st.sampled_from(["p", "q", "r"]),
    )
    @precondition(lambda self: self.has_visible() or self.claims)
    def pull_with_options(self, name: str, **options: Any) -> None:
        command = Pull(name, **options)
        self.run(command, lambda: self.model.pull(command))

    @rule(
        name=NAMES,
        limit=st.integers(1, 2),
        wait_ms=TIMES_MS,
        attempt_id=st.none() | st.just("p"),
    )
    def pull_and_wait(self, name: str, limit: int, wait_ms: int, attempt_id: str | None) -> None:
        command = Pull(name, limit, wait_ms=wait_ms, attempt_id=attempt_id)
        reply = self.run(command, lambda: self.model.pull(command))
        if reply == []:
            waiter = self.engine.wait(command, lambda: None)
            assert waiter is not None
            self.waits.append((waiter, self.model.wait(command, wait_ms)))

    def some_claim(self, back: int) -> KnownReceipt:
        """One of the claims ever made, mostly a late one."""
        return self.claims[-1 - back % len(self.claims)]

    @rule(back=st.integers(0, 12), late=st.booleans())
    @precondition(lambda self: self.claims)
    def delete_by_receipt(self, back: int, late: bool) -> None:
        claim = self.some_claim(back)
        command = Delete(claim.name, claim.receipt, late)
        self.run(command, lambda: self.model.delete(claim.name, claim, late))

    @rule(back=st.integers(0, 12), visibility_ms=SHORT_MS, late=st.booleans())
    @precondition(lambda self: self.claims)
    def extend_by_receipt(self, back: int, visibility_ms: int, late: bool) -> None:
        claim = self.some_claim(back)
        command = Extend(claim.name, claim.receipt, visibility_ms, late)
        self.run(command, lambda: self.model.extend(claim.name, claim, visibility_ms, late))

    @rule(back=st.integers(0, 12), delay_ms=st.just(0) | SHORT_MS, late=st.booleans())
    @precondition(lambda self: self.claims)
    def release_by_receipt(self, back: int, delay_ms: int, late: bool) -> None:
        claim = self.some_claim(back)
        command = Release(claim.name, claim.receipt, delay_ms, late)
        self.run(command, lambda: self.model.release(claim.name, claim, delay_ms, late))

    @rule(back=st.integers(0, 12), place=st.integers(0, 79), name=NAMES)
    @precondition(lambda self: self.claims and self.bodies % 2)
    def try_a_bad_receipt(self, back: int, place: int, name: str) -> None:
        claim = self.some_claim(back)
        place %= len(claim.receipt)
        other = "0" if claim.receipt[place] != "0" else "f"
        forged = claim.receipt[:place] + other + claim.receipt[place + 1 :]
        self.run(Delete(claim.name, forged), lambda: InvalidReceipt)
        self.run(Extend(claim.name, forged, 1_000), lambda: InvalidReceipt)
        self.run(Release(name, claim.receipt), lambda: self.model.release(name, claim, 0))

    @rule(
        backs=st.lists(st.integers(0, 8), min_size=1, max_size=5),
        verbs=st.lists(st.sampled_from("pder"), min_size=5, max_size=5),
        name=NAMES,
    )
    @precondition(lambda self: self.claims)
    def run_a_batch(self, backs: list[int], verbs: list[str], name: str) -> None:
        items: list[BatchItem] = []
        steps: list[Callable[[], object]] = []
        for back, verb in zip(backs, verbs, strict=False):
            claim = self.some_claim(back)
            item, step = self.batch_item(verb, claim, name)
            items.append(item)
            steps.append(step)
        self.run(Batch(items), lambda: [outcome(step) for step in steps])

    def batch_item(
        self, verb: str, claim: KnownReceipt, name: str
    ) -> tuple[BatchItem, Callable[[], object]]:
        if verb == "p":
            push = self.pushing(name, "b", dedup_id="z")
            return push, lambda: self.model.push(push)
        if verb == "d":
            return Delete(claim.name, claim.receipt), lambda: self.model.delete(claim.name, claim)
        if verb == "e":
            extend = Extend(claim.name, claim.receipt, 2_000)
            return extend, lambda: self.model.extend(claim.name, claim, 2_000)
        release = Release(claim.name, claim.receipt)
        return release, lambda: self.model.release(claim.name, claim, 0)

    @rule(name=DEAD_NAMES, to=st.none() | NAMES, limit=st.integers(1, 4))
    @precondition(lambda self: self.has_dead_letters() or self.bodies % 9 == 8)
    def redrive_some(self, name: str, to: str | None, limit: int) -> None:
        command = Redrive(name, to, limit)
        self.run(command, lambda: self.model.redrive(command))

    def has_dead_letters(self) -> bool:
        queues = self.model.queues
        return any(name in queues and queues[name].items for name in ("dead", "dead.fifo"))

    # Time, and being replaced.

    @rule(step_ms=TIMES_MS, tick=st.booleans())
    def let_time_pass(self, step_ms: int, tick: bool) -> None:
        self.clock.advance(ms=step_ms)
        self.model.now_ms = self.clock.now_ms()
        if tick:
            self.tick()

    @rule(step_ms=LONG_MS)
    @precondition(lambda self: self.bodies % 13 == 12)
    def let_much_time_pass(self, step_ms: int) -> None:
        self.let_time_pass(step_ms, True)

    def tick(self) -> None:
        self.engine.tick()
        self.model.settle()
        self.model.serve()
        self.model.time_out()
        self.meet_waits()

    @rule(from_events=st.booleans())
    def replace_the_engine(self, from_events: bool) -> None:
        """A restart, from the snapshot or from all events; whoever waited has lost touch."""
        kept = as_bytes(self.engine.shard)
        shard = replay(self.journal.events) if from_events else restored(self.engine.shard)
        assert as_bytes(shard) == kept
        self.engine = self.started(shard)
        self.waits = []
        self.model.waits = []

    # What must always hold.

    @invariant()
    def engine_and_model_agree(self) -> None:
        # Looking settles what is due; the model must have done so too.
        self.engine.submit(ListQueues())
        self.model.settle()
        self.model.serve()
        self.meet_waits()
        shard = self.engine.shard
        assert sorted(shard.names) == sorted(self.model.queues)
        assert shard.next_number == self.model.next_number
        for name, queue in self.model.queues.items():
            state = shard.names[name]
            assert [
                (d.number, d.rank, d.state, d.due_at_ms, d.epoch) for d in state.deliveries.values()
            ] == [(i.number, i.rank, STATES[i.state], i.due_at_ms, i.epoch) for i in queue.items]
            stats = self.engine.submit(Stats(name))
            assert (stats.visible, stats.delayed, stats.in_flight) == (
                len(queue.in_state("visible")),
                len(queue.in_state("delayed")),
                len(queue.in_state("in_flight")),
            )
            assert stats.stored_bytes == sum(len(item.body) for item in queue.items)
            assert stats.waiting_pulls == sum(w.queue == queue.number for w in self.model.waits)
            shown = self.engine.submit(Peek(name, 1_000))
            assert [self.ids.read(message.id) for message in shown] == [
                item.number for item in self.model.line(queue)
            ]

    @invariant()
    def nothing_is_lost(self) -> None:
        queues = self.engine.shard.queues
        there = {number: q.number for q in queues.values() for number in q.deliveries}
        assert there == self.journal.live
        assert self.model.pushed == len(there) + self.model.ended
        assert len(self.journal.epochs) == self.model.pushed

    @invariant()
    def replaying_and_restoring_give_the_living_state(self) -> None:
        self.follow()
        living = as_bytes(self.engine.shard)
        assert as_bytes(self.replica) == living
        assert as_bytes(restored(self.engine.shard)) == living

    def follow(self) -> None:
        """Brings the replica up to date."""
        for event in self.journal.events[self.replayed :]:
            self.replica.apply(event)
        self.replayed = len(self.journal.events)

    def teardown(self) -> None:
        """At the end of a life, all three go on alike: the living, the replayed, the restored."""
        self.follow()
        shards = [self.engine.shard, self.replica, restored(self.engine.shard)]
        for _ in range(12):
            self.clock.advance(ms=7_000)
            now_ms = self.clock.now_ms()
            lives = [self.live_on(shard, now_ms) for shard in shards]
            assert lives[0] == lives[1] == lives[2]
        assert as_bytes(shards[0]) == as_bytes(shards[1]) == as_bytes(shards[2])

    def live_on(self, shard: ShardState, now_ms: int) -> list[AnyEvent]:
        events = shard.settle(now_ms)
        for name in sorted(shard.names):
            outcome(lambda name=name: shard.pull(Pull(name, 3), now_ms, events))  # type: ignore[misc]
        return events


TestLives = Lives.TestCase
TestLives.settings = settings(
    max_examples=LIVES,
    stateful_step_count=STEPS,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_a_dead_letter_queue_that_was_removed_is_created_again_by_a_change():
    lives = Lives()
    lives.make_queues()
    lives.remove_a_queue("dead.fifo", again=False)
    lives.configure_a_queue("fifo", {"visibility_ms": 1}, None, per_group=False)
    lives.engine_and_model_agree()
    assert "dead.fifo" in lives.engine.shard.names
    lives.teardown()
