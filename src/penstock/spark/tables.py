"""The tables that follow from the events: their names and schemas.

The query of a table is the file of its name below `spark/sql`; `spark.update` runs it when `events`
has grown. The tables with rows of messages are in parts, ranges of message numbers, and so is
`rollup`: what the messages of a part add to each small table. A part is made again from the events
of its messages alone; the small tables are the sums of `rollup` over all parts.

    events ─▶ messages ─▶ irregular_events ─▶ attempts, dead_letters ─▶ rollup ─▶ the small tables
"""

from dataclasses import dataclass
from typing import Final

from penstock.spark.queries import load_query
from penstock.spark.schemas import columns_of


@dataclass(frozen=True)
class Derived:
    """A table that follows from others."""

    name: str
    schema: str
    in_parts: bool = False

    @property
    def query(self) -> str:
        """The SQL of its rows."""
        return load_query(self.name)

    @property
    def columns(self) -> list[str]:
        """The names of its columns."""
        return list(columns_of(self.schema))


# Every event that names no message: those of queues, and damage. There are few of them.
QUEUE_EVENTS: Final = Derived(
    "queue_events",
    "store string, shard int, term bigint, entry bigint, sequence bigint, offset bigint, "
    "kind string, at_ms bigint, queue bigint, name string, count bigint, before bigint, "
    "extra string, damage string",
)

MESSAGES: Final = Derived(
    "messages",
    "store string, shard int, message bigint, message_id string, queue string, "
    "queue_number bigint, held_in string, held_in_number bigint, `group` string, "
    "dedup_id string, priority int, body_bytes bigint, pushed_at_ms bigint, pushed_at timestamp, "
    "visible_at_ms bigint, first_pulled_at_ms bigint, last_pulled_at_ms bigint, claims bigint, "
    "extends bigint, releases bigint, timeouts bigint, moves bigint, dead_letters bigint, "
    "state string, standing string, ended_at_ms bigint, wait_ms bigint, age_ms bigint, "
    "events bigint, last_sequence bigint, dropped boolean, key bigint, regular boolean, "
    "term bigint, pushed bigint, claimed bigint, deleted bigint, expires_at_ms bigint, "
    "deadline_ms bigint, holder string, attempt_id string",
    in_parts=True,
)

IRREGULAR_EVENTS: Final = Derived(
    "irregular_events",
    "key bigint, sequence bigint, code tinyint, at_ms bigint, queue bigint, term bigint, "
    "epoch bigint, deadline_ms bigint, visible_at_ms bigint, expires_at_ms bigint, "
    "`group` string, dedup_id string, attempt_id string, holder string, name string, "
    "to_queue bigint, rank bigint, dead boolean, body_bytes bigint",
    in_parts=True,
)

ATTEMPTS: Final = Derived(
    "attempts",
    "store string, shard int, message bigint, message_id string, queue string, "
    "queue_number bigint, epoch bigint, holder string, attempt_id string, started_at_ms bigint, "
    "started_at timestamp, ended_at_ms bigint, ended string, deadline_ms bigint, extends bigint, "
    "hold_ms bigint, key bigint",
    in_parts=True,
)

DEAD_LETTERS: Final = Derived(
    "dead_letters",
    "store string, shard int, message bigint, message_id string, queue string, "
    "dead_letter_queue string, `group` string, at timestamp, at_ms bigint, claims bigint, "
    "timeouts bigint, releases bigint, last_holder string, state string, key bigint",
    in_parts=True,
)

# What is added up of a part: of which queue, group and time, by `what`. The queries below
# `sql/rollup` each give some of these columns.
ROLLUP_KEYS: Final = ("what", "queue_number", "group", "at", "bin")
ROLLUP_MOST: Final = ("max_ms", "last_at_ms")
ROLLUP_LEAST: Final = ("oldest_pushed_at_ms",)
ROLLUP: Final = Derived(
    "rollup",
    "what string, queue_number bigint, `group` string, at bigint, bin int, events bigint, "
    "entries bigint, bytes bigint, pushes bigint, claims bigint, deletes bigint, timeouts bigint, "
    "releases bigint, expired bigint, lost bigint, went bigint, came bigint, messages bigint, "
    "in_flight bigint, changes bigint, visible bigint, delayed bigint, live bigint, "
    "purged bigint, unpushed bigint, dead_letters bigint, dead bigint, samples bigint, "
    "max_ms bigint, last_at_ms bigint, oldest_pushed_at_ms bigint",
    in_parts=True,
)
ROLLUP_SUMS: Final = tuple(
    name for name in ROLLUP.columns if name not in (*ROLLUP_KEYS, *ROLLUP_MOST, *ROLLUP_LEAST)
)

QUEUES: Final = Derived(
    "queues",
    "store string, shard int, queue_number bigint, queue string, created_at_ms bigint, "
    "removed_at_ms bigint, fifo boolean, dedup_per_group boolean, visibility_ms bigint, "
    "retention_ms bigint, dead_letter string, max_receives bigint, configured bigint, "
    "ends array<struct<sequence: bigint, at_ms: bigint, kind: string, before: bigint>>",
)

QUEUE_STATUS: Final = Derived(
    "queue_status",
    "store string, shard int, queue string, queue_number bigint, as_of_ms bigint, "
    "visible bigint, delayed bigint, in_flight bigint, messages bigint, stored_bytes bigint, "
    "oldest_pushed_at_ms bigint, oldest_age_ms bigint, pushed bigint, deleted bigint, "
    "expired bigint, purged bigint, lost bigint, arrived bigint, left bigint",
)

DEPTH: Final = Derived(
    "depth",
    "store string, shard int, queue string, queue_number bigint, minute timestamp, "
    "messages bigint, in_flight bigint, pushed bigint, deleted bigint",
)

LATENCIES: Final = Derived(
    "latencies",
    "store string, queue string, measure string, hour bigint, bin int, samples bigint, "
    "max_ms bigint",
)

LATENCY: Final = Derived(
    "latency",
    "store string, queue string, measure string, samples bigint, p50_ms bigint, p90_ms bigint, "
    "p99_ms bigint, p999_ms bigint, max_ms bigint",
)

REDELIVERIES: Final = Derived(
    "redeliveries",
    "store string, queue string, claims bigint, messages bigint, timeouts bigint, "
    "releases bigint, deleted bigint, dead_letters bigint, dead bigint",
)

HOT_QUEUES: Final = Derived(
    "hot_queues",
    "store string, shard int, queue string, queue_number bigint, minute timestamp, "
    "events bigint, pushes bigint, claims bigint, deletes bigint, timeouts bigint",
)

HOT_GROUPS: Final = Derived(
    "hot_groups",
    "store string, queue string, `group` string, messages bigint, stored_bytes bigint, "
    "claims bigint, timeouts bigint, dead_letters bigint, live bigint",
)

HOT_SHARDS: Final = Derived(
    "hot_shards",
    "store string, shard int, minute timestamp, events bigint, entries bigint, pushes bigint, "
    "bytes bigint",
)

# What an audit found, and what the events of each part come to.
FINDINGS: Final = Derived(
    "findings",
    "check string, store string, shard int, message bigint, queue bigint, sequence bigint, "
    "at_ms bigint, detail string",
    in_parts=True,
)
BALANCES: Final = Derived(
    "balances",
    "store string, shard int, queue bigint, emptied_before bigint, term bigint, events bigint, "
    "held bigint, held_before bigint, first_entry bigint, last_entry bigint, entries bigint, "
    "judged string",
    in_parts=True,
)

# In the order they are made.
PART_TABLES: Final = (MESSAGES, IRREGULAR_EVENTS, ATTEMPTS, DEAD_LETTERS, ROLLUP)
# `queues` is last: what a run compares with is the one that the run before made.
WHOLE_TABLES: Final = (
    QUEUE_STATUS, DEPTH, LATENCY, LATENCIES, REDELIVERIES, HOT_QUEUES, HOT_GROUPS, HOT_SHARDS,
    QUEUES,
)  # fmt: skip
TABLES: Final = (*PART_TABLES, *WHOLE_TABLES)
