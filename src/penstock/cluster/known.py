"""Which queues are spread, as far as a router knows, and how it learns of it.

A router knows a queue that is spread only once a shard has refused a request for it; it then asks
the home shard, and again whenever a shard refuses (`spread`). What is not spread costs nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from penstock.cluster.asking import ShardAsker
from penstock.cluster.attempts import PATIENCE_S
from penstock.cluster.placement import first_shard
from penstock.cluster.spread import QueuePlaces, SpreadChanged, places_by
from penstock.errors import BackendLost, QueueNotFound
from penstock.service import DescribeQueue, QueueInfo, check_name

R = TypeVar("R")
_RETRY_S: Final = 0.01
_RETRY_S_MAX: Final = 0.25


class KnownQueues:
    """The queues of a cluster that are known to be spread; `ask` is that of the asker."""

    def __init__(self, asker: ShardAsker, shards: int) -> None:
        self.ask = asker.ask
        self.shards = shards
        self._loop = asyncio.get_running_loop()
        self._known: dict[str, QueuePlaces] = {}

    def home(self, queue: object) -> int:
        """The home shard of a queue. Raises InvalidField for what is no name."""
        return first_shard(check_name(queue), self.shards)

    def places(self, queue: str) -> QueuePlaces | None:
        """Where a queue is, as far as is known; None if it is only in its home shard."""
        return self._known.get(queue)

    async def describe(self, queue: str) -> QueueInfo:
        """The queue as its home shard describes it, with its note. Raises RequestError."""
        home = self.home(queue)
        try:
            info = await self.ask(home, DescribeQueue(queue))
        except QueueNotFound:
            self._known.pop(queue, None)
            raise
        places = places_by(info, self.shards)
        if places is None:
            self._known.pop(queue, None)
        else:
            self._known[queue] = places
        return info

    async def with_places(
        self,
        queue: str,
        work: Callable[[QueuePlaces | None], Awaitable[R]],
        patience_s: float = PATIENCE_S,
    ) -> R:
        """Does the work with the places of a queue, again if they turn out to be others."""
        give_up_s = self._loop.time() + patience_s
        pause_s = 0.0
        while True:
            try:
                return await work(self._known.get(queue))
            except SpreadChanged:
                if self._loop.time() > give_up_s:
                    raise BackendLost(
                        f"queue: {queue!r} is being spread over other shards, and not all of them "
                        "answer; try again later"
                    ) from None
            await asyncio.sleep(pause_s)
            pause_s = min(max(2 * pause_s, _RETRY_S), _RETRY_S_MAX)
            await self.describe(queue)

    def forget(self, queue: str) -> None:
        """The queue was removed."""
        self._known.pop(queue, None)


async def every(works: Any) -> list[Any]:
    """The results of all; if one raises, the others are ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
