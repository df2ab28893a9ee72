"""A blocking command that is sent over the direct connection never takes effect twice."""

import pytest

import penstock
from penstock.backends.redis import blocking
from tests.backends.redis.servers import RedisServer

pytestmark = pytest.mark.service("redis-server")


@pytest.fixture(autouse=True)
def _every_connection_is_checked(monkeypatch):
    # Also one that has just answered: these tests lose it at once.
    monkeypatch.setattr(blocking, "FRESH_S", 0.0)


@pytest.fixture
def queues(own_redis):
    with penstock.connect(own_redis.url) as queues:
        queues.create("orders", dead_letter="orders-dead", max_receives=1)
        queues.push("orders", "x")
        yield queues


def test_a_release_is_not_repeated_when_the_move_of_its_dead_letter_fails(
    queues, own_redis: RedisServer
):
    claim = queues.pull("orders")
    link = queues.service._link
    sent = link.send

    async def send(key, commands):
        replies = await sent(key, commands)
        # The connection is lost between the release and the steps after it.
        own_redis.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        return replies

    link.send = send
    queues.release(claim)
    link.send = sent
    assert queues.stats("orders").messages == 0
    assert queues.stats("orders-dead").messages == 1


def test_a_push_succeeds_after_scripts_were_flushed_or_the_connection_was_lost(queues, own_redis):
    for _ in range(3):
        own_redis.ask("SCRIPT", "FLUSH")
        queues.push("orders", "x")
        own_redis.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        queues.push("orders", "x")
    assert queues.stats("orders").messages == 7
