"""The order of groups on a FIFO queue: all of one group, then the group that waited longest."""

from penstock.core.shard import ShardState
from penstock.service import ConfigureQueue, CreateQueue, Delete, Pull, Purge, Push, Release
from tests.core.life import Life, as_bytes


def life_with(*names: str, **settings) -> Life:
    """Messages named like `a1`, a second apart: the letter is the group."""
    life = Life()
    life.submit(CreateQueue("q", {"fifo": True, **settings}))
    for name in names:
        life.submit(Push("q", name.encode(), group=name[0]))
        life.clock.advance(seconds=1)
    return life


def pulled(life: Life, limit: int, **options) -> list[str]:
    return [claim.body.decode() for claim in life.submit(Pull("q", limit, **options))]


def test_a_pull_takes_more_of_its_first_group_before_another_group():
    life = life_with("a1", "b1", "a2", "c1", "a3", "b2")
    assert pulled(life, 10) == ["a1", "a2", "a3", "b1", "b2", "c1"]


def test_a_group_that_came_back_is_served_after_groups_that_waited_before():
    life = life_with("a1", "b1", "b2", "c1", "a2")
    assert pulled(life, 3, visibility_ms=0) == ["a1", "a2", "b1"]
    assert pulled(life, 10, visibility_ms=0) == ["c1", "a1", "a2", "b1", "b2"]


def test_a_group_that_came_back_is_served_before_groups_that_arrived_later():
    life = life_with("a1", "b1")
    life.submit(Release("q", life.submit(Pull("q"))[0].receipt))
    life.clock.advance(seconds=1)
    life.submit(Push("q", b"c1", group="c"))
    assert pulled(life, 10) == ["b1", "a1", "c1"]


def test_a_group_whose_first_message_was_deleted_is_ordered_by_its_next_message():
    life = life_with("a1", "b1", "a2", "c1")
    life.submit(Delete("q", life.submit(Pull("q"))[0].receipt))
    assert pulled(life, 10) == ["b1", "a2", "c1"]


def test_a_released_message_can_be_pulled_while_later_ones_of_its_group_are_in_flight():
    life = life_with("a1", "a2", "a3", "b1")
    first, second, _ = life.submit(Pull("q", 3))
    life.submit(Release("q", first.receipt))
    assert pulled(life, 10) == ["b1", "a1"]
    life.submit(Release("q", second.receipt))
    # Before it stands the first again, in flight.
    assert pulled(life, 10) == []


def test_nothing_overtakes_a_message_in_flight():
    life = life_with("a1", "a2", "a3", "a4")
    first, second, third = life.submit(Pull("q", 3))
    life.submit(Release("q", second.receipt))
    life.submit(Delete("q", third.receipt))
    assert pulled(life, 10) == []
    life.submit(Delete("q", first.receipt))
    assert pulled(life, 10) == ["a2", "a4"]


def test_the_order_of_groups_survives_a_restart():
    life = life_with("a1", "b1", "c1", "d1")
    for claim in life.submit(Pull("q", 2)):
        life.clock.advance(seconds=1)
        life.submit(Release("q", claim.receipt))
    restored = ShardState.restore(life.shard.snapshot())
    assert as_bytes(restored) == as_bytes(life.shard)
    taken = restored.pull(Pull("q", 10), life.clock.now_ms(), [])
    assert [delivery.number for delivery in taken] == [3, 4, 1, 2]


def test_dead_letters_in_front_are_passed_over_by_the_pull_that_finds_them():
    life = life_with(*[f"a{number}" for number in range(200)], dead_letter="d", max_receives=3)
    for claim in life.submit(Pull("q", 150)):
        life.submit(Release("q", claim.receipt))
    life.submit(ConfigureQueue("q", {"max_receives": 1}))
    assert pulled(life, 500) == [f"a{number}" for number in range(150, 200)]


def test_after_a_purge_a_fifo_queue_accepts_dedup_ids_it_had_before():
    life = life_with()
    pushed = [life.submit(Push("q", b"x", group="a", dedup_id="1")) for _ in range(2)]
    assert [reply.duplicate for reply in pushed] == [False, True]
    life.submit(Purge("q"))
    again = [life.submit(Push("q", b"x", group="a", dedup_id="1")) for _ in range(2)]
    assert [reply.duplicate for reply in again] == [False, True]
    assert pulled(life, 10) == ["x"]
