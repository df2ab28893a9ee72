"""What the owner of a shard does in other shards: dead letters, and the copies of spread queues.

Both run beside an owner for as long as it serves, and end when their task is cancelled. They use
nothing of a node but what they are given, so that a simulation runs them as they are.
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
    from penstock.cluster.serving import ShardAnswers

# How many departures are carried at once, and how long a refused one is left alone.
_CARRIED_MAX: Final = 100
_CARRY_AGAIN_S: Final = 1.0
_TEND_S: Final = 1.0
# Of so many turns one looks for what a change of a queue's spread has left in a shard.
_TEND_COPIES: Final = 10


class Carrier(Protocol):
    """Brings a message to another shard: `router.Router` does."""

    async def push_to(self, push: Push, source: str | None) -> None:
        """Returns once the message is durable there. Raises PenstockError."""
        ...

    async def tend(self, queue: str) -> None:
        """Brings the shards of a spread queue to what its home shard says. Raises PenstockError."""
        ...

    async def tend_copy(self, queue: str, shard: int) -> None:
        """Removes a spread queue from a shard that it is not in. Raises PenstockError."""
        ...


class ServedShard(Protocol):
    """A shard in the hands of its owner."""

    @property
    def guard(self) -> SpreadGuard:
        """Knows which of the shard's queues are spread."""
        ...


async def carry_departures(answers: "ShardAnswers", carrier: Carrier) -> None:
    """Brings what departed to the other shards, and ends it here once it is durable there."""
    engine = answers.engine
    while True:
        await answers.has_departures.wait()
        answers.has_departures.clear()
        try:
            owed = engine.departures(_CARRIED_MAX)
            await _until_durable(answers, engine.answer_sequence)
            for each, push in owed:
                queue = engine.shard.queues.get(each.source)
                source = None if queue is None else queue.name
                await carrier.push_to(push, source)
                engine.arrived(each.delivery.number, each.delivery.epoch)
            answers.answer_held_back()
        except PenstockError:
            # The other shard moves, or refuses it: it stays owed.
            await asyncio.sleep(_CARRY_AGAIN_S)
        if engine.shard.departed.deliveries:
            answers.has_departures.set()


async def _until_durable(answers: "ShardAnswers", sequence: int) -> None:
    done = asyncio.Event()
    answers.journal.notify(sequence, done.set)
    await done.wait()
    answers.journal.wait(sequence)


async def tend_spread_queues(
    owned: Mapping[int, ServedShard], shards: int, carrier: Carrier
) -> None:
    """Keeps the shards of each spread queue whose home shard is in `owned` as they should be."""
    for turn in itertools.count(1):
        await asyncio.sleep(_TEND_S)
        spread = [
            (name, shard) for shard, each in owned.items() for name in sorted(each.guard.names)
        ]
        for name, shard in spread:
            # Another shard moves, or the queue was changed or removed: the next time decides.
            with suppress(PenstockError):
                if first_shard(name, shards) == shard:
                    await carrier.tend(name)
                elif turn % _TEND_COPIES == 0:
                    await carrier.tend_copy(name, shard)
