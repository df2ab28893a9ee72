"""The Carrot broker on the queues of a RabbitMQ: the same protocol over another service."""

import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import penstock
from penstock import carrot
from penstock.errors import QueueDeleted, QueueFull, QueueNotFound
from tests.server.carrot.test_serve import carrot_port
from tests.server.conftest import until
from tests.server.sqs.conftest import serve

pytestmark = pytest.mark.service("rabbitmq-server")
connect: Any = carrot.connect


@pytest.fixture(scope="module")
def port(rabbit):
    with serve("--store", rabbit.url, "--carrot", "0") as server:
        yield carrot_port(server)


@pytest.fixture
def client(port):
    with connect("127.0.0.1", port) as connected:
        yield connected


@pytest.fixture
def name():
    """A name no other test uses."""
    return f"c-{secrets.token_hex(6)}"


def test_a_message_is_written_returned_to_the_front_and_acknowledged(port, client, name):
    single = carrot.SingleClient("127.0.0.1", port)
    single.add_queue(name)
    single.write(name, b"first")
    client.put(name, b"second")
    with connect("127.0.0.1", port) as other:
        assert other.get(name).body == b"first"
    first, second = client.get_many(name, 2)
    assert (first.body, second.body, first.receives) == (b"first", b"second", 2)
    first.ack()
    second.nack()
    with single.read(name) as message:
        assert message == b"second"
    assert client.get(name) is None
    single.remove_queue(name)
    with pytest.raises(QueueNotFound):
        client.put(name, b"x")


def test_a_connection_that_breaks_returns_its_messages(port, client, name):
    client.add(name)
    client.put_many(name, [b"1", b"2"])
    with connect("127.0.0.1", port) as other:
        assert len(other.get_many(name, 2)) == 2
    assert [client.get(name, wait=20).body for _ in range(2)] == [b"1", b"2"]


def test_a_full_queue_refuses_and_a_removal_ends_waiting_reads(port, rabbit, client, name):
    client.add(name, max_messages=1)
    client.put(name, b"1")
    with pytest.raises(QueueFull):
        client.put(name, b"2")
    client.get(name).ack()
    with connect("127.0.0.1", port) as other, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.get, name, 20)
        with penstock.connect(rabbit.url) as queues:
            until(lambda: name in queues.list(name))
        client.remove(name)
        with pytest.raises((QueueDeleted, QueueNotFound)):
            waiting.result(60)
