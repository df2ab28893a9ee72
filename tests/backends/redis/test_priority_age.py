"""A queue with a priority age in Redis: its cost, and queues that older versions made."""

import pytest
import redis

import penstock
from penstock.clock import ManualClock

pytestmark = pytest.mark.service("redis-server")


def connect(server, prefix, clock):
    return penstock.connect(f"{server.url}?prefix={prefix}", clock=clock)


def bodies(claims):
    return [claim.body for claim in claims]


def calls_of(client):
    """How many commands of each kind the server has executed, in scripts too."""
    return {name: each["calls"] for name, each in client.info("commandstats").items()}


@pytest.mark.parametrize("group", [None, "eu"])
def test_a_pull_by_age_takes_as_many_commands_in_a_queue_of_any_length(own_redis, group):
    clock = ManualClock()
    spent = []
    with (
        connect(own_redis, "flat", clock) as queues,
        redis.Redis(port=own_redis.port) as client,
    ):
        for count in (20, 2_000):
            queues.create(f"q{count}", priority_age=10)
            for priority in (0, 5, 9):
                items = [f"{priority}.{number}" for number in range(count)]
                queues.push_many(f"q{count}", items, priority=priority, group=group)
            clock.advance(seconds=10)
            queues.pull(f"q{count}")
            before = calls_of(client)
            claims = [queues.pull(f"q{count}") for _ in range(5)]
            after = calls_of(client)
            assert bodies(claims) == [b"0.%d" % number for number in range(1, 6)]
            counted = {name: after[name] - before.get(name, 0) for name in after}
            spent.append(
                {name: each for name, each in counted.items() if each and "info" not in name}
            )
    assert spent[0] == spent[1]
    assert spent[0]["cmdstat_evalsha"] == 5


def test_a_queue_that_an_older_version_made_has_strict_priorities_until_it_is_configured(
    shared_redis,
):
    clock = ManualClock()
    with (
        connect(shared_redis, "older", clock) as queues,
        redis.Redis(port=shared_redis.port) as client,
    ):
        queues.create("q")
        assert client.hdel("older:{q}:meta", "priority_age_ms") == 1
        queues.push("q", "low")
        clock.advance(seconds=10)
        queues.push_many("q", ["high1", "high2"], priority=9)
        assert bodies(queues.pull_many("q", 1)) == [b"high1"]
        queues.configure("q", priority_age=10)
        assert bodies(queues.pull_many("q", 2)) == [b"low", b"high2"]


def test_old_messages_with_a_ttl_beyond_the_retention_are_pulled_by_age(shared_redis):
    clock = ManualClock()
    with connect(shared_redis, "overdue", clock) as queues:
        queues.create("q", priority_age=10, retention=60)
        queues.push("q", "low", ttl=3_600)
        clock.advance(seconds=61)
        # Settles what is past the retention: the message moves from arrivals to overdue.
        assert queues.stats("q").visible == 1
        queues.push("q", "high", priority=9)
        assert bodies(queues.pull_many("q", 2)) == [b"low", b"high"]


def test_messages_in_flight_do_not_count_for_the_age(shared_redis):
    clock = ManualClock()
    with connect(shared_redis, "held", clock) as queues:
        queues.create("q", priority_age=10)
        queues.push("q", "held", priority=5)
        assert queues.pull("q", visibility_timeout=3_600) is not None
        clock.advance(seconds=10)
        queues.push("q", "low")
        queues.push_many("q", [f"high{number}" for number in range(5)], priority=9)
        found = bodies(queues.pull_many("q", 9))
        assert found == [*(b"high%d" % number for number in range(5)), b"low"]
