"""The lake's tables under their own names in Spark SQL, for queries of the user's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException

from penstock.errors import InvalidField
from penstock.spark.ingest import events_table
from penstock.spark.lake import Lake, first_line, our_errors
from penstock.spark.replay import REPLAYS, replays_table
from penstock.spark.tables import TABLES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def name_tables(spark: "SparkSession", lake: Lake) -> list[str]:
    """Makes a temporary view of every table of the lake, as it is now; their names."""
    tables = {"events": events_table(lake), REPLAYS: replays_table(lake)}
    tables |= {each.name: lake.table(each.name, each.schema) for each in TABLES}
    for name, table in tables.items():
        table.frame(spark).createOrReplaceTempView(name)
    return list(tables)


def query_lake(
    spark: "SparkSession", lake: Lake, query: str
) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
    """The columns and rows of any Spark SQL; the tables of the lake have their names in it.

    The query is not restricted: it can read and write files and run code. Raises InvalidField if
    Spark refuses it, LakeUnusable if a table cannot be read.
    """
    name_tables(spark, lake)
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
