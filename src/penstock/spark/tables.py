"""Silver and gold: the tables that follow from the events, each by one query.

A table is a name and a schema; its query is a file below `spark/sql`. `spark.derive` updates them
when `events` has grown.

Tables with rows of single messages, and what messages add to the small tables, are kept in parts:
each part is a range of a shard's message numbers, and one task makes it from the events of these
messages alone (`spark.fold`). The small tables are made from those, without any event.

What a part adds to the small tables is little, and every run reads all of it, so those rows are not
in a file for each part, as the rows of messages are, but together with those of other parts
(`spark.sums`); `of_part` says which part a row is of.

A purge or a removal ends messages without naming them. A queue has few of those, so they are one
array in its row of `queues` (`ends`), and a message's own end is the first of them after its last
event.
"""

from dataclasses import dataclass
from typing import Final

from penstock.spark.queries import load_query
from penstock.spark.schemas import duck_types


@dataclass(frozen=True)
class Derived:
    """A table that follows from others."""

    name: str
    schema: str
    in_parts: bool = False
    directory: str = "tables"
    # The order of the rows in a file: whole numbers, the greatest first or nulls last where a term
    # says so. Its row groups are small: a reader skips those it needs not.
    order: tuple[str, ...] = ()

    @property
    def rows(self) -> str:
        """The SQL of its rows, every column of the type that the schema gives it."""
        return self.rows_of(f"({self.text})")

    @property
    def text(self) -> str:
        """The SQL of its rows as the file has it: perhaps of other types, or with more columns."""
        return load_query(f"{self.directory}/{self.name}")

    def rows_of(self, source: str, *more: str) -> str:
        """The SQL of rows from tables or a query with its columns, in the types of the schema.

        `more` are columns behind those of the schema.
        """
        columns = [f'CAST("{name}" AS {kind}) AS "{name}"' for name, kind in self.types.items()]
        return f"SELECT {', '.join([*columns, *more])} FROM {source}"

    @property
    def types(self) -> dict[str, str]:
        """The names of its columns and their types, as DuckDB calls them."""
        return duck_types(self.schema)

    @property
    def columns(self) -> list[str]:
        """The names of its columns."""
        return list(self.types)


# Every event that names no message: those of queues, and damage. There are few of them.
QUEUE_EVENTS: Final = Derived(
    "queue_events",
    "store string, shard int, term bigint, entry bigint, sequence bigint, offset bigint, "
    "kind string, at_ms bigint, queue bigint, name string, count bigint, before bigint, "
    "extra string, damage string",
)

FOLDS: Final = Derived(
    "folds",
    "store string, shard int, message bigint, events bigint, first_sequence bigint, "
    "last_sequence bigint, until bigint, queue bigint, least_queue bigint, term bigint, "
    "least_term bigint, pushed bigint, claimed bigint, deleted bigint, first_pushed_ms bigint, "
    "pushed_ms bigint, expires_at_ms bigint, claimed_ms bigint, deadline_ms bigint, "
    "deleted_ms bigint, group_hash bigint, dedup_hash bigint, regular boolean",
    in_parts=True,
    directory="audit",
    # Checks look for messages of other parts by their groups and dedup ids, which few have.
    order=("group_hash LAST", "dedup_hash LAST", "until DESC", "message"),
)

IRREGULAR_EVENTS: Final = Derived(
    "irregular_events",
    "store string, shard int, message bigint, sequence bigint, kind string, at_ms bigint, "
    "queue bigint, term bigint, epoch bigint, dead boolean, until_ms bigint, "
    "expires_at_ms bigint, to_queue bigint, rank bigint, group_hash bigint, dedup_hash bigint, "
    "until bigint",
    in_parts=True,
    directory="audit",
    order=("group_hash LAST", "dedup_hash LAST", "until DESC", "message", "sequence"),
)

# The events of the messages in open parts, once more: with new events, an open part is made again
# from these.
OPEN_EVENTS: Final = Derived(
    "open_events",
    "store string, shard int, message bigint, sequence bigint, kind string, at_ms bigint, "
    "queue bigint, term bigint, epoch bigint, deadline_ms bigint, visible_at_ms bigint, "
    "expires_at_ms bigint, priority int, `group` string, dedup_id string, attempt_id string, "
    "holder string, name string, to_queue bigint, rank bigint, dead boolean, body_bytes bigint",
    in_parts=True,
)

QUEUES: Final = Derived(
    "queues",
    "store string, shard int, queue_number bigint, queue string, created_at_ms bigint, "
    "removed_at_ms bigint, fifo boolean, dedup_per_group boolean, visibility_ms bigint, "
    "retention_ms bigint, dead_letter string, max_receives bigint, configured bigint, "
    "ends array<struct<sequence: bigint, at_ms: bigint, kind: string, before: bigint>>",
)

MESSAGES: Final = Derived(
    "messages",
    "store string, shard int, message bigint, message_id string, queue string, "
    "queue_number bigint, held_in string, held_in_number bigint, `group` string, "
    "dedup_id string, priority int, body_bytes bigint, pushed_at_ms bigint, pushed_at timestamp, "
    "visible_at_ms bigint, first_pulled_at_ms bigint, last_pulled_at_ms bigint, claims bigint, "
    "extends bigint, releases bigint, timeouts bigint, moves bigint, dead_letters bigint, "
    "state string, standing string, ended_at_ms bigint, wait_ms bigint, age_ms bigint, "
    "events bigint, last_sequence bigint, dropped boolean",
    in_parts=True,
)

ATTEMPTS: Final = Derived(
    "attempts",
    "store string, shard int, message bigint, message_id string, queue string, "
    "queue_number bigint, epoch bigint, holder string, attempt_id string, started_at_ms bigint, "
    "started_at timestamp, ended_at_ms bigint, ended string, deadline_ms bigint, extends bigint, "
    "hold_ms bigint",
    in_parts=True,
)

PART_MINUTES: Final = Derived(
    "part_minutes",
    "of_part string, store string, shard int, queue_number bigint, minute bigint, "
    "events bigint, entries bigint, bytes bigint, pushes bigint, claims bigint, "
    "deletes bigint, timeouts bigint, messages bigint, in_flight bigint, changes bigint",
    in_parts=True,
)

PART_STATUS: Final = Derived(
    "part_status",
    "of_part string, store string, shard int, queue_number bigint, visible bigint, delayed bigint, "
    "in_flight bigint, messages bigint, stored_bytes bigint, oldest_pushed_at_ms bigint, "
    "purged bigint, unpushed bigint, pushed bigint, deleted bigint, expired bigint, lost bigint, "
    "arrived bigint, left bigint, last_at_ms bigint",
    in_parts=True,
)

LATENCIES: Final = Derived(
    "latencies",
    "of_part string, store string, queue string, measure string, hour bigint, bin int, "
    "samples bigint, max_ms bigint",
    in_parts=True,
)

PART_REDELIVERIES: Final = Derived(
    "part_redeliveries",
    "of_part string, store string, queue string, claims bigint, messages bigint, timeouts bigint, "
    "releases bigint, deleted bigint, dead_letters bigint, dead bigint",
    in_parts=True,
)

PART_GROUPS: Final = Derived(
    "part_groups",
    "of_part string, store string, queue string, `group` string, messages bigint, "
    "stored_bytes bigint, claims bigint, timeouts bigint, dead_letters bigint, live bigint",
    in_parts=True,
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

_DEAD_LETTERS: Final = (
    "store string, shard int, message bigint, message_id string, queue string, "
    "dead_letter_queue string, `group` string, at timestamp, at_ms bigint, claims bigint, "
    "timeouts bigint, releases bigint, last_holder string, state string"
)
PART_DEAD_LETTERS: Final = Derived(
    "part_dead_letters", f"of_part string, {_DEAD_LETTERS}", in_parts=True
)
DEAD_LETTERS: Final = Derived("dead_letters", _DEAD_LETTERS)

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
    directory="audit",
)
BALANCES: Final = Derived(
    "balances",
    "store string, shard int, queue bigint, emptied_before bigint, term bigint, events bigint, "
    "held bigint, held_before bigint, first_entry bigint, last_entry bigint, entries bigint, "
    "folds string, context string",
    in_parts=True,
    directory="audit",
)

# In the order they are made. First those with rows of single messages, which have a file for each
# part.
MESSAGE_TABLES: Final = (FOLDS, IRREGULAR_EVENTS, MESSAGES, ATTEMPTS)
# What parts add to the small tables.
SUMMED_TABLES: Final = (
    PART_MINUTES,
    PART_STATUS,
    LATENCIES,
    PART_REDELIVERIES,
    PART_GROUPS,
    PART_DEAD_LETTERS,
)
PART_TABLES: Final = (*MESSAGE_TABLES, OPEN_EVENTS, *SUMMED_TABLES)
# The slowest first: several are made at once.
WHOLE_TABLES: Final = (
    LATENCY,
    DEPTH,
    DEAD_LETTERS,
    HOT_QUEUES,
    HOT_GROUPS,
    HOT_SHARDS,
    QUEUE_STATUS,
    REDELIVERIES,
    QUEUES,
)
TABLES: Final = (*PART_TABLES, *WHOLE_TABLES)
