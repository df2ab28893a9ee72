"""Functions of the batch actions of the SQS endpoint: checking entries, reporting refused ones."""

import re
from collections.abc import Sequence
from typing import Any, Final

from penstock.errors import PenstockError
from penstock.server.sqs.lookup import no_such_queue, refusal_of
from penstock.wire.sqs import errors as faults
from penstock.wire.sqs import model as model
from penstock.wire.sqs.errors import Refusal, missing

ENTRIES_MAX: Final = 10
_ENTRY_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,80}", re.ASCII)
_ENTRY_IDS: Final = re.compile(r"(?:[A-Za-z0-9_-]{1,80},)+", re.ASCII)


def check_entries(entries: Sequence[Any] | None, name: str) -> Sequence[Any]:
    """The entries of a batch: one to ten, with distinct ids. Raises Refusal."""
    if not entries:
        raise Refusal(
            faults.EMPTY_BATCH_REQUEST, f"There should be at least one {name} in the request."
        )
    if len(entries) > ENTRIES_MAX:
        raise Refusal(
            faults.TOO_MANY_ENTRIES,
            f"Maximum number of entries per request are {ENTRIES_MAX}. "
            f"You have sent {len(entries)}.",
        )
    ids = {entry.id for entry in entries}
    if len(ids) == len(entries) and None not in ids and _ENTRY_IDS.fullmatch(",".join(ids) + ","):
        return entries
    # At least one id is wrong: the first such entry determines the refusal.
    seen: set[str] = set()
    for number, entry in enumerate(entries, 1):
        if entry.id is None:
            raise missing(f"{name}.{number}.Id")
        if _ENTRY_ID.fullmatch(entry.id) is None:
            raise Refusal(
                faults.INVALID_BATCH_ENTRY_ID,
                "A batch entry id can only contain alphanumeric characters, hyphens and "
                "underscores. It can be at most 80 letters long.",
            )
        if entry.id in seen:
            raise Refusal(faults.BATCH_ENTRY_IDS_NOT_DISTINCT, f"Id {entry.id} repeated.")
        seen.add(entry.id)
    return entries


def failure(entry_id: str, error: Exception) -> model.ErrorEntry:
    """The entry of a batch's result for a refused entry."""
    refusal = error if isinstance(error, Refusal) else refusal_of_any(error)
    return model.ErrorEntry(
        entry_id, refusal.fault.status < 500, refusal.fault.query_code, refusal.message
    )


def refusal_of_any(error: Exception) -> Refusal:
    """The refusal for an item's error."""
    return refusal_of(error) if isinstance(error, PenstockError) else no_such_queue()
