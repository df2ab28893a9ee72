"""The checks of the audit, and those of them that are made over a whole lake.

Each step is one query, a file in `spark/sql/audit` whose head says what its columns are. The
journal gives each event its place at the moment it took effect; the checks rely on that order and
on nothing else.

What checks need to know of queues follows from the few events that name no message:

    queue_events ─▶ queue_changes ─▶ known_queues ─▶ periods ─▶ emptyings, contexts

`spark.judge` makes the checks that look at messages, part by part, and counts what each queue was
given and lost (`balances`). From the sum of those follow the checks of whole journals:

    balances, queue_events ─▶ stores, replaced_terms
    these ─▶ balance_findings, term_findings, gap_findings

An event never changes what was found before it: the findings of a part stay right until it gets
new events, or until the settings known of its queues change, which its context shows.

Where entries are missing in the middle of a journal, other findings may follow from that alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

from penstock.spark.duck import DuckConnection, quoted
from penstock.spark.fold import load_events
from penstock.spark.judge import FoundRow, PartVerdict, judge, load_ended
from penstock.spark.part_events import LakePart
from penstock.spark.queries import load_query
from penstock.spark.schemas import arrow_rows
from penstock.spark.tables import (
    BALANCES,
    FOLDS,
    IRREGULAR_EVENTS,
    QUEUE_EVENTS,
)

# What an audit of a journal reads: no bodies.
SCHEMA: Final = (
    "store string, shard int, term bigint, entry bigint, index int, sequence bigint, "
    "offset bigint, kind string, at_ms bigint, queue bigint, message bigint, epoch bigint, "
    "deadline_ms bigint, visible_at_ms bigint, expires_at_ms bigint, priority int, group string, "
    "dedup_id string, attempt_id string, holder string, name string, to_queue bigint, "
    "rank bigint, dead boolean, count bigint, before bigint, body_bytes bigint, extra string, "
    "damage string"
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
    "arrival of the departed": "only a message that departed for another shard arrives there",
    "dead letter after N": "a message is dead-lettered after exactly max_receives claims",
    "one message per dedup id": "a dedup id makes one message within its window",
    "order in the group": "a FIFO queue gives the messages of a group in their order",
    "nothing lost": "what came into a queue left it, or is in it",
    "terms rise": "no entry comes from an owner of the shard that was replaced",
    "no gaps": "every entry is there and whole",
}


class CheckFinding(NamedTuple):
    """One place where a check does not hold, by numbers."""

    check: str
    store: str
    shard: int
    message: int | None
    queue: int | None
    sequence: int
    at_ms: int | None
    detail: str


OF_QUEUES: Final = ("queue_changes", "known_queues", "periods", "emptyings")
OF_STORES: Final = ("stores", "replaced_terms")


def describe_queues(duck: DuckConnection) -> None:
    """Makes the tables of what is known of queues, from `queue_events`."""
    for name in OF_QUEUES:
        duck.table(name, load_query(f"audit/{name}"))


def contexts(duck: DuckConnection, parts: Sequence[tuple[str, str, int, int]]) -> dict[str, str]:
    """The context of each part, given as (name, store, shard, last sequence)."""
    names = ("part", "store", "shard", "last_sequence")
    types = (pa.string(), pa.string(), pa.int32(), pa.int64())
    columns = {
        name: pa.array([part[at] for part in parts], type_)
        for at, (name, type_) in enumerate(zip(names, types, strict=True))
    }
    duck.arrow("parts", pa.table(columns))
    return dict(duck.fetch(load_query("audit/contexts")))


def describe_stores(duck: DuckConnection) -> None:
    """Makes the tables of what is known of journals, from `balances` and `queue_events`."""
    for name in OF_STORES:
        duck.table(name, load_query(f"audit/{name}"))


def find_in_stores(duck: DuckConnection, load_events: Callable[[], None]) -> list[CheckFinding]:
    """Findings about whole journals, from the tables above.

    If a count shows that a pass over all events finds something, `load_events` makes `events`.
    """
    found = duck.fetch(_columns_of("balance_findings"))
    replaced = duck.fetch("""
        SELECT 1 FROM replaced_terms AS replaced JOIN (
          SELECT store, shard, term, last_entry FROM balances
          UNION ALL
          SELECT store, shard, term, entry FROM queue_events WHERE kind <> 'Damaged') AS late
        USING (store, shard, term) WHERE last_entry > at_entry LIMIT 1""")
    gaps = duck.fetch("SELECT 1 FROM stores WHERE entries <= last_entry - first_entry LIMIT 1")
    if replaced or gaps:
        load_events()
    if replaced:
        found += duck.fetch(_columns_of("term_findings"))
    if gaps:
        found += duck.fetch(_columns_of("gap_findings"))
    return [CheckFinding(*row) for row in found]


def _columns_of(step: str) -> str:
    query = load_query(f"audit/{step}")
    return f'SELECT "check", store, shard, message, queue, sequence, at_ms, detail FROM ({query})'


def load_balances(duck: DuckConnection, judged: Sequence[PartVerdict]) -> None:
    """Makes the table `balances` of these parts."""
    rows: list[tuple[Any, ...]] = []
    for each in judged:
        store, shard = shard_of(each.part)
        rows += [(store, shard, *row) for row in each.balances]
    duck.arrow("balances", arrow_rows(BALANCES.schema, rows))


def load_engine(duck: DuckConnection, engine: Mapping[str, int]) -> None:
    """Makes the table `engine`: how many messages each queue holds by the engine's own count."""
    names, counts = pa.array(engine.keys(), pa.string()), pa.array(engine.values(), pa.int64())
    duck.arrow("engine", pa.table({"name": names, "counted": counts}))


def shard_of(part: str) -> tuple[str, int]:
    """The store and the shard of a part."""
    store, shard, _ = part.rsplit("-", 2)
    return store, int(shard)


def check_events(
    duck: DuckConnection, events: str, engine: Mapping[str, int]
) -> tuple[list[CheckFinding], int]:
    """Makes every check in this process, over a table with all events; each shard is one part.

    Returns the findings and how many events there were. `spark.audit` does the same over a lake,
    part by part.
    """
    names = ", ".join(f'"{name}"' for name in QUEUE_EVENTS.columns)
    duck.table("queue_events", f"SELECT {names} FROM {events} WHERE message IS NULL")
    describe_queues(duck)
    for name in ("periods", "emptyings"):
        duck.table(f"all_{name}", f"SELECT * FROM {name}")
    judged = []
    load_ended(duck)
    for store, shard in duck.fetch(f"SELECT DISTINCT store, shard FROM {events}"):
        part = LakePart(store, shard, 0, 1 << 62)
        duck.view("shard_events", f"SELECT * FROM {events} WHERE {part.condition()}")
        load_events(duck, part, "shard_events")
        for each in (FOLDS, IRREGULAR_EVENTS):
            duck.table(each.name, f"SELECT *, 0 AS part_number FROM ({each.rows})")
        for name in ("periods", "emptyings"):
            of_shard = f"store = {quoted(store)} AND shard = {shard}"
            duck.table(name, f"SELECT * FROM all_{name} WHERE {of_shard}")
        judged += judge(duck, [part.name])
    duck.table("periods", "SELECT * FROM all_periods")
    load_balances(duck, judged)
    load_engine(duck, engine)
    describe_stores(duck)
    found = [finding_of(*shard_of(each.part), row) for each in judged for row in each.findings]
    total = int(duck.fetch("SELECT coalesce(sum(events), 0) FROM stores")[0][0])
    of_stores = find_in_stores(duck, lambda: duck.table("events", f"SELECT * FROM {events}"))
    return known_pushes(duck, found) + of_stores, total


def finding_of(store: str, shard: int, row: FoundRow) -> CheckFinding:
    """A finding of a part, with its store and shard."""
    check, message, queue, sequence, at_ms, detail = row
    return CheckFinding(check, store, shard, message, queue, sequence, at_ms, detail)


def known_pushes(duck: DuckConnection, found: Sequence[CheckFinding]) -> list[CheckFinding]:
    """Findings without those of `pushed first` in journals that have lost their beginning."""
    whole = {row[0] for row in duck.fetch("SELECT store FROM stores WHERE first_entry = 1")}
    return [each for each in found if each.check != "pushed first" or each.store in whole]
