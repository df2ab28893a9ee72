"""Waits: of a task for its next attempt, with jitter, and of a program for a result."""

import asyncio
import random
import threading
from itertools import pairwise

import pytest

from penstock.tasks import Backoff, ResultTimeout
from penstock.tasks.results import PushedTask
from tests.tasks.conftest import TIMEOUT_S


def test_the_jitter_of_each_retry_is_drawn_anew(app, clock, monkeypatch):
    starts_ms = []
    drawn = iter([0.25, 0.5, 1.0])

    @app.task(retries=3, backoff=Backoff(first=8, longest=100, jitter=0.5))
    def work() -> None:
        starts_ms.append(clock.now_ms())
        raise ValueError("no")

    monkeypatch.setattr(random, "random", lambda: next(drawn))
    work.push()
    assert app.run_until_empty() == 4
    waits_ms = [after - before for before, after in pairwise(starts_ms)]
    # 8, 16 and 32 s, shortened by 0.25, 0.5 and 1 of the half that the jitter may take.
    assert waits_ms == [7_000, 12_000, 16_000]
    assert next(drawn, None) is None


@pytest.fixture
def asked(monkeypatch):
    """Counts how often a result was looked for."""
    times = threading.Semaphore(0)
    peek = PushedTask.peek

    def count(pushed):
        found = peek(pushed)
        times.release()
        return found

    monkeypatch.setattr(PushedTask, "peek", count)
    return times


@pytest.mark.parametrize("way", ["get", "wait", "await"])
def test_a_result_that_does_not_exist_yet_is_waited_for(app, asked, way):
    @app.task(result_ttl=60)
    def work() -> int:
        # Somebody has looked for the result twice, and found none.
        for _ in range(2):
            assert asked.acquire(timeout=TIMEOUT_S)
        return 7

    pushed = work.push()
    worker = threading.Thread(target=app.run_until_empty)
    worker.start()

    async def ask():
        return await (pushed if way == "await" else pushed.wait(TIMEOUT_S))

    assert (pushed.get(TIMEOUT_S) if way == "get" else asyncio.run(ask())) == 7
    worker.join(TIMEOUT_S)


def test_an_awaited_result_that_does_not_come_in_time_is_a_timeout(app):
    @app.task(result_ttl=60)
    def work() -> int:
        return 7

    pushed = work.push()
    with pytest.raises(ResultTimeout, match=f"task 'work' {pushed.id} has no result after 0.05 s"):
        asyncio.run(pushed.wait(0.05))
    # The task is still there, and its result can be awaited again.
    app.run_until_empty()
    assert asyncio.run(pushed.wait(1)) == 7


def test_waiting_for_a_result_does_not_block_the_event_loop(app, asked):
    @app.task(result_ttl=60)
    def work() -> int:
        return 7

    pushed = work.push()

    async def ask():
        waiting = asyncio.ensure_future(pushed.wait(TIMEOUT_S))
        # The loop goes on: it runs the task itself once the result has been looked for.
        assert await asyncio.to_thread(asked.acquire, timeout=TIMEOUT_S)
        assert not waiting.done()
        app.run_until_empty()
        return await waiting

    assert asyncio.run(ask()) == 7
