"""History: what happened to a message, from the streams that the scripts write on request.

Each queue has a stream. The later events of a message that moved are in the stream of the other
queue, under the number that it has there.
"""

from typing import Any, Final

from penstock.backends.redis.lacks import LACKS
from penstock.backends.redis.layout import RedisQueue
from penstock.backends.redis.link import RedisLink, checked_reply
from penstock.backends.redis.queues import RedisQueues
from penstock.errors import MessageNotFound, UnsupportedOperation
from penstock.service import DescribeQueues, History, HistoryEvent

_QUEUES_MAX: Final = 10_000
_MOVES_MAX: Final = 1_000


class RedisHistory:
    """Reads the streams."""

    def __init__(self, link: RedisLink, queues: RedisQueues) -> None:
        self._link = link
        self._queues = queues

    async def read(self, command: History) -> list[HistoryEvent]:
        """Every event of a message that is still kept. Raises MessageNotFound."""
        if not self._queues.target.history_max:
            raise UnsupportedOperation(f"history: {LACKS['history']}")
        infos = await self._queues.describe_all(DescribeQueues(limit=_QUEUES_MAX))
        known = {info.queue: await self._queues.find(info.queue) for info in infos}
        for queue in known.values():
            try:
                number = queue.ids.read(command.id)
            except MessageNotFound:
                continue
            events = await self._follow(known, queue, number)
            if events:
                return events
        raise MessageNotFound(f"id: {str(command.id)[:60]!r} is not the id of a message here")

    async def _follow(
        self, known: dict[str, RedisQueue], start: RedisQueue, number: int
    ) -> list[HistoryEvent]:
        """The events of a message in the queue that it was pushed to, and in those after it."""
        events: list[HistoryEvent] = []
        queue = start
        for _ in range(_MOVES_MAX):
            stream = await self._stream(queue)
            own = [each for each in stream if each["number"] == str(number)]
            events += [_event(queue, each) for each in own if each["kind"] != "Arrived"]
            if not own or own[-1]["kind"] != "Moved":
                break
            identity = f"{queue.number}:{number}"
            found = known.get(own[-1]["detail"].removeprefix("to="))
            if found is None:
                break
            arrived = [
                each
                for each in await self._stream(found)
                if each["kind"] == "Arrived" and each["detail"] == identity
            ]
            if not arrived:
                break
            queue, number = found, int(arrived[-1]["number"])
        return events

    async def _stream(self, queue: RedisQueue) -> list[dict[str, str]]:
        key = queue.keys[-1]
        (reply,) = await self._link.send(key, [("XRANGE", key, "-", "+")])
        entries: list[Any] = checked_reply(self._queues.target, reply)
        return [
            dict(
                zip(
                    (name.decode() for name in fields[::2]),
                    (value.decode() for value in fields[1::2]),
                    strict=True,
                )
            )
            for _, fields in entries
        ]


def _event(queue: RedisQueue, entry: dict[str, str]) -> HistoryEvent:
    detail = entry["detail"]
    name, _, value = detail.partition("=")
    return HistoryEvent(
        int(entry["at"]),
        entry["kind"],
        queue.name,
        int(entry["epoch"]) if entry["epoch"] else None,
        detail,
        deadline_ms=int(value) if name == "deadline_ms" else None,
        holder=value if name == "holder" else None,
        to=value if name == "to" else None,
    )
