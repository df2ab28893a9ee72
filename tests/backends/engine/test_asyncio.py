"""The asyncio engine when its disk fails, when it is closed during calls, and during upkeep."""

import asyncio
from typing import Any

import pytest

from penstock.aio import AsyncQueues
from penstock.backends.engine.asynchronous import AsyncEngine
from penstock.backends.engine.store import open_engine
from penstock.errors import JournalError, PenstockError
from penstock.service import PushReply
from tests.backends.engine.random_store import small_slices
from tests.journal.disk import Disk

TIMEOUT_S = 60


@pytest.fixture(autouse=True)
def _in_small_steps(monkeypatch):
    small_slices(monkeypatch)


def on_disk(path, disk):
    disk.path = str(path / "store" / "journal")
    return open_engine(path / "store", storage=disk, file_bytes=131_072)


@pytest.mark.parametrize("call", range(1, 6))
def test_every_waiting_caller_gets_the_error_of_a_failed_sync(quick_path, call):
    disk = Disk()

    async def main():
        queues = AsyncQueues(AsyncEngine(on_disk(quick_path, disk)))
        await queues.create("q")
        disk.failing_syncs = {disk.syncs + call}
        answered = []
        for _ in range(20):
            pushes = [queues.push("q", b"x") for _ in range(30)]
            gathered = asyncio.gather(*pushes, return_exceptions=True)
            replies = await asyncio.wait_for(gathered, TIMEOUT_S)
            answered += [reply for reply in replies if isinstance(reply, PushReply)]
            refused = [reply for reply in replies if not isinstance(reply, PushReply)]
            assert all(isinstance(error, JournalError) for error in refused)
            if refused:
                break
        else:
            raise AssertionError("no sync failed")
        with pytest.raises(JournalError):
            await asyncio.wait_for(queues.pull("q"), TIMEOUT_S)
        await asyncio.wait_for(queues.close(), TIMEOUT_S)
        return answered

    answered = asyncio.run(main())
    engine = on_disk(quick_path, disk)
    assert engine.shard.names["q"].visible >= len(answered)
    engine.close()


def test_closing_ends_the_waits_of_all_callers(quick_path):
    async def main():
        engine = open_engine(quick_path / "store", file_bytes=131_072)
        queues = AsyncQueues(AsyncEngine(engine))
        await queues.create("q")
        await queues.create("empty")
        calls: list[Any] = [queues.push("q", b"%d" % number) for number in range(50)]
        calls.append(queues.pull("empty", wait=60))
        tasks = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0)
        await asyncio.wait_for(queues.close(), TIMEOUT_S)
        replies = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), TIMEOUT_S)
        return [reply for reply in replies if isinstance(reply, PushReply)], replies

    answered, replies = asyncio.run(main())
    assert all(isinstance(reply, PushReply | PenstockError) for reply in replies)
    engine = open_engine(quick_path / "store", file_bytes=131_072)
    assert engine.shard.names["q"].visible >= len(answered)
    engine.close()


def test_upkeep_runs_between_the_commands_of_a_loop(quick_path):
    async def main():
        engine: Any = open_engine(quick_path / "store", file_bytes=16_384, durability="os")
        queues = AsyncQueues(AsyncEngine(engine))
        await queues.create("q")
        loop = asyncio.get_running_loop()
        for _ in range(5):
            upkeep = loop.run_in_executor(None, engine.upkeep.run_pass)
            # At least 50 turns, so that the next passes find files to drop.
            turns = 0
            while turns < 50 or not upkeep.done():
                turns += 1
                await queues.push("q", bytes(500))
                claim = await queues.pull("q")
                assert claim is not None
                await queues.delete(claim)
                await asyncio.sleep(0)
            await upkeep
        kept = [(await queues.push("q", b"kept %d" % number)).id for number in range(20)]
        first_offset = engine.journal.segments.first_offset
        await queues.close()
        return kept, first_offset

    kept, first_offset = asyncio.run(main())
    assert first_offset > 0
    engine = open_engine(quick_path / "store")
    assert engine.shard.names["q"].visible == len(kept)
    engine.close()
