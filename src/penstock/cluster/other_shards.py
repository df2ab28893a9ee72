"""Work of an owner that concerns other shards: dead letters, and the copies of spread queues.

Both coroutines run as long as the owner serves, and end when their task is cancelled. They use only
their arguments, so that the simulation runs them unchanged.
"""

import asyncio
import itertools
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from penstock.cluster.origins import as_dead_letter
from penstock.cluster.placement import first_shard
from penstock.cluster.spread_rules import SpreadGuard
from penstock.errors import PenstockError
from penstock.service import Push

if TYPE_CHECKING:
    from penstock.cluster.shard_server import ShardServer

# How many dead letters are pushed at once, and the pause after one was refused.
_DEPARTURES_MAX: Final = 100
_DEPARTURE_RETRY_S: Final = 1.0
_MAINTENANCE_S: Final = 1.0
# A queue is looked at again after one round, then after two, and so on, up to these numbers: while
# it changes, and if nothing is left to do. Copies that a change has left are removed by the way.
_CHANGING_ROUNDS_MAX: Final = 8
_SETTLED_ROUNDS_MAX: Final = 3_600
_COPY_ROUNDS: Final = 10


class OtherShards(Protocol):
    """What an owner needs of other shards; `router.Router` implements it."""

    async def push_dead_letter(self, push: Push) -> tuple[int, int]:
        """Pushes a dead letter to its queue; its shard and number there, once it is durable.

        Raises PenstockError.
        """
        ...

    async def finish_spread_change(self, queue: str, version: int) -> bool:
        """Finishes a change of a queue's spread, of that version; whether nothing is left to do.

        Raises PenstockError.
        """
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


async def deliver_departures(server: "ShardServer", others: OtherShards) -> None:
    """Pushes dead letters to their shards, and removes each here once it is durable there."""
    engine = server.engine
    while True:
        await server.has_departures.wait()
        server.has_departures.clear()
        try:
            departures = engine.departures(_DEPARTURES_MAX)
            await _until_durable(server, engine.answer_sequence)
            for each, content in departures:
                queue = engine.shard.queues.get(each.source)
                source = None if queue is None else queue.name
                number = each.delivery.number
                push = as_dead_letter(
                    each.push(content), content, each.delivery, engine.message_id(number), source
                )
                place = await others.push_dead_letter(push)
                engine.arrived(number, each.delivery.epoch, place)
            server.answer_held_back()
        except PenstockError:
            # The other shard moves, or refuses it: it stays in the outbox.
            await asyncio.sleep(_DEPARTURE_RETRY_S)
        if engine.shard.departed.deliveries:
            server.has_departures.set()


async def _until_durable(server: "ShardServer", sequence: int) -> None:
    done = asyncio.Event()
    server.journal.notify(sequence, done.set)
    await done.wait()
    server.journal.wait(sequence)


class _Look(NamedTuple):
    """When a queue is looked at next, and how many rounds later once more."""

    served: ServedShard
    version: int
    turn: int
    rounds: int


async def maintain_spread_queues(
    owned: Mapping[int, ServedShard], homes: int, others: OtherShards
) -> None:
    """Finishes changes of the spread of queues, for the shards in `owned`.

    A queue whose note has not changed is looked at less and less often, so that it costs nothing.
    """
    looks: dict[tuple[str, int], _Look] = {}
    for turn in itertools.count(1):
        await asyncio.sleep(_MAINTENANCE_S)
        earlier, looks = looks, {}
        for shard, served in list(owned.items()):
            for name in sorted(served.guard.names):
                version = served.guard.version(name)
                look = earlier.get((name, shard))
                if look is None or (look.served, look.version) != (served, version):
                    look = _Look(served, version, turn, 1)
                if look.turn <= turn:
                    look = await _look(look, name, shard, turn, others, first_shard(name, homes))
                looks[name, shard] = look


async def _look(
    look: _Look, name: str, shard: int, turn: int, others: OtherShards, home: int
) -> _Look:
    """Does what is left to do for a queue; when to look at it next."""
    rounds, rounds_max = look.rounds, _CHANGING_ROUNDS_MAX
    # Another shard moves, or the queue was changed or removed: it is repeated.
    with suppress(PenstockError):
        if home != shard:
            rounds, rounds_max = max(rounds, _COPY_ROUNDS), _SETTLED_ROUNDS_MAX
            await others.remove_stale_copy(name, shard)
        elif await others.finish_spread_change(name, look.version):
            rounds_max = _SETTLED_ROUNDS_MAX
    return look._replace(turn=turn + rounds, rounds=min(2 * rounds, rounds_max))
