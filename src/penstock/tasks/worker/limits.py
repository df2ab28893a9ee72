"""Limits of rate and concurrency across all workers, by claims on token messages.

A task's rate of `count` in a period is a queue of that many tokens. To start a task a worker claims
a token for the period and never releases it: the token is visible again when the claim runs out, so
that no more than `count` tasks start within any period. For a limit of concurrency, the claim of
the token is extended while the task runs and released when it has ended. If a worker dies, its
claims run out in both cases. See decision 111.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import PenstockError, QueueNotFound
from penstock.service import (
    Batch,
    Claim,
    ConfigureQueue,
    Delete,
    Pull,
    PushMany,
    Release,
    Stats,
)
from penstock.steps import await_steps
from penstock.tasks.commands import Commands, ensure_queue
from penstock.tasks.names import TOKEN_TTL_MS, rate_queue, slot_queue
from penstock.tasks.running import HeldTask

if TYPE_CHECKING:
    from penstock.tasks.app import TaskApp
    from penstock.tasks.task import Task

# How many tasks may wait for a token here; more would keep other tasks from being pulled.
WAITING_MAX: Final = 32
_WAIT_MS: Final = 5_000
_REFILL_S: Final = 3_600.0


def fill_tokens(queue: str, count: int) -> Commands[None]:
    """Adds or removes tokens until there are `count`; the queue's capacity prevents more."""
    settings: dict[str, Any] = {"messages_max": count, "retention_ms": TOKEN_TTL_MS}
    yield from ensure_queue(queue, settings)
    yield ConfigureQueue(queue, settings)
    stats = yield Stats(queue)
    missing = count - stats.messages
    if missing > 0:
        # If another worker has added some meanwhile, the queue's capacity refuses the rest.
        yield PushMany(queue, [b"token"] * missing)
    surplus = -missing
    while surplus > 0:
        # The limit was lowered. Tokens that are claimed now are removed at the next refill.
        claims = yield Pull(queue, min(surplus, 1_000), wait_ms=0)
        if not claims:
            return
        yield Batch([Delete(claim.queue, claim.proof) for claim in claims])
        surplus -= len(claims)


class LimitGate:
    """The tasks of one name that wait for tokens, in one worker process."""

    def __init__(
        self,
        app: "TaskApp",
        task: "Task[..., Any]",
        service: Any,
        visibility_ms: int,
        start: Callable[[list[HeldTask]], None],
    ) -> None:
        self._service = service
        self._start = start
        self._visibility_ms = visibility_ms
        self._rate = task.options.rate
        self._concurrency = task.options.concurrency
        self._rate_queue = rate_queue(app.name, task.name)
        self._slot_queue = slot_queue(app.name, task.name)
        self._waiting: deque[HeldTask] = deque()
        self._added = asyncio.Event()
        self._refill_at_s = 0.0

    def add(self, tasks: list[HeldTask]) -> list[HeldTask]:
        """Adds tasks that are to wait; returns those for which there is no room."""
        room = max(0, WAITING_MAX - len(self._waiting))
        self._waiting.extend(tasks[:room])
        self._added.set()
        return tasks[room:]

    def remove_waiting(self) -> list[HeldTask]:
        """Removes and returns the tasks that have not started."""
        taken, self._waiting = list(self._waiting), deque()
        return taken

    @property
    def waiting(self) -> int:
        """How many tasks wait here."""
        return len(self._waiting)

    async def run_once(self) -> None:
        """Waits for tasks, then for tokens, and starts as many as there are tokens for."""
        await self._added.wait()
        if not self._waiting:
            self._added.clear()
            return
        await self._refill()
        slots: list[Claim | None] = [None] * len(self._waiting)
        if self._concurrency is not None:
            limit = min(len(slots), self._concurrency)
            slots = [*await self._pull(self._slot_queue, limit, self._visibility_ms)]
        allowed = len(slots)
        if self._rate is not None and slots:
            limit = min(allowed, self._rate.count)
            try:
                tokens = await self._pull(self._rate_queue, limit, self._rate.period_ms)
            except BaseException:
                # No task has these slots: other workers would miss them until they run out.
                with suppress(PenstockError):
                    await self._release(slots)
                raise
            allowed = len(tokens)
        started: list[HeldTask] = []
        while self._waiting and allowed:
            held = self._waiting.popleft()
            # A lost one needs no token; its runner ends it without running it.
            if not held.is_lost:
                allowed -= 1
                held.slot = slots.pop()
            started.append(held)
        self._start(started)
        await self._release(slots)

    async def _release(self, slots: Iterable[Claim | None]) -> None:
        unused = [Release(slot.queue, slot.proof) for slot in slots if slot is not None]
        if unused:
            await self._service.execute(Batch([*unused]))

    async def _pull(self, queue: str, limit: int, visibility_ms: int) -> list[Claim]:
        try:
            claims: list[Claim] = await self._service.execute(
                Pull(queue, limit, visibility_ms, _WAIT_MS)
            )
        except QueueNotFound:
            self._refill_at_s = 0.0
            return []
        return claims

    async def _refill(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s < self._refill_at_s:
            return
        self._refill_at_s = now_s + _REFILL_S
        if self._rate is not None:
            await await_steps(
                self._service.execute, fill_tokens(self._rate_queue, self._rate.count)
            )
        if self._concurrency is not None:
            await await_steps(
                self._service.execute, fill_tokens(self._slot_queue, self._concurrency)
            )
