"""One queue's delivery state machine: the states of a message from its push to its end.

                      ┌── delay ends ──┐  ┌─────── claim ───────┐
                      │                ▼  │                     ▼
    push ─────────▶ DELAYED           VISIBLE               IN_FLIGHT ── delete ──▶ GONE
                      ▲                  ▲                   │  ▲  │
                      │                  └─ release, timeout ┘  └──┘ extend
                      └─────────── release with a delay ─────┘

A message that is not in flight also leaves when its TTL ends, or when it moves to another queue;
one in flight stays until its claim ends. `decide_…` methods return events and change nothing; the
methods named like events are the only ones that change state. Claiming is the exception: choosing a
message takes it out of the order, so a pull chooses and claims in one step, and `claimed` replays
it.
"""

from collections import deque
from itertools import islice
from operator import attrgetter
from typing import Final

from penstock.core import pushing
from penstock.core.delivery import (
    DELAYED,
    GONE,
    IN_FLIGHT,
    PLACE_SIZE_MASK,
    VISIBLE,
    Arrivals,
    Delivery,
    Move,
    expiry_ms,
    not_plain,
    receives,
    size_bytes,
)
from penstock.core.discards import Discards
from penstock.core.due import DEADLINE, EXPIRY, NEVER_MS, Alarm, Due
from penstock.core.events import (
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
    Released,
)
from penstock.core.pieces import PIECE_MAX, ByNumber, divided, newest_of
from penstock.core.receipts import Ticket
from penstock.core.retention import Retention
from penstock.core.visible import FifoOrder, StandardOrder
from penstock.core.window import Key, Window
from penstock.errors import InvalidReceipt, StaleReceipt
from penstock.service import (
    DAY_MS,
    DEDUP_WINDOW_MS,
    QueueSettings,
)

ATTEMPT_WINDOW_MS: Final = 14 * DAY_MS
ATTEMPTS_MAX: Final = 10_000
DEDUPS_MAX: Final = 10_000_000
_RELEASED_MAX: Final = 1_024


class QueueState:
    """A queue's messages, their order and their counts."""

    __slots__ = (
        "_alarm",
        "_attempts_open",
        "_discards",
        "_has_all_releases",
        "_released",
        "attempts",
        "claims",
        "configured_at_ms",
        "created_at_ms",
        "dead_letters",
        "deadlines",
        "dedups",
        "delayed",
        "deletes",
        "deliveries",
        "expiries",
        "in_flight",
        "lowest_moved",
        "name",
        "number",
        "order",
        "pushes",
        "retention",
        "returns",
        "settings",
        "stored_bytes",
        "takes_first",
    )

    def __init__(
        self,
        number: int,
        name: str,
        settings: QueueSettings,
        created_at_ms: int,
        alarm: Alarm,
        discards: Discards,
    ) -> None:
        self.number = number
        self.name = name
        self.use_settings(settings)
        self.created_at_ms = created_at_ms
        self.configured_at_ms = created_at_ms
        # In order of arrival, which is also the order in which retention ends them.
        self.deliveries: ByNumber[Delivery] = {}
        self.order: StandardOrder | FifoOrder = self._empty_order()
        self.in_flight = 0
        self.delayed = 0
        self.stored_bytes = 0
        # What happened here since the queue was loaded, for `QueueCounts`; not part of the state.
        self.pushes = self.claims = self.deletes = self.returns = self.dead_letters = 0
        # No message that came from another queue ever had a lower number than this.
        self.lowest_moved = 1 << 62
        self.dedups: Window[int] = Window(DEDUP_WINDOW_MS, DEDUPS_MAX)
        # The claims of an attempt: message numbers and their epochs then.
        self.attempts: Window[dict[int, int]] = Window(ATTEMPT_WINDOW_MS, ATTEMPTS_MAX)
        # Attempts that may not be over yet: of the others only the id must be kept.
        self._attempts_open: deque[dict[int, int]] = deque()
        # The last epochs of messages that were released, for the text of StaleReceipt; not part of
        # the state. Incomplete after many releases, and after a restart.
        self._released: dict[int, int] = {}
        self._has_all_releases = True
        self._alarm = alarm
        self._discards = discards
        self.retention = Retention(alarm)
        self.deadlines = self._no_deadlines()
        self.expiries = self._no_expiries()

    def use_settings(self, settings: QueueSettings) -> None:
        """Uses these settings from now on."""
        self.settings = settings
        # Whether a pull of one message can claim what `order.take` returns, without examining it:
        # most can, and one flag is read faster than four settings.
        limits = (settings.max_receives, settings.priority_age_ms)
        self.takes_first = not (settings.fifo or settings.paused or limits != (None, None))

    def _no_deadlines(self) -> Due:
        return Due(self.number, DEADLINE, attrgetter("due_at_ms"), self._alarm, self._discards)

    def _no_expiries(self) -> Due:
        return Due(self.number, EXPIRY, attrgetter("expires_at_ms"), self._alarm, self._discards)

    def _empty_order(self) -> StandardOrder | FifoOrder:
        return FifoOrder() if self.settings.fifo else StandardOrder()

    @property
    def visible(self) -> int:
        """How many messages could be pulled now, groups permitting."""
        return len(self.deliveries) - self.in_flight - self.delayed

    def in_state(self, state: int, limit: int) -> list[Delivery]:
        """The next messages in one state, in the order of the queue.

        `deliveries` is in order of arrival; only priorities make another order. The search ends
        after `limit` messages, or after the last message of this state.
        """
        order = self.order
        if state == VISIBLE and isinstance(order, StandardOrder) and not order.is_by_arrival:
            return order.ahead(limit)
        counts = {VISIBLE: self.visible, DELAYED: self.delayed, IN_FLIGHT: self.in_flight}
        matching = (each for each in self.deliveries.values() if each.state == state)
        return list(islice(matching, min(limit, counts[state])))

    def noted_ms(self, kind: int) -> int:
        """When something of this kind may be due next, as noted with the alarm."""
        if kind == DEADLINE:
            return self.deadlines.noted_ms
        return self.expiries.noted_ms if kind == EXPIRY else self.retention.noted_ms

    def is_due(self, now_ms: int) -> bool:
        """Whether anything in this queue may be due."""
        return self.deadlines.noted_ms <= now_ms or self.may_have_expired(now_ms)

    def may_have_expired(self, now_ms: int) -> bool:
        """Whether there may be messages that have expired and are not settled yet."""
        return self.expiries.noted_ms <= now_ms or self.retention.noted_ms <= now_ms

    # Deciding: the methods of this section change nothing.

    decide_push = pushing.decide_push
    decide_run = pushing.decide_run

    def dedup_key(self, dedup_id: str, group: str | None) -> Key:
        """The key under which a dedup id is kept."""
        return (group or "", dedup_id) if self.settings.dedup_per_group else dedup_id

    def held(self, ticket: Ticket, late: bool = False) -> Delivery | None:
        """The message a receipt is for, if its claim is valid; None if the message is gone.

        With `late`, the receipt of a claim that ran out counts too, unless the message was claimed
        again since; never on a FIFO queue. Raises InvalidReceipt for another queue's receipt,
        StaleReceipt if the claim has ended.
        """
        if ticket.queue != self.number:
            raise InvalidReceipt(f"receipt: it is for a claim in another queue than {self.name!r}")
        delivery = self.deliveries.get(ticket.number)
        if delivery is None:
            return None
        may_be_late = late and not self.settings.fifo
        if may_be_late and delivery.epoch == ticket.epoch and delivery.state == VISIBLE:
            return delivery
        if delivery.epoch != ticket.epoch or delivery.state != IN_FLIGHT:
            raise StaleReceipt(
                f"receipt: claim {ticket.epoch} of this message has ended "
                f"({self._how_it_ended(delivery, ticket.epoch)}); "
                "pull the message again for a new receipt"
            )
        return delivery

    def _how_it_ended(self, delivery: Delivery, epoch: int) -> str:
        if delivery.epoch != epoch:
            return "the message was claimed again"
        if delivery.move is not None and delivery.move.epoch >= epoch:
            return "the message was moved to another queue, and is back"
        if delivery.state == DELAYED or self._released.get(delivery.number) == epoch:
            return "it was released"
        if self._has_all_releases:
            return "its visibility ran out"
        return "its visibility ran out, or it was released some time ago"

    def is_expired(self, delivery: Delivery, now_ms: int) -> bool:
        """Whether the message has outlived its TTL or the queue's retention."""
        return expiry_ms(delivery, self.settings.retention_ms) <= now_ms

    def is_dead(self, delivery: Delivery) -> bool:
        """Whether the message was claimed as often as it may be here."""
        limit = self.settings.max_receives
        return limit is not None and receives(delivery) >= limit

    def attempt(self, attempt_id: str, now_ms: int) -> list[Delivery] | None:
        """The claims of an earlier pull with this id: all of them, or none if one has ended."""
        epochs = self.attempts.find(attempt_id, now_ms)
        if epochs is None:
            return None
        if self._is_over(epochs):
            return []
        deliveries = [self.deliveries[number] for number in epochs]
        # A claim whose deadline has passed is over, though it may not be settled yet.
        live = all(each.state == IN_FLIGHT and each.due_at_ms > now_ms for each in deliveries)
        return deliveries if live else []

    def _is_over(self, epochs: dict[int, int]) -> bool:
        """Whether one of these claims has ended for good, so that they cannot all be valid."""
        for number, epoch in epochs.items():
            delivery = self.deliveries.get(number)
            if delivery is None or delivery.epoch != epoch:
                return True
            if delivery.move is not None and delivery.move.epoch >= epoch:
                return True
        return False

    def attempt_entries(self) -> list[tuple[int, Key, list[tuple[int, int]]]]:
        """The attempts that are remembered, oldest first; of those that are over, only the id."""
        return [
            (at_ms, key, [] if self._is_over(epochs) else list(epochs.items()))
            for at_ms, key, epochs in self.attempts.entries()
        ]

    # Changing: each method below is one event taking effect.

    def pushed(self, event: Pushed) -> Delivery:
        """A message arrived."""
        number = event.number
        delivery = Delivery(self.number, number, number, event, event.at_ms)
        if event.group is not None:
            delivery.group = event.group
        if event.priority:
            delivery.priority = event.priority
        if event.visible_at_ms:
            self._hide(delivery, event.visible_at_ms)
        if event.dedup_id is not None:
            key = self.dedup_key(event.dedup_id, event.group)
            self.dedups.remember(key, number, event.at_ms)
        deliveries = self.deliveries
        if type(deliveries) is dict:
            deliveries[number] = delivery
            if len(deliveries) > PIECE_MAX:
                self.deliveries = divided(deliveries)
        else:
            newest_of(deliveries)[number] = delivery
        self.order.join(delivery)
        self.pushes += 1
        self.stored_bytes += event.size_bytes
        if event.expires_at_ms:
            delivery.expires_at_ms = event.expires_at_ms
            self.expiries.add(event.expires_at_ms, delivery)
        elif self.retention.noted_ms == NEVER_MS:
            self.retention.note(self.number, event.at_ms + self.settings.retention_ms)
        return delivery

    def claimed(self, event: Claimed) -> None:
        """A message was claimed, in a journal that is being replayed."""
        delivery = self.deliveries[event.number]
        self.claim_taken(delivery, event)
        self.order.leave(delivery)

    def claim_taken(self, delivery: Delivery, event: Claimed) -> None:
        """Puts a message in flight that `order.take` has just returned."""
        delivery.state = IN_FLIGHT
        delivery.epoch = event.epoch
        delivery.due_at_ms = event.deadline_ms
        if not delivery.first_claimed_at_ms:
            delivery.first_claimed_at_ms = event.at_ms
        self.in_flight += 1
        self.claims += 1
        self.deadlines.add(event.deadline_ms, delivery)
        if delivery.group is not None:
            self.order.claimed(delivery.group, delivery)
        if event.attempt_id is not None:
            self.remember_attempt(event)

    def claim_all_taken(
        self, deliveries: list[Delivery], at_ms: int, deadline_ms: int, holder: str | None
    ) -> list[Claimed]:
        """Puts messages in flight that `order.take_plain` has just returned; returns the events."""
        for delivery in deliveries:
            delivery.state = IN_FLIGHT
            delivery.epoch += 1
            delivery.due_at_ms = deadline_ms
            if not delivery.first_claimed_at_ms:
                delivery.first_claimed_at_ms = at_ms
        self.in_flight += len(deliveries)
        self.claims += len(deliveries)
        self.deadlines.add_all(deadline_ms, deliveries)
        queue = self.number
        return [
            Claimed(at_ms, queue, each.number, each.epoch, deadline_ms, None, holder)
            for each in deliveries
        ]

    def remember_attempt(self, event: Claimed) -> None:
        """Adds this claim to those of its attempt."""
        if event.attempt_id is None:
            return
        epochs = self.attempts.find(event.attempt_id, event.at_ms)
        if epochs is None:
            epochs = {}
            self._drop_ended_attempts()
            self.add_attempt(event.attempt_id, epochs, event.at_ms)
        epochs[event.number] = event.epoch

    def add_attempt(self, attempt_id: Key, epochs: dict[int, int], at_ms: int) -> None:
        """Remembers the claims of an attempt."""
        self.attempts.remember(attempt_id, epochs, at_ms)
        self._attempts_open.append(epochs)

    def _drop_ended_attempts(self) -> None:
        """Checks two old attempts, for each new one: of an ended one only the id is kept."""
        for _ in range(min(2, len(self._attempts_open))):
            epochs = self._attempts_open.popleft()
            if not epochs or self._is_over(epochs):
                epochs.clear()
            else:
                self._attempts_open.append(epochs)

    def _end_claim(self, number: int) -> Delivery:
        delivery = self.deliveries[number]
        self.deadlines.discard(delivery.due_at_ms, delivery)
        delivery.due_at_ms = 0
        self.in_flight -= 1
        return delivery

    def _hide(self, delivery: Delivery, until_ms: int) -> None:
        delivery.state = DELAYED
        delivery.due_at_ms = until_ms
        self.delayed += 1
        self.deadlines.add(until_ms, delivery)

    def delay_ended(self, event: DelayEnded) -> None:
        """A delayed message is visible."""
        delivery = self.deliveries[event.number]
        self.deadlines.discard(delivery.due_at_ms, delivery)
        delivery.due_at_ms = 0
        delivery.state = VISIBLE
        self.delayed -= 1
        if delivery.epoch:
            self._note_return(delivery, event.at_ms)
        self.order.come_back(delivery)

    def _note_return(self, delivery: Delivery, at_ms: int) -> None:
        """Stores when a message of a FIFO queue came back: its group is ordered by that instant."""
        if self.settings.fifo:
            delivery.due_at_ms = at_ms

    def extended(self, event: Extended) -> None:
        """A claim has a new deadline; one that had run out is valid again."""
        delivery = self.deliveries[event.number]
        if delivery.state == VISIBLE:
            delivery.state = IN_FLIGHT
            self.in_flight += 1
            if delivery.group is not None:
                self.order.claimed(delivery.group, delivery)
            self.order.leave(delivery)
        else:
            self.deadlines.discard(delivery.due_at_ms, delivery)
        delivery.due_at_ms = event.deadline_ms
        self.deadlines.add(event.deadline_ms, delivery)

    def returned(self, event: Released | ClaimExpired) -> Delivery:
        """A claim ended: its message is visible again at its old place, or delayed first."""
        delivery = self._end_claim(event.number)
        self.returns += 1
        until_ms = 0
        if isinstance(event, Released):
            until_ms = event.visible_at_ms
            if len(self._released) >= _RELEASED_MAX:
                self._released.clear()
                self._has_all_releases = False
            self._released[event.number] = event.epoch
        if until_ms:
            self._hide(delivery, until_ms)
        else:
            delivery.state = VISIBLE
            self._note_return(delivery, event.at_ms)
        if delivery.group is not None:
            self.order.unclaimed(delivery.group, delivery)
        if not until_ms:
            self.order.come_back(delivery)
        return delivery

    def delete_held(self, ticket: Ticket, now_ms: int) -> Deleted | None:
        """Deletes the message of a valid claim, which is what most deletes do.

        The fast path of `ShardState.decide_delete` and `apply`. In every other case it returns
        None and changes nothing.
        """
        delivery = self.deliveries.get(ticket.number)
        if (
            delivery is None
            or delivery.epoch != ticket.epoch
            or delivery.state != IN_FLIGHT
            or delivery.due_at_ms <= now_ms
            or ticket.queue != self.number
        ):
            return None
        event = Deleted(now_ms, self.number, ticket.number, ticket.epoch)
        self.deleted(event)
        return event

    def deleted(self, event: Deleted | Lost) -> None:
        """The message was deleted by its holder, or its content is damaged."""
        # `_end_claim` and `_remove_delivery` in one, for speed: most messages end here.
        delivery = self.deliveries.pop(event.number)
        self.deadlines.discard(delivery.due_at_ms, delivery)
        delivery.due_at_ms = 0
        delivery.state = GONE
        self.in_flight -= 1
        self.deletes += 1
        content = delivery.content
        self.stored_bytes -= (
            content & PLACE_SIZE_MASK if isinstance(content, int) else content.size_bytes
        )
        if delivery.expires_at_ms:
            self.expiries.discard(delivery.expires_at_ms, delivery)
        if delivery.group is not None:
            self.order.unclaimed(delivery.group, delivery)
        if delivery.rank <= self.retention.rank:
            self.retention.passed -= 1

    def expired(self, event: Expired) -> None:
        """The message reached its TTL or the queue's retention, and was not in flight."""
        self._withdraw(event.number)

    def moved_out(self, event: Moved | Departed) -> Delivery:
        """The message left for another queue or shard; returns its delivery here, which is GONE."""
        if isinstance(event, Departed) or event.dead:
            self.dead_letters += 1
        return self._withdraw(event.number)

    def _withdraw(self, number: int) -> Delivery:
        delivery = self.deliveries[number]
        if delivery.state == DELAYED:
            self.deadlines.discard(delivery.due_at_ms, delivery)
            delivery.due_at_ms = 0
            self.delayed -= 1
        delivery.state = GONE
        self._remove_delivery(delivery)
        self.order.leave(delivery)
        return delivery

    def _remove_delivery(self, delivery: Delivery) -> None:
        del self.deliveries[delivery.number]
        self.stored_bytes -= size_bytes(delivery)
        if delivery.expires_at_ms:
            self.expiries.discard(delivery.expires_at_ms, delivery)
        if delivery.rank <= self.retention.rank:
            self.retention.passed -= 1

    def moved_in(self, event: Moved, old: Delivery) -> None:
        """The message arrived from another queue: new here, but with the same number and epoch.

        The epoch continues: if it started at zero, old receipts would become valid again.
        """
        delivery = Delivery(
            queue=self.number,
            number=old.number,
            rank=event.rank,
            content=old.content,
            pushed_at_ms=old.pushed_at_ms,
            epoch=old.epoch,
            priority=old.priority,
            group=old.group,
            first_claimed_at_ms=old.first_claimed_at_ms,
            move=Move(event.at_ms, event.queue, old.epoch, event.dead),
        )
        self.lowest_moved = min(self.lowest_moved, old.number)
        self._admit(delivery)

    def _admit(self, delivery: Delivery) -> None:
        self.deliveries[delivery.number] = delivery
        self.deliveries = divided(self.deliveries)
        self.order.join(delivery)
        self.stored_bytes += size_bytes(delivery)

    def dropped(self, delivery: Delivery) -> None:
        """One message is removed, whatever its state, as by a purge."""
        if delivery.state == IN_FLIGHT:
            self._end_claim(delivery.number)
            delivery.state = VISIBLE
            if delivery.group is not None:
                self.order.unclaimed(delivery.group, delivery)
        self._withdraw(delivery.number)

    def purged(self) -> None:
        """Every message is removed, and every dedup id of a FIFO queue."""
        self.cleared()
        if self.settings.fifo:
            self._discards.add(self.dedups)
            self.dedups = Window(DEDUP_WINDOW_MS, DEDUPS_MAX)

    def removed(self) -> None:
        """The queue is removed, with every message and every remembered id."""
        self.cleared()
        self._discards.add(self.dedups, self.attempts)

    def cleared(self) -> None:
        """Every message is removed, whatever its state, in constant time.

        The deliveries keep their states: nothing refers to them any more.
        """
        self._discards.add(self.order, self.deadlines, self.expiries, self.deliveries)
        self.deliveries = {}
        self.order = self._empty_order()
        self.deadlines = self._no_deadlines()
        self.expiries = self._no_expiries()
        self.retention.start_over()
        self.in_flight = self.delayed = self.stored_bytes = 0

    def restored(self, deliveries: list[Delivery]) -> None:
        """Adds the messages of a snapshot, in order of rank."""
        self._has_all_releases = False
        newest_of(self.deliveries).update({each.number: each for each in deliveries})
        self.deliveries = divided(self.deliveries)
        self.stored_bytes += sum(map(size_bytes, deliveries))
        for delivery in deliveries:
            self.order.join(delivery)
        for delivery in not_plain(deliveries):
            self._resume(delivery)

    def arrived(self, arrivals: Arrivals) -> None:
        """Adds plain messages to a standard queue, in order, without a loop over them."""
        assert isinstance(self.order, StandardOrder)
        newest = newest_of(self.deliveries)
        newest.update(zip(arrivals.numbers, arrivals.deliveries, strict=True))
        self.deliveries = divided(self.deliveries)
        self.pushes += len(arrivals.deliveries)
        self.stored_bytes += arrivals.size_bytes
        self.order.join_plain(arrivals.deliveries)
        if self.retention.noted_ms == NEVER_MS:
            first = arrivals.deliveries[0]
            self.retention.note(self.number, first.pushed_at_ms + self.settings.retention_ms)

    def _resume(self, delivery: Delivery) -> None:
        if delivery.move is not None:
            self.lowest_moved = min(self.lowest_moved, delivery.number)
        if delivery.expires_at_ms:
            self.expiries.add(delivery.expires_at_ms, delivery)
        if delivery.state == VISIBLE:
            return
        self.deadlines.add(delivery.due_at_ms, delivery)
        if delivery.state == DELAYED:
            self.delayed += 1
        else:
            self.in_flight += 1
            if delivery.group is not None:
                self.order.claimed(delivery.group, delivery)
