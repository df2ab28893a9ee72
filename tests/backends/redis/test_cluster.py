"""A Redis Cluster whose slots are moved, and one that loses a node."""

import asyncio
import threading
from typing import Any

import pytest
from redis.crc import key_slot

import penstock
import penstock.aio
from penstock.backends.redis.service import open_async_service
from penstock.errors import UnavailableError
from penstock.url import read_url
from tests.backends.redis.servers import TIMEOUT_S, RedisCluster, until

pytestmark = pytest.mark.service("redis-server")


@pytest.fixture(scope="module")
def cluster():
    cluster = RedisCluster("--cluster-require-full-coverage", "no")
    yield cluster
    cluster.close()


def slot_of(queue):
    return key_slot(f"penstock:{{{queue}}}:meta".encode())


def name_on(server_number):
    """The name of a queue whose slot this server has."""
    low, high = RedisCluster.SLOTS[server_number]
    return next(f"q{n}" for n in range(10_000) if low <= slot_of(f"q{n}") <= high)


def test_a_stale_map_of_the_slots_is_corrected_by_redirections(cluster):
    async def use_stale_map():
        service: Any = await open_async_service(read_url(cluster.url))
        queues = penstock.aio.AsyncQueues(service)
        first = cluster.servers[0]
        for number in range(3):
            name = name_on(number)
            service._link._slots = dict.fromkeys(range(16_384), ("127.0.0.1", first.port))
            await queues.create(name)
            ids = [reply.id for reply in await queues.push_many(name, ["a", "b"])]
            assert [claim.id for claim in await queues.pull_many(name, 2, wait=1)] == ids
            assert service._link._slots[slot_of(name)][1] == cluster.servers[number].port
        await queues.close()

    asyncio.run(use_stale_map())


def test_a_command_for_a_slot_that_is_being_moved_succeeds_after_the_move(cluster):
    source, target = cluster.servers[0], cluster.servers[1]
    name = "moving"
    while slot_of(name) > RedisCluster.SLOTS[0][1]:
        name += "x"
    slot = slot_of(name)
    ids = [server.ask("CLUSTER", "MYID") for server in (source, target)]
    assert target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0]) == "+OK"
    assert source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1]) == "+OK"
    with penstock.connect(cluster.url) as queues:
        created = threading.Thread(target=lambda: queues.create(name))
        created.start()
        # During the move, a script is answered with ASK by the source, TRYAGAIN by the target.
        until(lambda: "errorstat_TRYAGAIN" in target.ask("INFO", "errorstats"))
        for server in (target, source, cluster.servers[2]):
            assert server.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[1]) == "+OK"
        created.join(TIMEOUT_S)
        message_id = queues.push(name, "x")
        claim = queues.pull(name)
        assert claim is not None
        assert claim.id == message_id


def test_the_loss_of_a_node_is_an_error_for_its_queues_and_no_others(cluster):
    with penstock.connect(f"{cluster.url}?timeout=3") as queues:
        names = [name_on(number) for number in range(3)]
        for name in names:
            queues.create(name)
            queues.purge(name)
        lost = cluster.servers[2]
        lost.terminate()
        try:
            with pytest.raises(UnavailableError):
                queues.push(names[2], "x")
            for name in names[:2]:
                queues.push(name, "x")
                assert queues.stats(name).visible == 1
        finally:
            lost.start()
