"""From a journal into the lake's `events`: one Structured Streaming query, run until it is level.

Tasks write what they read as Parquet files and return the files' names: see `spans`. Each
micro-batch is one Delta commit with two application transactions. (query, batch id): a batch that
Spark repeats after a kill is committed once. (journal, offset): how far the table has come in this
journal, so that nothing is brought in twice even if the checkpoint is lost.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.journal import readers
from penstock.spark.distribute import OpenSpark, Progress, distribute, no_progress
from penstock.spark.lake import Lake, Table, locked, our_errors
from penstock.spark.source import SCHEMA, SourceOptions, now_ms, spans
from penstock.spark.spans import write_span
from penstock.spark.stream import Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EVENTS: Final = "events"
BATCH_BYTES: Final = 256 << 20


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


def reader_name(lake: Lake) -> str:
    """The name under which a journal keeps what this lake has not read."""
    return f"lake-{lake.id}"


def lag(lake: Lake, journal: str, archive: str | None = None, *, batch: int | None = None) -> Lag:
    """How far the lake has read a journal, or will have once Spark has committed `batch`.

    Raises StoreUnusable.
    """
    stream = Stream(journal, archive)
    try:
        store = stream.identity.hex()
        checkpoint = lake.checkpoint(store)
        read = committed_offset(checkpoint) if batch is None else _end_of(checkpoint, batch)
        return Lag(
            journal, store, stream.first.offset, stream.end.offset, read or stream.first.offset
        )
    finally:
        stream.close()


def is_brought_in(lake: Lake, journal: str, archive: str | None = None) -> bool:
    """Whether the lake has all that is durable of this journal. Raises StoreUnusable.

    The checkpoint must have reached the end, `events` must have a commit of this journal, and the
    lake's floor in the journal must be there too: a run may be killed before it moves the floor.
    """
    found = lag(lake, journal, archive)
    if found.behind_bytes or not events_table(lake).committed(f"offset/{found.store}"):
        return False
    stream = Stream(journal, archive)
    try:
        if stream.store is None:
            return True
        floors = {each.name: each.floor_offset for each in readers.registered(stream.store)}
    finally:
        stream.close()
    return floors.get(reader_name(lake)) == found.read_offset


def ingest(
    spark: "SparkSession",
    lake: Lake,
    journal: str,
    archive: str | None = None,
    *,
    batch_bytes: int = BATCH_BYTES,
    span_bytes: int | None = None,
    progress: Callable[[Lag], None] = lambda lag: None,
) -> Lag:
    """Brings in all that is durable now.

    Raises StoreUnusable, JournalError, LakeUnusable or LakeBusy.
    """
    before = lag(lake, journal, archive)
    # Executors use these paths, and with Spark Connect the server does: they must be absolute.
    journal = os.path.abspath(journal)
    archive = None if archive is None else os.path.abspath(archive)
    table = events_table(lake)
    checkpoint = lake.checkpoint(before.store)
    # Delta ignores files and directories that begin with an underscore.
    staging = table.path / f"_staging-{before.store}"
    shutil.rmtree(staging, ignore_errors=True)

    def bring_in(frame: "DataFrame", batch: int) -> None:
        _bring_in(table, before.store, checkpoint, frame, batch)
        progress(lag(lake, journal, archive, batch=batch))

    source = (
        spark.readStream.format("penstock")
        .option("mode", "files")
        .option("into", str(staging))
        .option("fromOffset", table.committed(f"offset/{before.store}") or 0)
        .option("reader", reader_name(lake))
        .option("maxBytesPerTrigger", batch_bytes)
    )
    if archive is not None:
        source = source.option("archive", archive)
    if span_bytes is not None:
        source = source.option("spanBytes", span_bytes)
    try:
        with our_errors(), locked(lake, EVENTS):
            query = (
                source.load(journal)
                .writeStream.foreachBatch(bring_in)
                .option("checkpointLocation", str(checkpoint))
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    settle(lake, journal, checkpoint)
    return lag(lake, journal, archive)


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

    The journal does not learn of it: unlike `ingest`, it registers no reader.
    """
    table = events_table(lake)
    staging = table.path / "_staging"
    given = {"path": os.path.abspath(journal), "mode": "files", "into": str(staging)}
    if archive is not None:
        given["archive"] = os.path.abspath(archive)
    stream = Stream(journal, archive)
    try:
        found = spans(stream, SourceOptions.of(given), stream.first, stream.end, "")
        store = stream.identity.hex()
    finally:
        stream.close()
    work = [dataclasses.replace(span, bodies=bodies) for span in found]
    files = distribute(open_spark, write_span, work, list[str], lake.path, progress)
    table.append(
        [file for each in files for file in each], "data/0", {f"offset/{store}": -1}, "offset"
    )


def _bring_in(table: Table, store: str, checkpoint: Path, frame: "DataFrame", batch: int) -> None:
    """Commits one micro-batch, unless it was committed before."""
    query = f"query/{_query_id(checkpoint)}"
    delta = table.delta()
    done = None if delta is None else delta.transaction_version(query)
    if done is not None and done >= batch:
        return
    directory = f"data/{store[:8]}-{_query_id(checkpoint)[:8]}-{batch:08d}"
    files = [row["file"] for row in frame.collect()]
    table.append(files, directory, {query: batch, f"offset/{store}": -1}, "offset")


def _query_id(checkpoint: Path) -> str:
    return str(json.loads((checkpoint / "metadata").read_text())["id"])


def committed_offset(checkpoint: Path) -> int | None:
    """The offset up to which a stream's batches are committed, by its checkpoint."""
    batches = [int(path.name) for path in (checkpoint / "commits").glob("[0-9]*")]
    if not batches:
        return None
    return _end_of(checkpoint, max(batches))


def _end_of(checkpoint: Path, batch: int) -> int:
    lines = (checkpoint / "offsets" / str(batch)).read_text().splitlines()
    return int(json.loads(lines[-1])["offset"])


def settle(lake: Lake, journal: str, checkpoint: Path) -> None:
    """Moves this lake's floor in the journal up to the newest batch.

    Spark tells a source that a batch is committed only when it plans the next one: for a run's last
    batch that is never, so this reads the checkpoint.
    """
    stream = Stream(journal)
    offset = committed_offset(checkpoint)
    if stream.store is not None and offset is not None:
        readers.register(stream.store, reader_name(lake), offset, now_ms())
    stream.close()
