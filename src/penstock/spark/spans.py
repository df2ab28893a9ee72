"""The work of one task: it reads a range of a journal, as Arrow batches for Spark."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from penstock.spark.blocks import Wanted, blocks
from penstock.spark.stream import Point, Stream
from penstock.spark.workers import spare_modules


@dataclass(frozen=True)
class Span:
    """A range of a journal and a selection of its events: the input of one task.

    `schema` is that of the rows it returns.
    """

    path: str
    archive: str | None
    start: Point
    end: Point
    wanted: Wanted
    schema: str


def read_span(span: Span) -> Iterator[pa.RecordBatch]:
    """The rows of a span as Arrow batches of exactly its schema."""
    # Only a task reads spans: planning a read imports this module in a process of its own.
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    spare_modules()
    schema = to_arrow_schema(StructType.fromJson(json.loads(span.schema)), timezone="UTC")
    stream = Stream(span.path, span.archive)
    try:
        for block in blocks(stream.scan, stream.identity, span.start, span.end, span.path):
            kept = span.wanted.of(block)
            if not len(kept.events):
                continue
            arrays = [
                array if array.type == column.type else array.cast(column.type)
                for array, column in zip(kept.arrow(schema.names), schema, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)
    finally:
        stream.close()
