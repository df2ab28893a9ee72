"""The cost of Spark itself: a source that returns one batch of a journal's events repeatedly.

Spark gets the same columns of the same events as from `format("penstock")`, in batches of the same
size. Only the first batch of a task is read and decoded, so no source in Python can be faster.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from penstock.spark.selection import SCHEMA, SourceOptions
from penstock.spark.source import JournalBatch
from penstock.spark.spans import Span, read_span

TASKS_PER_CORE = 4


@dataclass
class Repeated(InputPartition):
    """A range of the journal whose first batch is repeated up to so many rows."""

    span: Span
    rows: int


class Prebuilt(DataSource):
    """A source with the options `path`, a store, and `rows`, the number of rows."""

    @classmethod
    def name(cls) -> str:
        return "prebuilt"

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: StructType) -> "Repeating":
        options = SourceOptions.of({"path": self.options["path"]})
        return Repeating(
            JournalBatch(options, schema).partitions()[0].value, int(self.options["rows"])
        )


class Repeating(DataSourceReader):
    """A reader with an equal number of rows for each core."""

    def __init__(self, span: Span, rows: int) -> None:
        self._span = span
        self._rows = rows

    def partitions(self) -> Sequence[Repeated]:
        tasks = TASKS_PER_CORE * len(os.sched_getaffinity(0))
        edges = [self._rows * task // tasks for task in range(tasks + 1)]
        return [Repeated(self._span, b - a) for a, b in pairwise(edges)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Repeated)
        batch = next(read_span(partition.span))
        left = partition.rows
        while left > 0:
            yield batch.slice(0, left)
            left -= batch.num_rows
