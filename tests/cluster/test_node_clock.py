"""Nodes on machines whose clocks are wrong: nothing expires early, and nothing is stranded."""

import time
from types import SimpleNamespace

import pytest

from penstock.cluster.node_clock import NodeClock, middle

DAY_MS = 86_400_000


@pytest.fixture
def set_clock(monkeypatch):
    """Sets the clock of this machine, as this process sees it."""

    def by(ahead_ms):
        def time_ns():
            return time.time_ns() + ahead_ms * 1_000_000

        fake = SimpleNamespace(time_ns=time_ns, monotonic_ns=time.monotonic_ns)
        for module in (
            "penstock.clock",
            "penstock.cluster.node_clock",
            "penstock.cluster.jetstream",
        ):
            monkeypatch.setattr(f"{module}.time", fake)

    return by


@pytest.mark.parametrize(
    ("servers", "used"),
    [
        ([], 0),
        ([3, -2, 9], 0),
        # Ours is wrong.
        ([DAY_MS, DAY_MS + 5, DAY_MS - 7], DAY_MS),
        ([-DAY_MS, -DAY_MS, -DAY_MS], -DAY_MS),
        ([DAY_MS], DAY_MS),
        # One of theirs is.
        ([4, DAY_MS, -3], 0),
        ([4, -DAY_MS, -3], 0),
        # Nobody knows: the earlier time expires nothing.
        ([-DAY_MS], 0),
    ],
)
def test_the_middle_clock_is_used(servers, used):
    assert abs(middle(servers) - used) < 10


def test_a_clock_that_jumps_while_the_node_runs_changes_nothing(set_clock):
    clock = NodeClock()
    before = clock.now_ms()
    set_clock(10 * DAY_MS)
    assert 0 <= clock.for_shard(0).now_ms() - before < 60_000
    set_clock(-10_000 * DAY_MS)
    assert 0 <= clock.for_shard(0).now_ms() - before < 60_000
    # The shard's own time never runs back.
    assert clock.for_shard(before + DAY_MS).now_ms() >= before + DAY_MS


@pytest.mark.parametrize("ahead_ms", [10 * DAY_MS, DAY_MS, 3_600_000, -3_600_000, -10_000 * DAY_MS])
def test_a_node_whose_clock_is_wrong_takes_over_and_nothing_is_lost(
    on_cluster, set_clock, ahead_ms, caplog
):
    """Its time is that of the shard: claims last, delays end, messages do not expire."""

    async def work(cluster):
        queues = await cluster.open_queue("orders", retention=3 * 86_400)
        await queues.push("orders", b"held")
        held = await queues.pull("orders", visibility_timeout=600)
        await queues.push("orders", b"visible", dedup_id="one")
        await queues.push("orders", b"delayed", delay=2)
        set_clock(ahead_ms)
        await cluster.add("b")
        await cluster.until_owned("b")
        await cluster.end("a")
        await cluster.until(lambda: set(cluster.owners().values()) == {"b"})
        await queues.push("orders", b"visible again", dedup_id="one")
        stats = await queues.stats("orders")
        assert stats.messages == 3
        assert stats.in_flight == 1
        assert await queues.extend(held, 60)
        found = [(await queues.pull("orders", wait=20)).body for _ in range(2)]
        assert found == [b"visible", b"delayed"]
        assert abs(cluster.nodes["b"].node.status()["clock_ahead_ms"] - ahead_ms) < 5_000
        assert "the clock of this machine is" in caplog.text

    on_cluster(work)
