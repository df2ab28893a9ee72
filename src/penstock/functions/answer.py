"""What a function's answer means for the messages of its batch; pure.

By Lambda's rules for `ReportBatchItemFailures`, a batch is a complete success if the answer is
null, an empty object, or has an empty or null list of failures. It is a complete failure if the
answer is no JSON object, or if an item has no `itemIdentifier`, an empty or null one, or one that
is the id of no message of the batch.
"""

from collections.abc import Collection
from typing import Any, Final

_FAILURES: Final = "batchItemFailures"
_ITEM: Final = "itemIdentifier"


def failed_ids(answer: Any, ids: Collection[str]) -> set[str]:
    """The ids of the messages that failed: none, some, or all."""
    if answer is None:
        return set()
    if not isinstance(answer, dict):
        return set(ids)
    failures = answer.get(_FAILURES)
    if failures is None:
        return set()
    if not isinstance(failures, list):
        return set(ids)
    named: set[str] = set()
    for item in failures:
        found = item.get(_ITEM) if isinstance(item, dict) else None
        if not isinstance(found, str) or found not in ids:
            return set(ids)
        named.add(found)
    return named


def with_later_ones(failed: set[str], groups: dict[str, str | None]) -> set[str]:
    """The failed messages of a FIFO batch, and those behind them in their groups.

    `groups` has the group of each message, in the order of the batch. A message that was done after
    an earlier one of its group had failed would be out of order: it is given again, too.
    """
    blocked: set[str | None] = set()
    found = set()
    for message_id, group in groups.items():
        if message_id in failed or group in blocked:
            blocked.add(group)
            found.add(message_id)
    return found
