"""Peeking shows messages of any state in their order, without a scan of all messages."""

import random

import pytest

from penstock.backends.engine.engine import Engine
from penstock.clock import ManualClock
from penstock.core.delivery import DELAYED, IN_FLIGHT, VISIBLE, Delivery
from penstock.service import CreateQueue, Delete, Peek, Pull, Push, Redrive, Release, State

STATES: dict[State, int] = {"visible": VISIBLE, "delayed": DELAYED, "in_flight": IN_FLIGHT}
SETTINGS: dict[str, dict[str, object]] = {
    "plain": {},
    "fifo": {"fifo": True},
    "few receives": {"max_receives": 2},
}


def expected(engine, state):
    """The ids of all messages in this state, sorted."""
    queue = engine.shard.names["q"]
    found = [each for each in queue.deliveries.values() if each.state == state]
    key = (lambda d: (-d.priority, d.rank)) if state == VISIBLE else (lambda d: d.rank)
    return [engine._ids.show(each.number) for each in sorted(found, key=key)]


@pytest.mark.parametrize("has_priorities", [False, True])
@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_a_peek_shows_the_messages_of_a_state_in_order(kind, has_priorities, seed):
    chance = random.Random(seed)
    clock = ManualClock()
    engine = Engine(clock=clock)
    settings = SETTINGS[kind]
    is_fifo = "fifo" in settings
    engine.submit(CreateQueue("dead", {"fifo": is_fifo}))
    engine.submit(CreateQueue("q", {**settings, "dead_letter": "dead", "max_receives": 2}))
    for turn in range(300):
        group = chance.choice(["a", "b", "c", None]) if not is_fifo else chance.choice("abc")
        priority = chance.randrange(3) if has_priorities and not is_fifo else 0
        delay_ms = chance.choice([None, None, 2_000]) if not is_fifo else None
        engine.submit(Push("q", b"x", delay_ms, priority, None, str(turn), group))
        claims = engine.submit(Pull("q", chance.randrange(1, 3), 5_000)) if turn % 2 else []
        for claim in claims:
            ending = chance.randrange(4)
            if ending == 0:
                engine.submit(Release("q", claim.proof, chance.choice([0, 3_000])))
            elif ending == 1:
                engine.submit(Delete("q", claim.proof))
        if turn % 40 == 39:
            engine.submit(Redrive("dead"))
        clock.advance(ms=chance.randrange(500))
        if turn % 10 == 9:
            engine.catch_up()
            for name, state in STATES.items():
                found = engine.submit(Peek("q", 7, name))
                assert [each.id for each in found] == expected(engine, state)[:7]


def test_a_peek_at_a_state_without_messages_examines_none():
    """Row 20: the scan of a million visible messages for one in flight takes some 50 ms."""
    engine = Engine()
    engine.submit(CreateQueue("q"))
    for _ in range(10):
        engine.submit(Push("q", b"x"))

    class CountedDict(dict[int, Delivery]):
        values_read = 0

        def values(self):
            for each in super().values():
                CountedDict.values_read += 1
                yield each

    queue = engine.shard.names["q"]
    queue.deliveries = CountedDict(queue.deliveries)
    assert engine.submit(Peek("q", 10, "in_flight")) == []
    assert engine.submit(Peek("q", 10, "delayed")) == []
    assert CountedDict.values_read == 0
    engine.submit(Pull("q", 1))
    assert len(engine.submit(Peek("q", 10, "in_flight"))) == 1
    assert CountedDict.values_read == 1
