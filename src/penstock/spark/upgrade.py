"""Brings a lake of the release before to this version: its events stay, its tables are made again.

The events get the kind as a number and the key of their message, which they lacked; the other
tables are removed, and the next update makes them. Killed at any point, the next run repeats it.
"""

import shutil
from typing import Final

from penstock.spark.blocks import KIND_NAMES
from penstock.spark.bronze import JOURNALS, events_table, journals_table
from penstock.spark.lake import VERSION, Lake, LakeUnusable, locked, our_errors
from penstock.spark.progress import step
from penstock.spark.queries import MESSAGE_BITS, query_session
from penstock.spark.schemas import local_frame
from penstock.spark.session import OpenSpark

_KEPT: Final = ("events", "replays", "outbox", "checkpoints")


def upgrade(open_spark: OpenSpark, lake: Lake) -> Lake:
    """The lake at this version. Raises LakeUnusable or LakeBusy."""
    if lake.version == VERSION:
        return lake
    with (
        our_errors(), locked(lake, "events"), locked(lake, "tables"), locked(lake, "verdicts"),
    ):  # fmt: skip
        if any((lake.path / "messages" / "data").glob("part=*.*")):
            raise LakeUnusable(
                f"{lake.path}: `compact --keep` of an earlier release has dropped events of this "
                "lake, from which its tables would have to be made: go on with that release, or "
                "make a new lake from the journal"
            )
        if events_table(lake).delta() is not None:
            _rewrite_events(open_spark, lake)
        for path in lake.path.iterdir():
            if path.is_dir() and path.name not in (*_KEPT, "journals"):
                shutil.rmtree(path)
        (lake.path / "parts.json").unlink(missing_ok=True)
        lake.mark_upgraded()
    return Lake.open(lake.path, other_owner=True)


def _rewrite_events(open_spark: OpenSpark, lake: Lake) -> None:
    spark = query_session(open_spark())
    table, journals = events_table(lake), journals_table(lake)
    # What a run that was killed has made of it.
    shutil.rmtree(journals.path, ignore_errors=True)
    events = table.frame(spark)
    stores = events.groupBy("store").agg({"shard": "max"}).orderBy("store").collect()
    rows = [(row[0], row[1], number) for number, row in enumerate(stores, 1)]
    numbers = local_frame(spark, rows, JOURNALS)
    kinds = [(number, name) for number, name in enumerate(KIND_NAMES)]
    with step(spark, "upgrading the lake"):
        named = local_frame(spark, kinds, "code tinyint, kind string")
        events = events.drop("code", "key").join(named.hint("broadcast"), "kind")
        events = events.join(numbers.select("store", "journal").hint("broadcast"), "store")
        key = f"shiftleft(journal, {MESSAGE_BITS}) | message AS key"
        added = table.stage(events.selectExpr("*", key))
    journals.add(journals.stage(numbers.coalesce(1)), {})
    table.replace(added, {})
