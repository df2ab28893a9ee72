"""Removing the content of single messages from a lake, on request.

The body and the attributes of a message are in the rows of `events` that push or carry it. These
rows are written again without them. Then everything else that may hold them is removed: files and
commits of older versions, what a killed run or a killed replay left.

Killed at any point, the same command completes it.
"""

import shutil
from collections.abc import Sequence

from penstock.spark.bronze import events_table, remove_staged
from penstock.spark.lake import OUTBOX, Lake, locked, our_errors


def forget_content(lake: Lake, message_ids: Sequence[str]) -> dict[str, int]:
    """Removes the content of these messages; from how many rows of each.

    Raises LakeBusy if a run is adding events or a replay is running.
    """
    with our_errors(), locked(lake, OUTBOX), locked(lake, "events"):
        table = events_table(lake)
        rows = {
            message_id: table.update(
                # Files have statistics of the number: by it only those with the message are read.
                f"message = {int(message_id[-12:], 16)} AND message_id = '{message_id}' "
                "AND kind IN ('Pushed', 'Carried')",
                {"body": "NULL", "extra": "NULL"},
            )
            for message_id in message_ids
        }
        shutil.rmtree(lake.path / OUTBOX, ignore_errors=True)
        remove_staged(lake)
        # Also if no row was changed: older versions may still hold rows that were dropped.
        table.drop_versions(0)
    return rows
