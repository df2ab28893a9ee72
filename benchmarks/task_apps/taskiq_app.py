"""Taskiq on a Redis list."""

import asyncio
from collections.abc import Sequence

import taskiq.compat

for _name in ("model_dump", "model_validate"):
    # taskiq-redis 1.0 imports them for its schedules; taskiq 0.13 no longer has them.
    if not hasattr(taskiq.compat, _name):
        setattr(taskiq.compat, _name, None)

from taskiq_redis import ListQueueBroker  # noqa: E402

from benchmarks.task_apps.ledger import opened, redis_url  # noqa: E402

broker = ListQueueBroker(url=redis_url())
ledger = opened()


@broker.task
async def nothing(number: int) -> None:
    """Does nothing but count."""
    ledger.note(number)


@broker.task
async def sleep_10ms(number: int) -> None:
    """Sleeps for 10 ms."""
    await asyncio.sleep(0.01)
    ledger.note(number)


def enqueue(task: str, numbers: Sequence[int]) -> None:
    """Pushes one call after the other."""
    function = nothing if task == "nothing" else sleep_10ms

    async def push() -> None:
        await broker.startup()
        for number in numbers:
            await function.kiq(number)
        await broker.shutdown()

    asyncio.run(push())
