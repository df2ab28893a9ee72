"""Writes the journal of a busy store with many failures, by the engine, for `benchmarks.spark`.

Producers and consumers of many queues run for hours of a manual clock: most messages are pulled and
deleted; some are released, extended, held until their claim runs out, dead-lettered and redriven;
some are delayed, expire, or are removed by a purge or with their queue. The engine writes every
event, so an audit of the journal must find nothing.
"""

import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from penstock.backends.engine.engine import Engine
from penstock.backends.engine.store import open_engine
from penstock.clock import ManualClock
from penstock.errors import RequestError
from penstock.service import (
    Batch,
    BatchItem,
    Claim,
    CreateQueue,
    Delete,
    DeleteQueue,
    Extend,
    Pull,
    Purge,
    Push,
    Redrive,
    Release,
    Stats,
)

QUEUES = 24
FIFO_EVERY = 6
GROUPS = 64
# How many messages a caller pushes or pulls in one call.
SIZES = (1, 3, 10, 10)
VISIBILITY_MS = 30_000
MAX_RECEIVES = 3
# One of so many messages fails every time it is pulled.
POISON_EVERY = 97
BODIES = 1_000
UPSET_EVERY = 2_000


class MadeStore(NamedTuple):
    """The engine's own figures of a store that it has written."""

    path: Path
    commands: int
    messages: dict[str, int]


def make_store(path: Path, seed: int, events: int) -> MadeStore:
    """Writes a store of about so many events and closes it."""
    life = _Life(path, seed)
    try:
        while life.events < events:
            life.step()
        held = {name: life.engine.submit(Stats(name)).messages for name in life.names}
        # This command settles what is due, so the counts are those at the end of the journal.
        return MadeStore(path, life.commands, held)
    finally:
        life.engine.close()


class _Life:
    """All users of the store, simulated one after the other."""

    def __init__(self, path: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.engine: Engine = open_engine(path, clock=self.clock, durability="os")
        self.events = 0
        self.commands = 0
        self.steps = 0
        self.bodies = [self.rng.randbytes(self.rng.randrange(40, 400)) for _ in range(BODIES)]
        self.kept: deque[tuple[str, Claim]] = deque()
        prefix = f"s{seed}"
        self.fifo = [f"{prefix}-line-{n}" for n in range(QUEUES // FIFO_EVERY)]
        self.plain = [f"{prefix}-work-{n}" for n in range(QUEUES - len(self.fifo))]
        self.dead = [f"{prefix}-dead", f"{prefix}-dead-line"]
        self.names = [*self.plain, *self.fifo, *self.dead]
        for name in [*self.dead, *self.plain, *self.fifo]:
            self._create(name)

    def _submit(self, command: Any) -> Any:
        self.commands += 1
        try:
            return self.engine.submit(command)
        except RequestError:
            return None

    def _create(self, name: str) -> None:
        settings: dict[str, Any] = {"visibility_ms": VISIBILITY_MS}
        if name in self.fifo or name == self.dead[1]:
            settings["fifo"] = True
        if name not in self.dead:
            dead = self.dead[1] if name in self.fifo else self.dead[0]
            settings |= {"dead_letter": dead, "max_receives": MAX_RECEIVES}
        self._submit(CreateQueue(name, settings))
        self.events += 1

    def step(self) -> None:
        """Some tens of milliseconds of simulated time."""
        self.steps += 1
        rng = self.rng
        self.clock.advance(ms=rng.randrange(1, 60))
        queue = self.names[min(rng.randrange(len(self.names)), rng.randrange(len(self.names)))]
        if queue not in self.dead:
            pushes: list[BatchItem] = list(self._pushes(queue, rng.choice(SIZES)))
            self._submit(Batch(pushes) if len(pushes) > 1 else pushes[0])
            self.events += len(pushes)
        claims = (
            self._submit(Pull(queue, rng.choice(SIZES), holder=f"worker-{rng.randrange(40)}")) or []
        )
        self.events += len(claims)
        self._work(queue, claims)
        if self.steps % UPSET_EVERY == 0:
            self._upset()

    def _pushes(self, queue: str, count: int) -> Iterator[Push]:
        rng = self.rng
        ordered = queue in self.fifo
        for _ in range(count):
            chance = rng.random()
            # Few messages have any of these: most pushes are plain.
            yield Push(
                queue,
                self.bodies[int(chance * BODIES)],
                delay_ms=rng.randrange(1, 5_000) if chance < 0.04 and not ordered else None,
                ttl_ms=rng.randrange(1_000, 60_000) if 0.04 <= chance < 0.06 else None,
                dedup_id=f"d{rng.randrange(1 << 20)}" if chance > 0.8 else None,
                group=f"g{rng.randrange(GROUPS)}" if ordered or chance > 0.95 else None,
            )

    def _work(self, queue: str, claims: list[Claim]) -> None:
        """Deletes, releases, extends or abandons the claims of a pull."""
        rng = self.rng
        done: list[BatchItem] = []
        for claim in claims:
            chance = rng.random()
            if claim.sequence % POISON_EVERY == 0 and queue not in self.dead:
                chance = 0.05 if chance < 0.5 else 0.08
            if chance < 0.03:
                done.append(Extend(queue, claim.proof, 2 * VISIBILITY_MS))
                self.kept.append((queue, claim))
            elif chance < 0.07:
                done.append(Release(queue, claim.proof, rng.choice((0, 0, 2_000))))
            elif chance >= 0.1:
                done.append(Delete(queue, claim.proof))
        if len(self.kept) > 100:
            done += [Delete(*self._oldest()) for _ in range(10)]
        if done:
            replies = self._submit(Batch(done))
            self.events += sum(not isinstance(reply, RequestError) for reply in replies)

    def _oldest(self) -> tuple[str, Any]:
        queue, claim = self.kept.popleft()
        return queue, claim.proof

    def _upset(self) -> None:
        """Runs one of the rare commands of an operator."""
        rng = self.rng
        chance = rng.random()
        if chance < 0.5:
            self._submit(Redrive(rng.choice(self.dead)))
        elif chance < 0.85:
            self._submit(Purge(rng.choice(self.names)))
        elif chance < 0.95:
            name = rng.choice(self.plain)
            self._submit(DeleteQueue(name))
            self._create(name)
        # A pause in which claims run out.
        self.clock.advance(ms=VISIBILITY_MS)
