"""The memory engine holds the contract: through both faces, and in real time where one waits."""

import asyncio
import threading
from typing import Any

import pytest

import penstock
import penstock.aio
from penstock.clock import ManualClock
from penstock.testing.conformance import ConformanceSuite
from penstock.testing.conformance.waiting import WaitingContract

URL = "memory:?history=100000"


class TestMemory(ConformanceSuite):
    @pytest.fixture
    def clock(self):
        return ManualClock()

    @pytest.fixture
    def queues(self, clock):
        with penstock.connect(URL, clock=clock) as queues:
            yield queues


class FromAnyThread:
    """The asyncio face as the suite wants it: a loop in its own thread, each call waited for."""

    def __init__(self, clock: ManualClock | None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._queues = self._run(penstock.aio.connect(URL, clock=clock))
        self.service = self._queues.service

    def __getattr__(self, verb: str) -> Any:
        method = getattr(self._queues, verb)
        return lambda *args, **options: self._run(method(*args, **options))

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def end(self) -> None:
        self._run(self._queues.close())
        self._run(self._finish_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _finish_tasks(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)


class TestMemoryThroughAsyncio(ConformanceSuite):
    @pytest.fixture
    def clock(self):
        return ManualClock()

    @pytest.fixture
    def queues(self, clock):
        queues = FromAnyThread(clock)
        yield queues
        queues.end()


class TestMemoryInRealTime(WaitingContract):
    SCALE = 0.1

    @pytest.fixture
    def queues(self):
        with penstock.connect(URL) as queues:
            yield queues


class TestMemoryThroughAsyncioInRealTime(WaitingContract):
    SCALE = 0.1

    @pytest.fixture
    def queues(self):
        queues = FromAnyThread(None)
        yield queues
        queues.end()
