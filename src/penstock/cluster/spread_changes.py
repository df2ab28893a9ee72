"""Changes in which shards a queue is: it is spread over several, or moved to another one.

No message is moved. The shards that the queue leaves accept no new messages, except those of groups
that they have, and pulls empty them; then the queue is removed there. The note in the home shard is
changed first, by compare-and-set; then the other shards get copies of it and of the settings. If
the process that does this ends in between, the owner of the home shard finishes the change.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from penstock.cluster.known_queues import KnownQueues, gather_all
from penstock.cluster.spread_rules import (
    UNSPREAD,
    NotPlaced,
    QueuePlaces,
    Spread,
    SpreadChanged,
    check_spreadable,
    may_drop_past,
    next_spread,
    places_at,
    places_in,
    shards_at,
    shards_left,
    spread_of,
    with_note,
    without_past,
)
from penstock.errors import InvalidField, QueueExists, QueueNotFound
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
    """The shards of a queue, those that it leaves, and how many messages each shard has."""

    queue: str
    shards: tuple[int, ...]
    before: tuple[int, ...]
    messages: dict[int, int]


class SpreadChanges:
    """Changes the spread of queues."""

    def __init__(self, known: KnownQueues, now_ms: Callable[[], int]) -> None:
        self._known = known
        self._ask = known.ask
        self._now_ms = now_ms
        # By queue: the version of its spread, and the shards that were empty under that version.
        self._emptied: dict[str, tuple[int, set[int]]] = {}
        # By queue: what a change waits for, as found at the last look. It is a shard that has
        # messages, or the end of the dedup window.
        self._waits: dict[str, tuple[Spread, int | None]] = {}

    async def remove_from(self, shards: list[int], queue: str, version: int = 0) -> None:
        """Deletes the queue in these shards; with a version, only where it is empty."""

        async def remove(shard: int) -> None:
            with suppress(QueueNotFound, NotPlaced):
                await self._ask(shard, DeleteQueue(queue), version)

        await gather_all([remove(each) for each in shards])

    async def spread(self, queue: str, shards: int) -> SpreadStatus:
        """Spreads a queue over this many shards, from the first one that it is in.

        Raises InvalidField or QueueNotFound.
        """
        count = self._known.settings.shards
        check_number("shards", shards, 1, count)

        def choose(current: list[int], _: Spread) -> list[int]:
            return [(current[0] + step) % count for step in range(shards)]

        await self._change(queue, choose)
        return await self.status(queue)

    async def move(self, queue: str, to: Sequence[int]) -> SpreadStatus:
        """Moves a queue to these shards. Raises InvalidField or QueueNotFound."""
        for each in to:
            check_number("to", each, 0, self._known.settings.shards - 1)
        if not to or len(set(to)) < len(to):
            raise InvalidField("to: name at least one shard, and none of them twice")
        await self._change(queue, lambda current, spread: [*to])
        return await self.status(queue)

    async def place(self, queue: str) -> None:
        """Moves a queue to the shard that it belongs to, unless it was placed by hand.

        Raises QueueNotFound.
        """

        def choose(current: list[int], spread: Spread) -> list[int]:
            return current if spread.is_by_hand else [self._known.belongs_to(queue)]

        await self._change(queue, choose)

    async def _change(self, queue: str, choose: Callable[[list[int], Spread], list[int]]) -> None:
        """Has a queue be in other shards; `choose` gives them for those that it is in."""
        home = self._known.home(queue)

        async def work(_: QueuePlaces | None) -> None:
            info = await self._known.describe(queue)
            old = spread_of(info.settings)
            chosen = choose(shards_at(queue, old.shards, self._known.homes), old)
            if len(chosen) > 1:
                check_spreadable(info.settings)
            places = places_at(queue, chosen, self._known.homes)
            is_by_hand = chosen != [self._known.belongs_to(queue)]
            if (old.shards, old.by_hand) != (places, is_by_hand):
                new = next_spread(old, places, self._now_ms(), is_by_hand)
                changes = {"annotations": with_note(info.settings.annotations, new)}
                await self._ask(home, ConfigureQueue(queue, changes), old.version)
            await self.copy_to_shards(queue)

        await self._known.with_places(queue, work)

    async def status(self, queue: str) -> SpreadStatus:
        """The spread of a queue, and how many messages each shard has."""
        await self._known.describe(queue)

        async def work(places: QueuePlaces | None) -> SpreadStatus:
            spread = UNSPREAD if places is None else places.spread
            shards = places_in(queue, spread, self._known.homes)
            asked = [self._ask(each, Stats(queue), spread.version) for each in shards]
            found = await gather_all(asked)
            counts = {shard: each.messages for shard, each in zip(shards, found, strict=True)}
            current = shards_at(queue, spread.shards, self._known.homes)
            before = shards_left(queue, spread, self._known.homes)
            return SpreadStatus(queue, (*current,), (*before,), counts)

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

        await gather_all([copy(each) for each in self.copies(queue, spread)])

    def copies(self, queue: str, spread: Spread) -> list[int]:
        """The shards that have a copy of the note."""
        home = self._known.home(queue)
        return [each for each in places_in(queue, spread, self._known.homes) if each != home]

    async def finish_spread_change(self, queue: str, version: int) -> bool:
        """Finishes a change of the spread; called by the owner of the queue's home shard.

        `version` is that of the note in the home shard. Returns whether nothing is left to do,
        until the spread is changed again.
        """
        with suppress(SpreadChanged, QueueNotFound):
            if not await self._still_waits(queue, version):
                return await self._finish_spread_change(queue)
        return False

    async def _still_waits(self, queue: str, version: int) -> bool:
        """Whether the change still waits for what it waited for at the last look.

        All else was looked at then. Stats append nothing, unlike the other requests of a look:
        messages may stay in a shard for days, and an idle cluster is to append nothing.
        """
        spread, shard = self._waits.pop(queue, (UNSPREAD, None))
        if spread.version != version:
            return False
        if shard is None:
            waits = not may_drop_past(spread, self._now_ms())
        else:
            waits = (await self._ask(shard, Stats(queue), version)).messages > 0
        if waits:
            self._waits[queue] = spread, shard
        return waits

    async def _finish_spread_change(self, queue: str) -> bool:
        info = await self._known.describe(queue)
        old = spread_of(info.settings)
        if not old.version:
            return True
        others = self.copies(queue, old)
        asked = [self._ask(each, DescribeQueue(queue)) for each in others]
        copies = await asyncio.gather(*asked, return_exceptions=True)
        if any(getattr(each, "settings", None) != info.settings for each in copies):
            await self.copy_to_shards(queue)
        if not old.before:
            return True
        if not await self._is_emptied(queue, info, old):
            return False
        new = without_past(old, self._now_ms())
        changes = {"annotations": with_note(info.settings.annotations, new)}
        await self._ask(self._known.home(queue), ConfigureQueue(queue, changes), old.version)
        self._emptied.pop(queue, None)
        await self.copy_to_shards(queue)
        left = [each for each in others if each not in self.copies(queue, new)]
        await self.remove_from(left, queue, old.version)
        return False

    async def remove_stale_copy(self, queue: str, shard: int) -> None:
        """Deletes the queue in a shard that an interrupted change has left; called by its owner."""
        # The copy is read first: one that is made in between has a later version, and stays.
        try:
            copy = await self._ask(shard, DescribeQueue(queue))
        except QueueNotFound:
            return
        places: list[int] = []
        with suppress(QueueNotFound):
            spread = spread_of((await self._known.describe(queue)).settings)
            places = places_in(queue, spread, self._known.homes)
        if shard not in places:
            await self.remove_from([shard], queue, spread_of(copy.settings).version)

    async def _is_emptied(self, queue: str, info: QueueInfo, spread: Spread) -> bool:
        """Whether no message is left that is placed by an earlier spread, nor can be added.

        A shard that no longer belongs to the spread must be empty. In a fifo queue, a shard that
        still belongs to it may have groups that belong to another shard now: it must have been
        empty once since the change, as it takes no new messages of such groups after that.
        """
        version, seen = self._emptied.get(queue, (0, set()))
        if version != spread.version:
            seen = set()
            self._emptied[queue] = spread.version, seen
        current = set(shards_at(queue, spread.shards, self._known.homes))
        past = shards_left(queue, spread, self._known.homes)
        watched = [each for each in past if info.settings.fifo or each not in current]
        missing = [each for each in watched if each not in seen or each not in current]
        asked = [self._ask(each, Stats(queue), spread.version, watch_only=True) for each in missing]
        for shard, stats in zip(missing, await gather_all(asked), strict=True):
            if stats.messages == 0:
                seen.add(shard)
            else:
                seen.discard(shard)
        left = [each for each in watched if each not in seen]
        if not left and may_drop_past(spread, self._now_ms()):
            return True
        self._waits[queue] = spread, left[0] if left else None
        return False
