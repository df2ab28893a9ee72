"""The status of queues: the last hour in buckets, rates, and what needs attention."""

import asyncio
import time
from contextlib import suppress

import pytest

from penstock.backends.engine.engine import Engine
from penstock.backends.engine.loop import LoopEngine
from penstock.backends.loop import AwaitedService, result_of
from penstock.backends.redis.service import open_async_service
from penstock.clock import ManualClock
from penstock.server.console.status import BUCKET_MS, CALM, STUCK, WATCH, Status
from penstock.server.console.views import row
from penstock.service import (
    ConfigureQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    Pull,
    Push,
    QueueCounts,
    Release,
)
from penstock.url import read_url
from tests.backends.redis.servers import RedisServer

MINUTE_S = 60


class EngineWithStatus:
    """An engine on a manual clock, and the status of its queues."""

    def __init__(self):
        self.clock = ManualClock()
        self.service = LoopEngine(Engine(clock=self.clock))
        self.status = Status(self.service, in_process=True)

    async def do(self, *commands):
        return [await result_of(self.service.submit(command)) for command in commands]

    async def read(self, queue="orders"):
        await result_of(self.service.run(self.status.read()))
        return self.status.queues.get(queue)

    async def pass_s(self, seconds):
        """Time passes in which queues are read as they are while nobody looks."""
        for _ in range(seconds * 1_000 // BUCKET_MS):
            self.clock.advance(seconds=BUCKET_MS / 1_000)
            await asyncio.sleep(0)
            await self.read()


def in_shop(test):
    """Runs an asynchronous test with a shop."""

    async def run():
        shop = EngineWithStatus()
        try:
            await test(shop)
        finally:
            await shop.service.close()

    return lambda: asyncio.run(run())


@in_shop
async def test_what_happened_is_in_the_bucket_in_which_it_happened(shop):
    await shop.do(CreateQueue("orders"))
    await shop.read()
    await shop.do(*[Push("orders", b"x")] * 5)
    await shop.pass_s(20)
    (claims,) = await shop.do(Pull("orders", 3))
    await shop.do(Delete("orders", claims[0].proof), Release("orders", claims[1].proof))
    await shop.pass_s(20)
    queue = shop.status.queues["orders"]
    last = {name: column[-2:] for name, column in queue.series.columns().items()}
    assert last == {
        "depth": [5, 4],
        "in_flight": [0, 1],
        "pushed": [5, 0],
        "pulled": [0, 3],
        "deleted": [0, 1],
        "returned": [0, 1],
        "dead": [0, 0],
    }
    await shop.pass_s(3_600)
    assert queue.total("pushed", 180) == 0


@in_shop
async def test_what_happened_in_a_new_queue_before_it_was_first_read_is_not_left_out(shop):
    await shop.do(CreateQueue("old"), Push("old", b"x"))
    await shop.read()
    await shop.pass_s(20)
    await shop.do(CreateQueue("orders"), *[Push("orders", b"x")] * 5)
    (claims,) = await shop.do(Pull("orders", 2))
    await shop.do(Delete("orders", claims[0].proof))
    queue = await shop.read()
    last = {name: column[-2:] for name, column in queue.series.columns().items()}
    assert (last["depth"], last["in_flight"]) == ([0, 4], [0, 1])
    assert [last[name] for name in ("pushed", "pulled", "deleted")] == [[0, 5], [0, 2], [0, 1]]
    assert queue.since_ms == queue.info.created_at_ms
    # When the first reading finds a message, nobody knows how long it has been there.
    old = shop.status.queues["old"]
    assert (old.series, old.total("pushed")) == (None, 0)


class PreemptedEngine(LoopEngine):
    """An engine whose process gets no processor for a while in each reading of its queues."""

    def run(self, made):
        def slowly():
            reply = None
            with suppress(StopIteration):
                while True:
                    command = made.send(reply)
                    time.sleep(0.1)
                    reply = yield command

        return super().run(slowly())


def test_a_busy_machine_does_not_make_the_pages_late():
    async def read_thrice():
        service = PreemptedEngine(Engine())
        status = Status(service, in_process=True, watched_s=0.01)
        was_read = asyncio.Event()
        status.watch(was_read.set)
        status.start()
        try:
            for _ in range(3):
                # A hundred times what the reading took would be 10 s.
                await asyncio.wait_for(was_read.wait(), 8)
                was_read.clear()
        finally:
            await status.stop()
            await service.close()
        return status.tick

    assert asyncio.run(read_thrice()) >= 3


@in_shop
async def test_an_idle_queue_keeps_no_series_and_one_that_is_gone_is_named(shop):
    await shop.do(CreateQueue("orders"), CreateQueue("idle"))
    await shop.read()
    await shop.do(Push("orders", b"x"))
    await shop.read()
    assert shop.status.queues["idle"].series is None
    assert [each.info.queue for each in shop.status.changed()] == ["orders"]
    await shop.do(DeleteQueue("idle"))
    await shop.read()
    assert shop.status.gone == ["idle"]
    assert [*shop.status.changed()] == []


@in_shop
async def test_a_queue_that_nobody_pulls_is_stuck_after_five_minutes(shop):
    await shop.do(CreateQueue("orders"))
    await shop.read()
    await shop.do(Push("orders", b"x"))
    await shop.pass_s(4 * MINUTE_S)
    assert shop.status.queues["orders"].attention.level == CALM
    await shop.pass_s(2 * MINUTE_S)
    assert shop.status.queues["orders"].attention.level == STUCK
    assert "nobody pulls" in shop.status.queues["orders"].attention.why
    (claims,) = await shop.do(Pull("orders"))
    await shop.do(Delete("orders", claims[0].proof))
    await shop.pass_s(20)
    assert shop.status.queues["orders"].attention.level == CALM


@in_shop
async def test_a_paused_queue_is_named_until_it_is_resumed(shop):
    await shop.do(CreateQueue("orders"), Push("orders", b"x"))
    await shop.do(ConfigureQueue("orders", {"paused": True}))
    queue = await shop.read()
    assert (queue.attention.level, queue.stats.paused) == (WATCH, True)
    assert "paused" in queue.attention.why
    assert row(queue)["paused"] is True
    # That pushes are refused is more than that pulls get nothing.
    await shop.do(ConfigureQueue("orders", {"messages_max": 1}))
    queue = await shop.read()
    assert (queue.attention.level, "full" in queue.attention.why) == (STUCK, True)
    await shop.do(ConfigureQueue("orders", {"paused": False, "messages_max": None}))
    queue = await shop.read()
    assert queue.attention.level == CALM
    assert "paused" not in row(queue)


@in_shop
async def test_dead_letters_and_claims_that_come_back_are_to_be_looked_at(shop):
    settings = {"dead_letter": "dead", "max_receives": 2}
    await shop.do(CreateQueue("orders", settings), CreateQueue("flaky"))
    await shop.read()
    await shop.do(Push("orders", b"x"), *[Push("flaky", b"x")] * 10)
    for _ in range(2):
        (claims,) = await shop.do(Pull("orders"))
        await shop.do(Release("orders", claims[0].proof))
    (claims,) = await shop.do(Pull("flaky", 10))
    await shop.do(*[Release("flaky", each.proof) for each in claims])
    await shop.read()
    levels = {name: each.attention.level for name, each in shop.status.queues.items()}
    assert levels == {"orders": CALM, "dead": WATCH, "flaky": WATCH}
    assert shop.status.queues["orders"].stats.counts == QueueCounts(1, 2, 0, 2, 1)


@pytest.mark.service("redis-server")
def test_a_store_that_counts_nothing_is_named_as_lacking():
    server = RedisServer()

    async def run():
        service = AwaitedService(await open_async_service(read_url(server.url), None))
        status = Status(service, in_process=False)
        await result_of(service.submit(CreateQueue("orders")))
        await result_of(service.submit(Push("orders", b"x")))
        await result_of(service.run(status.read()))
        queue = status.queues["orders"]
        await service.close()
        return queue, status.lacking

    try:
        queue, lacking = asyncio.run(run())
    finally:
        server.close()
    assert (queue.stats.visible, queue.stats.counts) == (1, None)
    assert set(lacking) >= {"rates", "history"}
