"""Copies a journal into the lake's `events`, batch by batch, up to its durable end.

    readStream.format("penstock") ─▶ foreachBatch: Spark writes files, one Delta commit names the
                                     point that the journal is read up to

One Structured Streaming query reads a journal: for `ingest` all that is there now, for `follow`
what is appended, every so often, until it is stopped. It may repeat a batch after a kill; Delta's
log says up to which point the table has the journal, and what a batch has before that point is left
out. So no event is copied twice and none is left out, whatever became of the query's checkpoint.

    LAKE/journals/         the number of each journal, with which a message's key begins
    LAKE/streams/STORE/    the checkpoint of the query over a journal

The lake is registered as a reader of the journal, which keeps what is not committed yet.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import JournalError
from penstock.journal import reader_positions
from penstock.output import logger
from penstock.spark.lake import Lake, LakeBusy, LakeUnusable, Table, locked, our_errors
from penstock.spark.progress import step
from penstock.spark.queries import MESSAGE_BITS, query_session
from penstock.spark.schemas import local_frame
from penstock.spark.selection import SCHEMA, now_ms
from penstock.spark.session import OpenSpark, SparkMissing, is_remote
from penstock.spark.stream import Point, Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EVENTS: Final = "events"
BATCH_BYTES: Final = 256 << 20
# How long a batch of `follow` waits for another process, and its end for a batch.
_LOCK_WAIT_S: Final = 30.0
_STOP_WAIT_S: Final = 600.0
# Spark gives the Python of a stream ten seconds to start, which a busy machine may not keep: then
# the query is started again.
_NOT_STARTED: Final = "failed to connect back"
_STARTS: Final = 5
JOURNALS: Final = "store string, shard int, journal bigint"


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
    """The lake's table of events: the source's columns, and the key of each message."""
    return lake.table(EVENTS, f"{SCHEMA}, key bigint")


def journals_table(lake: Lake) -> Table:
    """The number of each journal in the lake."""
    return lake.table("journals", JOURNALS)


def remove_staged(lake: Lake) -> None:
    """Removes what a killed run had read and not committed. The caller holds the events' lock."""
    for left in events_table(lake).path.glob("_staging*"):
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

    A lake of an early release names the point in a checkpoint of Spark's.
    """
    delta = events_table(lake).delta()
    if delta is not None:
        offset = delta.transaction_version(f"read/{store}")
        entry = delta.transaction_version(f"entry/{store}")
        if offset is not None and entry is not None:
            return Point(offset, entry)
    checkpoint = lake.path / "checkpoints" / store
    try:
        done = _newest(checkpoint / "commits")
        return None if delta is None or done is None else _planned(checkpoint, done)
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise LakeUnusable(f"{checkpoint}: cannot be read as a checkpoint: {error!r}") from None


def _newest(batches: Path) -> int | None:
    """The number of the last batch of which a checkpoint has a file here."""
    return max((int(path.name) for path in batches.glob("[0-9]*")), default=None)


def _planned(checkpoint: Path, batch: int) -> Point:
    """The point at which a batch ends, as Spark notes it before it begins with the batch."""
    lines = (checkpoint / "offsets" / str(batch)).read_text().splitlines()
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
        floors = {
            each.name: each.floor_offset for each in reader_positions.registered(stream.store)
        }
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
    on_batch: Callable[[Lag], None] = lambda lag: None,
) -> Lag:
    """Copies all that is durable now into the lake; calls `on_batch` when a batch is committed.

    Raises StoreUnusable, JournalError, LakeUnusable or LakeBusy.
    """
    # Executors use these paths: they must be absolute.
    path = os.path.abspath(journal)
    archive = None if archive is None else os.path.abspath(archive)
    with our_errors(), locked(lake, EVENTS):
        stream = Stream(path, archive)
        try:
            store, start, end = stream.identity.hex(), _start(lake, stream), stream.end
        finally:
            stream.close()
        # What it has read already is noted too: a run may have been killed before it did that.
        _register(lake, path, start.offset)
        if start.offset < end.offset:
            batches = _Batches(lake, path, journal, archive, store)
            batches.run(query_session(open_spark()), start, batch_bytes, on_batch)
        return lag(lake, journal, archive)


@contextmanager
def follow(
    open_spark: OpenSpark,
    lake: Lake,
    journals: Sequence[str],
    archive: str | None = None,
    *,
    every_s: float,
    on_batch: Callable[[Lag], None] = lambda lag: None,
) -> Iterator[Callable[[], None]]:
    """Copies what is appended to these journals, every so often, until this ends.

    Gives a function that raises why a query has ended, if one has: StoreUnusable, JournalError,
    LakeUnusable or LakeBusy. A batch that is being added is committed before this ends. With Spark
    Connect `on_batch` is not called.
    """
    spark = query_session(open_spark())
    followed: list[_Batches] = []

    def check() -> None:
        with our_errors():
            for each in followed:
                each.check()

    try:
        with our_errors():
            for journal in journals:
                path = os.path.abspath(journal)
                stream = Stream(path, archive)
                try:
                    store, start = stream.identity.hex(), _start(lake, stream)
                finally:
                    stream.close()
                batches = _Batches(
                    lake, path, journal, archive and os.path.abspath(archive), store, follows=True
                )
                batches.start(spark, start, every_s, on_batch)
                followed.append(batches)
        yield check
    finally:
        try:
            # A batch that is being added has the lock. One that comes later finds that it is late;
            # it must be able to take the lock, since a query ends when its batch has returned.
            with suppress(LakeBusy, LakeUnusable), locked(lake, EVENTS, wait_s=_STOP_WAIT_S):
                for each in followed:
                    each.is_stopped = True
        finally:
            for each in followed:
                each.query.stop()


def _start(lake: Lake, stream: Stream) -> Point:
    first, end = stream.first, stream.end
    point = reached_point(lake, stream.identity.hex())
    if point is None:
        return first
    if not first.offset <= point.offset <= end.offset:
        raise JournalError(
            f"{stream.path}: holds offsets {first.offset} to {end.offset}, and the lake "
            f"has read up to {point.offset}: what it has not read was dropped"
        )
    return point


def _register(lake: Lake, path: str, offset: int) -> None:
    """Registers the lake as a reader: the journal keeps what is behind this offset."""
    stream = Stream(path, None)
    store = stream.store
    stream.close()
    if store is not None:
        reader_positions.register(store, reader_name(lake), offset, now_ms())


def add_events(
    spark: "SparkSession",
    lake: Lake,
    events: "DataFrame",
    store: str,
    transactions: Mapping[str, int],
) -> None:
    """Adds events of one journal to `events`, in one commit. The caller holds their lock."""
    journals = journals_table(lake)
    known = {row.store: row.journal for row in journals.frame(spark).collect()}
    number = known.get(store, 1 + max(known.values(), default=0))
    key = f"shiftleft(CAST({number} AS bigint), {MESSAGE_BITS}) | message"
    table = events_table(lake)
    added = [each for each in table.stage(events.selectExpr("*", f"{key} AS key")) if each.rows]
    reached = {}
    if added:
        reached[f"offset/{store}"] = 1 + max(int(each.largest["offset"]) for each in added)
        if store not in known:
            shard = max(int(each.largest["shard"]) for each in added)
            rows = local_frame(spark, [(store, shard, number)], JOURNALS)
            journals.add(journals.stage(rows.coalesce(1)), {})
    table.add(added, {**reached, **transactions})


@dataclass
class _Batches:
    """The query over one journal, and what it does with a batch.

    With Spark Connect the server does that, in another process: this object goes there as a copy.
    """

    lake: Lake
    path: str
    journal: str
    archive: str | None
    store: str
    # Whether each batch takes the lock of `events`, which else the caller has.
    follows: bool = False
    on_batch: Callable[[Lag], None] | None = None
    failure: BaseException | None = None
    writer: Any = None
    query: Any = None
    is_stopped: bool = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "writer": None, "query": None}

    @property
    def checkpoint(self) -> Path:
        return self.lake.path / "streams" / self.store

    def run(
        self, spark: Any, start: Point, batch_bytes: int, on_batch: Callable[[Lag], None]
    ) -> None:
        """Runs the query until the lake has all that was durable when it began."""
        writer = self._writer(spark, start, {"maxBytesPerTrigger": batch_bytes}, on_batch)
        writer = writer.trigger(availableNow=True)
        for left in range(_STARTS, 0, -1):
            query = writer.start()
            try:
                query.awaitTermination()
                break
            except Exception as error:
                # What was raised in a batch, and not what Spark made of it.
                if self.failure is not None:
                    raise self.failure from None
                if _NOT_STARTED not in str(error):
                    raise
                if left == 1:
                    raise SparkMissing(
                        "Spark's Python did not start within seconds: this machine is too busy"
                    ) from None
            finally:
                query.stop()
        if is_remote(spark):
            on_batch(lag(self.lake, self.journal, self.archive))

    def start(
        self, spark: Any, start: Point, every_s: float, on_batch: Callable[[Lag], None]
    ) -> None:
        """Starts the query, which goes on until it is stopped."""
        writer = self._writer(spark, start, {}, on_batch)
        self.writer = writer.trigger(processingTime=f"{round(1_000 * every_s)} milliseconds")
        self.query = self.writer.start()

    def check(self) -> None:
        """Raises why the query has ended, or starts it again if its Python did not start."""
        if self.failure is not None:
            raise self.failure
        if error := self.query.exception():
            if _NOT_STARTED not in str(error):
                raise error
            self.query = self.writer.start()

    def _writer(
        self,
        spark: Any,
        start: Point,
        options: Mapping[str, Any],
        on_batch: Callable[[Lag], None],
    ) -> Any:
        """The query without its trigger."""
        self._drop_old_checkpoint(start)
        # What a batch raises is raised again by its caller, and must not be printed before.
        logger("py4j").setLevel(logging.CRITICAL)
        reader = spark.readStream.format("penstock").option("path", self.path)
        reader = reader.option("startAt", f"{start.offset}:{start.entry}")
        reader = reader.option("reader", reader_name(self.lake))
        if self.archive is not None:
            reader = reader.option("archive", self.archive)
        events = reader.options(**options).load()
        if not is_remote(spark):
            self.on_batch = on_batch
        writer = events.writeStream.foreachBatch(self.add)
        return writer.option("checkpointLocation", str(self.checkpoint))

    def _drop_old_checkpoint(self, start: Point) -> None:
        """Removes a checkpoint that has other batches behind it than the lake."""
        planned = _newest(self.checkpoint / "offsets")
        done = _newest(self.checkpoint / "commits")
        if planned is None:
            return
        is_behind = _planned(self.checkpoint, planned).offset < start.offset
        if is_behind or (
            done is not None and _planned(self.checkpoint, done).offset > start.offset
        ):
            shutil.rmtree(self.checkpoint)

    def add(self, frame: "DataFrame", batch: int) -> None:
        """Adds a batch to `events`, unless they have it."""
        try:
            end = _planned(self.checkpoint, batch)
            if not self.follows:
                self._add(frame, end)
                return
            # Without this, a lake that was removed would be made again in part.
            self.lake.check_exists()
            with locked(self.lake, EVENTS, wait_s=_LOCK_WAIT_S):
                if self.is_stopped:
                    raise LakeBusy(f"{self.lake.path}: the run was stopped")
                self._add(frame, end)
        except BaseException as error:
            self.failure = error
            raise

    def _add(self, frame: "DataFrame", end: Point) -> None:
        table = events_table(self.lake)
        reached = table.committed(f"read/{self.store}") or 0
        known = max(reached, table.committed(f"offset/{self.store}") or 0)
        is_new = reached < end.offset
        if is_new:
            point = {f"read/{self.store}": end.offset, f"entry/{self.store}": end.entry}
            new = frame.where(f"offset >= {known}")
            add_events(frame.sparkSession, self.lake, new, self.store, point)
        _register(self.lake, self.path, end.offset)
        # A query begins with the batch that was not known to be done, which may be committed.
        if is_new and self.on_batch is not None:
            self.on_batch(lag(self.lake, self.journal, self.archive))


def copy_events(
    open_spark: OpenSpark,
    lake: Lake,
    journal: str,
    archive: str | None,
) -> None:
    """Copies all events that are durable now, without bodies, into a lake that has none yet.

    Unlike `ingest`, this registers no reader in the journal.
    """
    stream = Stream(journal, archive)
    store, is_empty = stream.identity.hex(), stream.first == stream.end
    stream.close()
    if is_empty:
        return
    spark = query_session(open_spark())
    columns = [each for each in SCHEMA.split(", ") if each != "body binary"]
    reader = spark.read.format("penstock").schema(", ".join(columns))
    if archive is not None:
        reader = reader.option("archive", os.path.abspath(archive))
    frame = reader.load(os.path.abspath(journal))
    frame = frame.selectExpr("*", "CAST(NULL AS binary) AS body")
    with step(spark, f"reading {journal}"):
        add_events(spark, lake, frame, store, {})
