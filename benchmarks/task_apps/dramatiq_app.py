"""Dramatiq on its Redis broker."""

import time
from collections.abc import Sequence

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from benchmarks.task_apps.ledger import opened, redis_url

broker = RedisBroker(url=redis_url())
dramatiq.set_broker(broker)
ledger = opened()


@dramatiq.actor(max_retries=0)
def nothing(number: int) -> None:
    """Does nothing but count."""
    ledger.note(number)


@dramatiq.actor(max_retries=0)
def sleep_10ms(number: int) -> None:
    """Sleeps for 10 ms."""
    time.sleep(0.01)
    ledger.note(number)


def enqueue(task: str, numbers: Sequence[int]) -> None:
    """Pushes one call after the other."""
    send = (nothing if task == "nothing" else sleep_10ms).send
    for number in numbers:
        send(number)
