"""The replicated log, as owners see it: requests, replies, and what may go wrong with each.

The seam between the logic of the cluster and whatever keeps its bytes on several machines.
`jetstream` is one implementation; `testing.simulate` has a model of it in memory, with its faults.
The logic that stands above (`owner`, `replica`) is written as generators of these requests
(`LogSteps`), so that it does no I/O, reads no clock, and can be driven by either.

A shard has one log. It consists of slots, numbered from 1, each of which holds one extent: bytes
that the log does not interpret. Beside the logs there are registers (small values, changed by
compare-and-set) and chunks (parts of snapshots).

Rules of the slots

 1. An append that was answered is kept: by a majority of the replicas, each of which has synced it
    to its disk. It never disappears, and its bytes and slot never change, until it is purged.
 2. An append names the slot it expects to be the last one, `after`, and takes slot `after + 1`. It
    is taken only if, at the instant it is taken, `after` is the last slot. So of several appends
    with the same `after` at most one is ever taken.
 3. A refusal (`Mismatch`) proves nothing about who took the slot. The server compares with what it
    has *accepted*, which includes attempts that are not kept yet: the caller's own earlier attempt,
    whose answer was lost, or an attempt of any caller that may still vanish when the leader of the
    replicas changes. Who is refused reads slot `after + 1`: its own bytes mean that it was taken;
    other bytes mean that another writer was first; no slot means that nothing is decided, and the
    same append is to be repeated.
 4. An append without an answer (`Unanswered`) may have been taken, may be taken at any time later,
    or never. Until that is known, the caller may repeat only the same bytes with the same `after`.
 5. One append of a writer at a time. If a writer sent `after=7` and `after=8` at once, another
    writer could take slot 8; the first append would be refused and the second taken, behind the
    other's back. This is the caller's duty: the log does not count.
 6. Reads see only what is kept (rule 1), never what was merely accepted. But any replica may answer
    them, also one that is behind: a slot that was answered may be missing *at the end* of a read
    for some time. A damaged replica may miss slots *in the middle*, or at the beginning. A read
    therefore returns slots in ascending order, and the caller checks that they follow on each
    other. `Demote` has another replica lead and answer.
 7. `Bounds` may be behind in the same way: `first` and `last` are never larger than the true ones.
 8. `PurgeSlots` ends all slots below `before`, which must not be larger than the last slot that the
    caller knows to be kept, plus one; slots are not renumbered. It may be repeated, and it may be
    carried out later than answered.

Rules of the registers

 9. `Swap` sets a register if its revision is the one named; 0 means that it does not exist yet. The
    reply is the new revision. Revisions of all registers are numbers of one sequence: each is
    larger than every one given before. They are the terms of owners.
10. `Mismatch` and `Unanswered` mean for a swap what they mean for an append. So a value must say
    whose it is: reading one's own value back means that the swap was done.
11. `Look` and `LookAll` see only values that were kept, but may be behind; never so a swap.

Rules of the chunks

12. A chunk is written once under its name, and may be written again with the same bytes. It is kept
    when answered. `ReadChunk` may be behind, or meet a damaged replica: None then, or wrong bytes;
    the checksum in the register of the snapshot decides. `DropChunks` may be repeated.

Every request may raise `Unanswered`, which says only that no answer came in time.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from penstock.errors import UnavailableError

R = TypeVar("R", covariant=True)
T = TypeVar("T")

# What one extent may hold, so that a server with the ordinary limit of 1 MiB a message takes it.
EXTENT_BYTES_MAX: Final = 960 * 1024
CHUNK_BYTES_MAX: Final = 960 * 1024
READ_SLOTS_MAX: Final = 500
# How long to wait before a request is repeated that was not answered, or not decided.
RETRY_MS: Final = 20


class Mismatch(Exception):
    """The server expected another slot or revision; rules 3 and 10 say what that does not mean."""


class Unanswered(UnavailableError):
    """No answer came from the replicated log; whether the request was carried out is unknown."""


class LogSlot(NamedTuple):
    """One slot that was read."""

    number: int
    extent: bytes


class SlotBounds(NamedTuple):
    """The first and the last slot of a log; `last` is `first - 1` if it is empty."""

    first: int
    last: int


class Register(NamedTuple):
    """A register that was read."""

    key: str
    value: bytes
    revision: int


class LogRequest(Generic[R]):
    """A request to the replicated log; `R` is the type of its reply."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Append(LogRequest[int]):
    """Takes slot `after + 1` for the extent; the reply is that slot. Raises Mismatch."""

    shard: int
    after: int
    extent: bytes


@dataclass(frozen=True, slots=True)
class ReadSlots(LogRequest[list[LogSlot]]):
    """Slots from `first` on, ascending; fewer than `limit` at the end or to limit the bytes."""

    shard: int
    first: int
    limit: int = READ_SLOTS_MAX


@dataclass(frozen=True, slots=True)
class Bounds(LogRequest[SlotBounds]):
    """The first and last slot of a shard's log, as one replica knows them."""

    shard: int


@dataclass(frozen=True, slots=True)
class PurgeSlots(LogRequest[None]):
    """Ends the slots below `before`."""

    shard: int
    before: int


@dataclass(frozen=True, slots=True)
class Demote(LogRequest[None]):
    """Has another replica of the shard's log lead, and answer reads for a while."""

    shard: int


@dataclass(frozen=True, slots=True)
class Look(LogRequest[Register | None]):
    """The register of this key; None if there is none."""

    key: str


@dataclass(frozen=True, slots=True)
class LookAll(LogRequest[list[Register]]):
    """All registers whose keys begin with this, in the order of their keys."""

    prefix: str


@dataclass(frozen=True, slots=True)
class Swap(LogRequest[int]):
    """Sets a register that has this revision; the reply is its new one. Raises Mismatch."""

    key: str
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class PutChunk(LogRequest[None]):
    """Keeps one part of a snapshot; parts are numbered from 0."""

    shard: int
    snapshot: str
    index: int
    data: bytes


@dataclass(frozen=True, slots=True)
class ReadChunk(LogRequest[bytes | None]):
    """One part of a snapshot; None if the replica that answered does not have it."""

    shard: int
    snapshot: str
    index: int


@dataclass(frozen=True, slots=True)
class DropChunks(LogRequest[None]):
    """Ends all parts of a snapshot."""

    shard: int
    snapshot: str


@dataclass(frozen=True, slots=True)
class Pause(LogRequest[None]):
    """No request to the log: the steps go on after this time, by the clock of whoever runs them."""

    ms: int


# The logic of the cluster: yields requests, is sent replies, and has errors thrown into it.
LogSteps = Generator[LogRequest[Any], Any, T]


class ReplicatedLog(Protocol):
    """The replicated log on an event loop; a simulation has no use for this class."""

    async def execute(self, request: LogRequest[T]) -> T:
        """Carries the request out. Raises Mismatch or Unanswered."""
        ...

    async def close(self) -> None:
        """Ends the connection; requests under way raise Unanswered."""
        ...


def insist(request: LogRequest[T]) -> LogSteps[T]:
    """Repeats a request that may be repeated until it is answered. Raises Mismatch."""
    while True:
        try:
            return (yield request)  # type: ignore[no-any-return]
        except Unanswered:
            yield Pause(RETRY_MS)


def run_steps(steps: LogSteps[T], answer: "LogAnswer") -> T:
    """Runs steps to their end at once, each request answered by a call; for tests and models."""
    try:
        request = next(steps)
        while True:
            try:
                reply = answer(request)
            except (Mismatch, Unanswered) as error:
                request = steps.throw(error)
            else:
                request = steps.send(reply)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


class LogAnswer(Protocol):
    """Answers one request; raises Mismatch or Unanswered."""

    def __call__(self, request: LogRequest[Any], /) -> Any: ...
