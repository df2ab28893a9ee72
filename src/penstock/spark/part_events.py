"""Ranges of a shard's message numbers, and their events, read from the files of `events` by Arrow.

    files ─▶ row groups that hold one of the messages ─▶ rows of these messages ─▶ their order

Statistics say which row groups may hold a message; of those the numbers are read first, and the
other columns only if one of them is of the range. An event of an old message makes the statistics
of a file include all ranges in between, but few row groups hold such events.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.spark.duck import quoted
from penstock.spark.ordering import Array, order_by, stable_order
from penstock.spark.schemas import arrow_schema
from penstock.spark.selection import SCHEMA

# How many messages a range holds.
PART_MESSAGES: Final = 1 << 16
# The columns of `events` that tables in parts are made from.
COLUMNS: Final = (
    "message", "sequence", "kind", "at_ms", "queue", "term", "epoch", "deadline_ms",
    "visible_at_ms", "expires_at_ms", "priority", "group", "dedup_id", "attempt_id", "holder",
    "name", "to_queue", "rank", "dead", "body_bytes",
)  # fmt: skip
# Texts that repeat are read as numbers of a dictionary, as the files have them.
REPEATED: Final = ("kind", "group", "holder")
# Arrow can do this for these encodings. Other writers, as when files are joined, may use others.
_CODED: Final = frozenset(("PLAIN", "RLE", "BIT_PACKED", "PLAIN_DICTIONARY", "RLE_DICTIONARY"))


@dataclass(frozen=True, order=True)
class LakePart:
    """A range of a shard's message numbers, or one of its sealed or closed parts, by its number."""

    store: str
    shard: int
    nth: int
    messages: int = PART_MESSAGES
    seal: int = 0
    closed: int = 0

    @property
    def name(self) -> str:
        """As the tables in parts have it."""
        name = f"{self.store}-{self.shard}-{self.nth}"
        if self.seal:
            return f"{name}.{self.seal}"
        return f"{name}_{self.closed}" if self.closed else name

    @property
    def first(self) -> int:
        """The least message number in it."""
        return self.nth * self.messages

    @property
    def end(self) -> int:
        """The least message number behind it."""
        return self.first + self.messages

    def condition(self) -> str:
        """The SQL condition that an event is of one of its messages."""
        return f"store = {quoted(self.store)} AND shard = {self.shard} AND {self.numbers()}"

    def numbers(self) -> str:
        """The SQL condition that a message number is in its range."""
        return f"message >= {self.first} AND message < {self.end}"


@dataclass(frozen=True)
class RangeEvents:
    """Events of a range among others, and for each the place of its message in the range.

    The place of the others is -1: selecting rows takes longer than keeping some that are not used.
    """

    rows: pa.Table
    places: Array

    def only(self, keep: Array) -> "RangeEvents":
        """The events that `keep` selects."""
        if 2 * np.count_nonzero(keep) < len(keep):
            return RangeEvents(self.rows.filter(pa.array(keep)), self.places[keep])
        return RangeEvents(self.rows, np.where(keep, self.places, -1))

    @cached_property
    def order(self) -> Array:
        """Where each event is, in the order of their messages and of the journal."""
        found = np.flatnonzero(self.places >= 0)
        found = found[stable_order(self.places[found])]
        places, sequences = self.places[found], self.numbers("sequence")[found]
        rising = (sequences[1:] >= sequences[:-1]) | (places[1:] != places[:-1])
        # Events of a message are stored in their order, unless files were joined since.
        return found if rising.all() else found[order_by(places, sequences)]

    def numbers(self, name: str, null: int = 0) -> Array:
        """A column of numbers, with another number in place of null."""
        return _numbers(self.rows, name, null)


def _numbers(rows: pa.Table, name: str, null: int) -> Array:
    found: Array = rows[name].combine_chunks().fill_null(null).to_numpy(zero_copy_only=False)
    return found


def read_events(
    files: Sequence[str],
    part: LakePart,
    wanted: Array,
    *,
    first: Sequence[str] = (),
    since: int = 0,
) -> RangeEvents:
    """The events in files of `events` of those messages of a range whose places are wanted.

    `first` are files with all of these events before the offset `since`: of the others, only what
    is behind it is read.
    """
    found = [piece for path in first for piece in _pieces(path, part, wanted)]
    # By their names, which begin with the offset: in the order of the journal.
    found += [piece for path in sorted(files) for piece in _pieces(path, part, wanted, since)]
    if not found:
        return RangeEvents(_schema().empty_table(), np.zeros(0, np.int64))
    rows = pa.concat_tables([piece.rows for piece in found]).unify_dictionaries().combine_chunks()
    return RangeEvents(rows, np.concatenate([piece.places for piece in found]))


def _pieces(path: str, part: LakePart, wanted: Array, since: int = 0) -> Iterator[RangeEvents]:
    footer = _footer(path)
    names = [footer.schema.column(at).path for at in range(footer.num_columns)]
    known = [name for name in COLUMNS if name in names]
    texts = [name for name in REPEATED if name in names and _has_codes(footer, names.index(name))]
    with pq.ParquetFile(path, metadata=footer, read_dictionary=texts) as file:
        for number in range(footer.num_row_groups):
            group = footer.row_group(number)
            low, high = _bounds(group.column(names.index("message")))
            if low is None or low >= part.end or high < part.first:
                continue
            of_shard = {"store": part.store, "shard": part.shard}
            mixed = {
                name: value
                for name, value in of_shard.items()
                if _bounds(group.column(names.index(name))) != (value, value)
            }
            low, high = _bounds(group.column(names.index("offset"))) if since else (0, 0)
            if high < since:
                continue
            offset = ["offset"] if low < since else []
            keys = file.read_row_group(number, ["message", *mixed, *offset], use_threads=False)
            places = _numbers(keys, "message", -1) - part.first
            keep = (places >= 0) & (places < part.messages)
            keep[keep] = wanted[places[keep]]
            for name, value in mixed.items():
                keep &= pc.equal(keys[name], value).to_numpy()
            if offset:
                keep &= _numbers(keys, "offset", 0) >= since
            if keep.any():
                rows = _as_schema(file.read_row_group(number, known, use_threads=False))
                yield RangeEvents(rows, places).only(keep)


@lru_cache(maxsize=64)
def _footer(path: str) -> pq.FileMetaData:
    """The footer of a file: neighbouring ranges are in the same files, which never change."""
    return pq.read_metadata(path)


def _has_codes(footer: pq.FileMetaData, column: int) -> bool:
    """Whether a column of texts can be read as numbers of a dictionary, by how it is stored."""
    groups = map(footer.row_group, range(footer.num_row_groups))
    return all(_CODED.issuperset(group.column(column).encodings) for group in groups)


def _bounds(column: pq.ColumnChunkMetaData) -> tuple[Any, Any]:
    """The least and the greatest value in a row group, None if there is none; or any numbers."""
    stats = column.statistics
    if stats is not None and stats.has_min_max:
        return stats.min, stats.max
    if stats is not None and stats.has_null_count and stats.null_count == column.num_values:
        return None, None
    return 0, 1 << 63


@cache
def _schema() -> pa.Schema:
    """The columns that are read."""
    types = arrow_schema(SCHEMA)
    texts = pa.dictionary(pa.int32(), pa.string())
    return pa.schema([(each, texts if each in REPEATED else types.field(each).type)
                      for each in COLUMNS])  # fmt: skip


def _as_schema(rows: pa.Table) -> pa.Table:
    """Rows of a file with exactly the columns that are read: an older file may lack some."""
    schema = _schema()
    if rows.schema.equals(schema):
        return rows
    columns = []
    for each in schema:
        known = each.name in rows.schema.names
        column = rows[each.name] if known else pa.nulls(len(rows), each.type)
        if pa.types.is_dictionary(each.type) and not pa.types.is_dictionary(column.type):
            column = column.cast(pa.string()).dictionary_encode()
        columns.append(column)
    return pa.table(columns, schema.names).cast(schema)
