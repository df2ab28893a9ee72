"""Runs async tasks in an event loop of their own, so that they cannot block the worker's."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import uvloop

from penstock.clock import THREAD_PREFIX
from penstock.tasks.errors import TaskTimeout
from penstock.tasks.middleware import Middleware
from penstock.tasks.running import HeldTask, fail, run_awaited, take_all


class LoopRunner:
    """Runs coroutine functions, up to `limit` at a time, in a thread that starts with the first."""

    def __init__(
        self, limit: int, middleware: Sequence[Middleware], done: Callable[[HeldTask], None]
    ) -> None:
        self.limit = limit
        self._middleware = middleware
        self._done = done
        self._waiting: deque[HeldTask] = deque()
        self.running: dict[HeldTask, asyncio.Task[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def waiting(self) -> int:
        """How many tasks have not started."""
        return len(self._waiting)

    def submit(self, tasks: Iterable[HeldTask]) -> None:
        """Adds tasks to the line."""
        if self._loop is None:
            self._loop = uvloop.new_event_loop()
            name = f"{THREAD_PREFIX}task-loop"
            threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()
        self._waiting.extend(tasks)
        self._loop.call_soon_threadsafe(self._start_some)

    def remove_waiting(self) -> list[HeldTask]:
        """Removes and returns the tasks that have not started."""
        return take_all(self._waiting)

    def cancel(self, held: HeldTask) -> None:
        """Cancels a task that runs."""
        task = self.running.get(held)
        if task is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        """Ends the loop."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _start_some(self) -> None:
        assert self._loop is not None
        while self._waiting and len(self.running) < self.limit:
            try:
                held = self._waiting.popleft()
            except IndexError:
                return
            self.running[held] = self._loop.create_task(self._run(held))

    async def _run(self, held: HeldTask) -> None:
        try:
            if held.outcome is None and not held.is_lost:
                await self._run_limited(held)
        except asyncio.CancelledError as error:
            # Cancelled by the worker, which has set the outcome; or by the task's own code.
            if held.outcome is None:
                fail(held, error, self._middleware)
        except BaseException as error:
            fail(held, error, self._middleware)
        finally:
            self.running.pop(held, None)
            self._done(held)
            if self._waiting:
                self._start_some()

    async def _run_limited(self, held: HeldTask) -> None:
        task, context = held.call
        timeout_ms = task.options.timeout_ms
        if timeout_ms is None:
            context.start(None)
            await run_awaited(held, self._middleware)
            return
        loop = asyncio.get_running_loop()
        clock_ms = context.now_ms
        try:
            async with asyncio.timeout(timeout_ms / 1_000) as limit:
                context.start(
                    timeout_ms,
                    lambda deadline_ms: limit.reschedule(
                        loop.time() + (deadline_ms - clock_ms()) / 1_000
                    ),
                )
                await run_awaited(held, self._middleware)
        except TimeoutError:
            error = TaskTimeout(f"the task ran for longer than {timeout_ms / 1_000:g} s")
            fail(held, error, self._middleware)
