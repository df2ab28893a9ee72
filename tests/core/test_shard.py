"""The state of a shard is determined by its events, and a snapshot contains all of it."""

import msgspec
import pytest

from penstock.core.events import Pushed, QueueCreated
from penstock.core.shard import ShardState, replay
from penstock.errors import AttemptLapsed, InvalidField, QueueNotFound
from penstock.service import (
    Batch,
    ConfigureQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    DescribeQueue,
    Extend,
    Peek,
    Pull,
    Purge,
    Push,
    Redrive,
    Release,
    Stats,
)
from tests.core.observed import ObservedEngine, as_bytes


@pytest.fixture
def observed():
    """An engine after commands that cause every kind of event of a message."""
    observed = ObservedEngine()
    submit, clock = observed.submit, observed.clock
    submit(CreateQueue("std", {"dead_letter": "dead", "max_receives": 2}))
    submit(CreateQueue("fifo", {"fifo": True, "dedup_per_group": True}))
    submit(CreateQueue("removed"))
    for number in range(12):
        submit(Push("std", f"s{number}".encode(), priority=number % 3, group=f"g{number % 2}"))
        submit(Push("fifo", f"f{number}".encode(), group=f"g{number % 3}", dedup_id=str(number)))
        submit(Push("removed", b"x", delay_ms=number * 1_000))
    submit(Push("std", b"late", delay_ms=60_000, attributes={"a": b"\x00", "b": "text"}))
    submit(Push("std", b"short", ttl_ms=1_500))
    claims = submit(Pull("std", 6, visibility_ms=3_000, attempt_id="attempt", holder="me"))
    submit(Delete("std", claims[0].receipt))
    submit(Release("std", claims[1].receipt))
    submit(Release("std", claims[2].receipt, 5_000))
    submit(Extend("std", claims[3].receipt, 90_000))
    held = submit(Pull("fifo", 5, visibility_ms=40_000))
    submit(Batch([Delete("fifo", held[0].receipt), Release("fifo", held[1].receipt)]))
    clock.advance(seconds=2)
    submit(Purge("removed"))
    submit(DeleteQueue("removed"))
    submit(ConfigureQueue("std", {"retention_ms": 600_000}))
    clock.advance(seconds=2)
    submit(Pull("std", 2, visibility_ms=1_000))
    clock.advance(seconds=2)
    submit(Stats("std"))
    submit(Redrive("dead", None, 1))
    return observed


def test_replaying_the_events_gives_the_running_state_byte_for_byte(observed):
    kinds = {type(event).__name__ for event in observed.journal.events}
    assert kinds == {
        *("QueueCreated", "QueueConfigured", "QueueRemoved", "QueuePurged", "Pushed", "Moved"),
        *("DelayEnded", "Claimed", "Extended", "Released", "ClaimExpired", "Deleted", "Expired"),
    }
    assert as_bytes(replay(observed.journal.events)) == as_bytes(observed.shard)


def test_every_prefix_of_the_events_can_be_replayed_and_restored(observed):
    growing = ShardState()
    for event in observed.journal.events:
        growing.apply(event)
        kept = as_bytes(growing)
        assert as_bytes(ShardState.restore(growing.snapshot())) == kept


def test_a_restored_shard_makes_the_same_events_as_the_one_the_snapshot_was_taken_of(observed):
    # The snapshot is of a replayed shard: one of the running shard would share its deliveries.
    restored = ShardState.restore(replay(observed.journal.events).snapshot())
    running = observed.shard
    for _ in range(20):
        observed.clock.advance(seconds=11)
        now_ms = observed.clock.now_ms()
        made = []
        for shard in (running, restored):
            events = shard.settle(now_ms)
            for name in sorted(shard.names):
                shard.pull(Pull(name, 2, attempt_id=None), now_ms, events)
            made.append(events)
        assert made[0] == made[1]
    assert as_bytes(running) == as_bytes(restored)
    assert any(queue.deliveries for queue in running.queues.values())


def test_a_restored_shard_has_the_same_counts(observed):
    restored = ShardState.restore(replay(observed.journal.events).snapshot())
    for name, queue in observed.shard.names.items():
        again = restored.names[name]
        counts = (queue.visible, queue.delayed, queue.in_flight, queue.stored_bytes)
        assert (again.visible, again.delayed, again.in_flight, again.stored_bytes) == counts
        shown = [each.number for each in observed.shard.peek(Peek(name, 100))]
        assert [each.number for each in restored.peek(Peek(name, 100))] == shown


def test_a_snapshot_is_plain_data(observed):
    plain = msgspec.msgpack.decode(as_bytes(observed.shard))
    assert isinstance(plain, list)
    next_number, next_queue, queues = plain
    assert next_number == observed.shard.next_number
    assert next_queue == observed.shard.next_queue
    assert [queue[1] for queue in queues] == list(observed.shard.names)


def test_a_restored_shard_has_the_dedup_ids_and_attempts(observed):
    restored = ShardState.restore(replay(observed.journal.events).snapshot())
    now_ms = observed.clock.now_ms()
    earlier = restored.decide_push(Push("fifo", b"x", group="g1", dedup_id="1"), now_ms)
    assert isinstance(earlier, int)
    other = restored.decide_push(Push("fifo", b"x", group="g2", dedup_id="1"), now_ms)
    assert not isinstance(other, int)
    assert restored.names["std"].attempts.find("attempt", now_ms) is not None


def test_deciding_changes_nothing(observed):
    shard, now_ms = observed.shard, observed.clock.now_ms()
    before = as_bytes(shard)
    assert not isinstance(shard.decide_push(Push("std", b"x"), now_ms), int)
    assert len(shard.decide_create(CreateQueue("new"), now_ms)) == 1
    assert len(shard.decide_configure(ConfigureQueue("std", {"delay_ms": 5}), now_ms)) == 1
    assert shard.decide_remove("std", now_ms).count == len(shard.names["std"].deliveries)
    assert shard.decide_purge("std", now_ms).count == len(shard.names["std"].deliveries)
    with pytest.raises(QueueNotFound):
        shard.decide_purge("nowhere", now_ms)
    with pytest.raises(InvalidField):
        shard.decide_create(CreateQueue("std2", {"dead_letter": "std2", "max_receives": 1}), now_ms)
    assert as_bytes(shard) == before


def test_queue_and_message_numbers_are_never_used_again(observed):
    observed.submit(CreateQueue("removed"))
    created = [event for event in observed.journal.events if isinstance(event, QueueCreated)]
    numbers = [event.queue for event in created]
    assert len(numbers) == len(set(numbers)) == 5
    pushed = [event.number for event in observed.journal.events if isinstance(event, Pushed)]
    assert len(pushed) == len(set(pushed))


def test_an_outdated_deadline_of_a_message_has_no_effect():
    observed = ObservedEngine()
    observed.submit(CreateQueue("dead.fifo", {"fifo": True}))
    limited = {"fifo": True, "visibility_ms": 1, "dead_letter": "dead.fifo", "max_receives": 3}
    observed.submit(CreateQueue("q.fifo", limited))
    observed.submit(Push("q.fifo", b"x", group="g"))
    # The first claim runs out, so that later deadlines are in a bucket that is open.
    observed.submit(Pull("q.fifo"))
    observed.clock.advance(ms=1)
    (claim,) = observed.submit(Pull("q.fifo"))
    observed.submit(Release("q.fifo", claim.receipt))
    observed.submit(Pull("q.fifo"))
    observed.clock.advance(ms=1)
    assert observed.submit(Stats("dead.fifo")).visible == 1
    assert observed.submit(Stats("q.fifo")).messages == 0


def test_setting_a_note_of_a_queue_does_not_change_when_it_was_configured():
    observed = ObservedEngine()
    observed.submit(CreateQueue("q", {"annotations": {"kind": "test"}}))
    made = observed.submit(DescribeQueue("q"))
    observed.clock.advance(seconds=1)
    noted = {"kind": "test", ".seen": "1"}
    info = observed.submit(ConfigureQueue("q", {"annotations": noted}))
    assert (info.settings.annotations, info.configured_at_ms) == (noted, made.created_at_ms)
    observed.submit(ConfigureQueue("q", {"annotations": {"kind": "other", ".seen": "1"}}))
    changed = observed.submit(DescribeQueue("q"))
    assert changed.configured_at_ms == observed.clock.now_ms() > made.created_at_ms
    assert as_bytes(replay(observed.journal.events)) == as_bytes(observed.shard)


def test_of_attempts_that_have_ended_only_the_ids_are_kept():
    observed = ObservedEngine()
    observed.submit(CreateQueue("q"))
    for number in range(20):
        observed.submit(Batch([Push("q", b"x")] * 10))
        claims = observed.submit(Pull("q", 10, attempt_id=f"attempt-{number}"))
        if number != 7:
            observed.submit(Batch([Delete("q", claim.receipt) for claim in claims[number % 2 :]]))
    queue = observed.engine.shard.names["q"]
    kept = [len(epochs) for _, _, epochs in queue.attempts.entries()]
    assert sum(kept) < 60
    assert len(observed.submit(Pull("q", 10, attempt_id="attempt-7"))) == 10
    for number in (0, 1, 19):
        with pytest.raises(AttemptLapsed):
            observed.submit(Pull("q", 10, attempt_id=f"attempt-{number}"))
    shown = queue.attempt_entries()
    assert [key for _, key, pairs in shown if pairs] == ["attempt-7"]
