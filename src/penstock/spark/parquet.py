"""Parquet files of the lake's tables: how they are written, and the statistics that Delta notes.

Noted are the least and the greatest value of whole numbers and of `store`: texts of a message must
not outlive it in the commits of a table (`spark.versions`).
"""

from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

# Columns of texts that seldom repeat: the writer would build a dictionary and then discard it.
_ALL_DIFFERENT: Final = ("message_id", "dedup_id", "attempt_id")


class ColumnBounds(NamedTuple):
    """The least and the greatest values of columns; those without a value are left out."""

    smallest: dict[str, Any]
    largest: dict[str, Any]


def write_parquet(rows: pa.Table, path: Path, group_rows: int) -> None:
    """Writes rows in the encodings that suit their columns: differences, lengths, dictionaries."""
    encodings = {}
    for field in rows.schema:
        if pa.types.is_integer(field.type) or pa.types.is_timestamp(field.type):
            encodings[field.name] = "DELTA_BINARY_PACKED"
        elif field.name in _ALL_DIFFERENT:
            encodings[field.name] = "DELTA_LENGTH_BYTE_ARRAY"
    # A column of dictionaries is written as it is if all of its rows have the same dictionary.
    rows = rows.unify_dictionaries()
    pq.write_table(
        rows,
        path,
        row_group_size=group_rows,
        use_dictionary=[name for name in rows.column_names if name not in encodings],
        column_encoding=encodings,
        write_statistics=[field.name for field in rows.schema if _has_bounds(field)],
        # Arrow would note which columns were dictionaries in memory, and read them as such.
        store_schema=False,
    )


def read_bounds(file: Path) -> tuple[int, ColumnBounds]:
    """How many rows a file has, and their bounds, by its footer."""
    footer = pq.read_metadata(file)
    bounds = ColumnBounds({}, {})
    names = {field.name for field in footer.schema.to_arrow_schema() if _has_bounds(field)}
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for column in map(group.column, range(footer.num_columns)):
            name = column.path_in_schema
            if name not in names:
                continue
            stats = column.statistics
            if stats is None or not stats.has_min_max:
                continue
            # Each of these reads the footer's bytes again.
            low, high = stats.min, stats.max
            bounds.smallest[name] = min(low, bounds.smallest.get(name, low))
            bounds.largest[name] = max(high, bounds.largest.get(name, high))
    return footer.num_rows, bounds


def bounds_of(rows: pa.Table) -> ColumnBounds:
    """The bounds of these rows."""
    bounds = ColumnBounds({}, {})
    for field in rows.schema:
        found = _bounds(rows[field.name]) if _has_bounds(field) else None
        if found is not None:
            bounds.smallest[field.name], bounds.largest[field.name] = found
    return bounds


def _has_bounds(field: pa.Field) -> bool:
    """Whether the least and the greatest value of a column are noted."""
    return bool(pa.types.is_integer(field.type)) or field.name == "store"


def _bounds(column: pa.ChunkedArray) -> tuple[Any, Any] | None:
    """The least and the greatest value of a column, None if it has none."""
    if pa.types.is_dictionary(column.type):
        column = column.unify_dictionaries().combine_chunks().dictionary
    found = pc.min_max(column).as_py()
    return None if found["min"] is None else (found["min"], found["max"])
