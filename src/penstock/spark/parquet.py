"""Parquet files of the lake's tables: the statistics that Delta notes of them.

Noted are the least and the greatest value of whole numbers and of `store`: texts of a message must
not outlive it in the commits of a table (`spark.versions`).
"""

from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq


class ColumnBounds(NamedTuple):
    """The least and the greatest values of columns; those without a value are left out."""

    smallest: dict[str, Any]
    largest: dict[str, Any]


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


def _has_bounds(field: pa.Field) -> bool:
    """Whether the least and the greatest value of a column are noted."""
    return bool(pa.types.is_integer(field.type)) or field.name == "store"
