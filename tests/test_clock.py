"""ManualClock: a wait advances it, or ends when another thread advances it, or is refused."""

import asyncio
import subprocess
import sys
import threading

import penstock
import penstock.aio
from tests.server.conftest import until

ONE_THREAD = """
import penstock

queues = penstock.connect({url!r}, clock=penstock.ManualClock())
queues.create("q")
assert queues.pull("q") is None
try:
    queues.pull("q", wait=20)
except penstock.errors.InvalidField as refused:
    print(refused)
queues.push("q", b"x")
assert queues.pull("q", wait=20).body == b"x"
queues.close()
"""


def test_a_wait_in_the_only_thread_is_refused_at_once(tmp_path):
    for url in ("memory:", f"file:{tmp_path / 'store'}?embedded=1"):
        done = subprocess.run(
            [sys.executable, "-c", ONE_THREAD.format(url=url)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("wait: this ManualClock stands still")
        assert "auto_advance=True" in done.stdout


def test_another_thread_may_end_a_wait_by_advancing_the_clock():
    clock = penstock.ManualClock()
    with penstock.connect("memory:", clock=clock) as queues:
        queues.create("q")
        found = []
        waiting = threading.Thread(target=lambda: found.append(queues.pull("q", wait=20)))
        waiting.start()
        until(lambda: queues.stats("q").waiting_pulls)
        clock.advance(seconds=20)
        waiting.join(30)
    assert found == [None]


def test_with_auto_advance_a_wait_advances_the_clock_by_exactly_its_length():
    clock = penstock.ManualClock(auto_advance=True)
    with penstock.connect("memory:", clock=clock) as queues:
        queues.create("q")
        before_ms = clock.now_ms()
        assert queues.pull("q", wait=20) is None
        assert clock.now_ms() - before_ms == 20_000


def test_with_auto_advance_a_wait_ends_when_a_delay_or_a_claim_ends(quick_path):
    for url in ("memory:", f"file:{quick_path / 'store'}?embedded=1"):
        clock = penstock.ManualClock(auto_advance=True)
        with penstock.connect(url, clock=clock) as queues:
            queues.create("q", visibility_timeout=30)
            queues.push("q", b"x", delay=7)
            before_ms = clock.now_ms()
            for receives, waited_ms in ((1, 7_000), (2, 37_000)):
                claim = queues.pull("q", wait=3_600)
                assert claim is not None
                assert claim.receives == receives
                assert clock.now_ms() - before_ms == waited_ms


def test_with_auto_advance_an_awaited_wait_advances_the_clock_too():
    async def waits():
        clock = penstock.ManualClock(auto_advance=True)
        async with await penstock.aio.connect("memory:", clock=clock) as queues:
            await queues.create("q")
            await queues.push("q", b"x", delay=7)
            before_ms = clock.now_ms()
            claim = await queues.pull("q", wait=3_600)
            assert claim is not None
            assert clock.now_ms() - before_ms == 7_000
            await queues.delete(claim)
            assert await queues.pull("q", wait=20) is None
            assert clock.now_ms() - before_ms == 27_000

    asyncio.run(asyncio.wait_for(waits(), 30))
