"""Repeats batches of events on the queues of the mirror's service.

Every message that the mirror pushes has a mark in its context: its number on the primary. While a
message is claimed on the primary it is claimed on the mirror, too: the mirror pulls, identifies
messages by their marks, and releases those that it did not look for. So a message that is in flight
on the primary is hidden on the mirror, and its delete is repeated with the receipt of that claim. A
message that is not found, because a consumer of the mirror has taken it, is searched for a few
times and then given up.

After a lost connection or a kill it is unknown what the mirror's service has executed:

    pushes without an answer     the marks in the queue are read, and missing messages are pushed in
                                 order; later the queue is read again, and duplicates are deleted
    claims                       one of each queue is extended; if it has ended, all claims of this
                                 queue are made again
    deletes that were answered   the latest are checked: a broker that was killed may have undone
                                 them
    purges, removals, moves      the state is saved after each, so that none is repeated after later
                                 pushes
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from typing import Any, Final, NamedTuple

from penstock.backends.mirror.batches import QueueBatch
from penstock.backends.mirror.calls import ITEMS_MAX, MirrorCalls, slices
from penstock.backends.mirror.marks import MarkedPushes, mark_of
from penstock.backends.mirror.state import HELD_SAVED_MAX, MirrorState
from penstock.core.events import Pushed
from penstock.errors import (
    BackendLost,
    InvalidField,
    InvalidReceipt,
    PenstockError,
    QueueExists,
    QueueNotFound,
    RequestError,
    UnavailableError,
    UnsupportedOperation,
)
from penstock.service import (
    TTL_MS_MAX,
    Batch,
    Claim,
    ConfigureQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    Extend,
    Purge,
    Push,
    QueueService,
    QueueSettings,
    Release,
    Stats,
)

# How much longer a claim lasts on the mirror than on the primary, so that the primary's event ends
# it before its deadline does.
_SLACK_MS: Final = 60_000
_HIDDEN_MS_MAX: Final = 20 * 60_000
# Other messages that a search may claim before it ends.
_ASIDE_MAX: Final = 2_000
_LOOK_MAX: Final = 100_000
_MISSING_MAX: Final = 10_000
# Deletes that are checked after a lost connection.
_RECENT_MAX: Final = 10_000
_RECENT_S: Final = 60.0
# Attempts to recover if the connection is lost again meanwhile; the next step continues then.
_ROUNDS_MAX: Final = 3
# How long after a repeated push duplicates are searched for: the broker has noticed the end of the
# lost connection by then.
_DUPLICATES_S: Final = 10.0
# Settings that are copied, and the behaviour that a service needs for it, if any. The others, such
# as dead letters, would change the mirror by themselves.
_COPIED: Final = {
    "visibility_ms": "",
    "wait_ms": "",
    "body_bytes_max": "",
    "priority_age_ms": "priority age",
}


class HiddenClaim(NamedTuple):
    """A claim on the mirror: its queue, its receipt, and when the message may be visible again."""

    queue: str
    receipt: Any
    until_ms: int


class MirrorTarget:
    """The queues of the mirror's service. Not thread-safe."""

    def __init__(
        self,
        service: QueueService,
        state: MirrorState,
        pause: Callable[[float], None],
        now_ms: Callable[[], int],
    ) -> None:
        """`pause` is called between attempts while the mirror cannot be reached; it may raise.

        `now_ms` is the primary's clock.
        """
        self._calls = MirrorCalls(service, pause)
        self.counts = self._calls.counts
        self._state = state
        self._now_ms = now_ms
        self._held = {
            number: HiddenClaim(queue, receipt, now_ms() + _SLACK_MS)
            for number, (queue, receipt) in state.held.items()
        }
        self._pushes = MarkedPushes(service.LACKS, state.journal[:12])
        self._copied = [field for field, needs in _COPIED.items() if needs not in service.LACKS]
        # Queues whose marks must be read before the next pushes, which may have been made already.
        self.uncertain: set[str] = set()
        # The messages that were found in them, by queue.
        self._known: dict[str, set[int]] = {}
        # The number of lost connections up to the last one that `recover` has handled.
        self._recovered = 0
        # Messages that were deleted recently: their queue and the time.
        self._recent: OrderedDict[int, tuple[str, float]] = OrderedDict()
        # When to search for duplicates, by queue.
        self._duplicates_at_s: dict[str, float] = {}

    def end_uncertainty(self) -> None:
        """Later pushes cannot have been made already: queues need not be read before them."""
        self.uncertain.clear()
        self._known.clear()

    def held(self, *, is_last: bool) -> dict[int, tuple[str, str]]:
        """The claims on the mirror, to be saved; if they are many, only with `is_last`."""
        if not is_last and len(self._held) > HELD_SAVED_MAX:
            return {}
        return {number: (claim.queue, str(claim.receipt)) for number, claim in self._held.items()}

    # Queues.

    def create(self, name: str, settings: QueueSettings) -> None:
        """Creates a queue whose messages do not expire: the primary's events remove them."""
        default = QueueSettings()
        copied = {
            field: getattr(settings, field)
            for field in self._copied
            if getattr(settings, field) != getattr(default, field)
        }
        wanted: dict[str, Any] = {**copied, "retention_ms": TTL_MS_MAX}
        if settings.fifo and self._pushes.has_fifo:
            wanted["fifo"] = copied["fifo"] = True
            self._state.fifo[name] = None
        for choice in (wanted, copied, {}):
            try:
                self._calls.execute(CreateQueue(name, choice))
                return
            except QueueExists:
                return
            except (InvalidField, UnsupportedOperation) as error:
                # A service may have limits of its own, such as 14 days of retention.
                if not choice:
                    self._calls.note_refused(error)

    def configure(self, name: str, settings: QueueSettings) -> None:
        """Changes the copied settings, as far as the mirror's service allows them."""
        for field in self._copied:
            with suppress(RequestError):
                change = {field: getattr(settings, field)}
                self._calls.execute(ConfigureQueue(name, change))

    def is_empty(self, name: str) -> bool:
        """Whether a queue has no messages, or does not exist."""
        try:
            return self._calls.execute(Stats(name)).messages == 0
        except QueueNotFound:
            return True

    def remove(self, name: str) -> None:
        """Removes a queue and its claims."""
        self._forget(name)
        self._state.fifo.pop(name, None)
        try:
            self._calls.execute(DeleteQueue(name))
        except RequestError as error:
            if not isinstance(error, QueueNotFound):
                self._calls.note_refused(error)

    def purge(self, name: str) -> None:
        """Removes every message of a queue."""
        # Held messages are deleted first: some services do not purge messages in flight.
        self._delete_held([n for n, each in self._held.items() if each.queue == name])
        self._forget(name)
        try:
            self._calls.execute(Purge(name))
        except QueueNotFound:
            pass
        except RequestError as error:
            self._calls.note_refused(error)

    def _forget(self, name: str) -> None:
        """Drops what is known about the messages of a queue that is purged or removed."""
        # Messages that should move to another queue are moved first. Messages that should move to
        # this queue are deleted where they are.
        self._move_later(name)
        coming = [n for moves in self._state.unmoved.values() for n in moves]
        self._cancel_moves(name, coming)
        for number in [n for n, each in self._held.items() if each.queue == name]:
            del self._held[number]
        for number in [n for n, each in self._recent.items() if each[0] == name]:
            del self._recent[number]
        self._state.missing.pop(name, None)
        self._state.unmoved.pop(name, None)
        self._known.pop(name, None)
        self.uncertain.discard(name)
        self._duplicates_at_s.pop(name, None)

    # Messages.

    def apply(self, name: str, batch: QueueBatch) -> None:
        """Repeats the events of a queue's messages.

        Held claims end first: in a FIFO queue they block the other messages of their group.
        """
        self.push(name, batch.pushed)
        self._release(batch)
        self._extend([n for n in batch.claimed if n in self._held], batch)
        self._delete_held([n for n in batch.ended if n in self._held])
        if self._state.unmoved:
            self._cancel_moves(name, batch.ended)
        # Deleted messages are in `_recent` now; the others had no claim, or lost it.
        left = [n for n in batch.ended if n not in self._recent]
        wanted = [n for n in batch.claimed if n not in self._held]
        if wanted or left:
            self._hide_batch(name, wanted, left, batch)
            self._delete_held([n for n in left if n in self._held])
            self._add_missing(name, [n for n in left if n not in self._recent])

    def _hide_batch(
        self, name: str, wanted: Sequence[int], ended: Sequence[int], batch: QueueBatch
    ) -> None:
        """Claims messages that should be hidden or deleted."""
        longest_ms = max((each.deadline_ms for each in batch.claimed.values()), default=0)
        found = self._find(name, (*wanted, *ended), self._hidden_ms(longest_ms))
        for number, claim in found.items():
            claimed = batch.claimed.get(number)
            until_ms = claimed.deadline_ms if claimed else self._now_ms()
            self._held[number] = HiddenClaim(name, claim.proof, until_ms + _SLACK_MS)

    def _hidden_ms(self, deadline_ms: int) -> int:
        """The visibility timeout for a message that is in flight until the deadline."""
        left_ms = max(0, deadline_ms - self._now_ms())
        return min(_HIDDEN_MS_MAX, left_ms + _SLACK_MS)

    def push(self, name: str, pushed: Sequence[Pushed]) -> None:
        """Pushes messages in order, except those that are there already."""
        make, is_fifo, now_ms = self._pushes.push, name in self._state.fifo, self._now_ms()
        for some in slices(pushed, ITEMS_MAX):
            pushes = {each.number: make(name, is_fifo, each, now_ms) for each in some}
            self._push_commands(name, pushes)

    def _push_commands(self, name: str, pushes: dict[int, Push]) -> None:
        """Pushes messages, by number, to one queue until each is accepted or refused."""
        left = dict(pushes)
        while left:
            if name in self.uncertain:
                self._known[name] = self._reconcile(name)
                self.uncertain.discard(name)
                self._plan_duplicate_search(name, left.values())
            known = self._known.get(name, ())
            left = {number: push for number, push in left.items() if number not in known}
            if left:
                left = self._push_once(name, left)

    def _push_once(self, name: str, pushes: dict[int, Push]) -> dict[int, Push]:
        """Pushes once; returns the pushes to try again."""
        calls = self._calls
        try:
            replies = calls.execute(Batch([*pushes.values()]), retry_lost=False)
        except BackendLost:
            # Unknown whether the pushes were made: the queue is read before the next attempt.
            self.uncertain.add(name)
            return pushes
        again: dict[int, Push] = {}
        is_missing = is_unreachable = False
        for (number, push), reply in zip(pushes.items(), replies, strict=True):
            if not isinstance(reply, PenstockError):
                calls.counts.pushed += 1
            elif isinstance(reply, QueueNotFound | UnavailableError):
                # If the connection is lost during a batch, some items were executed, some were not,
                # and for others it is unknown.
                again[number] = push
                is_missing |= isinstance(reply, QueueNotFound)
                is_unreachable |= isinstance(reply, UnavailableError)
                if isinstance(reply, BackendLost):
                    self.uncertain.add(name)
                if isinstance(reply, UnavailableError):
                    calls.note_unreachable(reply)
            else:
                calls.note_refused(reply)
        if is_missing:
            # Another client has removed the queue on the mirror.
            self.create(name, QueueSettings(fifo=name in self._state.fifo))
        if is_unreachable:
            calls.wait()
        return again

    def hide(self, name: str, wanted: dict[int, int]) -> None:
        """Claims messages, each until its deadline, if they are found near the head."""
        hidden_ms = self._hidden_ms(max(wanted.values(), default=0))
        for number, claim in self._find(name, wanted, hidden_ms).items():
            self._held[number] = HiddenClaim(name, claim.proof, wanted[number] + _SLACK_MS)

    def _find(self, name: str, wanted: Iterable[int], hidden_ms: int) -> dict[int, Claim]:
        """Claims on the messages with these numbers; other messages it pulls are released."""
        left = set(wanted)
        found: dict[int, Claim] = {}
        aside: list[Claim] = []
        while left and len(aside) < _ASIDE_MAX:
            # At first as many as are wanted, then more with each pull.
            claims = self._calls.pull(name, max(len(left), len(aside)), hidden_ms)
            if not claims:
                break
            for claim in claims:
                number = mark_of(claim)
                if number in left:
                    left.discard(number)
                    found[number] = claim
                else:
                    aside.append(claim)
        self._calls.release(aside)
        return found

    def _extend(self, numbers: Iterable[int], batch: QueueBatch) -> None:
        items = []
        for number in numbers:
            deadline_ms = batch.claimed[number].deadline_ms
            claim = self._held[number]._replace(until_ms=deadline_ms + _SLACK_MS)
            self._held[number] = claim
            items.append(Extend(claim.queue, claim.receipt, self._hidden_ms(deadline_ms)))
        self._calls.batch(items)

    def _release(self, batch: QueueBatch) -> None:
        now_ms = self._now_ms()
        items = []
        for number, released in batch.released.items():
            claim = self._held.pop(number, None)
            if claim is not None:
                delay_ms = max(0, released.visible_at_ms - now_ms) if released.visible_at_ms else 0
                items.append(Release(claim.queue, claim.receipt, delay_ms))
        self._calls.batch(items)

    def _add_missing(self, name: str, numbers: Iterable[int]) -> None:
        """Notes messages that should be deleted and were not found."""
        missing = self._state.missing.setdefault(name, [])
        known = set(missing)
        missing += [number for number in numbers if number not in known]
        while len(missing) > _MISSING_MAX:
            del missing[0]
            self.counts.unmatched += 1
        if not missing:
            del self._state.missing[name]

    def _delete_held(self, numbers: Iterable[int]) -> list[int]:
        """Deletes held messages; returns those whose claims had ended."""
        lost = []
        now_s = time.monotonic()
        for some in slices(numbers, ITEMS_MAX):
            claims = [self._held.pop(number) for number in some]
            replies = self._calls.batch([Delete(each.queue, each.receipt) for each in claims])
            for number, claim, reply in zip(some, claims, replies, strict=True):
                if isinstance(reply, PenstockError):
                    lost.append(number)
                else:
                    self.counts.deleted += 1
                    self._recent[number] = claim.queue, now_s
        return lost

    # Moves.

    def _cancel_moves(self, name: str, ended: Iterable[int]) -> None:
        """Cancels moves of messages that have ended in their target queue; deletes them instead."""
        for number in ended:
            source = self._cancel_move(name, number)
            if source is not None:
                self._add_missing(source, [number])

    def _cancel_move(self, to: str, number: int) -> str | None:
        """Cancels an open move; returns the queue that the message is in, None if there is none."""
        for source, moves in self._state.unmoved.items():
            if number in moves and moves[number][0] == to:
                del moves[number]
                return source
        return None

    def move(self, source: str, to: str, ranks: dict[int, int]) -> None:
        """Moves messages to the end of another queue: pushed there, then deleted here.

        `ranks` has their ranks in the target queue, by number, in order. Messages that are not
        found are moved when they are found.
        """
        held = [self._held.pop(number) for number in ranks if number in self._held]
        self._calls.batch([Release(each.queue, each.receipt) for each in held])
        found = self._find(source, ranks, _SLACK_MS)
        moved = [number for number in ranks if number in found]
        self._known.setdefault(source, set()).difference_update(moved)
        self._delete_stale(to, found.keys())
        make, is_fifo = self._pushes.move, to in self._state.fifo
        for some in slices(moved, ITEMS_MAX):
            self._push_commands(to, {n: make(to, is_fifo, found[n], ranks[n]) for n in some})
        replies = self._calls.batch([Delete(source, found[number].proof) for number in moved])
        lost = zip(moved, replies, strict=True)
        self._add_missing(source, [n for n, reply in lost if isinstance(reply, PenstockError)])
        for number, rank in ranks.items():
            # An earlier move to this queue may be open; then the message is still where it was.
            before = self._cancel_move(source, number)
            if number not in found:
                self._state.unmoved.setdefault(before or source, {})[number] = to, rank
            elif before is not None:
                self._add_missing(before, [number])

    def _delete_stale(self, name: str, coming: Set[int]) -> None:
        """Deletes old copies of messages that return to a queue.

        Later they could not be distinguished from the new ones.
        """
        if coming & set(self._state.missing.get(name, ())):
            self._reconcile(name, _ASIDE_MAX)
            left = [n for n in self._state.missing.pop(name, ()) if n not in coming]
            self._add_missing(name, left)

    def _move_later(self, source: str) -> None:
        """Moves the messages of a queue that could not be moved before."""
        by_queue: dict[str, dict[int, int]] = {}
        for number, (to, rank) in self._state.unmoved.pop(source, {}).items():
            by_queue.setdefault(to, {})[number] = rank
        for to, ranks in by_queue.items():
            # An earlier process may have pushed them before it was killed.
            self.uncertain.add(to)
            self.move(source, to, ranks)

    # Searching.

    def search_missing(self, forget: bool) -> None:
        """Searches again for messages to delete or move; with `forget`, gives up the others.

        Also searches for duplicates of repeated pushes, and checks claims and recent deletes: a
        restart of the mirror's service may not have been noticed.
        """
        self._check_claims()
        self._check_deletes()
        now_s = time.monotonic()
        for name in [n for n, at_s in self._duplicates_at_s.items() if at_s <= now_s]:
            self._reconcile(name)
            self._duplicates_at_s.pop(name, None)
        for name in list(self._state.unmoved):
            self._move_later(name)
        for name in list(self._state.missing):
            numbers = self._state.missing.pop(name)
            self.hide(name, dict.fromkeys(numbers, self._now_ms()))
            left = [number for number in numbers if number not in self._held]
            left += self._delete_held([number for number in numbers if number in self._held])
            if not forget:
                self._add_missing(name, left)
            else:
                self.counts.unmatched += len(left)
        if forget:
            self.counts.unmatched += sum(map(len, self._state.unmoved.values()))
            self._state.unmoved.clear()

    @property
    def has_missing(self) -> bool:
        """Whether there are messages to search for."""
        return bool(self._state.missing or self._state.unmoved)

    def recover(self) -> None:
        """After a lost connection: makes the claims again that ended with it.

        Also deletes messages again whose deletes were undone.
        """
        for _ in range(_ROUNDS_MAX):
            if self._recovered == self._calls.losses:
                return
            self._recovered = self._calls.losses
            since_s = time.monotonic() - _RECENT_S
            lately = {queue for queue, at_s in self._recent.values() if at_s >= since_s}
            checked = self._check_claims()
            for name in (lately | self._state.missing.keys()) - checked:
                self._reconcile(name, _ASIDE_MAX)

    def _check_claims(self) -> set[str]:
        """Extends the oldest claim of each queue; if it has ended, makes all of the queue again.

        Returns the queues whose claims had ended.
        """
        oldest: dict[str, HiddenClaim] = {}
        for claim in self._held.values():
            oldest.setdefault(claim.queue, claim)
        replies = self._calls.batch([self._renewal(claim) for claim in oldest.values()])
        ended = {
            name
            for name, reply in zip(oldest, replies, strict=True)
            if isinstance(reply, InvalidReceipt | UnavailableError)
        }
        for name in ended:
            self._reconcile(name, _ASIDE_MAX)
        return ended

    def _check_deletes(self) -> None:
        """Checks the first message of each queue with recent deletes.

        A message whose delete was undone is at the head of its queue.
        """
        for name in {queue for queue, _ in self._recent.values()}:
            first = self._calls.pull(name, 1, _SLACK_MS)
            self._calls.release(first)
            if any(mark_of(claim) in self._recent for claim in first):
                self._reconcile(name, _ASIDE_MAX)

    def _renewal(self, claim: HiddenClaim) -> Extend:
        return Extend(claim.queue, claim.receipt, self._hidden_ms(claim.until_ms - _SLACK_MS))

    def _reconcile(self, name: str, at_least: int | None = None) -> set[int]:
        """Reads a queue and corrects it; returns the numbers of its messages.

        Missing messages and duplicates that are found are deleted; claims that have ended are made
        again. With `at_least`, reading ends after that many messages; if a wanted message was not
        among them, after `_LOOK_MAX`.
        """
        held = {n: each for n, each in self._held.items() if each.queue == name}
        replies = self._calls.batch([self._renewal(each) for each in held.values()])
        lost = {
            number: self._held.pop(number)
            for number, reply in zip(held, replies, strict=True)
            if isinstance(reply, InvalidReceipt | UnavailableError)
        }
        ended = set(self._state.missing.pop(name, ()))
        wanted = ended | lost.keys()
        recent = {n for n, each in self._recent.items() if each[0] == name}
        copies: dict[int, str] = {}
        found: dict[int, Claim] = {}
        aside: list[Claim] = []
        dropped: list[Claim] = []
        while some := self._calls.pull(name, ITEMS_MAX, _SLACK_MS):
            for claim in some:
                number = mark_of(claim)
                if number is None:
                    aside.append(claim)
                elif number in ended or number in recent:
                    dropped.append(claim)
                elif copies.setdefault(number, claim.id) != claim.id:
                    # A duplicate. The same id twice is one message that was released meanwhile.
                    dropped.append(claim)
                elif number in lost:
                    found[number] = claim
                else:
                    aside.append(claim)
            wanted -= copies.keys() | {mark_of(each) for each in dropped}
            if at_least is not None and len(aside) >= (_LOOK_MAX if wanted else at_least):
                break
        replies = self._calls.batch([Delete(name, claim.proof) for claim in dropped])
        self._calls.release(aside)
        for claim, reply in zip(dropped, replies, strict=True):
            number = mark_of(claim)
            if number in ended:
                if isinstance(reply, PenstockError):
                    wanted.add(number)
                else:
                    self.counts.deleted += 1
        for number, claim in found.items():
            self._held[number] = lost[number]._replace(receipt=claim.proof)
        self._calls.batch([self._renewal(self._held[number]) for number in found])
        self._add_missing(name, wanted & ended)
        present = copies.keys() | {n for n, each in self._held.items() if each.queue == name}
        # A broker may give back what a lost connection held only after it was read: claims that
        # were not found come first, where the next check of the claims sees that they have ended.
        self._held = {n: each for n, each in lost.items() if n not in found} | self._held
        return present

    def _plan_duplicate_search(self, name: str, pushes: Iterable[Push]) -> None:
        """Plans to read a queue again when possible duplicates of these pushes are visible."""
        longest_ms = max((push.delay_ms or 0 for push in pushes), default=0)
        at_s = time.monotonic() + _DUPLICATES_S + longest_ms / 1_000
        self._duplicates_at_s[name] = max(at_s, self._duplicates_at_s.get(name, 0))

    def forget_old_deletes(self) -> None:
        """Drops deletes that are too old to be undone by a crash of the broker."""
        since_s = time.monotonic() - _RECENT_S
        recent = self._recent
        while recent:
            if len(recent) <= _RECENT_MAX and recent[next(iter(recent))][1] >= since_s:
                return
            recent.popitem(last=False)

    def close(self) -> None:
        """Closes the service."""
        self._calls.close()
