"""`format("penstock")`: a journal's events as a DataFrame, in batch and as a stream.

Spark finds it through the module `pyspark_penstock`. What reads is static and stateless; what it
needs travels in a `Span`, and `spans` has what a task does with it. `consume` has the mode that
takes messages from a queue, and `sink` what writes into one.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
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
from penstock.journal import readers
from penstock.journal.snapshot import read_snapshot, snapshot_paths
from penstock.spark.blocks import COLUMNS, KIND_NAMES, Wanted, blocks
from penstock.spark.options import (
    check_columns,
    instant_ms,
    listed,
    read_options,
    required,
    spelt,
    whole,
)
from penstock.spark.spans import FILES_SCHEMA, Span, read_span
from penstock.spark.stream import Point, Stream, align

if TYPE_CHECKING:
    from penstock.spark.sink import QueueStreamWriter, QueueWriter

SPAN_BYTES: Final = 32 << 20
_MODES: Final = ("journal", "files", "consume")
_RANGES: Final = ("fromEntry", "toEntry", "fromTime", "toTime", "fromOffset")
_LIMITS: Final = ("maxBytesPerTrigger", "spanBytes")
_KNOWN: Final = spelt(
    ["path", "mode", "into", "archive", "reader", "queue", "kinds", *_RANGES, *_LIMITS],
)
SCHEMA: Final = (
    "store string, shard int, term bigint, entry bigint, index int, sequence bigint, "
    "offset bigint, kind string, at timestamp, at_ms bigint, queue bigint, message bigint, "
    "message_id string, epoch bigint, deadline_ms bigint, visible_at_ms bigint, "
    "expires_at_ms bigint, priority int, group string, dedup_id string, attempt_id string, "
    "holder string, name string, to_queue bigint, rank bigint, dead boolean, count bigint, "
    "before bigint, body_bytes bigint, body binary, extra string, damage string"
)
assert [column.split()[0] for column in SCHEMA.split(", ")] == list(COLUMNS)


@dataclass(frozen=True)
class SourceOptions:
    """What was asked for with `option`, checked."""

    path: str
    archive: str | None
    reader: str | None
    queues: tuple[str, ...]
    wanted: Wanted
    batch_bytes_max: int | None
    span_bytes: int
    into: str | None

    @classmethod
    def of(cls, given: Mapping[str, str]) -> "SourceOptions":
        """Raises InvalidField, naming the option."""
        found = read_options(given, _KNOWN)
        path = required(found, "path", "the store, or the directory of segment files")
        kinds = listed(found.get("kinds", ""))
        for kind in kinds:
            if kind not in KIND_NAMES:
                raise InvalidField(f"option 'kinds': {kind!r} is none of {', '.join(KIND_NAMES)}")
        wanted = Wanted(
            kinds,
            None,
            whole(found, "fromEntry"),
            whole(found, "toEntry"),
            instant_ms(found, "fromTime"),
            instant_ms(found, "toTime"),
            whole(found, "fromOffset"),
        )
        return cls(
            path,
            found.get("archive"),
            found.get("reader"),
            listed(found.get("queue", "")),
            wanted,
            whole(found, "maxBytesPerTrigger"),
            whole(found, "spanBytes") or SPAN_BYTES,
            _into(found),
        )


def _into(found: Mapping[str, str]) -> str | None:
    """Where the files of `mode` "files" go."""
    if found.get("mode") == "files":
        return os.path.abspath(required(found, "into", "the directory that files are written to"))
    if "into" in found:
        raise InvalidField("option 'into': is for mode 'files', which writes there")
    return None


class PenstockSource(DataSource):
    """A journal's events, one row each, oldest first within a partition.

        spark.read.format("penstock").load("STORE")
        spark.readStream.format("penstock").option("reader", "mine").load("STORE")

    mode                "journal"; "files": tasks write the events as Parquet files, and a row
                        names a file; or "consume": a queue's messages, see docs/spark-queues.md
    into                of mode "files": the directory they are written to
    path                the store, an archive directory, or any directory of segment files
    archive             where files went that the journal has dropped
    queue               names or numbers of queues, comma-separated: events of these only
    kinds               such as "Pushed,Deleted"; `Damaged` is what could not be read
    fromEntry toEntry   ids of entries, the second not included
    fromTime toTime     ISO times, UTC unless they say otherwise, the second not included
    fromOffset          of entries that begin there or later
    reader              streaming from a store: the name under which the journal keeps what this
                        stream has not read yet; `penstock readers` lists and removes them
    maxBytesPerTrigger  how much of the journal one micro-batch takes
    spanBytes           how much of the journal one task reads, 32 MiB

    Only what is durable is read. A schema with fewer columns reads less: without `body` no body is
    copied. What fails a checksum becomes a row of kind `Damaged` with its offset and the reason.
    """

    @classmethod
    def name(cls) -> str:
        return "penstock"

    # What the other modes need is imported when it is asked for: a task that reads need not wait.

    def schema(self) -> str:
        mode = self._mode()
        if mode != "consume":
            return FILES_SCHEMA if mode == "files" else SCHEMA
        from penstock.spark import consume

        consume.ConsumeOptions.of(self.options)
        return consume.SCHEMA

    def reader(self, schema: StructType) -> "JournalBatch":
        if self._mode() == "consume":
            raise InvalidField(
                "option 'mode': to consume a queue takes a stream; use readStream, with "
                "trigger(availableNow=True) if it is to end"
            )
        return JournalBatch(SourceOptions.of(self.options), self._checked(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        try:
            if self._mode() == "consume":
                from penstock.spark import consume

                columns = check_columns(schema, consume.COLUMNS)
                return consume.ConsumeStream(consume.ConsumeOptions.of(self.options), columns)
            return JournalStream(SourceOptions.of(self.options), self._checked(schema))
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

    def _checked(self, schema: StructType) -> StructType:
        files = [column.split()[0] for column in FILES_SCHEMA.split(", ")]
        return check_columns(schema, files if self._mode() == "files" else COLUMNS)


def _require_append(overwrite: bool) -> None:
    if overwrite:
        raise InvalidField(
            "mode: rows are added to a queue and never replace what it holds; use 'append'"
        )


class JournalBatch(DataSourceReader):
    """One pass over all that is durable now."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema.json()

    def partitions(self) -> Sequence[Span]:
        stream = Stream(self._options.path, self._options.archive)
        try:
            first, end = stream.first, stream.end
            # Without any partition Spark would call `read` with none.
            nothing = Span(stream.path, None, end, end, Wanted(), self._schema)
            return spans(stream, self._options, first, end, self._schema) or [nothing]
        finally:
            stream.close()

    @staticmethod
    def read(partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_span(partition)


class RefusedStream(DataSourceStreamReader):
    """A stream that cannot be: what is raised before there is a reader, Spark does not show."""

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
            self._register(stream, stream.first.offset)
            return _as_offset(stream, stream.first)
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
                # Never nothing: an entry larger than the limit is taken whole.
                end = align(stream.scan, begin.offset + max(1, limit.max_bytes), end)
            return _as_offset(stream, end) if end.offset > begin.offset else start
        finally:
            stream.close()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[Span]:
        stream = self._open()
        try:
            begin, until = self._point(stream, start), self._point(stream, end)
            return spans(stream, self._options, begin, until, self._schema)
        finally:
            stream.close()

    @staticmethod
    def read(partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_span(partition)

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
                f"{stream.path}: is another journal than the one this stream began with; "
                "give the stream a new checkpoint"
            )
        point = Point(offset["offset"], offset["entry"])
        if not stream.first.offset <= point.offset <= stream.end.offset:
            raise JournalError(
                f"{stream.path}: holds offsets {stream.first.offset} to {stream.end.offset}, and "
                f"this stream stands at {point.offset}: what it has not read was dropped"
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
        readers.register(stream.store, self._options.reader, floor_offset, now_ms())


def now_ms() -> int:
    """This instant."""
    return time.time_ns() // 1_000_000


def _as_offset(stream: Stream, point: Point) -> dict[str, Any]:
    return {"store": stream.identity.hex(), "offset": point.offset, "entry": point.entry}


def spans(
    stream: Stream, options: SourceOptions, start: Point, end: Point, schema: str
) -> list[Span]:
    """The stretch between two points, cut at entries into what one task reads each."""
    wanted = options.wanted
    if options.queues:
        wanted = replace(wanted, queues=queue_numbers(stream, options.queues, end))
    points = [start]
    while points[-1].offset + options.span_bytes < end.offset:
        point = align(stream.scan, points[-1].offset + options.span_bytes, end)
        if point.offset >= end.offset:
            break
        points.append(point)
    points.append(end)
    first, last = wanted.from_entry or 0, wanted.to_entry
    return [
        Span(options.path, options.archive, a, b, wanted, schema, options.into)
        for a, b in pairwise(points)
        if max(a.offset, wanted.from_offset or 0) < b.offset
        and (not b.entry or b.entry > first)
        and (last is None or a.entry < last)
    ]


def queue_numbers(stream: Stream, queues: Sequence[str], end: Point) -> tuple[int, ...]:
    """The numbers of these queues, each given by its number or its name. Raises InvalidField."""
    names = {name for name in queues if not name.isdecimal()}
    numbers = {int(queue) for queue in queues if queue.isdecimal()}
    if names:
        known = list(_created(stream, end))
        if not names <= {name for _, name in known} and stream.store is not None:
            known += _in_snapshot(stream.store)
        missing = sorted(names - {name for _, name in known})
        if missing:
            raise InvalidField(f"option 'queue': {stream.path} knows of no queue {missing[0]!r}")
        numbers |= {number for number, name in known if name in names}
    return tuple(sorted(numbers))


def _created(stream: Stream, end: Point) -> Iterator[tuple[int, str]]:
    wanted = Wanted(("QueueCreated", "QueueStated"))
    for block in blocks(stream.scan, stream.identity, stream.first, end, stream.path):
        numbers, names = wanted.of(block).arrow(["queue", "name"])
        yield from zip(numbers.to_pylist(), names.to_pylist(), strict=True)


def _in_snapshot(store: Path) -> list[tuple[int, str]]:
    """Queues made before the journal now begins."""
    for path in snapshot_paths(store):
        found = read_snapshot(path)
        if found is not None:
            return [(kept.number, kept.name) for kept in found[0].shard.queues]
    return []
