"""Random commands get the same replies from queues in Redis and from the engine in memory.

Pytest prints a seed that fails; it repeats the same run.
"""

from contextlib import suppress

import pytest

import penstock
from penstock.clock import ManualClock
from tests.backends.beside import STEPS, AllowedDifference, ServicePair
from tests.conftest import FULL

pytestmark = pytest.mark.service("redis-server")

# 122 redrives groups that wait in another order than they arrived in; 1476 shortens the retention
# of an empty queue; in 1943 the claims of a redriven group end at the same time.
SEEDS = range(2_000) if FULL else (*range(6), 122, 1_476, 1_943)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_commands_have_the_same_replies_in_redis_and_in_memory(seed, shared_redis):
    """Row 8: random commands on queues in Redis and in the engine get the same replies."""
    clock = ManualClock()
    url = f"{shared_redis.url}?prefix=random{seed}"
    with (
        penstock.connect("memory:", clock=clock) as memory,
        penstock.connect(url, clock=clock) as redis,
    ):
        pair = ServicePair(memory, redis, clock, seed, moves_are_new=True)
        pair.create_queues()
        with suppress(AllowedDifference):
            for _ in range(STEPS):
                pair.step()
            pair.compare_all()
