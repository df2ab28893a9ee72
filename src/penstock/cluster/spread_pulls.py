"""Pulls from a queue that may be in several shards.

A pull asks one shard after another until it has enough messages, and begins with another shard each
time. If there are none, it waits in one shard and watches the others, which claims nothing. When a
message becomes visible in a watched shard, the wait is ended, and the pull asks the shards again.
So a pull never has claims that it does not return; a pull that is cancelled releases those it has.
"""

import asyncio
import itertools
from typing import Any

import msgspec

from penstock.backends.remote.pulls import rest_of
from penstock.cluster.known_queues import KnownQueues, gather_all
from penstock.cluster.owned_shard import end_tasks
from penstock.cluster.retry import COMMAND_TIMEOUT_S
from penstock.cluster.shard_client import OpenWait, ShardClient
from penstock.cluster.spread_rules import QueuePlaces, SpreadChanged
from penstock.errors import InFlightLimit, PenstockError
from penstock.service import WAIT_MS_MAX, Claim, Pull, check_number


async def pull_from_shard(
    shard_client: ShardClient,
    shard: int,
    pull: Pull,
    version: int = 0,
    wait: OpenWait | None = None,
) -> list[Claim]:
    """Pulls from one shard; asks again while the owner's answer was cut for its size."""
    claims = await shard_client.ask(shard, pull, version, wait=wait)
    rest = rest_of(pull, claims, len(claims))
    while rest is not None:
        try:
            more = await shard_client.ask(shard, rest, version)
        except (PenstockError, SpreadChanged):
            # The claims that were made are returned.
            break
        except asyncio.CancelledError:
            shard_client.release(shard, claims)
            raise
        claims += more
        rest = rest_of(pull, more, len(claims))
    return claims


class SpreadPulls:
    """Pulls from the shards of queues."""

    def __init__(self, known: KnownQueues, first_turn: int) -> None:
        self._known = known
        self._shard_client = known.shard_client
        self._ask = known.ask
        self._loop = asyncio.get_running_loop()
        self._turns = itertools.count(first_turn)

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
                pull = self._still_waiting(command, deadline_s)
                claims = await pull_from_shard(self._shard_client, home, pull)
                return [(home, claim) for claim in claims]
            return await self._pull_from_places(command, places, deadline_s)

        timeout_s = COMMAND_TIMEOUT_S + _seconds(command.wait_ms)
        return await self._known.with_places(command.queue, work, timeout_s)

    def _left_ms(self, deadline_s: float) -> int:
        return max(0, round((deadline_s - self._loop.time()) * 1_000))

    def _still_waiting(self, command: Pull, deadline_s: float) -> Pull:
        """The pull with the rest of its wait; an invalid wait is left for the shard to refuse."""
        if not _seconds(command.wait_ms):
            return command
        assert command.wait_ms is not None
        left_ms = min(command.wait_ms, self._left_ms(deadline_s))
        return msgspec.structs.replace(command, wait_ms=left_ms)

    async def _pull_from_places(
        self, command: Pull, places: QueuePlaces, deadline_s: float
    ) -> list[tuple[int, Claim]]:
        order = _rotated(places.all_shards, next(self._turns))
        if len(places.current) == 1:
            # It is being moved: the messages that it had before are the first.
            order = places.all_shards
        if command.attempt_id is not None:
            known = await self._find_attempt(command, places)
            if known:
                return known
        while True:
            may_wait = self._left_ms(deadline_s) > 0
            claims = await self._sweep(command, places, order, may_wait=may_wait)
            if claims or not self._left_ms(deadline_s):
                return claims
            # New messages only come to a current shard.
            line = next(each for each in order if each in places.current)
            claims, woken = await self._wait(command, places, order, line, deadline_s)
            if claims or woken is None:
                return claims
            order = _rotated(places.all_shards, places.all_shards.index(woken))

    async def _find_attempt(
        self, command: Pull, places: QueuePlaces
    ) -> list[tuple[int, Claim]] | None:
        """The claims of an earlier pull with this attempt id, if any. Raises AttemptLapsed."""
        repeated = msgspec.structs.replace(command, wait_ms=0)
        version = places.version
        asked = [self._ask(each, repeated, version, watch_only=True) for each in places.all_shards]
        for place, claims in zip(places.all_shards, await gather_all(asked), strict=True):
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
                claims = await pull_from_shard(self._shard_client, place, pull, places.version)
            except InFlightLimit as error:
                full = error
                continue
            except (PenstockError, SpreadChanged):
                if found:
                    # The claims are returned although another shard has failed.
                    return found
                raise
            except asyncio.CancelledError:
                self._release(command, found)
                raise
            found += [(place, claim) for claim in claims]
            is_enough = len(found) >= command.limit
            if found and (is_enough or command.attempt_id or command.bytes_max):
                break
        if full is not None and not found and not may_wait:
            raise full
        return found

    async def _wait(
        self, command: Pull, places: QueuePlaces, order: list[int], first: int, deadline_s: float
    ) -> tuple[list[tuple[int, Claim]], int | None]:
        """Waits in the first of these shards, and watches the others; returns claims, or the shard
        in which a message became visible. Returns neither after the deadline.
        """
        others = [each for each in order if each != first]
        left_ms = self._left_ms(deadline_s)
        pull = msgspec.structs.replace(command, wait_ms=left_ms)
        # The pull that waits ends at the deadline. The watches must end later: one that ends means
        # that a message became visible.
        watch_ms = min(2 * left_ms + 1_000, WAIT_MS_MAX)
        watch = Pull(command.queue, wait_ms=watch_ms)
        version = places.version
        watches = {
            self._loop.create_task(self._ask(each, watch, version, watch_only=True)): each
            for each in others
        }
        open_wait = OpenWait()
        waiting: asyncio.Task[list[Claim]] | None = None
        found: list[tuple[int, Claim]] = []
        try:
            # The watches must be sent first, or a message could arrive between sweep and watch.
            await asyncio.sleep(0)
            found = await self._sweep(command, places, others, may_wait=True) if others else []
            if found:
                return found, first
            waiting = self._loop.create_task(
                pull_from_shard(self._shard_client, first, pull, version, open_wait)
            )
            done, _ = await asyncio.wait({waiting, *watches}, return_when=asyncio.FIRST_COMPLETED)
            # In the order in which they were sent: a set has none.
            woken = next((place for each, place in watches.items() if each in done), None)
            if waiting not in done:
                open_wait.end()
            found = [(first, claim) for claim in await waiting]
            waiting = None
            for each in watches:
                if each in done and not found:
                    each.result()
            return found, woken
        finally:
            try:
                await self._end([*watches, *([waiting] if waiting is not None else [])])
            except asyncio.CancelledError:
                # This pull was cancelled with claims that it was about to return.
                self._release(command, found)
                raise
            finally:
                if waiting is not None and _has_claims(waiting):
                    # This pull was cancelled after its wait had ended with claims.
                    self._release(command, [(first, claim) for claim in waiting.result()])

    def _release(self, command: Pull, claims: list[tuple[int, Claim]]) -> None:
        """Releases claims that no caller gets; with an attempt id, they stay for its next pull."""
        if command.attempt_id is None:
            for shard in dict.fromkeys(shard for shard, _ in claims):
                self._shard_client.release(
                    shard, [claim for place, claim in claims if place == shard]
                )

    async def _end(self, tasks: Any) -> None:
        for task in tasks:
            task.add_done_callback(_ignore_error)
        await end_tasks(tasks)


def _rotated(shards: list[int], start: int) -> list[int]:
    start %= len(shards)
    return shards[start:] + shards[:start]


def _seconds(wait_ms: Any) -> float:
    """How long a pull may wait; 0 if the value is invalid."""
    return wait_ms / 1_000 if type(wait_ms) is int and 0 <= wait_ms <= WAIT_MS_MAX else 0.0


def _has_claims(task: "asyncio.Task[list[Claim]]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _ignore_error(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled():
        task.exception()
