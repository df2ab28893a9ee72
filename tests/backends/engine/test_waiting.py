"""Row 27: pulls that wait while one that is served ends, moves or loses messages itself.

After a standstill much is due at once, more than one step settles. A pull that is served then finds
messages that have expired: it ends them, and these events are served like all others.
"""

import threading
from typing import Any

import pytest

import penstock
from penstock.backends.engine.engine import Engine
from penstock.backends.engine.store import open_engine
from penstock.clock import ManualClock
from penstock.journal import MemoryJournal
from penstock.service import (
    Batch,
    ConfigureQueue,
    CreateQueue,
    Pull,
    Push,
    PushMany,
    Release,
    Stats,
)
from tests.backends.engine.test_damage import FILE_BYTES, PAGE_BYTES, flip
from tests.server.conftest import until


def test_pulls_wait_through_a_standstill_after_which_much_is_due():
    clock = ManualClock()
    with penstock.connect("memory:", clock=clock) as queues:
        queues.create("q")
        for number in range(600):
            queues.push("q", b"%d" % number, delay=1, ttl=1.2 if number % 2 else None)
        claims = []
        threads = [
            threading.Thread(target=lambda: claims.append(queues.pull("q", wait=20)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        until(lambda: queues.stats("q").waiting_pulls == 2)
        clock.advance(seconds=2)
        for thread in threads:
            thread.join()
        assert sorted(claim.body for claim in claims if claim) == [b"0", b"2"]
        stats = queues.stats("q")
        assert (stats.visible, stats.in_flight, stats.delayed) == (298, 2, 0)


@pytest.mark.parametrize("limit", [1, 3])
def test_each_message_that_a_served_pull_claims_is_given_to_its_caller(limit):
    clock = ManualClock()
    engine = Engine(MemoryJournal(1), clock)
    engine.submit(CreateQueue("q"))
    short, long = Push("q", b"short", 1_000, ttl_ms=1_500), Push("q", b"long", 1_000)
    engine.submit(Batch([short, long] * 400))
    pull = Pull("q", limit, wait_ms=20_000)
    waiters = [engine.wait(pull, lambda: None) for _ in range(5)]
    clock.advance(seconds=2)
    engine.catch_up()
    claims = [claim for waiter in waiters if waiter for claim in waiter.claims]
    assert [claim.body for claim in claims] == [b"long"] * (5 * limit)
    assert len({claim.id for claim in claims}) == engine.submit(Stats("q")).in_flight == 5 * limit


def test_waiting_pulls_get_the_messages_behind_a_damaged_one(quick_path):
    clock = ManualClock()
    engine = open_engine(quick_path / "store", clock=clock, file_bytes=FILE_BYTES)
    engine.submit(CreateQueue("q"))
    # Large enough that it is read from the disk and not from memory.
    engine.submit(Push("q", b"damaged" * 1_200, delay_ms=1_000))
    engine.submit(PushMany("q", [b"one", b"two", b"three"], delay_ms=1_000))
    (damaged, *_) = engine.shard.queues[1].deliveries.values()
    assert isinstance(damaged.content, int)
    offset = (damaged.content >> 32) + 200
    journal: Any = engine.journal
    number, within = divmod(offset, journal.segments.payload_bytes)
    flip(quick_path / "store" / "journal" / f"{number:012d}.seg", PAGE_BYTES + within, 3)
    waiters = [engine.wait(Pull("q", wait_ms=20_000), lambda: None) for _ in range(2)]
    clock.advance(seconds=1)
    engine.catch_up()
    assert [claim.body for waiter in waiters if waiter for claim in waiter.claims] == [
        b"one",
        b"two",
    ]
    stats = engine.submit(Stats("q"))
    assert (stats.visible, stats.in_flight, stats.waiting_pulls) == (1, 2, 0)
    engine.close()


def many_dead(engine, count):
    """A queue whose next pull must move this many messages before it finds one."""
    engine.submit(CreateQueue("q", {"dead_letter": "dead", "max_receives": 2}))
    engine.submit(PushMany("q", [b"dead"] * count))
    engine.submit(Push("q", b"live"))
    for claim in engine.submit(Pull("q", count)):
        engine.submit(Release("q", claim.receipt))
    engine.submit(ConfigureQueue("q", {"max_receives": 1}))


def test_a_pull_that_waits_behind_many_dead_letters_is_served_soon():
    clock = ManualClock()
    engine = Engine(MemoryJournal(1), clock)
    many_dead(engine, 3_000)
    pull = Pull("q", wait_ms=20_000)
    assert engine.submit(pull) == []
    waiter = engine.wait(pull, lambda: None)
    assert waiter is not None
    for _ in range(4):
        assert engine.next_wake_ms <= clock.now_ms() or waiter.done
        engine.tick()
    assert [claim.body for claim in waiter.claims] == [b"live"]
    assert engine.submit(Stats("dead")).visible == 3_000


def test_a_pull_that_waits_for_what_another_waiting_pull_moves_is_served_in_the_same_step():
    clock = ManualClock()
    engine = Engine(MemoryJournal(1), clock)
    engine.submit(CreateQueue("q", {"dead_letter": "dead", "max_receives": 2}))
    engine.submit(Push("q", b"dead"))
    (claim,) = engine.submit(Pull("q"))
    engine.submit(Release("q", claim.receipt, 1_000))
    # Its limit is reached only now, while it is delayed: the next pull moves it.
    engine.submit(ConfigureQueue("q", {"max_receives": 1}))
    moving = engine.wait(Pull("q", wait_ms=20_000), lambda: None)
    waiting = engine.wait(Pull("dead", wait_ms=20_000), lambda: None)
    assert moving is not None
    assert waiting is not None
    clock.advance(seconds=1)
    engine.tick()
    assert not moving.done
    assert [claim.body for claim in waiting.claims] == [b"dead"]


def test_serving_one_pull_moves_a_limited_number_of_messages_in_one_step():
    engine = Engine(MemoryJournal(1), ManualClock())
    many_dead(engine, 6_000)
    pull = Pull("q", wait_ms=20_000)
    assert engine.submit(pull) == []
    moved = [engine.submit(Stats("dead")).visible]
    engine.wait(pull, lambda: None)
    while moved[-1] < 6_000:
        # Both a tick and a command take a step.
        engine.tick()
        moved.append(engine.submit(Stats("dead")).visible)
        assert moved[-2] < moved[-1] <= moved[-2] + 2_100


def test_waiting_pulls_of_named_holders_are_served_in_turns():
    """The others, and those of one holder, are served in order of arrival."""
    engine = Engine(MemoryJournal(1), ManualClock())
    engine.submit(CreateQueue("q"))
    waiters: dict[str, Any] = {}
    served: list[str] = []

    def wait(name, holder):
        def wake():
            # The one that arranges the next tick is woken without an answer.
            if name in waiters and waiters[name].done:
                served.append(name)

        waiters[name] = engine.wait(Pull("q", wait_ms=20_000, holder=holder), wake)

    for number in range(4):
        wait(f"a{number}", "a")
    wait("b0", "b")
    wait("nobody", None)
    engine.submit(PushMany("q", [b"x"] * 3))
    assert served == ["a0", "b0", "nobody"]
    served.clear()
    # One that comes back at once does not get in front of those that still wait.
    wait("b1", "b")
    wait("c0", "c")
    engine.submit(PushMany("q", [b"x"] * 5))
    assert served == ["c0", "a1", "b1", "a2", "a3"]


def test_the_turns_of_holders_that_left_are_forgotten():
    engine = Engine(MemoryJournal(1), ManualClock())
    engine.submit(CreateQueue("q"))
    before = None
    for number in range(1_000):
        waiter = engine.wait(Pull("q", wait_ms=20_000, holder=f"{number}"), lambda: None)
        if before is not None:
            engine.cancel_wait(before)
        before = waiter
    (turns,) = engine._line._turns.values()
    assert len(turns._last) < 200
    engine.submit(Push("q", b"x"))
    assert before is not None
    assert before.claims
    assert not engine._line._turns
