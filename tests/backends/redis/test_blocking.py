"""The direct connection of the blocking service, when the server or the caller stops."""

import signal
import threading
import time

import pytest
import redis

import penstock
from penstock.backends.redis.address import read_target
from penstock.backends.redis.blocking import FRESH_S, BlockingRedis, DirectLink, NothingSent
from penstock.errors import BackendLost
from penstock.url import read_url
from tests.backends.redis.servers import RedisServer, until

pytestmark = pytest.mark.service("redis-server")


@pytest.fixture
def server():
    server = RedisServer("--appendonly", "yes", "--appendfsync", "always")
    yield server
    server.close()


@pytest.fixture
def client(server):
    with redis.Redis(port=server.port) as client:
        yield client


@pytest.fixture
def queues(server, client):
    with penstock.connect(server.url) as queues:
        queues.create("orders")
        assert isinstance(queues.service, BlockingRedis)
        yield queues


def connections(client):
    """The connections of Penstock: that of the portal, and the direct one after its first use."""
    return [each for each in client.client_list() if each["name"] == "penstock"]


def lose_connections(client):
    """Closes the connections of Penstock; returns when none of them is used without a check."""
    for each in connections(client):
        client.client_kill_filter(_id=each["id"])
    end_s = time.monotonic() + FRESH_S
    until(lambda: time.monotonic() > end_s)


def bodies(queues):
    return [message.body for message in queues.peek("orders", 1_000)]


def test_a_push_runs_in_the_callers_thread(queues, client):
    before = len(connections(client))
    queues.push("orders", b"one")
    assert len(connections(client)) == before + 1
    # While the event loop of the portal is blocked, pushes are still answered.
    release = threading.Event()
    queues.service._portal._loop.call_soon_threadsafe(release.wait)
    try:
        queues.push("orders", b"two")
    finally:
        release.set()
    assert bodies(queues) == [b"one", b"two"]


def test_a_push_succeeds_after_the_server_closed_the_connection(queues, client):
    queues.push("orders", b"one")
    lose_connections(client)
    queues.push("orders", b"two")
    queues.push("orders", b"three")
    assert bodies(queues) == [b"one", b"two", b"three"]


def test_scripts_that_the_server_lost_are_loaded_again_by_a_push(queues, client):
    queues.push("orders", b"one")
    client.script_flush()
    queues.push("orders", b"two")
    assert bodies(queues) == [b"one", b"two"]


def test_pushes_succeed_again_after_a_restart_of_the_server(queues, server):
    queues.push("orders", b"one")
    server.kill()
    server.start()
    until(lambda: pushes(queues, b"two"))
    assert set(bodies(queues)) == {b"one", b"two"}


def pushes(queues, body):
    try:
        queues.push("orders", body)
    except BackendLost:
        return False
    return True


def test_a_stalled_server_is_an_error_and_its_late_reply_is_not_used(server):
    with penstock.connect(f"{server.url}?timeout=3") as queues:
        queues.create("orders")
        queues.push("orders", b"one")
        with server.stalled(), pytest.raises(BackendLost, match="no answer within 3 s"):
            queues.push("orders", b"two")
        pushed = queues.push("orders", b"three").id
        found = {message.body: message.id for message in queues.peek("orders", 10)}
    assert found[b"three"] == pushed


def test_a_push_notices_that_its_queue_was_removed_and_created_again(queues, client, server):
    queues.push("orders", b"one")
    with penstock.connect(server.url) as others:
        others.remove("orders")
        with pytest.raises(penstock.QueueNotFound):
            queues.push("orders", b"two")
        others.create("orders")
    pushed = queues.push("orders", b"three").id
    assert [message.id for message in queues.peek("orders", 10)] == [pushed]


def test_no_push_of_many_threads_is_lost(queues):
    def push(number):
        for step in range(50):
            queues.push("orders", f"{number}/{step}")

    threads = [threading.Thread(target=push, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(bodies(queues))) == 400


def test_the_reply_of_an_interrupted_push_is_not_taken_for_that_of_the_next(queues, server):
    queues.push("orders", b"one")
    interrupt = threading.Timer(
        0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
    )

    def push_and_be_interrupted():
        # The timer begins here: outside the block below, an interrupt would end all tests.
        interrupt.start()
        queues.push("orders", b"two")

    # A process that was started in the background ignores the signal.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with server.stalled():
            with pytest.raises(KeyboardInterrupt):
                push_and_be_interrupted()
            interrupt.join()
    finally:
        signal.signal(signal.SIGINT, handler)
    pushed = queues.push("orders", b"three").id
    assert {m.body: m.id for m in queues.peek("orders", 10)}[b"three"] == pushed


def test_a_command_that_may_have_taken_effect_is_not_repeated_by_the_portal(server, client):
    # A server that was just started may still load its data.
    until(lambda: not client.info("persistence")["loading"])
    link = DirectLink(read_target(read_url(server.url)))
    sha = client.script_load("return redis.call('INCR', KEYS[1])")

    def send(*words):
        with pytest.raises(StopIteration) as stop:
            link.send("", [words]).send(None)
        return stop.value.value

    def refusal_of(*words):
        with pytest.raises((NothingSent, BackendLost)) as refused:
            link.send("", [words]).send(None)
        return refused.type

    link.has_changed = False
    assert send("HMGET", "nowhere", "x") == [[None]]
    lose_connections(client)
    # So far the command has only read, so all of it may be repeated by the portal.
    assert refusal_of("EVALSHA", sha, 1, "count") is NothingSent
    assert refusal_of("EVALSHA", "0" * 40, 1, "count") is NothingSent
    link.has_changed = False
    assert send("EVALSHA", sha, 1, "count") == [1]
    lose_connections(client)
    assert refusal_of("EVALSHA", sha, 1, "count") is BackendLost
    link.has_changed = False
    assert send("EVALSHA", sha, 1, "count") == [2]
    link.forget()
