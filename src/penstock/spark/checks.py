"""The checks of the audit, and the order in which their queries run.

Each step is one query, a file in `spark/sql/audit` whose head says what its columns are. The
journal gives each event its place at the moment it took effect; the checks rely on that order and
on nothing else.

Most messages have a plain life: pushed, claimed once, deleted, all in one queue and one term. One
aggregate a message (`folded`) finds these, by the places of the three events and by there being no
other event; the order in which events are read does not matter. A plain life cannot break a check
of one message, and its row holds all that the other checks need. The events of all other messages
go through one window pass (`states`), which gives the message's state before each event.

    events ─┬─▶ queue_events ─▶ queue_changes ─▶ queues ─▶ periods
            ├─▶ folded ─▶ messages ─▶ irregular
            └─▶ irregular_events ─▶ states ─▶ message_findings
    irregular_events, messages, queue_events ─▶ balances ─▶ stores
    these ─▶ dedup_findings, balance_findings, order_findings, term_findings, gap_findings

Rows that are shuffled are narrow: a store and shard are one number, their hash (`shard_key`), until
a finding is shown; with a queue they are another (`queue_key`). Queues are few and are joined as
rows by it. The SQL keeps to what other engines understand too: `Runner` is what it needs of one.

Where entries are missing in the middle of a journal, other findings may follow from that alone.
"""

from typing import Final, Protocol, TypeVar

from penstock.spark.queries import load_query

# What an audit reads: no bodies.
SCHEMA: Final = (
    "store string, shard int, term bigint, entry bigint, index int, sequence bigint, "
    "offset bigint, kind string, at_ms bigint, queue bigint, message bigint, epoch bigint, "
    "deadline_ms bigint, visible_at_ms bigint, expires_at_ms bigint, group string, "
    "dedup_id string, holder string, name string, to_queue bigint, rank bigint, dead boolean, "
    "count bigint, extra string, damage string"
)
CHECKS: Final = {
    "pushed first": "a message is pushed before anything else happens to it",
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

T = TypeVar("T")


class Runner(Protocol[T]):
    """What runs the SQL: Spark, or another engine beside it."""

    def ask(self, query: str, **tables: T) -> T:
        """The rows of a query over these tables, which it names in braces."""
        ...

    def keep(self, table: T, *, small: bool) -> T:
        """The same rows, computed once; `small` if they fit anywhere."""
        ...

    def send(self, table: T) -> T:
        """The same rows, of a few numbers each, for all events to be looked up in."""
        ...

    def any(self, table: T, condition: str) -> bool:
        """Whether a row is such."""
        ...


STEPS: Final = {
    name: load_query(f"audit/{name}")
    for name in (
        "queue_events", "queue_changes", "queues", "periods", "emptyings", "folded", "messages",
        "irregular", "irregular_events", "balances", "shards", "unknown_shards", "stores", "states",
        "message_findings", "dedup_findings", "balance_findings", "term_findings", "gap_findings",
        "fifo_events", "order_findings", "findings",
    )
}  # fmt: skip


def check_all(runner: Runner[T], events: T, engine: T) -> tuple[T, T]:
    """Every finding, as `findings.sql` describes it, and beside it the rows of `stores`.

    `engine` has a row `name, counted` for each queue whose messages the engine has counted.
    """
    tables: dict[str, T] = {"events": events, "engine": engine}

    def step(name: str, *inputs: str) -> T:
        tables[name] = runner.ask(STEPS[name], **{each: tables[each] for each in inputs})
        return tables[name]

    def kept(name: str, *inputs: str, small: bool = True) -> T:
        tables[name] = runner.keep(step(name, *inputs), small=small)
        return tables[name]

    kept("queue_events", "events")
    step("queue_changes", "queue_events")
    kept("queues", "queue_changes")
    kept("periods", "queue_changes", "queues")
    step("folded", "events")
    kept("messages", "folded", "periods", small=False)
    tables["irregular"] = runner.send(step("irregular", "messages"))
    kept("irregular_events", "events", "irregular", small=False)
    kept("balances", "irregular_events", "queue_events", "periods", "messages")
    # Nearly every shard has events of queues, and those are few to look through.
    tables["shards"] = runner.keep(
        runner.ask(STEPS["shards"], events=tables["queue_events"]), small=True
    )
    if runner.any(step("unknown_shards", "balances", "shards"), "true"):
        kept("shards", "events")
    kept("stores", "balances", "shards")
    step("states", "irregular_events")
    parts = [
        step("message_findings", "states", "periods"),
        step("dedup_findings", "irregular_events", "periods", "messages"),
        step(
            "balance_findings", "balances", "queue_changes", "shards", "stores", "queues", "engine"
        ),
    ]
    # These take a pass over everything, and a number that is known often shows they find nothing.
    if runner.any(tables["stores"], "terms > 1"):
        parts.append(step("term_findings", "events"))
    if runner.any(tables["stores"], "entries <= last_entry - first_entry"):
        parts.append(step("gap_findings", "events", "stores"))
    if runner.any(tables["queues"], "fifo"):
        kept("fifo_events", "irregular_events", "queues", small=False)
        kept("emptyings", "queue_changes", "queues")
        parts.append(step("order_findings", "fifo_events", "emptyings", "messages"))
    named = {f"part_{number}": part for number, part in enumerate(parts)}
    union = " UNION ALL ".join(f"SELECT * FROM {{{name}}}" for name in named)
    tables["found"] = runner.ask(union, **named)
    return step("findings", "found", "shards", "stores"), tables["stores"]
