"""The error of a stale receipt says why the receipt is stale."""

import pytest

from penstock.backends.engine.engine import Engine
from penstock.core import queue as queue_module
from penstock.core.shard import ShardState
from penstock.errors import MessageGone, StaleReceipt
from penstock.journal import MemoryJournal
from penstock.service import CreateQueue, Delete, Extend, Pull, Push, Redrive, Release
from tests.core.observed import ObservedEngine


@pytest.fixture
def observed():
    observed = ObservedEngine()
    observed.submit(CreateQueue("q", {"dead_letter": "dead", "max_receives": 3}))
    observed.submit(Push("q", b"x"))
    return observed


def claim(observed, queue="q"):
    (given,) = observed.submit(Pull(queue, visibility_ms=5_000))
    return given


def claim_thrice(observed):
    """Lets three claims run out, which makes the message a dead letter; returns the last claim."""
    claims = []
    for _ in range(3):
        claims.append(claim(observed))
        observed.clock.advance(seconds=5)
    return claims[-1]


def why(observed, given, queue="q"):
    with pytest.raises(StaleReceipt) as refused:
        observed.submit(Extend(queue, given.receipt, 1_000))
    return str(refused.value)


def test_a_stale_receipt_error_says_that_the_claim_was_released(observed):
    given = claim(observed)
    observed.submit(Release("q", given.receipt))
    assert "it was released" in why(observed, given)


def test_a_stale_receipt_error_says_that_the_claim_was_released_with_a_delay(observed):
    given = claim(observed)
    observed.submit(Release("q", given.receipt, 1_000))
    assert "it was released" in why(observed, given)
    observed.clock.advance(seconds=1)
    assert "it was released" in why(observed, given)


def test_a_stale_receipt_error_says_that_the_visibility_ran_out(observed):
    given = claim(observed)
    observed.clock.advance(seconds=5)
    assert "its visibility ran out)" in why(observed, given)


def test_a_stale_receipt_error_says_that_the_message_was_claimed_again(observed):
    given = claim(observed)
    observed.submit(Release("q", given.receipt))
    claim(observed)
    assert "the message was claimed again" in why(observed, given)


def test_the_error_of_a_dead_letters_receipt_names_the_dead_letter_queue(observed):
    given = claim_thrice(observed)
    assert "was moved to 'dead', the dead-letter queue of 'q'" in why(observed, given)


def test_a_stale_receipt_error_says_that_the_message_was_moved_and_is_back(observed):
    given = claim_thrice(observed)
    observed.submit(Redrive("dead"))
    assert "was moved to another queue, and is back" in why(observed, given)


def test_the_error_of_a_receipt_says_that_the_message_is_gone(observed):
    given = claim(observed)
    observed.submit(Delete("q", given.receipt))
    with pytest.raises(MessageGone, match="deleted, expired, purged or moved"):
        observed.submit(Release("q", given.receipt))


def test_a_stale_receipt_error_names_both_causes_if_releases_were_dropped(observed, monkeypatch):
    """After many releases, or a restart, the engine does not know which of the two it was."""
    monkeypatch.setattr(queue_module, "_RELEASED_MAX", 1)
    observed.submit(Push("q", b"y"))
    first, second = claim(observed), claim(observed)
    observed.submit(Release("q", first.receipt))
    observed.submit(Release("q", second.receipt))
    assert "it was released)" in why(observed, second)
    assert "ran out, or it was released some time ago" in why(observed, first)
    restarted = ObservedEngine()
    restarted.engine = Engine(
        restarted.journal, observed.clock, shard=ShardState.restore(observed.shard.snapshot())
    )
    restarted.engine._receipts = observed.engine._receipts
    assert "ran out, or it was released some time ago" in why(restarted, second)


def test_a_stale_receipt_error_names_the_command_that_tells_more():
    engine = Engine(MemoryJournal(100))
    engine.submit(CreateQueue("q"))
    pushed = engine.submit(Push("q", b"x"))
    (given,) = engine.submit(Pull("q"))
    engine.submit(Release("q", given.receipt))
    with pytest.raises(StaleReceipt, match=f"penstock why {pushed.id} says"):
        engine.submit(Delete("q", given.receipt))
