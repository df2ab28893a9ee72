"""Deadlines: those that are due are returned in order, and the others are not examined."""

from operator import attrgetter

import hypothesis.strategies as st
from hypothesis import given

from penstock.core.delivery import IN_FLIGHT, Delivery
from penstock.core.discards import Discards
from penstock.core.due import (
    DEADLINE,
    NEVER_MS,
    NO_DUE_TIME,
    OPENED_MAX,
    Alarm,
    Due,
    DueTime,
)
from penstock.core.shard import ShardState
from penstock.service import CreateQueue, Pull, Push

START_MS = 1_700_000_000_000
HOUR_MS = 3_600_000


def delivery(number: int, due_at_ms: int) -> Delivery:
    return Delivery(1, number, number, 0, START_MS, IN_FLIGHT, 1, due_at_ms)


def due(alarm: Alarm | None = None) -> Due:
    alarm = alarm or Alarm()
    return Due(1, DEADLINE, attrgetter("due_at_ms"), alarm, Discards(alarm))


def numbers(popped: list[tuple[int, Delivery]]) -> list[int]:
    return [each.number for _, each in popped]


def test_of_several_messages_due_at_one_instant_the_alarm_has_the_lowest_number():
    alarm = Alarm()
    index = due(alarm)
    index.add(START_MS, delivery(1, START_MS))
    index.pop(START_MS)
    index.note_next(START_MS)
    alarm.heap.clear()
    at_ms = START_MS + 1
    for number in (20, 11, 15):
        index.add(at_ms, delivery(number, at_ms))
    assert min(alarm.heap)[:2] == (at_ms, 11)


class Watched(Due):
    """Deadlines that count how many of them were examined, and the number of searches."""

    def __init__(self, alarm: Alarm) -> None:
        self.examined = 0
        self.popped = 0

        def instant(each: Delivery) -> int:
            self.examined += 1
            return each.due_at_ms

        super().__init__(1, DEADLINE, instant, alarm, Discards(alarm))

    def pop(
        self, now_ms: int, limit: int = NEVER_MS, until: DueTime = NO_DUE_TIME
    ) -> list[tuple[int, Delivery]]:
        self.popped += 1
        return super().pop(now_ms, limit, until)


def watched_shard() -> tuple[ShardState, Watched]:
    shard = ShardState()
    for event in shard.decide_create(CreateQueue("q"), START_MS):
        shard.apply(event)
    deadlines = shard.names["q"].deadlines = Watched(shard.alarm)
    return shard, deadlines


def push(shard: ShardState, now_ms: int) -> None:
    event = shard.decide_push(Push("q", b"x"), now_ms)
    assert not isinstance(event, int)
    shard.apply(event)


def test_a_pull_examines_none_of_a_million_claims_that_are_not_due():
    shard, deadlines = watched_shard()
    for number in range(1_000_000):
        at_ms = START_MS + HOUR_MS + number * 30
        deadlines.add(at_ms, delivery(10_000_000 + number, at_ms))
    push(shard, START_MS)
    assert shard.alarm.next_ms > START_MS + HOUR_MS - 2_000
    (claim,) = shard.pull(Pull("q", visibility_ms=5_000), START_MS, [])
    assert claim.due_at_ms == START_MS + 5_000
    assert (deadlines.popped, deadlines.examined) == (0, 0)
    # When that one claim is due, it is the only one that is examined.
    events = shard.settle(START_MS + 5_000)
    assert [type(event).__name__ for event in events] == ["ClaimExpired"]
    assert deadlines.examined == 1
    # An hour later, only those are examined that are due within the same bucket.
    deadlines.examined = 0
    assert len(deadlines.pop(START_MS + HOUR_MS)) == 1
    assert deadlines.examined <= 1_024 // 30 + 1


def test_due_deadlines_are_returned_earliest_first_with_their_times():
    deadlines = due()
    for number, after_ms in enumerate([5_000, 10, 2_000, 10, 90_000]):
        deadlines.add(START_MS + after_ms, delivery(number, START_MS + after_ms))
    popped = deadlines.pop(START_MS + 5_000)
    assert numbers(popped) == [1, 3, 2, 0]
    assert [at_ms - START_MS for at_ms, _ in popped] == [10, 10, 2_000, 5_000]
    assert deadlines.pop(START_MS + 5_000) == []


def test_a_deadline_is_due_at_its_exact_time_and_not_before():
    deadlines = due()
    deadlines.add(START_MS + 700, delivery(1, START_MS + 700))
    assert deadlines.pop(START_MS + 699) == []
    assert numbers(deadlines.pop(START_MS + 700)) == [1]


def test_a_deadline_discarded_before_its_time_is_not_returned():
    deadlines = due()
    kept, dropped = delivery(1, START_MS + 60_000), delivery(2, START_MS + 60_000)
    deadlines.add(START_MS + 60_000, kept)
    deadlines.add(START_MS + 60_000, dropped)
    deadlines.discard(START_MS + 60_000, dropped)
    assert numbers(deadlines.pop(START_MS + 60_000)) == [1]


def test_a_deadline_added_to_a_bucket_that_is_open_is_returned_in_time():
    deadlines = due()
    deadlines.add(START_MS + 100, delivery(1, START_MS + 100))
    assert numbers(deadlines.pop(START_MS + 100)) == [1]
    deadlines.add(START_MS + 101, delivery(2, START_MS + 101))
    deadlines.add(START_MS + 100, delivery(3, START_MS + 100))
    assert deadlines.next_ms <= START_MS + 100
    assert numbers(deadlines.pop(START_MS + 101)) == [3, 2]


def test_the_alarm_is_never_later_than_the_first_deadline():
    alarm = Alarm()
    deadlines = due(alarm)
    assert (alarm.next_ms, deadlines.next_ms) == (NEVER_MS, NEVER_MS)
    for after_ms in (90_000, 30_000, 60_000, 500):
        deadlines.add(START_MS + after_ms, delivery(after_ms, START_MS + after_ms))
        assert alarm.next_ms <= START_MS + after_ms
    assert deadlines.next_ms <= START_MS + 500


def test_a_bucket_whose_deadlines_were_all_discarded_returns_nothing():
    deadlines = due()
    several = [delivery(number, START_MS + 30_000) for number in range(100)]
    for each in several:
        deadlines.add(START_MS + 30_000, each)
    for each in several:
        deadlines.discard(START_MS + 30_000, each)
    assert deadlines.pop(START_MS + 40_000) == []
    assert deadlines.next_ms == NEVER_MS


def test_a_large_bucket_is_sorted_in_parts():
    alarm = Alarm()
    deadlines = Watched(alarm)
    count = 5 * OPENED_MAX
    for number in range(count):
        deadlines.add(START_MS + 60_000, delivery(number, START_MS + 60_000))
    popped: list[int] = []
    while len(popped) < count:
        deadlines.examined = 0
        part = numbers(deadlines.pop(START_MS + 60_000, 100))
        assert 0 < len(part) <= 100 or deadlines.examined
        assert deadlines.examined <= OPENED_MAX
        popped += part
    assert popped == list(range(count))
    assert deadlines.pop(START_MS + 60_000) == []


def test_a_deadline_discarded_while_its_bucket_is_being_opened_is_not_due():
    deadlines = due()
    several = [delivery(number, START_MS + 60_000) for number in range(3 * OPENED_MAX)]
    for each in several:
        deadlines.add(START_MS + 60_000, each)
    deadlines.pop(START_MS + 60_000, 1)
    last, other = several[-1], several[-2]
    deadlines.discard(last.due_at_ms, last)
    last.due_at_ms = 0
    deadlines.discard(other.due_at_ms, other)
    other.due_at_ms = START_MS + 90_000
    deadlines.add(other.due_at_ms, other)
    while popped := deadlines.pop(START_MS + 60_000, 1_000):
        assert last.number not in numbers(popped)
        assert other.number not in numbers(popped)
    assert numbers(deadlines.pop(START_MS + 90_000)) == [other.number]


def test_a_late_deadline_of_a_bucket_does_not_hide_an_earlier_one():
    """A bucket is opened in parts: a part with nothing due does not end the search."""
    deadlines = due()
    start_ms = START_MS >> 10 << 10
    for number in range(2 * OPENED_MAX):
        deadlines.add(start_ms + 1_000, delivery(number, start_ms + 1_000))
    deadlines.add(start_ms + 5, delivery(1_000_000, start_ms + 5))
    assert numbers(deadlines.pop(start_ms + 5)) == [1_000_000]


steps = st.lists(
    st.tuples(st.sampled_from(["add", "discard", "move", "pass"]), st.integers(0, 5_000)),
    max_size=60,
)


@given(steps)
def test_any_sequence_of_deadlines_is_returned_as_from_a_sorted_list(steps):
    """A caller must check that each deadline is still valid, and so does this test."""
    deadlines = due()
    now_ms, number = START_MS, 0
    valid: dict[int, Delivery] = {}
    for verb, amount in steps:
        if verb == "add":
            number += 1
            valid[number] = delivery(number, now_ms + amount)
            deadlines.add(now_ms + amount, valid[number])
        elif verb == "pass":
            now_ms += amount
            expected = sorted(
                (each.due_at_ms, each.number) for each in valid.values() if each.due_at_ms <= now_ms
            )
            assert not expected or deadlines.next_ms <= now_ms
            popped = [
                (at_ms, each.number)
                for at_ms, each in deadlines.pop(now_ms)
                if each.due_at_ms == at_ms and each.number in valid
            ]
            assert list(dict.fromkeys(popped)) == expected
            for _, gone in expected:
                del valid[gone]
        elif valid:
            each = valid[sorted(valid)[amount % len(valid)]]
            deadlines.discard(each.due_at_ms, each)
            if verb == "discard":
                del valid[each.number]
                each.due_at_ms = 0
            else:
                each.due_at_ms = now_ms + amount
                deadlines.add(each.due_at_ms, each)
