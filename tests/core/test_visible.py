"""The order of the messages of a queue, and that it keeps no memory for removed ones."""

from collections import deque
from random import Random

from penstock.core.delivery import GONE, VISIBLE, Delivery
from penstock.core.shard import ShardState
from penstock.core.visible import ABSENT_MIN, SWEEP_PIECE, FifoOrder, Line, StandardOrder
from penstock.service import CreateQueue, Delete, Pull, Push, Redrive, Release
from tests.core.observed import ObservedEngine


def delivery(rank: int, group: str | None = None, priority: int = 0) -> Delivery:
    return Delivery(1, rank, rank, 0, 0, VISIBLE, priority=priority, group=group)


def taken(order: StandardOrder) -> list[int]:
    """The ranks of all messages, in the order in which they are taken."""
    ranks = []
    while (each := order.take(0)) is not None:
        ranks.append(each.rank)
    return ranks


def kept_by(shard: ShardState, name: str) -> int:
    """How many entries the order of a queue keeps in all its lines and heaps."""
    order = shard.names[name].order
    if isinstance(order, FifoOrder):
        return len(order._open) + sum(len(group.order) for group in order._groups.values())
    levels = order._by_priority.values()
    lines = [line for level in levels for line in level.lines()]
    return sum(len(level.ready) for level in levels) + sum(
        len(line.fresh) + len(line.returned) for line in lines
    )


def test_messages_that_come_back_are_taken_at_their_old_places():
    line = Line()
    first, second, third = (delivery(rank) for rank in (1, 2, 3))
    line.fresh.extend([first, second, third])
    assert line.take() is first
    assert line.take() is second
    order = StandardOrder()
    for each in (third, delivery(4)):
        order.join(each)
    order.come_back(second)
    order.come_back(first)
    assert [each.rank for each in order.ahead(10)] == [1, 2, 3, 4]
    assert taken(order) == [1, 2, 3, 4]


def test_removing_messages_in_order_does_not_iterate_over_the_remaining_ones():
    walks = 0

    class Fresh(deque[Delivery]):
        def __iter__(self):
            nonlocal walks
            walks += 1
            return super().__iter__()

    line = Line()
    line.fresh = Fresh(delivery(rank) for rank in range(1_000))
    for each in list(line.fresh)[:900]:
        each.state = GONE
        line.leave()
    assert len(line.fresh) == 100
    assert walks == 1  # the list above
    for each in list(line.fresh)[1::2]:
        each.state = GONE
        line.leave()
    assert len(line.fresh) == 100, "a short line is not swept"


def test_messages_that_left_a_long_line_are_removed_in_pieces():
    """Row 20: no call iterates over a whole line."""
    line = Line()
    fresh = line.fresh
    count = 20 * SWEEP_PIECE
    deliveries = [delivery(rank) for rank in range(count)]
    fresh.extend(deliveries)
    leaving = [each for each in deliveries if each.rank % 16]
    Random(7).shuffle(leaving)
    largest = 0
    for number, each in enumerate(leaving, 1):
        each.state = GONE
        before = len(fresh)
        line.leave()
        largest = max(largest, before - len(fresh))
        assert number < ABSENT_MIN or len(fresh) <= 5 * (count - number) + SWEEP_PIECE
    assert line.fresh is fresh
    assert 0 < largest <= SWEEP_PIECE
    kept = [each.rank for each in fresh]
    assert kept == sorted(kept)
    order = []
    while (first := line.take()) is not None:
        order.append(first.rank)
    assert order == list(range(0, count, 16))


def test_reading_ahead_takes_no_message_and_stops_at_its_limit():
    order = StandardOrder()
    for rank, priority, group in [(1, 0, None), (2, 5, "g"), (3, 5, None), (4, 0, "g")]:
        order.join(delivery(rank, group, priority))
    for _ in range(2):
        assert [each.rank for each in order.ahead(3)] == [2, 3, 1]
    assert taken(order) == [2, 3, 1, 4]


def test_groups_whose_messages_were_all_deleted_take_no_memory():
    for fifo in (False, True):
        observed = ObservedEngine()
        observed.submit(CreateQueue("q", {"fifo": fifo}))
        for number in range(500):
            observed.submit(Push("q", b"x", group=f"group{number}"))
        assert kept_by(observed.shard, "q") >= 500
        while claims := observed.submit(Pull("q", 50)):
            for claim in claims:
                observed.submit(Delete("q", claim.receipt))
        observed.submit(Push("q", b"x", group="last"))
        observed.submit(Delete("q", observed.submit(Pull("q"))[0].receipt))
        assert kept_by(observed.shard, "q") <= 2


def test_a_message_released_many_times_takes_no_more_memory():
    for fifo in (False, True):
        observed = ObservedEngine()
        observed.submit(CreateQueue("q", {"fifo": fifo}))
        for _ in range(3):
            observed.submit(Push("q", b"x", group="g"))
        for _ in range(1_000):
            observed.submit(Release("q", observed.submit(Pull("q"))[0].receipt))
        assert kept_by(observed.shard, "q") < 20


def test_messages_of_many_groups_released_many_times_take_no_more_memory():
    for fifo in (False, True):
        observed = ObservedEngine()
        observed.submit(CreateQueue("q", {"fifo": fifo}))
        for number in range(30):
            observed.submit(Push("q", b"x", group=f"g{number % 5}"))
        for _ in range(200):
            for claim in observed.submit(Pull("q", 10)):
                observed.submit(Release("q", claim.receipt))
        assert kept_by(observed.shard, "q") < 150


def test_messages_that_expire_behind_the_first_one_are_removed():
    for fifo in (False, True):
        observed = ObservedEngine()
        observed.submit(CreateQueue("q", {"fifo": fifo}))
        observed.submit(Push("q", b"head", group="g"))
        for _ in range(10):
            for _ in range(200):
                observed.submit(Push("q", b"x", group="g", ttl_ms=1_000))
            observed.clock.advance(seconds=2)
            observed.engine.tick()
        assert len(observed.shard.names["q"].deliveries) == 1
        assert kept_by(observed.shard, "q") < 1_000


def test_messages_redriven_back_and_forth_take_no_more_memory():
    for fifo in (False, True):
        observed = ObservedEngine()
        for name in ("one", "two"):
            observed.submit(CreateQueue(name, {"fifo": fifo}))
        for _ in range(5):
            observed.submit(Push("one", b"x", group="g"))
        for _ in range(300):
            assert observed.submit(Redrive("one", "two")) == 5
            assert observed.submit(Redrive("two", "one")) == 5
        assert kept_by(observed.shard, "one") + kept_by(observed.shard, "two") < 50
