"""Schemas of tables, written as Spark's DDL and read here without Spark.

store string, shard int, at timestamp, `group` string, ends array<struct<at_ms: bigint, …>>
"""

import re
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

# A name and a type; the commas inside a nested type are not those between columns.
_COLUMN: Final = re.compile(r"`?(\w+)`? (array<struct<[^>]*>>|\w+)(?:, |$)")
_FIELD: Final = re.compile(r"(\w+): (\w+)")
_ARROW: Final = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "timestamp": pa.timestamp("us", "UTC"),
}
_DUCK: Final = {"string": "varchar", "timestamp": "timestamptz", "binary": "blob"}


def columns_of(schema: str) -> dict[str, str]:
    """The names of the columns and their types."""
    return dict(_COLUMN.findall(schema))


def duck_types(schema: str) -> dict[str, str]:
    """The names of the columns and their types, as DuckDB calls them."""
    return {name: _duck_type(kind) for name, kind in columns_of(schema).items()}


def _duck_type(kind: str) -> str:
    if kind in _ARROW:
        return _DUCK.get(kind, kind)
    fields = ", ".join(f'"{name}" {_duck_type(of)}' for name, of in _FIELD.findall(kind))
    return f"STRUCT({fields})[]"


def arrow_schema(schema: str) -> pa.Schema:
    """The schema as Arrow has it."""
    return pa.schema([(name, _arrow_type(kind)) for name, kind in columns_of(schema).items()])


def _arrow_type(kind: str) -> pa.DataType:
    if kind in _ARROW:
        return _ARROW[kind]
    return pa.list_(pa.struct([(name, _arrow_type(of)) for name, of in _FIELD.findall(kind)]))


def arrow_rows(schema: str, rows: Sequence[Sequence[Any]]) -> pa.Table:
    """Rows that have the first columns of a schema; those they do not have are null."""
    made = arrow_schema(schema)
    columns = [
        pa.array([row[at] if at < len(row) else None for row in rows], kind)
        for at, kind in enumerate(made.types)
    ]
    return pa.table(columns, made)
