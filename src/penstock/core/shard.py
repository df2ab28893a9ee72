"""A shard: queues that share one order of events, and what happens between them.
Long, because all that happens between queues is decided and applied in this one place.

A `decide_…` method returns the events that carry out a command, and changes nothing; `apply` makes
one event take effect. `pull`, `redrive` and `settle` take a message out of the order to choose it,
so they decide and apply in one step. Either way the events alone rebuild the state: `apply` over a
journal gives the state of the running shard.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from itertools import islice
from typing import Any, Final

import msgspec

from penstock.core import pulling, settling
from penstock.core.delivery import (
    DELAYED,
    IN_FLIGHT,
    OUTBOX,
    VISIBLE,
    Arrivals,
    Content,
    Delivery,
)
from penstock.core.departures import Outbox, Owed
from penstock.core.discards import Discards
from penstock.core.due import NEVER_MS, Alarm
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
    QueueConfigured,
    QueueCreated,
    QueuePurged,
    QueueRemoved,
    QueueStated,
    Released,
)
from penstock.core.pieces import NumberPieces, pieces_of
from penstock.core.queue import QueueState
from penstock.core.receipts import Ticket
from penstock.core.runs import Run
from penstock.core.settling import SETTLE_MAX as SETTLE_MAX
from penstock.core.window import Key
from penstock.errors import (
    ClaimTooLong,
    InvalidField,
    MessageGone,
    QueueExists,
    QueueNotFound,
)
from penstock.service import (
    DELAY_MS_MAX,
    PEEK_LIMIT_MAX,
    PULL_LIMIT_MAX,
    VISIBILITY_MS_MAX,
    ConfigureQueue,
    CreateQueue,
    Peek,
    PeekFrom,
    Push,
    QueueInfo,
    QueueSettings,
    Redrive,
    RedriveIds,
    ReturnIds,
    changed_settings,
    check_name,
    check_number,
    check_unused,
)

_STATES: Final = {"visible": VISIBLE, "delayed": DELAYED, "in_flight": IN_FLIGHT}


class QueueSnapshot(msgspec.Struct, gc=False, array_like=True):
    """The whole state of a queue, as plain data."""

    number: int
    name: str
    settings: QueueSettings
    created_at_ms: int
    configured_at_ms: int
    deliveries: list[Delivery]
    dedups: list[tuple[int, Key, int]]
    attempts: list[tuple[int, Key, list[tuple[int, int]]]]


class ShardSnapshot(msgspec.Struct, gc=False, array_like=True):
    """The whole state of a shard, as plain data: equal states have equal snapshots.

    Messages that departed are in a last queue of number `OUTBOX`, if there are any.
    """

    next_number: int
    next_queue: int
    queues: list[QueueSnapshot]


class ShardState:
    """The queues of a shard, by number and by name, and what is due among them."""

    __slots__ = (
        "_apply",
        "alarm",
        "departed",
        "discards",
        "elsewhere",
        "moves",
        "names",
        "next_number",
        "next_queue",
        "number",
        "queues",
        "spread",
    )

    def __init__(self) -> None:
        self.queues: dict[int, QueueState] = {}
        self.names: dict[str, QueueState] = {}
        self.next_number = 1
        self.next_queue = 1
        # Set by the router between shards, and not part of the state: this shard's own number,
        # the shards of queues that are not here, and the queues that are here and in others too.
        self.number = 0
        self.elsewhere: Mapping[str, int] = {}
        self.spread: Container[str] = ()
        self.departed = Outbox()
        # While a snapshot is being taken: the messages that moved, each with the number of the
        # queue it was in first and of the one it is in now.
        self.moves: NumberPieces[tuple[int, int]] | None = None
        self.alarm = Alarm()
        self.discards = Discards(self.alarm)
        self._apply: dict[type, Callable[[Any], object]] = {
            QueueCreated: self._queue_created,
            QueueConfigured: self._queue_configured,
            QueueRemoved: self._queue_removed,
            QueuePurged: lambda event: self.queues[event.queue].purged(),
            Pushed: self.pushed,
            DelayEnded: lambda event: self.queues[event.queue].delay_ended(event),
            Claimed: lambda event: self.queues[event.queue].claimed(event),
            Extended: lambda event: self.queues[event.queue].extended(event),
            Released: lambda event: self.queues[event.queue].returned(event),
            ClaimExpired: lambda event: self.queues[event.queue].returned(event),
            Deleted: lambda event: self.queues[event.queue].deleted(event),
            Expired: lambda event: self.queues[event.queue].expired(event),
            Moved: self._moved,
            Lost: self._lost,
            Carried: _nothing,
            QueueStated: _nothing,
            Departed: self._departed,
            Arrived: lambda event: self.departed.ended(event.number),
        }

    def queue(self, name: str) -> QueueState:
        """The queue of this name. Raises InvalidField or QueueNotFound."""
        try:
            return self.names[name]
        except (KeyError, TypeError):
            check_name(name)
            raise QueueNotFound(f"queue: there is no queue {name!r}; create it first") from None

    # Deciding about messages.

    def decide_push(self, command: Push, now_ms: int) -> Pushed | int:
        """The event of a push, or the number of the message that an earlier one made."""
        return self.queue(command.queue).decide_push(command, now_ms, self.next_number)

    def decide_delete(
        self, name: str, ticket: Ticket, now_ms: int, late: bool = False
    ) -> list[AnyEvent]:
        """The events of a delete; none if the message is gone already."""
        delivery = self.queue(name).held(ticket, late)
        if delivery is None:
            return []
        deleted = Deleted(now_ms, ticket.queue, ticket.number, ticket.epoch)
        return [*_renewal_if_late(delivery, now_ms), deleted]

    def decide_extend(
        self,
        name: str,
        ticket: Ticket,
        visibility_ms: int,
        now_ms: int,
        late: bool = False,
        held_ms_max: int | None = None,
    ) -> Extended:
        """The event that moves a claim's deadline."""
        check_number("visibility_ms", visibility_ms, 1, VISIBILITY_MS_MAX)
        delivery = self._held(name, ticket, late)
        if held_ms_max is not None:
            _check_held(delivery, now_ms + visibility_ms, held_ms_max)
        return Extended(now_ms, ticket.queue, ticket.number, ticket.epoch, now_ms + visibility_ms)

    def decide_release(
        self, name: str, ticket: Ticket, delay_ms: int, now_ms: int, late: bool = False
    ) -> list[AnyEvent]:
        """The events of a release, and of what follows: expiry, or a move to the dead letters."""
        check_number("delay_ms", delay_ms, 0, DELAY_MS_MAX)
        delivery = self._held(name, ticket, late)
        after = self.decide_after_return(delivery, now_ms)
        visible_at_ms = 0 if after or not delay_ms else now_ms + delay_ms
        released = Released(now_ms, ticket.queue, ticket.number, ticket.epoch, visible_at_ms)
        return [*_renewal_if_late(delivery, now_ms), released, *after]

    def _held(self, name: str, ticket: Ticket, late: bool) -> Delivery:
        queue = self.queue(name)
        delivery = queue.held(ticket, late)
        if delivery is None:
            if ticket.number in self.departed.deliveries:
                raise MessageGone(
                    f"receipt: the message of this claim left {queue.name!r} for its dead-letter "
                    "queue, which is in another shard; pull it there"
                )
            target = self._dead_letter_of(queue)
            if target is not None and ticket.number in target.deliveries:
                raise MessageGone(
                    f"receipt: the message of this claim was moved to {target.name!r}, the "
                    f"dead-letter queue of {queue.name!r}; pull it there"
                )
            raise MessageGone(
                "receipt: the message of this claim is gone from the queue: deleted, expired, "
                "purged or moved to another queue"
            )
        return delivery

    def decide_after_return(self, delivery: Delivery, now_ms: int) -> list[AnyEvent]:
        """The events after the end of a claim: the message may be too old, or pulled too often."""
        queue = self.queues[delivery.queue]
        if queue.is_expired(delivery, now_ms):
            return [Expired(now_ms, queue.number, delivery.number)]
        moved = self.decide_dead_letter(delivery, now_ms) if queue.is_dead(delivery) else None
        return [] if moved is None else [moved]

    def _dead_letter_of(self, queue: QueueState) -> QueueState | None:
        """The dead-letter queue, if it is in this shard alone; None also if it was removed."""
        name = queue.settings.dead_letter
        target = None if name is None else self.names.get(name)
        if target is None or target.settings.fifo != queue.settings.fifo:
            return None
        # If one of them is in other shards too, the message departs, and the router chooses.
        return None if name in self.spread or queue.name in self.spread else target

    def _move(self, delivery: Delivery, to: QueueState, now_ms: int, dead: bool) -> Moved:
        return Moved(now_ms, delivery.queue, delivery.number, to.number, self.next_number, dead)

    def decide_dead_letter(self, delivery: Delivery, now_ms: int) -> Moved | Departed | None:
        """The event that takes a message to its queue's dead-letter queue, if there is one."""
        queue = self.queues[delivery.queue]
        target = self._dead_letter_of(queue)
        if target is not None:
            return self._move(delivery, target, now_ms, dead=True)
        name = queue.settings.dead_letter
        if name is None:
            return None
        here = self.names.get(name)
        if here is None:
            if name not in self.elsewhere:
                return None
        elif here.settings.fifo != queue.settings.fifo or not (
            name in self.spread or queue.name in self.spread
        ):
            return None
        shard = self.elsewhere.get(name, self.number)
        return Departed(now_ms, queue.number, delivery.number, delivery.epoch, shard, name)

    def decide_arrived(
        self, number: int, epoch: int, now_ms: int, to: tuple[int, int] = (0, 0)
    ) -> Arrived | None:
        """The event that ends a message which is durable in another shard; None if it has ended.

        `to` is that shard, and its number there.
        """
        delivery = self.departed.deliveries.get(number)
        if delivery is None or delivery.epoch != epoch or delivery.move is None:
            return None
        return Arrived(now_ms, delivery.move.source, number, epoch, *to)

    # Choosing and taking, in one step.

    pull = pulling.pull
    pull_chosen = pulling.pull_chosen

    def redrive(self, command: Redrive, now_ms: int) -> list[AnyEvent]:
        """Moves visible messages on, or back to where they came from."""
        queue = self.queue(command.queue)
        check_number("limit", command.limit, 1, PULL_LIMIT_MAX)
        to = self._redrive_target(queue, command.to)
        events: list[AnyEvent] = []
        kept: list[Delivery] = []
        checks_age = self.alarm.next_ms <= now_ms and queue.may_have_expired(now_ms)
        queue.order.begin_pull()
        while len(events) < command.limit and len(kept) < PULL_LIMIT_MAX:
            delivery = queue.order.take(queue.in_flight)
            if delivery is None:
                break
            if checks_age and queue.is_expired(delivery, now_ms):
                events.append(Expired(now_ms, queue.number, delivery.number))
                self.apply(events[-1])
                continue
            target = to or self._source_of(delivery)
            if target is None:
                # It stays in this queue, but is hidden until the loop ends: the next `take` must
                # return another message.
                kept.append(delivery)
                delivery.state = IN_FLIGHT
                continue
            events.append(self._move(delivery, target, now_ms, dead=False))
            self.apply(events[-1])
        for delivery in kept:
            delivery.state = VISIBLE
            queue.order.come_back(delivery)
        if kept and not events:
            raise InvalidField(
                f"to: none of the messages in {queue.name!r} ({len(kept)}) was dead-lettered from "
                "a queue that still exists; name the queue to move them to"
            )
        return events

    def return_chosen(self, command: ReturnIds, numbers: list[int], now_ms: int) -> list[AnyEvent]:
        """Ends the claims and the delays of these messages."""
        queue = self.queue(command.queue)
        events: list[AnyEvent] = []
        for number in numbers:
            delivery = queue.deliveries.get(number)
            if delivery is None or delivery.state == VISIBLE:
                continue
            ended: list[AnyEvent] = [DelayEnded(now_ms, queue.number, number, delivery.epoch)]
            if delivery.state == IN_FLIGHT:
                after = self.decide_after_return(delivery, now_ms)
                ended = [Released(now_ms, queue.number, number, delivery.epoch), *after]
            for event in ended:
                self.apply(event)
            events += ended
        return events

    def redrive_chosen(
        self, command: RedriveIds, numbers: list[int], now_ms: int
    ) -> list[AnyEvent]:
        """Moves those of these messages that are visible, on or back to where they came from."""
        queue = self.queue(command.queue)
        to = self._redrive_target(queue, command.to)
        events: list[AnyEvent] = []
        for number in numbers:
            delivery = queue.deliveries.get(number)
            if delivery is None or delivery.state != VISIBLE or queue.is_expired(delivery, now_ms):
                continue
            target = to or self._source_of(delivery)
            if target is not None and target is not queue:
                events.append(self._move(delivery, target, now_ms, dead=False))
                self.apply(events[-1])
        return events

    def _redrive_target(self, queue: QueueState, name: str | None) -> QueueState | None:
        """The queue that a redrive names; None if it names none. Raises RequestError."""
        to = None if name is None else self.queue(name)
        if to is queue:
            raise InvalidField(f"to: {queue.name!r} is the queue the messages are in")
        if to is not None and to.settings.fifo != queue.settings.fifo:
            raise InvalidField(f"to: {to.name!r} and {queue.name!r} must both be fifo, or neither")
        return to

    def _source_of(self, delivery: Delivery) -> QueueState | None:
        move = delivery.move
        return self.queues.get(move.source) if move is not None and move.dead else None

    settle = settling.settle
    settle_queue = settling.settle_queue
    settle_claim = settling.settle_claim

    # Deciding about queues.

    def decide_create(self, command: CreateQueue, now_ms: int) -> list[AnyEvent]:
        """The events that make a queue, and its dead-letter queue if there is none yet."""
        name = check_name(command.queue)
        existing = self.names.get(name)
        if existing is not None:
            settings = changed_settings(existing.settings, command.settings)
            if settings != existing.settings:
                fixed = settings.fifo != existing.settings.fifo
                raise QueueExists(
                    f"queue: {name!r} exists with other settings "
                    f"({_difference(existing.settings, settings)}); "
                    + ("use another name" if fixed else "configure it instead")
                )
            return []
        settings = changed_settings(QueueSettings(), command.settings)
        events: list[AnyEvent] = [QueueCreated(now_ms, self.next_queue, name, settings)]
        dead = settings.dead_letter
        if dead is not None:
            self._check_dead_letter(name, settings)
            if self._is_missing(dead):
                dead_settings = QueueSettings(fifo=settings.fifo)
                events.append(QueueCreated(now_ms, self.next_queue + 1, dead, dead_settings))
        return events

    def decide_configure(self, command: ConfigureQueue, now_ms: int) -> list[AnyEvent]:
        """The events that change a queue's settings."""
        queue = self.queue(command.queue)
        settings = changed_settings(queue.settings, command.settings)
        if settings.fifo != queue.settings.fifo:
            raise InvalidField(
                f"fifo: {queue.name!r} cannot be changed to or from fifo; make a new queue"
            )
        if settings == queue.settings:
            return []
        events: list[AnyEvent] = [QueueConfigured(now_ms, queue.number, settings)]
        if settings.dead_letter is not None:
            self._check_dead_letter(queue.name, settings)
            if self._is_missing(settings.dead_letter):
                dead_settings = QueueSettings(fifo=settings.fifo)
                events.append(
                    QueueCreated(now_ms, self.next_queue, settings.dead_letter, dead_settings)
                )
        return events

    def _is_missing(self, name: str) -> bool:
        return name not in self.names and name not in self.elsewhere

    def _check_dead_letter(self, name: str, settings: QueueSettings) -> None:
        dead = settings.dead_letter
        if dead == name:
            raise InvalidField(f"dead_letter: {name!r} cannot be its own dead-letter queue")
        target = None if dead is None else self.names.get(dead)
        if target is not None and target.settings.fifo != settings.fifo:
            raise InvalidField(f"dead_letter: {name!r} and {dead!r} must both be fifo, or neither")

    def decide_remove(self, name: str, now_ms: int, force: bool = True) -> QueueRemoved:
        """The event that ends a queue. Raises QueueInUse without `force`."""
        queue = self.queue(name)
        if not force:
            sources = [each.name for each in self.names.values() if _is_source(each, queue)]
            check_unused(name, sources)
        return QueueRemoved(now_ms, queue.number, len(queue.deliveries))

    def decide_purge(self, name: str, now_ms: int) -> QueuePurged:
        """The event that ends all messages of a queue."""
        queue = self.queue(name)
        return QueuePurged(now_ms, queue.number, len(queue.deliveries), self.next_number)

    # Reading.

    def peek(self, command: Peek) -> list[Delivery]:
        """Messages in one state, in order; none is changed."""
        queue = self.queue(command.queue)
        check_number("limit", command.limit, 1, PEEK_LIMIT_MAX)
        state = _STATES.get(str(command.state))
        if state is None:
            raise InvalidField(f"state: {command.state!r} is none of {', '.join(_STATES)}")
        return queue.in_state(state, command.limit)

    def peek_from(self, command: PeekFrom) -> list[Delivery]:
        """Messages in one state, in order of arrival, after one of them; none is changed."""
        queue = self.queue(command.queue)
        check_number("limit", command.limit, 1, PEEK_LIMIT_MAX)
        check_number("after", command.after, 0, 2**63 - 1)
        state = _STATES.get(str(command.state))
        if state is None:
            raise InvalidField(f"state: {command.state!r} is none of {', '.join(_STATES)}")
        found: list[Delivery] = []
        for piece in pieces_of(queue.deliveries):
            # Whole pieces of a large queue are passed over.
            newest = next(reversed(piece.values()), None)
            if newest is not None and newest.rank > command.after:
                later = (
                    each
                    for each in piece.values()
                    if each.rank > command.after and each.state == state
                )
                found += islice(later, command.limit - len(found))
        return found

    def outbox(self, limit: int = PULL_LIMIT_MAX) -> list[Owed]:
        """Messages that are owed to other shards, those that departed first before others."""
        return self.departed.owed(self.number, limit)

    def deliveries_in(self, queue: int) -> Mapping[int, Delivery]:
        """The messages of a queue, or of the outbox, by number; none if there is no such queue."""
        if queue == OUTBOX:
            return self.departed.deliveries
        found = self.queues.get(queue)
        return {} if found is None else found.deliveries

    def info(self, queue: QueueState) -> QueueInfo:
        """A queue's settings and dates."""
        return QueueInfo(queue.name, queue.settings, queue.created_at_ms, queue.configured_at_ms)

    def source_name(self, delivery: Delivery) -> str | None:
        """The queue a dead letter came from, while that queue exists."""
        source = self._source_of(delivery)
        return None if source is None else source.name

    # Changing: events taking effect.

    def apply(self, event: AnyEvent) -> None:
        """Applies the event: the only way in which state changes, live and in replay."""
        self._apply[type(event)](event)

    def pushed(self, event: Pushed) -> Delivery:
        """A message arrived; its delivery is returned so that its content can be placed."""
        self.next_number = event.number + 1
        return self.queues[event.queue].pushed(event)

    def push(self, command: Push, now_ms: int) -> Pushed | int:
        """Decides a push and applies it: `decide_push` and `apply` in one step, for the usual push.

        Returns the event, or the number of the message that an earlier push made.
        """
        try:
            queue = self.names[command.queue]
        except (KeyError, TypeError):
            queue = self.queue(command.queue)
        decided = queue.decide_push(command, now_ms, self.next_number)
        if type(decided) is Pushed:
            self.next_number = decided.number + 1
            queue.pushed(decided)
        return decided

    def push_run(self, queue: QueueState, run: Run) -> bool:
        """Applies a run of pushes to a standard queue, if all of them are new.

        False, and nothing has changed, if one has a dedup id that is known.
        """
        ids = run.dedup_ids
        if ids is not None and not queue.dedups.remember_new(ids, run.numbers, run.at_ms):
            return False
        self.arrived(queue, run.arrivals())
        return True

    def arrived(self, queue: QueueState, arrivals: Arrivals) -> None:
        """Plain messages arrived in a standard queue: the same as one `pushed` for each."""
        self.next_number = arrivals.numbers[-1] + 1
        queue.arrived(arrivals)

    def place(self, queue: int, number: int, content: Content) -> None:
        """Sets where the content of a message is stored; this is not part of the state."""
        kept = self.queues.get(queue)
        delivery = None if kept is None else kept.deliveries.get(number)
        if delivery is None:
            delivery = self.departed.deliveries.get(number)
        if delivery is not None:
            delivery.content = content

    def _moved(self, event: Moved) -> None:
        self.next_number = event.rank + 1
        self._note_move(event, event.to)
        old = self.queues[event.queue].moved_out(event)
        target = self.queues[event.to]
        if target.retention.noted_ms == NEVER_MS:
            target.retention.note(target.number, event.at_ms + target.settings.retention_ms)
        target.moved_in(event, old)

    def _note_move(self, event: Moved | Departed, to: int) -> None:
        moves = self.moves
        if moves is not None:
            origin, _ = moves.get(event.number, (event.queue, 0))
            moves[event.number] = (origin, to)

    def _departed(self, event: Departed) -> None:
        self._note_move(event, OUTBOX)
        self.departed.departed(event, self.queues[event.queue].moved_out(event))

    def _lost(self, event: Lost) -> None:
        if event.number in self.departed.deliveries:
            self.departed.ended(event.number)
        else:
            self.queues[event.queue].deleted(event)

    def _queue_created(self, event: QueueCreated) -> None:
        queue = QueueState(
            event.queue, event.name, event.settings, event.at_ms, self.alarm, self.discards
        )
        self.queues[event.queue] = queue
        self.names[event.name] = queue
        self.next_queue = max(self.next_queue, event.queue + 1)

    def _queue_configured(self, event: QueueConfigured) -> None:
        queue = self.queues[event.queue]
        if _without_notes(queue.settings) != _without_notes(event.settings):
            queue.configured_at_ms = event.at_ms
        retention_ms = queue.settings.retention_ms
        queue.use_settings(event.settings)
        # For an empty queue too: its next examination was set by the old retention.
        if event.settings.retention_ms != retention_ms:
            queue.retention.start_over()
            queue.retention.note(queue.number, event.at_ms)

    def _queue_removed(self, event: QueueRemoved) -> None:
        queue = self.queues.pop(event.queue)
        queue.removed()
        del self.names[queue.name]

    # Snapshots.

    def snapshot(self) -> ShardSnapshot:
        """The whole state as plain data."""
        snapshot = self.outline()
        for kept in snapshot.queues:
            kept.deliveries = list(self.queues[kept.number].deliveries.values())
        if self.departed.deliveries:
            outbox = QueueSnapshot(OUTBOX, "", QueueSettings(), 0, 0, [], [], [])
            outbox.deliveries = self.departed.listed()
            snapshot.queues.append(outbox)
        return snapshot

    def outline(self, *, with_dedups: bool = True) -> ShardSnapshot:
        """The state without its messages, and without its dedup ids if asked: both may be many."""
        return ShardSnapshot(
            self.next_number,
            self.next_queue,
            [
                QueueSnapshot(
                    queue.number,
                    queue.name,
                    queue.settings,
                    queue.created_at_ms,
                    queue.configured_at_ms,
                    [],
                    queue.dedups.entries() if with_dedups else [],
                    queue.attempt_entries(),
                )
                for queue in self.queues.values()
            ],
        )

    @classmethod
    def restore(cls, snapshot: ShardSnapshot) -> "ShardState":
        """The state that a snapshot holds."""
        shard = cls()
        shard.next_number = snapshot.next_number
        shard.next_queue = snapshot.next_queue
        for kept in snapshot.queues:
            if kept.number == OUTBOX:
                shard.departed.restored(kept.deliveries)
                shard.departed.sort()
                continue
            queue = QueueState(
                kept.number,
                kept.name,
                kept.settings,
                kept.created_at_ms,
                shard.alarm,
                shard.discards,
            )
            queue.configured_at_ms = kept.configured_at_ms
            shard.queues[kept.number] = shard.names[kept.name] = queue
            for at_ms, key, number in kept.dedups:
                queue.dedups.remember(key, number, at_ms)
            for at_ms, key, pairs in kept.attempts:
                queue.add_attempt(key, dict(pairs), at_ms)
            shard.restored(queue, [kept.deliveries])
        return shard

    def restored(self, queue: QueueState, parts: Iterable[Arrivals | list[Delivery]]) -> None:
        """Adds a queue's messages from a snapshot, in order of rank."""
        for part in parts:
            if isinstance(part, Arrivals):
                queue.arrived(part)
            else:
                queue.restored(part)
        if queue.deliveries:
            queue.retention.note(queue.number, 0)


def replay(events: Iterable[AnyEvent]) -> ShardState:
    """The state after these events."""
    shard = ShardState()
    for event in events:
        shard.apply(event)
    return shard


def _without_notes(settings: QueueSettings) -> QueueSettings:
    """The settings without notes: annotations whose name begins with a dot."""
    public = {name: text for name, text in settings.annotations.items() if name[0] != "."}
    return msgspec.structs.replace(settings, annotations=public)


def _check_held(delivery: Delivery, deadline_ms: int, held_ms_max: int) -> None:
    """Raises ClaimTooLong if a message's first claim would last longer than allowed."""
    # Only the time of the first claim is kept, so later claims are not checked.
    if delivery.epoch == 1 and deadline_ms - delivery.first_claimed_at_ms > held_ms_max:
        held_ms = deadline_ms - delivery.first_claimed_at_ms
        raise ClaimTooLong(
            f"visibility_ms: the message would be held for {held_ms} ms in all; "
            f"at most {held_ms_max} are allowed"
        )


def _renewal_if_late(delivery: Delivery, now_ms: int) -> list[AnyEvent]:
    """The event that makes a claim valid again whose receipt is used after it ran out."""
    if delivery.state == IN_FLIGHT:
        return []
    return [Extended(now_ms, delivery.queue, delivery.number, delivery.epoch, now_ms)]


def _difference(one: QueueSettings, other: QueueSettings) -> str:
    return ", ".join(
        f"{name} is {getattr(one, name)!r}, asked for {getattr(other, name)!r}"
        for name in QueueSettings.__struct_fields__
        if getattr(one, name) != getattr(other, name)
    )


def _is_source(queue: QueueState, dead_letter: QueueState) -> bool:
    """Whether a queue's dead letters go to that other queue."""
    return queue is not dead_letter and queue.settings.dead_letter == dead_letter.name


def _nothing(event: AnyEvent) -> None:
    pass
