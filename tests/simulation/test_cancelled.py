"""A pull that is cancelled leaves no message claimed, at whatever instant that happens."""

from typing import Any

import pytest

from penstock.cluster import spread_pulls
from penstock.cluster.owned_shard import end_tasks
from penstock.service import Delete, Pull, Push, Stats
from tests.simulation.queues import SimulatedQueue, name_in
from tests.simulation.script import ClusterScript

LONG_MS = 600_000
HOT = name_in("q", 0, 2)


@pytest.fixture
def script(quick_path):
    script = ClusterScript(quick_path, shards=2, queues=(SimulatedQueue(HOT),))
    yield script
    script.close()
    assert script.violation is None


def begin(script, command):
    """The task of a command."""
    tasks = []
    client = script.client
    client.run(lambda: tasks.append(client.begin(client.ask(command), lambda *outcome: None)))
    return tasks[0]


@pytest.mark.parametrize("wait_ms", [0, 50])
def test_the_claims_of_a_cancelled_pull_are_released_at_every_instant(script, wait_ms):
    """Before the owner has the pull, before its claims are kept, and with its answer on its way."""
    ended = set()
    for after_ms in range(40):
        if not wait_ms:
            script.ask(Push(HOT, b"%d" % after_ms))
        pulling = begin(script, Pull(HOT, 10, visibility_ms=LONG_MS, wait_ms=wait_ms))
        if wait_ms:
            script.wait(10)
            script.begin(Push(HOT, b"%d" % after_ms), script.late)
        script.wait(after_ms)
        claims = [] if not pulling.done() else pulling.result()
        script.client.run(pulling.cancel)
        ended.add(bool(claims))
        script.wait(300)
        assert script.ask(Stats(HOT)).in_flight == len(claims), after_ms
        if claims:
            break
    # Some were cancelled, and the last one came to its end.
    assert ended == {False, True}


def test_a_pull_that_is_cancelled_between_two_shards_keeps_nothing(script):
    script.spread(HOT, 2)
    for number in range(8):
        script.ask(Push(HOT, b"%d" % number))
    assert script.ask(Stats(HOT)).visible == 8
    # The owner of the second shard does not answer; pulls begin with either.
    script.other.pause()
    for _ in range(2):
        pulling = begin(script, Pull(HOT, 8, visibility_ms=LONG_MS))
        script.wait(100)
        assert not pulling.done()
        script.client.run(pulling.cancel)
        script.wait(100)
    script.other.resume()
    script.wait(1_000)
    stats = script.ask(Stats(HOT))
    assert (stats.visible, stats.in_flight) == (8, 0)


def test_a_pull_that_is_cancelled_while_it_waits_on_all_shards_keeps_nothing(script):
    script.spread(HOT, 2)
    for after_ms in range(40):
        pulling = begin(script, Pull(HOT, 8, visibility_ms=LONG_MS, wait_ms=5_000))
        script.wait(30)
        script.begin(Push(HOT, b"%d" % after_ms), script.late)
        script.wait(after_ms)
        if pulling.done():
            break
        script.client.run(pulling.cancel)
        script.wait(300)
        (claim,) = script.ask(Pull(HOT, 8))
        assert script.ask(Delete(HOT, claim.receipt))
    assert after_ms > 3


def test_a_pull_that_is_cancelled_while_its_watches_end_keeps_nothing(script, monkeypatch):
    """It has claims by then, and is about to return them."""
    script.spread(HOT, 2)
    pulling: list[Any] = []

    async def cancel_and_end(tasks):
        pulling[-1].cancel()
        await end_tasks(tasks)

    # Pulls wait in one shard in turn, and pushes go to one in turn.
    for number in range(4):
        pulling.append(begin(script, Pull(HOT, 8, visibility_ms=LONG_MS, wait_ms=5_000)))
        script.wait(30)
        with monkeypatch.context() as patch:
            patch.setattr(spread_pulls, "end_tasks", cancel_and_end)
            script.ask(Push(HOT, b"%d" % number))
            script.until(pulling[-1].done)
        assert pulling[-1].cancelled()
        script.wait(300)
        stats = script.ask(Stats(HOT))
        assert (stats.visible, stats.in_flight) == (1, 0)
        (claim,) = script.ask(Pull(HOT, 8))
        assert script.ask(Delete(HOT, claim.receipt))
