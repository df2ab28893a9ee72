"""Queues in Redis hold the contract: on one server, on a cluster of three, and in real time."""

import pytest

import penstock
from penstock.clock import ManualClock
from penstock.testing.conformance import ConformanceSuite
from tests.backends.redis.servers import RedisServer

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
            assert not queues.service.LACKS
            yield queues
