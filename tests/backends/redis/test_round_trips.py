"""Each command on Redis is one script call in one round trip, and so is a batch."""

import pytest
import redis

import penstock
from penstock.clock import ManualClock
from penstock.service import Batch, Extend

pytestmark = pytest.mark.service("redis-server")


class Meter:
    """Counts the script calls that a server has executed, and how often it has read a request."""

    def __init__(self, client):
        self._client = client
        self._before = self._read()

    def _read(self):
        calls = self._client.info("commandstats")
        scripts = sum(
            stats["calls"]
            for name, stats in calls.items()
            if name in ("cmdstat_evalsha", "cmdstat_evalsha_ro", "cmdstat_eval", "cmdstat_fcall")
        )
        return scripts, self._client.info("stats")["total_reads_processed"]

    def spent(self):
        """Script calls and reads since the last question."""
        (scripts, reads), before = self._read(), self._before
        # The reads of these two questions themselves are the second pair of two.
        self._before = scripts, reads
        return scripts - before[0], reads - before[1] - 2


@pytest.fixture
def own_client(own_redis):
    with redis.Redis(port=own_redis.port) as client:
        yield client


def test_each_command_and_each_batch_is_one_script_call_in_one_round_trip(own_redis, own_client):
    with penstock.connect(own_redis.url, clock=ManualClock()) as queues:
        queues.create("orders")
        # The first use loads the scripts and reads the queue's settings.
        queues.push_many("orders", ["a", "b"], priority=1)
        queues.push("orders", "first")
        claims = queues.pull_many("orders", 2)
        queues.extend(claims[0], 60)
        queues.release(claims[0])
        queues.delete(claims[1])
        queues.delete_many(queues.pull_many("orders", 10))
        meter = Meter(own_client)
        spent = {}

        def note(name, result=None):
            spent[name] = meter.spent()
            return result

        note("push", queues.push("orders", "x").id)
        note("push with options", queues.push("orders", "y", delay=0, priority=5, dedup_id="1").id)
        claim = note("pull", queues.pull("orders"))
        note("extend", queues.extend(claim, 60))
        queues.release(claim)
        note("release")
        claims = note("pull_many", queues.pull_many("orders", 10))
        assert len(claims) == 2
        note("delete", queues.delete(claims[0]))
        note("push_many", queues.push_many("orders", [f"{number}" for number in range(100)]))
        claims = note("pull_many of 100", queues.pull_many("orders", 100))
        assert len(claims) == 100
        note(
            "a batch of extends",
            queues.service.execute(Batch([extension(claim) for claim in claims])),
        )
        replies = note("delete_many", queues.delete_many(claims))
        assert replies == [True] * 100
    assert spent == dict.fromkeys(spent, (1, 1))
    assert len(spent) == 11


def extension(claim):
    return Extend("orders", claim.proof, 60_000)
