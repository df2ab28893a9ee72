"""Silver and gold: the tables that follow from the events, each by one query.

A table is a name, a schema and the tables its query reads, which come before it in `TABLES`; the
query is the file of its name in `spark/sql/tables`. `spark.derive` keeps them level with `events`.

A purge or a removal ends messages without naming them. A queue has few of those, so they are one
array in its row of `queues` (`ends`), and a message's own end is the first of them after its last
event.

Large groupings name the most selective column first: Spark sorts by them in that order, and the
text of a store's identity, which is the same in every row, is the most expensive to compare.
"""

import re
from dataclasses import dataclass
from typing import Final

from penstock.spark.queries import load_query

# A name and a type; the commas inside a nested type are not those between columns.
_COLUMN: Final = re.compile(r"`?(\w+)`? (?:array<.*>|\w+)(?:, |$)")


@dataclass(frozen=True)
class Derived:
    """A table that follows from others."""

    name: str
    schema: str
    inputs: tuple[str, ...]
    # Only of a table in parts: the condition on its rows that a purge or removal changes; `gone`
    # is a row of the queue that was emptied.
    swept: str | None = None

    @property
    def query(self) -> str:
        """The SQL, which names its inputs in braces."""
        return load_query(f"tables/{self.name}")

    @property
    def columns(self) -> list[str]:
        """The names of its columns."""
        return _COLUMN.findall(self.schema)


QUEUES: Final = Derived(
    "queues",
    "store string, shard int, queue_number bigint, queue string, created_at_ms bigint, "
    "removed_at_ms bigint, fifo boolean, dedup_per_group boolean, visibility_ms bigint, "
    "retention_ms bigint, dead_letter string, max_receives bigint, configured bigint, "
    "ends array<struct<sequence: bigint, at_ms: bigint, kind: string, before: bigint>>",
    ("events",),
)

MESSAGES: Final = Derived(
    "messages",
    "store string, shard int, message bigint, message_id string, queue string, "
    "queue_number bigint, held_in string, held_in_number bigint, `group` string, "
    "dedup_id string, priority int, body_bytes bigint, pushed_at_ms bigint, pushed_at timestamp, "
    "visible_at_ms bigint, first_pulled_at_ms bigint, last_pulled_at_ms bigint, claims bigint, "
    "extends bigint, releases bigint, timeouts bigint, moves bigint, dead_letters bigint, "
    "state string, standing string, ended_at_ms bigint, wait_ms bigint, age_ms bigint, "
    "events bigint, last_sequence bigint",
    ("events", "queues"),
    swept="standing IS NOT NULL AND held_in_number = gone.queue",
)

ATTEMPTS: Final = Derived(
    "attempts",
    "store string, shard int, message bigint, message_id string, queue string, "
    "queue_number bigint, epoch bigint, holder string, attempt_id string, started_at_ms bigint, "
    "started_at timestamp, ended_at_ms bigint, ended string, deadline_ms bigint, extends bigint, "
    "hold_ms bigint",
    ("events", "queues"),
    swept="ended = 'open' AND queue_number = gone.queue",
)

QUEUE_STATUS: Final = Derived(
    "queue_status",
    "store string, shard int, queue string, queue_number bigint, as_of_ms bigint, "
    "visible bigint, delayed bigint, in_flight bigint, messages bigint, stored_bytes bigint, "
    "oldest_pushed_at_ms bigint, oldest_age_ms bigint, pushed bigint, deleted bigint, "
    "expired bigint, purged bigint, lost bigint, arrived bigint, left bigint",
    ("events", "queues", "messages"),
)

DEPTH: Final = Derived(
    "depth",
    "store string, shard int, queue string, queue_number bigint, minute timestamp, "
    "messages bigint, in_flight bigint, pushed bigint, deleted bigint",
    ("events", "queues", "messages", "attempts"),
)

LATENCY: Final = Derived(
    "latency",
    "store string, queue string, measure string, samples bigint, p50_ms bigint, p90_ms bigint, "
    "p99_ms bigint, p999_ms bigint, max_ms bigint",
    ("messages", "attempts"),
)

REDELIVERIES: Final = Derived(
    "redeliveries",
    "store string, queue string, claims bigint, messages bigint, timeouts bigint, "
    "releases bigint, deleted bigint, dead_letters bigint",
    ("messages",),
)

DEAD_LETTERS: Final = Derived(
    "dead_letters",
    "store string, shard int, message bigint, message_id string, queue string, "
    "dead_letter_queue string, `group` string, at timestamp, at_ms bigint, claims bigint, "
    "timeouts bigint, releases bigint, last_holder string, state string",
    ("events", "queues", "messages", "attempts"),
)

HOT_QUEUES: Final = Derived(
    "hot_queues",
    "store string, shard int, queue string, queue_number bigint, minute timestamp, "
    "events bigint, pushes bigint, claims bigint, deletes bigint, timeouts bigint",
    ("events", "queues"),
)

HOT_GROUPS: Final = Derived(
    "hot_groups",
    "store string, queue string, `group` string, messages bigint, stored_bytes bigint, "
    "claims bigint, timeouts bigint, dead_letters bigint, live bigint",
    ("messages",),
)

HOT_SHARDS: Final = Derived(
    "hot_shards",
    "store string, shard int, minute timestamp, events bigint, entries bigint, pushes bigint, "
    "bytes bigint",
    ("events",),
)

# In the order they are made: each reads only those before it.
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
