"""What a router knows about queues that are spread over several shards.

A router assumes that a queue is in its home shard only. If a shard refuses a request because the
spread has another version (`spread`), the router asks the home shard for the current one. Queues
that are not spread cost no request.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from penstock.cluster.asking import ShardAsker
from penstock.cluster.attempts import COMMAND_TIMEOUT_S
from penstock.cluster.placement import first_shard
from penstock.cluster.spread import QueuePlaces, SpreadChanged, places_by
from penstock.errors import BackendLost, QueueNotFound
from penstock.service import DescribeQueue, QueueInfo, check_name

R = TypeVar("R")
_RETRY_S: Final = 0.01
_RETRY_S_MAX: Final = 0.25


class KnownQueues:
    """The queues that are known to be spread; `ask` is that of `ShardAsker`."""

    def __init__(self, asker: ShardAsker, shards: int) -> None:
        self.asker = asker
        self.ask = asker.ask
        self.shards = shards
        self._loop = asyncio.get_running_loop()
        self._known: dict[str, QueuePlaces] = {}

    def home(self, queue: object) -> int:
        """The home shard of a queue. Raises InvalidField if it is not a valid name."""
        return first_shard(check_name(queue), self.shards)

    def places(self, queue: str) -> QueuePlaces | None:
        """The shards of a queue as known here; None if it is in its home shard only."""
        return self._known.get(queue)

    async def describe(self, queue: str) -> QueueInfo:
        """The description of a queue by its home shard, with its note. Raises RequestError."""
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
        timeout_s: float = COMMAND_TIMEOUT_S,
    ) -> R:
        """Runs `work` with the places of a queue, and again if these have changed meanwhile.

        Raises BackendLost after `timeout_s`.
        """
        give_up_s = self._loop.time() + timeout_s
        pause_s = 0.0
        while True:
            try:
                return await work(self._known.get(queue))
            except SpreadChanged:
                if self._loop.time() > give_up_s:
                    raise BackendLost(
                        f"queue: the spread of {queue!r} is being changed, and not all shards "
                        "answer; try again later"
                    ) from None
            await asyncio.sleep(pause_s)
            pause_s = min(max(2 * pause_s, _RETRY_S), _RETRY_S_MAX)
            await self.describe(queue)

    def forget(self, queue: str) -> None:
        """Removes what is known of a queue, which was deleted."""
        self._known.pop(queue, None)


async def gather_all(works: Any) -> list[Any]:
    """The results of all awaitables; if one raises, the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
