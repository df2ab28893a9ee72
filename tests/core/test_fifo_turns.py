"""Row 8: the order of groups on a FIFO queue: all of one, then of the one that waited longest."""

from penstock.core.shard import ShardState
from penstock.service import ConfigureQueue, CreateQueue, Delete, Pull, Purge, Push, Release
from tests.core.observed import ObservedEngine, as_bytes


def engine_with(*names: str, **settings) -> ObservedEngine:
    """An engine with messages named like `a1`, pushed a second apart; the letter is the group."""
    observed = ObservedEngine()
    observed.submit(CreateQueue("q", {"fifo": True, **settings}))
    for name in names:
        observed.submit(Push("q", name.encode(), group=name[0]))
        observed.clock.advance(seconds=1)
    return observed


def pulled(observed: ObservedEngine, limit: int, **options) -> list[str]:
    return [claim.body.decode() for claim in observed.submit(Pull("q", limit, **options))]


def test_a_pull_takes_more_of_its_first_group_before_another_group():
    observed = engine_with("a1", "b1", "a2", "c1", "a3", "b2")
    assert pulled(observed, 10) == ["a1", "a2", "a3", "b1", "b2", "c1"]


def test_a_released_group_is_served_after_groups_that_waited_before():
    observed = engine_with("a1", "b1", "b2", "c1", "a2")
    assert pulled(observed, 3, visibility_ms=0) == ["a1", "a2", "b1"]
    assert pulled(observed, 10, visibility_ms=0) == ["c1", "a1", "a2", "b1", "b2"]


def test_a_released_group_is_served_before_groups_that_arrived_later():
    observed = engine_with("a1", "b1")
    observed.submit(Release("q", observed.submit(Pull("q"))[0].receipt))
    observed.clock.advance(seconds=1)
    observed.submit(Push("q", b"c1", group="c"))
    assert pulled(observed, 10) == ["b1", "a1", "c1"]


def test_a_group_whose_first_message_was_deleted_is_ordered_by_its_next_message():
    observed = engine_with("a1", "b1", "a2", "c1")
    observed.submit(Delete("q", observed.submit(Pull("q"))[0].receipt))
    assert pulled(observed, 10) == ["b1", "a2", "c1"]


def test_a_released_message_can_be_pulled_while_later_ones_of_its_group_are_in_flight():
    observed = engine_with("a1", "a2", "a3", "b1")
    first, second, _ = observed.submit(Pull("q", 3))
    observed.submit(Release("q", first.receipt))
    assert pulled(observed, 10) == ["b1", "a1"]
    observed.submit(Release("q", second.receipt))
    # The first message is before it in the group, and is in flight again.
    assert pulled(observed, 10) == []


def test_no_message_of_a_group_is_pulled_before_an_earlier_one_that_is_in_flight():
    observed = engine_with("a1", "a2", "a3", "a4")
    first, second, third = observed.submit(Pull("q", 3))
    observed.submit(Release("q", second.receipt))
    observed.submit(Delete("q", third.receipt))
    assert pulled(observed, 10) == []
    observed.submit(Delete("q", first.receipt))
    assert pulled(observed, 10) == ["a2", "a4"]


def test_the_order_of_groups_survives_a_restart():
    observed = engine_with("a1", "b1", "c1", "d1")
    for claim in observed.submit(Pull("q", 2)):
        observed.clock.advance(seconds=1)
        observed.submit(Release("q", claim.receipt))
    restored = ShardState.restore(observed.shard.snapshot())
    assert as_bytes(restored) == as_bytes(observed.shard)
    taken = restored.pull(Pull("q", 10), observed.clock.now_ms(), [])
    assert [delivery.number for delivery in taken] == [3, 4, 1, 2]


def test_a_pull_moves_the_dead_letters_at_the_head_and_gets_the_messages_after_them():
    observed = engine_with(
        *[f"a{number}" for number in range(200)], dead_letter="d", max_receives=3
    )
    for claim in observed.submit(Pull("q", 150)):
        observed.submit(Release("q", claim.receipt))
    observed.submit(ConfigureQueue("q", {"max_receives": 1}))
    assert pulled(observed, 500) == [f"a{number}" for number in range(150, 200)]


def test_after_a_purge_a_fifo_queue_accepts_dedup_ids_that_it_had_before():
    observed = engine_with()
    pushed = [observed.submit(Push("q", b"x", group="a", dedup_id="1")) for _ in range(2)]
    assert [reply.duplicate for reply in pushed] == [False, True]
    observed.submit(Purge("q"))
    again = [observed.submit(Push("q", b"x", group="a", dedup_id="1")) for _ in range(2)]
    assert [reply.duplicate for reply in again] == [False, True]
    assert pulled(observed, 10) == ["x"]
