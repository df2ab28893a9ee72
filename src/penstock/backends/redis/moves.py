"""Moves of messages from one queue to another: dead letters and redrives.

The two queues may be in different slots of a cluster, so no script can change both. The script that
takes a message out of its queue's order puts it into the queue's outbox. Every reply says whether
the outbox holds messages; a process that sees this carries them: it adds them to the other queue
with an identity of their own, then removes them from the outbox. If that is interrupted, the next
process that uses the queue carries them again, and those that had arrived are recognised. So a
message is never lost; it is delivered twice only if it is carried again more than five minutes
later.
"""

from typing import Any, Final

from penstock.backends.redis.layout import OwedMessage, RedisQueue, read_owed
from penstock.backends.redis.queues import RedisQueues
from penstock.errors import InvalidField, UnavailableError
from penstock.service import REDRIVE_MAX, Redrive, check_number

_CARRIED_MAX: Final = 100
_OWED_FIELDS: Final = 4


class RedisMoves:
    """Carries the messages in outboxes, and redrives."""

    def __init__(self, queues: RedisQueues) -> None:
        self._queues = queues

    async def carry_owed(self, queue: RedisQueue, reply: list[Any]) -> bool:
        """Carries the messages in the outbox, if the reply of a script says that there are some.

        True if some came back, because their target queue is missing. Raises nothing if Redis
        cannot be reached: the messages stay in the outbox.
        """
        if not reply[2]:
            return False
        try:
            return await self.carry(queue)
        except UnavailableError:
            return False

    async def carry(self, queue: RedisQueue) -> bool:
        """Carries every message in the outbox; True if some came back."""
        came_back = False
        while True:
            shown = await self._queues.run("owed", queue.keys, "show", _CARRIED_MAX)
            if shown is None or len(shown) == 3:
                return came_back
            by_target: dict[str, list[OwedMessage]] = {}
            for at in range(3, len(shown), _OWED_FIELDS):
                departure = read_owed(queue, shown[at : at + _OWED_FIELDS])
                by_target.setdefault(departure.to, []).append(departure)
            for name, departures in by_target.items():
                has_arrived = await self._arrive(queue, name, [each.item for each in departures])
                came_back = came_back or not has_arrived
                await self._queues.run(
                    "owed",
                    queue.keys,
                    "done" if has_arrived else "return",
                    *(each.number for each in departures),
                )

    async def _arrive(self, queue: RedisQueue, name: str, items: list[bytes]) -> bool:
        """Adds messages to their new queue; False if it is missing or of the other kind."""
        target = await self._queues.read_if_exists(name)
        if target is None:
            return False
        fifo = int(queue.info.settings.fifo)
        reply = await self._queues.run("arrive", target.keys, fifo, *items)
        if reply is None or not reply[3]:
            self._queues.forget(name)
            return False
        await self.carry_owed(target, reply)
        return True

    async def redrive(self, command: Redrive) -> int:
        """Moves visible messages to `to`, or back to their source queues; returns how many."""
        queue = await self._queues.find(command.queue)
        limit = check_number("limit", command.limit, 1, REDRIVE_MAX * 10)
        if command.to is None:
            allowed = await self._sources(queue)
            reply = await self._queues.run_on(queue, "redrive", limit, "", *allowed)
        else:
            to = await self._queues.read(command.to)
            if to.number == queue.number:
                raise InvalidField(f"to: {queue.name!r} is the queue the messages are in")
            if to.info.settings.fifo != queue.info.settings.fifo:
                raise InvalidField(
                    f"to: {to.name!r} and {queue.name!r} must both be fifo, or neither"
                )
            reply = await self._queues.run_on(queue, "redrive", limit, to.name)
        if reply[2] and await self.carry(queue) and command.to is not None:
            # It was deleted meanwhile, and what was on its way is back.
            await self._queues.read(command.to)
        moved, kept = reply[3], reply[4]
        if kept and not moved:
            raise InvalidField(
                f"to: none of the messages in {queue.name!r} ({kept}) was dead-lettered from a "
                "queue that still exists; name the queue to move them to"
            )
        return int(moved)

    async def _sources(self, queue: RedisQueue) -> list[bytes]:
        """The queues from which messages were dead-lettered to this one, and which still exist."""
        reply = await self._queues.run_on(queue, "redrive", REDRIVE_MAX * 10, "", "?")
        allowed = []
        for source in reply[3:]:
            found = await self._queues.read_if_exists(source.partition(b"\0")[0].decode())
            if (
                found is not None
                and found.source == source
                and found.info.settings.fifo == queue.info.settings.fifo
            ):
                allowed.append(source)
        return allowed
