"""The state of one message in its queue: the only part of a message that changes.

There may be millions of these, so a `Delivery` holds no content, only a reference to it: the
`Pushed` event itself (memory), or its place in the journal (disk). The collector does not track
them (`gc=False`): they refer to nothing that could refer back.

A place is an integer that the journal makes. Its low 32 bits are the message's size; the rest has
no meaning here.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from penstock.core.events import Pushed

DELAYED: Final = 0
VISIBLE: Final = 1
IN_FLIGHT: Final = 2
GONE: Final = 3
DEPARTED: Final = 4

# The queue number of messages that departed to other shards. Real queues count from 1.
OUTBOX: Final = 0

PLACE_SIZE_MASK: Final = (1 << 32) - 1

Content = Pushed | int


class Move(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A message's last move between queues; `epoch` is its claim count at that time."""

    at_ms: int
    source: int
    epoch: int
    dead: bool


class Departure(Move, frozen=True, gc=False, array_like=True):
    """The move of a message that left for another shard, with its destination."""

    to_shard: int
    to_queue: str


class Delivery(msgspec.Struct, gc=False, array_like=True, order=True):
    """One message's state in one queue; heaps order them by queue, number and rank.

    `rank` is its place in the queue's order: its number, until a move gives it a new one.
    `due_at_ms` is when a delay or a claim ends; of a visible message of a FIFO queue, when it last
    came back. `expires_at_ms` is 0 when the queue's retention decides. `epoch` counts claims and
    never falls, so no old receipt can become valid again.
    """

    queue: int
    number: int
    rank: int
    content: Content
    pushed_at_ms: int
    state: int = VISIBLE
    epoch: int = 0
    due_at_ms: int = 0
    priority: int = 0
    group: str | None = None
    expires_at_ms: int = 0
    first_claimed_at_ms: int = 0
    move: Move | None = None


class Arrivals(NamedTuple):
    """Plain messages of one queue, in order, which are added at once.

    All are visible, ranked by number, without group, priority, TTL or an earlier queue.
    """

    queue: int
    numbers: Sequence[int]
    deliveries: list[Delivery]
    size_bytes: int


def size_bytes(delivery: Delivery) -> int:
    """What the message counts for against a queue's byte limit."""
    content = delivery.content
    return content & PLACE_SIZE_MASK if isinstance(content, int) else content.size_bytes


def not_plain(deliveries: list[Delivery]) -> list[Delivery]:
    """Those not visible, or with a group, a priority, a TTL or an earlier queue."""
    return [
        each
        for each in deliveries
        if each.state != VISIBLE
        or each.group is not None
        or each.priority
        or each.expires_at_ms
        or each.move is not None
    ]


def receives(delivery: Delivery) -> int:
    """How often the message was claimed in this queue."""
    move = delivery.move
    return delivery.epoch if move is None else delivery.epoch - move.epoch


def arrived_at_ms(delivery: Delivery) -> int:
    """When the message came into this queue: pushed, or moved from another one.

    Messages of one queue have arrived in the order of their ranks.
    """
    move = delivery.move
    return delivery.pushed_at_ms if move is None else move.at_ms


def expiry_ms(delivery: Delivery, retention_ms: int) -> int:
    """When the message expires: by its own TTL, or by the queue's retention."""
    return delivery.expires_at_ms or arrived_at_ms(delivery) + retention_ms
