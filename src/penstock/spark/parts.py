"""Parts of a batch: messages claimed by one pull, known from then on by its attempt id.

A part is claimed once, on the driver, and its attempt id, its size and its first receipt go into
Spark's checkpoint. Whoever needs it, in any process, repeats the pull and gets the same claims:
tasks to read it, a restarted driver to hold it, whoever settles it to delete it. When its claims
have lapsed there is nothing to get, ever again: the messages come in a later part.

    pull (driver) ── hold (driver: extend, extend, …) ── read (tasks, any number of times)
                  └─ Spark commits ── settle: delete
                  └─ nobody holds it any more ── lapse: the queue gives the messages out again
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
    """A queue and the manner in which it is pulled from."""

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
    """What became of messages whose batch is done: ended, or given out again before they were."""

    deleted: int
    lapsed: int

    def __add__(self, other: "Settled") -> "Settled":
        return Settled(self.deleted + other.deleted, self.lapsed + other.lapsed)


def pull_part(
    service: QueueService, source: Source, name: str, limit: int
) -> tuple[Part, list[Claim]] | None:
    """Claims up to `limit` messages under this name, or finds those a lost process claimed.

    None if there is nothing to claim now.
    """
    for attempt in count():
        attempt_id = f"{name}.{attempt}" if attempt else name
        try:
            claims = _pull(service, source, attempt_id, limit)
        except AttemptLapsed:
            # A process that is gone had these, and told nobody: they come under another name.
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
        # The queue has forgotten the attempt and taken it for a new one: these are others.
        service.execute(Batch([Release(source.queue, claim.proof) for claim in claims]))
        return []
    return claims


def take_up(service: QueueService, source: Source, part: Part) -> list[Claim]:
    """The claims of a part that another process made, held anew; none if they have lapsed."""
    try:
        _ask(service, source, part)
    except StaleReceipt:
        return []
    claims = claims_of(service, source, part)
    extend_all(service, source, [claim.proof for claim in claims])
    return claims


def _ask(service: QueueService, source: Source, part: Part) -> None:
    """Extends the first claim of a part, to see whether it lives: a pull might claim others.

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
    """Holds these claims for another while, as far as they live."""
    if proofs:
        extends = [Extend(source.queue, proof, source.visibility_ms) for proof in proofs]
        service.execute(Batch(list(extends)))


def settle_part(service: QueueService, source: Source, part: Part) -> Settled:
    """Ends the messages of a part; a part that was ended before counts as nothing.

    All of them or none, by the very question that tasks ask: where one claim of a part has ended,
    tasks may have found it lapsed, and then the others were not read either.
    """
    try:
        _ask(service, source, part)
    except MessageGone:
        return Settled(0, 0)
    except StaleReceipt:
        return Settled(0, part.size)
    claims = claims_of(service, source, part)
    if not claims:
        return Settled(0, part.size)
    # One append: if we are killed, either all have happened or none.
    replies = service.execute(Batch([Delete(source.queue, claim.proof) for claim in claims]))
    deleted = sum(reply is True for reply in replies)
    return Settled(deleted, part.size - deleted)


def shared_out(parts: Sequence[Part], most: int) -> list[tuple[Part, ...]]:
    """Neighbouring parts together, as long as they have no more messages than `most`.

    A server gives fewer messages than asked for when larger ones would not fit into its answer, and
    a task is too much for a few.
    """
    shares: list[list[Part]] = []
    room = 0
    for part in parts:
        if part.size > room:
            shares.append([])
            room = most
        shares[-1].append(part)
        room -= part.size
    return [tuple(share) for share in shares]


class Keeper:
    """Extends the claims of the parts it is given, from a thread, until it is told to stop.

    It ends with its process, and then the claims lapse by themselves.
    """

    def __init__(self, service: QueueService, source: Source) -> None:
        self._service = service
        self._source = source
        self._held: dict[str, list[Any]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-keeper", daemon=True)
        self._thread.start()

    def hold(self, part: Part, claims: list[Claim]) -> None:
        """Takes a part into its care; without claims, it is known to have lapsed."""
        self._held[part.attempt_id] = [claim.proof for claim in claims]

    def knows(self, part: Part) -> bool:
        """Whether the part is in its care, or was found to have lapsed."""
        return part.attempt_id in self._held

    def holds(self, part: Part) -> bool:
        """Whether it has claims of the part to extend."""
        return bool(self._held.get(part.attempt_id))

    def let_go(self, part: Part) -> None:
        """Cares for the part no more."""
        self._held.pop(part.attempt_id, None)

    def stop(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        # Two may fail before a claim is lost.
        while not self._ended.wait(self._source.visibility_ms / 3_000):
            for proofs in list(self._held.values()):
                with suppress(PenstockError):
                    extend_all(self._service, self._source, proofs)
