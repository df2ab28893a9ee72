"""A receipt whose claim has run out, used by a caller that allows late receipts."""

import pytest

from penstock.core.replay import apply_if_new
from penstock.core.shard import ShardState, replay
from penstock.errors import MessageGone, StaleReceipt
from penstock.service import CreateQueue, Delete, Extend, Peek, Pull, Push, Release, Stats
from tests.core.observed import ObservedEngine, as_bytes


def late_receipt(observed: ObservedEngine, **settings) -> str:
    """The receipt of a claim that has run out, on the queue `q`."""
    observed.submit(CreateQueue("q", {"visibility_ms": 1_000, **settings}))
    group = "g" if settings.get("fifo") else None
    observed.submit(Push("q", b"x", group=group))
    (claim,) = observed.submit(Pull("q"))
    observed.clock.advance(seconds=1)
    assert observed.submit(Peek("q"))
    return claim.receipt


def test_a_late_delete_removes_a_message_that_was_not_claimed_since():
    observed = ObservedEngine()
    receipt = late_receipt(observed)
    with pytest.raises(StaleReceipt):
        observed.submit(Delete("q", receipt))
    assert observed.submit(Delete("q", receipt, late=True)) is True
    assert observed.submit(Stats("q")).messages == 0
    assert observed.submit(Delete("q", receipt, late=True)) is False


def test_a_late_extension_makes_the_claim_valid_again_with_its_receipt():
    observed = ObservedEngine()
    receipt = late_receipt(observed)
    with pytest.raises(StaleReceipt):
        observed.submit(Extend("q", receipt, 5_000))
    assert (
        observed.submit(Extend("q", receipt, 5_000, late=True)) == observed.clock.now_ms() + 5_000
    )
    assert observed.submit(Pull("q")) == []
    assert observed.submit(Stats("q")).in_flight == 1
    # It is an ordinary claim again, which can be ended without `late`.
    assert observed.submit(Delete("q", receipt)) is True


def test_a_claim_that_was_extended_late_runs_out_at_its_new_deadline():
    observed = ObservedEngine()
    receipt = late_receipt(observed)
    for _ in range(200):
        observed.submit(Extend("q", receipt, 1_000, late=True))
        observed.clock.advance(seconds=1)
    (claim,) = observed.submit(Pull("q"))
    assert claim.epoch == 2
    assert observed.submit(Pull("q")) == []


def test_a_late_release_with_a_delay_hides_the_message():
    observed = ObservedEngine()
    receipt = late_receipt(observed)
    observed.submit(Release("q", receipt, 0, late=True))
    assert observed.submit(Stats("q")).visible == 1
    observed.submit(Release("q", receipt, 3_000, late=True))
    assert observed.submit(Pull("q")) == []
    observed.clock.advance(seconds=3)
    assert len(observed.submit(Pull("q"))) == 1


def test_a_late_receipt_of_a_claim_before_the_last_is_refused():
    observed = ObservedEngine()
    receipt = late_receipt(observed)
    observed.submit(Pull("q"))
    before = as_bytes(observed.shard)
    for command in (
        Delete("q", receipt, late=True),
        Extend("q", receipt, 1_000, late=True),
        Release("q", receipt, 0, late=True),
    ):
        with pytest.raises(StaleReceipt):
            observed.submit(command)
    assert as_bytes(observed.shard) == before
    observed.clock.advance(seconds=1)
    with pytest.raises(StaleReceipt):
        observed.submit(Delete("q", receipt, late=True))
    assert observed.submit(Stats("q")).visible == 1


def test_a_fifo_queue_refuses_late_receipts():
    observed = ObservedEngine()
    receipt = late_receipt(observed, fifo=True)
    with pytest.raises(StaleReceipt):
        observed.submit(Delete("q", receipt, late=True))
    with pytest.raises(StaleReceipt):
        observed.submit(Extend("q", receipt, 1_000, late=True))


def test_a_late_receipt_of_a_message_that_is_gone_changes_nothing():
    observed = ObservedEngine()
    receipt = late_receipt(observed)
    observed.submit(Delete("q", observed.submit(Pull("q"))[0].receipt))
    assert observed.submit(Delete("q", receipt, late=True)) is False
    with pytest.raises(MessageGone):
        observed.submit(Extend("q", receipt, 1_000, late=True))


def test_events_with_late_receipts_replay_from_any_point():
    """A snapshot after each prefix of the events, to which all events are then applied again."""
    observed = ObservedEngine()
    receipt = late_receipt(observed)
    for _ in range(2):
        observed.submit(Extend("q", receipt, 1_000, late=True))
        observed.clock.advance(seconds=2)
    observed.submit(Push("q", b"y", group="g"))
    observed.submit(Release("q", receipt, 500, late=True))
    observed.clock.advance(seconds=1)
    observed.submit(Extend("q", receipt, 9_000, late=True))
    expected = as_bytes(observed.shard)
    events = observed.journal.events
    assert as_bytes(replay(events)) == expected
    for known in range(1, len(events) + 1):
        shard = ShardState.restore(replay(events[:known]).snapshot())
        for event in events:
            apply_if_new(shard, event)
        assert as_bytes(shard) == expected, f"from the first {known} events"
