"""A sink in Python that counts its rows and discards them: what Spark costs by itself.

    frame.write.format("discard").mode("append").save()

It receives Arrow batches as `penstock.spark.sink` does. `benchmarks.spark` compares with it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType


@dataclass
class Discarded(WriterCommitMessage):
    """How many rows a task was given."""

    rows: int


class _Writer(DataSourceArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Discarded:
        return Discarded(sum(batch.num_rows for batch in iterator))


class Discard(DataSource):
    """The data source `discard`."""

    @classmethod
    def name(cls) -> str:
        return "discard"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return _Writer()
