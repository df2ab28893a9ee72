"""The history of a message that was in several shards: each has the events that happened there.

Callers see one list, as if the message had moved from queue to queue in a single shard.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from penstock.cluster.placement import shard_identity
from penstock.core.receipts import MessageIds
from penstock.errors import MessageNotFound
from penstock.service import History, HistoryEvent

# Asks the owner of a shard, as `shard_client.ShardClient.ask` does.
Ask = Callable[[int, History], Awaitable[Any]]


async def read_history(
    ask: Ask, identity: bytes, shards: int, shard: int, command: History
) -> list[HistoryEvent]:
    """The events of a message, from the shard that its id names to the one that it is in.

    `identity` and `shards` are those of the cluster. Raises MessageNotFound.
    """
    events: list[HistoryEvent] = await ask(shard, command)
    while events and events[-1].kind == "Arrived":
        *events, arrived = events
        shard, number = _place(arrived)
        if not number or shard >= shards:
            # An older version did not note where it is.
            break
        ids = MessageIds(shard_identity(identity, shard))
        try:
            later = await ask(shard, History(ids.show(number)))
        except MessageNotFound:
            # The journal there has dropped its events.
            break
        events = _joined(events, later)
    return [each if each.kind != "Departed" else _as_move(each) for each in events]


def _place(arrived: HistoryEvent) -> tuple[int, int]:
    """The shard and the number that a message has since this event; 0 where it has none."""
    detail = dict(part.split("=", 1) for part in arrived.detail.split(", ") if part)
    return int(detail.get("to_shard", 0)), int(detail.get("to_number", 0))


def _joined(earlier: list[HistoryEvent], later: list[HistoryEvent]) -> list[HistoryEvent]:
    """The events in a shard that a message departed from, and those in the next one.

    There it was pushed again, and its claims were counted from 1 again.
    """
    before = max(each.epoch or 0 for each in earlier if each.kind == "Departed")
    return [*earlier, *(_counted_on(each, before) for each in later if each.kind != "Pushed")]


def _counted_on(event: HistoryEvent, before: int) -> HistoryEvent:
    if event.epoch is None:
        return event
    return msgspec.structs.replace(event, epoch=before + event.epoch)


def _as_move(departed: HistoryEvent) -> HistoryEvent:
    to = departed.detail.partition("to_queue=")[2].partition(",")[0]
    detail = f"dead=True, to={to}"
    return HistoryEvent(
        departed.at_ms, "Moved", departed.queue, detail=detail, to=to or None, dead=True
    )
