"""Brings silver and gold level with `events`: parts that changed, and small tables whole.

Each table is changed in one commit that carries the version of `events` it was made from: a run
that finds that version there has nothing to do, and a run that was killed leaves tables that are
complete but older.

Tables with a row a message or a claim are kept in parts, each a range of a shard's message numbers.
Only parts with new events are made again, by the same query over the events of just these messages,
so the work follows what is new. The other tables are small and made again whole.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from deltalake import DeltaTable

from penstock.spark.ingest import events_table
from penstock.spark.lake import PART, Lake, Table, our_errors
from penstock.spark.tables import TABLES, Derived

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SOURCE: Final = "events"
# How many messages a part of a table holds, and how many ranges of parts one query may name.
PART_MESSAGES: Final = 1 << 18
_RANGES_MAX: Final = 100


def derive(
    spark: "SparkSession",
    lake: Lake,
    made: Callable[[str], None] = lambda name: None,
    tables: Sequence[Derived] = TABLES,
) -> list[str]:
    """Brings every table level with `events`; the names of those changed. Raises LakeUnusable."""
    events = events_table(lake)
    delta = events.delta()
    if delta is None:
        return []
    # Files and version are of one snapshot of the table: another commit may follow at any time.
    version = delta.version()
    frames = {"events": events.frame(spark, delta)}
    done = []
    for each in tables:
        table = lake.table(each.name, each.schema, in_parts=each.swept is not None)
        if table.committed(_SOURCE) != version:
            with our_errors():
                if table.in_parts:
                    _refresh(spark, table, each, frames, delta)
                else:
                    frame = select(spark, each, frames).repartition(1)
                    table.replace(frame, f"data/from-{version:08d}", {_SOURCE: version})
            done.append(each.name)
            made(each.name)
        frames[each.name] = table.frame(spark)
    return done


def is_level(lake: Lake) -> bool:
    """Whether every table was made from the newest version of `events`; reads only Delta's log."""
    delta = events_table(lake).delta()
    if delta is None:
        return True
    tables = (lake.table(each.name, each.schema) for each in TABLES)
    return all(table.committed(_SOURCE) == delta.version() for table in tables)


def select(spark: "SparkSession", table: Derived, frames: "dict[str, DataFrame]") -> "DataFrame":
    """The table's rows, from the frames of those it names."""
    inputs: dict[str, Any] = {name: frames[name] for name in table.inputs}
    return spark.sql(table.query, **inputs)


def _refresh(
    spark: "SparkSession",
    table: Table,
    derived: Derived,
    frames: "dict[str, DataFrame]",
    events: DeltaTable,
) -> None:
    """Makes those parts again that have events after the table's last commit."""
    stores = [row["store"] for row in frames["queues"].select("store").distinct().collect()]
    marks = {store: f"offset/{store}" for store in stores}
    seen = {store: table.committed(mark) for store, mark in marks.items()}
    touched = None if table.delta() is None else _touched(spark, table, derived, frames, seen)
    if touched is not None:
        frames = frames | {"events": frames["events"].where(_within(touched))}
    part = _part_of("message")
    frame = select(spark, derived, frames).selectExpr("*", f"{part} AS {PART}")
    version = events.version()
    reached = {mark: events.transaction_version(mark) for mark in marks.values()}
    transactions = {_SOURCE: version, **{m: at for m, at in reached.items() if at is not None}}
    parts = None if touched is None else [f"{a}-{b}-{nth}" for a, b, nth in touched]
    table.replace(frame, f"data/from-{version:08d}", transactions, parts)


def _part_of(message: str) -> str:
    return f"concat(store, '-', shard, '-', {message} div {PART_MESSAGES})"


def _touched(
    spark: "SparkSession",
    table: Table,
    derived: Derived,
    frames: "dict[str, DataFrame]",
    seen: Mapping[str, int | None],
) -> list[tuple[str, int, int]] | None:
    """The parts that new events change, as (store, shard, nth); None for all parts."""
    known = " OR ".join(
        f"(store = '{store}' AND offset < {offset})" for store, offset in seen.items() if offset
    )
    query = f"""
        WITH new AS (SELECT * FROM {{events}} WHERE NOT ({known or "false"})),
        gone AS (SELECT store, shard, queue FROM new WHERE kind IN ('QueuePurged', 'QueueRemoved'))
        SELECT DISTINCT store, shard, message div {PART_MESSAGES} AS nth FROM new
        WHERE message IS NOT NULL
        UNION
        SELECT DISTINCT store, shard, message div {PART_MESSAGES}
        FROM {{table}} AS old JOIN gone USING (store, shard) WHERE {derived.swept}
        """
    found = spark.sql(query, events=frames["events"], table=table.frame(spark)).collect()
    parts = sorted((row["store"], row["shard"], row["nth"]) for row in found)
    return parts if len(_runs(parts)) <= _RANGES_MAX else None


def _runs(parts: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int, int]]:
    """Ranges of consecutive parts, as (store, shard, first, last)."""
    runs: list[tuple[str, int, int, int]] = []
    for store, shard, nth in parts:
        if runs and runs[-1] == (store, shard, runs[-1][2], nth - 1):
            runs[-1] = (store, shard, runs[-1][2], nth)
        else:
            runs.append((store, shard, nth, nth))
    return runs


def _within(parts: Sequence[tuple[str, int, int]]) -> str:
    """The condition that an event is of a message in these parts.

    It compares plain columns, so Parquet's statistics let Spark skip files.
    """
    ranges = [
        f"(store = '{store}' AND shard = {shard} AND message >= {first * PART_MESSAGES} "
        f"AND message < {(last + 1) * PART_MESSAGES})"
        for store, shard, first, last in _runs(parts)
    ]
    return " OR ".join(ranges) or "false"
