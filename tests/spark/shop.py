"""The journal of a shop's day, made by the engine itself: for the report's tests and its picture.

    python -m tests.spark.shop DIRECTORY

writes a store there. Customers come in waves; the workers that send e-mails stop for an hour, the
bank refuses payments for a while, and some pictures are broken for good.
"""

import heapq
import math
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.backends.engine.store import open_engine
from penstock.clock import ManualClock
from penstock.errors import RequestError
from penstock.service import CreateQueue, Delete, Pull, Push, Release

STEP_MS = 10_000
HOURS = 10
BREAK = range(4, 5)
BANK_TROUBLE = range(6, 7)


class QueueUse(NamedTuple):
    """How a queue is used: messages a step at noon, how many are pulled at once, how long held."""

    queue: str
    rate: float
    pulls: int
    hold_ms: int
    settings: dict[str, Any]
    groups: Sequence[str] = ()


DEAD = {"dead_letter": "failed", "max_receives": 3}
CITIES = [f"city-{n:02d}" for n in range(40)]
WORKERS = [
    QueueUse("orders", 6, 6, 900, DEAD | {"visibility_ms": 30_000}),
    QueueUse("payments", 5, 5, 2_500, DEAD | {"visibility_ms": 60_000}),
    QueueUse("emails", 7, 6, 300, {"visibility_ms": 30_000}),
    QueueUse("pictures", 2, 2, 9_000, DEAD | {"visibility_ms": 20_000}),
    QueueUse("search-index", 3, 2, 400, {"visibility_ms": 30_000}),
    QueueUse(
        "deliveries.fifo", 2, 3, 1_500,
        {"fifo": True, "dead_letter": "failed.fifo", "max_receives": 4, "visibility_ms": 30_000},
        CITIES,
    ),
    QueueUse("reminders", 1, 2, 200, {"delay_ms": 300_000, "visibility_ms": 30_000}),
    QueueUse("invoices", 0.5, 1, 4_000, {"visibility_ms": 60_000, "retention_ms": 7_200_000}),
]  # fmt: skip


def make_store(
    path: Path, seed: int = 7, hours: float = HOURS, more: Sequence[QueueUse] = ()
) -> Path:
    """Writes the store and closes it."""
    day = _Day(path, seed, hours, [*WORKERS, *more])
    try:
        for step in range(int(hours * 3_600_000 / STEP_MS)):
            day.step(step)
    finally:
        day.engine.close()
    return path


class _Day:
    def __init__(self, path: Path, seed: int, hours: float, workers: Sequence[QueueUse]) -> None:
        self.rng = random.Random(seed)
        self.hours = hours
        self.workers = workers
        # 08:00 of some Tuesday.
        self.clock = ManualClock(start_ms=1_789_459_200_000)
        self.engine = open_engine(path, clock=self.clock, durability="os", background=False)
        self.plan: list[tuple[int, int, Callable[..., Any], tuple[Any, ...]]] = []
        self.planned = 0
        for worker in workers:
            self.engine.submit(CreateQueue(worker.queue, worker.settings))

    def step(self, number: int) -> None:
        """Ten seconds: some messages come, some are pulled, some are done."""
        hour = number * STEP_MS / 3_600_000
        wave = 0.35 + math.sin(math.pi * min(1, hour / self.hours)) ** 2
        for worker in self.workers:
            for _ in range(self._about(worker.rate * wave)):
                self._later(self.rng.randrange(STEP_MS), self._push, worker)
            self._later(self.rng.randrange(STEP_MS // 2), self._pull, worker, int(hour))
            self._later(self.rng.randrange(STEP_MS // 2, STEP_MS), self._pull, worker, int(hour))
        until_ms = self.clock.now_ms() + STEP_MS
        while self.plan and self.plan[0][0] < until_ms:
            at_ms, _, act, arguments = heapq.heappop(self.plan)
            self.clock.advance(ms=max(0, at_ms - self.clock.now_ms()))
            act(*arguments)
        self.clock.advance(ms=max(0, until_ms - self.clock.now_ms()))

    def _later(self, delay_ms: int, act: Callable[..., Any], *arguments: Any) -> None:
        self.planned += 1
        heapq.heappush(self.plan, (self.clock.now_ms() + delay_ms, self.planned, act, arguments))

    def _about(self, mean: float) -> int:
        return int(mean) + (self.rng.random() < mean % 1)

    def _push(self, worker: QueueUse) -> None:
        # A few groups have most of the messages.
        group = None
        if worker.groups:
            group = worker.groups[int(len(worker.groups) * self.rng.random() ** 3)]
        body = self.rng.randbytes(self.rng.randrange(40, 400))
        self._submit(Push(worker.queue, body, group=group))

    def _pull(self, worker: QueueUse, hour: int) -> None:
        if worker.queue == "emails" and hour in BREAK:
            return
        holder = f"{worker.queue}-{self.rng.randrange(3)}"
        limit = max(1, self._about(worker.pulls * 1.05))
        for claim in self._submit(Pull(worker.queue, limit, holder=holder)) or []:
            hold_ms = int(worker.hold_ms * self.rng.lognormvariate(0, 0.7))
            self._finish(worker, claim, hour, hold_ms)

    def _finish(self, worker: QueueUse, claim: Any, hour: int, hold_ms: int) -> None:
        chance = self.rng.random()
        end: Any = Delete(worker.queue, claim.proof)
        if worker.queue == "payments" and hour in BANK_TROUBLE and chance < 0.6:
            end = Release(worker.queue, claim.proof, 30_000)
        elif worker.queue == "pictures" and claim.sequence % 23 == 0:
            return  # a broken picture: every worker crashes on it, and the claim runs out
        elif chance < 0.01:
            end = Release(worker.queue, claim.proof)
        elif chance < 0.015:
            return
        self._later(hold_ms, self._submit, end)

    def _submit(self, command: Any) -> Any:
        try:
            return self.engine.submit(command)
        except RequestError:
            return None


if __name__ == "__main__":
    make_store(Path(sys.argv[1]))
