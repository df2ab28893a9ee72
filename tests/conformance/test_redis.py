"""Row 8: queues in Redis fulfil the contract: on one server, on a cluster, and in real time."""

import pytest

import penstock
import penstock.aio
from penstock.clock import ManualClock
from penstock.testing.conformance import ConformanceSuite
from penstock.testing.conformance.crowd import CrowdContract
from penstock.testing.conformance.waiting import WaitingContract
from tests.backends.redis.servers import RedisCluster, RedisServer
from tests.conformance.awaited import FromAnyThread

pytestmark = pytest.mark.service("redis-server")


@pytest.fixture(scope="module")
def server():
    server = RedisServer()
    yield server
    server.close()


class TestRedis(ConformanceSuite):
    """The whole suite on one server, blocking, on a manual clock."""

    @pytest.fixture
    def clock(self):
        return ManualClock()

    @pytest.fixture
    def queues(self, clock, server):
        with penstock.connect(f"{server.url}?history=100000", clock=clock) as queues:
            assert set(queues.service.LACKS) == {"peek pages", "by id"}
            yield queues


@pytest.fixture(scope="module")
def cluster():
    cluster = RedisCluster()
    yield cluster
    cluster.close()


class TestRedisCluster(ConformanceSuite):
    """The whole suite on a cluster of three nodes, through asyncio."""

    @pytest.fixture
    def clock(self):
        return ManualClock()

    @pytest.fixture
    def queues(self, clock, cluster):
        queues = FromAnyThread(
            lambda: penstock.aio.connect(f"{cluster.url}?history=100000", clock=clock)
        )
        yield queues
        queues.end()


@pytest.fixture(scope="module")
def shared(server):
    with penstock.connect(f"{server.url}?prefix=real-time") as queues:
        yield queues


class TestRedisInRealTime(WaitingContract, CrowdContract):
    """By the clock of Redis, with one connection that all tests share."""

    SCALE = 0.05

    @pytest.fixture
    def queues(self, shared):
        return shared
