"""The work of one task: it reads a range of a journal, into Spark or into a Parquet file.

Rows that go into Spark are copied from Arrow to Java, and Spark writes Parquet files value by
value. A task that writes its file itself does both in Arrow, and returns only the file's name:
`mode` "files", for exports.
"""

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import StoreUnusable
from penstock.spark.blocks import CODED_COLUMNS, COLUMNS, Block, Wanted, blocks
from penstock.spark.ordering import stable_order
from penstock.spark.stream import Point, Stream
from penstock.spark.workers import spare_modules

FILES_SCHEMA: Final = "file string, rows bigint"
# How much of the events, as Arrow has them, is put in order and written: what a task holds at most.
HELD_BYTES: Final = 128 << 20
# How many rows a row group of a file has.
GROUP_ROWS: Final = 1 << 15
# Events of messages whose numbers differ by less than this may be in any row of those.
NEAR_MESSAGES: Final = 1 << 13
# Columns whose values rise from row to row, nearly everywhere: differences are small.
_RISING: Final = ("entry", "sequence", "offset", "message")
# Columns whose values seldom repeat: the writer would build a dictionary and then discard it.
_ALL_DIFFERENT: Final = ("message_id", "dedup_id", "attempt_id", "extra")
# Statistics of these are of no use, and would hold two whole values.
_UNRANGED: Final = ("body", "extra")


@dataclass(frozen=True)
class Span:
    """A range of a journal and a selection of its events: the input of one task.

    `schema` is that of the rows it returns. With `into`, the events go into a file in this
    directory.
    """

    path: str
    archive: str | None
    start: Point
    end: Point
    wanted: Wanted
    schema: str
    into: str | None = None


def read_span(span: Span) -> Iterator[pa.RecordBatch]:
    """The rows of a span as Arrow batches of exactly its schema."""
    # Only a task of Spark reads spans, and has it: what writes files does not need it.
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    spare_modules()
    schema = to_arrow_schema(StructType.fromJson(json.loads(span.schema)), timezone="UTC")
    if span.into is not None:
        return _write(span, span.into, schema)
    return _read(span, schema)


def _read(span: Span, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for block in _wanted_of(span):
        arrays = [
            array if array.type == column.type else array.cast(column.type)
            for array, column in zip(block.arrow(schema.names), schema, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _wanted_of(span: Span) -> Iterator[Block]:
    stream = Stream(span.path, span.archive)
    try:
        for block in blocks(stream.scan, stream.identity, span.start, span.end, span.path):
            kept = span.wanted.of(block)
            if len(kept.events):
                yield kept
    finally:
        stream.close()


def _write(span: Span, into: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Writes every column of the events; one row names the file, none if there are no events.

    A task that is repeated writes another file; the row that Spark returns names the one to use.
    """
    for path, rows in _written(span, into):
        named = {"file": [path], "rows": [rows]}
        yield pa.RecordBatch.from_pydict({name: named[name] for name in schema.names}, schema)


def _written(span: Span, into: str) -> Iterator[tuple[str, int]]:
    path = Path(into) / f"{span.start.offset:020d}-{uuid.uuid4().hex}.parquet"
    try:
        os.makedirs(into, exist_ok=True)
        rows = _write_file(path, span)
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        why = error.strerror or str(error)
        raise StoreUnusable(f"{into}: events cannot be written there: {why}") from error
    if rows:
        yield str(path), rows


def _write_file(path: Path, span: Span) -> int:
    names = list(COLUMNS)
    rows = 0
    with ExitStack() as stack:
        held: list[pa.RecordBatch] = []
        writer: pq.ParquetWriter | None = None
        for block in _wanted_of(span):
            columns = [{**COLUMNS, **CODED_COLUMNS}[name](block) for name in names]
            held.append(pa.RecordBatch.from_arrays(columns, names))
            rows += held[-1].num_rows
            if writer is None:
                # Closed also if it is full: a writer that fails keeps its file open.
                file = stack.enter_context(pa.OSFile(str(path), "wb"))
                writer = stack.enter_context(_writer(file, held[0].schema))
            if sum(batch.nbytes for batch in held) >= HELD_BYTES:
                writer.write_table(_near_each_other(held), GROUP_ROWS)
                held.clear()
        if writer is not None and held:
            writer.write_table(_near_each_other(held), GROUP_ROWS)
    return rows


def _near_each_other(held: list[pa.RecordBatch]) -> pa.Table:
    """These events with those of near messages in near rows, otherwise in the order of the journal.

    Statistics of row groups then say which of them a reader of some messages needs: in the order of
    the journal, a few events of old messages are in every row group.
    """
    rows = pa.Table.from_batches(held).combine_chunks()
    numbers = rows["message"].combine_chunks().fill_null(0).to_numpy()
    return rows.take(pa.array(stable_order(numbers // NEAR_MESSAGES)))


def _writer(file: pa.NativeFile, schema: pa.Schema) -> pq.ParquetWriter:
    names = schema.names
    return pq.ParquetWriter(
        file,
        schema,
        use_dictionary=[name for name in names if name not in (*_ALL_DIFFERENT, *_RISING)],
        column_encoding=dict.fromkeys(_RISING, "DELTA_BINARY_PACKED"),
        # Arrow would note which columns were dictionaries in memory, and read them as such.
        store_schema=False,
        write_statistics=[name for name in names if name not in _UNRANGED],
    )
