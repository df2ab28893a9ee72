"""Growth of a cluster: which queues belong to shards that were added, and their moves.

Queues are moved one after another, as `SpreadChanges` moves any queue. What is left to move is only
known by looking at all queues, so a growth that was interrupted is continued by repeating it.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import msgspec

from penstock.cluster.known_queues import KnownQueues
from penstock.cluster.spread_changes import SpreadChanges
from penstock.cluster.spread_rules import Spread, shards_at, spread_of
from penstock.errors import QueueNotFound
from penstock.service import PART_QUEUES_MAX, DescribeQueues, ListQueues, QueueInfo


class Growth(msgspec.Struct, frozen=True):
    """How far a cluster has come that has more shards than it was created with.

    `leaving` is how many queues may still have messages in shards that they were in before. The
    numbers of queues are None if they cannot be counted now.
    """

    created_shards: int
    shards: int
    queues: int | None = None
    to_move: int | None = None
    leaving: int | None = None


class Resharding:
    """Moves queues to the shards that they belong to."""

    def __init__(self, known: KnownQueues, changes: SpreadChanges) -> None:
        self._known = known
        self._changes = changes

    async def wait_for_owners(self) -> None:
        """Waits until all shards have an owner that answers. Raises BackendLost."""
        for shard in range(self._known.homes, self._known.settings.shards):
            await self._known.ask(shard, ListQueues(limit=1))

    async def progress(self) -> Growth:
        """How many queues there are, and how many of them are still to be moved."""
        queues = to_move = leaving = 0
        async for _, spread, is_to_move in self._queues():
            queues += 1
            to_move += is_to_move
            leaving += bool(spread.before)
        settings = self._known.settings
        return Growth(settings.homes, settings.shards, queues, to_move, leaving)

    async def place_queues(self, moved: Callable[[str], None]) -> None:
        """Moves all queues to the shards that they belong to; calls `moved` after each of them.

        Raises BackendLost; what was moved stays so.
        """
        async for queue, _, is_to_move in self._queues():
            if is_to_move:
                with suppress(QueueNotFound):
                    await self._changes.place(queue)
                    moved(queue)

    async def _queues(self) -> AsyncIterator[tuple[str, Spread, bool]]:
        """All queues, and whether each is to be moved."""
        known = self._known
        for home in range(known.homes):
            async for info in self._described(home):
                if known.home(info.queue) != home:
                    # A copy.
                    continue
                spread = spread_of(info.settings)
                current = shards_at(info.queue, spread.shards, known.homes)
                is_to_move = not spread.is_by_hand and current != [known.belongs_to(info.queue)]
                yield info.queue, spread, is_to_move

    async def _described(self, shard: int) -> AsyncIterator[QueueInfo]:
        after = ""
        while True:
            page = await self._known.ask(shard, DescribeQueues("", after, PART_QUEUES_MAX))
            for info in page:
                yield info
            if len(page) < PART_QUEUES_MAX:
                return
            after = page[-1].queue
