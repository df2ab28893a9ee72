"""Parts of a batch: messages claimed by one pull, known from then on by its attempt id.

A part is claimed once, on the driver, and its attempt id, its size and its first receipt go into
Spark's checkpoint. Any process that repeats the pull gets the same claims: tasks that read the
part, a restarted driver that extends it, a settlement that deletes it. Once its claims have lapsed
the pull returns nothing, and the messages come in a later part.

    pull (driver) ── extend, extend, … (driver) ── read (tasks, any number of times)
                  └─ Spark commits ── settle: delete
                  └─ no process extends it ── lapse: the queue gives the messages out again
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from penstock.errors import (
    AttemptLapsed,
    InFlightLimit,
    InvalidField,
    InvalidReceipt,
    MessageGone,
    PenstockError,
    StaleReceipt,
)
from penstock.service import Batch, Claim, Delete, Extend, Pull, QueueService, Release


@dataclass(frozen=True)
class Source:
    """A queue, and with which visibility timeout and holder it is pulled from."""

    queue: str
    visibility_ms: int
    holder: str


class Part(NamedTuple):
    """What a checkpoint keeps of a part."""

    attempt_id: str
    size: int
    first_receipt: str


@dataclass(frozen=True)
class Settled:
    """How many messages of a committed batch were deleted, and how many had lapsed before."""

    deleted: int
    lapsed: int

    def __add__(self, other: "Settled") -> "Settled":
        return Settled(self.deleted + other.deleted, self.lapsed + other.lapsed)


def pull_part(
    service: QueueService, source: Source, name: str, limit: int
) -> tuple[Part, list[Claim]] | None:
    """Claims up to `limit` messages under an attempt id, or finds those an earlier process claimed.

    None if there is nothing to claim now.
    """
    for attempt in count():
        attempt_id = f"{name}.{attempt}" if attempt else name
        try:
            claims = _pull(service, source, attempt_id, limit)
        except AttemptLapsed:
            # An earlier process claimed these and wrote no offset: another attempt id is needed.
            continue
        except InFlightLimit:
            return None
        return (Part(attempt_id, len(claims), claims[0].receipt), claims) if claims else None
    raise AssertionError("unreachable")


def _pull(service: QueueService, source: Source, attempt_id: str, limit: int) -> list[Claim]:
    command = Pull(source.queue, limit, source.visibility_ms, 0, attempt_id, source.holder)
    return service.execute(command)


def claims_of(service: QueueService, source: Source, part: Part) -> list[Claim]:
    """The claims of a part; none if they have lapsed."""
    try:
        claims = _pull(service, source, part.attempt_id, part.size)
    except (AttemptLapsed, InFlightLimit):
        return []
    if claims and claims[0].receipt != part.first_receipt:
        # The queue no longer remembers the attempt and ran a new pull: these are other messages.
        service.execute(Batch([Release(source.queue, claim.proof) for claim in claims]))
        return []
    return claims


def resume_claims(service: QueueService, source: Source, part: Part) -> list[Claim]:
    """Extends the claims of a part that another process made; none if they have lapsed."""
    try:
        _extend_first(service, source, part)
    except StaleReceipt:
        return []
    claims = claims_of(service, source, part)
    extend_all(service, source, [claim.proof for claim in claims])
    return claims


def _extend_first(service: QueueService, source: Source, part: Part) -> None:
    """Extends the first claim of a part, which fails if it has lapsed: a pull might claim others.

    Raises StaleReceipt if it has ended, InvalidField if this queue never made it.
    """
    try:
        service.execute(Extend(source.queue, part.first_receipt, source.visibility_ms))
    except StaleReceipt:
        raise
    except InvalidReceipt as error:
        raise InvalidField(
            f"queue: {source.queue!r} is not the one the checkpoint was made with ({error}); "
            "give the stream a new checkpoint"
        ) from None


def extend_all(service: QueueService, source: Source, proofs: Sequence[Any]) -> None:
    """Extends those of these claims that have not ended by the visibility timeout."""
    if proofs:
        extends = [Extend(source.queue, proof, source.visibility_ms) for proof in proofs]
        service.execute(Batch(list(extends)))


def settle_part(service: QueueService, source: Source, part: Part) -> Settled:
    """Deletes the messages of a part; a part that was deleted before counts as nothing.

    All of them or none, decided as tasks decide it: if the first claim of a part has ended, tasks
    may have found the part lapsed, and then they read none of its messages.
    """
    try:
        _extend_first(service, source, part)
    except MessageGone:
        return Settled(0, 0)
    except StaleReceipt:
        return Settled(0, part.size)
    claims = claims_of(service, source, part)
    if not claims:
        return Settled(0, part.size)
    # One append: a kill leaves either all of the deletes or none.
    replies = service.execute(Batch([Delete(source.queue, claim.proof) for claim in claims]))
    deleted = sum(reply is True for reply in replies)
    return Settled(deleted, part.size - deleted)


def group_parts(parts: Sequence[Part], most: int) -> list[tuple[Part, ...]]:
    """Groups neighbouring parts that together have no more messages than `most`.

    A server returns fewer messages than asked for when large ones would exceed its answer's limit;
    a task for each such part would cost more than the reading.
    """
    groups: list[list[Part]] = []
    room = 0
    for part in parts:
        if part.size > room:
            groups.append([])
            room = most
        groups[-1].append(part)
        room -= part.size
    return [tuple(group) for group in groups]


class ClaimExtender:
    """A thread that extends the claims of the parts added to it, until `stop`.

    When the process ends, the claims lapse.
    """

    def __init__(self, service: QueueService, source: Source) -> None:
        self._service = service
        self._source = source
        self._held: dict[str, list[Any]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-claims", daemon=True)
        self._thread.start()

    def add(self, part: Part, claims: list[Claim]) -> None:
        """Adds a part; without claims, it is marked as lapsed."""
        self._held[part.attempt_id] = [claim.proof for claim in claims]

    def has(self, part: Part) -> bool:
        """Whether the part was added, with claims or as lapsed."""
        return part.attempt_id in self._held

    def extends(self, part: Part) -> bool:
        """Whether the part was added with claims."""
        return bool(self._held.get(part.attempt_id))

    def remove(self, part: Part) -> None:
        """Stops extending the part."""
        self._held.pop(part.attempt_id, None)

    def stop(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        # Three times within the timeout: two extensions may fail before a claim lapses.
        while not self._ended.wait(self._source.visibility_ms / 3_000):
            for proofs in list(self._held.values()):
                with suppress(PenstockError):
                    extend_all(self._service, self._source, proofs)
