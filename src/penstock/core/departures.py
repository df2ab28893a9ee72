"""Departures: dead letters whose queue is in another shard, from `Departed` to `Arrived`.

A message that departs leaves its queue and is kept in the shard's outbox. No command reaches it
there: it is not pulled, peeked, expired, purged or redriven, and it stays when its queue is
removed. The router pushes it to the other shard with its dedup id, again until it succeeds, and
has this shard apply `Arrived` once that push is durable there. So it is delivered at least once;
twice only if it is pushed again after the other queue has dropped the dedup id.
"""

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from penstock.core.delivery import DEPARTED, OUTBOX, Delivery, Departure, size_bytes
from penstock.core.events import Departed, Pushed
from penstock.service import Push


class Owed(NamedTuple):
    """A message that departed and has not arrived, and its destination.

    The dedup id is the same after every restart, and no other departure of any shard has it.
    """

    delivery: Delivery
    source: int
    to_shard: int
    to_queue: str
    dedup_id: str

    def push(self, content: Pushed) -> Push:
        """The push that brings it to the other shard; `content` is the message's own.

        It arrives as a dead letter does in one shard: visible at once, and without its TTL.
        """
        return Push(
            self.to_queue,
            content.body,
            attributes=content.attributes,
            priority=self.delivery.priority,
            group=self.delivery.group,
            dedup_id=self.dedup_id,
            delay_ms=0,
            context=content.context,
        )


class Outbox:
    """The messages that departed from a shard and have not arrived, by their numbers."""

    __slots__ = ("deliveries", "stored_bytes")

    def __init__(self) -> None:
        self.deliveries: dict[int, Delivery] = {}
        self.stored_bytes = 0

    def departed(self, event: Departed, old: Delivery) -> None:
        """A message left its queue, where `old` was its delivery."""
        delivery = Delivery(
            queue=OUTBOX,
            number=old.number,
            rank=old.rank,
            content=old.content,
            pushed_at_ms=old.pushed_at_ms,
            state=DEPARTED,
            epoch=old.epoch,
            priority=old.priority,
            group=old.group,
            first_claimed_at_ms=old.first_claimed_at_ms,
            move=Departure(
                event.at_ms, event.queue, event.epoch, True, event.to_shard, event.to_queue
            ),
        )
        self.restored([delivery])

    def ended(self, number: int) -> None:
        """A message arrived, or its content is lost."""
        self.stored_bytes -= size_bytes(self.deliveries.pop(number))

    def restored(self, deliveries: Iterable[Delivery]) -> None:
        """Adds messages that departed, from a snapshot."""
        for delivery in deliveries:
            self.deliveries[delivery.number] = delivery
            self.stored_bytes += size_bytes(delivery)

    def sort(self) -> None:
        """Puts the messages in order of departure; a snapshot has them in order of number."""
        self.deliveries = {each.number: each for each in sorted(self.listed(), key=_departed_at)}

    def listed(self) -> list[Delivery]:
        """All of them, in order of their numbers."""
        return [self.deliveries[number] for number in sorted(self.deliveries)]

    def owed(self, shard: int, limit: int) -> list[Owed]:
        """The first messages to go, in order of departure; `shard` is this shard's number."""
        return [_owed(each, shard) for each in islice(self.deliveries.values(), limit)]


def departure_of(delivery: Delivery) -> Departure:
    """The source and the destination of a message in the outbox."""
    departure = delivery.move
    assert isinstance(departure, Departure), "a message that has not departed"
    return departure


def _departed_at(delivery: Delivery) -> int:
    return departure_of(delivery).at_ms


def _owed(delivery: Delivery, shard: int) -> Owed:
    departure = departure_of(delivery)
    dedup_id = f"departed-{shard}-{delivery.number}-{departure.epoch}"
    return Owed(delivery, departure.source, departure.to_shard, departure.to_queue, dedup_id)
