"""Rows into a queue: `df.write.format("penstock")` and `writeStream`.

Each column has a role: the role of its own name, or the role whose option names it.

    body         text or bytes; required
    key          text or a whole number: the dedup id
    delay ttl    seconds
    priority     a whole number
    group        text
    attributes   a map, or with the option: columns, each an attribute by its name

Each task sends its rows as bulk pushes, and every row has a dedup id: its key, or a hash of the
query, the batch, the partition and the row's content. A task that is retried, or a batch that is
run again, adds nothing twice while the queue remembers its dedup ids.
"""

import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegralType,
    MapType,
    NumericType,
    StringType,
    StructType,
)

import penstock
from penstock.errors import InvalidField, PenstockError
from penstock.service import PushMany, PushReply, check_name
from penstock.spark.options import listed, read_options, required, shared_url, usual_spelling
from penstock.spark.rowids import Array, RowIds
from penstock.spark.workers import spare_modules

# A frame is one append, during which the engine serves no other caller.
FRAME_ROWS_MAX: Final = 2_000
FRAME_BYTES_MAX: Final = 4 << 20
# How many frames are made and not answered: one that is sent, and one that waits for it.
FRAMES_AHEAD: Final = 2
_TEXT: Final = (StringType, BinaryType)
_ROLES: Final[dict[str, tuple[tuple[type[DataType], ...], str]]] = {
    "body": (_TEXT, "text or bytes"),
    "key": ((StringType, IntegralType), "text or a whole number"),
    "delay": ((NumericType,), "a number of seconds"),
    "ttl": ((NumericType,), "a number of seconds"),
    "priority": ((IntegralType,), "a whole number"),
    "group": ((StringType,), "text"),
    "attributes": ((MapType,), "a map from text to text or bytes"),
}
# Spark passes a stream's own option to its sink, too.
_KNOWN: Final = usual_spelling(["url", "queue", *_ROLES, "checkpointLocation"])
_encode: Final = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True)
class Plan:
    """Where the rows go, and which column has which role."""

    url: str
    queue: str
    columns: Mapping[str, str]
    attributes: tuple[str, ...]

    @classmethod
    def of(cls, given: Mapping[str, str], schema: StructType) -> "Plan":
        """Raises InvalidField, naming the option or the column."""
        options = read_options(given, _KNOWN)
        types = {field.name: field.dataType for field in schema.fields}
        chosen = listed(options.get("attributes", ""))
        is_map = len(chosen) <= 1 and isinstance(types.get((*chosen, "attributes")[0]), MapType)
        columns: dict[str, str] = {}
        for role in _ROLES:
            column = options.get(role, role)
            if role == "attributes" and not is_map and chosen:
                continue
            if column in types:
                columns[role] = _checked(role, column, types[column])
            elif role in options or role == "body":
                raise InvalidField(
                    f"option {role!r}: there is no column {column!r}; there are {', '.join(types)}"
                )
        attributes = () if is_map else chosen
        for name in attributes:
            if not isinstance(types.get(name), _TEXT):
                raise InvalidField(
                    f"option 'attributes': {name!r} is not a column of text or bytes"
                )
        unused = [name for name in types if name not in (*columns.values(), *attributes)]
        if unused:
            raise InvalidField(
                f"column {unused[0]!r}: has no role; leave it out, or name it in an option "
                f"({', '.join(_ROLES)})"
            )
        queue = required(options, "queue", "the queue")
        return cls(shared_url(options), check_name(queue), columns, attributes)


def _checked(role: str, column: str, found: DataType) -> str:
    kinds, shown = _ROLES[role]
    fits = isinstance(found, kinds)
    if isinstance(found, MapType):
        fits = fits and isinstance(found.keyType, StringType) and isinstance(found.valueType, _TEXT)
    if not fits:
        raise InvalidField(
            f"column {column!r}: is {found.simpleString()}, and as {role} it must be {shown}"
        )
    return column


@dataclass
class Written(WriterCommitMessage):
    """How many rows a task pushed, and how many of them the queue had already."""

    rows: int
    duplicates: int


class QueueWriter(DataSourceArrowWriter):
    """One write of a DataFrame; a random id makes the dedup ids of its rows distinct."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._write = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return push_rows(self._plan, self._write, iterator)


class QueueStreamWriter(DataSourceStreamArrowWriter):
    """The batches of a stream; the dedup ids of rows contain the query and the batch's number."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        task = TaskContext.get()
        assert task is not None
        query = task.getLocalProperty("sql.streaming.queryId")
        batch = task.getLocalProperty("streaming.sql.batchId")
        assert query is not None
        assert batch is not None
        return push_rows(self._plan, f"{query}:{batch}", iterator)


def push_rows(plan: Plan, write: str, batches: Iterator[pa.RecordBatch]) -> Written:
    """Sends the rows of one task. Raises the error of the first refused row, and names that row.

    A thread sends one frame after another, in order, while the next ones are made here.
    """
    spare_modules()
    task = TaskContext.get()
    assert task is not None
    partition = task.partitionId()
    ids = RowIds(f"{write}:{partition}")
    written = Written(0, 0)
    sent: deque[tuple[PushMany, Future[Sequence[Any]]]] = deque()
    with penstock.connect(plan.url) as queues, ThreadPoolExecutor(1) as sender:
        try:
            for batch in batches:
                for bulk in bulks(plan, batch, ids):
                    sent.append((bulk, sender.submit(queues.service.execute, bulk)))
                    if len(sent) >= FRAMES_AHEAD:
                        _count(plan, partition, written, *sent.popleft())
            while sent:
                _count(plan, partition, written, *sent.popleft())
        except BaseException:
            sender.shutdown(wait=False, cancel_futures=True)
            raise
    return written


def _count(
    plan: Plan, partition: int, written: Written, bulk: PushMany, answer: Future[Sequence[Any]]
) -> None:
    """Waits for the answer to a frame and adds it to what was written."""
    replies = answer.result()
    for place, reply in enumerate(replies):
        if not isinstance(reply, PushReply):
            row = f"row {written.rows + place + 1} of partition {partition}"
            raise _refused(row, plan, bulk, place, reply)
        written.duplicates += reply.duplicate
    written.rows += len(replies)


def _refused(
    row: str, plan: Plan, bulk: PushMany, place: int, reply: PenstockError
) -> PenstockError:
    if "key" in plan.columns and bulk.dedup_ids is not None:
        row += f", key {bulk.dedup_ids[place]!r},"
    return type(reply)(f"{row} was refused: {reply}")


def bulks(plan: Plan, batch: pa.RecordBatch, ids: RowIds) -> Iterator[PushMany]:
    """The rows as bulk pushes, each within the limits of one frame.

    Raises InvalidField for a null body or key, or a number of seconds that is out of range.
    """
    columns: dict[str, list[Any]] = {
        role: _values(role, name, batch.column(name))
        for role, name in plan.columns.items()
        if role != "body"
    }
    if plan.attributes:
        columns["attributes"] = _attributes(plan.attributes, batch)
    bodies = _bodies(plan.columns["body"], batch)
    names = columns.pop("key", None)
    if names is None:
        names = ids.of(_whole_rows(bodies, columns))
    for start, end in _cuts(bodies):
        part = slice(start, end)
        own: dict[str, Any] = {_FIELDS[role]: values[part] for role, values in columns.items()}
        yield PushMany(
            plan.queue,
            bodies[part].tolist(),
            names[part],
            **own,
        )


_FIELDS: Final = {
    "delay": "delays_ms",
    "ttl": "ttls_ms",
    "priority": "priorities",
    "group": "groups",
    "attributes": "each_attributes",
}


def _bodies(name: str, batch: pa.RecordBatch) -> Array:
    column = batch.column(name)
    _require_all(name, column)
    bodies: Array = column.cast(pa.large_binary()).to_numpy(zero_copy_only=False)
    return bodies


def _require_all(name: str, column: pa.Array) -> None:
    if column.null_count:
        raise InvalidField(f"column {name!r}: is null in {column.null_count} of {len(column)} rows")


def _values(role: str, name: str, column: pa.Array) -> list[Any]:
    """A column as a field of a bulk push."""
    if role in ("delay", "ttl"):
        try:
            column = pc.round(pc.multiply(column.cast(pa.float64()), 1_000.0)).cast(pa.int64())
        except pa.ArrowInvalid:
            raise InvalidField(f"column {name!r}: has a value that is not a duration") from None
    elif role == "key":
        _require_all(name, column)
        column = column.cast(pa.string())
    values: list[Any] = column.to_pylist()
    if role == "attributes":
        return [None if pairs is None else _without_nulls(pairs) for pairs in values]
    return values


def _attributes(names: tuple[str, ...], batch: pa.RecordBatch) -> list[dict[str, Any]]:
    rows = zip(*(batch.column(name).to_pylist() for name in names), strict=True)
    return [_without_nulls(zip(names, row, strict=True)) for row in rows]


def _without_nulls(pairs: Any) -> dict[str, Any]:
    return {name: value for name, value in pairs if value is not None}


def _whole_rows(bodies: Array, columns: Mapping[str, list[Any]]) -> Array:
    """Each row's whole content as bytes."""
    if not columns:
        return bodies
    rows = np.empty(len(bodies), dtype=object)
    rows[:] = [_encode(row) for row in zip(bodies, *columns.values(), strict=True)]
    return rows


def _cuts(bodies: Array) -> Iterator[tuple[int, int]]:
    """The start and end of each frame, by the limits of rows and bytes; a large row is alone."""
    ends = np.cumsum(np.fromiter(map(len, bodies), dtype=np.int64, count=len(bodies)))
    start = 0
    while start < len(bodies):
        before = int(ends[start - 1]) if start else 0
        fits = int(np.searchsorted(ends, before + FRAME_BYTES_MAX, "right"))
        end = min(max(start + 1, fits), start + FRAME_ROWS_MAX, len(bodies))
        yield start, end
        start = end
