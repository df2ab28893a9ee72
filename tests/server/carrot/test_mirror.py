"""The Carrot broker on a store that is mirrored to a RabbitMQ, all by one `penstock serve`."""

import secrets
from typing import Any

import pytest

import penstock
from penstock import carrot
from penstock.errors import QueueNotFound
from tests.backends.mirror.test_rabbitmq import take_all
from tests.server.carrot.test_serve import carrot_port
from tests.server.conftest import end_daemon, until
from tests.server.sqs.conftest import serve

pytestmark = pytest.mark.service("rabbitmq-server")
connect: Any = carrot.connect
TIMEOUT_S = 90
UNREACHABLE = "cannot reach its service"


@pytest.fixture
def store(quick_path):
    yield quick_path / "store"
    end_daemon(quick_path / "store")


@pytest.fixture
def name():
    """A name no other test uses."""
    return f"c-{secrets.token_hex(6)}"


def serve_mirrored(store, rabbit):
    url = f"mirror:?primary=file:{store}&mirror={rabbit.url}"
    return serve("--store", url, "--carrot", "0")


def visible(rabbit, name):
    """How many messages a consumer on the mirror could pull; None if there is no such queue."""
    with penstock.connect(rabbit.url) as queues:
        try:
            return queues.stats(name).visible
        except QueueNotFound:
            return None


def test_what_carrot_clients_write_and_acknowledge_is_repeated_in_rabbitmq(rabbit, store, name):
    with serve_mirrored(store, rabbit) as server:
        with connect("127.0.0.1", carrot_port(server)) as client:
            client.add(name)
            client.put_many(name, [b"1", b"2", b"3", b"4"])
            first, second = client.get_many(name, 2)
            first.ack()
            # The second is held by its reader, so nobody can pull it from the mirror either.
            until(lambda: visible(rabbit, name) == 2, TIMEOUT_S)
            second.nack()
            until(lambda: visible(rabbit, name) == 3, TIMEOUT_S)
            assert [body for body, _ in take_all(rabbit, name)] == [b"2", b"3", b"4"]
        carrot.SingleClient("127.0.0.1", carrot_port(server)).remove_queue(name)
        until(lambda: visible(rabbit, name) is None, TIMEOUT_S)
        server.stop()
        assert UNREACHABLE not in server.output + server.process.stdout.read().decode()


def test_a_mirror_that_cannot_be_reached_is_warned_of_and_connects_later(rabbit, store, name):
    rabbit.stop()
    try:
        with serve_mirrored(store, rabbit) as server:
            output = server.output
            while UNREACHABLE not in output:
                line = server.process.stdout.readline().decode()
                assert line, f"the server ended without a warning: {output}"
                output += line
            with connect("127.0.0.1", carrot_port(server)) as client:
                client.add(name)
                client.put(name, b"before")
            rabbit.start()
            until(lambda: visible(rabbit, name) == 1, TIMEOUT_S)
            assert [body for body, _ in take_all(rabbit, name)] == [b"before"]
            server.stop()
            output += server.process.stdout.read().decode()
    finally:
        rabbit.stop()
        rabbit.start()
    (warning,) = [line for line in output.splitlines() if UNREACHABLE in line]
    assert f"the mirror mirror of {store} " in warning
    assert "Connection refused" in warning
