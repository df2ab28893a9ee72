"""The awaited loop: the same guarantees as the blocking one."""

import asyncio
import gc
import logging

import pytest

import penstock
import penstock.aio
from penstock import ManualClock

# For the test in real time: long enough for a busy machine to extend the claim before it ends.
VISIBILITY_S = 2


def run(steps, auto_advance=True):
    """Runs a coroutine on a queue in memory."""

    async def whole():
        clock = ManualClock(auto_advance=auto_advance)
        async with await penstock.aio.connect("memory:", clock=clock) as queues:
            await queues.create("orders", visibility_timeout=30)
            return await steps(queues, clock)

    return asyncio.run(asyncio.wait_for(whole(), 60))


async def stats(queues):
    found = await queues.stats("orders")
    return found.visible, found.delayed, found.in_flight


async def turns(count=20):
    """Lets the tasks of the loop run."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_every_message_is_given_once_and_deleted():
    async def steps(queues, clock):
        await queues.push_many("orders", ["a", "b", "c"])
        found = [claim.body async for claim in queues.consume("orders", idle=0)]
        assert found == [b"a", b"b", b"c"]
        assert await stats(queues) == (0, 0, 0)

    run(steps)


async def fail(queues, **options):
    async with queues.consume("orders", **options) as claims:
        async for _ in claims:
            raise ZeroDivisionError


def test_an_exception_releases_the_message_after_a_delay_that_doubles():
    async def steps(queues, clock):
        await queues.push("orders", "poison")
        for delay_s in (2, 4, 8, 10, 10):
            with pytest.raises(ZeroDivisionError):
                await fail(queues, backoff=2, max_backoff=10)
            assert await stats(queues) == (0, 1, 0)
            clock.advance(seconds=delay_s - 1)
            assert await stats(queues) == (0, 1, 0)
            clock.advance(seconds=1)
            assert await stats(queues) == (1, 0, 0)

    run(steps)


async def fail_without_closing(queues):
    async for _ in queues.consume("orders", backoff=5):
        raise ZeroDivisionError


def test_a_loop_that_an_exception_ends_is_collected_and_its_message_released():
    async def steps(queues, clock):
        await queues.push("orders", "x")
        with pytest.raises(ZeroDivisionError):
            await fail_without_closing(queues)
        gc.collect()
        await turns()
        assert await stats(queues) == (0, 1, 0)

    run(steps)


def test_a_break_and_a_cancellation_release_the_message_at_once():
    async def steps(queues, clock):
        await queues.push("orders", "x")
        async with queues.consume("orders") as claims:
            async for _ in claims:
                break
        assert await stats(queues) == (1, 0, 0)

        began = asyncio.Event()

        async def never_finish():
            async with queues.consume("orders") as claims:
                async for _ in claims:
                    began.set()
                    await asyncio.Event().wait()

        task = asyncio.create_task(never_finish())
        await began.wait()
        assert await stats(queues) == (0, 0, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await stats(queues) == (1, 0, 0)

    run(steps)


def test_a_claim_is_extended_for_as_long_as_the_work_takes():
    async def steps(queues, clock):
        await queues.push_many("orders", ["slow", "next"])
        async for claim in queues.consume("orders", idle=0):
            for _ in range(20):
                clock.advance(seconds=15)
                await turns()
            assert claim.receives == 1
            assert (await stats(queues))[2] == 1
        assert await stats(queues) == (0, 0, 0)

    run(steps)


def test_the_task_extends_in_real_time_too():
    async def whole():
        async with await penstock.aio.connect("memory:") as queues:
            await queues.create("orders")
            await queues.push("orders", "x")
            async for claim in queues.consume("orders", visibility_timeout=VISIBILITY_S, idle=0):
                while queues.clock.now_ms() < claim.deadline_ms + 1_000:
                    assert (await queues.stats("orders")).in_flight == 1
                    await asyncio.sleep(0)
            assert await stats(queues) == (0, 0, 0)

    asyncio.run(whole())


def test_a_claim_is_held_no_longer_than_asked_for():
    async def steps(queues, clock):
        await queues.push("orders", "stuck")
        async with queues.consume("orders", max_hold=60) as claims:
            await anext(claims)
            for _ in range(10):
                clock.advance(seconds=10)
                await turns()
            assert await stats(queues) == (1, 0, 0)

    run(steps)


def test_stop_ends_the_loop_after_the_current_message():
    async def steps(queues, clock):
        await queues.push_many("orders", ["a", "b"])
        consumer = queues.consume("orders")
        async for _ in consumer:
            consumer.stop()
        assert await stats(queues) == (1, 0, 0)
        assert [claim async for claim in consumer] == []

    run(steps)


def test_a_handler_that_fails_does_not_end_the_loop(caplog):
    async def steps(queues, clock):
        await queues.push_many("orders", ["bad", "good"])
        done = []

        async def work(claim):
            if claim.body == b"bad" and claim.receives < 3:
                raise ZeroDivisionError("the handler fails")
            done.append(claim.body)

        with caplog.at_level(logging.ERROR, "penstock.consumer"):
            await queues.consume("orders", idle=10).run(work)
        assert done == [b"good", b"bad"]
        assert len(caplog.records) == 2
        assert await stats(queues) == (0, 0, 0)

    run(steps)


def test_ending_a_loop_ends_its_task():
    async def steps(queues, clock):
        await queues.push("orders", "x")
        before = asyncio.all_tasks()
        async with queues.consume("orders") as claims:
            await anext(claims)
            assert len(asyncio.all_tasks()) == len(before) + 1
        assert asyncio.all_tasks() == before

    run(steps)


def test_run_takes_plain_functions_and_whatever_returns_something_to_await():
    async def steps(queues, clock):
        done = []

        async def work(claim):
            await asyncio.sleep(0)
            done.append(claim.body)

        def work_plainly(claim):
            done.append(claim.body)

        def start(claim):
            return asyncio.ensure_future(work(claim))

        for each in (work, work_plainly, start, lambda claim: work(claim)):
            await queues.push_many("orders", ["a", "b"])
            await queues.consume("orders", idle=0).run(each)
            assert done == [b"a", b"b"]
            assert await stats(queues) == (0, 0, 0)
            done.clear()

    run(steps)


def test_a_generator_function_is_refused_before_a_message_is_pulled():
    async def steps(queues, clock):
        async def generate(claim):
            yield claim

        await queues.push("orders", "a")
        with pytest.raises(penstock.errors.InvalidField, match="work: it has a yield"):
            await queues.consume("orders", idle=0).run(generate)
        assert await stats(queues) == (1, 0, 0)

    run(steps)


def test_work_whose_call_returns_a_generator_loses_no_message():
    async def steps(queues, clock):
        async def generate(claim):
            yield claim

        async def wrapped(claim):
            return generate(claim)

        await queues.push("orders", "a")
        for work in (lambda claim: generate(claim), wrapped):
            with pytest.raises(
                penstock.errors.InvalidField, match="work: its call returned a generator"
            ):
                await queues.consume("orders", idle=0).run(work)
            assert sum(await stats(queues)) == 1
            clock.advance(seconds=10)

    run(steps)
