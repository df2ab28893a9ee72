"""Work of an owner that concerns other shards: dead letters, and the copies of spread queues.

Both coroutines run as long as the owner serves, and end when their task is cancelled. They use only
their arguments, so that the simulation runs them unchanged.
"""

import asyncio
import itertools
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

from penstock.cluster.placement import first_shard
from penstock.cluster.spread import SpreadGuard
from penstock.errors import PenstockError
from penstock.service import Push

if TYPE_CHECKING:
    from penstock.cluster.answers import ShardAnswers

# How many dead letters are pushed at once, and the pause after one was refused.
_DEPARTURES_MAX: Final = 100
_DEPARTURE_RETRY_S: Final = 1.0
_MAINTENANCE_S: Final = 1.0
# In one of this many rounds, copies of queues are removed that a change of the spread has left.
_STALE_COPIES_EVERY: Final = 10


class OtherShards(Protocol):
    """What an owner needs of other shards; `router.Router` implements it."""

    async def push_dead_letter(self, push: Push, source: str | None) -> None:
        """Pushes a dead letter to its queue; returns once it is durable. Raises PenstockError."""
        ...

    async def finish_spread_change(self, queue: str) -> None:
        """Finishes a change of a queue's spread. Raises PenstockError."""
        ...

    async def remove_stale_copy(self, queue: str, shard: int) -> None:
        """Deletes a queue in a shard that is not in its spread. Raises PenstockError."""
        ...


class ServedShard(Protocol):
    """A shard that a node serves."""

    @property
    def guard(self) -> SpreadGuard:
        """Has the names of the shard's queues that are spread."""
        ...


async def deliver_departures(answers: "ShardAnswers", others: OtherShards) -> None:
    """Pushes dead letters to their shards, and removes each here once it is durable there."""
    engine = answers.engine
    while True:
        await answers.has_departures.wait()
        answers.has_departures.clear()
        try:
            departures = engine.departures(_DEPARTURES_MAX)
            await _until_durable(answers, engine.answer_sequence)
            for each, push in departures:
                queue = engine.shard.queues.get(each.source)
                source = None if queue is None else queue.name
                await others.push_dead_letter(push, source)
                engine.arrived(each.delivery.number, each.delivery.epoch)
            answers.answer_held_back()
        except PenstockError:
            # The other shard moves, or refuses it: it stays in the outbox.
            await asyncio.sleep(_DEPARTURE_RETRY_S)
        if engine.shard.departed.deliveries:
            answers.has_departures.set()


async def _until_durable(answers: "ShardAnswers", sequence: int) -> None:
    done = asyncio.Event()
    answers.journal.notify(sequence, done.set)
    await done.wait()
    answers.journal.wait(sequence)


async def maintain_spread_queues(
    owned: Mapping[int, ServedShard], shards: int, others: OtherShards
) -> None:
    """Finishes changes of the spread of queues, for the shards in `owned`."""
    for turn in itertools.count(1):
        await asyncio.sleep(_MAINTENANCE_S)
        spread = [
            (name, shard) for shard, each in owned.items() for name in sorted(each.guard.names)
        ]
        for name, shard in spread:
            # Another shard moves, or the queue was changed or removed: the next round repeats.
            with suppress(PenstockError):
                if first_shard(name, shards) == shard:
                    await others.finish_spread_change(name)
                elif turn % _STALE_COPIES_EVERY == 0:
                    await others.remove_stale_copy(name, shard)
