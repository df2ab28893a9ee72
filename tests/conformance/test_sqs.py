"""The SQS adapter fulfils the contract, except for its LACKS, against Penstock's SQS endpoint.

The whole suite runs on a manual clock, because a claim of SQS lasts a second or more. The tests of
waiting run in real time, too, against a server as a user would start it; with the full figures
(`tests.conftest.FULL`) the whole suite does. The server's store is in memory, or in Redis.
"""

import re
from collections.abc import Mapping
from typing import ClassVar
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
from tests.backends.redis.servers import RedisServer
from tests.conformance.awaited import FromAnyThread
from tests.conftest import FULL
from tests.server.sqs.conftest import Local, serve

WAITING = re.compile(r'penstock_waiting_pulls\{queue="([^"]+)"\} ([0-9.]+)')


class Endpointed(Contract):
    """SQS does not report waiting receives, but our endpoint does."""

    endpoint: ClassVar[str]

    def waiting(self, queue: str) -> int | None:
        with urlopen(f"{self.endpoint}/metrics", timeout=60) as answer:
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


class TestSqsInRealTime(Endpointed, ConformanceSuite if FULL else WaitingContract):  # type: ignore[misc]
    """Blocking, against `penstock serve`; one real second is five seconds of the suite."""

    SCALE = 0.2
    LACKS: ClassVar[Mapping[str, str]] = {
        "retention": "takes minutes in real time; tested on a manual clock"
    }

    @pytest.fixture
    def queues(self, process_queues, process_url):
        type(self).endpoint = process_url
        return process_queues


@pytest.fixture(scope="module")
def local():
    server = Local(None)
    yield server
    server.close()


@pytest.fixture(scope="module")
def local_queues(local):
    queues = FromAnyThread(
        lambda: penstock.aio.connect(f"sqs://us-east-1?endpoint={local.url}", clock=local.clock)
    )
    yield queues
    queues.end()


@pytest.fixture(scope="module")
def blocking_queues(local):
    with penstock.connect(f"sqs://us-east-1?endpoint={local.url}", clock=local.clock) as queues:
        yield queues


class TestSqs(Endpointed, ConformanceSuite):
    """The whole suite, blocking, on the endpoint's manual clock."""

    RETENTION_MIN = 60

    @pytest.fixture
    def clock(self, local):
        return local.clock

    @pytest.fixture
    def queues(self, blocking_queues, local):
        type(self).endpoint = local.url
        return blocking_queues


@pytest.fixture(scope="module")
def redis_local():
    server = RedisServer()
    local = Local(None, url=server.url)
    yield local
    local.close()
    server.close()


@pytest.fixture(scope="module")
def redis_queues(redis_local):
    url = f"sqs://us-east-1?endpoint={redis_local.url}"
    with penstock.connect(url, clock=redis_local.clock) as queues:
        yield queues


@pytest.mark.service("redis-server")
class TestSqsInFrontOfRedis(Endpointed, ConformanceSuite):
    """The whole suite, blocking, with the endpoint in front of a real Redis, on a manual clock."""

    RETENTION_MIN = 60

    @pytest.fixture
    def clock(self, redis_local):
        return redis_local.clock

    @pytest.fixture
    def queues(self, redis_queues, redis_local):
        type(self).endpoint = redis_local.url
        return redis_queues


class TestSqsThroughAsyncio(
    Endpointed, ClaimContract, ContentContract, FifoContract, DeadLetterContract, WaitingContract
):
    """Claims, content, groups, dead letters and waits, on the endpoint's manual clock."""

    RETENTION_MIN = 60

    @pytest.fixture
    def clock(self, local):
        return local.clock

    @pytest.fixture
    def queues(self, local_queues, local):
        type(self).endpoint = local.url
        return local_queues
