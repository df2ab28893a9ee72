"""Replaying a journal over a state that already contains some of its events, or lacks earlier ones.

A snapshot is taken a slice at a time while the shard works, so it may already contain events that
come later in the journal; and where an entry was lost to damage, later events name messages that do
not exist. The state shows whether an event was applied: a claim by its epoch, a move by its rank,
the end of a message by its absence. `apply_if_new` applies the events that are new and skips the
others. Over an exact state it does the same as `ShardState.apply`.
"""

from collections.abc import Callable
from typing import Any, Final, cast

from penstock.core.delivery import DELAYED, IN_FLIGHT, VISIBLE, Arrivals, Content, Delivery
from penstock.core.events import (
    AnyEvent,
    Arrived,
    Carried,
    Claimed,
    ClaimExpired,
    DelayEnded,
    Deleted,
    Departed,
    Expired,
    Extended,
    Lost,
    Moved,
    Pushed,
    QueueCreated,
    QueuePurged,
    QueueRemoved,
    QueueStated,
    Released,
)
from penstock.core.queue import QueueState
from penstock.core.shard import ShardState
from penstock.service import QueueSettings

# An event of one claim.
OfClaim = Extended | Released | ClaimExpired | Deleted | Lost


def apply_if_new(shard: ShardState, event: AnyEvent, content: Content | None = None) -> bool:
    """Applies the event if it is new; returns whether it was.

    `content` is the place of the message's content, if the event has one.
    """
    queue = shard.queues.get(event.queue)
    if type(event) is Pushed:
        if event.number < shard.next_number:
            return False
        if queue is None:
            _recover_queue(shard, event.queue, event.at_ms)
        delivery = shard.pushed(event)
        if content is not None:
            delivery.content = content
        return True
    if isinstance(event, QueueCreated):
        if queue is not None or event.queue < shard.next_queue:
            return False
        earlier = shard.names.get(event.name)
        if earlier is not None:
            # The removal of the earlier queue was lost: the name belongs to the newer one.
            shard.apply(QueueRemoved(event.at_ms, earlier.number, len(earlier.deliveries)))
    elif isinstance(event, QueueStated):
        if queue is None and event.queue >= shard.next_queue and event.name not in shard.names:
            # The queue's creation was lost: this event repeats what it was.
            made = QueueCreated(event.created_at_ms, event.queue, event.name, event.settings)
            shard.apply(made)
            shard.queues[event.queue].configured_at_ms = event.configured_at_ms
        return False
    elif isinstance(event, Carried):
        if content is not None:
            shard.place(event.queue, event.number, content)
        return False
    elif isinstance(event, Arrived | Lost) and event.number in shard.departed.deliveries:
        # Valid also if the queue that the message left has been removed.
        pass
    elif queue is None or not _is_new(shard, queue, event):
        _count(shard, event.rank if isinstance(event, Moved) else getattr(event, "number", 0))
        return False
    shard.apply(event)
    return True


def apply_arrivals_if_new(shard: ShardState, arrivals: Arrivals) -> bool:
    """Applies the pushes of plain messages if all are new; returns whether they were."""
    queue = shard.queues.get(arrivals.queue)
    if queue is None or queue.settings.fifo or arrivals.numbers[0] < shard.next_number:
        return False
    shard.arrived(queue, arrivals)
    return True


def _recover_queue(shard: ShardState, number: int, at_ms: int) -> None:
    """Creates a queue whose creation was lost: its messages must not be lost with it.

    Nothing arrives in a queue after its removal, so the creation of an unknown queue was lost.
    """
    name = f"recovered-{number}"
    while name in shard.names:
        name += "-"
    shard.apply(QueueCreated(at_ms, number, name, QueueSettings()))


def _count(shard: ShardState, used: int) -> None:
    """Reserves a number or rank that an event uses, so that no later message gets it."""
    if used >= shard.next_number:
        shard.next_number = used + 1


def _is_new(shard: ShardState, queue: QueueState, event: AnyEvent) -> bool:
    """Whether an event of an existing queue is still to be applied; `_RULES` has the rules."""
    kind = type(event)
    if kind is Claimed:
        return _is_new_claim(queue, cast(Claimed, event))
    if kind is QueuePurged:
        _purge_older(queue, cast(QueuePurged, event))
        return False
    rule = _RULES.get(kind)
    if rule is None:
        # An event of the queue itself, which exists and so has not been removed.
        return True
    delivery = queue.deliveries.get(event.number)  # type: ignore[union-attr]
    return delivery is not None and rule(shard, delivery, event)


def _is_new_expiry(shard: ShardState, delivery: Delivery, event: Expired) -> bool:
    return delivery.state != IN_FLIGHT


def _is_new_move(shard: ShardState, delivery: Delivery, event: Moved) -> bool:
    if event.rank <= delivery.rank or delivery.state == IN_FLIGHT:
        return False
    if event.to not in shard.queues:
        _recover_queue(shard, event.to, event.at_ms)
    return True


def _is_new_departure(shard: ShardState, delivery: Delivery, event: Departed) -> bool:
    """A message departs once: if it is still in the queue, the event is new."""
    if delivery.epoch < event.epoch or delivery.state == IN_FLIGHT:
        # Its last claim, or the end of it, was lost.
        queue = shard.queues[event.queue]
        ended = ClaimExpired(event.at_ms, event.queue, event.number, event.epoch)
        if _is_new_end_of_claim(shard, delivery, ended):
            queue.returned(ended)
    return True


def _is_new_arrival(shard: ShardState, delivery: Delivery, event: Arrived) -> bool:
    """The departure was lost, but the message is in the other shard: it is removed here."""
    shard.queues[event.queue].dropped(delivery)
    return False


def _is_new_end_of_delay(shard: ShardState, delivery: Delivery, event: DelayEnded) -> bool:
    return delivery.state == DELAYED and delivery.epoch == event.epoch


def _is_new_end_of_claim(shard: ShardState, delivery: Delivery, event: OfClaim) -> bool:
    return _is_of_later_claim(shard, delivery, event) or (
        delivery.state == IN_FLIGHT and delivery.epoch == event.epoch
    )


def _is_new_extension(shard: ShardState, delivery: Delivery, event: Extended) -> bool:
    # An extension may also make a claim valid again that had run out. If it is older than the end
    # of the claim, the journal has that end later.
    return _is_of_later_claim(shard, delivery, event) or (
        delivery.state in (IN_FLIGHT, VISIBLE) and delivery.epoch == event.epoch
    )


def _is_of_later_claim(shard: ShardState, delivery: Delivery, event: OfClaim) -> bool:
    """Whether the event belongs to a claim that was lost; if so, that claim is made first.

    What happened to the claim is in the journal, and must take effect.
    """
    if event.epoch <= delivery.epoch:
        return False
    queue = shard.queues[event.queue]
    claimed = Claimed(event.at_ms, event.queue, event.number, event.epoch, event.at_ms)
    _is_new_claim(queue, claimed)
    queue.claimed(claimed)
    return True


# Whether an event of a message is new, by its kind.
_RULES: Final[dict[type, Callable[[ShardState, Delivery, Any], bool]]] = {
    Expired: _is_new_expiry,
    Moved: _is_new_move,
    DelayEnded: _is_new_end_of_delay,
    Extended: _is_new_extension,
    Released: _is_new_end_of_claim,
    ClaimExpired: _is_new_end_of_claim,
    Deleted: _is_new_end_of_claim,
    Lost: _is_new_end_of_claim,
    Departed: _is_new_departure,
    Arrived: _is_new_arrival,
}


def _is_new_claim(queue: QueueState, event: Claimed) -> bool:
    """Whether the claim is new; if it is, the message is made ready to be claimed."""
    delivery = queue.deliveries.get(event.number)
    if delivery is None or delivery.epoch >= event.epoch:
        if event.attempt_id is not None:
            # The claim was applied, but its attempt perhaps not: attempts are stored separately.
            queue.remember_attempt(event)
        return False
    if delivery.state == IN_FLIGHT:
        # The end of the claim before was lost; without it this one could not have been made.
        queue.returned(ClaimExpired(event.at_ms, event.queue, event.number, delivery.epoch))
    elif delivery.state == DELAYED:
        queue.delay_ended(DelayEnded(event.at_ms, event.queue, event.number, delivery.epoch))
    return True


def _purge_older(queue: QueueState, event: QueuePurged) -> None:
    """Removes the messages that were there at the purge, and keeps those that came after it."""
    if queue.settings.fifo:
        queue.dedups.keep(lambda number: number >= event.before)
    later = [each for each in queue.deliveries.values() if each.rank >= event.before]
    if not later:
        queue.cleared()
        return
    for delivery in list(queue.deliveries.values()):
        if delivery.rank < event.before:
            queue.dropped(delivery)
