"""Stats are a projection: they add nothing to the replicated log, and show only what it keeps."""

import pytest

from penstock.service import Peek, Push, QueueStats, Stats
from tests.simulation.script import ClusterScript


@pytest.fixture
def script(quick_path):
    """The nodes choose the owners, and read the registers for that."""
    script = ClusterScript(quick_path, is_placed=True)
    yield script
    script.close()
    assert script.violation is None


def test_stats_of_an_idle_shard_append_nothing(script):
    script.ask(Push("q0", b"a"))
    script.wait(5_000)
    before = len(script.slots)
    for _ in range(10):
        stats = script.ask(Stats("q0"))
        assert isinstance(stats, QueueStats)
        assert stats.visible == 1
        script.wait(1_000)
    assert len(script.slots) == before


def test_stats_show_only_what_is_kept(script):
    """The election holds the push back; the stats are asked while it waits."""
    script.wait(1_000)
    script.cluster.streams.shards[0].change_leader(3_000)
    script.begin(Push("q0", b"a"))
    script.wait(100)
    script.begin(Stats("q0"), script.late)
    script.wait(1_000)
    assert script.replies == []
    script.until_replied(2)
    (stats,) = [each for each in script.replies if isinstance(each, QueueStats)]
    assert stats.visible == 1
    assert len(script.truths[0].lives) == 1


def test_what_a_router_acts_on_is_still_confirmed(script):
    script.wait(5_000)
    before = len(script.slots)
    script.ask(Peek("q0", 1))
    assert len(script.slots) == before + 1
    script.wait(5_000)
    router = script.client.router
    script.run(router.ask(0, Stats("q0"), watch_only=True))
    script.until_replied(2)
    assert isinstance(script.replies[-1], QueueStats)
    assert len(script.slots) == before + 2
