"""Huey on Redis, with the commands that block instead of polling, and no results kept."""

import time
from collections.abc import Sequence

from huey import RedisHuey

from benchmarks.task_apps.ledger import opened, redis_url

huey = RedisHuey("bench", url=redis_url(), results=False, blocking=True)
ledger = opened()


@huey.task()
def nothing(number: int) -> None:
    """Does nothing but count."""
    ledger.note(number)


@huey.task()
def sleep_10ms(number: int) -> None:
    """Sleeps for 10 ms."""
    time.sleep(0.01)
    ledger.note(number)


def enqueue(task: str, numbers: Sequence[int]) -> None:
    """Pushes one call after the other."""
    function = nothing if task == "nothing" else sleep_10ms
    for number in numbers:
        function(number)
