"""What an owner of a shard does with the replicated log: takes the shard over, and appends.

A takeover is, in this order:

1. the shard's ownership register is swapped; its new revision is the owner's term. This only tells
   everyone whom to ask: safety does not rest on it.
2. an extent that opens the term is appended at the end of the log. From here on no owner before can
   append anything (rules 2 and 5 of `log`), so the log up to this slot is all there is.
3. the snapshot is loaded, and the log replayed up to that very slot (`replica`).
4. if the log holds a higher term by then, another owner came later: this one gives up.

Only then does the shard serve. An owner that finds a higher term where its own extent should be is
fenced: its state may be ahead of the log and is discarded.
"""

from typing import Final

import msgspec

from penstock.cluster.extent import Extent, pack_extent, unpack_extent
from penstock.cluster.journal import ReplicatedJournal
from penstock.cluster.log import (
    RETRY_MS,
    Append,
    Bounds,
    Demote,
    LogSteps,
    Look,
    Mismatch,
    Pause,
    ReadSlots,
    Register,
    SlotBounds,
    Swap,
    Unanswered,
    insist,
)
from penstock.cluster.replica import ShardReplica
from penstock.errors import Fenced, JournalError, NotOwner

# How often a slot that should be there is asked for before another replica is made to answer.
DEMOTE_AFTER: Final = 50


class Ownership(msgspec.Struct, frozen=True):
    """The value of a shard's ownership register; `claim_id` differs in each swap."""

    node: str
    claim_id: str


_decode_ownership = msgspec.json.Decoder(Ownership).decode


def owner_key(shard: int) -> str:
    """The key of the register that says who owns the shard."""
    return f"owner.{shard}"


def read_ownership(register: Register | None) -> Ownership | None:
    """Who owns a shard by its register; None if nobody does."""
    return None if register is None else _decode_ownership(register.value)


def take_over(
    replica: ShardReplica, node: str, claim_id: str, seen_revision: int, seen_slot: int = 0
) -> LogSteps[ReplicatedJournal]:
    """Makes this node the owner of a shard; the journal to serve it with.

    `seen_revision` is that of the ownership which the caller decided to replace, 0 for none;
    `claim_id` is new for each call; `seen_slot` is a slot that is known to be kept, 0 for none.
    Raises NotOwner if another node was first, and Fenced if another came while this one was at it.
    """
    shard = replica.shard
    value = msgspec.json.encode(Ownership(node, claim_id))
    term = yield from _swap_ownership(shard, value, seen_revision)
    opening = pack_extent(Extent(shard, term, 0, 0, node.encode(), opens_term=True))
    # A standby knows the last slot, or almost. If there are later ones, the log refuses, and they
    # are passed over.
    last = max(seen_slot, replica.next_slot - 1)
    if last < 1:
        bounds: SlotBounds = yield from insist(Bounds(shard))
        last = bounds.last
    slot = yield from append_extent(shard, term, last, opening)
    replica.take_if_next(slot, opening)
    yield from replica.catch_up(slot)
    return replica.journal(term)


def _swap_ownership(shard: int, value: bytes, revision: int) -> LogSteps[int]:
    """Swaps the ownership register; its new revision. Raises NotOwner."""
    key = owner_key(shard)
    while True:
        try:
            return (yield Swap(key, value, revision))  # type: ignore[no-any-return]
        except Unanswered:
            yield Pause(RETRY_MS)
        except Mismatch:
            found: Register | None = yield from insist(Look(key))
            if found is not None and found.value == value:
                return found.revision
            if found is not None and found.revision > revision:
                raise NotOwner(f"shard {shard}: another node became its owner") from None
            # The register that was read is behind, or the swap that was first may vanish yet.
            yield Pause(RETRY_MS)


def append_extent(shard: int, term: int, after: int, extent: bytes) -> LogSteps[int]:
    """Appends an extent behind everything that is in the log; its slot. Raises Fenced.

    Extents of lower terms are passed over: before the term is opened they are the log's history,
    after that they are void.
    """
    attempts = 0
    while True:
        try:
            return (yield Append(shard, after, extent))  # type: ignore[no-any-return]
        except Unanswered:
            yield Pause(RETRY_MS)
            continue
        except Mismatch:
            pass
        # A refusal proves nothing (rule 3): what stands in the slot decides.
        found = yield from insist(ReadSlots(shard, after + 1))
        for number, packed in found:
            if packed == extent:
                return number
            if unpack_extent(packed).term > term:
                raise Fenced(f"shard {shard}: an owner of a higher term than {term} writes it")
            if unpack_extent(packed).term == term:
                raise JournalError(f"shard {shard}: slot {number} was written twice in one term")
            if number != after + 1:
                # A replica misses slots, or they were purged since the end was asked for.
                bounds = yield from insist(Bounds(shard))
                after = max(after, bounds.first - 1)
                break
            after = number
            attempts = 0
        else:
            if found:
                continue
        attempts += 1
        if attempts % DEMOTE_AFTER == 0:
            yield from insist(Demote(shard))
        yield Pause(RETRY_MS)


def append_steps(journal: ReplicatedJournal) -> LogSteps[None]:
    """Appends what waits in the journal until nothing does; one extent at a time.

    To be run again when the journal calls `wake`, and never twice at once. Raises Fenced or
    another JournalError; the journal has then failed.
    """
    try:
        while (extent := journal.next_extent()) is not None:
            slot = yield from append_extent(journal.shard, journal.term, journal.slot, extent)
            journal.kept(slot)
            if journal.failure is not None:
                raise journal.failure
    except JournalError as error:
        journal.fail(error)
        raise
