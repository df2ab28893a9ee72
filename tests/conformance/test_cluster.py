"""A cluster holds the contract: a node on three real NATS servers, reached through a router."""

import asyncio
import itertools
import threading

import pytest

import penstock
from penstock.backends.portal import Portal
from penstock.client import Queues
from penstock.clock import ManualClock
from penstock.cluster.address import read_address
from penstock.cluster.nats_servers import NatsServers
from penstock.cluster.open import open_node, open_router
from penstock.testing.conformance import ConformanceSuite
from penstock.testing.conformance.batches import BatchContract
from penstock.testing.conformance.dead_letters import DeadLetterContract
from penstock.testing.conformance.queues import QueueContract
from penstock.url import read_url

_names = (f"contract{n}" for n in itertools.count())


@pytest.fixture(scope="module")
def nats_servers(tmp_path_factory):
    servers = NatsServers(tmp_path_factory.mktemp("cluster"))
    servers.start()
    yield servers
    servers.stop()


class NodeThread:
    """A node on an event loop of its own, in a thread."""

    def __init__(self, url, clock=None):
        self.address = read_address(read_url(url))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock-node")
        self._thread.start()
        self._node = self._run(open_node(self.address, node="a", clock=clock))

    def _run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def stop(self):
        self._run(self._node.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def on_clock(nats_servers):
    clock = ManualClock()
    node = NodeThread(f"{nats_servers.url}?name={next(_names)}&shards=1", clock)
    yield clock, node
    node.stop()


@pytest.fixture(scope="module")
def shards_url(nats_servers):
    url = f"{nats_servers.url}?name={next(_names)}&shards=4"
    node = NodeThread(url)
    yield url
    node.stop()


class TestCluster(ConformanceSuite):
    """The whole suite on one shard and a manual clock; nothing is lacking."""

    @pytest.fixture
    def clock(self, on_clock):
        return on_clock[0]

    @pytest.fixture
    def queues(self, on_clock):
        _, node = on_clock
        with Queues(Portal(lambda: open_router(node.address))) as queues:
            assert not queues.service.LACKS
            yield queues


class TestClusterOfShards(DeadLetterContract, BatchContract, QueueContract):
    """Queues in several shards, in real time, as people open it."""

    SCALE = 0.05

    @pytest.fixture
    def queues(self, shards_url):
        with penstock.connect(shards_url) as queues:
            yield queues
