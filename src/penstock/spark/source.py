"""`format("penstock")`: a journal's events as a DataFrame, in batch and as a stream.

Spark finds it through the module `pyspark_penstock`. `read` is static and stateless: its input is a
`Span`, and `spans` reads it. `consume` is the mode that takes messages from a queue, `sink` writes
into one.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from penstock.errors import InvalidField, JournalError, StoreUnusable
from penstock.journal import reader_positions
from penstock.spark.blocks import COLUMNS, Wanted
from penstock.spark.options import check_columns
from penstock.spark.selection import SCHEMA, SourceOptions, now_ms, spans
from penstock.spark.spans import Span, read_span
from penstock.spark.stream import Point, Stream, align

if TYPE_CHECKING:
    from penstock.spark.sink import QueueStreamWriter, QueueWriter

_MODES: Final = ("journal", "consume")


class PenstockSource(DataSource):
    """A journal's events, one row each, oldest first within a partition.

        spark.read.format("penstock").load("STORE")
        spark.readStream.format("penstock").option("reader", "mine").load("STORE")

    mode                "journal"; or "consume": a queue's messages, as
                        docs/how-to/spark-queues.md describes
    path                the store, an archive directory, or any directory of segment files
    archive             where files went that the journal has dropped
    queue               names or numbers of queues, comma-separated: events of these only
    kinds               such as "Pushed,Deleted"; `Damaged` is what could not be read
    fromEntry toEntry   ids of entries, the second not included
    fromTime toTime     ISO times, UTC unless they say otherwise, the second not included
    fromOffset          of entries that begin there or later
    reader              streaming from a store: the name under which the journal keeps what this
                        stream has not read yet; `penstock readers` lists and removes them
    startAt             streaming: OFFSET:ENTRY, where a stream without a checkpoint begins
    maxBytesPerTrigger  how much of the journal one micro-batch takes
    spanBytes           how much of the journal one task reads; otherwise an eighth of it, or of
                        the micro-batch, 32 to 128 MiB

    Only what is durable is read. A schema with fewer columns reads less: without `body` no body is
    copied. What fails a checksum becomes a row of kind `Damaged` with its offset and the reason.
    """

    @classmethod
    def name(cls) -> str:
        return "penstock"

    # The modules of other modes are imported when they are used: a task that reads starts sooner.

    def schema(self) -> str:
        if self._mode() != "consume":
            return SCHEMA
        from penstock.spark import consume

        consume.ConsumeOptions.of(self.options)
        return consume.SCHEMA

    def reader(self, schema: StructType) -> "JournalBatch":
        if self._mode() == "consume":
            raise InvalidField(
                "option 'mode': a queue can only be consumed by a stream; use readStream, with "
                "trigger(availableNow=True) if it is to end"
            )
        return JournalBatch(SourceOptions.of(self.options), check_columns(schema, COLUMNS))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        try:
            if self._mode() == "consume":
                from penstock.spark import consume

                columns = check_columns(schema, consume.COLUMNS)
                return consume.ConsumeStream(consume.ConsumeOptions.of(self.options), columns)
            columns = check_columns(schema, COLUMNS)
            return JournalStream(SourceOptions.of(self.options), columns)
        except InvalidField as error:
            return RefusedStream(error)

    def writer(self, schema: StructType, overwrite: bool) -> "QueueWriter":
        from penstock.spark.sink import Plan, QueueWriter

        _require_append(overwrite)
        return QueueWriter(Plan.of(self.options, schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> "QueueStreamWriter":  # noqa: N802
        from penstock.spark.sink import Plan, QueueStreamWriter

        _require_append(overwrite)
        return QueueStreamWriter(Plan.of(self.options, schema))

    def _mode(self) -> str:
        mode = self.options.get("mode", "journal")
        if mode not in _MODES:
            raise InvalidField(f"option 'mode': {mode!r} is none of {', '.join(_MODES)}")
        return mode


def _require_append(overwrite: bool) -> None:
    if overwrite:
        raise InvalidField(
            "mode: a write adds rows to a queue and cannot replace its messages; use 'append'"
        )


class JournalBatch(DataSourceReader):
    """One pass over all that is durable now."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema.json()

    def partitions(self) -> Sequence[InputPartition]:
        stream = Stream(self._options.path, self._options.archive)
        try:
            first, end = stream.first, stream.end
            # Without any partition Spark would call `read` with none.
            nothing = Span(stream.path, None, end, end, Wanted(), self._schema)
            found = spans(stream, self._options, first, end, self._schema)
            return [InputPartition(span) for span in found or [nothing]]
        finally:
            stream.close()

    @staticmethod
    def read(partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_span(partition.value)


class RefusedStream(DataSourceStreamReader):
    """A stream with invalid options: Spark shows an error only if a reader raises it."""

    def __init__(self, error: InvalidField) -> None:
        self._error = error

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        raise self._error

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        raise self._error

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        raise self._error

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        raise self._error


class JournalStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A journal followed as it grows; an offset is a point between two of its entries."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema.json()
        self._target: Point | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        stream = self._open()
        try:
            first = self._options.start or stream.first
            self._register(stream, first.offset)
            return _as_offset(stream, first)
        finally:
            stream.close()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        stream = self._open()
        self._target = stream.end
        stream.close()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        most = self._options.batch_bytes_max
        return ReadAllAvailable() if most is None else ReadMaxBytes(most)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        stream = self._open()
        try:
            begin = self._point(stream, start)
            end = self._target or stream.end
            if isinstance(limit, ReadMaxBytes) and end.offset - begin.offset > limit.max_bytes:
                # At least one entry, even if it is larger than the limit.
                end = align(stream.scan, begin.offset + max(1, limit.max_bytes), end)
            return _as_offset(stream, end) if end.offset > begin.offset else start
        finally:
            stream.close()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        stream = self._open()
        try:
            begin, until = self._point(stream, start), self._point(stream, end)
            found = spans(stream, self._options, begin, until, self._schema)
            return [InputPartition(span) for span in found]
        finally:
            stream.close()

    @staticmethod
    def read(partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_span(partition.value)

    def commit(self, end: dict[str, Any]) -> None:
        stream = self._open()
        self._register(stream, end["offset"])
        stream.close()

    def stop(self) -> None:
        self._target = None

    def _open(self) -> Stream:
        return Stream(self._options.path, self._options.archive)

    def _point(self, stream: Stream, offset: dict[str, Any]) -> Point:
        if offset["store"] != stream.identity.hex():
            raise StoreUnusable(
                f"{stream.path}: is not the journal that this stream's checkpoint is of; "
                "give the stream a new checkpoint"
            )
        point = Point(offset["offset"], offset["entry"])
        if not stream.first.offset <= point.offset <= stream.end.offset:
            raise JournalError(
                f"{stream.path}: holds offsets {stream.first.offset} to {stream.end.offset}, and "
                f"this stream has read up to {point.offset}: what it has not read was dropped"
            )
        return point

    def _register(self, stream: Stream, floor_offset: int) -> None:
        if stream.store is None:
            return
        if self._options.reader is None:
            raise InvalidField(
                "option 'reader': a stream needs a name of your choice, under which the journal "
                "keeps what it has not read"
            )
        reader_positions.register(stream.store, self._options.reader, floor_offset, now_ms())


def _as_offset(stream: Stream, point: Point) -> dict[str, Any]:
    return {"store": stream.identity.hex(), "offset": point.offset, "entry": point.entry}
