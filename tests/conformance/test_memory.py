"""Row 8: the memory engine fulfils the contract, blocking and by asyncio; waits in real time."""

import pytest

import penstock
import penstock.aio
from penstock.clock import ManualClock
from penstock.testing.conformance import ConformanceSuite
from penstock.testing.conformance.waiting import WaitingContract
from tests.conformance.awaited import FromAnyThread

URL = "memory:?history=100000"


class TestMemory(ConformanceSuite):
    @pytest.fixture
    def clock(self):
        return ManualClock()

    @pytest.fixture
    def queues(self, clock):
        with penstock.connect(URL, clock=clock) as queues:
            yield queues


class TestMemoryThroughAsyncio(ConformanceSuite):
    @pytest.fixture
    def clock(self):
        return ManualClock()

    @pytest.fixture
    def queues(self, clock):
        queues = FromAnyThread(lambda: penstock.aio.connect(URL, clock=clock))
        yield queues
        queues.end()


class TestMemoryInRealTime(WaitingContract):
    SCALE = 0.05

    @pytest.fixture
    def queues(self):
        with penstock.connect(URL) as queues:
            yield queues


class TestMemoryThroughAsyncioInRealTime(WaitingContract):
    SCALE = 0.05

    @pytest.fixture
    def queues(self):
        queues = FromAnyThread(lambda: penstock.aio.connect(URL))
        yield queues
        queues.end()
