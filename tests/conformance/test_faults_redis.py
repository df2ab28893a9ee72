"""Row 26: each request of a command to Redis meets a fault."""

import pytest

from penstock.clock import ManualClock
from penstock.testing.conformance.faults import FaultContract, FaultyClients
from penstock.testing.proxy import resp_request
from tests.backends.redis.servers import RedisServer
from tests.conftest import FULL

pytestmark = pytest.mark.service("redis-server")


@pytest.fixture(scope="module")
def through_proxy():
    server = RedisServer()
    address = ("127.0.0.1", server.port)
    with FaultyClients(address, resp_request, "redis://127.0.0.1:{port}", ManualClock()) as clients:
        yield clients
    server.close()


class TestRedisUnderFaults(FaultContract):
    REQUESTS_MAX = None if FULL else 5

    @pytest.fixture
    def clients(self, through_proxy):
        return through_proxy
