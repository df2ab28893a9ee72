"""The asyncio client for the suite: each call, from any thread, waits for its result."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.aio import AsyncQueues


class FromAnyThread:
    """Asyncio queues in an event loop, which runs in a thread of its own."""

    def __init__(self, connect: Callable[[], Awaitable[AsyncQueues]]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._queues = self._run(_awaited(connect))
        self.service = self._queues.service

    def __getattr__(self, verb: str) -> Any:
        method = getattr(self._queues, verb)
        return lambda *args, **options: self._run(method(*args, **options))

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def end(self) -> None:
        self._run(self._queues.close())
        self._run(_finish_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _awaited(connect: Callable[[], Awaitable[AsyncQueues]]) -> AsyncQueues:
    return await connect()


async def _finish_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
