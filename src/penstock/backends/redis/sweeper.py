"""The sweeper: does what is due in queues that nobody uses just now.

Every command does what is due in its own queue first. A queue that no process pulls from would keep
its ended claims, and the dead letters among them would not reach a queue that somebody does watch.
So every few seconds one of the processes, whichever comes first, ticks some of all the queues, and
the next time those after them. Two that do it at once do no harm: a tick is one script.
"""

import asyncio
from contextlib import suppress
from typing import Final

from penstock.backends.redis.link import RedisLink, our_reply
from penstock.backends.redis.moves import RedisMoves
from penstock.backends.redis.queues import RedisQueues
from penstock.clock import Clock
from penstock.errors import PenstockError
from penstock.service import DescribeQueues

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
        self._task = (
            asyncio.get_running_loop().create_task(self._sweep_now_and_then())
            if clock is None
            else None
        )

    async def _sweep_now_and_then(self) -> None:
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
        if our_reply(self._queues.target, taken) is None:
            return 0
        after = our_reply(self._queues.target, after) or b""
        infos = await self._queues.describe_all(
            DescribeQueues(after=after.decode(), limit=QUEUES_MAX)
        )
        last = infos[-1].queue if len(infos) == QUEUES_MAX else ""
        await self._link.send(self._turn, [("SET", f"{self._turn}:after", last)])
        for info in infos:
            queue = await self._queues.find(info.queue)
            reply = await self._queues.run("tick", queue.keys, 0)
            if reply is not None:
                await self._moves.carry_owed(queue, reply)
        return len(infos)

    async def close(self) -> None:
        """Ends the sweeps."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
