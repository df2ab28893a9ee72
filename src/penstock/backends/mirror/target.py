"""The mirror's side: batches of events, done to the queues of any service.

Every message that the mirror pushes carries a mark, its number on the primary, in its context. A
claim on the primary is a claim here: pulled messages are recognised by their marks, others that a
pull brings are released to their places. So a message is hidden here while it is in flight there,
and a delete there is a delete here with the receipt that is held. A message that is not found, as
when somebody consumed it here, is looked for again a few times and then forgotten.

A step may be repeated after a crash. A repeated push has the same dedup id, and before pushes of
which it is uncertain whether they were done, the queue's marks are read; other steps find that
there is nothing left to do.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple, TypeVar

from penstock.backends.mirror.batches import QueueBatch
from penstock.backends.mirror.state import MirrorState
from penstock.core.events import Pushed
from penstock.errors import (
    BackendLost,
    InvalidField,
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
    Command,
    CreateQueue,
    Delete,
    DeleteQueue,
    Extend,
    Pull,
    Purge,
    Push,
    QueueService,
    QueueSettings,
    Release,
    Stats,
)

R = TypeVar("R")
T = TypeVar("T")
MARK: Final = "mirror"
ITEMS_MAX: Final = 500
# How much longer a message is hidden here than there, so that the primary's own event ends it.
_SLACK_MS: Final = 60_000
_HIDDEN_MS_MAX: Final = 20 * 60_000
# Messages that a search may take aside before it gives up.
_ASIDE_MAX: Final = 2_000
_MISSING_MAX: Final = 10_000
_RETRY_S: Final = 0.1
_RETRY_S_MAX: Final = 5.0
# Settings that mean the same to a consumer here as there; the others would act on their own.
_COPIED: Final = ("visibility_ms", "wait_ms", "body_bytes_max")


class MirrorCounts:
    """What a mirror has done since it started."""

    def __init__(self) -> None:
        self.pushed = 0
        self.deleted = 0
        # Pushes that the mirror refuses for good, and deletes of messages that it has not.
        self.refused = 0
        self.unmatched = 0
        self.last_error: PenstockError | None = None


class HiddenClaim(NamedTuple):
    """A claim on the mirror: its queue and its receipt."""

    queue: str
    receipt: Any


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
        self.counts = MirrorCounts()
        self._service = service
        self._state = state
        self._pause = pause
        self._now_ms = now_ms
        self._held = {
            number: HiddenClaim(queue, receipt) for number, (queue, receipt) in state.held.items()
        }
        self._identity = state.journal[:12]
        lacks = service.LACKS
        self._has_dedup = "dedup" not in lacks
        self._has_groups = "fair groups" not in lacks
        self._has_fifo = "fifo" not in lacks
        self._has_priorities = "priority order" not in lacks
        self._fifo_queues: set[str] = set()
        # Queues whose marks must be read before the next pushes, which may have been done.
        self.uncertain: set[str] = set()
        # What was found there, by queue.
        self._known: dict[str, set[int]] = {}

    def trust(self) -> None:
        """Says that no push from here on can have been done before."""
        self.uncertain.clear()
        self._known.clear()

    def held(self) -> dict[int, tuple[str, str]]:
        """The claims on the mirror, to be saved."""
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
        if settings.fifo and self._has_fifo:
            wanted["fifo"] = copied["fifo"] = True
            self._fifo_queues.add(name)
        for choice in (wanted, copied, {}):
            try:
                self._execute(CreateQueue(name, choice))
                return
            except QueueExists:
                return
            except (InvalidField, UnsupportedOperation) as error:
                # A service may have limits of its own, such as 14 days of retention.
                if not choice:
                    self._note_refused(error)

    def is_empty(self, name: str) -> bool:
        """Whether a queue has no messages, or does not exist."""
        try:
            return self._execute(Stats(name)).messages == 0
        except QueueNotFound:
            return True

    def remove(self, name: str) -> None:
        """Removes a queue, with what is held of it."""
        self._forget(name)
        try:
            self._execute(DeleteQueue(name))
        except RequestError as error:
            if not isinstance(error, QueueNotFound):
                self._note_refused(error)

    def purge(self, name: str) -> None:
        """Removes every message of a queue."""
        # What is held is not purged everywhere: some services leave what is in flight.
        self._delete_held([n for n, each in self._held.items() if each.queue == name])
        self._state.missing.pop(name, None)
        try:
            self._execute(Purge(name))
        except QueueNotFound:
            pass
        except RequestError as error:
            self._note_refused(error)

    def _forget(self, name: str) -> None:
        for number in [n for n, each in self._held.items() if each.queue == name]:
            del self._held[number]
        self._state.missing.pop(name, None)

    # Messages.

    def apply(self, name: str, batch: QueueBatch) -> None:
        """Does what happened to the messages of a queue."""
        self.push(name, batch.pushed)
        wanted = [n for n in (*batch.lent, *batch.ended) if n not in self._held]
        extended = [n for n in batch.lent if n in self._held]
        if wanted:
            self.hide(name, wanted, self._hidden_ms(batch))
        self._extend(extended, batch)
        self._release(batch)
        self._end(name, batch.ended)

    def _hidden_ms(self, batch: QueueBatch) -> int:
        deadlines = [each.deadline_ms for each in batch.lent.values()]
        left_ms = max(deadlines, default=0) - self._now_ms()
        return min(_HIDDEN_MS_MAX, max(0, left_ms) + _SLACK_MS)

    def push(self, name: str, pushed: Sequence[Pushed]) -> None:
        """Pushes messages in order, without those that are there already."""
        for some in _slices(pushed, ITEMS_MAX):
            self._push_commands(name, {each.number: self._make_push(name, each) for each in some})

    def _push_commands(self, name: str, pushes: dict[int, Push]) -> None:
        """Pushes to one queue, by the numbers of the messages."""
        while True:
            if name in self.uncertain:
                self._known[name] = self._marks(name)
                self.uncertain.discard(name)
            known = self._known.get(name, ())
            left = {number: push for number, push in pushes.items() if number not in known}
            if not left:
                return
            try:
                replies = self._execute(Batch([*left.values()]), retry_lost=False)
            except BackendLost:
                # Whether the pushes were done is unknown: the next turn looks.
                self.uncertain.add(name)
                continue
            if all(isinstance(reply, QueueNotFound) for reply in replies):
                # Somebody removed the queue here.
                self.create(name, QueueSettings(fifo=name in self._fifo_queues))
                continue
            for reply in replies:
                if isinstance(reply, PenstockError):
                    self._note_refused(reply)
                else:
                    self.counts.pushed += 1
            return

    def _make_push(self, name: str, pushed: Pushed) -> Push:
        is_fifo = name in self._fifo_queues
        delay_ms = max(0, pushed.visible_at_ms - self._now_ms()) if pushed.visible_at_ms else 0
        return Push(
            name,
            pushed.body,
            delay_ms or None,
            pushed.priority if self._has_priorities else 0,
            None,
            f"{self._identity}-{pushed.number:x}" if self._has_dedup or is_fifo else None,
            pushed.group if is_fifo or self._has_groups else None,
            pushed.attributes,
            {**(pushed.context or {}), MARK: f"{pushed.number:x}"},
        )

    def _marks(self, name: str) -> set[int]:
        """The numbers of all visible messages of a queue, which stay where they are."""
        claims: list[Claim] = []
        while some := self._pull(name, ITEMS_MAX, _SLACK_MS):
            claims += some
        self._release_claims(claims)
        return {number for claim in claims if (number := mark_of(claim)) is not None}

    def _pull(self, name: str, limit: int, hidden_ms: int) -> list[Claim]:
        """Claims messages from the head of a queue; none if it does not exist."""
        try:
            return self._execute(Pull(name, min(limit, ITEMS_MAX), hidden_ms, 0))
        except QueueNotFound:
            return []

    def hide(self, name: str, wanted: Iterable[int], hidden_ms: int) -> None:
        """Claims messages by their numbers, as far as they are found near the head."""
        for number, claim in self._find(name, wanted, hidden_ms).items():
            self._held[number] = HiddenClaim(name, claim.proof)

    def _find(self, name: str, wanted: Iterable[int], hidden_ms: int) -> dict[int, Claim]:
        """The claims on messages of these numbers; others that a pull brings are released."""
        left = set(wanted)
        found: dict[int, Claim] = {}
        aside: list[Claim] = []
        while left and len(aside) < _ASIDE_MAX:
            claims = self._pull(name, len(left), hidden_ms)
            if not claims:
                break
            for claim in claims:
                number = mark_of(claim)
                if number in left:
                    left.discard(number)
                    found[number] = claim
                else:
                    aside.append(claim)
        self._release_claims(aside)
        return found

    def _extend(self, numbers: Iterable[int], batch: QueueBatch) -> None:
        now_ms = self._now_ms()
        items = []
        for number in numbers:
            claim = self._held[number]
            left_ms = max(0, batch.lent[number].deadline_ms - now_ms) + _SLACK_MS
            items.append(Extend(claim.queue, claim.receipt, min(left_ms, _HIDDEN_MS_MAX)))
        self._settle(items)

    def _release(self, batch: QueueBatch) -> None:
        now_ms = self._now_ms()
        items = []
        for number, returned in batch.returned.items():
            claim = self._held.pop(number, None)
            if claim is not None:
                delay_ms = max(0, returned.visible_at_ms - now_ms) if returned.visible_at_ms else 0
                items.append(Release(claim.queue, claim.receipt, delay_ms))
        self._settle(items)

    def _release_claims(self, claims: Iterable[Claim]) -> None:
        self._settle([Release(claim.queue, claim.proof) for claim in claims])

    def _settle(self, items: Sequence[Any]) -> None:
        """Extends or releases; what is refused has ended, and its message is visible."""
        for some in _slices(items, ITEMS_MAX):
            self._execute(Batch([*some]))

    def _end(self, name: str, ended: Iterable[int]) -> None:
        """Deletes messages; those not found are looked for again later."""
        wanted = list(ended)
        lost = [number for number in wanted if number not in self._held]
        lost += self._delete_held([number for number in wanted if number in self._held])
        if lost:
            missing = self._state.missing.setdefault(name, [])
            missing += [number for number in lost if number not in missing]
            while len(missing) > _MISSING_MAX:
                del missing[0]
                self.counts.unmatched += 1

    def _delete_held(self, numbers: Sequence[int]) -> list[int]:
        """Deletes messages that are held; returns those whose claims had ended."""
        lost = []
        for some in _slices(numbers, ITEMS_MAX):
            claims = [self._held.pop(number) for number in some]
            deletes = [Delete(claim.queue, claim.receipt) for claim in claims]
            replies = self._execute(Batch([*deletes]))
            for number, reply in zip(some, replies, strict=True):
                if isinstance(reply, PenstockError):
                    lost.append(number)
                else:
                    self.counts.deleted += 1
        return lost

    def seek_missing(self, forget: bool) -> None:
        """Looks again for messages to delete; with `forget`, those not found are given up."""
        for name in list(self._state.missing):
            numbers = self._state.missing.pop(name)
            self.hide(name, numbers, _SLACK_MS)
            left = [number for number in numbers if number not in self._held]
            left += self._delete_held([number for number in numbers if number in self._held])
            if forget:
                self.counts.unmatched += len(left)
            elif left:
                self._state.missing[name] = left

    def move(self, source: str, to: str, ranks: dict[int, int]) -> None:
        """Moves messages to the end of another queue: pushed there, then deleted here.

        `ranks` has their places in the queue they go to, by number, in order.
        """
        self._settle([Release(*self._held.pop(number)) for number in ranks if number in self._held])
        found = self._find(source, ranks, _SLACK_MS)
        moved = [number for number in ranks if number in found]
        for some in _slices(moved, ITEMS_MAX):
            pushes = [self._make_move(to, found[number], ranks[number]) for number in some]
            self._push_commands(to, dict(zip(some, pushes, strict=True)))
        self._settle([Delete(source, found[number].proof) for number in moved])
        self.counts.unmatched += len(ranks) - len(moved)

    def _make_move(self, to: str, claim: Claim, rank: int) -> Push:
        is_fifo = to in self._fifo_queues
        # With the rank: a message may come back to a queue that knows its first dedup id.
        dedup_id = f"{self._identity}-{(claim.context or {})[MARK]}-{rank:x}"
        return Push(
            to,
            claim.body,
            None,
            claim.priority,
            None,
            dedup_id if self._has_dedup or is_fifo else None,
            claim.group,
            claim.attributes,
            claim.context,
        )

    # Commands.

    def _execute(self, command: Command[R], retry_lost: bool = True) -> R:
        """Executes a command, for as long as it takes until the mirror can be reached."""
        pause_s = _RETRY_S
        while True:
            try:
                reply = self._service.execute(command)
            except UnavailableError as error:
                self.counts.last_error = error
                if isinstance(error, BackendLost) and not retry_lost:
                    self._pause(pause_s)
                    raise
                self._pause(pause_s)
                pause_s = min(_RETRY_S_MAX, 2 * pause_s)
            else:
                self.counts.last_error = None
                return reply

    def _note_refused(self, error: PenstockError) -> None:
        self.counts.refused += 1
        self.counts.last_error = error

    def close(self) -> None:
        """Closes the service."""
        self._service.close()


def mark_of(claim: Claim) -> int | None:
    """The number on the primary of a message of the mirror; None if it is none of ours."""
    text = (claim.context or {}).get(MARK)
    try:
        return None if text is None else int(text, 16)
    except ValueError:
        return None


def _slices(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    iterator = iter(items)
    while some := list(islice(iterator, size)):
        yield some
