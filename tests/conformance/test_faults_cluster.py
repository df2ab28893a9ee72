"""Row 26: each request of a command to a cluster meets a fault, on its way to NATS.

NATS is one server here: of several, the client would use another one after the first fault.
"""

import subprocess
from contextlib import contextmanager

import pytest

from penstock.clock import ManualClock
from penstock.cluster.nats_servers import find_program
from penstock.testing.conformance.faults import PORTAL_FAULTS, FaultContract, FaultyClients
from penstock.testing.conformance.scenes import SCRIPTS
from penstock.testing.proxy import nats_request
from tests.backends.redis.servers import until
from tests.conformance.test_cluster import NodeThread
from tests.conftest import FULL
from tests.ports import lasting_port


@contextmanager
def one_nats(directory):
    port = lasting_port()
    words = [find_program(), "-js", "-sd", directory, "-a", "127.0.0.1", "-p", str(port)]
    with (directory / "output").open("wb") as output:
        process = subprocess.Popen(words, stderr=output)
    try:
        until(lambda: b"Server is ready" in (directory / "output").read_bytes())
        yield port
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def through_proxy(tmp_path_factory):
    clock = ManualClock()
    with one_nats(tmp_path_factory.mktemp("nats")) as port:
        url = "cluster:nats://127.0.0.1:{port}?shards=2&replicas=1"
        node = NodeThread(url.replace("{port}", str(port)), clock)
        address = ("127.0.0.1", port)
        with FaultyClients(address, nats_request, url, clock, has_clock=False) as clients:
            yield clients
        node.stop()


class TestClusterUnderFaults(FaultContract):
    REQUESTS_MAX = None if FULL else 5
    FAULTS = tuple(each for each in PORTAL_FAULTS if not each.startswith("cut"))

    @pytest.fixture
    def clients(self, through_proxy):
        return through_proxy


class TestClusterWithoutAConnection(TestClusterUnderFaults):
    """One command is tried, because it takes seconds until it is sent again."""

    REQUESTS_MAX = None if FULL else 1
    FAULTS = ("cut before", "cut after")
    COMMANDS = tuple(SCRIPTS) if FULL else ("batch",)
