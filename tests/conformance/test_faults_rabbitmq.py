"""Row 26: each request of a command to RabbitMQ meets a fault."""

import pytest

from penstock.testing.conformance.faults import PORTAL_FAULTS, FaultContract, FaultyClients
from penstock.testing.proxy import amqp_request
from tests.conftest import FULL

pytestmark = pytest.mark.service("rabbitmq-server")


@pytest.fixture(scope="module")
def through_proxy(rabbit):
    address = ("127.0.0.1", rabbit.port)
    url = "amqp://guest:guest@127.0.0.1:{port}/"
    with FaultyClients(address, amqp_request, url, visibility_ms=300) as clients:
        yield clients


class TestRabbitmqUnderFaults(FaultContract):
    REQUESTS_MAX = None if FULL else 5
    # A blocking call that is interrupted is a cancelled one of asyncio here.
    FAULTS = PORTAL_FAULTS if FULL else ("cut before", "cut after", "cancel before", "cancel after")

    @pytest.fixture
    def clients(self, through_proxy):
        return through_proxy
