"""A receipt whose claim has run out, used by a caller that allows late receipts."""

import pytest

from penstock.core.replay import apply_if_new
from penstock.core.shard import ShardState, replay
from penstock.errors import MessageGone, StaleReceipt
from penstock.service import CreateQueue, Delete, Extend, Peek, Pull, Push, Release, Stats
from tests.core.life import Life, as_bytes


def lapsed(life: Life, **settings) -> str:
    """The receipt of a claim that has run out, on the queue `q`."""
    life.submit(CreateQueue("q", {"visibility_ms": 1_000, **settings}))
    group = "g" if settings.get("fifo") else None
    life.submit(Push("q", b"x", group=group))
    (claim,) = life.submit(Pull("q"))
    life.clock.advance(seconds=1)
    assert life.submit(Peek("q"))
    return claim.receipt


def test_a_late_delete_removes_a_message_that_was_not_claimed_since():
    life = Life()
    receipt = lapsed(life)
    with pytest.raises(StaleReceipt):
        life.submit(Delete("q", receipt))
    assert life.submit(Delete("q", receipt, late=True)) is True
    assert life.submit(Stats("q")).messages == 0
    assert life.submit(Delete("q", receipt, late=True)) is False


def test_a_late_extension_makes_the_claim_valid_again_with_its_receipt():
    life = Life()
    receipt = lapsed(life)
    with pytest.raises(StaleReceipt):
        life.submit(Extend("q", receipt, 5_000))
    assert life.submit(Extend("q", receipt, 5_000, late=True)) == life.clock.now_ms() + 5_000
    assert life.submit(Pull("q")) == []
    assert life.submit(Stats("q")).in_flight == 1
    # It is a claim like any other again: no lateness is needed to end it.
    assert life.submit(Delete("q", receipt)) is True


def test_a_claim_that_was_extended_late_runs_out_at_its_new_deadline():
    life = Life()
    receipt = lapsed(life)
    for _ in range(200):
        life.submit(Extend("q", receipt, 1_000, late=True))
        life.clock.advance(seconds=1)
    (claim,) = life.submit(Pull("q"))
    assert claim.epoch == 2
    assert life.submit(Pull("q")) == []


def test_a_late_release_with_a_delay_hides_the_message():
    life = Life()
    receipt = lapsed(life)
    life.submit(Release("q", receipt, 0, late=True))
    assert life.submit(Stats("q")).visible == 1
    life.submit(Release("q", receipt, 3_000, late=True))
    assert life.submit(Pull("q")) == []
    life.clock.advance(seconds=3)
    assert len(life.submit(Pull("q"))) == 1


def test_a_late_receipt_of_a_claim_before_the_last_is_refused():
    life = Life()
    receipt = lapsed(life)
    life.submit(Pull("q"))
    before = as_bytes(life.shard)
    for command in (
        Delete("q", receipt, late=True),
        Extend("q", receipt, 1_000, late=True),
        Release("q", receipt, 0, late=True),
    ):
        with pytest.raises(StaleReceipt):
            life.submit(command)
    life.clock.advance(seconds=1)
    with pytest.raises(StaleReceipt):
        life.submit(Delete("q", receipt, late=True))
    assert as_bytes(life.shard) != before
    assert life.submit(Stats("q")).visible == 1


def test_a_fifo_queue_refuses_late_receipts():
    life = Life()
    receipt = lapsed(life, fifo=True)
    with pytest.raises(StaleReceipt):
        life.submit(Delete("q", receipt, late=True))
    with pytest.raises(StaleReceipt):
        life.submit(Extend("q", receipt, 1_000, late=True))


def test_a_late_receipt_of_a_message_that_is_gone_changes_nothing():
    life = Life()
    receipt = lapsed(life)
    life.submit(Delete("q", life.submit(Pull("q"))[0].receipt))
    assert life.submit(Delete("q", receipt, late=True)) is False
    with pytest.raises(MessageGone):
        life.submit(Extend("q", receipt, 1_000, late=True))


def test_events_with_late_receipts_replay_from_any_point():
    """Each prefix of the events as a snapshot, to which all events are then applied again."""
    life = Life()
    receipt = lapsed(life)
    for _ in range(2):
        life.submit(Extend("q", receipt, 1_000, late=True))
        life.clock.advance(seconds=2)
    life.submit(Push("q", b"y", group="g"))
    life.submit(Release("q", receipt, 500, late=True))
    life.clock.advance(seconds=1)
    life.submit(Extend("q", receipt, 9_000, late=True))
    living = as_bytes(life.shard)
    events = life.journal.events
    assert as_bytes(replay(events)) == living
    for known in range(1, len(events) + 1):
        shard = ShardState.restore(replay(events[:known]).snapshot())
        for event in events:
            apply_if_new(shard, event)
        assert as_bytes(shard) == living, f"from the first {known} events"
