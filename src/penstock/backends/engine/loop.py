"""The engine for asyncio callers: no lock, no thread, and one timer for all who wait."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, ClassVar, TypeVar, cast

from penstock.backends.engine.engine import Engine
from penstock.core.due import NEVER_MS
from penstock.errors import JournalError
from penstock.service import REDRIVE_MAX, Command, Pull

R = TypeVar("R")


class AsyncEngine:
    """An `AsyncQueueService` over an engine that belongs to one event loop."""

    LACKS: ClassVar[Mapping[str, str]] = {}
    redrive_max: int = REDRIVE_MAX

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._journal = engine.journal
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = NEVER_MS
        self._loop = asyncio.get_running_loop()
        self._unsubscribe = engine.clock.subscribe(self._time_moved)
        if engine.upkeep is not None:
            engine.upkeep.start(self._exclusively)

    def _exclusively(self, step: Callable[[], object]) -> object:
        """Runs a step of another thread in the loop, between the commands."""
        done: Future[object] = Future()

        def run() -> None:
            try:
                done.set_result(step())
            except BaseException as error:
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return done.result()

    async def execute(self, command: Command[R]) -> R:
        """Does what the command says, and returns once that is durable."""
        reply = self._engine.submit(command)
        sequence = self._engine.answer_sequence
        if type(command) is Pull and not reply:
            reply, sequence = cast(tuple[R, int], await self._pull_later(command))
        if sequence > self._journal.durable_sequence:
            await self._durable(sequence)
        return reply

    async def _pull_later(self, command: Pull) -> tuple[list[Any], int]:
        woken: asyncio.Event = asyncio.Event()
        waiter = self._engine.wait(command, woken.set)
        if waiter is None:
            return [], 0
        try:
            while not waiter.done:
                self._plan()
                await woken.wait()
                woken.clear()
        except BaseException:
            self._engine.forget(waiter)
            raise
        if waiter.error is not None:
            raise waiter.error
        return waiter.claims, waiter.sequence

    async def _durable(self, sequence: int) -> None:
        done = self._loop.create_future()

        def finish() -> None:
            # The loop may be closed already when the last entry becomes durable.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(_resolve, done)

        self._journal.notify(sequence, finish)
        await done
        # Already durable, or never to be: in both cases this returns or raises at once.
        self._journal.wait(sequence)

    def _plan(self) -> None:
        """Sets the timer for the next instant at which someone who waits may be served."""
        wake_ms = self._engine.next_wake_ms
        if self._timer is not None and self._timer_ms == wake_ms:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        timeout_s = self._engine.clock.timeout_s(wake_ms)
        if wake_ms < NEVER_MS and timeout_s is not None:
            self._timer_ms = wake_ms
            self._timer = self._loop.call_later(timeout_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        # An engine that stops here has told all who wait.
        with suppress(JournalError):
            self._engine.tick()
        if self._engine.has_waiters:
            self._plan()

    def _time_moved(self) -> None:
        self._loop.call_soon_threadsafe(self._catch_up)

    def _catch_up(self) -> None:
        with suppress(JournalError):
            self._engine.catch_up()
        self._tick()

    async def close(self) -> None:
        """Ends all waits, makes everything durable, and lets go of the journal."""
        self._unsubscribe()
        if self._timer is not None:
            self._timer.cancel()
        if self._engine.upkeep is not None:
            await self._loop.run_in_executor(None, self._engine.upkeep.stop)
        self._engine.close()


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
