"""The audit: what must hold of every message's life, as named checks in SQL over the events.

The journal gives each event its place at the moment it took effect, so the audit trusts that order
and nothing else. One window pass over each message's events finds what the message's state was
before each of them; an event breaks at most one of the checks made there. Groups, dedup ids, the
balance of each queue, terms and gaps are looked at by themselves.

A journal whose beginning was dropped tells of messages that were pushed before: what is not known
of them is not held against them. Where entries are missing in the middle, other findings may follow
from that alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from penstock.service import DEDUP_WINDOW_MS
from penstock.spark.lake import our_errors
from penstock.spark.tables import MESSAGE_ID

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SHOWN_MAX: Final = 20
# What an audit reads: no bodies.
SCHEMA: Final = (
    "store string, shard int, term bigint, entry bigint, index int, sequence bigint, "
    "offset bigint, kind string, at_ms bigint, queue bigint, message bigint, epoch bigint, "
    "deadline_ms bigint, visible_at_ms bigint, expires_at_ms bigint, group string, "
    "dedup_id string, holder string, name string, to_queue bigint, rank bigint, dead boolean, "
    "count bigint, before bigint, extra string, damage string"
)
CHECKS: Final = {
    "pushed first": "a message is pushed before anything else befalls it",
    "pushed once": "a message's number is never used again",
    "nothing after the end": "a message that was deleted, expired or purged stays gone",
    "one holder": "at most one claim of a message lives at any instant",
    "claim of the visible": "only a visible message is claimed",
    "epochs rise": "each claim of a message has the next epoch",
    "current claim only": "delete, extend and release need the current claim's epoch",
    "expiry of the current claim": "only the current claim runs out",
    "expiry after the deadline": "a claim runs out no earlier than its deadline",
    "delay in full": "a delayed message becomes visible no earlier than it was to",
    "expired when due": "a message expires after its TTL, and never while it is claimed",
    "move of the visible": "only a visible message moves to another queue",
    "dead letter after N": "a message is dead-lettered after exactly max_receives claims",
    "one message per dedup id": "a dedup id makes one message within its window",
    "order in the group": "a FIFO queue gives the messages of a group in their order",
    "nothing lost": "what came into a queue left it, or is in it",
    "terms rise": "no entry comes from an owner of the shard that was replaced",
    "no gaps": "every entry is there and whole",
}

_STORES: Final = """
    SELECT store, min(entry) FILTER (WHERE entry > 0) AS first_entry, max(entry) AS last_entry,
      count_if(`index` = 0 AND kind <> 'Damaged') AS entries,
      1 + max(term) - min(term) FILTER (WHERE kind <> 'Damaged') AS terms
    FROM {events} GROUP BY store
"""

_QUEUES: Final = """
    WITH told AS (
      SELECT store, shard, queue, max(name) AS name,
        array_sort(collect_list(struct(sequence,
          bigint(get_json_object(extra, '$.settings.max_receives')) AS max_receives,
          get_json_object(extra, '$.settings.dead_letter') AS dead_letter))
          FILTER (WHERE extra IS NOT NULL)) AS limits,
        bool_or(boolean(get_json_object(extra, '$.settings.fifo'))) AS fifo,
        bool_or(boolean(get_json_object(extra, '$.settings.dedup_per_group'))) AS dedup_per_group,
        array_sort(collect_list(struct(sequence, kind, count, before))
          FILTER (WHERE kind IN ('QueuePurged', 'QueueRemoved'))) AS ends
      FROM {events} WHERE kind LIKE 'Queue%' GROUP BY store, shard, queue
    ), lasting AS (
      SELECT store, shard, name FROM told GROUP BY store, shard, name
      HAVING count(*) = 1 AND NOT bool_or(exists(ends, one -> one.kind = 'QueueRemoved'))
    )
    SELECT told.*, lasting.name IS NOT NULL AS keeps_dead_letters,
      size(array_distinct(transform(limits, one -> struct(one.max_receives, one.dead_letter)))) = 1
        AS never_changed
    FROM told LEFT JOIN lasting ON lasting.store = told.store AND lasting.shard = told.shard
      AND lasting.name = limits[0].dead_letter
"""

# Rows are sorted by these columns in this order: the one that tells most apart comes first.
_LIVES: Final = """
    WITH told AS (
      SELECT store, shard, message, entry, `index`, sequence, kind, at_ms, queue, epoch, dead,
        deadline_ms, visible_at_ms, expires_at_ms, to_queue, rank, `group`,
        CASE WHEN kind IN ('Pushed', 'Released')
            THEN if(visible_at_ms IS NULL, 'visible', 'delayed')
          WHEN kind IN ('DelayEnded', 'ClaimExpired', 'Moved') THEN 'visible'
          WHEN kind = 'Claimed' THEN 'in flight'
          WHEN kind IN ('Deleted', 'Expired', 'Lost') THEN 'gone' END AS after
      FROM {events} WHERE message IS NOT NULL AND kind <> 'Carried'
    ), seen AS (
      SELECT *, last(after, true) OVER earlier AS state,
        last(if(kind = 'Claimed', epoch, NULL), true) OVER earlier AS current_epoch,
        last(if(kind IN ('Claimed', 'Extended'), deadline_ms, NULL), true) OVER earlier
          AS deadline,
        last(if(kind IN ('Pushed', 'Released'), coalesce(visible_at_ms, 0), NULL), true)
          OVER earlier AS delayed_until,
        last(CASE kind WHEN 'Pushed' THEN coalesce(expires_at_ms, 0) WHEN 'Moved' THEN 0 END, true)
          OVER earlier AS expires,
        last(CASE kind WHEN 'Pushed' THEN queue WHEN 'Moved' THEN to_queue END, true)
          OVER earlier AS held_in,
        last(CASE kind WHEN 'Pushed' THEN message WHEN 'Moved' THEN rank END, true)
          OVER earlier AS place,
        last(if(kind IN ('Pushed', 'Moved'), sequence, NULL), true) OVER earlier AS entered
      FROM told
      WINDOW earlier AS (PARTITION BY message, shard, store ORDER BY sequence
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
    )
    SELECT *, coalesce(current_epoch, 0) - coalesce(
      last(if(kind = 'Moved', coalesce(current_epoch, 0), NULL), true) OVER earlier, 0) AS receives
    FROM seen
    WINDOW earlier AS (PARTITION BY message, shard, store ORDER BY sequence
      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
"""

_BY_MESSAGE: Final = """
    WITH placed AS (
      SELECT lives.*, began.first_entry = 1 AS complete, never_changed, keeps_dead_letters,
        try_element_at(filter(limits, one -> one.sequence < lives.sequence), -1) AS bound,
        coalesce(exists(ends, one -> one.sequence > entered AND one.sequence < lives.sequence
          AND (one.before IS NULL OR place < one.before)), false) AS swept
      FROM {lives} AS lives
      JOIN {began} AS began ON began.store = lives.store
      LEFT JOIN {queues} AS held ON held.store = lives.store AND held.shard = lives.shard
        AND held.queue = coalesce(held_in, lives.queue)
    ), judged AS (
      SELECT *, CASE
        WHEN kind <> 'Pushed' AND state IS NULL THEN if(complete, 'pushed first', NULL)
        WHEN kind = 'Pushed' AND state IS NOT NULL THEN 'pushed once'
        WHEN state = 'gone' OR swept THEN 'nothing after the end'
        WHEN kind = 'Claimed' AND state = 'in flight' THEN 'one holder'
        WHEN kind = 'Claimed' AND state = 'delayed' THEN 'claim of the visible'
        WHEN kind = 'Claimed' AND entered IS NOT NULL
          AND epoch <> coalesce(current_epoch, 0) + 1 THEN 'epochs rise'
        WHEN kind = 'Claimed' AND entered IS NOT NULL AND never_changed AND keeps_dead_letters
          AND receives >= bound.max_receives THEN 'dead letter after N'
        WHEN kind IN ('Deleted', 'Extended', 'Released', 'Lost')
          AND (state <> 'in flight' OR epoch <> current_epoch) THEN 'current claim only'
        WHEN kind = 'ClaimExpired'
          AND (state <> 'in flight' OR epoch <> current_epoch) THEN 'expiry of the current claim'
        WHEN kind = 'ClaimExpired' AND at_ms < deadline THEN 'expiry after the deadline'
        WHEN kind = 'DelayEnded'
          AND (state <> 'delayed' OR at_ms < delayed_until) THEN 'delay in full'
        WHEN kind = 'Expired' AND (state = 'in flight' OR at_ms < expires) THEN 'expired when due'
        WHEN kind = 'Moved' AND state <> 'visible' THEN 'move of the visible'
        WHEN kind = 'Moved' AND dead AND entered IS NOT NULL
          AND (bound.max_receives IS NULL OR receives < bound.max_receives
            OR (never_changed AND receives > bound.max_receives)) THEN 'dead letter after N'
        END AS check
      FROM placed
    )
    SELECT check, store, shard, message, queue, entry, `index`, at_ms,
      concat(kind, if(epoch IS NULL, '', concat(' by claim ', epoch)), ' of a message that ',
        CASE WHEN state IS NULL THEN 'was never pushed'
          WHEN state = 'gone' OR swept THEN 'was gone'
          ELSE concat('was ', state, if(current_epoch IS NULL, '',
            concat(', claim ', current_epoch))) END,
        CASE check WHEN 'expiry after the deadline'
            THEN concat(', ', deadline - at_ms, ' ms before its deadline')
          WHEN 'dead letter after N' THEN concat(', pulled ', receives, ' times here where ',
            coalesce(string(bound.max_receives), 'no number'), ' is the limit')
          ELSE '' END) AS detail
    FROM judged WHERE check IS NOT NULL
"""

_DEDUP: Final = f"""
    WITH named AS (
      SELECT events.*, lag(at_ms) OVER same AS earlier_ms, lag(message) OVER same AS first
      FROM {{events}} AS events LEFT JOIN {{queues}} AS queues USING (store, shard, queue)
      WHERE kind = 'Pushed' AND dedup_id IS NOT NULL
      WINDOW same AS (PARTITION BY store, shard, queue, dedup_id,
        if(dedup_per_group, coalesce(`group`, ''), '') ORDER BY sequence)
    )
    SELECT 'one message per dedup id' AS check, store, shard, message, queue, entry, `index`,
      at_ms, concat('the dedup id ', dedup_id, ' made message ', first, ' ', at_ms - earlier_ms,
        ' ms before') AS detail
    FROM named WHERE at_ms < earlier_ms + {DEDUP_WINDOW_MS}
"""

_GROUPS: Final = """
    WITH lives AS (
      SELECT lives.*, max(`group`) OVER (PARTITION BY store, shard, message) AS of_group
      FROM {lives} AS lives JOIN {queues} AS queues USING (store, shard, queue) WHERE fifo
    ), ways AS (
      SELECT store, shard, message, entered,
        min(CASE WHEN after = 'gone' OR kind = 'Moved' THEN sequence END) AS left_at,
        max(sequence) AS last_sequence
      FROM lives WHERE entered IS NOT NULL GROUP BY store, shard, message, entered
    ), arrivals AS (
      SELECT store, shard, message, sequence AS entered, coalesce(to_queue, queue) AS queue,
        coalesce(rank, message) AS place, of_group
      FROM lives WHERE kind IN ('Pushed', 'Moved')
    ), stays AS (
      SELECT store, shard, message, entered, queue, place, of_group,
        coalesce(left_at, try_element_at(filter(ends, one -> one.sequence >
          coalesce(last_sequence, entered)), 1).sequence, 9223372036854775807) AS left_at
      FROM arrivals LEFT JOIN ways USING (store, shard, message, entered)
      LEFT JOIN {queues} AS queues USING (store, shard, queue)
    ), behind AS (
      SELECT store, shard, message, entered, max(left_at) OVER (
        PARTITION BY store, shard, queue, of_group ORDER BY place
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS free_from
      FROM stays
    ), claims AS (
      SELECT lives.*, free_from, lag(lives.place) OVER (
        PARTITION BY lives.store, lives.shard, lives.queue, lives.of_group, lives.entry
        ORDER BY lives.`index`) AS place_before
      FROM lives JOIN behind USING (store, shard, message, entered)
      WHERE lives.kind = 'Claimed'
    )
    SELECT 'order in the group' AS check, store, shard, message, queue, entry, `index`, at_ms,
      concat('claimed before an earlier message of the group ', of_group, ' had left') AS detail
    FROM claims
    WHERE (place_before IS NULL AND sequence < free_from) OR place < place_before
"""

_BALANCE: Final = """
    WITH changes AS (
      SELECT store, shard, queue, sequence,
        CASE WHEN kind = 'Pushed' THEN 1 ELSE -1 END AS messages
      FROM {events} WHERE kind IN ('Pushed', 'Deleted', 'Expired', 'Lost', 'Moved')
      UNION ALL
      SELECT store, shard, to_queue, sequence, 1 FROM {events} WHERE kind = 'Moved'
    ), stretches AS (
      SELECT store, shard, queue,
        coalesce(size(filter(ends, one -> one.sequence < changes.sequence)), 0) AS stretch,
        sum(messages) AS held
      FROM changes LEFT JOIN {queues} AS queues USING (store, shard, queue)
      GROUP BY store, shard, queue,
        coalesce(size(filter(ends, one -> one.sequence < changes.sequence)), 0)
    ), said AS (
      SELECT store, shard, queue, stretch, one.sequence, one.kind, one.count
      FROM {queues} LATERAL VIEW posexplode(ends) AS stretch, one
    ), both AS (
      SELECT store, shard, queue, coalesce(held, 0) AS held, sequence, kind, count
      FROM stretches FULL JOIN said USING (store, shard, queue, stretch)
    )
    SELECT both.*, name FROM both
    JOIN {began} AS began USING (store)
    LEFT JOIN {queues} USING (store, shard, queue)
    WHERE began.first_entry = 1
"""

_TERMS: Final = """
    WITH terms AS (
      SELECT store, shard, term, min(entry) AS first_entry FROM {events}
      WHERE kind <> 'Damaged' GROUP BY store, shard, term
    ), replaced AS (
      SELECT older.store, older.shard, older.term, min(newer.first_entry) AS at_entry
      FROM terms AS older JOIN terms AS newer ON newer.store = older.store
        AND newer.shard = older.shard AND newer.term > older.term
      GROUP BY older.store, older.shard, older.term
    )
    SELECT 'terms rise' AS check, store, shard, message, queue, entry, `index`, at_ms,
      concat('an entry of term ', term, ' after term ', term, ' was replaced at entry ',
        at_entry) AS detail
    FROM {events} JOIN replaced USING (store, shard, term)
    WHERE entry > at_entry AND `index` = 0
"""

_GAPS: Final = """
    WITH entries AS (
      SELECT store, entry, max(shard) AS shard, max(at_ms) AS at_ms FROM {events}
      WHERE kind <> 'Damaged' GROUP BY store, entry
      UNION ALL SELECT store, first_entry - 1, NULL, NULL FROM {began}
      UNION ALL SELECT store, last_entry + 1, NULL, NULL FROM {began}
    ), steps AS (
      SELECT *, lag(entry) OVER (PARTITION BY store ORDER BY entry) AS previous FROM entries
    ), missing AS (
      SELECT store, shard, previous + 1 AS first, entry - 1 AS last, at_ms
      FROM steps WHERE entry > previous + 1
    ), told AS (
      SELECT store, entry, min_by(damage, offset) AS damage, min(offset) AS offset
      FROM {events} WHERE kind = 'Damaged' GROUP BY store, entry
    )
    SELECT 'no gaps' AS check, missing.store, shard, CAST(NULL AS bigint) AS message,
      CAST(NULL AS bigint) AS queue, first AS entry, 0 AS `index`, at_ms,
      concat(if(first = last, concat('entry ', first, ' is missing'),
        concat('entries ', first, ' to ', last, ' are missing')),
        if(damage IS NULL, '', concat(' (offset ', offset, ': ', damage, ')'))) AS detail
    FROM missing LEFT JOIN told ON told.store = missing.store AND told.entry = missing.first
"""


@dataclass(frozen=True)
class Finding:
    """One place where a check does not hold, and the life of the message it is about."""

    check: str
    store: str
    entry: int
    message_id: str | None
    queue: str | None
    detail: str
    events: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """How often each check failed, and the first findings of each."""

    events: int
    counts: dict[str, int]
    findings: tuple[Finding, ...]

    @property
    def holds(self) -> bool:
        """Whether every check does."""
        return not any(self.counts.values())


def audit(
    spark: "SparkSession",
    events: "DataFrame",
    engine: Mapping[str, int] | None = None,
    shown_max: int = SHOWN_MAX,
) -> Verdict:
    """Makes every check over these events.

    `engine` says how many messages each queue holds by the account of the engine itself, at the
    end of the events; without it, queues are balanced only against their own purges.
    """
    with our_errors():
        events = events.select(*[column.split()[0] for column in SCHEMA.split(", ")])
        found = violations(spark, events, engine).cache()
        try:
            counts = dict.fromkeys(CHECKS, 0)
            counts |= {row["check"]: row["n"] for row in found.groupBy("check").agg(
                {"*": "count"}).withColumnRenamed("count(1)", "n").collect()}  # fmt: skip
            findings = _shown(spark, events, found, shown_max) if any(counts.values()) else ()
            return Verdict(events.count(), counts, findings)
        finally:
            found.unpersist()


def violations(
    spark: "SparkSession", events: "DataFrame", engine: Mapping[str, int] | None = None
) -> "DataFrame":
    """Every finding as a row: check, store, shard, message, queue, entry, index, at_ms, detail."""
    # Small: one row a queue, one a store. As local rows they are broadcast, and made only once.
    queues = _local(spark, spark.sql(_QUEUES, events=events))
    began = _local(spark, spark.sql(_STORES, events=events))
    lives = spark.sql(_LIVES, events=events)
    parts = [
        spark.sql(_BY_MESSAGE, lives=lives, queues=queues, began=began),
        spark.sql(_DEDUP, events=events, queues=queues),
        _lost(spark, events, queues, began, engine),
    ]
    # What these look for takes a pass over everything; one number often says that it is not there.
    if began.where("terms > 1").count():
        parts.append(spark.sql(_TERMS, events=events))
    if began.where("entries <= last_entry - first_entry").count():
        parts.append(spark.sql(_GAPS, events=events, began=began))
    if queues.where("fifo").count():
        parts.append(spark.sql(_GROUPS, lives=lives, queues=queues))
    found = parts[0]
    for part in parts[1:]:
        found = found.unionByName(part)
    return found


def _local(spark: "SparkSession", frame: "DataFrame") -> "DataFrame":
    return spark.createDataFrame(frame.collect(), frame.schema)


def _lost(
    spark: "SparkSession",
    events: "DataFrame",
    queues: "DataFrame",
    began: "DataFrame",
    engine: Mapping[str, int] | None,
) -> "DataFrame":
    balance = spark.sql(_BALANCE, events=events, queues=queues, began=began)
    counted: list[tuple[Any, ...]] = list((engine or {}).items())
    held = spark.createDataFrame(counted, "name string, counted bigint")
    return spark.sql(
        """
        SELECT 'nothing lost' AS check, store, shard, CAST(NULL AS bigint) AS message, queue,
          coalesce(sequence >> 20, 0) AS entry, int(0) AS `index`, CAST(NULL AS bigint) AS at_ms,
          CASE WHEN kind IS NULL AND counted IS NULL
              THEN concat(-held, ' more messages left the queue than came')
            WHEN kind IS NULL THEN concat('the engine holds ', counted, ', the journal ', held)
            ELSE concat(kind, ' of ', count, ' messages where the journal tells of ', held)
            END AS detail
        FROM {balance} LEFT JOIN {held} USING (name)
        WHERE if(kind IS NULL, held < 0 OR held <> counted, held <> count)
        """,
        balance=balance,
        held=held,
    )


def _shown(
    spark: "SparkSession", events: "DataFrame", found: "DataFrame", shown_max: int
) -> tuple[Finding, ...]:
    """The first findings of each check, with the events of their messages."""
    first = spark.sql(
        f"""
        SELECT *, if(message IS NULL, NULL, {MESSAGE_ID}) AS message_id FROM (
          SELECT *, row_number() OVER (PARTITION BY check ORDER BY store, entry, `index`) AS nth
          FROM {{found}}) WHERE nth <= {int(shown_max)}
        """,
        found=found,
    ).collect()
    names = {
        (row["store"], row["shard"], row["queue"]): row["name"]
        for row in events.where("kind = 'QueueCreated'").collect()
    }
    lives: dict[tuple[Any, ...], list[str]] = {}
    about = sorted(
        {(row["store"], row["shard"], row["message"]) for row in first if row["message"]}
    )
    if about:
        keys = spark.createDataFrame(about, "store string, shard int, message bigint")
        for row in events.join(keys, ["store", "shard", "message"]).orderBy("sequence").collect():
            key = row["store"], row["shard"], row["message"]
            lives.setdefault(key, []).append(_told(row))
    order = list(CHECKS)
    return tuple(
        Finding(
            row["check"],
            row["store"],
            row["entry"],
            row["message_id"],
            names.get((row["store"], row["shard"], row["queue"])),
            row["detail"],
            tuple(lives.get((row["store"], row["shard"], row["message"]), ())),
        )
        for row in sorted(first, key=lambda row: (order.index(row["check"]), row["nth"]))
    )


def _told(row: Any) -> str:
    """One event of a message, in a line."""
    said = [f"{row['entry']}.{row['index']}", f"{row['at_ms']} ms", row["kind"]]
    named: Sequence[tuple[str, str]] = (
        ("epoch", "claim"), ("deadline_ms", "until"), ("visible_at_ms", "visible at"),
        ("holder", "by"), ("to_queue", "to queue"), ("rank", "rank"), ("group", "group"),
        ("dedup_id", "dedup id"),
    )  # fmt: skip
    return " ".join([*said, *(f"{label} {row[n]}" for n, label in named if row[n] is not None)])
