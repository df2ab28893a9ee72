"""The audit's checks of every message, over the journal of a store in a test.

The names are those of `penstock.spark.checks`. There each check is a query over a lake; here all
are one pass over some hundred events. What concerns several shards or damage is left to the lake.
"""

from typing import Any, Final, NamedTuple

from penstock.core.events import (
    AnyEvent,
    Claimed,
    ClaimExpired,
    DelayEnded,
    Deleted,
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
from penstock.errors import InvalidField
from penstock.output import counted
from penstock.server.testing.observed import ObservedStore
from penstock.service import DEDUP_WINDOW_MS, QueueSettings

_VISIBLE: Final = "visible"
_DELAYED: Final = "delayed"
_IN_FLIGHT: Final = "in flight"
_GONE: Final = "gone"


class BrokenCheck(NamedTuple):
    """A check of the audit that does not hold, and the event that shows it."""

    check: str
    event: AnyEvent | None
    detail: str

    def __str__(self) -> str:
        shown = "" if self.event is None else f": {self.event}"
        return f"{self.check}: {self.detail}{shown}"


class _Judged:
    """A message as the events so far tell it."""

    __slots__ = (
        *("claims", "deadline_ms", "epoch", "expires_at_ms", "group", "number", "queue", "rank"),
        *("state", "visible_at_ms"),
    )

    def __init__(self, event: Pushed) -> None:
        self.number = self.rank = event.number
        self.queue = event.queue
        self.group = event.group
        self.state = _DELAYED if event.visible_at_ms > event.at_ms else _VISIBLE
        self.visible_at_ms = event.visible_at_ms
        self.expires_at_ms = event.expires_at_ms
        self.epoch = self.deadline_ms = 0
        # How often it was claimed in the queue that it is in.
        self.claims = 0


class Judge:
    """Follows the events of a journal; `broken` has what should not have happened."""

    def __init__(self) -> None:
        self.broken: list[BrokenCheck] = []
        self._messages: dict[int, _Judged] = {}
        self._settings: dict[int, QueueSettings] = {}
        self._configured: set[int] = set()
        # When a dedup id of a queue, and a group, was used.
        self._dedups_ms: dict[tuple[int, str, str], int] = {}

    def follow(self, event: AnyEvent) -> None:
        """Checks the next event, and applies it."""
        if type(event) is Pushed:
            self._push(event)
        elif type(event) is QueueCreated:
            self._settings[event.queue] = event.settings
        elif type(event) is QueueConfigured:
            self._settings[event.queue] = event.settings
            self._configured.add(event.queue)
        elif type(event) is QueueRemoved or type(event) is QueuePurged:
            self._empty(event)
        elif (number := getattr(event, "number", None)) is not None:
            message = self._messages.get(number)
            if message is None:
                self._wrong("pushed first", event, "nothing is known of the message")
            elif message.state == _GONE:
                self._wrong("nothing after the end", event, "the message had ended")
            else:
                self._check(message, event)
                self._apply(message, event)

    def compare(self, store: ObservedStore) -> None:
        """Checks that the store holds what the events leave in each queue."""
        for number, queue in store.engine.shard.queues.items():
            told = {each.number for each in self._in(number)}
            held = set(queue.deliveries)
            if told != held:
                detail = f"{queue.name} holds {sorted(held)}, and its events leave {sorted(told)}"
                self._wrong("nothing lost", None, detail)

    def _wrong(self, check: str, event: AnyEvent | None, detail: str) -> None:
        self.broken.append(BrokenCheck(check, event, detail))

    def _in(self, queue: int) -> list[_Judged]:
        return [
            each for each in self._messages.values() if each.queue == queue and each.state != _GONE
        ]

    def _push(self, event: Pushed) -> None:
        if event.number in self._messages:
            self._wrong("pushed once", event, "its number was used before")
        self._messages[event.number] = _Judged(event)
        if event.dedup_id is None:
            return
        settings = self._settings[event.queue]
        group = (event.group or "") if settings.dedup_per_group else ""
        key = (event.queue, group, event.dedup_id)
        used_ms = self._dedups_ms.get(key)
        if used_ms is not None and event.at_ms < used_ms + DEDUP_WINDOW_MS:
            self._wrong("one message per dedup id", event, "its dedup id was used before")
        self._dedups_ms[key] = event.at_ms

    def _empty(self, event: QueueRemoved | QueuePurged) -> None:
        for each in self._in(event.queue):
            if type(event) is QueueRemoved or each.rank < event.before:  # type: ignore[union-attr]
                each.state = _GONE
        self._dedups_ms = {key: at for key, at in self._dedups_ms.items() if key[0] != event.queue}

    def _check(self, message: _Judged, event: Any) -> None:
        at_ms, state = event.at_ms, message.state
        match event:
            case Claimed():
                self._check_claim(message, event)
            case Extended() if state == _VISIBLE and event.epoch == message.epoch:
                pass
            case Extended() | Released() | Deleted():
                if state != _IN_FLIGHT or event.epoch != message.epoch:
                    self._wrong("current claim only", event, f"it was {state}")
            case ClaimExpired():
                if state != _IN_FLIGHT or event.epoch != message.epoch:
                    self._wrong("expiry of the current claim", event, f"it was {state}")
                elif at_ms < message.deadline_ms:
                    detail = f"its deadline was {message.deadline_ms}"
                    self._wrong("expiry after the deadline", event, detail)
            case DelayEnded() if at_ms < message.visible_at_ms:
                self._wrong("delay in full", event, f"it was delayed until {message.visible_at_ms}")
            case Expired() if state == _IN_FLIGHT or at_ms < message.expires_at_ms:
                self._wrong("expired when due", event, f"it was {state}")
            case Moved():
                self._check_move(message, event)

    def _check_claim(self, message: _Judged, event: Claimed) -> None:
        if message.state == _IN_FLIGHT:
            self._wrong("one holder", event, f"its claim {message.epoch} had not ended")
        elif message.state != _VISIBLE:
            self._wrong("claim of the visible", event, f"it was {message.state}")
        if event.epoch != message.epoch + 1:
            self._wrong("epochs rise", event, f"its last claim was {message.epoch}")
        if not self._settings[message.queue].fifo:
            return
        for other in self._in(message.queue):
            is_before = other.group == message.group and other.rank < message.rank
            if is_before and other.state in (_VISIBLE, _DELAYED):
                self._wrong("order in the group", event, f"message {other.number} is before it")

    def _check_move(self, message: _Judged, event: Moved) -> None:
        if message.state == _IN_FLIGHT:
            self._wrong("move of the visible", event, f"it was {message.state}")
        allowed = self._settings[message.queue].max_receives
        # A queue whose settings were changed may have had another limit before.
        is_judged = event.dead and message.queue not in self._configured
        if is_judged and message.claims != allowed:
            detail = f"it was claimed {message.claims} times, and {allowed} are allowed"
            self._wrong("dead letter after N", event, detail)

    def _apply(self, message: _Judged, event: Any) -> None:
        match event:
            case Claimed():
                message.state, message.epoch = _IN_FLIGHT, event.epoch
                message.deadline_ms = event.deadline_ms
                message.claims += 1
            case Extended():
                message.state, message.deadline_ms = _IN_FLIGHT, event.deadline_ms
            case Released():
                message.visible_at_ms = event.visible_at_ms
                message.state = _DELAYED if event.visible_at_ms > event.at_ms else _VISIBLE
            case ClaimExpired() | DelayEnded():
                message.state = _VISIBLE
            case Moved():
                message.state, message.queue, message.rank = _VISIBLE, event.to, event.rank
                message.claims = 0
            case Deleted() | Expired() | Lost():
                message.state = _GONE


def judge(store: ObservedStore) -> list[BrokenCheck]:
    """The checks of the audit that do not hold for what has happened in this store.

    Raises InvalidField if not all of it is known any more.
    """
    if store.journal.dropped:
        raise InvalidField(
            f"audit: the events of {counted(store.journal.dropped, 'command')} are not kept any "
            "more; reset the account, or use one for each test"
        )
    judging = Judge()
    for event in store.journal.events:
        judging.follow(event)
    judging.compare(store)
    return judging.broken
