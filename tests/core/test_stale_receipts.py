"""A stale receipt says why it is stale."""

import pytest

from penstock.backends.engine.engine import Engine
from penstock.core import queue as queue_module
from penstock.core.shard import ShardState
from penstock.errors import MessageGone, StaleReceipt
from penstock.service import CreateQueue, Delete, Extend, Pull, Push, Redrive, Release
from tests.core.life import Life


@pytest.fixture
def life():
    life = Life()
    life.submit(CreateQueue("q", {"dead_letter": "dead", "max_receives": 3}))
    life.submit(Push("q", b"x"))
    return life


def claim(life, queue="q"):
    (given,) = life.submit(Pull(queue, visibility_ms=5_000))
    return given


def claim_thrice(life):
    """Lets three claims run out, which makes the message a dead letter; the last of them."""
    claims = []
    for _ in range(3):
        claims.append(claim(life))
        life.clock.advance(seconds=5)
    return claims[-1]


def why(life, given, queue="q"):
    with pytest.raises(StaleReceipt) as refused:
        life.submit(Extend(queue, given.receipt, 1_000))
    return str(refused.value)


def test_a_stale_receipt_error_says_that_the_claim_was_released(life):
    given = claim(life)
    life.submit(Release("q", given.receipt))
    assert "it was released" in why(life, given)


def test_a_stale_receipt_error_says_that_the_claim_was_released_with_a_delay(life):
    given = claim(life)
    life.submit(Release("q", given.receipt, 1_000))
    assert "it was released" in why(life, given)
    life.clock.advance(seconds=1)
    assert "it was released" in why(life, given)


def test_a_stale_receipt_error_says_that_the_visibility_ran_out(life):
    given = claim(life)
    life.clock.advance(seconds=5)
    assert "its visibility ran out)" in why(life, given)


def test_a_stale_receipt_error_says_that_the_message_was_claimed_again(life):
    given = claim(life)
    life.submit(Release("q", given.receipt))
    claim(life)
    assert "the message was claimed again" in why(life, given)


def test_the_error_of_a_dead_letters_receipt_names_the_dead_letter_queue(life):
    given = claim_thrice(life)
    assert "was moved to 'dead', the dead-letter queue of 'q'" in why(life, given)


def test_a_stale_receipt_error_says_that_the_message_was_moved_and_is_back(life):
    given = claim_thrice(life)
    life.submit(Redrive("dead"))
    assert "was moved to another queue, and is back" in why(life, given)


def test_the_error_of_a_receipt_says_that_the_message_is_gone(life):
    given = claim(life)
    life.submit(Delete("q", given.receipt))
    with pytest.raises(MessageGone, match="deleted, expired, purged or moved"):
        life.submit(Release("q", given.receipt))


def test_a_stale_receipt_error_names_both_causes_if_releases_were_dropped(life, monkeypatch):
    """After many releases, or a restart, the two endings cannot be told apart."""
    monkeypatch.setattr(queue_module, "_RELEASED_MAX", 1)
    life.submit(Push("q", b"y"))
    first, second = claim(life), claim(life)
    life.submit(Release("q", first.receipt))
    life.submit(Release("q", second.receipt))
    assert "it was released)" in why(life, second)
    assert "ran out, or it was released some time ago" in why(life, first)
    restarted = Life()
    restarted.engine = Engine(
        restarted.journal, life.clock, shard=ShardState.restore(life.shard.snapshot())
    )
    restarted.engine._receipts = life.engine._receipts
    assert "ran out, or it was released some time ago" in why(restarted, second)
