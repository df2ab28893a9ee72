"""How an owner uses the replicated log: it takes the shard over, then appends.

The steps of a takeover are

1. Swap the shard's ownership register; its new revision is the owner's term. Routers read there
   which node to ask; safety does not depend on it.
2. Append an extent that opens the term at the end of the log. From then on no earlier owner can
   append anything (rules 2 and 5 of `log`), so the log up to this slot is complete.
3. Load the snapshot, and replay the log up to this slot (`replica`).
4. Give up if the log has a higher term by then: a later owner has come.

Only after that does the owner serve the shard. An owner that finds a higher term in the slot of its
own extent is fenced: its state may be ahead of the log, and is discarded.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from penstock.cluster.extent import Extent, pack_extent, unpack_extent
from penstock.cluster.journal import ReplicatedJournal
from penstock.cluster.log import (
    FULL_RETRY_MS,
    RETRY_MS,
    Append,
    Bounds,
    Demote,
    LogFull,
    LogSteps,
    Mismatch,
    Pause,
    ReadRegister,
    ReadSlots,
    Register,
    SlotBounds,
    Swap,
    Unanswered,
    until_answered,
)
from penstock.cluster.replica import ShardReplica
from penstock.errors import Fenced, JournalError, NotOwner

# After this many reads that lack a slot which must exist, another replica is made the leader.
DEMOTE_AFTER: Final = 50


class Ownership(msgspec.Struct, frozen=True):
    """The value of a shard's ownership register; `claim_id` is unique to each takeover."""

    node: str
    claim_id: str


_decode_ownership = msgspec.json.Decoder(Ownership).decode


def owner_key(shard: int) -> str:
    """The key of the shard's ownership register."""
    return f"owner.{shard}"


def read_ownership(register: Register | None) -> Ownership | None:
    """The ownership in a shard's register; None if the shard never had an owner."""
    return None if register is None else _decode_ownership(register.value)


def take_over(
    replica: ShardReplica, node: str, claim_id: str, seen_revision: int, seen_slot: int = 0
) -> LogSteps[ReplicatedJournal]:
    """Makes this node the owner of a shard; returns the journal of the new owner.

    `seen_revision` is that of the ownership to replace, 0 for none; `claim_id` is new for each
    call; `seen_slot` is a slot that is known to be kept, 0 for none. Raises NotOwner if another
    node has replaced that ownership, and Fenced if another one did so during the takeover.
    """
    shard = replica.shard
    value = msgspec.json.encode(Ownership(node, claim_id))
    term = yield from swap_ownership(shard, value, seen_revision)
    opening = pack_extent(Extent(shard, term, 0, 0, node.encode(), opens_term=True))
    # A standby knows the last slot, or one shortly before it. If there are later slots, the log
    # refuses the append, and `append_extent` reads them.
    last = max(seen_slot, replica.next_slot - 1)
    if last < 1:
        bounds: SlotBounds = yield from until_answered(Bounds(shard))
        last = bounds.last
    slot = yield from append_extent(shard, term, last, opening)
    replica.take_if_next(slot, opening)
    yield from replica.catch_up(slot)
    return replica.journal(term)


def swap_ownership(shard: int, value: bytes, revision: int) -> LogSteps[int]:
    """Swaps the ownership register; its new revision. Raises NotOwner."""
    key = owner_key(shard)
    while True:
        try:
            return (yield Swap(key, value, revision))  # type: ignore[no-any-return]
        except Unanswered:
            yield Pause(RETRY_MS)
        except Mismatch:
            found: Register | None = yield from until_answered(ReadRegister(key))
            if found is not None and found.value == value:
                return found.revision
            if found is not None and found.revision > revision:
                raise NotOwner(f"shard {shard}: another node became its owner") from None
            # The replica that was read lags, or the swap that was accepted first may disappear.
            yield Pause(RETRY_MS)


def append_extent(
    shard: int,
    term: int,
    after: int,
    extent: bytes,
    delayed: Callable[[Unanswered], object] | None = None,
) -> LogSteps[int]:
    """Appends an extent at the end of the log; returns its slot. Raises Fenced.

    It goes after all extents of lower terms that are there already. Before this term is opened
    these belong to the journal; later ones are void. An attempt without an answer is repeated
    without end (rule 4 of `log`); `delayed` gets the reason of each.
    """
    attempts = 0
    while True:
        try:
            return (yield Append(shard, after, extent))  # type: ignore[no-any-return]
        except Unanswered as error:
            if delayed is not None:
                delayed(error)
            yield Pause(FULL_RETRY_MS if isinstance(error, LogFull) else RETRY_MS)
            continue
        except Mismatch:
            pass
        # A refusal alone proves nothing (rule 3 of `log`): the content of the slot decides.
        found = yield from until_answered(ReadSlots(shard, after + 1))
        for number, packed in found:
            if packed == extent:
                return number
            if unpack_extent(packed).term > term:
                raise Fenced(f"shard {shard}: term {term} was replaced by a higher term")
            if unpack_extent(packed).term == term:
                raise JournalError(f"shard {shard}: slot {number} was written twice in one term")
            if number != after + 1:
                # The replica lacks slots, or they were purged after `after` was determined.
                bounds = yield from until_answered(Bounds(shard))
                after = max(after, bounds.first - 1)
                break
            after = number
            attempts = 0
        else:
            if found:
                continue
        attempts += 1
        if attempts % DEMOTE_AFTER == 0:
            yield from until_answered(Demote(shard))
        yield Pause(RETRY_MS)


def append_steps(journal: ReplicatedJournal) -> LogSteps[None]:
    """Appends the journal's extents, one at a time, until none is left.

    Run it again when the journal calls `wake`, and never twice at the same time. Raises Fenced or
    another JournalError; the journal has failed then.
    """
    try:
        while (extent := journal.next_extent()) is not None:
            slot = yield from append_extent(
                journal.shard, journal.term, journal.slot, extent, journal.delayed
            )
            journal.kept(slot)
            if journal.failure is not None:
                raise journal.failure
    except JournalError as error:
        journal.fail(error)
        raise
