"""Celery on Redis, without results."""

import time
from collections.abc import Sequence

from celery import Celery

from benchmarks.task_apps.ledger import opened, redis_url

app = Celery("bench", broker=redis_url())
app.conf.update(
    task_ignore_result=True,
    worker_prefetch_multiplier=64,
    task_acks_late=False,
    worker_enable_remote_control=False,
    worker_send_task_events=False,
    broker_connection_retry_on_startup=True,
)
ledger = opened()


@app.task(name="nothing")  # type: ignore[untyped-decorator, unused-ignore]
def nothing(number: int) -> None:
    """Does nothing but count."""
    ledger.note(number)


@app.task(name="sleep_10ms")  # type: ignore[untyped-decorator, unused-ignore]
def sleep_10ms(number: int) -> None:
    """Sleeps for 10 ms."""
    time.sleep(0.01)
    ledger.note(number)


def enqueue(task: str, numbers: Sequence[int]) -> None:
    """Pushes one call after the other."""
    delay = (nothing if task == "nothing" else sleep_10ms).delay
    for number in numbers:
        delay(number)
