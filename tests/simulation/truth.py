"""The true history of a shard: the slots that were kept, checked by simple rules.

Every slot is checked when it is kept, and every answer against the slots that are kept by then. The
rules are those of the delivery contract, over the events of one message:

    pushed       a number once
    claimed      only if visible; the epoch is the one after the last
    extended, released, deleted
                 only if in flight, with the epoch of the claim
    expired      only if in flight, with the epoch of the claim, and not before its deadline
    moved, departed
                 only if visible or delayed, with the epoch of the last claim
    arrived      only if departed
    removed      a queue only if it is empty: no client removes any

`lineage` has the rules that concern several shards. In addition, the real core applies all events
from the first slot on, without any snapshot: a new owner must begin with that state.
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
    Expired,
    Extended,
    Lost,
    Moved,
    Pushed,
    QueueConfigured,
    QueueCreated,
    QueuePurged,
    QueueRemoved,
    Released,
)
from penstock.core.shard import ShardState
from penstock.journal.codec import decode
from penstock.journal.entry import StoredEntry
from penstock.journal.restore import Recovery
from penstock.service import QueueSettings
from tests.simulation.lineage import (
    DELAYED,
    DEPARTED,
    GONE,
    IN_FLIGHT,
    VISIBLE,
    Life,
    MessageLineage,
    TrueQueue,
)
from tests.simulation.schedule import RunSchedule

_WAITING: Final = (VISIBLE, DELAYED)


class ShardTruth:
    """The slots of one shard, as they were kept."""

    def __init__(self, schedule: RunSchedule, shard: int, lineage: MessageLineage) -> None:
        self.shard = shard
        self.lives: dict[int, Life] = {}
        self.queues: dict[int, TrueQueue] = {}
        # All entries of the stream, and at which position of it each slot begins.
        self.entries: list[StoredEntry] = []
        self.positions: list[int] = []
        # When each term was opened, in the order of the slots; void ones are not here.
        self.opened_ms: list[tuple[int, int]] = []
        self._schedule = schedule
        self._chain = ExtentChain(shard, ChainPoint())
        self._recovery = Recovery(None)
        self._lineage = lineage

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
        self.positions.append(chain.position)
        try:
            _, entries = chain.read(slot, packed)
        except BrokenChain as error:
            self._schedule.violate(f"the log is broken: {error}")
            return
        if extent.opens_term and not is_void:
            self.opened_ms.append((extent.term, self._schedule.now_ms))
        self.entries += entries
        for entry in entries:
            for event, place in decode(entry.data, entry.data_offset):
                self._check(event)
                self._recovery.apply_if_new(event, place)

    def position_of(self, slot: int) -> int:
        """Where a slot begins in the stream; the end of the stream for the slot after the last."""
        return self.positions[slot - 1] if slot <= len(self.positions) else self._chain.position

    def state(self) -> bytes:
        """The state after all slots, as bytes."""
        return state_bytes(self._recovery.finish())

    def settings_of(self, name: str) -> QueueSettings | None:
        """The settings of a queue in this shard; None if it is not there."""
        found = [queue.settings for queue in self.queues.values() if queue.name == name]
        return found[0] if found else None

    # The rules.

    def _check(self, event: AnyEvent) -> None:
        self._schedule.note("event", self.shard, type(event).__name__, *_fields_of(event))
        if type(event) is Pushed:
            self._check_pushed(event)
        elif type(event) is QueueCreated:
            self.queues[event.queue] = TrueQueue(event.name, event.settings)
            self._lineage.configured(event.settings)
        elif type(event) is QueueConfigured:
            self.queues[event.queue].settings = event.settings
            self._lineage.configured(event.settings)
        elif type(event) is QueueRemoved or type(event) is QueuePurged:
            self._check_removed(event)
        elif (number := getattr(event, "number", None)) is not None:
            life = self.lives.get(number)
            if life is None:
                self._wrong(event, "of a message that was never pushed")
            elif (problem := _problem(life, event)) is not None:
                self._wrong(event, problem)
            else:
                self._lineage.check(life, event)
                self._live(life, event)

    def _live(self, life: Life, event: AnyEvent) -> None:
        was_in = life.queue.name
        _live(life, event)
        if type(event) is Moved:
            life.queue = self.queues[event.to]
        self._lineage.changed(life, event, was_in)

    def _check_removed(self, event: QueueRemoved | QueuePurged) -> None:
        queue = self.queues[event.queue]
        left = [life.number for life in self.lives.values() if life.queue is queue and life.is_live]
        if left:
            self._wrong(event, f"removes the messages {left}")
        if type(event) is QueueRemoved:
            del self.queues[event.queue]

    def _wrong(self, event: AnyEvent, problem: str) -> None:
        self._schedule.violate(f"shard {self.shard}: {event} {problem}")

    def _check_pushed(self, event: Pushed) -> None:
        if event.number in self.lives:
            self._wrong(event, "has the number of another message")
        state = DELAYED if event.visible_at_ms > event.at_ms else VISIBLE
        life = Life(self.shard, self.queues[event.queue], event, state)
        self.lives[event.number] = life
        self._lineage.pushed(life, event)


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
        case Moved():
            if life.state not in _WAITING:
                return f"of a message that is {life.state}"
        case Departed(epoch=epoch):
            if life.state not in _WAITING or epoch != life.epoch:
                return f"of a message that is {life.state} under epoch {life.epoch}"
        case Arrived():
            if life.state != DEPARTED:
                return f"of a message that is {life.state}"
        case Expired() | Lost():
            return "of a message that was not deleted"
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
        case ClaimExpired() | DelayEnded() | Moved():
            life.state = VISIBLE
        case Deleted() | Arrived():
            life.state, life.ended_by = GONE, event
        case Departed():
            life.state = DEPARTED
