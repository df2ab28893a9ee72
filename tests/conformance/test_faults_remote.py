"""Row 26: each request of a command on Penstock's own wire meets a fault."""

import pytest

from penstock.clock import ManualClock
from penstock.testing.conformance.faults import FaultContract, FaultyClients
from penstock.testing.proxy import penstock_request
from tests.conftest import FULL
from tests.server.conftest import ServerInThread


@pytest.fixture(scope="module")
def through_proxy(tmp_path_factory):
    clock = ManualClock()
    server = ServerInThread(tmp_path_factory.mktemp("server"), clock=clock)
    address = ("127.0.0.1", server.port)
    url = "penstock://127.0.0.1:{port}"
    with FaultyClients(address, penstock_request, url, clock, has_clock=False) as clients:
        yield clients
    server.stop()


class TestOwnWireUnderFaults(FaultContract):
    REQUESTS_MAX = None if FULL else 5
    KEPT_CLAIMS = "its connection is closed, and the server does not know that the answer was lost"

    @pytest.fixture
    def clients(self, through_proxy):
        return through_proxy
