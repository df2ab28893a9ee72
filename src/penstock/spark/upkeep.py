"""Compaction of a lake: small files are joined, and what no recent version needs is removed.

A watching run makes a commit of each table and a file of `events` in every round that has new
events. Reading and changing a table takes longer the more of them there are, so the run compacts
the lake itself when there are many.
"""

from collections.abc import Iterator
from typing import Final

from penstock.spark.bronze import events_table, journals_table
from penstock.spark.lake import Lake, locked, our_errors
from penstock.spark.session import OpenSpark
from penstock.spark.tables import BALANCES, FINDINGS, QUEUE_EVENTS, TABLES
from penstock.spark.update import is_up_to_date, table_of, update

# A watching run compacts the lake when `events` has so many commits, and not again for an hour.
COMMITS_MAX: Final = 1_000
UPKEEP_S: Final = 3_600.0
# Then the files of versions of the last day stay: somebody may be reading them.
WATCH_KEEP_HOURS: Final = 24
WATCH_COMMIT_HOURS: Final = 1


def compact_lake(
    open_spark: OpenSpark, lake: Lake, keep_hours: int, commit_hours: int | None = None
) -> Iterator[tuple[str, dict[str, int]]]:
    """Compacts one table after another: its name, and how many files were joined and removed.

    Raises LakeUnusable, LakeFull or LakeBusy.
    """
    with our_errors():
        # Refused before the first table is changed, and not at the second.
        with locked(lake, "tables"), locked(lake, "verdicts"):
            was_up_to_date = is_up_to_date(lake)
        derived = (QUEUE_EVENTS, *TABLES, FINDINGS, BALANCES)
        tables = [
            events_table(lake),
            journals_table(lake),
            *(table_of(lake, each) for each in derived),
        ]
        for each in tables:
            # Files that another process is about to commit would count as unused.
            name = "events" if each in tables[:2] else "tables"
            with locked(lake, name), locked(lake, "verdicts"):
                done = each.compact(keep_hours, commit_hours)
            yield each.path.name, done
        if was_up_to_date:
            # The same events have another version now: without this, the next run would work again.
            update(open_spark, lake)


def needs_upkeep(lake: Lake) -> bool:
    """Whether a watching run is to compact the lake."""
    return events_table(lake).commits() >= COMMITS_MAX
