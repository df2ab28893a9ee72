"""The lake's tables under their own names in Spark SQL, for queries of the user's own."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from penstock.errors import InvalidField
from penstock.spark.bronze import events_table
from penstock.spark.lake import Lake, Table, first_line, our_errors
from penstock.spark.progress import step
from penstock.spark.replay import REPLAYS, replays_table
from penstock.spark.tables import FINDINGS, QUEUE_EVENTS, TABLES
from penstock.spark.update import table_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Words by which a statement lists tables, or computes the name of one.
_COMPUTED: Final = re.compile(r"\b(?:identifier|immediate|show|describe|desc|catalog)\b|\\")


def tables_of(lake: Lake) -> dict[str, Table]:
    """Every table of the lake, by its name."""
    tables = {"events": events_table(lake), REPLAYS: replays_table(lake)}
    return tables | {each.name: table_of(lake, each) for each in (*TABLES, QUEUE_EVENTS, FINDINGS)}


def name_tables(spark: "SparkSession", lake: Lake, query: str | None = None) -> list[str]:
    """Makes a temporary view of every table of the lake, as it is now; their names.

    With a query, only of those tables that it can mean.
    """
    tables = tables_of(lake)
    named = set(tables) if query is None else names_in(query, tables)
    with step(spark, "reading the lake's tables"):
        for name, table in tables.items():
            if name in named:
                table.frame(spark).createOrReplaceTempView(name)
    return list(tables)


def names_in(query: str, names: Iterable[str]) -> set[str]:
    """Those of the names that occur in a query; all of them if it can mean one without that."""
    text = query.lower()
    if _COMPUTED.search(text):
        return set(names)
    return {name for name in names if name in text}


def run_query(spark: "SparkSession", query: str) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
    """The columns and rows of any Spark SQL; tables have the names that `name_tables` gave them.

    The query is not restricted: it can read and write files and run code. Raises InvalidField if
    Spark refuses it, LakeUnusable if a table cannot be read.
    """
    with _spark_errors(), step(spark, "query"):
        frame = spark.sql(query)
        rows = frame.toLocalIterator()
        first = next(rows, None)
    return frame.columns, _rows(first, rows)


def _rows(first: Any, rows: Iterator[Any]) -> Iterator[tuple[Any, ...]]:
    if first is None:
        return
    yield tuple(first)
    with _spark_errors():
        for row in rows:
            yield tuple(row)


@contextmanager
def _spark_errors() -> Iterator[None]:
    try:
        with our_errors():
            yield
    except PySparkException as error:
        raise InvalidField(f"query: {first_line(error)}") from None
    except Py4JJavaError as error:
        # A row on which the query fails: Java's threads wrap that error several times.
        cause = error.java_exception
        while cause.getCause() is not None:
            cause = cause.getCause()
        raise InvalidField(f"query: {first_line(cause)}") from None
