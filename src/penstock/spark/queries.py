"""The pipeline's SQL: one file a query below `spark/sql`, read from the package.

A file begins with comment lines that describe its rows and, indented, its columns. The tables it
reads are views of the session that runs it; `{ENTRY_SPAN}` and the other names in braces are the
constants below, put in here: a kind of event stands for its number. The dialect is Spark's.
"""

import re
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from penstock.service import DEDUP_WINDOW_MS, HOUR_MS, MINUTE_MS
from penstock.spark.blocks import INDEX_BITS, KIND_NAMES
from penstock.spark.session import session_beside

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# A message's key is its journal's number, shifted by so many bits, and its own number.
MESSAGE_BITS: Final = 48
# The messages of a journal whose numbers share all but the last so many bits are a part.
PART_BITS: Final = 17
# Where the bins of a histogram end: with the rounding to whole milliseconds, the middle of a bin is
# at most 1% off any value in it.
BIN_RATIO: Final = 1.01
# Settings of the session that runs the queries; its views are seen by no query of the user's.
_SETTINGS: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Delta's log names the files: no job is needed to list them.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "1000000",
}
# For few rows, planning takes longer than running: nothing is compiled, and nothing planned again.
_FEW_ROWS: Final = 100_000
_FEW_SETTINGS: Final = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.shuffle.partitions": "1",
    # Of a plan's text, which Spark makes for its pages before it runs anything.
    "spark.sql.ui.explainMode": "simple",
}
_KEPT_SETTING: Final = "spark.sql.shuffle.partitions"
_NUMBERS: Final = {name: number for number, name in enumerate(KIND_NAMES) if name}


def _among(*kinds: str) -> str:
    return f"code IN ({', '.join(str(_NUMBERS[kind]) for kind in kinds)})"


_CONSTANTS: Final = {
    **_NUMBERS,
    "BIN_RATIO": f"{BIN_RATIO}D",
    "MINUTE_MS": MINUTE_MS,
    "HOUR_MS": HOUR_MS,
    "DEDUP_WINDOW_MS": DEDUP_WINDOW_MS,
    # Every sequence is its entry times this, plus the event's index in the entry.
    "ENTRY_SPAN": 1 << INDEX_BITS,
    "MESSAGE_BITS": MESSAGE_BITS,
    # `queue_key` is a journal's number times this, plus the queue's.
    "QUEUES": f"{1 << 32}L",
    "MESSAGE": f"(key & {(1 << MESSAGE_BITS) - 1})",
    "NO_LIMIT": f"{(1 << 63) - 1}L",
    # Events that end a claim, events that end a message, events by which it leaves its queue.
    "CLAIM_ENDED": _among("Deleted", "Released", "ClaimExpired", "Lost"),
    "ENDED": _among("Deleted", "Expired", "Lost", "Arrived"),
    "LEFT_QUEUE": _among("Deleted", "Expired", "Lost", "Moved", "Departed"),
}
DIRECTORY: Final = Path(__file__).with_name("sql")
_CONSTANT: Final = re.compile(r"\{(\w+)\}")


@cache
def load_query(name: str) -> str:
    """The query of this file, such as `audit/stores`, with its constants put in."""
    lines = (DIRECTORY / f"{name}.sql").read_text().splitlines()
    query = "\n".join(line for line in lines if not line.startswith("--"))
    return _CONSTANT.sub(lambda match: str(_CONSTANTS[match[1]]), query)


def query_session(spark: "SparkSession", rows: int | None = None) -> "SparkSession":
    """The session beside this one for the views and settings of the pipeline's own queries.

    `rows` says how many rows they read, if that is known.
    """
    session = _session_beside(spark)
    is_small = rows is not None and rows <= _FEW_ROWS
    for name in _FEW_SETTINGS:
        session.conf.unset(name)
    settings = {**_SETTINGS, _KEPT_SETTING: str(spark.conf.get(_KEPT_SETTING))}
    for name, value in (settings | _FEW_SETTINGS if is_small else settings).items():
        session.conf.set(name, value)
    return session


def view_locally(spark: "SparkSession", name: str, frame: "DataFrame") -> pa.Table:
    """Makes a view of a frame's rows, which are few and are brought here once; these rows.

    What reads the view is planned as for a table that is known, and not for the frame's own query.
    """
    rows = frame.toArrow()
    spark.createDataFrame(rows, frame.schema).createOrReplaceTempView(name)
    return rows


@lru_cache(maxsize=2)
def _session_beside(spark: "SparkSession") -> "SparkSession":
    # Spark keeps what listens to streams for each session that had one.
    return session_beside(spark)
