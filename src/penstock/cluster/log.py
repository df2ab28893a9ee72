"""The replicated log: its requests, their replies, and how each of them may fail.

This is the interface between the logic of the cluster and the service that stores its data on
several machines. `jetstream` implements it; `tests/simulation` has a model in memory, with
faults. The logic above it (`takeover`, `replica`) consists of generators of these requests
(`LogSteps`): it does no I/O, reads no clock, and runs on either.

A shard has one log. It consists of slots, numbered from 1, each of which holds one extent: bytes
that the log does not interpret. Beside the logs there are registers (small values, changed by
compare-and-set) and chunks (parts of snapshots).

Rules of the slots

 1. An append that was answered is kept: a majority of the replicas has synced it to disk. It never
    disappears, and its bytes and slot never change, until it is purged.
 2. An append names the slot it expects to be the last one, `after`, and takes slot `after + 1`. It
    is taken only if, at the instant it is taken, `after` is the last slot. So of several appends
    with the same `after` at most one is ever taken.
 3. A refusal (`Mismatch`) does not show who took the slot. The server compares with what it has
    *accepted*, which includes attempts that are not kept yet: the caller's own earlier attempt,
    whose answer was lost, or an attempt of any caller that may still disappear when the leader of
    the replicas changes. After a refusal the caller reads slot `after + 1`. If it holds the
    caller's bytes, the append was taken; if it holds other bytes, another writer was first; if
    there is no such slot, nothing is decided and the same append must be repeated.
 4. An append without an answer (`Unanswered`) may have been taken, may be taken at any time later,
    or never. Until that is known, the caller may repeat only the same bytes with the same `after`.
 5. One append of a writer at a time. If a writer sent `after=7` and `after=8` at once, another
    writer could take slot 8; the first append would then be refused and the second taken, after
    the other writer's slot. The caller must ensure this: the log does not check it.
 6. Reads return only what is kept (rule 1), never what was only accepted. But any replica may
    answer them, also one that lags: for some time, slots that were answered may be missing *at the
    end* of a read. A damaged replica may lack slots *in the middle*, or at the beginning. A read
    therefore returns slots in ascending order, and the caller checks that they are consecutive.
    `Demote` makes another replica the leader, which then answers.
 7. `Bounds` may lag in the same way: `first` and `last` are never larger than the true ones.
 8. `PurgeSlots` removes all slots below `before`, which is at most the last slot that the caller
    knows to be kept, plus one; slots are not renumbered. It may be repeated, and it may be
    carried out after it was answered.

Rules of the registers

 9. `Swap` sets a register if its revision is the one named; 0 means that it does not exist yet. The
    reply is the new revision. Revisions of all registers are numbers of one sequence: each is
    larger than every one given before. They are the terms of owners.
10. `Mismatch` and `Unanswered` mean for a swap what they mean for an append. So each value must be
    unique to its writer: a writer that reads its own value knows that the swap was done.
11. `ReadRegister` and `ReadRegisters` return only values that were kept, but may lag; a swap never
    does.

Rules of the chunks

12. A chunk is written once under its name, and may be written again with the same bytes. It is kept
    when answered. A replica that lags or is damaged may answer `ReadChunk` with None or with wrong
    bytes: the reader checks the checksum in the manifest. `DropChunks` may be repeated.

Every request may raise `Unanswered`: no answer came in time, and nothing else is known. `LogFull`
is an `Unanswered` whose reason is known: the servers have no room. Rule 4 holds for it, too.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

from penstock.errors import UnavailableError

R = TypeVar("R", covariant=True)
T = TypeVar("T")

# The largest extent, below the default limit of NATS for a message (1 MiB).
EXTENT_BYTES_MAX: Final = 960 * 1024
CHUNK_BYTES_MAX: Final = 960 * 1024
READ_SLOTS_MAX: Final = 500
# The pause before a request is repeated that was not answered, or whose result is undecided.
RETRY_MS: Final = 20
# The pause if the log is full. Each append then makes NATS elect another leader of the stream,
# without which nothing can be purged either.
FULL_RETRY_MS: Final = 1_000


class Mismatch(Exception):
    """The server expected another slot or revision; see rules 3 and 10."""


class Unanswered(UnavailableError):
    """No answer came from the replicated log; whether the request was carried out is unknown."""


class LogFull(Unanswered):
    """The log has no room; it refused this attempt, but may still carry out an earlier one."""


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
    """Slots from `first` on, ascending; fewer than `limit` at the end, or if they are large."""

    shard: int
    first: int
    limit: int = READ_SLOTS_MAX


@dataclass(frozen=True, slots=True)
class Bounds(LogRequest[SlotBounds]):
    """The first and last slot of a shard's log, as one replica knows them."""

    shard: int


@dataclass(frozen=True, slots=True)
class PurgeSlots(LogRequest[None]):
    """Removes the slots below `before`."""

    shard: int
    before: int


@dataclass(frozen=True, slots=True)
class Demote(LogRequest[None]):
    """Makes another replica of the shard's log the leader, which answers reads for some time."""

    shard: int


@dataclass(frozen=True, slots=True)
class ReadRegister(LogRequest[Register | None]):
    """Reads the register with this key; None if there is none."""

    key: str


@dataclass(frozen=True, slots=True)
class ReadRegisters(LogRequest[list[Register]]):
    """Reads all registers whose keys begin with `prefix`, in the order of their keys."""

    prefix: str


@dataclass(frozen=True, slots=True)
class Swap(LogRequest[int]):
    """Sets a register if it has this revision; the reply is its new one. Raises Mismatch."""

    key: str
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class PutChunk(LogRequest[None]):
    """Stores one part of a snapshot; parts are numbered from 0."""

    shard: int
    snapshot: str
    index: int
    data: bytes


@dataclass(frozen=True, slots=True)
class ReadChunk(LogRequest[bytes | None]):
    """Reads one part of a snapshot; None if the replica that answers does not have it."""

    shard: int
    snapshot: str
    index: int


@dataclass(frozen=True, slots=True)
class DropChunks(LogRequest[None]):
    """Removes all parts of a snapshot."""

    shard: int
    snapshot: str


@dataclass(frozen=True, slots=True)
class Pause(LogRequest[None]):
    """Not a request to the log: the steps continue after this time."""

    ms: int


# A generator of the cluster's logic: it yields requests, and gets their replies or errors.
LogSteps = Generator[LogRequest[Any], Any, T]


def until_answered(request: LogRequest[T]) -> LogSteps[T]:
    """Repeats a repeatable request until it is answered. Raises Mismatch."""
    while True:
        try:
            return (yield request)  # type: ignore[no-any-return]
        except Unanswered:
            yield Pause(RETRY_MS)
