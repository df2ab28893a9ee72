"""Row 8: the file engine fulfils the contract: in both faces, every durability, real time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

import penstock
from penstock.aio import AsyncQueues
from penstock.backends.engine.asynchronous import AsyncEngine
from penstock.backends.engine.blocking import BlockingEngine
from penstock.backends.engine.store import open_engine
from penstock.client import Queues
from penstock.clock import ManualClock
from penstock.service import REDRIVE_MAX, Pull
from penstock.testing.conformance import ConformanceSuite
from penstock.testing.conformance.batches import BatchContract
from penstock.testing.conformance.claims import ClaimContract
from penstock.testing.conformance.content import ContentContract
from penstock.testing.conformance.crowd import CrowdContract
from penstock.testing.conformance.dead_letters import DeadLetterContract
from penstock.testing.conformance.fifo import FifoContract
from penstock.testing.conformance.order import OrderContract
from penstock.testing.conformance.queues import QueueContract
from penstock.testing.conformance.waiting import WaitingContract
from tests.conformance.awaited import FromAnyThread

# Small files are made quickly, and every longer test crosses from one to the next.
FILE_BYTES = 256 * 1024


def engine_at(path, clock, durability):
    return open_engine(path / "store", clock=clock, durability=durability, file_bytes=FILE_BYTES)


def opened(path, clock, durability):
    return Queues(BlockingEngine(engine_at(path, clock, durability)))


class TestFile(ConformanceSuite):
    """The whole suite, without waiting for the disk."""

    @pytest.fixture
    def clock(self):
        return ManualClock()

    @pytest.fixture
    def queues(self, clock, quick_path):
        with opened(quick_path, clock, "os") as queues:
            yield queues


class TestFileInInterval(ClaimContract, FifoContract):
    """Answers before the sync, while a thread syncs at intervals."""

    @pytest.fixture
    def clock(self):
        return ManualClock()

    @pytest.fixture
    def queues(self, clock, quick_path):
        with opened(quick_path, clock, "interval") as queues:
            yield queues


class TestFileInSync(ClaimContract, CrowdContract, WaitingContract):
    """Every answer waits for the disk; many threads share a sync."""

    @pytest.fixture
    def clock(self):
        return ManualClock()

    @pytest.fixture
    def queues(self, clock, tmp_path):
        with opened(tmp_path, clock, "sync") as queues:
            yield queues


class Reopening:
    """A service that is closed and opened before every command, every third time from a snapshot.

    So all state that the suite observes must be in the store, and not only in memory.
    """

    LACKS: ClassVar[Mapping[str, str]] = {}
    redrive_max: int = REDRIVE_MAX

    def __init__(self, path: Path, clock: ManualClock) -> None:
        self._path = path
        self._clock = clock
        self._commands = 0
        self._service: BlockingEngine | None = None

    def execute(self, command: Any) -> Any:
        self._commands += 1
        if self._service is None or self._commands < REOPENINGS_MAX:
            self._reopen()
        assert self._service is not None
        reply = self._service.execute(command)
        if type(command) is Pull:
            # A receipt is used after the next opening of the store: as text, without its proof.
            return [msgspec.structs.replace(claim, proof=claim.receipt) for claim in reply]
        return reply

    def _reopen(self) -> None:
        self.close()
        engine = open_engine(
            self._path / "store", clock=self._clock, durability="os", file_bytes=FILE_BYTES
        )
        if self._commands % 3 == 0:
            upkeep: Any = engine.upkeep
            upkeep.run_pass()
        self._service = BlockingEngine(engine)

    def close(self) -> None:
        if self._service is not None:
            self._service.close()
            self._service = None


REOPENINGS_MAX = 100
NO_WAITING = "the store is closed between two commands, so that no pull can wait in it"


class TestFileReopened(
    OrderContract,
    ClaimContract,
    ContentContract,
    FifoContract,
    DeadLetterContract,
    BatchContract,
    QueueContract,
):
    """Claims, receipts, delays, windows, groups and dead letters survive a restart."""

    LACKS: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("long poll", "long poll due", "first waiter", "waiting pulls", "threads"), NO_WAITING
    )

    @pytest.fixture
    def clock(self):
        return ManualClock()

    @pytest.fixture
    def queues(self, clock, quick_path):
        with Queues(Reopening(quick_path, clock)) as queues:
            yield queues


async def opened_async(path, clock, durability):
    return AsyncQueues(AsyncEngine(engine_at(path, clock, durability)))


class TestFileThroughAsyncio(ClaimContract, CrowdContract, DeadLetterContract):
    @pytest.fixture
    def clock(self):
        return ManualClock()

    @pytest.fixture
    def queues(self, clock, quick_path):
        queues = FromAnyThread(lambda: opened_async(quick_path, clock, "os"))
        yield queues
        queues.end()


class TestFileThroughAsyncioInSync(WaitingContract):
    @pytest.fixture
    def clock(self):
        return ManualClock()

    @pytest.fixture
    def queues(self, clock, tmp_path):
        queues = FromAnyThread(lambda: opened_async(tmp_path, clock, "sync"))
        yield queues
        queues.end()


class TestFileInRealTime(WaitingContract):
    """Opened by a URL, with files of the default size."""

    SCALE = 0.05

    @pytest.fixture
    def queues(self, tmp_path):
        with penstock.connect(f"file:{tmp_path}/store?embedded=1") as queues:
            yield queues
