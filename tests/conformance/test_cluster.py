"""A cluster holds the contract: a node on three real NATS servers, reached through a router."""

import asyncio
import itertools
import threading
from typing import ClassVar

import pytest

import penstock
from penstock.backends.portal import Portal
from penstock.client import Queues
from penstock.clock import ManualClock
from penstock.cluster.address import read_address
from penstock.cluster.nats_servers import NatsServers
from penstock.cluster.open import open_node, open_router
from penstock.service import CreateQueue, DescribeQueue
from penstock.testing.conformance import ConformanceSuite
from penstock.testing.conformance.batches import BatchContract
from penstock.testing.conformance.claims import ClaimContract
from penstock.testing.conformance.content import ContentContract
from penstock.testing.conformance.crowd import CrowdContract
from penstock.testing.conformance.dead_letters import DeadLetterContract
from penstock.testing.conformance.fifo import FifoContract
from penstock.testing.conformance.order import OrderContract
from penstock.testing.conformance.queues import QueueContract
from penstock.testing.conformance.waiting import WaitingContract
from penstock.url import read_url
from tests.conftest import FULL

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

    def until_carried(self):
        """Waits until what is due is settled, and all dead letters are where they belong."""
        self._run(self._until_carried())

    async def _until_carried(self):
        engines = [each.engine for each in self._node.node.owned.values()]
        while any(each.has_due_work or each.shard.departed.deliveries for each in engines):  # noqa: ASYNC110
            await asyncio.sleep(0.001)

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
def on_shards(nats_servers):
    clock = ManualClock()
    node = NodeThread(f"{nats_servers.url}?name={next(_names)}&shards=4", clock)
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


class WithoutInput(
    BatchContract,
    ClaimContract,
    ContentContract,
    CrowdContract,
    DeadLetterContract,
    FifoContract,
    OrderContract,
    QueueContract,
    WaitingContract,
):
    """The suite without what is refused for its form, which one shard and four do alike."""


class OnShards(ConformanceSuite if FULL else WithoutInput):  # type: ignore[misc]
    """The suite on four shards, whose clock is set."""

    @pytest.fixture
    def clock(self, on_shards):
        clock, self._node = on_shards
        return clock

    def pass_time(self, count):
        super().pass_time(count)
        self._node.until_carried()

    def drain(self, queue):
        # A dead letter may be on its way to the shard of this queue.
        self._node.until_carried()
        return super().drain(queue)


class TestClusterOfShards(OnShards):
    """The whole suite on queues in four shards and a manual clock."""

    @pytest.fixture
    def queues(self, on_shards):
        _, node = on_shards
        with Queues(Portal(lambda: open_router(node.address))) as queues:
            assert set(queues.service.LACKS) == {"dead-letter id"}
            yield queues


class SpreadingRouter:
    """A router that spreads every queue it makes over three of four shards."""

    def __init__(self, router):
        self._router = router
        self.LACKS = router.LACKS
        self.redrive_max = router.redrive_max

    async def execute(self, command):
        reply = await self._router.execute(command)
        if type(command) is CreateQueue:
            for name in (command.queue, *reply.also_created):
                await self._spread(name)
        return reply

    async def _spread(self, name):
        info = await self._router.execute(DescribeQueue(name))
        if info.settings.fifo and not info.settings.dedup_per_group:
            return
        await self._router.spread.spread(name, 3)

    async def close(self):
        await self._router.close()


async def open_spreading(address):
    return SpreadingRouter(await open_router(address))


class TestSpreadQueues(CrowdContract, QueueContract):
    """What does not ask for one order of messages, on queues over three shards of four each."""

    LACKS: ClassVar = {
        "arrival order": "the order of a spread queue is that of each of its shards",
        "peek": "the order of a spread queue is that of each of its shards",
    }

    @pytest.fixture
    def clock(self, on_shards):
        return on_shards[0]

    @pytest.fixture
    def queues(self, on_shards):
        _, node = on_shards
        with Queues(Portal(lambda: open_spreading(node.address))) as queues:
            yield queues


class TestClusterInRealTime(DeadLetterContract, WaitingContract):
    """Queues in several shards, in real time, as people open it."""

    SCALE = 0.05

    @pytest.fixture
    def queues(self, shards_url):
        with penstock.connect(shards_url) as queues:
            yield queues
