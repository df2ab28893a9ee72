"""The fast path of a push, for plain pushes only, has the same effect as the general one."""

import random
import re
import struct
import threading
from typing import Any

import pytest
import redis

import penstock
from penstock.backends.redis import scripts
from penstock.backends.redis.layout import KEYS, encode_bare, encode_plain, encode_push
from penstock.backends.redis.messages import check_push, plain_item
from penstock.clock import ManualClock
from penstock.errors import InvalidField, MessageTooLarge, QueueFull
from penstock.service import Batch, Push
from tests.backends.redis.servers import RedisServer, until

pytestmark = pytest.mark.service("redis-server")

START_MS = 1_800_000_000_000


@pytest.fixture(scope="module")
def server():
    server = RedisServer()
    yield server
    server.close()


@pytest.fixture
def client(server):
    with redis.Redis(port=server.port) as client:
        client.flushall()
        yield client


@pytest.fixture
def queues(server, client):
    with penstock.connect(server.url) as queues:
        queues.create("orders")
        yield queues


def calls_of(client, command):
    """How often a command was called, also by scripts."""
    return client.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0)


def stored(client, queue):
    """All keys of a queue in Redis, without the random values that it gets when it is created."""
    found = {}
    for key in client.keys(f"penstock:{{{queue}}}:*"):
        name = key.decode().rpartition(":")[2]
        if client.type(key) == b"hash":
            found[name] = client.hgetall(key)
        else:
            found[name] = client.zrange(key, 0, -1, withscores=True)
    del found["meta"][b"secret"]
    number = found["meta"].pop(b"number")
    found["meta"][b"counters"] = found["meta"][b"counters"].replace(number, b"number")
    return found


def test_a_queue_of_an_earlier_layout_continues_with_its_counters(server, client, queues):
    """Each counter was a field of its own."""
    first = queues.push("orders", b"first").id
    meta = "penstock:{orders}:meta"
    number, size, last, offset, due, _ = struct.unpack_from(
        ">dddddB", client.hget(meta, "counters")
    )
    names = ("next", "bytes", "last", "offset", "due")
    values = (number, size, last, offset, due)
    client.hset(meta, mapping={name: int(value) for name, value in zip(names, values, strict=True)})
    client.hdel(meta, "counters")
    with penstock.connect(server.url) as others:
        assert others.stats("orders").messages == 1
        second = others.push("orders", b"second").id
        assert int(second[-12:], 16) == int(first[-12:], 16) + 1
        assert [claim.body for claim in others.pull_many("orders", 9)] == [b"first", b"second"]
    assert client.hexists(meta, "counters")


@pytest.mark.parametrize("seed", range(5))
def test_a_plain_and_a_general_push_leave_the_same_keys_in_redis(server, client, seed):
    rng = random.Random(seed)
    clock = ManualClock(START_MS)
    retention_s = rng.choice([60, 345_600])
    with penstock.connect(server.url, clock=clock) as queues:
        for name in ("fast", "general"):
            queues.create(name, retention=retention_s)
        for _ in range(30):
            clock.advance(ms=rng.choice([0, 1, 1_000]))
            body = rng.randbytes(rng.choice([0, 1, 300]))
            attributes = rng.choice([None, None, {"kind": "test"}])
            options: dict[str, Any] = {"priority": rng.randrange(10), "attributes": attributes}
            fast = queues.service.execute(Push("fast", body, **options))
            # A batch takes the general path.
            (general,) = queues.service.execute(Batch([Push("general", body, **options)]))
            assert (fast.sequence, fast.duplicate) == (general.sequence, general.duplicate)
        assert stored(client, "fast") == stored(client, "general")
        assert [m.body for m in queues.peek("fast", 99)] == [
            m.body for m in queues.peek("general", 99)
        ]


def plain_pushes(client, push):
    """Whether pushes take the fast path: it reads one field of one key, and no settings."""
    names = ("hget", "hmget", "time", "zcard", "exists", "hset", "zadd")
    # More than one, because a sweep over all queues may come between.
    for _ in range(3):
        client.config_resetstat()
        push()
        if [calls_of(client, each) for each in names] == [1, 0, 1, 0, 0, 2, 2]:
            return True
    return False


def test_a_plain_push_does_not_read_the_settings(queues, client):
    # The first settles what may be due.
    queues.push("orders", b"one")
    assert plain_pushes(client, lambda: queues.push("orders", b"two"))


def test_a_plain_push_is_encoded_as_by_the_general_path(queues):
    queues.push("orders", b"one")
    queue = queues.service._queues.known("orders")
    for size in (0, 1, 255, 256, 65_535, 65_536):
        for priority in (0, 9):
            command = Push("orders", bytes(size), None, priority)
            general = encode_push(command, size, None)
            item = plain_item(queue, command)
            assert item is not None
            sent = b"".join(item)
            assert sent == b"".join(encode_plain(command, check_push(command)))
            length, _, plain = sent.partition(b"\r\n")
            assert length == b"$%d" % len(plain)
            # Both have size and priority, some lengths, and the content.
            assert (plain[:5], plain[9:]) == (general[:5], general[29:])
    assert encode_bare(b"body") == encode_push(Push("orders", b"body"), 4, None)


def test_the_fast_path_makes_the_same_keys_as_the_general_one():
    text = scripts.SCRIPTS["push_plain"].text
    listed = re.search(r"names = '(.*?) ' \.\.\n +'(.*?)'", text)
    assert listed is not None
    assert ("meta", *listed[1].split(), *listed[2].split()) == KEYS


def test_pushes_are_plain_again_when_no_pull_waits_and_nothing_is_owed(server, queues, client):
    with penstock.connect(server.url) as others:
        thread = threading.Thread(target=others.pull, args=("orders",), kwargs={"wait": 60})
        thread.start()
        until(lambda: queues.stats("orders").waiting_pulls == 1)
        queues.push("orders", b"one")
        thread.join(60)
    queues.stats("orders")
    assert plain_pushes(client, lambda: queues.push("orders", b"two"))
    queues.create("failing", dead_letter="failed", max_receives=1)
    queues.push("failing", b"one")
    # A claim that ends makes it owed to the other queue, until the call that found this carries it.
    queues.release(queues.pull("failing"))
    assert queues.stats("failed").messages == 1
    queues.stats("failing")
    assert plain_pushes(client, lambda: queues.push("failing", b"two"))


def test_what_expires_during_a_change_of_settings_is_no_longer_counted(server, client):
    with penstock.connect(server.url, clock=ManualClock(START_MS)) as queues:
        queues.create("orders", retention=60)
        queues.push("orders", b"old message")
    # With a clock that has not moved, there is no sweep before the change.
    with penstock.connect(server.url, clock=ManualClock(START_MS + 60_000)) as queues:
        queues.configure("orders", retention=90)
        stats = queues.stats("orders")
        assert (stats.messages, stats.stored_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {"delay_ms": 1}),
        ({}, {"ttl_ms": 60_000}),
        ({}, {"dedup_id": "1"}),
        ({}, {"group": "eu"}),
        ({}, {"priority": 10}),
        ({}, {"priority": True}),
        ({}, {"delay_ms": ""}),
        ({}, {"body": "text"}),
        ({"delay": 5}, {}),
        ({"max_messages": 5}, {}),
        ({"max_bytes": 5_000}, {}),
        ({"max_body_bytes": 10}, {}),
        ({"fifo": True}, {}),
        ({"fifo": True, "dedup_by_content": True}, {"group": "eu"}),
    ],
)
def test_a_push_with_options_or_on_a_queue_with_limits_takes_the_general_path(
    server, client, settings, options
):
    name = "orders.fifo" if "fifo" in settings else "orders"
    with penstock.connect(server.url) as queues:
        queues.create(name, **settings)
        service: Any = queues.service
        with pytest.raises(StopIteration) as stop:
            service._queues.find(name).send(None)
        command = Push(**{"queue": name, "body": b"a body of some bytes", **options})
        assert plain_item(stop.value.value, command) is None


def test_a_plain_push_follows_settings_that_another_process_has_changed(server, queues, client):
    queues.push("orders", b"one")
    with penstock.connect(server.url) as others:
        others.configure("orders", delay=60)
        queues.push("orders", b"delayed")
        assert queues.stats("orders").delayed == 1
        others.configure("orders", delay=0, max_messages=2)
        with pytest.raises(QueueFull, match="max_messages=2"):
            queues.push("orders", b"too many")
        others.configure("orders", max_messages=None, max_body_bytes=5)
        with pytest.raises(MessageTooLarge, match="at most 5"):
            queues.push("orders", b"123456")
        others.remove("orders")
        with pytest.raises(penstock.QueueNotFound):
            queues.push("orders", b"three")


def test_after_dedup_by_content_is_turned_on_the_body_is_recognised(server, client):
    with penstock.connect(server.url) as queues, penstock.connect(server.url) as others:
        queues.create("orders")
        queues.push("orders", b"one")
        others.configure("orders", dedup_by_content=True)
        first = queues.push("orders", b"two").id
        assert queues.push("orders", b"two").id == first
        assert queues.stats("orders").messages == 2


def test_a_waiting_pull_is_woken_by_a_plain_push(server, queues):
    with penstock.connect(server.url) as others:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(others.pull("orders", wait=60)))
        thread.start()
        until(lambda: queues.stats("orders").waiting_pulls == 1)
        queues.push("orders", b"one")
        thread.join(60)
        assert found[0].body == b"one"


def test_after_the_clock_was_set_back_the_time_of_a_push_is_not_earlier(server, client):
    clock = ManualClock(START_MS)
    with penstock.connect(server.url, clock=clock) as queues:
        queues.create("orders")
        queues.push("orders", b"one")
    with penstock.connect(server.url, clock=ManualClock(START_MS - 3_600_000)) as queues:
        queues.push("orders", b"two")
        queues.push("orders", b"three")
        times = [message.pushed_at_ms for message in queues.peek("orders", 9)]
    assert times == [START_MS] * 3


def test_a_refused_plain_push_changes_nothing(queues, client):
    before = stored(client, "orders")
    with pytest.raises(InvalidField, match="priority"):
        queues.push("orders", b"x", priority=11)
    assert stored(client, "orders") == before


def test_a_client_that_keeps_history_has_every_push_in_it(server, client):
    with penstock.connect(f"{server.url}?history=100") as queues:
        queues.create("orders")
        pushed = queues.push("orders", b"one").id
        assert [event.kind for event in queues.history(pushed)] == ["Pushed"]
