"""Copies a journal into the lake's `events`, batch by batch, up to its durable end.

A batch is a range of the journal, cut into spans that tasks write as Parquet files (`spans`), and
one Delta commit, which names the point it reaches. So a batch that is repeated after a kill begins
where the last commit ended: no event is copied twice and none is left out. Small batches are read
in this process, without Spark.

The lake is registered as a reader of the journal, which keeps what is not committed yet.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.errors import JournalError
from penstock.journal import readers
from penstock.spark.distribute import OpenSpark, Progress, distribute, no_progress
from penstock.spark.lake import AddedFile, Lake, Table, locked, our_errors
from penstock.spark.selection import SCHEMA, SourceOptions, now_ms, spans
from penstock.spark.spans import Span, write_span
from penstock.spark.stream import Point, Stream, align

EVENTS: Final = "events"
BATCH_BYTES: Final = 256 << 20
SPAN_BYTES: Final = 32 << 20
# Up to so many spans are read in this process: starting Spark takes longer. There, each core gets a
# smaller one, but not smaller than this: each is a file.
_FEW_SPANS: Final = 2
_SMALL_SPAN_BYTES: Final = 2 << 20
# Files of a batch until they are committed; Delta ignores names that begin with an underscore.
_STAGING: Final = "_staging"


@dataclass(frozen=True)
class Lag:
    """How far a journal is durable, and how far the lake has read it."""

    path: str
    store: str
    first_offset: int
    durable_offset: int
    read_offset: int

    @property
    def behind_bytes(self) -> int:
        """How much of the journal the lake has not read."""
        return max(0, self.durable_offset - max(self.read_offset, self.first_offset))


def events_table(lake: Lake) -> Table:
    """The lake's table of events."""
    return lake.table(EVENTS, SCHEMA)


def remove_staged(lake: Lake) -> None:
    """Removes what a killed run had read and not committed. The caller holds the events' lock."""
    for left in events_table(lake).path.glob(f"{_STAGING}*"):
        shutil.rmtree(left, ignore_errors=True)


def reader_name(lake: Lake) -> str:
    """The name under which a journal keeps what this lake has not read."""
    return f"lake-{lake.id}"


def lag(lake: Lake, journal: str, archive: str | None = None) -> Lag:
    """How far the lake has read a journal. Raises StoreUnusable."""
    stream = Stream(journal, archive)
    try:
        return _lag(lake, stream, journal)
    finally:
        stream.close()


def _lag(lake: Lake, stream: Stream, journal: str) -> Lag:
    store = stream.identity.hex()
    reached = reached_point(lake, store)
    read_offset = stream.first.offset if reached is None else reached.offset
    return Lag(journal, store, stream.first.offset, stream.end.offset, read_offset)


def reached_point(lake: Lake, store: str) -> Point | None:
    """Up to where `events` has this journal; None if it has nothing of it, or if that is not known.

    A lake of an earlier release names the point in a checkpoint of Spark's.
    """
    delta = events_table(lake).delta()
    if delta is not None:
        offset = delta.transaction_version(f"read/{store}")
        entry = delta.transaction_version(f"entry/{store}")
        if offset is not None and entry is not None:
            return Point(offset, entry)
    checkpoint = lake.path / "checkpoints" / store
    batches = [int(path.name) for path in (checkpoint / "commits").glob("[0-9]*")]
    if delta is None or not batches:
        return None
    lines = (checkpoint / "offsets" / str(max(batches))).read_text().splitlines()
    found = json.loads(lines[-1])
    return Point(int(found["offset"]), int(found["entry"]))


def is_ingested(lake: Lake, journal: str, archive: str | None = None) -> bool:
    """Whether the lake has all that is durable of this journal. Raises StoreUnusable.

    The lake's floor in the journal must be there too: a run may be killed before it moves it.
    """
    stream = Stream(journal, archive)
    try:
        found = _lag(lake, stream, journal)
        if found.behind_bytes or events_table(lake).committed(f"read/{found.store}") is None:
            return False
        if stream.store is None:
            return True
        floors = {each.name: each.floor_offset for each in readers.registered(stream.store)}
    finally:
        stream.close()
    return floors.get(reader_name(lake)) == found.read_offset


def ingest(
    open_spark: OpenSpark,
    lake: Lake,
    journal: str,
    archive: str | None = None,
    *,
    batch_bytes: int = BATCH_BYTES,
    span_bytes: int = SPAN_BYTES,
    progress: Callable[[Lag], None] = lambda lag: None,
) -> Lag:
    """Copies all that is durable now into the lake.

    Raises StoreUnusable, JournalError, LakeUnusable or LakeBusy.
    """
    # Executors use these paths: they must be absolute.
    path = os.path.abspath(journal)
    archive = None if archive is None else os.path.abspath(archive)
    with our_errors(), locked(lake, EVENTS):
        stream = Stream(path, archive)
        try:
            _Ingest(open_spark, lake, stream, archive, span_bytes).run(
                batch_bytes, lambda: progress(_lag(lake, stream, journal))
            )
            return _lag(lake, stream, journal)
        finally:
            stream.close()


class _Ingest:
    """One run over one journal, up to where it was durable when the run began."""

    def __init__(
        self,
        open_spark: OpenSpark,
        lake: Lake,
        stream: Stream,
        archive: str | None,
        span_bytes: int,
    ) -> None:
        self._open_spark = open_spark
        self._lake = lake
        self._stream = stream
        self._store = stream.identity.hex()
        self._table = events_table(lake)
        self._staging = self._table.path / f"{_STAGING}-{self._store}"
        given = {"path": stream.path, "mode": "files", "into": str(self._staging)}
        if archive is not None:
            given["archive"] = archive
        given["spanBytes"] = str(span_bytes)
        self._span_bytes = span_bytes
        # Events that a run committed whose point is not known are left out.
        given["fromOffset"] = str(self._table.committed(f"offset/{self._store}") or 0)
        self._options = SourceOptions.of(given)
        self._is_local = False

    def run(self, batch_bytes: int, progress: Callable[[], None]) -> None:
        """Copies one batch after another."""
        at = self._start()
        self._register(at.offset)
        end = self._stream.end
        self._is_local = end.offset - at.offset <= _FEW_SPANS * self._span_bytes
        shutil.rmtree(self._staging, ignore_errors=True)
        try:
            while at.offset < end.offset:
                until = end
                if end.offset - at.offset > batch_bytes:
                    # At least one entry, even if it is larger than the batch.
                    until = align(self._stream.scan, at.offset + max(1, batch_bytes), end)
                self._ingest_batch(at, until)
                self._register(until.offset)
                progress()
                at = until
        finally:
            shutil.rmtree(self._staging, ignore_errors=True)

    def _start(self) -> Point:
        first, end = self._stream.first, self._stream.end
        point = reached_point(self._lake, self._store)
        if point is None:
            return first
        if not first.offset <= point.offset <= end.offset:
            raise JournalError(
                f"{self._stream.path}: holds offsets {first.offset} to {end.offset}, and the lake "
                f"has read up to {point.offset}: what it has not read was dropped"
            )
        return point

    def _ingest_batch(self, at: Point, until: Point) -> None:
        options = self._options
        if self._is_local:
            share = -(-(until.offset - at.offset) // len(os.sched_getaffinity(0)))
            options = dataclasses.replace(
                options, span_bytes=min(self._span_bytes, max(share, _SMALL_SPAN_BYTES))
            )
        found = spans(self._stream, options, at, until, "")
        local_max = len(found) if self._is_local else 0
        added = self._table.move_in(
            _write_spans(self._open_spark, found, self._staging, local_max),
            f"data/{self._store[:8]}-{until.offset:020d}",
        )
        transactions = {f"read/{self._store}": until.offset, f"entry/{self._store}": until.entry}
        if added:
            transactions[f"offset/{self._store}"] = last_offset(added) + 1
        self._table.add(added, transactions)

    def _register(self, offset: int) -> None:
        """Registers the lake as a reader: the journal keeps what is behind this offset."""
        if self._stream.store is not None:
            readers.register(self._stream.store, reader_name(self._lake), offset, now_ms())


def _write_spans(
    open_spark: OpenSpark,
    work: Sequence[Span],
    scratch: Path,
    local_max: int,
    progress: Progress = no_progress,
) -> list[str]:
    files = distribute(
        open_spark, write_span, work, list[str], scratch, progress, local_max=local_max
    )
    return [file for each in files for file in each]


def last_offset(added: Sequence[AddedFile]) -> int:
    """Where the last entry in these files of `events` begins."""
    return max(int(each.largest["offset"]) for each in added)


def copy_events(
    open_spark: OpenSpark,
    lake: Lake,
    journal: str,
    archive: str | None,
    progress: Progress = no_progress,
    *,
    bodies: bool = False,
) -> None:
    """Copies all events that are durable now into a lake that has none yet.

    Unlike `ingest`, this registers no reader in the journal.
    """
    table = events_table(lake)
    staging = table.path / _STAGING
    given = {
        "path": os.path.abspath(journal),
        "mode": "files",
        "into": str(staging),
        "spanBytes": str(SPAN_BYTES),
    }
    if archive is not None:
        given["archive"] = os.path.abspath(archive)
    stream = Stream(journal, archive)
    try:
        found = spans(stream, SourceOptions.of(given), stream.first, stream.end, "")
        store = stream.identity.hex()
    finally:
        stream.close()
    work = [dataclasses.replace(span, bodies=bodies) for span in found]
    added = table.move_in(_write_spans(open_spark, work, staging, _FEW_SPANS, progress), "data/all")
    if added:
        table.add(added, {f"offset/{store}": last_offset(added) + 1})
