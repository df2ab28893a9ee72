"""The delivery contract over the frames: a server in a thread, a daemon, and TCP."""

import pytest

import penstock
from penstock.backends.portal import Portal
from penstock.backends.remote.asynchronous import AsyncRemote
from penstock.backends.remote.blocking import Remote
from penstock.backends.remote.endpoints import TcpEndpoint
from penstock.client import Queues
from penstock.clock import ManualClock
from penstock.testing.conformance import ConformanceSuite
from penstock.testing.conformance.waiting import WaitingContract
from tests.conftest import FULL
from tests.server.conftest import DaemonProcess, end_daemon

# The backends have every behaviour; this one is tested on a manual clock, with the same frames.
IN_REAL_TIME = {"dedup window": "takes ten minutes in real time"}


@pytest.fixture(scope="module")
def daemon_store(tmp_path_factory):
    path = tmp_path_factory.mktemp("daemon") / "store"
    yield path
    end_daemon(path)


@pytest.fixture(scope="module")
def daemon_port(tmp_path_factory):
    path = tmp_path_factory.mktemp("daemon") / "store"
    daemon = DaemonProcess(path, "--listen", "127.0.0.1:0")
    yield daemon.port
    daemon.stop()


class TestFrames(ConformanceSuite):
    """The whole suite over a Unix socket, blocking, on a manual clock."""

    @pytest.fixture
    def clock(self):
        return ManualClock()

    @pytest.fixture
    def queues(self, clock, serve):
        with Queues(Remote(serve(clock=clock).endpoint)) as queues:
            yield queues


class TestFramesThroughAsyncio(ConformanceSuite):
    """The whole suite over TCP, through asyncio and the portal, on a manual clock."""

    @pytest.fixture
    def clock(self):
        return ManualClock()

    @pytest.fixture
    def queues(self, clock, serve):
        endpoint = TcpEndpoint("127.0.0.1", serve(clock=clock).port)
        with Queues(Portal(lambda: AsyncRemote.open(endpoint))) as queues:
            yield queues


class TestDaemon(ConformanceSuite):
    """The whole suite against a real daemon, started as a user would start it, in real time."""

    SCALE = 0.05
    LACKS = IN_REAL_TIME

    @pytest.fixture
    def queues(self, daemon_store):
        with penstock.connect(f"file:{daemon_store}?durability=os") as queues:
            assert not queues.service.LACKS
            yield queues


class TestDaemonOverTcp(ConformanceSuite if FULL else WaitingContract):  # type: ignore[misc]
    """The tests of waiting, against a real daemon at penstock://, in real time, on a real disk.

    The whole suite runs over TCP above; with the full figures it does here, too.
    """

    SCALE = 0.05
    LACKS = IN_REAL_TIME

    @pytest.fixture
    def queues(self, daemon_port):
        with penstock.connect(f"penstock://127.0.0.1:{daemon_port}") as queues:
            assert not queues.service.LACKS
            yield queues
