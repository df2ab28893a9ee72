"""A cluster fulfils the contract: a node on three real NATS servers, reached through a router."""

import asyncio
import itertools
import threading
from functools import partial
from typing import ClassVar

import pytest

import penstock
from penstock.backends.portal import Portal
from penstock.client import Queues
from penstock.clock import ManualClock
from penstock.cluster.address import read_address
from penstock.cluster.open import open_node, open_router
from penstock.cluster.operations import Operator, operate
from penstock.service import CreateQueue, DescribeQueue
from penstock.testing.conformance import ConformanceSuite
from penstock.testing.conformance.batches import BatchContract
from penstock.testing.conformance.crowd import CrowdContract
from penstock.testing.conformance.dead_letters import DeadLetterContract
from penstock.testing.conformance.fifo import FifoContract
from penstock.testing.conformance.input import InputContract
from penstock.testing.conformance.queues import QueueContract
from penstock.testing.conformance.waiting import WaitingContract
from penstock.url import read_url
from tests.backends.beside import STEPS, ServicePair
from tests.cluster.processes import nats_in_memory
from tests.conftest import FULL
from tests.measure import IN_SCORE

_names = (f"contract{n}" for n in itertools.count())


@pytest.fixture(scope="module")
def nats_servers():
    with nats_in_memory() as servers:
        yield servers


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
        """Waits until what is due is settled, and all dead letters have arrived in their queues."""
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


class Nodes:
    """A node on a manual clock, and the queues of one router to it for all tests of a class."""

    def __init__(self, url):
        self.clock = ManualClock()
        self.node = NodeThread(url, self.clock)
        self.queues = Queues(Portal(lambda: open_router(self.node.address)))

    def stop(self):
        self.queues.close()
        self.node.stop()


@pytest.fixture(scope="module")
def on_one_shard(nats_servers):
    nodes = Nodes(f"{nats_servers.url}?name={next(_names)}&shards=1")
    yield nodes
    nodes.stop()


@pytest.fixture(scope="module")
def on_shards(nats_servers):
    nodes = Nodes(f"{nats_servers.url}?name={next(_names)}&shards=4")
    yield nodes
    nodes.stop()


@pytest.fixture(scope="module")
def on_added_shards(nats_servers):
    nodes = Nodes(f"{nats_servers.url}?name={next(_names)}&shards=1")
    grow = partial(Operator.reshard, shards=4, moved=lambda queue: None)
    asyncio.run(operate(nodes.node.address, grow))
    # This one knows the number.
    nodes.queues.close()
    nodes.queues = Queues(Portal(lambda: open_router(nodes.node.address)))
    yield nodes
    nodes.stop()


@pytest.fixture(scope="module")
def in_real_time(nats_servers):
    url = f"{nats_servers.url}?name={next(_names)}&shards=4"
    node = NodeThread(url)
    with penstock.connect(url) as queues:
        yield queues
    node.stop()


def some(contract, *names):
    """A part of the suite with only these of its tests; with FULL, all of them."""
    others = [each for each in dir(contract) if each.startswith("test_") and each not in names]
    assert [name for name in names if not hasattr(contract, name)] == []
    return contract if FULL else type(contract.__name__, (contract,), dict.fromkeys(others))


class TestCluster(ConformanceSuite):
    """The whole suite on one shard and a manual clock."""

    @pytest.fixture
    def clock(self, on_one_shard):
        return on_one_shard.clock

    @pytest.fixture
    def queues(self, on_one_shard):
        assert set(on_one_shard.queues.service.LACKS) == {"peek pages", "by id"}
        return on_one_shard.queues


def test_random_commands_have_the_same_replies_as_in_memory(on_one_shard):
    """Row 8: on a node of a cluster, with all that its answers wait for."""
    clock = on_one_shard.clock
    for seed in range(200 if FULL else 5 if IN_SCORE else 1):
        with penstock.connect("memory:", clock=clock) as memory:
            pair = ServicePair(memory, on_one_shard.queues, clock, seed)
            pair.create_queues()
            for _ in range(STEPS if FULL or IN_SCORE else STEPS // 2):
                pair.step()
            pair.compare_all()
            pair.delete_queues()


class BetweenShards(
    DeadLetterContract,
    some(  # type: ignore[misc]
        BatchContract,
        "test_a_batch_may_mix_verbs_and_queues_and_each_item_has_its_own_result",
        "test_an_item_that_is_refused_does_not_affect_the_others",
        "test_an_empty_batch_gives_no_results",
    ),
    some(  # type: ignore[misc]
        InputContract,
        "test_a_receipt_of_another_queue_is_refused",
        "test_the_history_of_an_unknown_message_is_refused",
    ),
    some(  # type: ignore[misc]
        QueueContract,
        "test_names_are_listed_in_order_by_prefix_and_page_by_page",
        "test_a_removed_queue_is_not_listed_and_is_unknown",
        "test_a_queue_created_again_is_empty_and_refuses_old_receipts",
        "test_history_has_the_events_of_a_message_in_order",
    ),
    some(  # type: ignore[misc]
        WaitingContract,
        "test_a_waiter_wakes_in_time_after_the_waiters_of_another_queue_were_served",
        "test_a_pull_waiting_on_a_dead_letter_queue_wakes_when_a_message_is_moved",
        "test_deleting_a_queue_fails_its_waiters_and_no_others",
    ),
):
    """The tests with several queues, which may be in several shards. One queue is in one shard."""


class TestClusterOfShards(ConformanceSuite if FULL else BetweenShards):  # type: ignore[misc]
    """Queues in four shards and a manual clock."""

    @pytest.fixture
    def clock(self, on_shards):
        self._node = on_shards.node
        return on_shards.clock

    @pytest.fixture
    def queues(self, on_shards):
        assert set(on_shards.queues.service.LACKS) == {"peek pages", "by id"}
        return on_shards.queues

    def pass_time(self, count):
        super().pass_time(count)
        self._node.until_carried()

    def drain(self, queue):
        # A dead letter may be on its way to the shard of this queue.
        self._node.until_carried()
        return super().drain(queue)


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


class MovingRouter(SpreadingRouter):
    """A router that moves every queue it makes to the shard after its home shard."""

    async def _spread(self, name):
        spread = self._router.spread
        if spread.places(name) is None:
            await spread.move(name, [(spread.home(name) + 1) % 4])


async def open_moving(address):
    return MovingRouter(await open_router(address))


class TestMovedQueues(TestClusterOfShards, FifoContract):
    """Queues that are being moved: until dedup ids have expired they are in two shards."""

    @pytest.fixture
    def queues(self, on_shards):
        with Queues(Portal(lambda: open_moving(on_shards.node.address))) as queues:
            yield queues


class TestGrownCluster(TestClusterOfShards, FifoContract):
    """A cluster that was created with one shard and has four: most queues belong to another."""

    @pytest.fixture
    def clock(self, on_added_shards):
        self._node = on_added_shards.node
        return on_added_shards.clock

    @pytest.fixture
    def queues(self, on_added_shards):
        return on_added_shards.queues


class TestSpreadQueues(
    some(  # type: ignore[misc]
        CrowdContract,
        "test_many_threads_lose_nothing_and_delete_nothing_twice",
        "test_threads_that_push_the_same_dedup_id_make_one_message",
    ),
    QueueContract,
):
    """The tests that need no single order of messages, on queues spread over three shards."""

    LACKS: ClassVar = {
        "arrival order": "the order of a spread queue is that of each of its shards",
        "peek": "the order of a spread queue is that of each of its shards",
    }
    if not FULL:
        LACKS |= {"fifo": "a FIFO queue without dedup_per_group is not spread"}

    @pytest.fixture
    def clock(self, on_shards):
        return on_shards.clock

    @pytest.fixture
    def queues(self, on_shards):
        # A router uses the shards in turn; with one of its own, each test begins with the first.
        with Queues(Portal(lambda: open_spreading(on_shards.node.address))) as queues:
            yield queues


class TestClusterInRealTime(
    some(  # type: ignore[misc]
        DeadLetterContract,
        "test_a_message_is_dead_lettered_after_max_receives_claims_that_time_out",
        "test_the_receives_of_a_redriven_message_are_counted_from_zero",
    ),
    some(  # type: ignore[misc]
        WaitingContract,
        "test_a_waiting_pull_wakes_on_a_push",
        "test_a_wait_that_ends_without_a_message_gives_none",
        "test_a_waiting_pull_wakes_when_a_delay_ends",
        "test_a_waiting_pull_wakes_when_a_claim_ends",
        "test_waits_of_different_lengths_each_end_at_their_own_time",
        "test_the_pull_that_waited_first_is_served_first",
        "test_deleting_a_queue_fails_its_waiters_and_no_others",
    ),
):
    """Timers and waits on queues in several shards, in real time, opened by a URL."""

    SCALE = 0.05

    @pytest.fixture
    def queues(self, in_real_time):
        return in_real_time
