"""Spark as one of a queue's competing consumers: `option("mode", "consume")`.

An offset is the number of a batch and its parts. Spark stores it before it runs the batch, so a
batch that is run again, also by another process, has the same messages or, if their claims have
lapsed, none of them; never others.

    latestOffset(N)   N is committed: its messages are deleted, and those of N + 1 are claimed
    partitions(N+1)   the claims are extended from here on, also after a restart
    read              a task repeats the pull of its part, and gets the same claims

Spark reports a batch as committed only when it builds the next one, so the next `latestOffset`
settles a batch, in this run or another; or `settle`, if there will be no other run.
"""

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

import penstock
from penstock.client import Queues
from penstock.errors import InvalidField, UnsupportedOperation
from penstock.output import logger
from penstock.service import (
    PULL_LIMIT_MAX,
    SECOND_MS,
    VISIBILITY_MS_MAX,
    Claim,
    check_id,
    check_name,
)
from penstock.spark.options import read_options, required, shared_url, usual_spelling, within
from penstock.spark.parts import (
    ClaimExtender,
    Part,
    Settled,
    Source,
    claims_of,
    group_parts,
    pull_part,
    resume_claims,
    settle_part,
)
from penstock.spark.workers import spare_modules

VISIBILITY_S: Final = 600
BATCH_MESSAGES: Final = 10_000
PART_MESSAGES: Final = 2_500
_READER_CHARS_MAX: Final = 64
_LIMITS: Final = ("visibilityTimeout", "maxMessagesPerTrigger", "messagesPerPartition")
_KNOWN: Final = usual_spelling(["mode", "url", "queue", "reader", *_LIMITS])
_OFFSET_KEYS: Final = frozenset({"reader", "queue", "batch", "parts", "lapsed"})
SCHEMA: Final = (
    "message_id string, queue string, body binary, attributes map<string,string>, "
    "binary_attributes map<string,binary>, priority int, group string, dedup_id string, "
    "pushed_at timestamp, sequence bigint, receives int, first_pulled_at timestamp, "
    "source string, epoch bigint"
)
_INSTANT: Final = pa.timestamp("us", tz="UTC")
COLUMNS: Final[dict[str, tuple[pa.DataType, Callable[[Claim], Any]]]] = {
    "message_id": (pa.string(), lambda claim: claim.id),
    "queue": (pa.string(), lambda claim: claim.queue),
    "body": (pa.binary(), lambda claim: claim.body),
    "attributes": (pa.map_(pa.string(), pa.string()), lambda claim: _pairs(claim, str)),
    "binary_attributes": (pa.map_(pa.string(), pa.binary()), lambda claim: _pairs(claim, bytes)),
    "priority": (pa.int32(), lambda claim: claim.priority),
    "group": (pa.string(), lambda claim: claim.group),
    "dedup_id": (pa.string(), lambda claim: claim.dedup_id),
    "pushed_at": (_INSTANT, lambda claim: claim.pushed_at_ms * 1_000),
    "sequence": (pa.int64(), lambda claim: claim.sequence),
    "receives": (pa.int32(), lambda claim: claim.receives),
    "first_pulled_at": (
        _INSTANT,
        lambda claim: None if not claim.first_pulled_at_ms else claim.first_pulled_at_ms * 1_000,
    ),
    "source": (pa.string(), lambda claim: claim.source),
    "epoch": (pa.int64(), lambda claim: claim.epoch),
}
assert [column.split()[0] for column in SCHEMA.split(", ")] == list(COLUMNS)
_warn = logger("penstock.spark").warning


def _pairs(claim: Claim, kind: type) -> list[tuple[str, Any]]:
    return [pair for pair in claim.attributes.items() if type(pair[1]) is kind]


@dataclass(frozen=True)
class ConsumeOptions:
    """The options of a stream that consumes, checked."""

    url: str
    source: Source
    batch_messages_max: int
    part_messages_max: int

    @classmethod
    def of(cls, given: Mapping[str, str]) -> "ConsumeOptions":
        """Raises InvalidField, naming the option."""
        found = read_options(given, _KNOWN)
        url = shared_url(found)
        queue = check_name(required(found, "queue", "the queue"), "option 'queue'")
        holder = check_id("option 'reader'", found.get("reader", "spark"))
        if len(holder) > _READER_CHARS_MAX:
            raise InvalidField(f"option 'reader': longer than {_READER_CHARS_MAX} characters")
        most_s = VISIBILITY_MS_MAX // SECOND_MS
        visibility_s = within(found, "visibilityTimeout", VISIBILITY_S, 1, most_s)
        return cls(
            url,
            Source(queue, visibility_s * SECOND_MS, holder),
            within(found, "maxMessagesPerTrigger", BATCH_MESSAGES, 1, 10**9),
            within(found, "messagesPerPartition", PART_MESSAGES, 1, PULL_LIMIT_MAX),
        )


@dataclass
class PartGroup(InputPartition):
    """The parts that one task reads, and how."""

    url: str
    source: Source
    parts: tuple[Part, ...]
    schema: str


@dataclass(frozen=True)
class Place:
    """The offset of a stream, as Spark stores it.

    `reader` makes the attempt ids of each checkpoint distinct. `lapsed` counts
    the messages of all batches so far that were given out again before they could be deleted.
    """

    reader: str
    queue: str
    batch: int
    parts: tuple[Part, ...]
    lapsed: int

    @classmethod
    def of(cls, offset: Mapping[str, Any]) -> "Place":
        """Reads an offset."""
        parts = tuple(Part(*part) for part in offset["parts"])
        return cls(offset["reader"], offset["queue"], offset["batch"], parts, offset["lapsed"])

    def offset(self) -> dict[str, Any]:
        """The offset as a JSON object."""
        return {
            "reader": self.reader,
            "queue": self.queue,
            "batch": self.batch,
            "lapsed": self.lapsed,
            "parts": [list(part) for part in self.parts],
        }


class ConsumeStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A queue's messages as a stream, each deleted when the batch it was in is committed."""

    def __init__(self, options: ConsumeOptions, schema: StructType) -> None:
        self._options = options
        self._source = options.source
        self._schema = schema.json()
        # Spark pickles readers to send them to tasks: a connection is opened at the first use.
        self._queues: Queues | None = None
        self._extender: ClaimExtender | None = None
        self._reader = f"{options.source.holder}-{uuid.uuid4().hex[:16]}"
        self._settled = ""
        self._lapsed = 0
        # How many more messages a run that ends by itself may take; None if it does not.
        self._left: int | None = None
        self._is_first = True

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return Place(self._reader, self._source.queue, 0, (), 0).offset()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._left = self._open().stats(self._source.queue).visible

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._options.batch_messages_max)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        done = self._place(start)
        self._settle(done)
        most = self._options.batch_messages_max
        if isinstance(limit, ReadMaxRows):
            most = limit.max_rows
        # The first batch may have been claimed by an earlier process: `visible` did not count it.
        if self._left is not None and not self._is_first:
            most = min(most, self._left)
        self._is_first = False
        parts = self._pull(f"{done.reader}:{done.batch + 1}", most)
        if not parts:
            return start
        if self._left is not None:
            self._left = max(0, self._left - sum(part.size for part in parts))
        lapsed = done.lapsed + self._lapsed
        return Place(done.reader, done.queue, done.batch + 1, tuple(parts), lapsed).offset()

    def _pull(self, name: str, most: int) -> list[Part]:
        service, claimed = self._open().service, self._claims()
        parts: list[Part] = []
        while most > 0:
            limit = min(most, self._options.part_messages_max)
            pulled = pull_part(service, self._source, f"{name}:{len(parts)}", limit)
            if pulled is None:
                break
            part, claims = pulled
            claimed.add(part, claims)
            parts.append(part)
            most -= part.size
        return parts

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[PartGroup]:
        place = self._place(end)
        alive = [part for part in place.parts if self._is_held(part)]
        lapsed = sum(part.size for part in place.parts) - sum(part.size for part in alive)
        if lapsed:
            _warn(
                "queue %r: the claims of %d messages of batch %d have lapsed; the batch is "
                "repeated without them, and they come again in a later one",
                place.queue,
                lapsed,
                place.batch,
            )
        groups = group_parts(alive, self._options.part_messages_max)
        url, source, schema = self._options.url, self._source, self._schema
        return [PartGroup(url, source, parts, schema) for parts in groups]

    def _is_held(self, part: Part) -> bool:
        """Whether the part's claims are extended; those of another process are resumed."""
        claimed = self._claims()
        if not claimed.has(part):
            claimed.add(part, resume_claims(self._open().service, self._source, part))
        return claimed.extends(part)

    @staticmethod
    def read(partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, PartGroup)
        return read_parts(partition)

    def commit(self, end: dict[str, Any]) -> None:
        self._settle(self._place(end))

    def stop(self) -> None:
        if self._extender is not None:
            self._extender.stop()
        if self._queues is not None:
            self._queues.close()

    def _settle(self, done: Place) -> None:
        """Deletes the messages of a batch that Spark has committed."""
        name = f"{done.reader}:{done.batch}"
        if name == self._settled:
            return
        settled = Settled(0, 0)
        for part in done.parts:
            settled += settle_part(self._open().service, self._source, part)
            self._claims().remove(part)
        self._settled = name
        # The next offset stores the count; until then it is only here.
        self._lapsed = settled.lapsed
        if settled.lapsed:
            _warn(
                "queue %r: %d messages of batch %d were given out again before they could be "
                "deleted; they are processed again by their next consumer",
                done.queue,
                settled.lapsed,
                done.batch,
            )

    def _place(self, offset: dict[str, Any]) -> Place:
        place = Place.of(offset)
        if place.queue != self._source.queue:
            raise InvalidField(
                f"option 'queue': this checkpoint is of {place.queue!r}, not of "
                f"{self._source.queue!r}; give the stream a new checkpoint"
            )
        return place

    def _open(self) -> Queues:
        if self._queues is None:
            queues = penstock.connect(self._options.url)
            reason = queues.service.LACKS.get("attempts")
            if reason is not None:
                queues.close()
                raise UnsupportedOperation(
                    "option 'url': Spark may repeat a batch, and this store cannot repeat a pull: "
                    f"{reason}"
                )
            self._queues = queues
        return self._queues

    def _claims(self) -> ClaimExtender:
        if self._extender is None:
            self._extender = ClaimExtender(self._open().service, self._source)
        return self._extender


def read_parts(group: PartGroup) -> Iterator[pa.RecordBatch]:
    """The messages of each part as an Arrow batch of exactly the schema; none if they lapsed."""
    spare_modules()
    schema = to_arrow_schema(StructType.fromJson(json.loads(group.schema)), timezone="UTC")
    with penstock.connect(group.url) as queues:
        for part in group.parts:
            claims = claims_of(queues.service, group.source, part)
            if claims:
                arrays = [_array(column, claims) for column in schema]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(column: pa.Field, claims: list[Claim]) -> pa.Array:
    natural, value = COLUMNS[column.name]
    array = pa.array([value(claim) for claim in claims], natural)
    try:
        return array if array.type == column.type else array.cast(column.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as fault:
        raise InvalidField(
            f"schema: column {column.name!r} cannot be {column.type}: {fault}"
        ) from None


def settle(checkpoint: str, url: str) -> Settled:
    """Deletes the messages of the newest batch that a stopped stream has committed.

    Needed only if no run follows before the claims lapse: the next run does this by itself.
    `checkpoint` is the stream's checkpoint directory, `url` where its queues are.
    Raises InvalidField if there is no such checkpoint there.
    """
    settled = Settled(0, 0)
    with penstock.connect(shared_url({"url": url})) as queues:
        for place in committed_places(checkpoint):
            source = Source(place.queue, VISIBILITY_S * SECOND_MS, place.reader)
            for part in place.parts:
                settled += settle_part(queues.service, source, part)
    return settled


def committed_places(checkpoint: str) -> list[Place]:
    """How far the queues of a stream were read when it last committed, by its checkpoint."""
    root = Path(checkpoint.removeprefix("file://"))
    done = _batches(root / "commits")
    if not (root / "offsets").is_dir():
        raise InvalidField(f"checkpoint: {checkpoint!r} is not the directory of a checkpoint")
    if not done:
        return []
    lines = (root / "offsets" / str(max(done))).read_text(encoding="utf-8").splitlines()
    offsets = [json.loads(line) for line in lines[2:] if line.startswith("{")]
    return [Place.of(offset) for offset in offsets if offset.keys() >= _OFFSET_KEYS]


def _batches(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    return [int(path.name) for path in directory.iterdir() if path.name.isdecimal()]
