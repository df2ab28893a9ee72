"""The sweeper: settles what is due in queues that no process uses at the moment.

Every command first settles what is due in its own queue. A queue that no process pulls from would
keep its ended claims, and dead letters among them would not reach a queue that another process
pulls from. So every few seconds one of the processes ticks some of the queues, and the next time
those after them. Two sweeps at the same time do no harm: a tick is one script.

With a manual clock, all queues are ticked before the first command after the clock moved.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from penstock.backends.redis.link import RedisLink, checked_reply
from penstock.backends.redis.moves import RedisMoves
from penstock.backends.redis.queues import RedisQueues
from penstock.clock import Clock
from penstock.errors import PenstockError, QueueNotFound
from penstock.service import DescribeQueues, QueueInfo

SWEEP_S: Final = 5.0
QUEUES_MAX: Final = 500


class Sweeper:
    """The sweeps of one process."""

    def __init__(
        self, link: RedisLink, queues: RedisQueues, moves: RedisMoves, clock: Clock | None
    ) -> None:
        self._link = link
        self._queues = queues
        self._moves = moves
        self._turn = f"{queues.target.prefix}:{{*sweep}}"
        self._task: asyncio.Task[None] | None = None
        # Whether the clock was set forward since the last sweep.
        self.is_due = False
        if clock is None:
            self._task = asyncio.get_running_loop().create_task(self._sweep_periodically())
            self._unsubscribe: Callable[[], None] | None = None
        else:
            self._unsubscribe = clock.subscribe(self._clock_moved)

    def _clock_moved(self) -> None:
        self.is_due = True

    async def catch_up(self) -> None:
        """Ticks every queue, because the clock was set forward. Raises UnavailableError."""
        self.is_due = False
        await self._tick(await self._queues.describe_all(DescribeQueues(limit=2**31)))

    async def _sweep_periodically(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            with suppress(PenstockError):
                await self.sweep()

    async def sweep(self) -> int:
        """Ticks some queues, unless another process has just done so; returns how many."""
        taken, after = await self._link.send(
            self._turn,
            [
                ("SET", f"{self._turn}:turn", "1", "NX", "PX", round(SWEEP_S * 900)),
                ("GET", f"{self._turn}:after"),
            ],
        )
        if checked_reply(self._queues.target, taken) is None:
            return 0
        after = checked_reply(self._queues.target, after) or b""
        infos = await self._queues.describe_all(
            DescribeQueues(after=after.decode(), limit=QUEUES_MAX)
        )
        last = infos[-1].queue if len(infos) == QUEUES_MAX else ""
        await self._link.send(self._turn, [("SET", f"{self._turn}:after", last)])
        await self._tick(infos)
        return len(infos)

    async def _tick(self, infos: list[QueueInfo]) -> None:
        for info in infos:
            with suppress(QueueNotFound):
                queue = await self._queues.find(info.queue)
                reply = await self._queues.run("tick", queue.keys, 0)
                if reply is not None:
                    await self._moves.carry_owed(queue, reply)

    async def close(self) -> None:
        """Ends the sweeps."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
