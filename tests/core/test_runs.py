"""Row 8: many plain pushes applied together, a run, have the same effect as one by one."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.engine.store import open_engine
from penstock.clock import ManualClock
from penstock.core import runs
from penstock.core.receipts import IDENTITY_BYTES
from penstock.core.runs import Run
from penstock.core.shard import replay
from penstock.core.window import Window
from penstock.errors import InvalidField, PenstockError
from penstock.journal import codec
from penstock.journal.place import pack_place
from penstock.service import (
    BATCH_ITEMS_MAX,
    Batch,
    Claim,
    ConfigureQueue,
    CreateQueue,
    Delete,
    NumberedReplies,
    Pull,
    Purge,
    Push,
    PushMany,
    Release,
    Stats,
    are_ids,
    check_id,
)
from tests.core.observed import ObservedEngine, as_bytes


@pytest.fixture(autouse=True, scope="module")
def short_runs():
    """Makes two pushes a run already; by default more pushes are needed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "RUN_MIN", 2)
        yield


IDS = st.sampled_from(["a", "b", "c", "d", "e", "f"])
BAD_IDS: list[Any] = ["", "x" * 129, "line\n", 7, None]
BODIES = st.binary(max_size=12)
PLAIN = st.builds(lambda body: Push("q", body), BODIES)
NAMED = st.builds(lambda body, name: Push("q", body, dedup_id=name), BODIES, IDS)
ODD_ONES = [
    Push("q", b"later", delay_ms=5),
    Push("q", b"first", priority=9),
    Push("q", b"short-lived", ttl_ms=5),
    Push("q", b"of a group", group="g"),
    Push("q", b"attributes", attributes={"a": "b"}),
    Push("q", b"context", context={"a": "b"}),
    Push("q", b"too large" * 9),
    Push("q", "text"),  # type: ignore[arg-type]
    Push("q", b"bad priority", priority=False),
    Push("q", b"", dedup_id="line\n"),
    Push("q", b"", dedup_id=7),  # type: ignore[arg-type]
    Push("p", b"another queue"),
    Push("nowhere", b""),
]
ODD = st.sampled_from(ODD_ONES)


@st.composite
def batches(draw):
    """Mostly runs; and runs in which one push is not valid."""
    items = draw(st.lists(PLAIN, max_size=4) | st.lists(NAMED, max_size=4))
    if draw(st.booleans()):
        items.insert(draw(st.integers(0, len(items))), draw(NAMED | PLAIN | ODD))
    return items


SETTINGS = st.sampled_from(
    [
        {},
        {"messages_max": 7},
        {"bytes_max": 60},
        {"delay_ms": 50},
        {"fifo": True},
        {"dedup_by_content": True},
    ]
)


def shown(replies):
    return [
        (type(reply), str(reply)) if isinstance(reply, PenstockError) else reply
        for reply in replies
    ]


def assert_same_as_one_by_one(chosen, steps):
    identity = bytes(IDENTITY_BYTES)
    together, one_by_one = ObservedEngine(identity), ObservedEngine(identity)
    both = together, one_by_one
    for observed in both:
        observed.submit(CreateQueue("q", {"body_bytes_max": 40, **chosen}))
        observed.submit(CreateQueue("p"))
    for items, passed_ms in steps:
        replies = together.submit(Batch(items))
        # A batch with anything but pushes to one queue is not a run.
        *alone, refused = one_by_one.submit(Batch([*items, Delete("q", "no receipt")]))
        assert shown(replies) == shown(alone)
        assert isinstance(refused, PenstockError)
        assert together.journal.events == one_by_one.journal.events
        assert as_bytes(together.shard) == as_bytes(one_by_one.shard)
        for observed in both:
            observed.clock.advance(ms=passed_ms)
    assert as_bytes(replay(together.journal.events)) == as_bytes(together.shard)
    pulled = [observed.submit(Pull("q", 100)) for observed in both]
    assert [claim.body for claim in pulled[0]] == [claim.body for claim in pulled[1]]


@pytest.mark.parametrize("odd", ODD_ONES, ids=repr)
def test_one_push_that_is_not_plain_keeps_its_options_in_a_batch_of_plain_ones(odd):
    assert_same_as_one_by_one({}, [([Push("q", b"one"), odd, Push("q", b"two")], 0)])


@given(
    SETTINGS, st.lists(st.tuples(batches(), st.sampled_from([0, 1, 299_000, 400_000])), max_size=6)
)
def test_a_batch_has_the_same_effect_as_its_pushes_one_by_one(chosen, steps):
    assert_same_as_one_by_one(chosen, steps)


def a_run(first, bodies, names):
    sizes = list(map(len, bodies))
    return Run(1_700_000_000_123, 3, first, bodies, names, sizes, sum(sizes))


RUNS = st.integers(2, 40).flatmap(
    lambda count: st.builds(
        a_run,
        st.integers(1, 2**48),
        st.lists(st.binary(max_size=300), min_size=count, max_size=count),
        st.none() | st.lists(st.text(min_size=1, max_size=9), min_size=count, max_size=count),
    )
)


@given(RUNS, st.integers(0, 2**33))
def test_the_block_of_a_run_is_that_of_its_events(run, data_offset):
    block, messages = codec.encode([*run])
    assert codec.encode_run(run) == block
    places = [pack_place(data_offset + at, size) for at, size in messages]
    assert codec.places_of(run, data_offset) == places


@pytest.mark.parametrize("named", [False, True])
def test_a_run_is_journalled_as_one_entry_and_restored_from_it(tmp_path, named):
    """By its effect on a store: the entry, the places of its messages, and later commands."""
    bodies = [b"%d" % number * 50 for number in range(3_000)]
    names = [f"{number}" for number in range(3_000)] if named else None
    clock = ManualClock()
    engine = open_engine(tmp_path / "store", durability="os", clock=clock)
    engine.submit(CreateQueue("q"))
    before = engine.answer_sequence
    reply = engine.submit(PushMany("q", bodies, names))
    assert reply == NumberedReplies(engine._ids.prefix, range(1, 3_001))
    assert engine.answer_sequence == before + 1
    assert [claim.body for claim in engine.submit(Pull("q", 1_500))] == bodies[:1_500]
    engine.close()
    engine = open_engine(tmp_path / "store", durability="os", clock=clock)
    assert [claim.body for claim in engine.submit(Pull("q", 3_000))] == bodies[1_500:]
    again = engine.submit(Batch([Push("q", b"", dedup_id=name) for name in names or ()]))
    assert [each.sequence for each in again] == ([*range(1, 3_001)] if named else [])
    assert all(each.duplicate for each in again)
    engine.close()


def test_the_replies_to_a_batch_and_to_a_run_name_the_same_messages():
    observed = ObservedEngine()
    observed.submit(CreateQueue("q"))
    ran = observed.submit(PushMany("q", [b"a", b"b"]))
    replies = observed.submit(Batch([Push("q", b"c"), Push("q", b"d")]))
    assert [reply.sequence for reply in replies] == [3, 4]
    assert all(reply.id.startswith(ran.id_start) for reply in replies)
    assert [int(reply.id[len(ran.id_start) :], 16) for reply in replies] == [3, 4]


def test_ids_of_consecutive_messages_are_right_where_the_table_of_digits_ends():
    observed = ObservedEngine()
    observed.submit(CreateQueue("q"))
    replies = observed.submit(Batch([Push("q", b"")] * 5_000))
    assert [reply.id for reply in replies] == [
        observed.engine._ids.show(n) for n in range(1, 5_001)
    ]


def test_pushes_that_cannot_be_applied_as_a_run_are_answered_one_by_one():
    observed = ObservedEngine()
    observed.submit(CreateQueue("q", {"messages_max": 2}))
    full = observed.submit(PushMany("q", [b"a", b"b", b"c"], ["1", "1", "2"]))
    assert [reply.sequence for reply in full] == [1, 1, 2]
    assert [reply.duplicate for reply in full] == [False, True, False]
    (refused,) = observed.submit(PushMany("q", [b"d"]))
    assert "is full with 2 messages" in str(refused)
    missing = observed.submit(PushMany("none", [b"a", b"b"]))
    assert [str(each) for each in missing] == 2 * [
        "queue: there is no queue 'none'; create it first"
    ]


def test_a_run_of_too_many_messages_is_refused_as_a_whole():
    observed = ObservedEngine()
    observed.submit(CreateQueue("q"))
    with pytest.raises(InvalidField, match="at most 10000"):
        observed.submit(PushMany("q", [b""] * (BATCH_ITEMS_MAX + 1)))
    assert observed.shard.names["q"].deliveries == {}


@given(st.lists(st.text(max_size=3) | st.sampled_from(BAD_IDS), min_size=1, max_size=4))
def test_a_list_of_ids_is_valid_if_each_id_is(values):
    def is_good(value):
        try:
            check_id("dedup_id", value)
        except InvalidField:
            return False
        return True

    assert are_ids(values) == all(map(is_good, values))


@given(
    st.lists(st.tuples(st.integers(0, 700), st.lists(IDS, min_size=1, max_size=4)), max_size=12),
    st.sampled_from([4, 6, 100]),
)
def test_a_window_that_gets_many_ids_at_once_has_the_same_entries_as_one_by_one(batches, count_max):
    many: Window[int] = Window(1_000, count_max)
    each: Window[int] = Window(1_000, count_max)
    now_ms = 0
    for passed_ms, keys in batches:
        now_ms += passed_ms
        numbers = range(now_ms, now_ms + len(keys))
        known = {key for _, key, _ in each.entries()}
        is_new = known.isdisjoint(keys) and len(set(keys)) == len(keys)
        assert many.remember_new(keys, numbers, now_ms) == is_new
        if is_new:
            for key, number in zip(keys, numbers, strict=True):
                each.remember(key, number, now_ms)
        assert many.entries() == each.entries()


OPERATIONS = st.lists(
    st.sampled_from(
        [
            Batch([Push("q", b"%d" % number) for number in range(4)]),
            Push("q", b"first", priority=1),
            Push("q", b"of a group", group="g"),
            Push("q", b"late", delay_ms=5),
            Batch([Push("q", b"a"), Push("q", b"short-lived", ttl_ms=5), Push("q", b"b")]),
            ConfigureQueue("q", {"dead_letter": "d", "max_receives": 1}),
            Pull("q", 2, 5),
            Pull("q", 3, 2_000),
            "release",
            "purge",
            7,
        ]
    ),
    max_size=12,
)


def apply_all(observed, operations):
    """Applies commands and passes time; "release" ends the newest claim."""
    claims: list[Claim] = []
    for what in operations:
        # The in-flight limit may be reached, and a claim may have ended.
        with suppress(PenstockError):
            if what == "release":
                observed.submit(Release("q", claims.pop().proof) if claims else Stats("q"))
            elif what == "purge":
                observed.submit(Purge("q"))
            elif isinstance(what, int):
                observed.clock.advance(ms=what)
            else:
                replies = observed.submit(what)
                claims += replies if isinstance(what, Pull) else []


@given(OPERATIONS, st.integers(2, 9), st.sampled_from([None, 5]), st.sampled_from(["q", "d"]))
def test_a_pull_of_many_has_the_same_effect_as_single_pulls(
    operations, limit, in_flight_max, queue
):
    together, one_by_one = ObservedEngine(), ObservedEngine()
    both = together, one_by_one
    for observed in both:
        observed.submit(CreateQueue("q", {"in_flight_max": in_flight_max}))
        apply_all(observed, operations)
    apply_all(together, [Pull(queue, limit, holder="me")])
    apply_all(one_by_one, limit * [Pull(queue, 1, holder="me")])
    assert together.journal.events == one_by_one.journal.events
    assert as_bytes(together.shard) == as_bytes(one_by_one.shard)
    for observed in both:
        apply_all(observed, [40_000, Pull("q", 20)])
    assert together.journal.events == one_by_one.journal.events
    assert as_bytes(replay(together.journal.events)) == as_bytes(together.shard)
