"""Arq, which is asyncio throughout."""

import asyncio
from collections.abc import Sequence
from typing import Any

from arq import create_pool
from arq.connections import RedisSettings

from benchmarks.task_apps.ledger import opened, redis_url

ledger = opened()


async def nothing(context: dict[str, Any], number: int) -> None:
    """Does nothing but count."""
    ledger.note(number)


async def sleep_10ms(context: dict[str, Any], number: int) -> None:
    """Sleeps for 10 ms."""
    await asyncio.sleep(0.01)
    ledger.note(number)


class WorkerSettings:
    """What `arq` reads."""

    functions = (nothing, sleep_10ms)
    redis_settings = RedisSettings.from_dsn(redis_url())
    max_jobs = 100
    keep_result = 0
    poll_delay = 0.01


def enqueue(task: str, numbers: Sequence[int]) -> None:
    """Pushes one call after the other."""

    async def push() -> None:
        pool = await create_pool(WorkerSettings.redis_settings)
        for number in numbers:
            await pool.enqueue_job(task, number)
        await pool.aclose()

    asyncio.run(push())
