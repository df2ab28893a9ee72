"""Row 9: dead letters whose queue is in another shard are pushed there until they have arrived."""

import pytest

from penstock.core.delivery import DEPARTED
from penstock.core.events import Arrived, ClaimExpired, Departed, Lost, Released
from penstock.core.replay import apply_if_new
from penstock.core.shard import ShardState, replay
from penstock.errors import MessageGone
from penstock.service import (
    DEDUP_WINDOW_MS,
    ConfigureQueue,
    CreateQueue,
    DeleteQueue,
    Extend,
    ListQueues,
    Peek,
    Pull,
    Purge,
    Push,
    Redrive,
    Release,
    Stats,
)
from tests.core.observed import ObservedEngine, as_bytes

SHARD, OTHER = 3, 7


class SourceShard(ObservedEngine):
    """Shard 3, whose queue `work` has its dead letters in shard 7."""

    def __init__(self, **settings):
        super().__init__()
        self.shard.number = SHARD
        self.shard.elsewhere = {"away": OTHER}
        chosen = {"dead_letter": "away", "max_receives": 1, "visibility_ms": 1_000}
        self.submit(CreateQueue("work", chosen | settings))

    def depart(self, body=b"body", **fields):
        """Pushes a message and lets its only claim run out; returns its departure."""
        self.submit(Push("work", body, **fields))
        self.submit(Pull("work"))
        self.clock.advance(ms=1_000)
        self.engine.catch_up()
        return self.shard.outbox()[-1]


class TargetShard(ObservedEngine):
    """Shard 7, which has the dead-letter queue."""

    def __init__(self, **settings):
        super().__init__()
        self.shard.number = OTHER
        self.submit(CreateQueue("away", settings))


def route(source, target, arrives=True):
    """What a router does once: pushes all departed messages, and confirms those that arrived."""
    for owed, content in source.engine.departures():
        assert owed.to_shard == target.shard.number
        target.submit(owed.push(content))
        if arrives:
            assert source.engine.arrived(owed.delivery.number, owed.delivery.epoch)


def counts(observed, queue):
    stats = observed.submit(Stats(queue))
    return stats.visible, stats.delayed, stats.in_flight, stats.stored_bytes


def test_a_dead_letter_queue_of_another_shard_is_not_created_in_this_one():
    source = SourceShard()
    assert source.submit(ListQueues()) == ["work"]
    source.submit(CreateQueue("other"))
    source.submit(ConfigureQueue("other", {"dead_letter": "away", "max_receives": 2}))
    source.submit(ConfigureQueue("work", {"dead_letter": "here", "max_receives": 2}))
    assert source.submit(ListQueues()) == ["here", "other", "work"]


def test_a_message_whose_last_allowed_claim_runs_out_departs():
    source = SourceShard()
    owed = source.depart(b"body")
    at_ms = source.clock.now_ms()
    assert source.journal.events[-2:] == [
        ClaimExpired(at_ms, 1, 1, 1),
        Departed(at_ms, 1, 1, 1, OTHER, "away"),
    ]
    assert (owed.source, owed.to_shard, owed.to_queue) == (1, OTHER, "away")
    assert owed.dedup_id == "departed-3-1-1"
    assert owed.delivery.state == DEPARTED
    assert counts(source, "work") == (0, 0, 0, 0)
    assert source.shard.departed.stored_bytes == 4


def test_a_release_departs_and_the_error_of_its_receipt_names_the_dead_letter_queue():
    source = SourceShard()
    source.submit(Push("work", b"body"))
    (claim,) = source.submit(Pull("work"))
    source.submit(Release("work", claim.proof, delay_ms=500))
    released, departed = source.journal.events[-2:]
    assert (type(released), type(departed)) == (Released, Departed)
    with pytest.raises(MessageGone, match="in another shard"):
        source.submit(Extend("work", claim.proof, 1_000))


def test_a_message_over_a_lowered_limit_departs_when_a_pull_finds_it():
    source = SourceShard(max_receives=5)
    source.submit(Push("work", b"body"))
    (claim,) = source.submit(Pull("work"))
    source.submit(Release("work", claim.proof))
    source.submit(ConfigureQueue("work", {"max_receives": 1}))
    source.submit(Push("work", b"next"))
    assert [each.body for each in source.submit(Pull("work", 10))] == [b"next"]
    assert [each.dedup_id for each in source.shard.outbox()] == ["departed-3-1-1"]


def test_messages_return_to_their_queue_if_its_dead_letter_queue_does_not_exist():
    source = SourceShard()
    source.shard.elsewhere = {}
    source.submit(Push("work", b"body"))
    for _ in range(3):
        assert len(source.submit(Pull("work"))) == 1
        source.clock.advance(ms=1_000)
    assert source.shard.outbox() == []


def test_a_dead_letter_queue_of_this_shard_is_preferred_to_one_in_another():
    source = SourceShard()
    source.submit(CreateQueue("away"))
    source.submit(Push("work", b"body"))
    source.submit(Pull("work"))
    source.clock.advance(ms=1_000)
    assert [each.body for each in source.submit(Pull("away"))] == [b"body"]
    assert source.shard.outbox() == []


@pytest.mark.parametrize("spread", ["work", "away"])
def test_dead_letters_depart_if_either_queue_is_in_other_shards_too(spread):
    source = SourceShard()
    source.submit(CreateQueue("away"))
    source.shard.spread = {spread}
    source.depart(b"body")
    assert source.submit(Pull("away")) == []
    (owed,) = source.shard.outbox()
    assert (owed.to_queue, owed.to_shard) == ("away", OTHER)
    # It also departs if this is the home shard of the queue.
    source.shard.elsewhere = {}
    assert source.depart(b"next").to_shard == SHARD


def test_a_departed_message_arrives_once_and_leaves_the_outbox():
    source, target = SourceShard(), TargetShard(delay_ms=5_000)
    source.depart(b"body", attributes={"a": "b"}, context={"trace": "1"}, priority=4, ttl_ms=60_000)
    route(source, target)
    (claim,) = target.submit(Pull("away"))
    assert (claim.body, claim.attributes, claim.priority) == (b"body", {"a": "b"}, 4)
    assert claim.context == {"trace": "1"}
    assert source.shard.outbox() == []
    assert source.shard.departed.stored_bytes == 0
    assert isinstance(source.journal.events[-1], Arrived)
    assert not source.engine.arrived(1, 1), "its arrival was confirmed before"
    assert not source.engine.arrived(99, 1)


def test_an_arrival_of_another_epoch_changes_nothing():
    source = SourceShard()
    source.depart()
    assert source.shard.decide_arrived(1, 2, source.clock.now_ms()) is None
    assert len(source.shard.outbox()) == 1


@pytest.mark.parametrize("settings", [{}, {"dedup_by_content": True}])
def test_a_push_whose_answer_was_lost_is_pushed_again_and_gives_one_message(settings):
    source, target = SourceShard(), TargetShard(**settings)
    source.depart(b"body")
    source.depart(b"body")
    route(source, target, arrives=False)
    # The shard restarts from its journal, which has no Arrived.
    restarted = replay(source.journal.events)
    restarted.number = SHARD
    assert [each.dedup_id for each in restarted.outbox()] == ["departed-3-1-1", "departed-3-2-1"]
    assert restarted.outbox() == source.shard.outbox()
    target.clock.advance(ms=DEDUP_WINDOW_MS - 1)
    route(source, target)
    assert counts(target, "away")[0] == 2
    assert source.shard.outbox() == []


def test_messages_of_a_fifo_group_arrive_in_the_order_of_their_departure():
    source, target = SourceShard(fifo=True), TargetShard(fifo=True)
    for body in (b"1", b"2", b"3"):
        source.depart(body, group="g")
    route(source, target)
    assert [each.body for each in target.submit(Pull("away", 10))] == [b"1", b"2", b"3"]


def test_after_a_departure_the_next_message_of_the_group_can_be_pulled():
    source = SourceShard(fifo=True)
    source.submit(Push("work", b"1", group="g"))
    source.submit(Push("work", b"2", group="g"))
    source.submit(Pull("work"))
    source.clock.advance(ms=1_000)
    assert [each.body for each in source.submit(Pull("work"))] == [b"2"]
    assert len(source.shard.outbox()) == 1


@pytest.mark.parametrize("fifo", [False, True])
def test_purge_age_redrive_and_removal_do_not_change_the_outbox(fifo):
    source, target = SourceShard(fifo=fifo), TargetShard(fifo=fifo)
    source.depart(b"departed", group="g", ttl_ms=5_000)
    source.submit(Push("work", b"waits", group="g"))
    source.submit(CreateQueue("aside", {"fifo": fifo}))
    assert source.submit(Redrive("work", to="aside")) == 1
    source.submit(Push("work", b"waits", group="g"))
    assert source.submit(Purge("work")) == 1, "only messages in the queue are counted"
    assert source.submit(Peek("work")) == []
    source.clock.advance(ms=30 * 24 * 3_600_000)
    source.engine.catch_up()
    source.submit(DeleteQueue("work"))
    assert as_bytes(replay(source.journal.events)) == as_bytes(source.shard)
    route(source, target)
    assert [each.body for each in target.submit(Pull("away", 10))] == [b"departed"]
    assert as_bytes(replay(source.journal.events)) == as_bytes(source.shard)
    assert source.shard.outbox() == []


def test_the_target_of_a_departed_message_is_the_one_configured_at_its_departure():
    source = SourceShard()
    source.depart()
    source.shard.elsewhere = {"away": OTHER, "farther": 9}
    source.submit(ConfigureQueue("work", {"dead_letter": "farther"}))
    source.depart()
    assert [each[2:4] for each in source.shard.outbox()] == [(OTHER, "away"), (9, "farther")]


def test_replay_and_restore_give_the_same_outbox():
    source = SourceShard()
    for number in range(4):
        source.depart(b"body%d" % number, priority=number)
    source.engine.arrived(2, 1)
    replayed = replay(source.journal.events)
    restored = ShardState.restore(source.shard.snapshot())
    for shard in (replayed, restored):
        shard.number = SHARD
        assert as_bytes(shard) == as_bytes(source.shard)
        assert shard.outbox() == source.shard.outbox()
        assert shard.departed.stored_bytes == 15, "three bodies of five bytes"
    assert [each.delivery.number for each in restored.outbox(2)] == [1, 3]


def test_events_replayed_over_a_later_state_change_nothing():
    source = SourceShard()
    source.depart()
    source.depart()
    source.engine.arrived(1, 1)
    later = ShardState.restore(source.shard.snapshot())
    for event in source.journal.events:
        assert not apply_if_new(later, event)
    assert as_bytes(later) == as_bytes(source.shard)


def test_replaying_the_whole_journal_over_any_earlier_state_gives_the_last_state():
    source = SourceShard()
    for _ in range(2):
        source.depart()
    source.engine.arrived(1, 1)
    events = source.journal.events
    for at in range(len(events) + 1):
        shard = replay(events[:at])
        for event in events:
            apply_if_new(shard, event)
        assert as_bytes(shard) == as_bytes(source.shard)


@pytest.mark.parametrize("lost", ["Claimed", "ClaimExpired", "Departed"])
def test_a_later_event_of_a_message_is_applied_although_an_earlier_one_was_lost(lost):
    source = SourceShard()
    source.depart()
    events = [each for each in source.journal.events if type(each).__name__ != lost]
    shard = ShardState()
    for event in events:
        apply_if_new(shard, event)
    owed = [each.delivery.number for each in shard.outbox()]
    assert owed == ([] if lost == "Departed" else [1])
    assert apply_if_new(shard, Arrived(source.clock.now_ms(), 1, 1, 1)) == (lost != "Departed")
    assert shard.outbox() == []
    queue = shard.queues[1]
    assert (queue.deliveries, queue.in_flight, queue.stored_bytes) == ({}, 0, 0)


def test_an_arrival_is_applied_although_the_queue_was_removed():
    source = SourceShard()
    source.depart()
    source.submit(DeleteQueue("work"))
    shard = replay(source.journal.events)
    assert apply_if_new(shard, Arrived(source.clock.now_ms(), 1, 1, 1))
    assert shard.outbox() == []


def test_a_departed_message_whose_content_is_damaged_leaves_the_outbox():
    source = SourceShard()
    source.depart()
    lost = Lost(source.clock.now_ms(), 1, 1, 1)
    shard = replay(source.journal.events)
    assert apply_if_new(shard, lost)
    assert not apply_if_new(shard, lost)
    assert shard.outbox() == []
