"""The commands of one queue that may be in other shards than its home shard, and in several.

push       to the shard of its key, or to each shard in turn; a batch goes to one shard
pull       from one shard after another (`spread_pulls`)
settings   in the home shard, then in the others (`spread_changes`)
others     in all shards at once; the replies are combined
"""

import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from penstock.cluster.known_queues import KnownQueues, gather_all
from penstock.cluster.membership import ClusterSettings
from penstock.cluster.shard_client import ShardClient
from penstock.cluster.spread_changes import SpreadChanges
from penstock.cluster.spread_pulls import SpreadPulls
from penstock.cluster.spread_rules import (
    UNSPREAD,
    NotPlaced,
    QueuePlaces,
    Spread,
    SpreadChanged,
    check_spreadable,
    check_without_note,
    dedup_id_of,
    merged_order,
    next_spread,
    push_key,
    spread_of,
    with_new_version,
    with_note,
    without_note,
    without_past,
)
from penstock.errors import QueueExists, RequestError
from penstock.service import (
    BATCH_ITEMS_MAX,
    ConfigureQueue,
    CreateQueue,
    DeleteQueue,
    Message,
    Peek,
    Purge,
    Push,
    PushMany,
    PushReply,
    QueueCounts,
    QueueInfo,
    QueueStats,
    Stats,
)


class SpreadQueues:
    """Executes commands on queues in one or several shards."""

    def __init__(
        self,
        shard_client: ShardClient,
        settings: ClusterSettings,
        now_ms: Callable[[], int],
        first_turn: int,
    ) -> None:
        """`first_turn` is random: routers that live for one command must not all begin alike."""
        self.known = known = KnownQueues(shard_client, settings)
        self.changes = changes = SpreadChanges(known, now_ms)
        self.pull = SpreadPulls(known, first_turn).pull
        self.spread, self.move, self.status = changes.spread, changes.move, changes.status
        self.finish_spread_change = changes.finish_spread_change
        self.remove_stale_copy = changes.remove_stale_copy
        self.home, self.places, self.describe = known.home, known.places, known.describe
        self._ask = known.ask
        self._now_ms = now_ms
        self._turns = itertools.count(first_turn)

    # Pushing.

    async def push(self, command: Push) -> PushReply:
        """Adds a message in the shard of its key."""
        home = self.home(command.queue)

        async def work(places: QueuePlaces | None) -> PushReply:
            if places is None:
                return await self._ask(home, command)
            return await self._push_to_places(command, places)

        return await self.known.with_places(command.queue, work)

    async def _push_to_places(self, command: Push, places: QueuePlaces) -> PushReply:
        key = push_key(places.settings, command)
        offers = [self._turn(places.current)] if key is None else places.places_of(key)
        if len(offers) > 1 and places.settings.fifo:
            known = await self._find_push(command, offers[1:], places)
            if known is not None:
                return known
        for place in offers:
            with suppress(NotPlaced):
                return await self._ask(place, command, places.version, alone=len(offers) > 1)
        # With this version the last shard would have accepted it: the version has changed.
        raise SpreadChanged

    async def _find_push(
        self, command: Push, shards: list[int], places: QueuePlaces
    ) -> PushReply | None:
        """The reply to a push that is sent again, from the one of these shards that knows it.

        The messages of its group may be in another shard by now, which would take it as new.
        """
        # A content is named as the id that it stands for: a push with an id may be asked for again.
        dedup_id = dedup_id_of(places.settings, command)
        if dedup_id is None:
            return None
        looked_for = msgspec.structs.replace(command, dedup_id=dedup_id)

        async def look(shard: int) -> PushReply | None:
            # One that cannot be a push is refused by the shard that it is offered to.
            with suppress(NotPlaced, RequestError):
                return await self._ask(
                    shard, looked_for, places.version, watch_only=True, alone=True
                )
            return None

        found = await gather_all([look(each) for each in shards])
        return next((each for each in found if each is not None), None)

    def _turn(self, shards: list[int]) -> int:
        return shards[next(self._turns) % len(shards)]

    async def push_many(self, command: PushMany) -> Any:
        """Adds many messages in one shard; returns None if they have keys and must be separated."""
        home = self.home(command.queue)

        async def work(places: QueuePlaces | None) -> Any:
            if places is None:
                return await self._ask(home, command)
            pushes = command.pushes()
            if len(pushes) > BATCH_ITEMS_MAX:
                # The shard refuses it with the proper error.
                return await self._ask(home, command, places.version)
            if any(push_key(places.settings, each) is not None for each in pushes):
                return None
            return await self._ask(self._turn(places.current), command, places.version)

        return await self.known.with_places(command.queue, work)

    def place_in_batch(self, item: Push, turns: dict[str, int]) -> tuple[int, int] | None:
        """The shard of a push in a batch and the version; None if it must be sent alone.

        `turns` has, for each queue, the shard of pushes without a key in this batch.
        """
        home = self.home(item.queue)
        places = self.known.places(item.queue)
        if places is None:
            return home, 0
        key = push_key(places.settings, item)
        if key is None:
            if item.queue not in turns:
                turns[item.queue] = self._turn(places.current)
            return turns[item.queue], places.version
        offers = places.places_of(key)
        return (offers[-1], places.version) if len(offers) == 1 else None

    # Commands that concern all shards of a queue.

    async def _in_all(self, command: Any, places: QueuePlaces | None) -> list[Any]:
        if places is None:
            return [await self._ask(self.home(command.queue), command)]
        asked = [self._ask(each, command, places.version) for each in places.all_shards]
        return await gather_all(asked)

    async def peek(self, command: Peek) -> list[Message]:
        """The first messages of all shards, sorted by priority and age."""
        self.home(command.queue)
        found = await self.known.with_places(
            command.queue, lambda places: self._in_all(command, places)
        )
        if len(found) == 1:
            return found[0]  # type: ignore[no-any-return]
        merged = merged_order(list(itertools.chain.from_iterable(found)))[: command.limit]
        if command.bytes_max is None:
            return merged
        sizes = itertools.accumulate(len(each.body) for each in merged)
        fitting = sum(size <= command.bytes_max for size in sizes)
        return merged[: max(1, fitting)]

    async def stats(self, command: Stats) -> QueueStats:
        """The sum of the counts of all shards, each taken at its own instant."""
        self.home(command.queue)
        found: list[QueueStats] = await self.known.with_places(
            command.queue, lambda places: self._in_all(command, places)
        )
        ages = [each.oldest_age_ms for each in found if each.oldest_age_ms is not None]
        return QueueStats(
            command.queue,
            sum(each.visible for each in found),
            sum(each.delayed for each in found),
            sum(each.in_flight for each in found),
            sum(each.stored_bytes or 0 for each in found),
            max(ages, default=None),
            sum(each.waiting_pulls for each in found),
            _added([each.counts for each in found if each.counts is not None]),
            any(each.paused for each in found),
        )

    async def purge(self, command: Purge) -> int:
        """Empties all shards; if the spread changes meanwhile, all shards of the new one."""
        self.home(command.queue)
        count = 0

        async def work(places: QueuePlaces | None) -> None:
            nonlocal count
            shards = [self.home(command.queue)] if places is None else places.all_shards
            version = 0 if places is None else places.version

            async def empty(shard: int) -> None:
                nonlocal count
                emptied = await self._ask(shard, command, version)
                count += emptied

            await gather_all([empty(each) for each in shards])

        await self.known.with_places(command.queue, work)
        return count

    # Settings.

    async def configure(self, command: ConfigureQueue) -> QueueInfo:
        """Changes the settings in the home shard, then in the others."""
        home = self.home(command.queue)
        check_without_note(command.settings)

        async def work(places: QueuePlaces | None) -> QueueInfo:
            if places is None or type(command.settings) is not dict:
                version = 0 if places is None else places.version
                return await self._ask(home, command, version)
            info = await self.describe(command.queue)
            old = spread_of(info.settings)
            changes = dict(command.settings)
            if changes.get("dedup_per_group") is False and places.has_several:
                check_spreadable(msgspec.structs.replace(info.settings, dedup_per_group=False))
            given = changes.get("annotations", info.settings.annotations)
            if type(given) is dict:
                changes["annotations"] = with_note(given, with_new_version(old, self._now_ms()))
            changed = await self._ask(home, ConfigureQueue(command.queue, changes), old.version)
            await self.changes.copy_to_shards(command.queue)
            return changed

        return without_note(await self.known.with_places(command.queue, work))

    async def create(self, command: CreateQueue) -> QueueInfo:
        """Creates a queue, or returns the one that exists with these settings.

        It is made in its home shard; if it belongs to another one, with the note that says so.
        """
        home = self.home(command.queue)
        check_without_note(command.settings)
        first = await self._first_spread(command.queue)
        try:
            info = await self._ask(home, _noted(command, first) if first.version else command)
        except QueueExists:
            # The settings may differ by the note only.
            info = await self.describe(command.queue)
            spread = spread_of(info.settings)
            if not spread.version and not first.version:
                raise
            is_noted = "annotations" in command.settings
            again = _noted(command, spread) if is_noted else command
            return without_note(await self._ask(home, again))
        if first.version:
            await self.changes.copy_to_shards(command.queue)
        return without_note(info)

    async def _first_spread(self, queue: str) -> Spread:
        """The note of a queue that is created now."""
        if self.known.settings.created_shards:
            # It may have grown further.
            await self.known.read_settings()
        belongs_to = self.known.belongs_to(queue)
        if belongs_to == self.home(queue):
            return UNSPREAD
        now_ms = self._now_ms()
        return without_past(next_spread(UNSPREAD, (belongs_to,), now_ms), now_ms)

    async def remove(self, command: DeleteQueue) -> None:
        """Deletes a queue in all its shards; in the home shard last, until then it exists."""
        home = self.home(command.queue)
        spread = spread_of((await self.describe(command.queue)).settings)
        if not spread.version:
            await self._ask(home, command)
            return
        others = self.changes.copies(command.queue, spread)
        await self.changes.remove_from(others, command.queue)
        await self._ask(home, DeleteQueue(command.queue))
        # The owner of the home shard may have created them again meanwhile.
        await self.changes.remove_from(others, command.queue)
        self.known.forget(command.queue)


def _added(counts: list[QueueCounts]) -> QueueCounts | None:
    """What happened in all shards of a queue."""
    if not counts:
        return None
    return QueueCounts(*map(sum, zip(*map(msgspec.structs.astuple, counts), strict=True)))


def _noted(command: CreateQueue, spread: Spread) -> CreateQueue:
    """The creation of a queue with this note; an invalid one is left for the shard to refuse."""
    settings: Any = command.settings
    given = settings.get("annotations", {}) if type(settings) is dict else None
    if type(given) is not dict:
        return command
    return CreateQueue(command.queue, {**settings, "annotations": with_note(given, spread)})
