"""The benchmark of queues in Redis: each contestant runs, and a lost message voids the run."""

import pytest

import penstock
from tests.backends.redis.servers import RedisServer

race = pytest.importorskip("benchmarks.redis", reason="the source archive has no benchmarks")
from benchmarks import harness  # noqa: E402

pytestmark = pytest.mark.service("redis-server")


@pytest.fixture(scope="module")
def url():
    server = RedisServer()
    yield server.url
    server.close()


@pytest.mark.parametrize("name", race.CONTESTANTS)
def test_every_contestant_runs_both_steps(url, name):
    for step in race.STEPS_NAMES:
        assert race.run_step(url, name, step, 2 * race.BATCH) > 0


def test_a_lost_message_voids_the_run(url):
    race.run_step(url, race.OURS, "push", race.BATCH)
    with penstock.connect(url) as queues:
        queues.purge("bench")
        queues.push_many("bench", ["another"] * race.BATCH)
    with pytest.raises(harness.Void, match="never pulled"):
        race.run_step(url, race.OURS, "pull + delete", race.BATCH)
