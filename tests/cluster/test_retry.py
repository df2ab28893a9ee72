"""When a command is sent to an owner again, and when it has failed; no network, no clock."""

import pytest

from penstock.cluster.retry import COMMAND_TIMEOUT_S, Attempts, MayBeDone, NotDone, read_answer
from penstock.cluster.spread_rules import NotPlaced, SpreadChanged
from penstock.errors import BackendLost, QueueNotFound, StaleReceipt
from penstock.service import Pull, Purge, Push, Release
from penstock.wire import shard_protocol as protocol


def test_a_command_that_was_not_done_is_sent_again_at_growing_intervals_until_it_fails():
    attempts = Attempts(3, Push("q", b"x"), 100.0)
    pauses = [attempts.pause_s(NotDone("no owner"), 100.0) for _ in range(7)]
    assert pauses == [0, 0.02, 0.04, 0.08, 0.16, 0.25, 0.25]
    attempts.pause_s(NotDone("no owner"), 100.0 + COMMAND_TIMEOUT_S)
    with pytest.raises(BackendLost, match="shard 3: no owner; gave up after 25 s"):
        attempts.pause_s(NotDone("no owner"), 100.1 + COMMAND_TIMEOUT_S)


def test_a_pull_is_tried_longer_by_the_time_that_it_waits():
    attempts = Attempts(0, Pull("q", wait_ms=20_000), 0)
    attempts.pause_s(NotDone("no owner"), COMMAND_TIMEOUT_S + 20)
    with pytest.raises(BackendLost):
        attempts.pause_s(NotDone("no owner"), COMMAND_TIMEOUT_S + 20.1)


def test_a_command_that_may_have_been_done_is_sent_again_only_if_it_is_repeatable():
    assert Attempts(0, Push("q", b"x", dedup_id="1"), 0).pause_s(MayBeDone("lost"), 0) == 0
    with pytest.raises(BackendLost, match=r"lost; whether this Push was done is unknown; give a"):
        Attempts(0, Push("q", b"x"), 0).pause_s(MayBeDone("lost"), 0)
    with pytest.raises(BackendLost, match=r"this Purge was done is unknown$"):
        Attempts(0, Purge("q"), 0).pause_s(MayBeDone("lost"), 0)


def test_a_receipt_that_an_earlier_attempt_has_ended_is_no_error():
    stale = StaleReceipt("receipt: its claim has ended")
    attempts = Attempts(0, Release("q", "r"), 0)
    attempts.pause_s(NotDone("moved"), 0)
    with pytest.raises(StaleReceipt):
        attempts.outcome(stale)
    attempts.pause_s(MayBeDone("lost"), 0)
    assert attempts.outcome(stale) is None


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (protocol.NOT_OWNER, NotDone),
        (protocol.LOST, MayBeDone),
        (protocol.SPREAD_CHANGED, SpreadChanged),
        (protocol.NOT_PLACED, NotPlaced),
    ],
)
def test_an_answer_without_a_reply_raises_the_matching_exception(kind, expected):
    with pytest.raises(expected):
        read_answer(Push("q", b"x"), kind, b"")


def test_an_error_of_the_owner_is_raised_with_its_type_and_text():
    refusal = protocol.write_error(QueueNotFound("queue: 'q' does not exist"))
    assert refusal[:1] == protocol.REFUSED
    with pytest.raises(QueueNotFound, match="'q' does not exist"):
        read_answer(Push("q", b"x"), refusal[:1], refusal[1:])
