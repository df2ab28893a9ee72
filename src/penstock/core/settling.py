"""Settling: applying what is due. Delays and claims end, old messages expire.

Each step settles a bounded number of messages, however many are due; the next step follows with the
next command or tick. In between the state agrees with its events, but some messages are settled
late. So what a command depends on is settled before it: the due messages of the queue it names, up
to a limit (`settle_queue`), and the claim whose receipt it uses (`settle_claim`).

Messages are settled in the order of their instants, across queues, as long as one step is enough
for all of them. A queue that needs more steps is put behind the others that are due by then, so
that a million messages of one queue do not delay the few of another.
"""

from heapq import heappop
from typing import TYPE_CHECKING, Final

from penstock.core.delivery import DELAYED, IN_FLIGHT, VISIBLE, Delivery
from penstock.core.due import DEADLINE, EXPIRY, NEVER_MS, NO_DUE_TIME, RETENTION, DueTime
from penstock.core.events import AnyEvent, ClaimExpired, DelayEnded, Expired

if TYPE_CHECKING:
    from penstock.core.queue import QueueState
    from penstock.core.receipts import Ticket
    from penstock.core.shard import ShardState

SETTLE_MAX: Final = 250


def settle(shard: "ShardState", now_ms: int, limit: int = SETTLE_MAX) -> list[AnyEvent]:
    """Settles up to `limit` messages; while the alarm is not later than now, more are due."""
    events: list[AnyEvent] = []
    alarm = shard.alarm
    heap = alarm.heap
    left = limit
    while heap and heap[0][0] <= now_ms and left > 0:
        at_ms, _, number, kind = heappop(heap)
        queue = shard.queues.get(number)
        if queue is None or queue.noted_ms(kind) != at_ms:
            left -= 1
            continue
        until = heap[0] if heap else NO_DUE_TIME
        left -= _settle_kind(shard, queue, kind, now_ms, left, until, events)
    shard.discards.trim()
    alarm.next_ms = heap[0][0] if heap else NEVER_MS
    if shard.discards:
        alarm.next_ms = min(alarm.next_ms, now_ms)
    return events


def settle_queue(
    shard: "ShardState", queue: "QueueState", now_ms: int, limit: int
) -> list[AnyEvent]:
    """Settles up to `limit` messages of each kind in one queue, ahead of all others."""
    events: list[AnyEvent] = []
    for kind in (DEADLINE, EXPIRY, RETENTION):
        if queue.noted_ms(kind) <= now_ms:
            _settle_kind(shard, queue, kind, now_ms, limit, NO_DUE_TIME, events)
    return events


def settle_claim(
    shard: "ShardState", queue: "QueueState", ticket: "Ticket", now_ms: int
) -> list[AnyEvent]:
    """Ends the claim that a receipt is for, if its deadline has passed."""
    delivery = queue.deliveries.get(ticket.number)
    if (
        delivery is None
        or delivery.state != IN_FLIGHT
        or delivery.epoch != ticket.epoch
        or delivery.due_at_ms > now_ms
    ):
        return []
    return _settle_deadline(shard, delivery, now_ms)


def _settle_kind(
    shard: "ShardState",
    queue: "QueueState",
    kind: int,
    now_ms: int,
    limit: int,
    until: DueTime,
    events: list[AnyEvent],
) -> int:
    """Settles what is due of one kind in one queue; returns how much of the limit it took."""
    if kind == RETENTION:
        for delivery in queue.retention.find_expired(queue, now_ms, limit, until):
            _end(shard, delivery, now_ms, events)
        return max(1, queue.retention.examined)
    index = queue.deadlines if kind == DEADLINE else queue.expiries
    popped = index.pop(now_ms, limit, until)
    if kind == DEADLINE:
        for at_ms, delivery in popped:
            if delivery.due_at_ms == at_ms and delivery.state in (DELAYED, IN_FLIGHT):
                events += _settle_deadline(shard, delivery, now_ms)
    else:
        for at_ms, delivery in popped:
            # A message in flight that is too old expires when its claim ends.
            if delivery.expires_at_ms == at_ms and delivery.state in (VISIBLE, DELAYED):
                _end(shard, delivery, now_ms, events)
    index.note_next(now_ms)
    return limit if index.is_spent else max(1, len(popped))


def _settle_deadline(shard: "ShardState", delivery: Delivery, now_ms: int) -> list[AnyEvent]:
    if delivery.state == DELAYED:
        events: list[AnyEvent] = [
            DelayEnded(now_ms, delivery.queue, delivery.number, delivery.epoch)
        ]
    else:
        expired = ClaimExpired(now_ms, delivery.queue, delivery.number, delivery.epoch)
        events = [expired, *shard.decide_after_return(delivery, now_ms)]
    for event in events:
        shard.apply(event)
    return events


def _end(shard: "ShardState", delivery: Delivery, now_ms: int, events: list[AnyEvent]) -> None:
    event = Expired(now_ms, delivery.queue, delivery.number)
    shard.apply(event)
    events.append(event)
