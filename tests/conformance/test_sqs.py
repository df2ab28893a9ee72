"""The SQS adapter holds the contract, but for what it lacks, against our own SQS endpoint.

Both are tried at once: the endpoint started as a user would start it, in real time; and one on a
manual clock, through asyncio, for what would take minutes.
"""

import asyncio
import re
import threading
from collections.abc import Mapping
from typing import Any, ClassVar
from urllib.request import urlopen

import pytest

import penstock
import penstock.aio
from penstock.testing.conformance import ConformanceSuite, Contract
from penstock.testing.conformance.claims import ClaimContract
from penstock.testing.conformance.content import ContentContract
from penstock.testing.conformance.dead_letters import DeadLetterContract
from penstock.testing.conformance.fifo import FifoContract
from penstock.testing.conformance.waiting import WaitingContract
from tests.sqs.conftest import Local, serve

WAITING = re.compile(r'penstock_waiting_pulls\{queue="([^"]+)"\} ([0-9.]+)')


class Endpointed(Contract):
    """SQS does not tell who waits, but our endpoint does."""

    endpoint: ClassVar[str]

    def waiting(self, queue: str) -> int | None:
        with urlopen(f"{self.endpoint}/metrics", timeout=10) as answer:
            counts = dict(WAITING.findall(answer.read().decode()))
        return int(float(counts.get(queue, 0)))


@pytest.fixture(scope="module")
def process_url():
    with serve("--store", "memory:", "--deleted-window", "0", "--purged-window", "0") as server:
        yield server.url


@pytest.fixture(scope="module")
def process_queues(process_url):
    with penstock.connect(f"sqs://us-east-1?endpoint={process_url}") as queues:
        yield queues


class TestSqs(Endpointed, ConformanceSuite):
    """The whole suite, blocking, against `penstock serve`; one whole second is five of its own."""

    SCALE = 0.2
    LACKS: ClassVar[Mapping[str, str]] = {
        "retention": "nobody waits minutes for this test; on a manual clock it is tried"
    }

    @pytest.fixture
    def queues(self, process_queues, process_url):
        type(self).endpoint = process_url
        return process_queues


class FromAnyThread:
    """The asyncio face as the suite wants it: a loop in its own thread, each call waited for."""

    def __init__(self, url: str, clock: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._queues = self._run(penstock.aio.connect(url, clock=clock))
        self.service = self._queues.service

    def __getattr__(self, verb: str) -> Any:
        method = getattr(self._queues, verb)
        return lambda *args, **options: self._run(method(*args, **options))

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def end(self) -> None:
        self._run(self._queues.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def local():
    server = Local(None, deleted_window=0, purged_window=0)
    yield server
    server.close()


@pytest.fixture(scope="module")
def local_queues(local):
    queues = FromAnyThread(f"sqs://us-east-1?endpoint={local.url}", local.clock)
    yield queues
    queues.end()


class TestSqsThroughAsyncio(
    Endpointed, ClaimContract, ContentContract, FifoContract, DeadLetterContract, WaitingContract
):
    """The life of messages, on the endpoint's own manual clock."""

    RETENTION_MIN = 60

    @pytest.fixture
    def clock(self, local):
        return local.clock

    @pytest.fixture
    def queues(self, local_queues, local):
        type(self).endpoint = local.url
        return local_queues
