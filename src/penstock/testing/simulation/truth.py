"""The true history of a shard: the slots that were kept, checked by simple rules.

Every slot is checked when it is kept, and every answer against the slots that are kept by then. The
rules are those of the delivery contract, over the events of one message:

    pushed       a number once; a dedup id once within its window
    claimed      only if visible; the epoch is the one after the last
    extended, released, deleted, departed
                 only if in flight, with the epoch of the claim
    expired      only if in flight, with the epoch of the claim, and not before its deadline

In addition, the real core applies all events from the first slot on, without any snapshot: a new
owner must begin with that state.
"""

from typing import Final

import msgspec

from penstock.cluster.extent import BrokenChain, ChainPoint, ExtentChain, unpack_extent
from penstock.core.events import (
    AnyEvent,
    Arrived,
    Claimed,
    ClaimExpired,
    DelayEnded,
    Deleted,
    Departed,
    Extended,
    Pushed,
    QueueCreated,
    Released,
)
from penstock.core.shard import ShardState
from penstock.journal.codec import decode
from penstock.journal.restore import Recovery
from penstock.service import DEDUP_WINDOW_MS
from penstock.testing.simulation.schedule import RunSchedule

VISIBLE: Final = "visible"
DELAYED: Final = "delayed"
IN_FLIGHT: Final = "in flight"
GONE: Final = "gone"
DEPARTED: Final = "departed"


class Life:
    """The state of one message according to the events that were kept."""

    __slots__ = ("body", "deadline_ms", "ended_by", "epoch", "number", "queue", "state")

    def __init__(self, number: int, queue: int, body: bytes, state: str) -> None:
        self.number = number
        self.queue = queue
        self.body = body
        self.state = state
        self.epoch = 0
        self.deadline_ms = 0
        # The event that ended it, if one has.
        self.ended_by: AnyEvent | None = None


class ShardTruth:
    """The slots of one shard, as they were kept."""

    def __init__(self, schedule: RunSchedule, shard: int) -> None:
        self.shard = shard
        self.lives: dict[int, Life] = {}
        self.queues: dict[int, str] = {}
        # When each term was opened, in the order of the slots; void ones are not here.
        self.opened_ms: list[tuple[int, int]] = []
        self._schedule = schedule
        self._chain = ExtentChain(shard, ChainPoint())
        self._recovery = Recovery(None)
        self._dedups: dict[tuple[int, str], tuple[int, int]] = {}

    @property
    def term(self) -> int:
        """The highest term that was opened."""
        return self._chain.term

    def replaced_ms(self, term: int) -> int | None:
        """When the owner of this term was replaced; None if it was not."""
        return next((at_ms for opened, at_ms in self.opened_ms if opened > term), None)

    @property
    def is_empty(self) -> bool:
        """Whether every message has ended."""
        return all(life.state == GONE for life in self.lives.values())

    def keep(self, slot: int, packed: bytes) -> None:
        """The next slot of the shard's log was kept."""
        chain = self._chain
        extent = unpack_extent(packed)
        is_void = extent.term < chain.term
        kind = "opens" if extent.opens_term else "void" if is_void else "kept"
        self._schedule.note("slot", self.shard, slot, f"term {extent.term}", kind, len(packed))
        try:
            _, entries = chain.take(slot, packed)
        except BrokenChain as error:
            self._schedule.violate(f"the log is broken: {error}")
            return
        if extent.opens_term and not is_void:
            self.opened_ms.append((extent.term, self._schedule.now_ms))
        for entry in entries:
            for event, place in decode(entry.data, entry.data_offset):
                self._check(event)
                self._recovery.apply_if_new(event, place)

    def state(self) -> bytes:
        """The state after all slots, as bytes."""
        return state_bytes(self._recovery.finish())

    # The rules.

    def _check(self, event: AnyEvent) -> None:
        self._schedule.note("event", self.shard, type(event).__name__, *_fields_of(event))
        if type(event) is Pushed:
            self._check_pushed(event)
        elif type(event) is QueueCreated:
            self.queues[event.queue] = event.name
        elif (number := getattr(event, "number", None)) is not None:
            life = self.lives.get(number)
            if life is None:
                self._wrong(event, "of a message that was never pushed")
            elif (problem := _problem(life, event)) is not None:
                self._wrong(event, problem)
            else:
                _live(life, event)

    def _wrong(self, event: AnyEvent, problem: str) -> None:
        self._schedule.violate(f"shard {self.shard}: {event} {problem}")

    def _check_pushed(self, event: Pushed) -> None:
        if event.number in self.lives:
            self._wrong(event, "has the number of another message")
        state = DELAYED if event.visible_at_ms > event.at_ms else VISIBLE
        self.lives[event.number] = Life(event.number, event.queue, event.body, state)
        if event.dedup_id is not None:
            key = (event.queue, event.dedup_id)
            at_ms, number = self._dedups.get(key, (-DEDUP_WINDOW_MS, 0))
            if event.at_ms < at_ms + DEDUP_WINDOW_MS:
                self._wrong(event, f"was pushed as message {number} before")
            self._dedups[key] = (event.at_ms, event.number)


def state_bytes(shard: ShardState) -> bytes:
    """A state as bytes, to be compared."""
    return msgspec.msgpack.encode(shard.snapshot())


def _fields_of(event: AnyEvent) -> tuple[object, ...]:
    return tuple(
        getattr(event, name)
        for name in ("at_ms", "number", "epoch", "deadline_ms", "dedup_id")
        if hasattr(event, name)
    )


def _problem(life: Life, event: AnyEvent) -> str | None:
    """The rule that this event breaks for a message in this state; None if none."""
    match event:
        case Claimed(epoch=epoch):
            if life.state != VISIBLE:
                return f"of a message that is {life.state}"
            if epoch != life.epoch + 1:
                return f"after epoch {life.epoch}"
        case Extended(epoch=epoch) | Released(epoch=epoch) | Deleted(epoch=epoch):
            if life.state != IN_FLIGHT or epoch != life.epoch:
                return f"of a message that is {life.state} under epoch {life.epoch}"
        case ClaimExpired(epoch=epoch):
            if life.state != IN_FLIGHT or epoch != life.epoch:
                return f"of a message that is {life.state} under epoch {life.epoch}"
            if event.at_ms < life.deadline_ms:
                return f"before the deadline {life.deadline_ms}"
        case DelayEnded():
            if life.state != DELAYED:
                return f"of a message that is {life.state}"
        case Arrived():
            if life.state != DEPARTED:
                return f"of a message that is {life.state}"
    return None


def _live(life: Life, event: AnyEvent) -> None:
    """Applies an event to a message."""
    match event:
        case Claimed(epoch=epoch, deadline_ms=deadline_ms):
            life.state, life.epoch, life.deadline_ms = IN_FLIGHT, epoch, deadline_ms
        case Extended(deadline_ms=deadline_ms):
            life.deadline_ms = deadline_ms
        case Released(visible_at_ms=visible_at_ms):
            life.state = DELAYED if visible_at_ms > event.at_ms else VISIBLE
        case ClaimExpired() | DelayEnded():
            life.state = VISIBLE
        case Deleted() | Arrived():
            life.state, life.ended_by = GONE, event
        case Departed():
            life.state, life.ended_by = DEPARTED, event
