"""The lake of a benchmark: what is in it, and making its tables without Spark."""

import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Void, timed_in_threads

CORES = len(os.sched_getaffinity(0))
# Columns of tables in parts that are dictionaries in their files.
REPEATED_TEXTS = ("store", "queue", "held_in", "group", "state", "standing", "holder", "ended")


def folded_rows(path: str) -> dict[str, int]:
    """How many messages each part has, by its file in `folds`."""
    from penstock.spark.derive import table_of
    from penstock.spark.lake import Lake
    from penstock.spark.tables import FOLDS

    return {each.path: each.rows for each in table_of(Lake.open(path), FOLDS).files()}


def remove_unused_files(lake: str) -> None:
    """Removes the files of a lake that the newest versions of its tables do not need."""
    from deltalake import DeltaTable

    for log in Path(lake).glob("*/_delta_log"):
        table = DeltaTable(str(log.parent))
        table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)


def size_of(directory: str) -> int:
    """The bytes of all files below a directory."""
    return sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())


def tables_by_duckdb(path: str) -> float:
    """The seconds of making every table in one process without Spark."""
    from penstock.spark import distribute
    from penstock.spark.derive import derive
    from penstock.spark.lake import Lake

    distribute.LOCAL_MAX = sys.maxsize  # type: ignore[misc]
    start_s = time.perf_counter()
    derive(_no_spark, Lake.open(path), rebuild=True)
    took_s = time.perf_counter() - start_s
    remove_unused_files(path)
    return took_s


def _no_spark() -> Any:
    raise Void("a piece of work was given to Spark")


def copy_tables(path: str) -> float:
    """The seconds of reading the events and writing all rows of the tables in parts: no queries.

    Each table in parts is written from its own files, so the rows are read as well.
    """
    import pyarrow.parquet as pq

    from penstock.spark.derive import table_of
    from penstock.spark.duck import GROUP_ROWS, SMALL_GROUP_ROWS
    from penstock.spark.ingest import events_table
    from penstock.spark.lake import Lake
    from penstock.spark.parquet import write_parquet
    from penstock.spark.part_events import COLUMNS, REPEATED
    from penstock.spark.tables import PART_TABLES

    lake = Lake.open(path)
    events = [each.path for each in events_table(lake).files()]
    parts = [
        (each.path, SMALL_GROUP_ROWS if table.order else GROUP_ROWS)
        for table in PART_TABLES
        for each in table_of(lake, table).files()
    ]

    def body(number: int) -> None:
        copy = Path(path, f"copied-{number}")
        for file in events[number::CORES]:
            with pq.ParquetFile(file, read_dictionary=list(REPEATED)) as opened:
                opened.read(list(COLUMNS), use_threads=False)
        for file, group_rows in parts[number::CORES]:
            names = pq.read_schema(file).names
            texts = [name for name in REPEATED_TEXTS if name in names]
            with pq.ParquetFile(file, read_dictionary=texts) as opened:
                write_parquet(opened.read(use_threads=False), copy, group_rows)
        copy.unlink()

    return timed_in_threads(CORES, body)
