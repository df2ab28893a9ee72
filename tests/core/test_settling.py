"""Row 27: of many messages that are due at once, every command sees the right state."""

import random

import pytest

import penstock
from penstock.clock import ManualClock
from penstock.core.delivery import IN_FLIGHT, VISIBLE
from penstock.core.events import ClaimExpired, Expired
from penstock.core.shard import replay
from penstock.errors import AttemptLapsed, RequestError, StaleReceipt
from penstock.service import (
    Claim,
    ConfigureQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    Extend,
    ListQueues,
    Pull,
    Purge,
    Push,
    PushMany,
    Redrive,
    Release,
    Stats,
)
from tests.core.observed import ObservedEngine, as_bytes

MANY = 2_000


@pytest.fixture
def observed():
    """Two queues, and an engine that settles few messages at a time."""
    observed = ObservedEngine()
    observed.engine.settle_max = 20
    observed.submit(CreateQueue("many"))
    observed.submit(CreateQueue("q"))
    return observed


def push_due_together(observed, **options):
    """Pushes many messages to one queue, whose delay or TTL ends at the same time."""
    observed.submit(PushMany("many", [b"%d" % number for number in range(MANY)], **options))


def test_a_step_settles_no_more_than_its_limit(observed):
    push_due_together(observed, delay_ms=5_000)
    observed.clock.advance(seconds=5)
    for _ in range(19):
        before = len(observed.journal.events)
        observed.submit(ListQueues())
        assert len(observed.journal.events) - before <= 20
        assert observed.engine.has_due_work
        assert as_bytes(replay(observed.journal.events)) == as_bytes(observed.shard)
    # The first step sorts them; each of the others settles as many as its limit allows.
    assert observed.submit(Stats("q")).visible == 0
    assert observed.shard.names["many"].visible == 20 * 19


def test_a_receipt_whose_claim_is_due_but_not_settled_is_stale(observed):
    observed.submit(PushMany("many", [b"x"] * MANY))
    observed.submit(Push("q", b"x"))
    observed.submit(Pull("many", MANY, visibility_ms=5_000))
    (claim,) = observed.submit(Pull("q", visibility_ms=5_000))
    observed.clock.advance(seconds=5)
    for command in (
        Extend("q", claim.receipt, 1_000),
        Release("q", claim.receipt),
        Delete("q", claim.receipt),
    ):
        with pytest.raises(StaleReceipt):
            observed.submit(command)
    assert observed.engine.has_due_work
    assert as_bytes(replay(observed.journal.events)) == as_bytes(observed.shard)
    (again,) = observed.submit(Pull("q"))
    assert again.epoch == 2


def test_of_many_claims_that_are_due_the_one_whose_receipt_is_used_ends_first(observed):
    observed.submit(PushMany("many", [b"x"] * MANY))
    claims = observed.submit(Pull("many", MANY, visibility_ms=5_000))
    observed.clock.advance(seconds=5)
    last = claims[-1]
    with pytest.raises(StaleReceipt):
        observed.submit(Delete("many", last.receipt))
    ended = [event.number for event in observed.journal.events if isinstance(event, ClaimExpired)]
    assert last.sequence in ended
    assert len(ended) < 100
    assert observed.submit(Delete("many", claims[-2].receipt, late=True)) is True


def test_an_attempt_whose_claims_are_due_but_not_settled_has_lapsed(observed):
    observed.submit(PushMany("many", [b"x"] * MANY))
    observed.submit(Pull("many", MANY - 1, visibility_ms=4_000))
    observed.submit(Pull("many", 1, visibility_ms=5_000, attempt_id="a"))
    observed.clock.advance(seconds=5)
    with pytest.raises(AttemptLapsed):
        observed.submit(Pull("many", 1, attempt_id="a"))


@pytest.mark.parametrize("retention", [False, True])
def test_an_expired_message_is_not_pulled_even_if_it_is_not_settled_yet(observed, retention):
    if retention:
        observed.submit(ConfigureQueue("many", {"retention_ms": 5_000}))
    push_due_together(observed, ttl_ms=None if retention else 5_000)
    observed.clock.advance(ms=4_999)
    observed.submit(Push("many", b"young"))
    observed.clock.advance(ms=1)
    given: list[Claim] = []
    while not given:
        given = observed.submit(Pull("many", 10))
        assert as_bytes(replay(observed.journal.events)) == as_bytes(observed.shard)
    assert [claim.body for claim in given] == [b"young"]
    assert sum(isinstance(event, Expired) for event in observed.journal.events) == MANY


def test_a_pull_finds_what_is_due_in_its_queue_while_much_is_due_in_another(observed):
    push_due_together(observed, delay_ms=5_000)
    observed.submit(Push("q", b"x", delay_ms=5_001))
    observed.clock.advance(ms=5_001)
    assert [claim.body for claim in observed.submit(Pull("q"))] == [b"x"]
    assert observed.engine.has_due_work


def test_pulls_of_the_queue_with_many_due_messages_find_them_in_order(observed):
    push_due_together(observed, delay_ms=5_000)
    observed.clock.advance(seconds=5)
    given = []
    for _ in range(MANY // 10):
        claims = observed.submit(Pull("many", 10))
        assert len(claims) == 10
        given += [int(claim.body) for claim in claims]
    assert given == list(range(MANY))


def test_a_waiting_pull_is_answered_within_three_ticks_while_much_is_due_elsewhere(observed):
    push_due_together(observed, delay_ms=5_000)
    observed.submit(Push("q", b"x", delay_ms=5_001))
    waiter = observed.engine.wait(Pull("q", wait_ms=60_000), lambda: None)
    observed.clock.advance(ms=5_002)
    for _ in range(3):
        observed.engine.tick()
    assert [claim.body for claim in waiter.claims] == [b"x"]
    assert observed.engine.has_due_work


def test_a_full_queue_has_room_once_some_of_its_messages_have_expired(observed):
    observed.submit(ConfigureQueue("many", {"messages_max": MANY}))
    push_due_together(observed, ttl_ms=5_000)
    observed.clock.advance(seconds=5)
    assert observed.submit(Push("many", b"x")).id


def test_a_redrive_moves_no_expired_message(observed):
    push_due_together(observed, ttl_ms=5_000)
    observed.submit(Push("many", b"young"))
    observed.clock.advance(seconds=5)
    moved = 0
    while observed.submit(Stats("many")).visible:
        moved += observed.submit(Redrive("many", "q", 1))
    assert moved == 1


def test_messages_in_flight_are_not_examined_again_for_each_expired_one(observed):
    observed.submit(ConfigureQueue("many", {"retention_ms": 60_000}))
    push_due_together(observed)
    claims = observed.submit(Pull("many", MANY, visibility_ms=3_600_000))
    for number in range(100):
        observed.clock.advance(ms=1_000)
        observed.submit(Push("many", b"%d" % number))
    queue = observed.shard.names["many"]
    observed.clock.advance(seconds=20)
    observed.engine.catch_up()
    assert queue.retention.passed == MANY
    for _ in range(30):
        observed.clock.advance(ms=1_000)
        observed.engine.catch_up()
        assert queue.retention.examined <= 2
    stats = observed.submit(Stats("many"))
    assert (stats.in_flight, stats.visible) == (MANY, 10)
    # Messages after those in flight are still found when some of these were deleted.
    for claim in claims[:500]:
        observed.submit(Delete("many", claim.receipt))
    assert queue.retention.passed == MANY - 500
    observed.clock.advance(seconds=5)
    observed.engine.catch_up()
    stats = observed.submit(Stats("many"))
    assert (stats.in_flight, stats.visible) == (MANY - 500, 5)


@pytest.mark.parametrize("claimed", [False, True])
def test_a_purge_takes_effect_at_once_and_is_cleaned_up_in_steps(observed, claimed):
    push_due_together(observed, ttl_ms=50_000)
    if claimed:
        observed.submit(Pull("many", MANY // 2))
    assert observed.submit(Purge("many")) == MANY
    stats = observed.submit(Stats("many"))
    assert (stats.messages, stats.stored_bytes) == (0, 0)
    assert observed.submit(Pull("many")) == []
    observed.submit(Push("many", b"after"))
    assert [claim.body for claim in observed.submit(Pull("many"))] == [b"after"]
    observed.clock.advance(seconds=100)
    observed.engine.catch_up()
    assert not observed.shard.discards
    assert observed.submit(Stats("many")).visible == 1
    assert as_bytes(replay(observed.journal.events)) == as_bytes(observed.shard)


def test_the_messages_of_a_removed_queue_are_cleaned_up_in_steps(observed):
    push_due_together(observed, delay_ms=5_000)
    observed.submit(DeleteQueue("many"))
    assert observed.shard.discards
    observed.submit(CreateQueue("many"))
    observed.clock.advance(seconds=5)
    observed.engine.catch_up()
    assert not observed.shard.discards
    assert observed.submit(Stats("many")).messages == 0
    assert as_bytes(replay(observed.journal.events)) == as_bytes(observed.shard)


def test_replaying_a_purge_leaves_nothing_to_clean_up(observed):
    push_due_together(observed)
    observed.submit(Purge("many"))
    assert not replay(observed.journal.events).discards


@pytest.mark.parametrize("seed", range(8))
def test_replay_gives_the_same_state_when_few_messages_are_settled_at_a_time(seed):
    """Many short delays, claims and TTLs, of which each step settles two."""
    rng = random.Random(seed)
    observed = ObservedEngine()
    observed.engine.settle_max = 2
    observed.submit(CreateQueue("a", {"dead_letter": "dead", "max_receives": 2}))
    observed.submit(CreateQueue("b", {"fifo": True, "retention_ms": 60_000}))
    claims: list[Claim] = []
    for _ in range(400):
        name = rng.choice("ab")
        group = rng.choice("xyz") if name == "b" else None
        verb = rng.randrange(8)
        now_ms = observed.clock.now_ms()
        try:
            if verb < 3:
                delay_ms, ttl_ms = rng.choice([None, 500, 2_000]), rng.choice([None, 900, 3_000])
                observed.submit(Push(name, b"x", delay_ms=delay_ms, ttl_ms=ttl_ms, group=group))
            elif verb < 5:
                given = observed.submit(Pull(name, rng.randrange(1, 6), visibility_ms=1_000))
                for claim in given:
                    queue = observed.shard.names[name]
                    assert not queue.is_expired(queue.deliveries[claim.sequence], now_ms)
                claims += given
            elif verb < 7 and claims:
                claim = claims.pop(rng.randrange(len(claims)))
                receipt = claim.receipt
                command: Delete | Release = Delete(claim.queue, receipt)
                if verb == 6:
                    command = Release(claim.queue, receipt)
                # False if the message is gone.
                if observed.submit(command) is not False:
                    assert claim.deadline_ms > now_ms
            else:
                observed.clock.advance(ms=rng.choice([10, 300, 1_000, 5_000]))
        except RequestError:
            pass
        assert as_bytes(replay(observed.journal.events)) == as_bytes(observed.shard)
    observed.engine.catch_up()
    now_ms = observed.clock.now_ms()
    for queue in observed.shard.queues.values():
        for each in queue.deliveries.values():
            assert each.due_at_ms > now_ms or each.state == VISIBLE
            assert each.state == IN_FLIGHT or not queue.is_expired(each, now_ms)


def test_a_retention_shortened_while_the_queue_is_empty_holds_for_later_messages():
    clock = ManualClock()
    with penstock.connect("memory:", clock=clock) as queues:
        queues.create("orders")
        queues.push("orders", b"gone before")
        claim = queues.pull("orders")
        assert claim is not None
        queues.delete(claim)
        queues.configure("orders", retention=60)
        queues.push("orders", b"short-lived")
        clock.advance(seconds=61)
        assert queues.stats("orders").messages == 0


def test_redriven_messages_whose_claims_end_together_are_dead_lettered_in_their_order():
    clock = ManualClock()
    with penstock.connect("memory:", clock=clock) as queues:
        queues.create("dead")
        queues.create("work", dead_letter="dead", max_receives=1, visibility_timeout=10)
        queues.push_many("work", ["first", "second"])
        first, second = queues.pull_many("work", 2)
        queues.release(second)
        queues.release(first)
        queues.redrive("dead")
        assert [claim.body for claim in queues.pull_many("work", 2)] == [b"second", b"first"]
        clock.advance(seconds=10)
        assert [claim.body for claim in queues.pull_many("dead", 2)] == [b"second", b"first"]
