"""The lake of a benchmark: what is in it, and the same work by a bare Spark job and by DuckDB."""

import os
import re
import shutil
import time
from pathlib import Path
from typing import Any, Final

CORES = len(os.sched_getaffinity(0))
# What every engine that makes tables of messages must do at least: read the numbers of the events,
# bring those of a message together, and write a row for each message.
_BARE: Final = """
    SELECT key, count(*) AS events, max(sequence) AS last_sequence, max(at_ms) AS last_ms,
      max(epoch) AS claims FROM {events} WHERE key IS NOT NULL GROUP BY key
"""
# The aggregate of `messages`, in the query's own words.
_FOLD: Final = re.compile(r"WITH folded AS \(\n(.*?)\n\), lives AS", re.S)


def message_rows(path: str) -> dict[str, int]:
    """How many messages each part has, by its file in `messages`."""
    from penstock.spark.lake import Lake
    from penstock.spark.tables import MESSAGES
    from penstock.spark.update import table_of

    return {each.path: each.rows for each in table_of(Lake.open(path), MESSAGES).files()}


def remove_unused_files(lake: str) -> None:
    """Removes the files of a lake that the newest versions of its tables do not need."""
    from deltalake import DeltaTable

    for log in Path(lake).glob("*/_delta_log"):
        table = DeltaTable(str(log.parent))
        table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)


def size_of(directory: str) -> int:
    """The bytes of all files below a directory."""
    return sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())


def bare_job(spark: Any, path: str) -> float:
    """The seconds of the bare job, by Spark."""
    from penstock.spark.bronze import events_table
    from penstock.spark.lake import Lake

    return _written(path, spark.sql(_BARE, events=events_table(Lake.open(path)).frame(spark)))


def fold_by_spark(spark: Any, path: str) -> float:
    """The seconds of the aggregate of `messages` by itself, by Spark."""
    events = _part_events(spark, path)
    events.createOrReplaceTempView("part_events")
    return _written(path, spark.sql(_fold()))


def fold_by_duckdb(path: str) -> float:
    """The seconds of the same aggregate, by DuckDB with as many threads and 4 GiB."""
    import duckdb

    from penstock.spark.bronze import events_table
    from penstock.spark.lake import Lake
    from penstock.spark.queries import PART_BITS

    files = [each.path for each in events_table(Lake.open(path)).files()]
    out = Path(path, "_bench.parquet")
    query = _fold().replace("`", '"')
    start_s = time.perf_counter()
    with duckdb.connect() as duck:
        duck.execute(f"SET threads = {CORES}; SET memory_limit = '4GiB'")
        duck.execute(
            f"CREATE VIEW part_events AS SELECT *, 0 AS slot, key >> {PART_BITS} AS part "
            f"FROM read_parquet({files}) WHERE key IS NOT NULL"
        )
        duck.execute(f"COPY ({query}) TO '{out}'")
    took_s = time.perf_counter() - start_s
    out.unlink()
    return took_s


def _fold() -> str:
    from penstock.spark.tables import MESSAGES

    found = _FOLD.search(MESSAGES.query)
    assert found is not None
    return found[1]


def _part_events(spark: Any, path: str) -> Any:
    from penstock.spark.bronze import events_table
    from penstock.spark.lake import Lake
    from penstock.spark.update import part_of

    frame = events_table(Lake.open(path)).frame(spark).where("key IS NOT NULL")
    return frame.selectExpr("*", f"{part_of()} AS part", "0 AS slot")


def _written(path: str, frame: Any) -> float:
    out = Path(path, "_bench")
    start_s = time.perf_counter()
    frame.write.mode("overwrite").parquet(str(out))
    took_s = time.perf_counter() - start_s
    shutil.rmtree(out)
    return took_s
