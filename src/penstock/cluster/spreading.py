"""The commands of one queue that may be spread over several shards.

push       to the shard of its key, or to each shard in turn; a batch goes to one shard
pull       from one shard after another (`pulling`)
settings   in the home shard, then in the others (`respreading`)
others     in all shards at once; the replies are combined
"""

import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from penstock.cluster.asking import ShardAsker
from penstock.cluster.known_queues import KnownQueues, gather_all
from penstock.cluster.pulling import ShardPuller
from penstock.cluster.respreading import Respreading
from penstock.cluster.spread import (
    NotPlaced,
    QueuePlaces,
    SpreadChanged,
    check_spreadable,
    check_without_note,
    dedup_id_of,
    merged_order,
    places_in,
    push_key,
    spread_of,
    with_new_version,
    with_note,
    without_note,
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
    QueueInfo,
    QueueStats,
    Stats,
)


class SpreadQueues:
    """Executes commands on queues in one or several shards."""

    def __init__(self, asker: ShardAsker, shards: int, now_ms: Callable[[], int]) -> None:
        self.known = known = KnownQueues(asker, shards)
        self.changes = changes = Respreading(known, now_ms)
        self.pull = ShardPuller(known).pull
        self.spread, self.status = changes.spread, changes.status
        self.finish_spread_change = changes.finish_spread_change
        self.remove_stale_copy = changes.remove_stale_copy
        self.home, self.places, self.describe = known.home, known.places, known.describe
        self._ask = known.ask
        self._shards = shards
        self._now_ms = now_ms
        self._turns = itertools.count()

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
            sum(each.stored_bytes for each in found),
            max(ages, default=None),
            sum(each.waiting_pulls for each in found),
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
            if changes.get("dedup_per_group") is False and info.settings.fifo:
                check_spreadable(msgspec.structs.replace(info.settings, dedup_per_group=False))
            given = changes.get("annotations", info.settings.annotations)
            if type(given) is dict:
                changes["annotations"] = with_note(given, with_new_version(old, self._now_ms()))
            changed = await self._ask(home, ConfigureQueue(command.queue, changes), old.version)
            await self.changes.copy_to_shards(command.queue)
            return changed

        return without_note(await self.known.with_places(command.queue, work))

    async def create(self, command: CreateQueue) -> QueueInfo:
        """Creates a queue in its home shard, or returns the one that exists with these settings."""
        home = self.home(command.queue)
        check_without_note(command.settings)
        try:
            return without_note(await self._ask(home, command))
        except QueueExists:
            # The settings may differ by the note only.
            info = await self.describe(command.queue)
            spread = spread_of(info.settings)
            given = command.settings.get("annotations")
            if not spread.version or type(given) is not dict:
                raise
            settings = {**command.settings, "annotations": with_note(given, spread)}
            return without_note(await self._ask(home, CreateQueue(command.queue, settings)))

    async def remove(self, command: DeleteQueue) -> None:
        """Deletes a queue in all its shards; in the home shard last, until then it exists."""
        home = self.home(command.queue)
        spread = spread_of((await self.describe(command.queue)).settings)
        if not spread.version:
            await self._ask(home, command)
            return
        others = [
            shard for shard in places_in(command.queue, spread, self._shards) if shard != home
        ]
        await self.changes.remove_from(others, command.queue)
        await self._ask(home, DeleteQueue(command.queue))
        # The owner of the home shard may have created them again meanwhile.
        await self.changes.remove_from(others, command.queue)
        self.known.forget(command.queue)
