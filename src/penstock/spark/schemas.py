"""Schemas of tables, written as Spark's DDL and read here without Spark.

store string, shard int, at timestamp, `group` string, ends array<struct<at_ms: bigint, …>>
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# A name and a type; the commas inside a nested type are not those between columns.
_COLUMN: Final = re.compile(r"`?(\w+)`? (array<struct<[^>]*>>|\w+)(?:, |$)")
_FIELD: Final = re.compile(r"(\w+): (\w+)")
_ARROW: Final = {
    "string": pa.string(),
    "tinyint": pa.int8(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "timestamp": pa.timestamp("us", "UTC"),
}


def columns_of(schema: str) -> dict[str, str]:
    """The names of the columns and their types."""
    return dict(_COLUMN.findall(schema))


def arrow_schema(schema: str) -> pa.Schema:
    """The schema as Arrow has it."""
    return pa.schema([(name, _arrow_type(kind)) for name, kind in columns_of(schema).items()])


def local_frame(spark: "SparkSession", rows: Sequence[Sequence[Any]], schema: str) -> "DataFrame":
    """These rows as a frame that Spark plans with: it knows how many they are, or that none are.

    Of a list of rows it would know neither: it would plan exchanges for joins with them.
    """
    columns = zip(*rows, strict=True) if rows else ([] for _ in columns_of(schema))
    arrow = arrow_schema(schema)
    arrays = [pa.array(each, kind) for each, kind in zip(columns, arrow.types, strict=True)]
    # Of a table without rows Spark Connect wants to be told the schema.
    return spark.createDataFrame(pa.table(arrays, arrow), schema)


def _arrow_type(kind: str) -> pa.DataType:
    if kind in _ARROW:
        return _ARROW[kind]
    return pa.list_(pa.struct([(name, _arrow_type(of)) for name, of in _FIELD.findall(kind)]))
