"""Silver and gold: what the events mean, as batch SQL over bronze.

A table is a name, a schema and a query over tables made before it. Each is brought level in one
commit that carries the version of `events` it was made from: a run that finds that version there
already has nothing to do, and one that was killed leaves tables that are whole but older.

Those with a row a message or a claim are kept in parts, each a stretch of a shard's messages. Only
parts that new events touch are made anew, by the same query over the events of just these messages,
so the work follows what is new. The others are small and made anew whole.

A purge or a removal ends messages without naming them. Each queue's such ends are few, so they ride
along as one array a queue, and a message's own end is the first of them behind its last event.

Large groupings name the column first that tells most rows apart: Spark sorts by them in that order,
and the text of a store's identity, the same in every row, is the dearest of all to compare.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from deltalake import DeltaTable

from penstock.spark.ingest import events_table
from penstock.spark.lake import PART, Lake, Table, our_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BUCKET_MS: Final = 60_000
_SOURCE: Final = "events"
# `core.receipts` gives a message's id this form; here it is spelt from numbers, in one place.
MESSAGE_ID: Final = (
    "concat(substr(store, 1, 8), '-', substr(store, 9, 4), '-8', substr(store, 13, 2), '0-9000-', "
    "lpad(lower(hex(message)), 12, '0'))"
)


@dataclass(frozen=True)
class Derived:
    """A table that follows from others: `query` names them in braces."""

    name: str
    schema: str
    query: str
    inputs: tuple[str, ...]
    # Of a table in parts: which of its rows a purge or removal changes, `gone` being the queue's.
    swept: str | None = None


QUEUES: Final = Derived(
    "queues",
    "store string, shard int, queue_number bigint, queue string, created_at_ms bigint, "
    "removed_at_ms bigint, fifo boolean, dedup_per_group boolean, visibility_ms bigint, "
    "retention_ms bigint, dead_letter string, max_receives bigint, configured bigint, "
    "ends array<struct<sequence: bigint, at_ms: bigint, kind: string, before: bigint>>",
    """
    WITH told AS (
      SELECT store, shard, queue AS queue_number,
        max(name) AS queue,
        min(at_ms) FILTER (WHERE kind = 'QueueCreated') AS created_at_ms,
        max(at_ms) FILTER (WHERE kind = 'QueueRemoved') AS removed_at_ms,
        max_by(extra, sequence) FILTER (WHERE extra IS NOT NULL) AS extra,
        max(get_json_object(extra, '$.settings.dedup_per_group')) AS dedup_per_group,
        count_if(kind = 'QueueConfigured') AS configured,
        array_sort(collect_list(struct(sequence, at_ms, kind, before))
          FILTER (WHERE kind IN ('QueuePurged', 'QueueRemoved'))) AS ends
      FROM {events}
      WHERE kind IN ('QueueCreated', 'QueueConfigured', 'QueuePurged', 'QueueRemoved')
      GROUP BY store, shard, queue
    ), known AS (
      SELECT DISTINCT store, shard, queue AS queue_number FROM {events} WHERE kind <> 'Damaged'
      UNION
      SELECT DISTINCT store, shard, to_queue FROM {events} WHERE to_queue IS NOT NULL
    )
    SELECT store, shard, queue_number,
      coalesce(queue, concat('#', queue_number)) AS queue, created_at_ms, removed_at_ms,
      boolean(get_json_object(extra, '$.settings.fifo')) AS fifo,
      boolean(dedup_per_group) AS dedup_per_group,
      bigint(get_json_object(extra, '$.settings.visibility_ms')) AS visibility_ms,
      bigint(get_json_object(extra, '$.settings.retention_ms')) AS retention_ms,
      get_json_object(extra, '$.settings.dead_letter') AS dead_letter,
      bigint(get_json_object(extra, '$.settings.max_receives')) AS max_receives,
      coalesce(configured, 0) AS configured,
      coalesce(ends, array()) AS ends
    FROM known LEFT JOIN told USING (store, shard, queue_number)
    """,
    ("events",),
)

_ENDED: Final = "kind IN ('Deleted', 'Expired', 'Lost')"

MESSAGES: Final = Derived(
    "messages",
    "store string, shard int, message bigint, message_id string, queue string, "
    "queue_number bigint, held_in string, held_in_number bigint, `group` string, "
    "dedup_id string, priority int, body_bytes bigint, pushed_at_ms bigint, pushed_at timestamp, "
    "visible_at_ms bigint, first_pulled_at_ms bigint, last_pulled_at_ms bigint, claims bigint, "
    "extends bigint, releases bigint, timeouts bigint, moves bigint, dead_letters bigint, "
    "state string, standing string, ended_at_ms bigint, wait_ms bigint, age_ms bigint, "
    "events bigint, last_sequence bigint",
    f"""
    WITH folded AS (
      SELECT store, shard, message,
        min_by(queue, sequence) AS queue_number,
        max_by(coalesce(to_queue, queue), sequence) AS held_in_number,
        max_by(coalesce(rank, message), sequence)
          FILTER (WHERE kind IN ('Pushed', 'Moved')) AS rank,
        max(`group`) AS `group`, max(dedup_id) AS dedup_id, max(priority) AS priority,
        max(body_bytes) AS body_bytes,
        min(at_ms) FILTER (WHERE kind = 'Pushed') AS pushed_at_ms,
        min_by(visible_at_ms, sequence) FILTER (WHERE kind = 'Pushed') AS visible_at_ms,
        min(at_ms) FILTER (WHERE kind = 'Claimed') AS first_pulled_at_ms,
        max(at_ms) FILTER (WHERE kind = 'Claimed') AS last_pulled_at_ms,
        count_if(kind = 'Claimed') AS claims,
        count_if(kind = 'Extended') AS extends,
        count_if(kind = 'Released') AS releases,
        count_if(kind = 'ClaimExpired') AS timeouts,
        count_if(kind = 'Moved') AS moves,
        count_if(kind = 'Moved' AND dead) AS dead_letters,
        max_by(dead, sequence) FILTER (WHERE kind = 'Moved') AS moved_dead,
        max_by(kind, sequence) FILTER (WHERE kind <> 'Carried') AS last_kind,
        max_by(visible_at_ms, sequence)
          FILTER (WHERE kind IN ('Pushed', 'Released', 'DelayEnded')) AS delayed_until_ms,
        min_by(kind, sequence) FILTER (WHERE {_ENDED}) AS end_kind,
        min(at_ms) FILTER (WHERE {_ENDED}) AS end_at_ms,
        count(*) AS events,
        max(sequence) AS last_sequence
      FROM {{events}}
      WHERE message IS NOT NULL
      GROUP BY message, shard, store
    ), placed AS (
      SELECT folded.*, pushed_to.queue AS queue, held.queue AS held_in,
        CASE WHEN end_kind IS NULL THEN try_element_at(filter(held.ends, one ->
          one.sequence > last_sequence
          AND (one.before IS NULL OR coalesce(rank, message) < one.before)), 1) END AS swept
      FROM folded
      LEFT JOIN {{queues}} AS pushed_to USING (store, shard, queue_number)
      LEFT JOIN {{queues}} AS held
        ON held.store = folded.store AND held.shard = folded.shard
        AND held.queue_number = held_in_number
    ), judged AS (
      SELECT *,
        CASE WHEN end_kind IS NOT NULL THEN lower(end_kind)
          WHEN swept.kind = 'QueuePurged' THEN 'purged'
          WHEN swept.kind = 'QueueRemoved' THEN 'removed'
          WHEN moved_dead THEN 'dead'
          ELSE 'live' END AS state,
        coalesce(end_at_ms, swept.at_ms) AS ended_at_ms
      FROM placed
    )
    SELECT store, shard, message, {MESSAGE_ID} AS message_id, queue, queue_number, held_in,
      held_in_number, `group`, dedup_id, priority, body_bytes, pushed_at_ms,
      timestamp_millis(pushed_at_ms) AS pushed_at, visible_at_ms, first_pulled_at_ms,
      last_pulled_at_ms, claims, extends, releases, timeouts, moves, dead_letters, state,
      CASE WHEN state NOT IN ('live', 'dead') THEN NULL
        WHEN last_kind IN ('Claimed', 'Extended') THEN 'in_flight'
        WHEN last_kind IN ('Pushed', 'Released') AND delayed_until_ms IS NOT NULL THEN 'delayed'
        ELSE 'visible' END AS standing,
      ended_at_ms,
      first_pulled_at_ms - greatest(pushed_at_ms, coalesce(visible_at_ms, 0)) AS wait_ms,
      ended_at_ms - pushed_at_ms AS age_ms,
      events, last_sequence
    FROM judged
    """,
    ("events", "queues"),
    swept="standing IS NOT NULL AND held_in_number = gone.queue",
)

_CLAIM_ENDS: Final = "kind IN ('Deleted', 'Released', 'ClaimExpired', 'Lost')"

ATTEMPTS: Final = Derived(
    "attempts",
    "store string, shard int, message bigint, message_id string, queue string, "
    "queue_number bigint, epoch bigint, holder string, attempt_id string, started_at_ms bigint, "
    "started_at timestamp, ended_at_ms bigint, ended string, deadline_ms bigint, extends bigint, "
    "hold_ms bigint",
    f"""
    WITH folded AS (
      SELECT store, shard, message, epoch, max(queue) AS queue_number,
        max(holder) AS holder, max(attempt_id) AS attempt_id,
        min(at_ms) FILTER (WHERE kind = 'Claimed') AS started_at_ms,
        min(sequence) FILTER (WHERE kind = 'Claimed') AS started,
        max(at_ms) FILTER (WHERE {_CLAIM_ENDS}) AS ended_at_ms,
        max_by(kind, sequence) FILTER (WHERE {_CLAIM_ENDS}) AS end_kind,
        max_by(deadline_ms, sequence)
          FILTER (WHERE kind IN ('Claimed', 'Extended')) AS deadline_ms,
        count_if(kind = 'Extended') AS extends
      FROM {{events}}
      WHERE kind IN ('Claimed', 'Extended') OR {_CLAIM_ENDS}
      GROUP BY message, epoch, shard, store
    ), placed AS (
      SELECT folded.*, queue,
        CASE WHEN end_kind IS NULL THEN
          try_element_at(filter(ends, one -> one.sequence > started), 1) END AS swept
      FROM folded LEFT JOIN {{queues}} USING (store, shard, queue_number)
    )
    SELECT store, shard, message, {MESSAGE_ID} AS message_id, queue, queue_number, epoch, holder,
      attempt_id, started_at_ms, timestamp_millis(started_at_ms) AS started_at,
      coalesce(ended_at_ms, swept.at_ms) AS ended_at_ms,
      CASE coalesce(end_kind, swept.kind)
        WHEN 'Deleted' THEN 'deleted' WHEN 'Released' THEN 'released'
        WHEN 'ClaimExpired' THEN 'timed out' WHEN 'Lost' THEN 'lost'
        WHEN 'QueuePurged' THEN 'purged' WHEN 'QueueRemoved' THEN 'removed'
        ELSE 'open' END AS ended,
      deadline_ms, extends, coalesce(ended_at_ms, swept.at_ms) - started_at_ms AS hold_ms
    FROM placed
    """,
    ("events", "queues"),
    swept="ended = 'open' AND queue_number = gone.queue",
)

QUEUE_STATUS: Final = Derived(
    "queue_status",
    "store string, shard int, queue string, queue_number bigint, as_of_ms bigint, "
    "visible bigint, delayed bigint, in_flight bigint, messages bigint, stored_bytes bigint, "
    "oldest_pushed_at_ms bigint, oldest_age_ms bigint, pushed bigint, deleted bigint, "
    "expired bigint, purged bigint, lost bigint, arrived bigint, left bigint",
    """
    WITH clock AS (SELECT store, max(at_ms) AS as_of_ms FROM {events} GROUP BY store),
    held AS (
      SELECT store, shard, held_in_number AS queue_number,
        count_if(standing = 'visible') AS visible, count_if(standing = 'delayed') AS delayed,
        count_if(standing = 'in_flight') AS in_flight, count(standing) AS messages,
        coalesce(sum(body_bytes) FILTER (WHERE standing IS NOT NULL), 0) AS stored_bytes,
        min(pushed_at_ms) FILTER (WHERE standing IS NOT NULL) AS oldest_pushed_at_ms,
        count_if(state = 'purged') AS purged
      FROM {messages} GROUP BY store, shard, held_in_number
    ), counted AS (
      SELECT store, shard, queue AS queue_number, count_if(kind = 'Pushed') AS pushed,
        count_if(kind = 'Deleted') AS deleted, count_if(kind = 'Expired') AS expired,
        count_if(kind = 'Lost') AS lost, count_if(kind = 'Moved') AS `left`
      FROM {events} GROUP BY store, shard, queue
    ), came AS (
      SELECT store, shard, to_queue AS queue_number, count(*) AS arrived
      FROM {events} WHERE kind = 'Moved' GROUP BY store, shard, to_queue
    )
    SELECT store, shard, queue, queue_number, as_of_ms, coalesce(visible, 0) AS visible,
      coalesce(delayed, 0) AS delayed, coalesce(in_flight, 0) AS in_flight,
      coalesce(messages, 0) AS messages, coalesce(stored_bytes, 0) AS stored_bytes,
      oldest_pushed_at_ms, as_of_ms - oldest_pushed_at_ms AS oldest_age_ms,
      coalesce(pushed, 0) AS pushed, coalesce(deleted, 0) AS deleted,
      coalesce(expired, 0) AS expired, coalesce(purged, 0) AS purged,
      coalesce(lost, 0) AS lost, coalesce(arrived, 0) AS arrived, coalesce(`left`, 0) AS `left`
    FROM {queues} JOIN clock USING (store)
    LEFT JOIN held USING (store, shard, queue_number)
    LEFT JOIN counted USING (store, shard, queue_number)
    LEFT JOIN came USING (store, shard, queue_number)
    WHERE removed_at_ms IS NULL
    """,
    ("events", "queues", "messages"),
)

DEPTH: Final = Derived(
    "depth",
    "store string, shard int, queue string, queue_number bigint, minute timestamp, "
    "messages bigint, in_flight bigint, pushed bigint, deleted bigint",
    f"""
    WITH changes AS (
      SELECT store, shard, queue AS queue_number, at_ms,
        CASE WHEN kind = 'Pushed' THEN 1 WHEN kind IN ('QueuePurged', 'QueueRemoved') THEN -count
          ELSE -1 END AS messages,
        0 AS in_flight, int(kind = 'Pushed') AS pushed, int(kind = 'Deleted') AS deleted
      FROM {{events}} WHERE {_ENDED} OR kind IN ('Pushed', 'Moved', 'QueuePurged', 'QueueRemoved')
      UNION ALL
      SELECT store, shard, to_queue, at_ms, 1, 0, 0, 0 FROM {{events}} WHERE kind = 'Moved'
      UNION ALL
      SELECT store, shard, queue_number, started_at_ms, 0, 1, 0, 0 FROM {{attempts}}
      WHERE started_at_ms IS NOT NULL
      UNION ALL
      SELECT store, shard, queue_number, ended_at_ms, 0, -1, 0, 0 FROM {{attempts}}
      WHERE ended_at_ms IS NOT NULL AND started_at_ms IS NOT NULL
    ), buckets AS (
      SELECT store, shard, queue_number, at_ms div {BUCKET_MS} AS bucket,
        sum(messages) AS messages, sum(in_flight) AS in_flight,
        sum(pushed) AS pushed, sum(deleted) AS deleted
      FROM changes GROUP BY store, shard, queue_number, at_ms div {BUCKET_MS}
    )
    SELECT store, shard, queue, queue_number,
      timestamp_millis(bucket * {BUCKET_MS}) AS minute,
      sum(messages) OVER line AS messages, sum(in_flight) OVER line AS in_flight, pushed, deleted
    FROM buckets LEFT JOIN {{queues}} USING (store, shard, queue_number)
    WINDOW line AS (PARTITION BY store, shard, queue_number ORDER BY bucket
      ROWS UNBOUNDED PRECEDING)
    """,
    ("events", "queues", "attempts"),
)

LATENCY: Final = Derived(
    "latency",
    "store string, queue string, measure string, samples bigint, p50_ms bigint, p90_ms bigint, "
    "p99_ms bigint, p999_ms bigint, max_ms bigint",
    """
    WITH samples AS (
      SELECT store, queue, 'wait' AS measure, wait_ms AS took_ms FROM {messages}
      UNION ALL
      SELECT store, queue, 'end to end', age_ms FROM {messages} WHERE state = 'deleted'
      UNION ALL
      SELECT store, queue, 'hold', hold_ms FROM {attempts}
    ), measured AS (
      SELECT store, queue, measure, count(*) AS samples, max(took_ms) AS max_ms,
        percentile_approx(took_ms, array(0.5, 0.9, 0.99, 0.999), 10000) AS at
      FROM samples WHERE took_ms IS NOT NULL GROUP BY store, queue, measure
    )
    SELECT store, queue, measure, samples, at[0] AS p50_ms, at[1] AS p90_ms, at[2] AS p99_ms,
      at[3] AS p999_ms, max_ms
    FROM measured
    """,
    ("messages", "attempts"),
)

REDELIVERIES: Final = Derived(
    "redeliveries",
    "store string, queue string, claims bigint, messages bigint, timeouts bigint, "
    "releases bigint, deleted bigint, dead_letters bigint",
    """
    SELECT store, queue, claims, count(*) AS messages, sum(timeouts) AS timeouts,
      sum(releases) AS releases, count_if(state = 'deleted') AS deleted,
      sum(dead_letters) AS dead_letters
    FROM {messages} WHERE claims > 0 GROUP BY store, queue, claims
    """,
    ("messages",),
)

DEAD_LETTERS: Final = Derived(
    "dead_letters",
    "store string, shard int, message bigint, message_id string, queue string, "
    "dead_letter_queue string, `group` string, at timestamp, at_ms bigint, claims bigint, "
    "timeouts bigint, releases bigint, last_holder string, state string",
    """
    WITH moved AS (
      SELECT store, shard, message, queue AS queue_number, to_queue, at_ms, sequence
      FROM {events} WHERE kind = 'Moved' AND dead
    ), held AS (
      SELECT store, shard, message, max_by(holder, epoch) AS last_holder FROM {attempts}
      LEFT SEMI JOIN moved USING (store, shard, message) GROUP BY store, shard, message
    )
    SELECT moved.store, moved.shard, moved.message, message_id, came.queue,
      went.queue AS dead_letter_queue, `group`, timestamp_millis(moved.at_ms) AS at, moved.at_ms,
      claims, timeouts, releases, last_holder, state
    FROM moved
    JOIN {messages} AS told USING (store, shard, message)
    LEFT JOIN held USING (store, shard, message)
    LEFT JOIN {queues} AS came ON came.store = moved.store AND came.shard = moved.shard
      AND came.queue_number = moved.queue_number
    LEFT JOIN {queues} AS went ON went.store = moved.store AND went.shard = moved.shard
      AND went.queue_number = moved.to_queue
    """,
    ("events", "queues", "messages", "attempts"),
)

HOT_QUEUES: Final = Derived(
    "hot_queues",
    "store string, shard int, queue string, queue_number bigint, minute timestamp, "
    "events bigint, pushes bigint, claims bigint, deletes bigint, timeouts bigint",
    f"""
    WITH busy AS (
      SELECT store, shard, queue AS queue_number, at_ms div {BUCKET_MS} AS bucket,
        count(*) AS events, count_if(kind = 'Pushed') AS pushes,
        count_if(kind = 'Claimed') AS claims, count_if(kind = 'Deleted') AS deletes,
        count_if(kind = 'ClaimExpired') AS timeouts
      FROM {{events}} WHERE kind <> 'Damaged'
      GROUP BY store, shard, queue, at_ms div {BUCKET_MS}
    )
    SELECT store, shard, queue, queue_number, timestamp_millis(bucket * {BUCKET_MS}) AS minute,
      events, pushes, claims, deletes, timeouts
    FROM busy LEFT JOIN {{queues}} USING (store, shard, queue_number)
    """,
    ("events", "queues"),
)

HOT_GROUPS: Final = Derived(
    "hot_groups",
    "store string, queue string, `group` string, messages bigint, stored_bytes bigint, "
    "claims bigint, timeouts bigint, dead_letters bigint, live bigint",
    """
    SELECT store, queue, `group`, count(*) AS messages, sum(body_bytes) AS stored_bytes,
      sum(claims) AS claims, sum(timeouts) AS timeouts, sum(dead_letters) AS dead_letters,
      count(standing) AS live
    FROM {messages} WHERE `group` IS NOT NULL GROUP BY store, queue, `group`
    """,
    ("messages",),
)

HOT_SHARDS: Final = Derived(
    "hot_shards",
    "store string, shard int, minute timestamp, events bigint, entries bigint, pushes bigint, "
    "bytes bigint",
    f"""
    SELECT store, shard, timestamp_millis(at_ms div {BUCKET_MS} * {BUCKET_MS}) AS minute,
      count(*) AS events, count_if(`index` = 0) AS entries, count_if(kind = 'Pushed') AS pushes,
      coalesce(sum(body_bytes), 0) AS bytes
    FROM {{events}} WHERE kind <> 'Damaged'
    GROUP BY store, shard, at_ms div {BUCKET_MS}
    """,
    ("events",),
)

# In the order they are made: each names only those before it.
TABLES: Final = (
    QUEUES,
    MESSAGES,
    ATTEMPTS,
    QUEUE_STATUS,
    DEPTH,
    LATENCY,
    REDELIVERIES,
    DEAD_LETTERS,
    HOT_QUEUES,
    HOT_GROUPS,
    HOT_SHARDS,
)
# How many messages a part of a table holds, and how many stretches of parts one query names.
PART_MESSAGES: Final = 1 << 18
_STRETCHES_MAX: Final = 100


def derive(
    spark: "SparkSession",
    lake: Lake,
    made: Callable[[str], None] = lambda name: None,
    tables: Sequence[Derived] = TABLES,
) -> list[str]:
    """Brings every table level with `events`; the names of those changed. Raises LakeUnusable."""
    events = events_table(lake)
    delta = events.delta()
    if delta is None:
        return []
    # Data and version from one look at the table: more may be committed meanwhile.
    version = delta.version()
    frames = {"events": events.frame(spark, delta)}
    done = []
    for each in tables:
        table = lake.table(each.name, each.schema, in_parts=each.swept is not None)
        if table.committed(_SOURCE) != version:
            with our_errors():
                if table.in_parts:
                    _refresh(spark, table, each, frames, delta)
                else:
                    frame = select(spark, each, frames).repartition(1)
                    table.replace(frame, f"data/from-{version:08d}", {_SOURCE: version})
            done.append(each.name)
            made(each.name)
        frames[each.name] = table.frame(spark)
    return done


def select(spark: "SparkSession", table: Derived, frames: "dict[str, DataFrame]") -> "DataFrame":
    """The table's rows, from the frames of those it names."""
    inputs: dict[str, Any] = {name: frames[name] for name in table.inputs}
    return spark.sql(table.query, **inputs)


def _refresh(
    spark: "SparkSession",
    table: Table,
    derived: Derived,
    frames: "dict[str, DataFrame]",
    events: DeltaTable,
) -> None:
    """Makes those parts anew that events behind the table's last commit touch."""
    stores = [row["store"] for row in frames["queues"].select("store").distinct().collect()]
    marks = {store: f"offset/{store}" for store in stores}
    seen = {store: table.committed(mark) for store, mark in marks.items()}
    touched = None if table.delta() is None else _touched(spark, table, derived, frames, seen)
    if touched is not None:
        frames = frames | {"events": frames["events"].where(_within(touched))}
    part = _part_of("message")
    frame = select(spark, derived, frames).selectExpr("*", f"{part} AS {PART}")
    version = events.version()
    reached = {mark: events.transaction_version(mark) for mark in marks.values()}
    transactions = {_SOURCE: version, **{m: at for m, at in reached.items() if at is not None}}
    parts = None if touched is None else [f"{a}-{b}-{nth}" for a, b, nth in touched]
    table.replace(frame, f"data/from-{version:08d}", transactions, parts)


def _part_of(message: str) -> str:
    return f"concat(store, '-', shard, '-', {message} div {PART_MESSAGES})"


def _touched(
    spark: "SparkSession",
    table: Table,
    derived: Derived,
    frames: "dict[str, DataFrame]",
    seen: Mapping[str, int | None],
) -> list[tuple[str, int, int]] | None:
    """Which parts are no longer what they should be: (store, shard, nth); None for all."""
    known = " OR ".join(
        f"(store = '{store}' AND offset < {offset})" for store, offset in seen.items() if offset
    )
    query = f"""
        WITH new AS (SELECT * FROM {{events}} WHERE NOT ({known or "false"})),
        gone AS (SELECT store, shard, queue FROM new WHERE kind IN ('QueuePurged', 'QueueRemoved'))
        SELECT DISTINCT store, shard, message div {PART_MESSAGES} AS nth FROM new
        WHERE message IS NOT NULL
        UNION
        SELECT DISTINCT store, shard, message div {PART_MESSAGES}
        FROM {{table}} AS old JOIN gone USING (store, shard) WHERE {derived.swept}
        """
    found = spark.sql(query, events=frames["events"], table=table.frame(spark)).collect()
    parts = sorted((row["store"], row["shard"], row["nth"]) for row in found)
    return parts if len(_runs(parts)) <= _STRETCHES_MAX else None


def _runs(parts: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int, int]]:
    """Neighbouring parts together: (store, shard, first, last)."""
    runs: list[tuple[str, int, int, int]] = []
    for store, shard, nth in parts:
        if runs and runs[-1] == (store, shard, runs[-1][2], nth - 1):
            runs[-1] = (store, shard, runs[-1][2], nth)
        else:
            runs.append((store, shard, nth, nth))
    return runs


def _within(parts: Sequence[tuple[str, int, int]]) -> str:
    """The condition that an event is of a message in these parts; Parquet's statistics help."""
    stretches = [
        f"(store = '{store}' AND shard = {shard} AND message >= {first * PART_MESSAGES} "
        f"AND message < {(last + 1) * PART_MESSAGES})"
        for store, shard, first, last in _runs(parts)
    ]
    return " OR ".join(stretches) or "false"
