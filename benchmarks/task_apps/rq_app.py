"""RQ with its SimpleWorker, which does not fork for each task."""

import time
from collections.abc import Sequence

from redis import Redis
from rq import Queue

from benchmarks.task_apps.ledger import opened, redis_url

ledger = opened()
queue = Queue(connection=Redis.from_url(redis_url()))


def nothing(number: int) -> None:
    """Does nothing but count."""
    ledger.note(number)


def sleep_10ms(number: int) -> None:
    """Sleeps for 10 ms."""
    time.sleep(0.01)
    ledger.note(number)


def enqueue(task: str, numbers: Sequence[int]) -> None:
    """Pushes one call after the other."""
    function = nothing if task == "nothing" else sleep_10ms
    for number in numbers:
        queue.enqueue(function, number, result_ttl=0)
