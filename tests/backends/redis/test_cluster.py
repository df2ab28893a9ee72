"""A Redis Cluster whose slots are moved, and one that loses a node."""

import asyncio
import socket
import threading
import time
from typing import Any

import pytest
import redis
from redis.crc import key_slot

import penstock
import penstock.aio
from penstock.backends.redis.service import open_async_service
from penstock.errors import UnavailableError
from penstock.url import read_url
from tests.backends.redis.servers import TIMEOUT_S, RedisCluster, until
from tests.ports import refusing_port

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
        message_id = queues.push(name, "x").id
        claim = queues.pull(name)
        assert claim is not None
        assert claim.id == message_id


def move_slot(slot, source, target, others):
    """Moves a slot with its keys from one server to another, as `redis-cli` does."""
    ids = [server.ask("CLUSTER", "MYID") for server in (source, target)]
    assert target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0]) == "+OK"
    assert source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1]) == "+OK"
    with redis.Redis(port=source.port) as client:
        while keys := client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 2):
            words = ("127.0.0.1", target.port, "", 0, 5_000, "KEYS", *keys)
            client.execute_command("MIGRATE", *words)
    for server in (target, source, *others):
        assert server.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[1]) == "+OK"


def test_nothing_is_lost_while_the_slot_of_a_queue_moves_to_and_fro_under_load(cluster):
    """Row 12: a slot with messages is moved key by key, and no command fails."""
    name = "busy"
    while slot_of(name) > RedisCluster.SLOTS[0][1]:
        name += "x"
    source, target, other = cluster.servers
    pushed: list[bytes] = []
    pulled: list[bytes] = []
    failed: list[BaseException] = []
    ended = threading.Event()

    def push():
        while not ended.is_set():
            body = b"%d" % len(pushed)
            queues.push(name, body)
            pushed.append(body)

    def consume():
        while not ended.is_set() or queues.stats(name).messages:
            claims = queues.pull_many(name, 20, wait=0.1)
            assert all(queues.delete_many(claims))
            pulled.extend(claim.body for claim in claims)

    def note_failure(work):
        try:
            work()
        except BaseException as error:
            failed.append(error)

    with penstock.connect(cluster.url) as queues:
        queues.create(name, visibility_timeout=600)
        threads = [threading.Thread(target=note_failure, args=(work,)) for work in (push, consume)]
        for thread in threads:
            thread.start()
        for _ in range(4):
            before = len(pulled)
            until(lambda before=before: failed or len(pulled) > before + 20)
            move_slot(slot_of(name), source, target, [other])
            source, target = target, source
        ended.set()
        for thread in threads:
            thread.join(TIMEOUT_S)
    assert failed == []
    assert sorted(pulled) == sorted(pushed)


def test_dead_nodes_that_are_named_first_do_not_delay_a_new_client(cluster):
    with refusing_port() as one, refusing_port() as two, socket.create_server(("", 0)) as silent:
        dead = [one, two, silent.getsockname()[1]]
        hosts = ",".join(f"127.0.0.1:{port}" for port in [*dead, cluster.servers[0].port])
        began_s = time.monotonic()
        with penstock.connect(f"redis+cluster://{hosts}?timeout=60") as queues:
            queues.create("orders")
        # Each of them would cost the timeout.
        assert time.monotonic() - began_s < 30


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
