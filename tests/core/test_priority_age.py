"""A queue with a priority age: what the conformance suite cannot see of it."""

import msgspec
import pytest

import penstock
from penstock.clock import ManualClock
from penstock.core.events import AnyEvent
from penstock.core.shard import replay
from penstock.errors import StoreFull
from penstock.service import ConfigureQueue, CreateQueue, Peek, Pull, Push, Release
from tests.core.observed import ObservedEngine, as_bytes

AGE_MS = 10_000


@pytest.fixture
def observed():
    """A queue whose message of priority 0 has the age, and whose urgent ones are younger."""
    observed = ObservedEngine()
    observed.submit(CreateQueue("q", {"priority_age_ms": AGE_MS}))
    observed.submit(Push("q", b"low"))
    observed.clock.advance(ms=AGE_MS)
    for body in (b"high1", b"high2"):
        observed.submit(Push("q", body, priority=9))
    return observed


def bodies(claims):
    return [claim.body for claim in claims]


def test_a_message_has_the_age_in_its_millisecond_and_not_before():
    for waited_ms, first in ((AGE_MS - 1, b"high"), (AGE_MS, b"low")):
        observed = ObservedEngine()
        observed.submit(CreateQueue("q", {"priority_age_ms": AGE_MS}))
        observed.submit(Push("q", b"low"))
        observed.clock.advance(ms=waited_ms)
        observed.submit(Push("q", b"high", priority=9))
        assert bodies(observed.submit(Pull("q"))) == [first]


def test_a_pull_by_age_is_replayed_from_its_events(observed):
    assert bodies(observed.submit(Pull("q", 2))) == [b"low", b"high1"]
    restored = replay(observed.journal.events)
    assert as_bytes(restored) == as_bytes(observed.shard)
    events: list[AnyEvent] = []
    (next_one,) = restored.pull(Pull("q", 9), observed.clock.now_ms(), events)
    assert next_one.number == 3


def test_an_old_message_that_cannot_be_loaded_keeps_its_place(observed):
    events: list[AnyEvent] = []

    def fail(delivery):
        raise StoreFull("no")

    before = as_bytes(observed.shard)
    with pytest.raises(StoreFull):
        observed.shard.pull(Pull("q", 3), observed.clock.now_ms(), events, fail)
    assert (as_bytes(observed.shard), events) == (before, [])
    assert bodies(observed.submit(Pull("q", 3))) == [b"low", b"high1", b"high2"]


def test_an_old_message_with_no_room_in_the_answer_is_next(observed):
    observed.submit(Push("q", b"x" * 100))
    observed.clock.advance(ms=AGE_MS)
    observed.submit(Push("q", b"high3", priority=9))
    # All but the last have the age now: by arrival.
    assert bodies(observed.submit(Pull("q", 9, bytes_max=20))) == [b"low", b"high1", b"high2"]
    assert bodies(observed.submit(Pull("q", 9))) == [b"x" * 100, b"high3"]


def test_an_old_message_that_comes_back_is_next_again(observed):
    for _ in range(3):
        (claim,) = observed.submit(Pull("q"))
        assert claim.body == b"low"
        observed.submit(Release("q", claim.receipt))
    assert as_bytes(replay(observed.journal.events)) == as_bytes(observed.shard)


def test_a_moved_message_has_the_age_since_its_move():
    observed = ObservedEngine()
    observed.submit(CreateQueue("dead", {"priority_age_ms": AGE_MS}))
    observed.submit(CreateQueue("q", {"dead_letter": "dead", "max_receives": 1}))
    observed.submit(Push("q", b"low"))
    observed.clock.advance(ms=AGE_MS)
    (claim,) = observed.submit(Pull("q"))
    observed.submit(Release("q", claim.receipt))
    observed.submit(Push("dead", b"high1", priority=9))
    assert bodies(observed.submit(Pull("dead"))) == [b"high1"]
    observed.clock.advance(ms=AGE_MS)
    observed.submit(Push("dead", b"high2", priority=9))
    assert bodies(observed.submit(Pull("dead", 2))) == [b"low", b"high2"]


def test_a_peek_shows_priorities_whatever_the_age(observed):
    assert bodies(observed.submit(Peek("q", 9))) == [b"high1", b"high2", b"low"]


def test_many_old_messages_of_ten_priorities_are_pulled_by_arrival():
    observed = ObservedEngine()
    observed.submit(CreateQueue("q", {"priority_age_ms": AGE_MS}))
    for number in range(300):
        group = f"g{number % 7}" if number % 3 else None
        observed.submit(Push("q", b"%d" % number, priority=number * 7 % 10, group=group))
    observed.clock.advance(ms=AGE_MS)
    found: list[bytes] = []
    while claims := observed.submit(Pull("q", 1 + len(found) % 13)):
        found += bodies(claims)
    assert found == [b"%d" % number for number in range(300)]


def test_the_setting_is_in_force_as_soon_as_it_is_changed(observed):
    observed.submit(ConfigureQueue("q", {"priority_age_ms": None}))
    assert bodies(observed.submit(Pull("q"))) == [b"high1"]
    observed.submit(ConfigureQueue("q", {"priority_age_ms": AGE_MS}))
    assert bodies(observed.submit(Pull("q"))) == [b"low"]


def test_a_store_that_is_opened_again_has_the_setting_and_the_ages(quick_path):
    clock = ManualClock()
    url = f"file:{quick_path / 'store'}?embedded=1"
    with penstock.connect(url, clock=clock) as queues:
        queues.create("q", priority_age=10)
        queues.push("q", b"low")
    clock.advance(seconds=10)
    with penstock.connect(url, clock=clock) as queues:
        assert queues.describe("q").settings.priority_age == AGE_MS / 1_000
        queues.push("q", b"high", priority=9)
        assert bodies(queues.pull_many("q", 2)) == [b"low", b"high"]


def test_settings_that_were_stored_before_there_was_a_priority_age_are_read():
    settings = penstock.service.QueueSettings(messages_max=7)
    stored = msgspec.to_builtins(settings)
    del stored["priority_age_ms"]
    assert msgspec.convert(stored, penstock.service.QueueSettings) == settings
