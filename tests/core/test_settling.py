"""Much that is due at once is settled in steps, and every command sees the right state."""

import random

import pytest

import penstock
from penstock.clock import ManualClock
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
from tests.core.life import Life, as_bytes

STORM = 2_000


@pytest.fixture
def life():
    """Two queues and an engine that settles little at a time."""
    life = Life()
    life.engine.settle_max = 20
    life.submit(CreateQueue("storm"))
    life.submit(CreateQueue("q"))
    return life


def start_storm(life, **options):
    """Messages of one queue that fall due together, five seconds from now."""
    life.submit(PushMany("storm", [b"%d" % number for number in range(STORM)], **options))


def test_a_step_settles_no_more_than_it_should(life):
    start_storm(life, delay_ms=5_000)
    life.clock.advance(seconds=5)
    for _ in range(19):
        before = len(life.journal.events)
        life.submit(ListQueues())
        assert len(life.journal.events) - before <= 20
        assert life.engine.has_due_work
        assert as_bytes(replay(life.journal.events)) == as_bytes(life.shard)
    # The first step puts them in order; each of the others settles as many as it may.
    assert life.submit(Stats("q")).visible == 0
    assert life.shard.names["storm"].visible == 20 * 19


def test_a_receipt_whose_claim_is_due_but_not_settled_is_stale(life):
    life.submit(PushMany("storm", [b"x"] * STORM))
    life.submit(Push("q", b"x"))
    life.submit(Pull("storm", STORM, visibility_ms=5_000))
    (claim,) = life.submit(Pull("q", visibility_ms=5_000))
    life.clock.advance(seconds=5)
    for command in (
        Extend("q", claim.receipt, 1_000),
        Release("q", claim.receipt),
        Delete("q", claim.receipt),
    ):
        with pytest.raises(StaleReceipt):
            life.submit(command)
    assert life.engine.has_due_work
    assert as_bytes(replay(life.journal.events)) == as_bytes(life.shard)
    (again,) = life.submit(Pull("q"))
    assert again.epoch == 2


def test_of_many_claims_that_are_due_the_one_whose_receipt_is_used_ends_first(life):
    life.submit(PushMany("storm", [b"x"] * STORM))
    claims = life.submit(Pull("storm", STORM, visibility_ms=5_000))
    life.clock.advance(seconds=5)
    last = claims[-1]
    with pytest.raises(StaleReceipt):
        life.submit(Delete("storm", last.receipt))
    ended = [event.number for event in life.journal.events if isinstance(event, ClaimExpired)]
    assert last.sequence in ended
    assert len(ended) < 100
    assert life.submit(Delete("storm", claims[-2].receipt, late=True)) is True


def test_an_attempt_whose_claims_are_due_but_not_settled_has_lapsed(life):
    life.submit(PushMany("storm", [b"x"] * STORM))
    life.submit(Pull("storm", STORM - 1, visibility_ms=4_000))
    life.submit(Pull("storm", 1, visibility_ms=5_000, attempt_id="a"))
    life.clock.advance(seconds=5)
    with pytest.raises(AttemptLapsed):
        life.submit(Pull("storm", 1, attempt_id="a"))


@pytest.mark.parametrize("retention", [False, True])
def test_no_message_is_given_out_that_is_too_old_and_not_settled_yet(life, retention):
    if retention:
        life.submit(ConfigureQueue("storm", {"retention_ms": 5_000}))
    start_storm(life, ttl_ms=None if retention else 5_000)
    life.clock.advance(ms=4_999)
    life.submit(Push("storm", b"young"))
    life.clock.advance(ms=1)
    given: list[Claim] = []
    while not given:
        given = life.submit(Pull("storm", 10))
        assert as_bytes(replay(life.journal.events)) == as_bytes(life.shard)
    assert [claim.body for claim in given] == [b"young"]
    assert sum(isinstance(event, Expired) for event in life.journal.events) == STORM


def test_a_pull_finds_what_is_due_in_its_queue_however_much_is_due_elsewhere(life):
    start_storm(life, delay_ms=5_000)
    life.submit(Push("q", b"x", delay_ms=5_001))
    life.clock.advance(ms=5_001)
    assert [claim.body for claim in life.submit(Pull("q"))] == [b"x"]
    assert life.engine.has_due_work


def test_pulls_of_the_queue_with_many_due_messages_find_them_in_order(life):
    start_storm(life, delay_ms=5_000)
    life.clock.advance(seconds=5)
    given = []
    for _ in range(STORM // 10):
        claims = life.submit(Pull("storm", 10))
        assert len(claims) == 10
        given += [int(claim.body) for claim in claims]
    assert given == list(range(STORM))


def test_a_waiting_pull_is_answered_within_a_few_ticks_however_much_is_due_elsewhere(life):
    start_storm(life, delay_ms=5_000)
    life.submit(Push("q", b"x", delay_ms=5_001))
    waiter = life.engine.wait(Pull("q", wait_ms=60_000), lambda: None)
    life.clock.advance(ms=5_002)
    for _ in range(3):
        life.engine.tick()
    assert [claim.body for claim in waiter.claims] == [b"x"]
    assert life.engine.has_due_work


def test_a_full_queue_has_room_once_some_of_its_messages_are_too_old(life):
    life.submit(ConfigureQueue("storm", {"messages_max": STORM}))
    start_storm(life, ttl_ms=5_000)
    life.clock.advance(seconds=5)
    assert life.submit(Push("storm", b"x")).id


def test_a_redrive_moves_no_message_that_is_too_old(life):
    start_storm(life, ttl_ms=5_000)
    life.submit(Push("storm", b"young"))
    life.clock.advance(seconds=5)
    moved = 0
    while life.submit(Stats("storm")).visible:
        moved += life.submit(Redrive("storm", "q", 1))
    assert moved == 1


def test_messages_in_flight_are_not_examined_again_for_each_expired_one(life):
    life.submit(ConfigureQueue("storm", {"retention_ms": 60_000}))
    start_storm(life)
    claims = life.submit(Pull("storm", STORM, visibility_ms=3_600_000))
    for number in range(100):
        life.clock.advance(ms=1_000)
        life.submit(Push("storm", b"%d" % number))
    queue = life.shard.names["storm"]
    life.clock.advance(seconds=20)
    life.engine.catch_up()
    assert queue.retention.passed == STORM
    for _ in range(30):
        life.clock.advance(ms=1_000)
        life.engine.catch_up()
        assert queue.retention.examined <= 2
    stats = life.submit(Stats("storm"))
    assert (stats.in_flight, stats.visible) == (STORM, 10)
    # What is behind those in flight is still found when some of them have left.
    for claim in claims[:500]:
        life.submit(Delete("storm", claim.receipt))
    assert queue.retention.passed == STORM - 500
    life.clock.advance(seconds=5)
    life.engine.catch_up()
    stats = life.submit(Stats("storm"))
    assert (stats.in_flight, stats.visible) == (STORM - 500, 5)


@pytest.mark.parametrize("claimed", [False, True])
def test_a_purge_takes_effect_at_once_and_is_cleaned_up_in_steps(life, claimed):
    start_storm(life, ttl_ms=50_000)
    if claimed:
        life.submit(Pull("storm", STORM // 2))
    assert life.submit(Purge("storm")) == STORM
    stats = life.submit(Stats("storm"))
    assert (stats.messages, stats.stored_bytes) == (0, 0)
    assert life.submit(Pull("storm")) == []
    life.submit(Push("storm", b"after"))
    assert [claim.body for claim in life.submit(Pull("storm"))] == [b"after"]
    life.clock.advance(seconds=100)
    life.engine.catch_up()
    assert not life.shard.discards
    assert life.submit(Stats("storm")).visible == 1
    assert as_bytes(replay(life.journal.events)) == as_bytes(life.shard)


def test_a_removed_queue_leaves_nothing_behind_but_what_is_cleaned_up_in_steps(life):
    start_storm(life, delay_ms=5_000)
    life.submit(DeleteQueue("storm"))
    assert life.shard.discards
    life.submit(CreateQueue("storm"))
    life.clock.advance(seconds=5)
    life.engine.catch_up()
    assert not life.shard.discards
    assert life.submit(Stats("storm")).messages == 0
    assert as_bytes(replay(life.journal.events)) == as_bytes(life.shard)


def test_replaying_a_purge_keeps_nothing_of_it(life):
    start_storm(life)
    life.submit(Purge("storm"))
    assert not replay(life.journal.events).discards


@pytest.mark.parametrize("seed", range(8))
def test_replay_gives_the_same_state_when_few_messages_are_settled_at_a_time(seed):
    """Many short delays, claims and TTLs, of which each step settles two."""
    rng = random.Random(seed)
    life = Life()
    life.engine.settle_max = 2
    life.submit(CreateQueue("a", {"dead_letter": "dead", "max_receives": 2}))
    life.submit(CreateQueue("b", {"fifo": True, "retention_ms": 60_000}))
    claims: list[Claim] = []
    for _ in range(400):
        name = rng.choice("ab")
        group = rng.choice("xyz") if name == "b" else None
        verb = rng.randrange(8)
        now_ms = life.clock.now_ms()
        try:
            if verb < 3:
                delay_ms, ttl_ms = rng.choice([None, 500, 2_000]), rng.choice([None, 900, 3_000])
                life.submit(Push(name, b"x", delay_ms=delay_ms, ttl_ms=ttl_ms, group=group))
            elif verb < 5:
                given = life.submit(Pull(name, rng.randrange(1, 6), visibility_ms=1_000))
                for claim in given:
                    queue = life.shard.names[name]
                    assert not queue.is_expired(queue.deliveries[claim.sequence], now_ms)
                claims += given
            elif verb < 7 and claims:
                claim = claims.pop(rng.randrange(len(claims)))
                receipt = claim.receipt
                command: Delete | Release = Delete(claim.queue, receipt)
                if verb == 6:
                    command = Release(claim.queue, receipt)
                # False if the message is gone.
                if life.submit(command) is not False:
                    assert claim.deadline_ms > now_ms
            else:
                life.clock.advance(ms=rng.choice([10, 300, 1_000, 5_000]))
        except RequestError:
            pass
        assert as_bytes(replay(life.journal.events)) == as_bytes(life.shard)
    life.engine.catch_up()
    now_ms = life.clock.now_ms()
    for queue in life.shard.queues.values():
        for each in queue.deliveries.values():
            assert each.due_at_ms > now_ms or each.state == 1
            assert each.state == 2 or not queue.is_expired(each, now_ms)


def test_a_retention_shortened_while_the_queue_is_empty_holds_for_what_comes():
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


def test_redriven_messages_whose_claims_end_together_are_dead_in_the_order_of_their_queue():
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
