"""The judge finds each thing that must not happen to a message; what an engine does, it passes."""

from datetime import timedelta

import pytest

from penstock.core.events import (
    Claimed,
    ClaimExpired,
    DelayEnded,
    Deleted,
    Expired,
    Moved,
    Pushed,
    QueueCreated,
    QueuePurged,
    Released,
)
from penstock.server.testing.judge import Judge, judge
from penstock.service import QueueSettings
from penstock.spark.checks import CHECKS
from penstock.testing import in_process

PUSHED = Pushed(0, 1, 1, b"a", group="g")
SECOND = Pushed(0, 1, 2, b"b", group="g")
CLAIMED = Claimed(1, 1, 1, 1, 31)
DELAYED = Pushed(0, 1, 1, b"a", visible_at_ms=50)

WRONG = [
    ("pushed first", [Claimed(1, 1, 1, 1, 31)]),
    ("pushed once", [PUSHED, PUSHED]),
    ("nothing after the end", [PUSHED, CLAIMED, Deleted(2, 1, 1, 1), Claimed(3, 1, 1, 2, 33)]),
    ("nothing after the end", [PUSHED, QueuePurged(1, 1, 1, 2), CLAIMED]),
    ("one holder", [PUSHED, CLAIMED, Claimed(2, 1, 1, 2, 32)]),
    ("claim of the visible", [DELAYED, CLAIMED]),
    ("epochs rise", [PUSHED, Claimed(1, 1, 1, 2, 31)]),
    ("current claim only", [PUSHED, Deleted(1, 1, 1, 1)]),
    ("current claim only", [PUSHED, CLAIMED, Released(2, 1, 1, 0)]),
    ("expiry of the current claim", [PUSHED, ClaimExpired(40, 1, 1, 1)]),
    ("expiry after the deadline", [PUSHED, CLAIMED, ClaimExpired(30, 1, 1, 1)]),
    ("delay in full", [DELAYED, DelayEnded(49, 1, 1, 0)]),
    ("expired when due", [Pushed(0, 1, 1, b"a", expires_at_ms=50), Expired(49, 1, 1)]),
    ("expired when due", [PUSHED, CLAIMED, Expired(2, 1, 1)]),
    ("move of the visible", [PUSHED, CLAIMED, Moved(2, 1, 1, 2, 5, False)]),
    ("dead letter after N", [PUSHED, Moved(2, 1, 1, 2, 5, True)]),
    (
        "one message per dedup id",
        [Pushed(0, 1, 1, b"a", dedup_id="x"), Pushed(299_999, 1, 2, b"a", dedup_id="x")],
    ),
    ("order in the group", [PUSHED, SECOND, Claimed(1, 1, 2, 1, 31)]),
]


def broken(events):
    judging = Judge()
    settings = QueueSettings(fifo=True, dead_letter="dead", max_receives=1)
    judging.follow(QueueCreated(0, 1, "orders.fifo", settings))
    judging.follow(QueueCreated(0, 2, "dead", QueueSettings()))
    for event in events:
        judging.follow(event)
    return [each.check for each in judging.broken]


@pytest.mark.parametrize(("check", "events"), WRONG)
def test_what_must_not_happen_is_found_and_named_as_in_the_audit(check, events):
    assert broken(events) == [check]
    assert check in CHECKS


def test_a_dedup_id_may_be_used_again_after_its_window_or_a_purge():
    first = Pushed(0, 1, 1, b"a", dedup_id="x")
    assert broken([first, Pushed(300_000, 1, 2, b"a", dedup_id="x")]) == []
    assert broken([first, QueuePurged(1, 1, 1, 2), Pushed(2, 1, 2, b"a", dedup_id="x")]) == []


def test_what_an_engine_does_to_messages_breaks_no_check():
    with in_process() as queues:
        queues.create("orders", dead_letter="dead", max_receives=2, visibility_timeout=30)
        queues.push_many("orders", ["a", "b", "c"])
        queues.push("orders", "d", delay=5, ttl=3_600, dedup_id="1")
        queues.push("orders", "d", dedup_id="1")
        first, second = queues.pull_many("orders", 2)
        queues.delete(first)
        queues.release(second, delay=10)
        for _ in range(6):
            queues.pull("orders")
            queues.advance(timedelta(seconds=31))
        queues.redrive("dead")
        queues.advance(timedelta(days=5))
        queues.purge("orders")
        assert judge(queues.store) == []
