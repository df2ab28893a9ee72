"""Changes over how many shards a queue is spread.

The note in the home shard is changed first, by compare-and-set; then the other shards get copies of
it and of the settings. If the process that does this ends in between, the owner of the home shard
finishes the change.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec

from penstock.cluster.known_queues import KnownQueues, gather_all
from penstock.cluster.spread import (
    NotPlaced,
    QueuePlaces,
    Spread,
    SpreadChanged,
    check_spreadable,
    may_drop_past,
    next_spread,
    places_in,
    spread_of,
    with_note,
    without_past,
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
    """The spread of a queue: number of shards, earlier numbers, and messages in each shard."""

    queue: str
    shards: int
    before: tuple[int, ...]
    messages: dict[int, int]


class Respreading:
    """Changes the spread of queues."""

    def __init__(self, known: KnownQueues, now_ms: Callable[[], int]) -> None:
        self._known = known
        self._ask = known.ask
        self._shards = known.shards
        self._now_ms = now_ms
        # By queue and version of its spread: the shards that were empty under that version.
        self._emptied: dict[tuple[str, int], set[int]] = {}

    async def remove_from(self, shards: list[int], queue: str, version: int = 0) -> None:
        """Deletes the queue in these shards; with a version, only where it is empty."""

        async def remove(shard: int) -> None:
            with suppress(QueueNotFound, NotPlaced):
                await self._ask(shard, DeleteQueue(queue), version)

        await gather_all([remove(each) for each in shards])

    async def spread(self, queue: str, shards: int) -> SpreadStatus:
        """Spreads a queue over this many shards. Raises InvalidField or QueueNotFound."""
        check_number("shards", shards, 1, self._shards)
        home = self._known.home(queue)

        async def work(places: QueuePlaces | None) -> None:
            info = await self._known.describe(queue)
            old = spread_of(info.settings)
            if shards > 1:
                check_spreadable(info.settings)
            if old.shards != shards:
                new = next_spread(old, shards, self._now_ms())
                changes = {"annotations": with_note(info.settings.annotations, new)}
                await self._ask(home, ConfigureQueue(queue, changes), old.version)
            await self.copy_to_shards(queue)

        await self._known.with_places(queue, work)
        return await self.status(queue)

    async def status(self, queue: str) -> SpreadStatus:
        """The spread of a queue, and how many messages each shard has."""
        await self._known.describe(queue)

        async def work(places: QueuePlaces | None) -> SpreadStatus:
            spread = Spread() if places is None else places.spread
            shards = [self._known.home(queue)] if places is None else places.all_shards
            version = 0 if places is None else places.version
            found = await gather_all([self._ask(each, Stats(queue), version) for each in shards])
            counts = {shard: each.messages for shard, each in zip(shards, found, strict=True)}
            return SpreadStatus(queue, spread.shards, spread.before, counts)

        return await self._known.with_places(queue, work)

    async def copy_to_shards(self, queue: str) -> None:
        """Copies the settings and the note of the home shard to all other shards of the queue."""
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
        await gather_all([copy(each) for each in others])

    async def finish_spread_change(self, queue: str) -> None:
        """Finishes a change of the spread; called by the owner of the queue's home shard."""
        with suppress(SpreadChanged, QueueNotFound):
            await self._finish_spread_change(queue)

    async def _finish_spread_change(self, queue: str) -> None:
        info = await self._known.describe(queue)
        old = spread_of(info.settings)
        if not old.version:
            return
        all_places = places_in(queue, old, self._shards)
        asked = [self._ask(each, DescribeQueue(queue)) for each in all_places[1:]]
        copies = await asyncio.gather(*asked, return_exceptions=True)
        if any(getattr(each, "settings", None) != info.settings for each in copies):
            await self.copy_to_shards(queue)
        if not old.before or not await self._is_emptied(queue, info, old):
            return
        new = without_past(old, self._now_ms())
        changes = {"annotations": with_note(info.settings.annotations, new)}
        await self._ask(all_places[0], ConfigureQueue(queue, changes), old.version)
        self._emptied.pop((queue, old.version), None)
        await self.copy_to_shards(queue)
        left = [each for each in all_places if each not in places_in(queue, new, self._shards)]
        await self.remove_from(left, queue, old.version)

    async def remove_stale_copy(self, queue: str, shard: int) -> None:
        """Deletes the queue in a shard that an interrupted change has left; called by its owner."""
        spread = Spread(version=1, shards=0)
        with suppress(QueueNotFound):
            spread = spread_of((await self._known.describe(queue)).settings)
        if spread.shards == 0 or shard not in places_in(queue, spread, self._shards):
            with suppress(QueueNotFound):
                version = spread_of((await self._ask(shard, DescribeQueue(queue))).settings).version
                await self.remove_from([shard], queue, version)

    async def _is_emptied(self, queue: str, info: QueueInfo, spread: Spread) -> bool:
        """Whether no message is left that is placed by an earlier spread, nor can be added.

        A shard that no longer belongs to the spread must be empty. In a fifo queue, a shard that
        still belongs to it may have groups that belong to another shard now: it must have been
        empty once since the change, as it takes no new messages of such groups after that.
        """
        seen = self._emptied.setdefault((queue, spread.version), set())
        current = set(places_in(queue, Spread(1, spread.shards), self._shards))
        past = places_in(queue, Spread(1, max(spread.before)), self._shards)
        watched = [each for each in past if info.settings.fifo or each not in current]
        missing = [each for each in watched if each not in seen or each not in current]
        asked = [self._ask(each, Stats(queue), spread.version) for each in missing]
        for shard, stats in zip(missing, await gather_all(asked), strict=True):
            if stats.messages == 0:
                seen.add(shard)
            else:
                seen.discard(shard)
        return seen >= set(watched) and may_drop_past(spread, self._now_ms())
