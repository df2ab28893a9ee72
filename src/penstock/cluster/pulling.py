"""Pulls from a queue that may be in several shards.

A pull takes from one shard after another until it has enough, and begins with another one each
time. It waits in the line of one shard and watches the others: what becomes visible there ends the
wait in the line, which may have been served by then, and a pull follows. So a pull never holds
claims that it does not return.
"""

import asyncio
import itertools
from typing import Any

import msgspec

from penstock.cluster.asking import OpenWait
from penstock.cluster.attempts import PATIENCE_S
from penstock.cluster.known import KnownQueues, every
from penstock.cluster.serving import end_tasks
from penstock.cluster.spread import QueuePlaces, SpreadChanged
from penstock.errors import InFlightLimit, PenstockError
from penstock.service import WAIT_MS_MAX, Claim, Pull, check_number


class ShardPuller:
    """Pulls from queues wherever they are."""

    def __init__(self, known: KnownQueues) -> None:
        self._known = known
        self._ask = known.ask
        self._loop = asyncio.get_running_loop()
        self._turns = itertools.count()

    async def pull(self, command: Pull) -> list[tuple[int, Claim]]:
        """Claims messages, each with the shard that it is in."""
        home = self._known.home(command.queue)
        deadline_s: float | None = None
        if self._known.places(command.queue) is not None and command.wait_ms is not None:
            check_number("wait_ms", command.wait_ms, 0, WAIT_MS_MAX)

        async def work(places: QueuePlaces | None) -> list[tuple[int, Claim]]:
            nonlocal deadline_s
            wait_ms = command.wait_ms
            if wait_ms is None and places is not None:
                wait_ms = places.settings.wait_ms
            if deadline_s is None:
                deadline_s = self._loop.time() + _seconds(wait_ms)
            if places is None:
                claims = await self._ask(home, self._still_waiting(command, deadline_s))
                return [(home, claim) for claim in claims]
            return await self._pull_from_places(command, places, deadline_s)

        patience_s = PATIENCE_S + _seconds(command.wait_ms)
        return await self._known.with_places(command.queue, work, patience_s)

    def _left_ms(self, deadline_s: float) -> int:
        return max(0, round((deadline_s - self._loop.time()) * 1_000))

    def _still_waiting(self, command: Pull, deadline_s: float) -> Pull:
        """The pull with what is left of its wait; a shard says what is wrong with another."""
        if not _seconds(command.wait_ms):
            return command
        assert command.wait_ms is not None
        left_ms = min(command.wait_ms, self._left_ms(deadline_s))
        return msgspec.structs.replace(command, wait_ms=left_ms)

    async def _pull_from_places(
        self, command: Pull, places: QueuePlaces, deadline_s: float
    ) -> list[tuple[int, Claim]]:
        order = _rotated(places.every, next(self._turns))
        if command.attempt_id is not None:
            known = await self._find_attempt(command, places)
            if known:
                return known
        while True:
            may_wait = self._left_ms(deadline_s) > 0
            claims = await self._sweep(command, places, order, may_wait=may_wait)
            if claims or not self._left_ms(deadline_s):
                return claims
            claims, woken = await self._wait(command, places, order, deadline_s)
            if claims or woken is None:
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
        self, command: Pull, places: QueuePlaces, order: list[int], deadline_s: float
    ) -> tuple[list[tuple[int, Claim]], int | None]:
        """Waits on all shards: claims from one of them, or which of them should be pulled from.

        Neither if the time is over.
        """
        first, *others = order
        left_ms = self._left_ms(deadline_s)
        pull = msgspec.structs.replace(command, wait_ms=left_ms)
        # When the time is over, the line says so; a watch that ends means that there is something.
        watch_ms = min(2 * left_ms + 1_000, WAIT_MS_MAX)
        watch = Pull(command.queue, wait_ms=watch_ms)
        version = places.version
        watches = {
            self._loop.create_task(self._ask(each, watch, version, looks=True)): each
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
            # In the order in which they were sent: a set has none.
            woken = next((place for each, place in watches.items() if each in done), None)
            if line not in done:
                open_wait.end()
            found = [(first, claim) for claim in await line]
            line = None
            for each in watches:
                if each in done and not found:
                    each.result()
            return found, woken
        finally:
            await self._end([*watches, *([line] if line is not None else [])])

    async def _end(self, tasks: Any) -> None:
        for task in tasks:
            # Its error, if it has one, is of no interest any more.
            task.add_done_callback(_ignore_error)
        await end_tasks(tasks)


def _rotated(shards: list[int], start: int) -> list[int]:
    start %= len(shards)
    return shards[start:] + shards[:start]


def _seconds(wait_ms: Any) -> float:
    """How long a pull may wait; none for what is no such time."""
    return wait_ms / 1_000 if type(wait_ms) is int and 0 <= wait_ms <= WAIT_MS_MAX else 0.0


def _ignore_error(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled():
        task.exception()
