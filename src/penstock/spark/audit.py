"""The audit: what must hold of every message's life, as named checks in SQL over the events.

The journal gives each event its place at the moment it took effect, so the audit trusts that order
and nothing else. One window pass over each message's events finds what the message's state was
before each of them; an event breaks at most one of the checks made there. Groups, dedup ids, the
balance of each queue, terms and gaps are looked at by themselves.

Rows that travel are narrow: a store and shard are one number, their hash (`home`), until a finding
is shown; with a queue they are another (`line`). What is said of queues is little and is joined as
rows by it: a stretch is a queue's time between two such words. The SQL keeps to what other engines
understand too; `Runner` is all that it needs of one.

A journal whose beginning was dropped tells of messages that were pushed before: what is not known
of them is not held against them. Where entries are missing in the middle, other findings may follow
from that alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from penstock.service import DEDUP_WINDOW_MS
from penstock.spark.blocks import INDEX_BITS
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
    "count bigint, extra string, damage string"
)
CHECKS: Final = {
    "pushed first": "a message is pushed before anything else befalls it",
    "pushed once": "a message's number is never used again",
    "nothing after the end": "a message that was deleted, expired or purged stays gone",
    "one holder": "at most one claim of a message lives at any instant",
    "claim of the visible": "only a visible message is claimed",
    "epochs rise": "each claim of a message has the next epoch",
    "current claim only": "delete, extend and release need the current claim's epoch; an "
    "extension may take up the last one again after it ran out",
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

# Everything said about queues: few rows, and what the other checks lean on.
_MARKS: Final = """
    SELECT store, shard, xxhash64(store, shard) AS home, queue, sequence, kind, name, count,
      extra IS NOT NULL AS settled,
      CAST(get_json_object(extra, '$.settings.max_receives') AS bigint) AS max_receives,
      get_json_object(extra, '$.settings.dead_letter') AS dead_letter,
      CAST(get_json_object(extra, '$.settings.fifo') AS boolean) AS fifo,
      CAST(get_json_object(extra, '$.settings.dedup_per_group') AS boolean) AS dedup_per_group
    FROM {events}
    WHERE kind IN ('QueueCreated', 'QueueConfigured', 'QueuePurged', 'QueueRemoved')
"""

_QUEUES: Final = """
    WITH told AS (
      SELECT store, shard, home, queue, max(name) AS name, bool_or(fifo) AS fifo,
        bool_or(dedup_per_group) AS dedup_per_group, max(dead_letter) AS dead_letter,
        max(CASE WHEN kind = 'QueueRemoved' THEN 1 ELSE 0 END) AS removed,
        count(DISTINCT CASE WHEN settled THEN concat(coalesce(CAST(max_receives AS string), ''),
          '/', coalesce(dead_letter, '')) END) = 1 AS never_changed
      FROM {marks} GROUP BY store, shard, home, queue
    ), lasting AS (
      SELECT home, name FROM told GROUP BY home, name HAVING count(*) = 1 AND max(removed) = 0
    )
    SELECT told.*, xxhash64(told.home, queue) AS line,
      never_changed AND lasting.name IS NOT NULL AS strict
    FROM told LEFT JOIN lasting ON lasting.home = told.home AND lasting.name = told.dead_letter
"""

# A queue's time from one word about it to the next: when it was last emptied, and its limit.
_STRETCHES: Final = """
    WITH cut AS (
      SELECT home, queue, sequence AS from_sequence,
        coalesce(lead(sequence) OVER line, 9223372036854775807) AS to_sequence,
        max(CASE WHEN kind IN ('QueuePurged', 'QueueRemoved') THEN sequence END)
          OVER line AS emptied,
        count(CASE WHEN kind IN ('QueuePurged', 'QueueRemoved') THEN 1 END) OVER line AS nth,
        max(CASE WHEN settled THEN sequence END) OVER line AS settled_at
      FROM {marks} WINDOW line AS (PARTITION BY home, queue ORDER BY sequence)
    )
    SELECT line, from_sequence, to_sequence, emptied, nth, settings.max_receives, strict,
      queues.fifo, queues.dedup_per_group
    FROM cut
    JOIN {queues} AS queues ON queues.home = cut.home AND queues.queue = cut.queue
    LEFT JOIN {marks} AS settings ON settings.home = cut.home AND settings.queue = cut.queue
      AND settings.sequence = settled_at
"""

# One pass that counts everything: a row a queue and stretch, and from these a row a store.
_TALLY: Final = """
    SELECT store, shard, queue, coalesce(nth, 0) AS nth, count(*) AS events,
      sum(CASE WHEN kind = 'Pushed' THEN 1
        WHEN kind IN ('Deleted', 'Expired', 'Lost', 'Moved') THEN -1 ELSE 0 END) AS held,
      min(CASE WHEN entry > 0 THEN entry END) AS first_entry, max(entry) AS last_entry,
      sum(CASE WHEN `index` = 0 AND kind <> 'Damaged' THEN 1 ELSE 0 END) AS entries,
      min(CASE WHEN kind <> 'Damaged' THEN term END) AS first_term, max(term) AS last_term
    FROM {events} AS events LEFT JOIN {stretches} AS stretches
      ON line = xxhash64(xxhash64(store, shard), queue)
      AND sequence >= from_sequence AND sequence < to_sequence
    GROUP BY store, shard, queue, coalesce(nth, 0)
"""

_STORES: Final = """
    SELECT store, min(shard) AS shard, min(first_entry) AS first_entry,
      max(last_entry) AS last_entry, sum(entries) AS entries, sum(events) AS events,
      1 + max(last_term) - min(first_term) AS terms
    FROM {tally} GROUP BY store
"""

# What each message's state was before each of its events. The hint has rows travel before the
# columns for the window are made of them.
_LIVES: Final = """
    WITH told AS (
      SELECT /*+ REPARTITION(message) */ xxhash64(store, shard) AS home, message, sequence, kind,
        at_ms, queue, epoch, dead, coalesce(deadline_ms, visible_at_ms) AS until_ms, expires_at_ms
      FROM {events} WHERE message IS NOT NULL AND kind <> 'Carried'
    ), seen AS (
      SELECT *,
        last_value(CASE WHEN kind IN ('Pushed', 'Released')
            THEN if(until_ms IS NULL, 'visible', 'delayed')
          WHEN kind IN ('DelayEnded', 'ClaimExpired', 'Moved') THEN 'visible'
          WHEN kind IN ('Claimed', 'Extended') THEN 'in flight'
          WHEN kind IN ('Deleted', 'Expired', 'Lost') THEN 'gone' END)
          IGNORE NULLS OVER earlier AS state,
        last_value(CASE WHEN kind = 'Claimed' THEN epoch END) IGNORE NULLS OVER earlier
          AS current_epoch,
        last_value(CASE WHEN kind IN ('Pushed', 'Claimed', 'Extended', 'Released')
          THEN coalesce(until_ms, 0) END) IGNORE NULLS OVER earlier AS due_ms,
        last_value(CASE WHEN kind = 'Pushed' THEN coalesce(expires_at_ms, 0)
          WHEN kind = 'Moved' THEN 0 END) IGNORE NULLS OVER earlier AS expires_ms,
        last_value(CASE WHEN kind IN ('Pushed', 'Moved') THEN sequence END)
          IGNORE NULLS OVER earlier AS entered
      FROM told
      WINDOW earlier AS (PARTITION BY message, home ORDER BY sequence
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
    )
    SELECT *, coalesce(current_epoch, 0) - coalesce(
      last_value(CASE WHEN kind = 'Moved' THEN coalesce(current_epoch, 0) END)
        IGNORE NULLS OVER earlier, 0) AS receives
    FROM seen
    WINDOW earlier AS (PARTITION BY message, home ORDER BY sequence
      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
"""

_BY_MESSAGE: Final = f"""
    WITH lives AS ({_LIVES}), judged AS (
      SELECT lives.*, max_receives, CASE
        WHEN kind <> 'Pushed' AND state IS NULL THEN 'pushed first'
        WHEN kind = 'Pushed' AND state IS NOT NULL THEN 'pushed once'
        WHEN state = 'gone' OR emptied > entered THEN 'nothing after the end'
        WHEN kind = 'Claimed' AND state = 'in flight' THEN 'one holder'
        WHEN kind = 'Claimed' AND state = 'delayed' THEN 'claim of the visible'
        WHEN kind = 'Claimed' AND entered IS NOT NULL
          AND epoch <> coalesce(current_epoch, 0) + 1 THEN 'epochs rise'
        WHEN kind = 'Claimed' AND entered IS NOT NULL AND strict
          AND receives >= max_receives THEN 'dead letter after N'
        WHEN kind IN ('Deleted', 'Released', 'Lost')
          AND (state <> 'in flight' OR epoch <> current_epoch) THEN 'current claim only'
        -- A latecomer may take its last claim up again while nobody else has the message.
        WHEN kind = 'Extended'
          AND (state = 'delayed' OR epoch <> current_epoch) THEN 'current claim only'
        WHEN kind = 'ClaimExpired'
          AND (state <> 'in flight' OR epoch <> current_epoch) THEN 'expiry of the current claim'
        WHEN kind = 'ClaimExpired' AND at_ms < due_ms THEN 'expiry after the deadline'
        WHEN kind = 'DelayEnded'
          AND (state <> 'delayed' OR at_ms < due_ms) THEN 'delay in full'
        WHEN kind = 'Expired' AND (state = 'in flight' OR at_ms < expires_ms)
          THEN 'expired when due'
        WHEN kind = 'Moved' AND state <> 'visible' THEN 'move of the visible'
        WHEN kind = 'Moved' AND dead AND entered IS NOT NULL
          AND (max_receives IS NULL OR receives < max_receives
            OR (strict AND receives > max_receives)) THEN 'dead letter after N'
        END AS `check`
      FROM lives LEFT JOIN {{stretches}} AS stretches
        ON line = xxhash64(home, queue) AND sequence >= from_sequence AND sequence < to_sequence
    )
    SELECT `check`, home, message, queue, sequence, at_ms,
      concat(kind, coalesce(' by claim ' || CAST(epoch AS string), ''), ' of a message that ',
        CASE WHEN state IS NULL THEN 'was never pushed'
          WHEN `check` = 'nothing after the end' THEN 'was gone'
          ELSE concat('was ', state,
            coalesce(', claim ' || CAST(current_epoch AS string), '')) END,
        CASE `check` WHEN 'expiry after the deadline'
            THEN concat(', ', CAST(due_ms - at_ms AS string), ' ms before its deadline')
          WHEN 'dead letter after N' THEN concat(', pulled ', CAST(receives AS string),
            ' times here where ', coalesce(CAST(max_receives AS string), 'no number'),
            ' is the limit')
          ELSE '' END) AS detail
    FROM judged WHERE `check` IS NOT NULL
"""

_DEDUP: Final = f"""
    WITH named AS (
      SELECT xxhash64(store, shard) AS home, queue, dedup_id, `group`, sequence, at_ms, message
      FROM {{events}} WHERE kind = 'Pushed' AND dedup_id IS NOT NULL
    ), beside AS (
      -- A FIFO queue that was purged has forgotten what it was given before.
      SELECT named.*, lag(at_ms) OVER same AS earlier_ms, lag(message) OVER same AS first
      FROM named LEFT JOIN {{stretches}} AS stretches ON line = xxhash64(home, queue)
        AND sequence >= from_sequence AND sequence < to_sequence
      WINDOW same AS (PARTITION BY dedup_id, queue, home, CASE WHEN fifo THEN nth ELSE 0 END,
        CASE WHEN dedup_per_group THEN coalesce(`group`, '') ELSE '' END ORDER BY sequence)
    )
    SELECT 'one message per dedup id' AS `check`, home, message, queue, sequence, at_ms,
      concat('the dedup id ', dedup_id, ' made message ', CAST(first AS string), ' ',
        CAST(at_ms - earlier_ms AS string), ' ms before') AS detail
    FROM beside WHERE at_ms < earlier_ms + {DEDUP_WINDOW_MS}
"""

# Of FIFO queues alone: where in the order each message stood, and since when.
_LINES: Final = """
    WITH told AS (
      SELECT xxhash64(store, shard) AS home, message, sequence, entry, kind, queue, at_ms,
        to_queue, rank, `group`
      FROM {events} WHERE message IS NOT NULL AND kind <> 'Carried'
    ), lined AS (
      SELECT told.* FROM told JOIN {queues} AS queues
        ON line = xxhash64(told.home, told.queue) WHERE fifo
    )
    SELECT *,
      last_value(CASE WHEN kind = 'Pushed' THEN message WHEN kind = 'Moved' THEN rank END)
        IGNORE NULLS OVER earlier AS place,
      last_value(CASE WHEN kind IN ('Pushed', 'Moved') THEN sequence END)
        IGNORE NULLS OVER earlier AS entered,
      last_value(`group`) IGNORE NULLS OVER earlier AS of_group
    FROM lined
    WINDOW earlier AS (PARTITION BY message, home ORDER BY sequence
      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
"""

_GROUPS: Final = """
    WITH ways AS (
      SELECT home, message, entered, max(sequence) AS last_sequence,
        min(CASE WHEN kind IN ('Deleted', 'Expired', 'Lost', 'Moved') THEN sequence END) AS left_at
      FROM {lines} WHERE entered IS NOT NULL GROUP BY home, message, entered
    ), arrivals AS (
      SELECT home, message, sequence AS entered, coalesce(to_queue, queue) AS queue,
        coalesce(rank, message) AS place, coalesce(`group`, of_group) AS of_group
      FROM {lines} WHERE kind IN ('Pushed', 'Moved')
    ), stays AS (
      SELECT arrivals.*,
        coalesce(left_at, to_sequence, 9223372036854775807) AS left_at
      FROM arrivals
      LEFT JOIN ways ON ways.home = arrivals.home AND ways.message = arrivals.message
        AND ways.entered = arrivals.entered
      LEFT JOIN {emptied} AS emptied ON line = xxhash64(arrivals.home, arrivals.queue)
        AND coalesce(last_sequence, arrivals.entered) >= from_sequence
        AND coalesce(last_sequence, arrivals.entered) < to_sequence
    ), behind AS (
      SELECT home, message, entered, max(left_at) OVER (
        PARTITION BY home, queue, of_group ORDER BY place
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS free_from
      FROM stays
    ), claims AS (
      SELECT told.*, free_from, lag(place) OVER (
        PARTITION BY told.home, queue, of_group, entry ORDER BY sequence) AS place_before
      FROM {lines} AS told JOIN behind ON behind.home = told.home
        AND behind.message = told.message AND behind.entered = told.entered
      WHERE kind = 'Claimed'
    )
    SELECT 'order in the group' AS `check`, home, message, queue, sequence, at_ms,
      concat('claimed before an earlier message of the group ', of_group, ' had left') AS detail
    FROM claims
    WHERE (place_before IS NULL AND sequence < free_from) OR place < place_before
"""

# The times between two emptyings of a queue.
_EMPTIED: Final = """
    WITH ends AS (
      SELECT line, 0 AS sequence FROM {queues}
      UNION ALL
      SELECT xxhash64(home, queue), sequence FROM {marks}
      WHERE kind IN ('QueuePurged', 'QueueRemoved')
    )
    SELECT line, sequence AS from_sequence, coalesce(lead(sequence) OVER (
      PARTITION BY line ORDER BY sequence), 9223372036854775807) AS to_sequence
    FROM ends
"""

_ARRIVED: Final = """
    SELECT store, shard, to_queue AS queue, coalesce(nth, 0) AS nth, count(*) AS held
    FROM {events} LEFT JOIN {stretches} AS stretches
      ON line = xxhash64(xxhash64(store, shard), to_queue)
      AND sequence >= from_sequence AND sequence < to_sequence
    WHERE kind = 'Moved' GROUP BY store, shard, to_queue, coalesce(nth, 0)
"""

# What a queue held in each time between two emptyings, and what was said of it when that ended.
_LOST: Final = """
    WITH held AS (
      SELECT store, shard, queue, nth, sum(held) AS held FROM (
        SELECT store, shard, queue, nth, held FROM {tally}
        UNION ALL SELECT store, shard, queue, nth, held FROM {arrived}) AS changes
      GROUP BY store, shard, queue, nth
    ), said AS (
      SELECT store, shard, queue, sequence, kind, count, row_number() OVER (
        PARTITION BY home, queue ORDER BY sequence) - 1 AS nth
      FROM {marks} WHERE kind IN ('QueuePurged', 'QueueRemoved')
    ), met AS (
      SELECT coalesce(held.store, said.store) AS store, coalesce(held.shard, said.shard) AS shard,
        coalesce(held.queue, said.queue) AS queue, coalesce(held, 0) AS held, sequence, kind, count
      FROM held FULL JOIN said ON held.store = said.store AND held.shard = said.shard
        AND held.queue = said.queue AND held.nth = said.nth
    )
    SELECT 'nothing lost' AS `check`, xxhash64(met.store, met.shard) AS home,
      CAST(NULL AS bigint) AS message, met.queue AS queue, coalesce(sequence, 0) AS sequence,
      CAST(NULL AS bigint) AS at_ms,
      CASE WHEN kind IS NULL AND counted IS NULL
          THEN concat(CAST(-held AS string), ' more messages left the queue than came')
        WHEN kind IS NULL THEN concat('the engine holds ', CAST(counted AS string),
          ', the journal ', CAST(held AS string))
        ELSE concat(kind, ' of ', CAST(count AS string), ' messages where the journal tells of ',
          CAST(held AS string)) END AS detail
    FROM met
    JOIN {stores} AS stores ON stores.store = met.store
    LEFT JOIN {queues} AS queues ON queues.store = met.store AND queues.shard = met.shard
      AND queues.queue = met.queue
    -- A queue that is gone may have left its name to another.
    LEFT JOIN {engine} AS engine ON engine.name = queues.name AND removed = 0
    WHERE first_entry = 1
      AND CASE WHEN kind IS NULL THEN held < 0 OR held <> counted ELSE held <> count END
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
    SELECT 'terms rise' AS `check`, xxhash64(events.store, events.shard) AS home, message, queue,
      sequence, at_ms, concat('an entry of term ', CAST(events.term AS string),
        ' after that term was replaced at entry ', CAST(at_entry AS string)) AS detail
    FROM {events} AS events JOIN replaced ON replaced.store = events.store
      AND replaced.shard = events.shard AND replaced.term = events.term
    WHERE entry > at_entry AND `index` = 0
"""

_GAPS: Final = f"""
    WITH entries AS (
      SELECT store, entry, max(shard) AS shard, max(at_ms) AS at_ms FROM {{events}}
      WHERE kind <> 'Damaged' GROUP BY store, entry
      UNION ALL SELECT store, first_entry - 1, shard, NULL FROM {{stores}}
      UNION ALL SELECT store, last_entry + 1, shard, NULL FROM {{stores}}
    ), steps AS (
      SELECT *, lag(entry) OVER (PARTITION BY store ORDER BY entry) AS previous FROM entries
    ), missing AS (
      SELECT store, shard, previous + 1 AS first, entry - 1 AS last, at_ms
      FROM steps WHERE entry > previous + 1
    ), told AS (
      SELECT store, entry, min_by(damage, `offset`) AS damage, min(`offset`) AS at_byte
      FROM {{events}} WHERE kind = 'Damaged' GROUP BY store, entry
    )
    SELECT 'no gaps' AS `check`, xxhash64(missing.store, shard) AS home,
      CAST(NULL AS bigint) AS message, CAST(NULL AS bigint) AS queue,
      first * {1 << INDEX_BITS} AS sequence, at_ms,
      concat(CASE WHEN first = last THEN concat('entry ', CAST(first AS string), ' is missing')
          ELSE concat('entries ', CAST(first AS string), ' to ', CAST(last AS string),
            ' are missing') END,
        coalesce(' (offset ' || CAST(at_byte AS string) || ': ' || damage || ')', '')) AS detail
    FROM missing LEFT JOIN told ON told.store = missing.store AND told.entry = missing.first
"""

# Findings with their store by name. A journal without its beginning cannot tell what was pushed.
_FOUND: Final = f"""
    WITH homes AS (
      SELECT DISTINCT xxhash64(tally.store, tally.shard) AS home, tally.store, tally.shard,
        stores.first_entry
      FROM {{tally}} AS tally JOIN {{stores}} AS stores ON stores.store = tally.store
    )
    SELECT `check`, store, shard, message, queue, sequence >> {INDEX_BITS} AS entry, sequence,
      at_ms, detail
    FROM {{found}} AS found LEFT JOIN homes ON homes.home = found.home
    WHERE `check` <> 'pushed first' OR first_entry = 1
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


T = TypeVar("T")


class Runner(Protocol[T]):
    """What runs the SQL: Spark, or another engine beside it."""

    def ask(self, query: str, **tables: T) -> T:
        """The rows of a query over these tables, which it names in braces."""
        ...

    def keep(self, table: T, *, small: bool) -> T:
        """The same rows, computed once; `small` if they fit anywhere."""
        ...

    def any(self, table: T, condition: str) -> bool:
        """Whether a row is such."""
        ...


def check_all(runner: Runner[T], events: T, engine: T) -> tuple[T, T]:
    """Every finding: check, store, shard, message, queue, entry, sequence, at_ms, detail.

    `engine` has a row `name, counted` for each queue whose messages the engine has counted.
    Returned beside them: a row a store, with how many events it has.
    """
    ask, keep = runner.ask, runner.keep
    marks = keep(ask(_MARKS, events=events), small=True)
    queues = keep(ask(_QUEUES, marks=marks), small=True)
    stretches = keep(ask(_STRETCHES, marks=marks, queues=queues), small=True)
    tally = keep(ask(_TALLY, events=events, stretches=stretches), small=True)
    stores = keep(ask(_STORES, tally=tally), small=True)
    arrived = ask(_ARRIVED, events=events, stretches=stretches)
    parts = {
        "lives": ask(_BY_MESSAGE, events=events, stretches=stretches),
        "dedup": ask(_DEDUP, events=events, stretches=stretches),
        "lost": ask(
            _LOST, tally=tally, arrived=arrived, marks=marks, stores=stores, queues=queues,
            engine=engine,
        ),
    }  # fmt: skip
    # What these look for takes a pass over everything; one number often says that it is not there.
    if runner.any(stores, "terms > 1"):
        parts["terms"] = ask(_TERMS, events=events)
    if runner.any(stores, "entries <= last_entry - first_entry"):
        parts["gaps"] = ask(_GAPS, events=events, stores=stores)
    if runner.any(queues, "fifo"):
        lines = keep(ask(_LINES, events=events, queues=queues), small=False)
        emptied = ask(_EMPTIED, marks=marks, queues=queues)
        parts["groups"] = ask(_GROUPS, lines=lines, emptied=emptied)
    union = " UNION ALL ".join(f"SELECT * FROM {{{name}}}" for name in parts)
    found = ask(union, **parts)
    return ask(_FOUND, found=found, tally=tally, stores=stores), stores


@dataclass
class _Spark:
    """Spark as a runner; what it keeps goes with `close`."""

    session: "SparkSession"
    kept: "list[DataFrame]" = field(default_factory=list)

    def ask(self, query: str, **tables: "DataFrame") -> "DataFrame":
        given: dict[str, Any] = dict(tables)
        return self.session.sql(query, **given)

    def keep(self, table: "DataFrame", *, small: bool) -> "DataFrame":
        if small:
            # Spark does not know how few rows these are: untold, it sorts all events to join them.
            rows = self.session.createDataFrame(table.collect(), table.schema)
            return rows.hint("broadcast")
        self.kept.append(table.cache())
        return table

    def any(self, table: "DataFrame", condition: str) -> bool:
        return not table.where(condition).isEmpty()

    def close(self) -> None:
        for table in self.kept:
            table.unpersist()


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
    runner = _Spark(spark)
    with our_errors():
        try:
            events = events.select(*[column.split()[0] for column in SCHEMA.split(", ")])
            found, stores = check_all(runner, events, _counted(spark, engine))
            found = runner.keep(found, small=False)
            counts = dict.fromkeys(CHECKS, 0)
            counts |= {
                row["check"]: row["count"] for row in found.groupBy("check").count().collect()
            }
            findings = _shown(spark, events, found, shown_max) if any(counts.values()) else ()
            return Verdict(sum(row["events"] for row in stores.collect()), counts, findings)
        finally:
            runner.close()


def violations(
    spark: "SparkSession", events: "DataFrame", engine: Mapping[str, int] | None = None
) -> "DataFrame":
    """Every finding as a row, see `check_all`."""
    return check_all(_Spark(spark), events, _counted(spark, engine))[0]


def _counted(spark: "SparkSession", engine: Mapping[str, int] | None) -> "DataFrame":
    counted: list[tuple[Any, ...]] = list((engine or {}).items())
    return spark.createDataFrame(counted, "name string, counted bigint")


def _shown(
    spark: "SparkSession", events: "DataFrame", found: "DataFrame", shown_max: int
) -> tuple[Finding, ...]:
    """The first findings of each check, with the events of their messages."""
    first = spark.sql(
        f"""
        SELECT *, if(message IS NULL, NULL, {MESSAGE_ID}) AS message_id FROM (
          SELECT *, row_number() OVER (PARTITION BY check ORDER BY store, sequence) AS nth
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
