"""Changes how a queue is spread, and finishes what a change began.

The note in the home shard is changed first, by compare-and-set; then the other shards get copies of
it and of the settings. If whoever changes it dies between, the owner of the home shard finishes.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec

from penstock.cluster.known import KnownQueues, every
from penstock.cluster.spread import (
    NotPlaced,
    QueuePlaces,
    Spread,
    SpreadChanged,
    check_spreadable,
    may_settle,
    next_spread,
    noted,
    places_in,
    settled,
    spread_of,
)
from penstock.errors import QueueExists, QueueNotFound
from penstock.service import (
    ConfigureQueue,
    CreateQueue,
    DeleteQueue,
    DescribeQueue,
    QueueInfo,
    Stats,
    check_number,
)


class SpreadStatus(msgspec.Struct, frozen=True):
    """How a queue is spread: over how many shards, over how many before, what each shard holds."""

    queue: str
    shards: int
    before: tuple[int, ...]
    messages: dict[int, int]


class Respreading:
    """Changes of how queues are spread."""

    def __init__(self, known: KnownQueues, now_ms: Callable[[], int]) -> None:
        self._known = known
        self._ask = known.ask
        self._shards = known.shards
        self._now_ms = now_ms
        # Which shards of a queue were seen empty under a version of its spread.
        self._emptied: dict[tuple[str, int], set[int]] = {}

    async def remove_from(self, shards: list[int], queue: str, version: int = 0) -> None:
        """Removes the queue from these shards; with a version, only where it is empty."""

        async def remove(shard: int) -> None:
            with suppress(QueueNotFound, NotPlaced):
                await self._ask(shard, DeleteQueue(queue), version)

        await every([remove(each) for each in shards])

    async def spread(self, queue: str, shards: int) -> SpreadStatus:
        """Spreads a queue over so many shards. Raises InvalidField, or QueueNotFound."""
        check_number("shards", shards, 1, self._shards)
        home = self._known.home(queue)

        async def work(places: QueuePlaces | None) -> None:
            info = await self._known.describe(queue)
            old = spread_of(info.settings)
            if shards > 1:
                check_spreadable(info.settings)
            if old.shards != shards:
                new = next_spread(old, shards, self._now_ms())
                changes = {"annotations": noted(info.settings.annotations, new)}
                await self._ask(home, ConfigureQueue(queue, changes), old.version)
            await self.level(queue)

        await self._known.with_places(queue, work)
        return await self.status(queue)

    async def status(self, queue: str) -> SpreadStatus:
        """How a queue is spread, and how many messages each shard holds."""
        await self._known.describe(queue)

        async def work(places: QueuePlaces | None) -> SpreadStatus:
            spread = Spread() if places is None else places.spread
            shards = [self._known.home(queue)] if places is None else places.every
            version = 0 if places is None else places.version
            found = await every([self._ask(each, Stats(queue), version) for each in shards])
            counts = {shard: each.messages for shard, each in zip(shards, found, strict=True)}
            return SpreadStatus(queue, spread.shards, spread.before, counts)

        return await self._known.with_places(queue, work)

    async def level(self, queue: str) -> None:
        """Gives the settings and the note of the home shard to all other shards of the queue."""
        info = await self._known.describe(queue)
        spread = spread_of(info.settings)
        settings = msgspec.structs.asdict(info.settings)

        async def copy(shard: int) -> None:
            try:
                await self._ask(shard, CreateQueue(queue, settings))
            except QueueExists:
                changes = {name: value for name, value in settings.items() if name != "fifo"}
                await self._ask(shard, ConfigureQueue(queue, changes), spread.version)

        others = places_in(queue, spread, self._shards)[1:]
        await every([copy(each) for each in others])

    async def tend(self, queue: str) -> None:
        """Finishes what a change of the spread began; for the owner of the queue's home shard."""
        with suppress(SpreadChanged, QueueNotFound):
            await self._tend(queue)

    async def _tend(self, queue: str) -> None:
        info = await self._known.describe(queue)
        old = spread_of(info.settings)
        if not old.version:
            return
        every_place = places_in(queue, old, self._shards)
        asked = [self._ask(each, DescribeQueue(queue)) for each in every_place[1:]]
        copies = await asyncio.gather(*asked, return_exceptions=True)
        if any(getattr(each, "settings", None) != info.settings for each in copies):
            await self.level(queue)
        if not old.before or not await self._is_emptied(queue, info, old):
            return
        new = settled(old, self._now_ms())
        changes = {"annotations": noted(info.settings.annotations, new)}
        await self._ask(every_place[0], ConfigureQueue(queue, changes), old.version)
        self._emptied.pop((queue, old.version), None)
        await self.level(queue)
        left = [each for each in every_place if each not in places_in(queue, new, self._shards)]
        await self.remove_from(left, queue, old.version)

    async def tend_copy(self, queue: str, shard: int) -> None:
        """Removes what a change that was broken off has left in a shard; for its owner."""
        spread = Spread(version=1, shards=0)
        with suppress(QueueNotFound):
            spread = spread_of((await self._known.describe(queue)).settings)
        if spread.shards == 0 or shard not in places_in(queue, spread, self._shards):
            with suppress(QueueNotFound):
                version = spread_of((await self._ask(shard, DescribeQueue(queue))).settings).version
                await self.remove_from([shard], queue, version)

    async def _is_emptied(self, queue: str, info: QueueInfo, spread: Spread) -> bool:
        """Whether nothing lies where it lay before the last change, nor can come to lie there.

        In a shard that left, there is no message; in one that stayed, no message of a group that
        belongs elsewhere now: one that was empty since the change takes none any more.
        """
        seen = self._emptied.setdefault((queue, spread.version), set())
        current = set(places_in(queue, Spread(1, spread.shards), self._shards))
        past = places_in(queue, Spread(1, max(spread.before)), self._shards)
        watched = [each for each in past if info.settings.fifo or each not in current]
        missing = [each for each in watched if each not in seen or each not in current]
        asked = [self._ask(each, Stats(queue), spread.version) for each in missing]
        for shard, stats in zip(missing, await every(asked), strict=True):
            if stats.messages == 0:
                seen.add(shard)
            else:
                seen.discard(shard)
        return seen >= set(watched) and may_settle(spread, self._now_ms())
