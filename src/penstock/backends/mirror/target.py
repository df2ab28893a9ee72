"""The mirror's side: batches of events, done to the queues of any service.

Every message that the mirror pushes carries a mark, its number on the primary, in its context. A
claim on the primary is a claim here: pulled messages are recognised by their marks, others that a
pull brings are released to their places. So a message is hidden here while it is in flight there,
and a delete there is a delete here with the receipt that is held. A message that is not found, as
when somebody consumed it here, is looked for again a few times and then forgotten.

What a lost connection or a kill leaves uncertain, and how it becomes certain again:

    pushes without an answer     the queue's marks are read, and what is missing is pushed in order;
                                 later the queue is read once more, and second copies are deleted
    claims                       one is tried; if it has ended, those of its queue are made again
    deletes that were answered   the last of them are looked for: a broker that was killed may have
                                 forgotten them
    purges, removals, moves      the state is saved after each, so that none is repeated after later
                                 pushes were done
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

# How much longer a message is hidden here than there, so that the primary's own event ends it.
_SLACK_MS: Final = 60_000
_HIDDEN_MS_MAX: Final = 20 * 60_000
# Messages that a search may take aside before it gives up.
_ASIDE_MAX: Final = 2_000
_LOOK_MAX: Final = 100_000
_MISSING_MAX: Final = 10_000
# Deletes that a killed broker may have forgotten.
_RECENT_MAX: Final = 10_000
_RECENT_S: Final = 60.0
# If a connection is lost again and again while it is recovered, the next step goes on.
_ROUNDS_MAX: Final = 3
# After pushes that were repeated: until then a connection that was lost has ended at the broker.
_DOUBLES_S: Final = 10.0
# Settings that mean the same to a consumer here as there; the others would act on their own.
_COPIED: Final = ("visibility_ms", "wait_ms", "body_bytes_max")


class HiddenClaim(NamedTuple):
    """A claim on the mirror: its queue, its receipt, and until when its message is to be hidden."""

    queue: str
    receipt: Any
    until_ms: int


class MirrorTarget:
    """The queues of the service that mirrors. Not thread-safe."""

    def __init__(
        self,
        service: QueueService,
        state: MirrorState,
        pause: Callable[[float], None],
        now_ms: Callable[[], int],
    ) -> None:
        """`pause` is called between tries while the mirror cannot be reached; it may raise.

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
        # Queues whose marks must be read before the next pushes, which may have been done.
        self.uncertain: set[str] = set()
        # What was found there, by queue.
        self._known: dict[str, set[int]] = {}
        # The losses of connections after which everything was found again.
        self._recovered = 0
        # Messages that were deleted lately, with their queue and when.
        self._recent: OrderedDict[int, tuple[str, float]] = OrderedDict()
        # When to look for second copies, by queue.
        self._doubles_at_s: dict[str, float] = {}

    def trust(self) -> None:
        """Says that no push from here on can have been done before."""
        self.uncertain.clear()
        self._known.clear()

    def held(self, *, is_last: bool) -> dict[int, tuple[str, str]]:
        """The claims on the mirror, to be saved; none if they are many, unless it `is_last`."""
        if not is_last and len(self._held) > HELD_SAVED_MAX:
            return {}
        return {number: (claim.queue, str(claim.receipt)) for number, claim in self._held.items()}

    # Queues.

    def create(self, name: str, settings: QueueSettings) -> None:
        """Makes a queue that keeps messages until the primary says otherwise."""
        default = QueueSettings()
        copied = {
            field: getattr(settings, field)
            for field in _COPIED
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
        """Changes the settings that are the same on both sides, as far as they are allowed here."""
        for field in _COPIED:
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
        """Removes a queue, with what is held of it."""
        self._forget(name)
        self._state.fifo.pop(name, None)
        try:
            self._calls.execute(DeleteQueue(name))
        except RequestError as error:
            if not isinstance(error, QueueNotFound):
                self._calls.note_refused(error)

    def purge(self, name: str) -> None:
        """Removes every message of a queue."""
        # What is held is not purged everywhere: some services leave what is in flight.
        self._delete_held([n for n, each in self._held.items() if each.queue == name])
        self._forget(name)
        try:
            self._calls.execute(Purge(name))
        except QueueNotFound:
            pass
        except RequestError as error:
            self._calls.note_refused(error)

    def _forget(self, name: str) -> None:
        """Drops what is known of the messages of a queue that are about to go."""
        # Those that were to move away, and were not found yet, must not go with the others; those
        # that were to come end where they are.
        self._move_later(name)
        coming = [n for moves in self._state.unmoved.values() for n in moves]
        self._end_unmoved(name, coming)
        for number in [n for n, each in self._held.items() if each.queue == name]:
            del self._held[number]
        for number in [n for n, each in self._recent.items() if each[0] == name]:
            del self._recent[number]
        self._state.missing.pop(name, None)
        self._state.unmoved.pop(name, None)
        self._known.pop(name, None)
        self.uncertain.discard(name)
        self._doubles_at_s.pop(name, None)

    # Messages.

    def apply(self, name: str, batch: QueueBatch) -> None:
        """Does what happened to the messages of a queue.

        What is held ends first: in a FIFO queue it stands before the others of its group.
        """
        self.push(name, batch.pushed)
        self._release(batch)
        self._extend([n for n in batch.lent if n in self._held], batch)
        self._delete_held([n for n in batch.ended if n in self._held])
        if self._state.unmoved:
            self._end_unmoved(name, batch.ended)
        # What was deleted is among the recent ones now; what is left had no claim, or a lost one.
        left = [n for n in batch.ended if n not in self._recent]
        wanted = [n for n in batch.lent if n not in self._held]
        if wanted or left:
            self._hide_batch(name, wanted, left, batch)
            self._delete_held([n for n in left if n in self._held])
            self._miss(name, [n for n in left if n not in self._recent])

    def _hide_batch(
        self, name: str, wanted: Sequence[int], ended: Sequence[int], batch: QueueBatch
    ) -> None:
        """Claims messages that are to be hidden, and others that are to be deleted."""
        longest_ms = max((each.deadline_ms for each in batch.lent.values()), default=0)
        found = self._find(name, (*wanted, *ended), self._hidden_ms(longest_ms))
        for number, claim in found.items():
            lent = batch.lent.get(number)
            until_ms = lent.deadline_ms if lent else self._now_ms()
            self._held[number] = HiddenClaim(name, claim.proof, until_ms + _SLACK_MS)

    def _hidden_ms(self, deadline_ms: int) -> int:
        """How long a message is hidden at first that is in flight until then."""
        left_ms = max(0, deadline_ms - self._now_ms())
        return min(_HIDDEN_MS_MAX, left_ms + _SLACK_MS)

    def push(self, name: str, pushed: Sequence[Pushed]) -> None:
        """Pushes messages in order, without those that are there already."""
        make, is_fifo, now_ms = self._pushes.push, name in self._state.fifo, self._now_ms()
        for some in slices(pushed, ITEMS_MAX):
            pushes = {each.number: make(name, is_fifo, each, now_ms) for each in some}
            self._push_commands(name, pushes)

    def _push_commands(self, name: str, pushes: dict[int, Push]) -> None:
        """Pushes to one queue, by the numbers of the messages, until each is done or refused."""
        left = dict(pushes)
        while left:
            if name in self.uncertain:
                self._known[name] = self._look_through(name)
                self.uncertain.discard(name)
                self._watch_doubles(name, left.values())
            known = self._known.get(name, ())
            left = {number: push for number, push in left.items() if number not in known}
            if left:
                left = self._push_once(name, left)

    def _push_once(self, name: str, pushes: dict[int, Push]) -> dict[int, Push]:
        """Pushes once; returns what is to be tried again."""
        calls = self._calls
        try:
            replies = calls.execute(Batch([*pushes.values()]), retry_lost=False)
        except BackendLost:
            # Whether the pushes were done is unknown: the next turn looks.
            self.uncertain.add(name)
            return pushes
        again: dict[int, Push] = {}
        is_missing = is_away = False
        for (number, push), reply in zip(pushes.items(), replies, strict=True):
            if not isinstance(reply, PenstockError):
                calls.counts.pushed += 1
            elif isinstance(reply, QueueNotFound | UnavailableError):
                # A connection that is lost amid a batch leaves some items done, some not, and some
                # of which that is unknown.
                again[number] = push
                is_missing |= isinstance(reply, QueueNotFound)
                is_away |= isinstance(reply, UnavailableError)
                if isinstance(reply, BackendLost):
                    self.uncertain.add(name)
                if isinstance(reply, UnavailableError):
                    calls.note_away(reply)
            else:
                calls.note_refused(reply)
        if is_missing:
            # Somebody removed the queue here.
            self.create(name, QueueSettings(fifo=name in self._state.fifo))
        if is_away:
            calls.wait()
        return again

    def hide(self, name: str, wanted: dict[int, int]) -> None:
        """Claims messages, each until its deadline, as far as they are found near the head."""
        hidden_ms = self._hidden_ms(max(wanted.values(), default=0))
        for number, claim in self._find(name, wanted, hidden_ms).items():
            self._held[number] = HiddenClaim(name, claim.proof, wanted[number] + _SLACK_MS)

    def _find(self, name: str, wanted: Iterable[int], hidden_ms: int) -> dict[int, Claim]:
        """The claims on messages of these numbers; others that a pull brings are released."""
        left = set(wanted)
        found: dict[int, Claim] = {}
        aside: list[Claim] = []
        while left and len(aside) < _ASIDE_MAX:
            # At first as many as should be there, then more and more.
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
            deadline_ms = batch.lent[number].deadline_ms
            claim = self._held[number]._replace(until_ms=deadline_ms + _SLACK_MS)
            self._held[number] = claim
            items.append(Extend(claim.queue, claim.receipt, self._hidden_ms(deadline_ms)))
        self._calls.batch(items)

    def _release(self, batch: QueueBatch) -> None:
        now_ms = self._now_ms()
        items = []
        for number, returned in batch.returned.items():
            claim = self._held.pop(number, None)
            if claim is not None:
                delay_ms = max(0, returned.visible_at_ms - now_ms) if returned.visible_at_ms else 0
                items.append(Release(claim.queue, claim.receipt, delay_ms))
        self._calls.batch(items)

    def _miss(self, name: str, numbers: Iterable[int]) -> None:
        """Has messages that are to be deleted looked for later."""
        missing = self._state.missing.setdefault(name, [])
        known = set(missing)
        missing += [number for number in numbers if number not in known]
        while len(missing) > _MISSING_MAX:
            del missing[0]
            self.counts.unmatched += 1
        if not missing:
            del self._state.missing[name]

    def _delete_held(self, numbers: Iterable[int]) -> list[int]:
        """Deletes messages that are held; returns those whose claims had ended."""
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

    def _end_unmoved(self, name: str, ended: Iterable[int]) -> None:
        """Has messages deleted where they still are, instead of moved to where they have ended."""
        for number in ended:
            source = self._take_unmoved(name, number)
            if source is not None:
                self._miss(source, [number])

    def _take_unmoved(self, to: str, number: int) -> str | None:
        """Cancels a move that was not done; returns the queue the message is in, None if none."""
        for source, moves in self._state.unmoved.items():
            if number in moves and moves[number][0] == to:
                del moves[number]
                return source
        return None

    def move(self, source: str, to: str, ranks: dict[int, int]) -> None:
        """Moves messages to the end of another queue: pushed there, then deleted here.

        `ranks` has their places in the queue they go to, by number, in order. Those that are not
        found are moved when they are.
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
        self._miss(source, [n for n, reply in lost if isinstance(reply, PenstockError)])
        for number, rank in ranks.items():
            # It may be on its way to this queue itself; then what is found here was its first copy.
            before = self._take_unmoved(source, number)
            if number not in found:
                self._state.unmoved.setdefault(before or source, {})[number] = to, rank
            elif before is not None:
                self._miss(before, [number])

    def _delete_stale(self, name: str, coming: Set[int]) -> None:
        """Deletes copies that stayed in a queue of messages that come there again.

        Later they could not be told from these.
        """
        if coming & set(self._state.missing.get(name, ())):
            self._look_through(name, _ASIDE_MAX)
            left = [n for n in self._state.missing.pop(name, ()) if n not in coming]
            self._miss(name, left)

    def _move_later(self, source: str) -> None:
        """Moves what was not found when it was to be moved."""
        by_queue: dict[str, dict[int, int]] = {}
        for number, (to, rank) in self._state.unmoved.pop(source, {}).items():
            by_queue.setdefault(to, {})[number] = rank
        for to, ranks in by_queue.items():
            # The push may have been done before the process was killed.
            self.uncertain.add(to)
            self.move(source, to, ranks)

    # What is looked for.

    def seek_missing(self, forget: bool) -> None:
        """Looks again for messages to delete or move; with `forget`, those not found are given up.

        Also reads the queues whose last pushes were repeated, and tries whether claims live and
        deletes have held: a service that went away and came back meanwhile has told nobody.
        """
        self._check_claims()
        self._check_deletes()
        now_s = time.monotonic()
        for name in [n for n, at_s in self._doubles_at_s.items() if at_s <= now_s]:
            self._look_through(name)
            self._doubles_at_s.pop(name, None)
        for name in list(self._state.unmoved):
            self._move_later(name)
        for name in list(self._state.missing):
            numbers = self._state.missing.pop(name)
            self.hide(name, dict.fromkeys(numbers, self._now_ms()))
            left = [number for number in numbers if number not in self._held]
            left += self._delete_held([number for number in numbers if number in self._held])
            if not forget:
                self._miss(name, left)
            else:
                self.counts.unmatched += len(left)
        if forget:
            self.counts.unmatched += sum(map(len, self._state.unmoved.values()))
            self._state.unmoved.clear()

    @property
    def is_seeking(self) -> bool:
        """Whether there is something to look for."""
        return bool(self._state.missing or self._state.unmoved)

    def recover(self) -> None:
        """After a connection was lost: makes the claims again that ended with it.

        Looks also for what was deleted shortly before.
        """
        for _ in range(_ROUNDS_MAX):
            if self._recovered == self._calls.losses:
                return
            self._recovered = self._calls.losses
            since_s = time.monotonic() - _RECENT_S
            lately = {queue for queue, at_s in self._recent.values() if at_s >= since_s}
            checked = self._check_claims()
            for name in (lately | self._state.missing.keys()) - checked:
                self._look_through(name, _ASIDE_MAX)

    def _check_claims(self) -> set[str]:
        """Tries the oldest claim of each queue; if it has ended, makes all of them again.

        Returns the queues of which that was so.
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
            self._look_through(name, _ASIDE_MAX)
        return ended

    def _check_deletes(self) -> None:
        """Looks at the first message of each queue of which some were deleted lately.

        A delete that was forgotten brings its message back to the head.
        """
        for name in {queue for queue, _ in self._recent.values()}:
            first = self._calls.pull(name, 1, _SLACK_MS)
            self._calls.release(first)
            if any(mark_of(claim) in self._recent for claim in first):
                self._look_through(name, _ASIDE_MAX)

    def _renewal(self, claim: HiddenClaim) -> Extend:
        return Extend(claim.queue, claim.receipt, self._hidden_ms(claim.until_ms - _SLACK_MS))

    def _look_through(self, name: str, at_least: int | None = None) -> set[int]:
        """Reads a queue and sets right what is found: the numbers of its messages.

        Messages that are to be deleted are, and so are second copies; claims that have ended are
        made again. With `at_least` reading ends after so many messages, or a limit if some of these
        were not found.
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
                    # Pushed twice. The same id again is one that a lost connection gave back.
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
        self._miss(name, wanted & ended)
        return copies.keys() | {n for n, each in self._held.items() if each.queue == name}

    def _watch_doubles(self, name: str, pushes: Iterable[Push]) -> None:
        """Has a queue read again when pushes that may have been done twice are visible."""
        longest_ms = max((push.delay_ms or 0 for push in pushes), default=0)
        at_s = time.monotonic() + _DOUBLES_S + longest_ms / 1_000
        self._doubles_at_s[name] = max(at_s, self._doubles_at_s.get(name, 0))

    def drop_recent(self) -> None:
        """Forgets deletes that no broker can still forget."""
        since_s = time.monotonic() - _RECENT_S
        recent = self._recent
        while recent:
            if len(recent) <= _RECENT_MAX and recent[next(iter(recent))][1] >= since_s:
                return
            recent.popitem(last=False)

    def close(self) -> None:
        """Closes the service."""
        self._calls.close()
