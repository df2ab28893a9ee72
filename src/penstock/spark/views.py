"""The lake's tables under their own names in Spark SQL, for queries of the user's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from penstock.errors import InvalidField
from penstock.spark.derive import table_of
from penstock.spark.ingest import events_table
from penstock.spark.lake import Lake, first_line, our_errors
from penstock.spark.replay import REPLAYS, replays_table
from penstock.spark.tables import FINDINGS, QUEUE_EVENTS, TABLES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def name_tables(spark: "SparkSession", lake: Lake) -> list[str]:
    """Makes a temporary view of every table of the lake, as it is now; their names."""
    tables = {"events": events_table(lake), REPLAYS: replays_table(lake)}
    tables |= {each.name: table_of(lake, each) for each in (*TABLES, QUEUE_EVENTS, FINDINGS)}
    for name, table in tables.items():
        table.frame(spark).createOrReplaceTempView(name)
    return list(tables)


def run_query(spark: "SparkSession", query: str) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
    """The columns and rows of any Spark SQL; tables have the names that `name_tables` gave them.

    The query is not restricted: it can read and write files and run code. Raises InvalidField if
    Spark refuses it, LakeUnusable if a table cannot be read.
    """
    with _spark_errors():
        frame = spark.sql(query)
        return frame.columns, _rows(frame.toLocalIterator())


def _rows(rows: Iterator[Any]) -> Iterator[tuple[Any, ...]]:
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
