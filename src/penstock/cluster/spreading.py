"""The commands of one queue, over the shards that it is spread over.

A router knows a queue that is spread only once a shard has refused a request for it; it then asks
the home shard, and again whenever a shard refuses (`spread`). What is not spread costs nothing.

    push       to one shard by its key, or to the next in turn; a batch stays together
    pull       from one shard after another, each time beginning with another one
    wait       in the line of one shard, and watching the others: what becomes visible there ends
               the wait in the line, which may have been served by then, and a pull follows. So a
               pull never holds claims that it does not return
    the rest   in all shards at once; the replies are put together
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

import msgspec

from penstock.clock import SystemClock
from penstock.cluster.asking import PATIENCE_S, OpenWait, ShardAsker
from penstock.cluster.placement import first_shard
from penstock.cluster.serving import end_tasks
from penstock.cluster.spread import (
    NotPlaced,
    QueuePlaces,
    Spread,
    SpreadChanged,
    check_spreadable,
    may_settle,
    merged_order,
    next_spread,
    noted,
    places_by,
    push_key,
    renewed,
    settled,
    spread_of,
    without_note,
)
from penstock.errors import BackendLost, InFlightLimit, PenstockError, QueueExists, QueueNotFound
from penstock.service import (
    BATCH_ITEMS_MAX,
    Claim,
    ConfigureQueue,
    CreateQueue,
    DeleteQueue,
    DescribeQueue,
    Message,
    Peek,
    Pull,
    Purge,
    Push,
    PushMany,
    PushReply,
    QueueInfo,
    QueueStats,
    Stats,
    check_name,
    check_number,
)

R = TypeVar("R")
_RETRY_S: Final = 0.01
_RETRY_S_MAX: Final = 0.25


class SpreadStatus(msgspec.Struct, frozen=True):
    """How a queue is spread: over how many shards, over how many before, what each shard holds."""

    queue: str
    shards: int
    before: tuple[int, ...]
    messages: dict[int, int]


class SpreadQueues:
    """Queues of a cluster, wherever they are."""

    def __init__(self, asker: ShardAsker, shards: int) -> None:
        self._ask = asker.ask
        self._shards = shards
        self._loop = asyncio.get_running_loop()
        self._now_ms = SystemClock().now_ms
        self._known: dict[str, QueuePlaces] = {}
        self._turns = itertools.count()
        # Which shards of a queue were seen empty under a version of its spread.
        self._emptied: dict[tuple[str, int], set[int]] = {}

    def home(self, queue: object) -> int:
        """The home shard of a queue. Raises InvalidField for what is no name."""
        return first_shard(check_name(queue), self._shards)

    def places(self, queue: str) -> QueuePlaces | None:
        """Where a queue is, as far as is known; None if it is only in its home shard."""
        return self._known.get(queue)

    async def describe(self, queue: str) -> QueueInfo:
        """The queue as its home shard describes it, with its note. Raises RequestError."""
        home = self.home(queue)
        try:
            info = await self._ask(home, DescribeQueue(queue))
        except QueueNotFound:
            self._known.pop(queue, None)
            raise
        places = places_by(info, self._shards)
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

    # Pushing.

    async def push(self, command: Push) -> PushReply:
        """Adds a message in the shard where it belongs."""
        home = self.home(command.queue)

        async def work(places: QueuePlaces | None) -> PushReply:
            if places is None:
                return await self._ask(home, command)
            return await self._push_to_places(command, places)

        return await self.with_places(command.queue, work)

    async def _push_to_places(self, command: Push, places: QueuePlaces) -> PushReply:
        key = push_key(places.settings, command)
        offers = [self._turn(places.current)] if key is None else places.places_of(key)
        for place in offers:
            with suppress(NotPlaced):
                return await self._ask(place, command, places.version)
        # The last shard takes it by this version; it is about to have another.
        raise SpreadChanged

    def _turn(self, shards: list[int]) -> int:
        return shards[next(self._turns) % len(shards)]

    async def push_many(self, command: PushMany) -> Any:
        """Adds many messages: together, unless their groups or dedup ids place them."""
        home = self.home(command.queue)

        async def work(places: QueuePlaces | None) -> Any:
            if places is None:
                return await self._ask(home, command)
            pushes = command.pushes()
            if len(pushes) > BATCH_ITEMS_MAX:
                # A shard says what is wrong with it.
                return await self._ask(home, command, places.version)
            if any(push_key(places.settings, each) is not None for each in pushes):
                return None
            return await self._ask(self._turn(places.current), command, places.version)

        return await self.with_places(command.queue, work)

    def place_in_batch(self, item: Push, turns: dict[str, int]) -> tuple[int, int] | None:
        """The shard of a push among others, and the version it is by; None if it goes alone.

        `turns` has the shard that pushes without a key go to, of each queue.
        """
        home = self.home(item.queue)
        places = self._known.get(item.queue)
        if places is None:
            return home, 0
        key = push_key(places.settings, item)
        if key is None:
            if item.queue not in turns:
                turns[item.queue] = self._turn(places.current)
            return turns[item.queue], places.version
        offers = places.places_of(key)
        return (offers[-1], places.version) if len(offers) == 1 else None

    # Pulling.

    async def pull(self, command: Pull) -> list[tuple[int, Claim]]:
        """Claims messages, each with the shard that it is in."""
        home = self.home(command.queue)
        deadline_s: float | None = None

        async def work(places: QueuePlaces | None) -> list[tuple[int, Claim]]:
            nonlocal deadline_s
            wait_ms = command.wait_ms
            if wait_ms is None and places is not None:
                wait_ms = places.settings.wait_ms
            if deadline_s is None and type(wait_ms) is int:
                deadline_s = self._loop.time() + wait_ms / 1_000
            if places is None:
                claims = await self._ask(home, self._still_waiting(command, deadline_s))
                return [(home, claim) for claim in claims]
            return await self._pull_from_places(command, places, deadline_s)

        wait_s = command.wait_ms / 1_000 if type(command.wait_ms) is int else 0.0
        return await self.with_places(command.queue, work, PATIENCE_S + wait_s)

    def _left_ms(self, deadline_s: float | None) -> int:
        return 0 if deadline_s is None else max(0, round((deadline_s - self._loop.time()) * 1_000))

    def _still_waiting(self, command: Pull, deadline_s: float | None) -> Pull:
        """The pull with what is left of its wait."""
        if not command.wait_ms or type(command.wait_ms) is not int:
            return command
        left_ms = min(command.wait_ms, self._left_ms(deadline_s))
        return msgspec.structs.replace(command, wait_ms=left_ms)

    async def _pull_from_places(
        self, command: Pull, places: QueuePlaces, deadline_s: float | None
    ) -> list[tuple[int, Claim]]:
        order = _rotated(places.every, next(self._turns))
        if command.attempt_id is not None:
            known = await self._find_attempt(command, places)
            if known:
                return known
        while True:
            claims = await self._sweep(command, places, order, may_wait=deadline_s is not None)
            if claims or not self._left_ms(deadline_s):
                return claims
            claims, woken = await self._wait(command, places, order, deadline_s)
            if claims or not self._left_ms(deadline_s):
                return claims
            order = _rotated(places.every, places.every.index(woken))

    async def _find_attempt(
        self, command: Pull, places: QueuePlaces
    ) -> list[tuple[int, Claim]] | None:
        """The claims of this attempt in the shard that knows it. Raises AttemptLapsed."""
        look = msgspec.structs.replace(command, wait_ms=0)
        version = places.version
        asked = [self._ask(each, look, version, looks=True) for each in places.every]
        for place, claims in zip(places.every, await every(asked), strict=True):
            if claims:
                return [(place, claim) for claim in claims]
        return None

    async def _sweep(
        self, command: Pull, places: QueuePlaces, order: list[int], may_wait: bool
    ) -> list[tuple[int, Claim]]:
        """Pulls from one shard after another until there is enough, without waiting."""
        found: list[tuple[int, Claim]] = []
        full: InFlightLimit | None = None
        for place in order:
            pull = msgspec.structs.replace(command, wait_ms=0)
            if found:
                pull = msgspec.structs.replace(pull, limit=command.limit - len(found))
            try:
                claims = await self._ask(place, pull, places.version)
            except InFlightLimit as error:
                full = error
                continue
            except (PenstockError, SpreadChanged):
                if found:
                    # What was claimed is not withheld for what is wrong elsewhere.
                    return found
                raise
            found += [(place, claim) for claim in claims]
            is_enough = len(found) >= command.limit
            if found and (is_enough or command.attempt_id or command.bytes_max):
                break
        if full is not None and not found and not may_wait:
            raise full
        return found

    async def _wait(
        self, command: Pull, places: QueuePlaces, order: list[int], deadline_s: float | None
    ) -> tuple[list[tuple[int, Claim]], int]:
        """Waits on all shards: claims from one of them, or which of them should be pulled from."""
        first, *others = order
        pull = msgspec.structs.replace(command, wait_ms=self._left_ms(deadline_s))
        version = places.version
        watches = {
            self._loop.create_task(
                self._ask(each, msgspec.structs.replace(pull, attempt_id=None), version, looks=True)
            ): each
            for each in others
        }
        open_wait = OpenWait()
        line: asyncio.Task[list[Claim]] | None = None
        try:
            # The watches are sent before the pulls that look for what came before them.
            await asyncio.sleep(0)
            claims = await self._sweep(command, places, others, may_wait=True) if others else []
            if claims:
                return claims, first
            line = self._loop.create_task(self._ask(first, pull, version, wait=open_wait))
            done, _ = await asyncio.wait({line, *watches}, return_when=asyncio.FIRST_COMPLETED)
            woken = next((watches[each] for each in done if each is not line), first)
            if line not in done:
                open_wait.end()
            found = [(first, claim) for claim in await line]
            line = None
            for each in done & watches.keys():
                if not found:
                    each.result()
            return found, woken
        finally:
            await self._end(watches.keys() | ({line} if line is not None else set()))

    async def _end(self, tasks: Any) -> None:
        for task in tasks:
            # Its error, if it has one, is of no interest any more.
            task.add_done_callback(_ignore_error)
        await end_tasks(tasks)

    # Looking, and what concerns all shards of a queue.

    async def _in_all(self, command: Any, places: QueuePlaces | None) -> list[Any]:
        if places is None:
            return [await self._ask(self.home(command.queue), command)]
        asked = [self._ask(each, command, places.version) for each in places.every]
        return await every(asked)

    async def peek(self, command: Peek) -> list[Message]:
        """The first messages of all shards, in order of priority and age."""
        self.home(command.queue)
        found = await self.with_places(command.queue, lambda places: self._in_all(command, places))
        if len(found) == 1:
            return found[0]  # type: ignore[no-any-return]
        merged = merged_order(list(itertools.chain.from_iterable(found)))[: command.limit]
        if command.bytes_max is None:
            return merged
        sizes = itertools.accumulate(len(each.body) for each in merged)
        fitting = sum(size <= command.bytes_max for size in sizes)
        return merged[: max(1, fitting)]

    async def stats(self, command: Stats) -> QueueStats:
        """The sum of what the shards count, each at its own instant."""
        self.home(command.queue)
        found: list[QueueStats] = await self.with_places(
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
        """Empties all shards; one that is spread otherwise meanwhile has all emptied again."""
        self.home(command.queue)
        count = 0

        async def work(places: QueuePlaces | None) -> None:
            nonlocal count
            shards = [self.home(command.queue)] if places is None else places.every
            version = 0 if places is None else places.version

            async def empty(shard: int) -> None:
                nonlocal count
                emptied = await self._ask(shard, command, version)
                count += emptied

            await every([empty(each) for each in shards])

        await self.with_places(command.queue, work)
        return count

    # Settings, and the spread itself.

    async def configure(self, command: ConfigureQueue) -> QueueInfo:
        """Changes the settings in the home shard, then in the others."""
        home = self.home(command.queue)

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
                changes["annotations"] = noted(given, renewed(old, self._now_ms()))
            changed = await self._ask(home, ConfigureQueue(command.queue, changes), old.version)
            await self._level(command.queue)
            return changed

        return without_note(await self.with_places(command.queue, work))

    async def create(self, command: CreateQueue) -> QueueInfo:
        """Creates a queue in its home shard; one that exists may be spread."""
        home = self.home(command.queue)
        try:
            return without_note(await self._ask(home, command))
        except QueueExists:
            # Only the note may be what differs.
            info = await self.describe(command.queue)
            spread = spread_of(info.settings)
            given = command.settings.get("annotations")
            if not spread.version or type(given) is not dict:
                raise
            settings = {**command.settings, "annotations": noted(given, spread)}
            return without_note(await self._ask(home, CreateQueue(command.queue, settings)))

    async def remove(self, command: DeleteQueue) -> None:
        """Removes a queue from all its shards; the home shard decides whether it exists."""
        home = self.home(command.queue)
        spread = spread_of((await self.describe(command.queue)).settings)
        if not spread.version:
            await self._ask(home, command)
            return
        others = [
            shard for shard in places_in(command.queue, spread, self._shards) if shard != home
        ]
        await self._remove_from(others, command.queue)
        await self._ask(home, DeleteQueue(command.queue))
        # The home shard's owner may have made them again meanwhile.
        await self._remove_from(others, command.queue)
        self._known.pop(command.queue, None)

    async def _remove_from(self, shards: list[int], queue: str, version: int = 0) -> None:
        async def remove(shard: int) -> None:
            with suppress(QueueNotFound, NotPlaced):
                await self._ask(shard, DeleteQueue(queue), version)

        await every([remove(each) for each in shards])

    async def spread(self, queue: str, shards: int) -> SpreadStatus:
        """Spreads a queue over so many shards. Raises InvalidField, or QueueNotFound."""
        check_number("shards", shards, 1, self._shards)
        home = self.home(queue)

        async def work(places: QueuePlaces | None) -> None:
            info = await self.describe(queue)
            old = spread_of(info.settings)
            if shards > 1:
                check_spreadable(info.settings)
            if old.shards != shards:
                new = next_spread(old, shards, self._now_ms())
                changes = {"annotations": noted(info.settings.annotations, new)}
                await self._ask(home, ConfigureQueue(queue, changes), old.version)
            await self._level(queue)

        await self.with_places(queue, work)
        return await self.status(queue)

    async def status(self, queue: str) -> SpreadStatus:
        """How a queue is spread, and how many messages each shard holds."""
        await self.describe(queue)

        async def work(places: QueuePlaces | None) -> SpreadStatus:
            spread = Spread() if places is None else places.spread
            shards = [self.home(queue)] if places is None else places.every
            found = await self._in_all(Stats(queue), places)
            counts = {shard: each.messages for shard, each in zip(shards, found, strict=True)}
            return SpreadStatus(queue, spread.shards, spread.before, counts)

        return await self.with_places(queue, work)

    async def _level(self, queue: str) -> None:
        """Gives the settings and the note of the home shard to all other shards of the queue."""
        info = await self.describe(queue)
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
        info = await self.describe(queue)
        old = spread_of(info.settings)
        if not old.version:
            return
        every_place = places_in(queue, old, self._shards)
        asked = [self._ask(each, DescribeQueue(queue)) for each in every_place[1:]]
        copies = await asyncio.gather(*asked, return_exceptions=True)
        if any(getattr(each, "settings", None) != info.settings for each in copies):
            await self._level(queue)
        if not old.before or not await self._is_emptied(queue, info, old):
            return
        new = settled(old, self._now_ms())
        changes = {"annotations": noted(info.settings.annotations, new)}
        await self._ask(every_place[0], ConfigureQueue(queue, changes), old.version)
        self._emptied.pop((queue, old.version), None)
        await self._level(queue)
        left = [each for each in every_place if each not in places_in(queue, new, self._shards)]
        await self._remove_from(left, queue, old.version)

    async def tend_copy(self, queue: str, shard: int) -> None:
        """Removes what a change that was broken off has left in a shard; for its owner."""
        spread = Spread(version=1, shards=0)
        with suppress(QueueNotFound):
            spread = spread_of((await self.describe(queue)).settings)
        if spread.shards == 0 or shard not in places_in(queue, spread, self._shards):
            with suppress(QueueNotFound):
                version = spread_of((await self._ask(shard, DescribeQueue(queue))).settings).version
                await self._remove_from([shard], queue, version)

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


def places_in(queue: str, spread: Spread, shards: int) -> list[int]:
    """All shards of a queue that is spread like this; the home shard is the first."""
    first = first_shard(queue, shards)
    return [(first + step) % shards for step in range(min(spread.widest, shards))]


def _rotated(shards: list[int], start: int) -> list[int]:
    start %= len(shards)
    return shards[start:] + shards[:start]


def _ignore_error(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled():
        task.exception()


async def every(works: Any) -> list[Any]:
    """The results of all; if one raises, the others are ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
