"""Which events of a journal are read: checked options, and the spans that tasks read.

It needs no Spark: `ingest` uses it before Spark is started, or without.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from penstock.errors import InvalidField
from penstock.journal.snapshot import read_snapshot, snapshot_paths
from penstock.spark.blocks import COLUMNS, KIND_NAMES, Wanted, blocks
from penstock.spark.options import instant_ms, listed, read_options, required, usual_spelling, whole
from penstock.spark.spans import Span
from penstock.spark.stream import Point, Stream, align

# How much of a journal one task reads without the option: an eighth of it, within these limits. A
# task of Spark takes some 80 ms more than its events do, so few large ones are faster.
_SPAN_BYTES_MIN: Final = 32 << 20
_SPAN_BYTES_MAX: Final = 128 << 20
_SPANS: Final = 8
_RANGES: Final = ("fromEntry", "toEntry", "fromTime", "toTime", "fromOffset")
_LIMITS: Final = ("maxBytesPerTrigger", "spanBytes")
_POINT: Final = re.compile(r"(\d+):(\d+)")
_KNOWN: Final = usual_spelling(
    ["path", "mode", "archive", "reader", "startAt", "queue", "kinds", *_RANGES, *_LIMITS],
)
SCHEMA: Final = (
    "store string, shard int, term bigint, entry bigint, index int, sequence bigint, "
    "offset bigint, kind string, at timestamp, at_ms bigint, queue bigint, message bigint, "
    "message_id string, epoch bigint, deadline_ms bigint, visible_at_ms bigint, "
    "expires_at_ms bigint, priority int, group string, dedup_id string, attempt_id string, "
    "holder string, name string, to_queue bigint, rank bigint, dead boolean, count bigint, "
    "before bigint, body_bytes bigint, body binary, extra string, damage string, "
    "code tinyint"
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
    span_bytes: int | None
    start: Point | None = None

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
            whole(found, "spanBytes"),
            _start(found.get("startAt")),
        )


def _start(given: str | None) -> Point | None:
    """The point at which a new stream begins."""
    if given is None:
        return None
    match = _POINT.fullmatch(given)
    if match is None:
        raise InvalidField(f"option 'startAt': {given!r} is not OFFSET:ENTRY")
    return Point(int(match[1]), int(match[2]))


def now_ms() -> int:
    """This instant."""
    return time.time_ns() // 1_000_000


def spans(
    stream: Stream, options: SourceOptions, start: Point, end: Point, schema: str
) -> list[Span]:
    """The range between two points, cut at entries into one span for each task."""
    wanted = options.wanted
    if options.queues:
        wanted = replace(wanted, queues=queue_numbers(stream, options.queues, end))
    first_offset = max(start.offset, wanted.from_offset or 0)
    span_bytes = options.span_bytes or usual_span_bytes(end.offset - first_offset)
    points = [start]
    while points[-1].offset + span_bytes < end.offset:
        point = align(stream.scan, points[-1].offset + span_bytes, end)
        if point.offset >= end.offset:
            break
        points.append(point)
    points.append(end)
    first, last = wanted.from_entry or 0, wanted.to_entry
    return [
        Span(options.path, options.archive, a, b, wanted, schema)
        for a, b in pairwise(points)
        if max(a.offset, wanted.from_offset or 0) < b.offset
        and (not b.entry or b.entry > first)
        and (last is None or a.entry < last)
    ]


def usual_span_bytes(range_bytes: int) -> int:
    """How much one task reads of a range of this size without the option `spanBytes`."""
    return min(max(range_bytes // _SPANS, _SPAN_BYTES_MIN), _SPAN_BYTES_MAX)


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
            raise InvalidField(f"option 'queue': {stream.path} has no queue {missing[0]!r}")
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
