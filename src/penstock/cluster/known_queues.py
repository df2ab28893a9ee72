"""What a router knows about queues that are spread over several shards.

A router assumes that a queue is in its home shard only. If a shard refuses a request because the
spread has another version (`spread_rules`), the router asks the home shard for the current one.
Queues that are not spread cost no request.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from penstock.cluster.membership import ClusterSettings, read_cluster_settings
from penstock.cluster.placement import first_shard, grown_shard
from penstock.cluster.retry import COMMAND_TIMEOUT_S, next_pause_s
from penstock.cluster.shard_client import ShardClient
from penstock.cluster.spread_rules import QueuePlaces, SpreadChanged, places_by
from penstock.errors import BackendLost, QueueNotFound
from penstock.service import DescribeQueue, QueueInfo, check_name

R = TypeVar("R")


class KnownQueues:
    """The queues that are known to be spread; `ask` is that of `ShardClient`."""

    def __init__(self, shard_client: ShardClient, settings: ClusterSettings) -> None:
        self.shard_client = shard_client
        self.ask = shard_client.ask
        # The number of shards may be larger by now; that of home shards never changes.
        self.settings = settings
        self.homes = settings.homes
        self._loop = asyncio.get_running_loop()
        self._known: dict[str, QueuePlaces] = {}

    def home(self, queue: object) -> int:
        """The home shard of a queue. Raises InvalidField if it is not a valid name."""
        return first_shard(check_name(queue), self.homes)

    def belongs_to(self, queue: str) -> int:
        """The shard that a queue belongs to by its name, in a cluster of this size."""
        return grown_shard(queue, self.homes, self.settings.shards)

    async def has_shard(self, shard: int) -> bool:
        """Whether there is a shard of this number; it may have been added a moment ago."""
        if shard >= self.settings.shards:
            await self.read_settings()
        return shard < self.settings.shards

    async def read_settings(self) -> None:
        """Reads how many shards there are; nothing changes if the registers do not answer."""
        found = await self.shard_client.register("cluster")
        if found is not None:
            settings = read_cluster_settings(found)
            if settings.shards > self.settings.shards:
                self.settings = settings

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
        places = places_by(info, self.homes)
        if places is None:
            self._known.pop(queue, None)
        else:
            self._known[queue] = places
            # If it is in a shard that was added, there may be more of them.
            await self.has_shard(max(places.current))
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
            pause_s = next_pause_s(pause_s)
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
