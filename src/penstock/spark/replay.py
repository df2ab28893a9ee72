"""Sends messages of the lake to a queue, each once, also if a replay is killed or repeated.

A replay works in slices. The messages of a slice are pushed into a staging queue without
consumers; then the slice is committed to the lake's table `replays`; only then are they moved from
the staging queue into the target. A move is one event, so a message is in one of the two queues and
never in both. After a kill the next run finds the staging queue and the slice it names: a slice
that was committed is moved on, one that was not is removed and sent again. Nothing here depends on
how long a queue remembers its dedup ids.

    LAKE/replays/   one row for each message sent: name of the replay, target queue, slice
    LAKE/outbox/    the messages to send, while a replay runs
"""

import base64
import json
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from deltalake import CommitProperties, Transaction, write_deltalake
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from penstock.client import Queues
from penstock.errors import InvalidField, QueueNotFound, RequestError, UnavailableError
from penstock.public import QueueDescription
from penstock.service import TTL_MS_MAX, Batch, Push, check_name, check_number
from penstock.spark.bronze import events_table
from penstock.spark.lake import OUTBOX, Lake, LakeUnusable, Table, first_line, locked, our_errors
from penstock.spark.progress import WaitStep, step
from penstock.spark.tables import MESSAGES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

REPLAYS: Final = "replays"
SCHEMA: Final = (
    "name string, to_queue string, slice string, store string, shard int, message bigint, "
    "message_id string, sent_at_ms bigint"
)
SLICE_MESSAGES: Final = 10_000
SLICE_BYTES: Final = 64 << 20
RATE_MAX: Final = 1_000_000
WHERE_MAX: Final = 10_000
SHOWN_MAX: Final = 5
_BATCH_MESSAGES: Final = 1_000
_BATCH_BYTES: Final = 4 << 20
_MOVES: Final = 1_000
_NAME_CHARS: Final = 80
_STAGING_SUFFIX: Final = "-replay"
_MARK: Final = "penstock-replay"
_KEY: Final = ("store", "shard", "message")


@dataclass
class Outcome:
    """How many messages a replay matched, and what it did with them.

    Of those without a body, `dropped` have had their events dropped by a retention.
    """

    matched: int = 0
    bytes: int = 0
    sent_before: int = 0
    bodiless: int = 0
    dropped: int = 0
    bodiless_ids: list[str] = field(default_factory=list)
    sent: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)

    @property
    def to_send(self) -> int:
        """How many messages remain to be sent."""
        return self.matched - self.sent_before - self.bodiless


def replay(
    spark: "SparkSession",
    lake: Lake,
    queues: Queues,
    where: str,
    to: str,
    *,
    name: str | None = None,
    rate: int | None = None,
    dry_run: bool = False,
) -> Outcome:
    """Sends every message of the lake that meets the condition and was not sent before.

    `name` identifies the replay: under another name the same messages are sent again. It defaults
    to the target's name. Raises InvalidField for a condition that cannot be used, LakeUnusable, and
    LakeBusy if another replay is running; then nothing has been sent. After an error of the queue
    the next run continues the replay.
    """
    if rate is not None:
        check_number("rate", rate, 1, RATE_MAX)
    name = check_name(name or to, "name")
    queues.describe(to)
    chosen = _chosen(spark, lake, where)
    outbox = lake.path / OUTBOX
    # Counting changes nothing, and needs no right to.
    with nullcontext() if dry_run else locked(lake, OUTBOX):
        target = _Target(lake, queues, to, name, rate)
        if not dry_run:
            target.settle()
        with our_errors():
            with step(spark, "choosing messages"):
                outcome, ready = _ready(spark, lake, chosen, name)
            if dry_run or not outcome.to_send:
                return outcome
            try:
                with step(spark, "reading bodies"):
                    _write(ready, outbox)
                with step(spark, f"sending to {to}", 0, outcome.to_send) as sending:
                    for rows in _slices(outbox):
                        target.send(rows, outcome, sending)
            finally:
                shutil.rmtree(outbox, ignore_errors=True)
    return outcome


def backfill(
    frame: "DataFrame", url: str, queue: str, *, key: str, body: str = "body", **roles: str
) -> None:
    """Pushes a frame's rows through the sink with a key: repeated within the dedup window, it adds
    nothing.

    `roles` names the columns of other roles, such as `group="customer"`. Raises InvalidField.
    """
    columns = {"body": body, "key": key, **roles}
    named = [part.strip() for column in columns.values() for part in column.split(",")]
    missing = sorted(set(named) - set(frame.columns))
    if missing:
        raise InvalidField(f"column {missing[0]!r}: not in the frame, which has {frame.columns}")
    writer = frame.select(*dict.fromkeys(named)).write.format("penstock")
    with our_errors():
        writer.options(url=url, queue=queue, **columns).mode("append").save()


def replays_table(lake: Lake) -> Table:
    """The table of messages that were sent from this lake."""
    return lake.table(REPLAYS, SCHEMA)


def _chosen(spark: "SparkSession", lake: Lake, where: str) -> "DataFrame":
    """The messages that meet the condition. Raises InvalidField."""
    messages = lake.table(MESSAGES.name, MESSAGES.schema)
    if messages.delta() is None:
        raise LakeUnusable(f"{lake.path}: has no table messages yet; `pipeline run` makes it")
    check_where(where)
    with _bad_condition():
        # As an expression: Spark's parser refuses a statement here, and what follows a condition.
        chosen = messages.frame(spark).where(where)
        assert chosen.schema.names, "a remote Spark checks types only when asked for the schema"
        return chosen


def check_where(where: str) -> None:
    """Raises InvalidField for a condition that is empty, or longer than Spark's parser can take."""
    if not where.strip():
        raise InvalidField("where: is empty; `true` chooses every message")
    if len(where) > WHERE_MAX:
        raise InvalidField(f"where: has {len(where):,} characters; at most {WHERE_MAX:,}")


@contextmanager
def _bad_condition() -> Iterator[None]:
    try:
        yield
    except PySparkException as error:
        reason = first_line(error)
        if (error.getCondition() or "").startswith("FAILED_READ_FILE"):
            raise LakeUnusable(f"a table of the lake cannot be read: {reason}") from error
        raise InvalidField(f"where: is not a condition on messages: {reason}") from None
    except Py4JJavaError as error:
        # Of Java's parser: one that nests thousands of parentheses needs more stack than there is.
        reason = str(error.java_exception).partition("\n")[0]
        raise InvalidField(f"where: cannot be used: {reason}") from None


def _ready(
    spark: "SparkSession", lake: Lake, chosen: "DataFrame", name: str
) -> tuple[Outcome, "DataFrame"]:
    """Counts, and the messages to send with everything that a push needs."""
    sent = replays_table(lake).frame(spark).where(f"name = '{name}'").select(*_KEY)
    bodies = spark.sql(
        """
        SELECT store, shard, message, any_value(body) AS body, any_value(extra) AS extra
        FROM {events} LEFT SEMI JOIN {chosen} USING (store, shard, message)
        WHERE kind IN ('Pushed', 'Carried') AND body IS NOT NULL
        GROUP BY message, shard, store
        """,
        events=events_table(lake).frame(spark),
        chosen=chosen,
    )
    tables: Any = {"chosen": chosen, "sent": sent, "bodies": bodies.drop("extra")}
    with _bad_condition():
        counts = spark.sql(
            """
            SELECT count(*) AS matched, count(sent.message) AS sent_before,
              count_if(sent.message IS NULL AND body IS NULL) AS bodiless,
              count_if(sent.message IS NULL AND body IS NULL AND dropped) AS dropped,
              coalesce(sum(octet_length(body)) FILTER (WHERE sent.message IS NULL), 0) AS bytes
            FROM {chosen} AS chosen
            LEFT JOIN {sent} AS sent USING (store, shard, message)
            LEFT JOIN {bodies} AS bodies USING (store, shard, message)
            """,
            **tables,
        ).collect()[0]
    outcome = Outcome(**counts.asDict())
    if outcome.bodiless:
        rest = chosen.join(sent, list(_KEY), "left_anti").join(bodies, list(_KEY), "left_anti")
        first = rest.select("message_id").orderBy("message_id").limit(SHOWN_MAX)
        outcome.bodiless_ids = [row["message_id"] for row in first.collect()]
    ready = (
        chosen.select(*_KEY, "message_id", "group", "priority", "pushed_at_ms")
        .join(sent, list(_KEY), "left_anti")
        .join(bodies, list(_KEY))
        # In the order of their pushes, so that the messages of a group keep their order.
        .orderBy("pushed_at_ms", *_KEY)
    )
    return outcome, ready


def _write(ready: "DataFrame", outbox: Path) -> None:
    """Writes the messages to send as files, before the first push."""
    shutil.rmtree(outbox, ignore_errors=True)
    ready.write.mode("overwrite").parquet(str(outbox))


def _slices(outbox: Path) -> Iterator[list[dict[str, Any]]]:
    """The rows of an outbox in their order, some thousands at a time."""
    rows: list[dict[str, Any]] = []
    held_bytes = 0
    for path in sorted(outbox.glob("*.parquet")):
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(1_000):
                for row in batch.to_pylist():
                    full = (
                        len(rows) == SLICE_MESSAGES or held_bytes + len(row["body"]) > SLICE_BYTES
                    )
                    if rows and full:
                        yield rows
                        rows, held_bytes = [], 0
                    rows.append(row)
                    held_bytes += len(row["body"])
    if rows:
        yield rows


def beside(queue: str) -> str:
    """The name of the staging queue, in which a slice waits until it is committed."""
    name, at, scope = queue.partition("@")
    return name[: _NAME_CHARS - len(_STAGING_SUFFIX)] + _STAGING_SUFFIX + at + scope


class _Target:
    """The queue that messages go to, and the staging queue beside it."""

    def __init__(
        self,
        lake: Lake,
        queues: Queues,
        to: str,
        name: str,
        rate: int | None,
    ) -> None:
        self._table = replays_table(lake)
        self._lake_id = lake.id
        self._queues = queues
        self._to = to
        self._name = name
        self._beside = beside(to)
        self._rate = rate
        self._next_s = time.monotonic()

    def settle(self) -> None:
        """Completes or removes the slice of an earlier run.

        Raises InvalidField if the staging queue was not made by a replay from this lake.
        """
        try:
            found = self._queues.describe(self._beside)
        except QueueNotFound:
            return
        token = self._token(found)
        if self._is_noted(token):
            self._move(lambda moved: None)
        # A slice that was not committed never left the staging queue: no consumer has seen it.
        self._queues.remove(self._beside)

    def _token(self, found: QueueDescription) -> str:
        owner, _, token = found.settings.annotations.get(_MARK, "").partition("/")
        if owner != self._lake_id:
            raise InvalidField(
                f"to: the queue {self._beside!r} is needed for a replay to {self._to!r}, and is "
                + ("used by a replay from another lake" if owner else "not made by a replay")
            )
        return token

    def _is_noted(self, token: str) -> bool:
        delta = self._table.delta()
        if delta is None:
            return False
        noted = delta.to_pyarrow_dataset().filter(ds.field("slice") == token)
        return bool(noted.head(1).num_rows)

    def send(self, rows: Sequence[dict[str, Any]], outcome: Outcome, sending: WaitStep) -> None:
        """Sends one slice."""
        token = secrets.token_hex(8)
        accepted, refused = self._push(rows, token)
        outcome.refused += refused
        if accepted:
            self._note(accepted, token)
            done = outcome.sent
            self._move(lambda moved: sending.reached(done + moved))
        self._queues.remove(self._beside)
        outcome.sent += len(accepted)

    def _push(
        self, rows: Sequence[dict[str, Any]], token: str
    ) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
        """Pushes a slice into the staging queue: the accepted rows, and the refused ids."""
        settings = self._queues.describe(self._to).settings
        self._queues.create(
            self._beside,
            fifo=settings.fifo,
            max_body_bytes=settings.max_body_bytes,
            retention=TTL_MS_MAX / 1_000,
            annotations={_MARK: f"{self._lake_id}/{token}"},
        )
        # A backend that cannot move messages raises here, before anything is committed.
        self._queues.redrive(self._beside, to=self._to, limit=1)
        accepted, refused = [], []
        for batch in _batches(rows):
            replies = self._queues.service.execute(
                Batch([_push(self._beside, row) for row in batch])
            )
            for row, reply in zip(batch, replies, strict=True):
                if isinstance(reply, RequestError):
                    refused.append((row["message_id"], str(reply)))
                else:
                    accepted.append(row)
        held = self._queues.stats(self._beside).messages
        if held != len(accepted):
            raise UnavailableError(
                f"the queue {self._beside!r} holds {held} messages where {len(accepted)} were "
                "pushed: another process uses it; nothing of this slice was sent"
            )
        return accepted, refused

    def _note(self, rows: Sequence[dict[str, Any]], token: str) -> None:
        """Commits these as sent: from here on this run or the next moves them to the target."""
        now_ms = time.time_ns() // 1_000_000
        columns = {
            "name": pa.array([self._name] * len(rows)),
            "to_queue": pa.array([self._to] * len(rows)),
            "slice": pa.array([token] * len(rows)),
            "store": pa.array([row["store"] for row in rows]),
            "shard": pa.array([row["shard"] for row in rows], pa.int32()),
            "message": pa.array([row["message"] for row in rows], pa.int64()),
            "message_id": pa.array([row["message_id"] for row in rows]),
            "sent_at_ms": pa.array([now_ms] * len(rows), pa.int64()),
        }
        write_deltalake(
            str(self._table.path),
            pa.table(columns),
            mode="append",
            commit_properties=CommitProperties(app_transactions=[Transaction(f"slice/{token}", 1)]),
        )

    def _move(self, moved: Callable[[int], None]) -> None:
        """Moves everything from the staging queue to the target, at most at the given rate."""
        done = 0
        step = _MOVES if self._rate is None else max(1, min(_MOVES, self._rate // 10))
        while True:
            self._pace(step)
            count = self._queues.redrive(self._beside, to=self._to, limit=step)
            done += count
            moved(done)
            if not count:
                break
        held = self._queues.stats(self._beside).messages
        if held:
            raise UnavailableError(
                f"{held} messages in {self._beside!r} are claimed by a consumer that must not "
                "pull from it; run the replay again when they have come back"
            )

    def _pace(self, step: int) -> None:
        if self._rate is None:
            return
        now_s = time.monotonic()
        time.sleep(max(0, self._next_s - now_s))
        self._next_s = max(self._next_s, now_s) + step / self._rate


def _batches(rows: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    held_bytes = 0
    for row in rows:
        if batch and (len(batch) == _BATCH_MESSAGES or held_bytes > _BATCH_BYTES):
            yield batch
            batch, held_bytes = [], 0
        batch.append(row)
        held_bytes += len(row["body"])
    if batch:
        yield batch


def _push(queue: str, row: dict[str, Any]) -> Push:
    """The message's original push, with its old id as dedup id, by which it can be traced."""
    extra = json.loads(row["extra"]) if row["extra"] else {}
    attributes: dict[str, str | bytes] = {**(extra.get("attributes") or {})}
    for name, value in (extra.get("attributes_base64") or {}).items():
        attributes[name] = base64.b64decode(value)
    return Push(
        queue,
        row["body"],
        priority=row["priority"] or 0,
        dedup_id=row["message_id"],
        group=row["group"],
        attributes=attributes or None,
        context=extra.get("context") or None,
    )
