"""Lakes for tests: events, given or made at random, put into a lake as runs would do it."""

import random
from itertools import pairwise
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from penstock.spark.blocks import INDEX_BITS, KIND_NAMES
from penstock.spark.bronze import JOURNALS, events_table, journals_table, lag
from penstock.spark.lake import Lake, Table
from penstock.spark.queries import MESSAGE_BITS
from penstock.spark.schemas import arrow_schema
from penstock.spark.selection import SCHEMA
from penstock.spark.tables import FINDINGS
from penstock.spark.update import table_of
from tests.server.conftest import until

T = 1_700_000_000_000
STORE = "a" * 32
LIVES = 200
ARROW = arrow_schema(SCHEMA)
QUEUES = {1: '{"max_receives": 2, "dead_letter": "q2"}', 2: "{}", 3: '{"fifo": true}'}
ENDS = ("Deleted", "Released", "ClaimExpired", "Lost", "Expired", "Moved", "Extended")


class Stopped(Exception):
    """Simulates a kill: nothing after it runs."""


class NoSpark(Exception):
    """Spark was to be started."""


def no_spark():
    raise NoSpark


def as_events(rows: list[dict[str, Any]]) -> pa.Table:
    """These rows with every column of `events`."""
    rows = [{**row, "code": KIND_NAMES.index(row["kind"])} for row in rows]
    return pa.table(
        {
            name: pa.array([row.get(name) for row in rows], kind)
            for name, kind in zip(ARROW.names, ARROW.types, strict=True)
        },
        ARROW,
    )


def stored_rows(table: Table) -> list[dict[str, Any]]:
    """The rows of a table that has been made, read without Spark."""
    delta = table.delta()
    assert delta is not None
    found: list[dict[str, Any]] = delta.to_pyarrow_table().to_pylist()
    return found


def a_life(rng, message):
    """The events of a message, mostly valid and in order; some at random places."""
    queue = rng.choice(list(QUEUES))
    life = [
        {"kind": "Pushed", "queue": queue, "group": rng.choice((None, "g", "h")),
         "dedup_id": rng.choice((None, None, f"d{rng.randrange(LIVES)}")),
         "visible_at_ms": T + 5 if rng.random() < 0.1 else None},
        {"kind": "Claimed", "queue": queue, "epoch": 1, "deadline_ms": T + 30},
        {"kind": "Deleted", "queue": queue, "epoch": 1},
    ][: rng.choice((1, 2, 3, 3, 3))]  # fmt: skip
    chance = rng.random()
    if chance < 0.1:
        rng.shuffle(life)
    elif chance < 0.2:
        life[rng.randrange(len(life))] |= {"epoch": rng.randrange(3)}
    elif chance < 0.3:
        life[rng.randrange(len(life))] |= {"queue": rng.choice(list(QUEUES))}
    elif chance < 0.4:
        life.insert(rng.randrange(len(life) + 1), dict(rng.choice(life)))
    elif chance < 0.5:
        more = {
            "kind": rng.choice(ENDS),
            "queue": queue,
            "epoch": 1,
            "to_queue": 2,
            "rank": message,
        }
        life.insert(rng.randrange(len(life) + 1), more | {"dead": rng.random() < 0.5})
    elif chance < 0.55:
        del life[0]
    elif chance < 0.6:
        life.append({"kind": "Carried", "queue": queue})
    elif chance < 0.65:
        life[-1] |= {"term": 2}
    return [{"message": message, **event} for event in life]


def journal(seed, store=STORE, shard=0, lives=LIVES, *, changes=False):
    """Lives that overlap, with faults of every kind, among them queues that are emptied."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = [
        {"kind": "QueueCreated", "queue": queue, "name": f"q{queue}",
         "extra": f'{{"settings": {settings}}}'}
        for queue, settings in QUEUES.items()
    ]  # fmt: skip
    open_lives: list[list[dict[str, Any]]] = []
    for message in range(1, lives):
        open_lives.append(a_life(rng, message))
        while open_lives and (len(open_lives) > 20 or message == lives - 1):
            life = rng.choice(open_lives)
            if life:
                rows.append(life.pop(0))
            else:
                open_lives.remove(life)
        if message % (lives // 6) == 0:
            rows.append({"kind": "QueuePurged", "queue": rng.choice(list(QUEUES)), "count": 1})
            stated = rng.choice(list(QUEUES))
            rows.append({"kind": "QueueStated", "queue": stated, "name": f"q{stated}",
                         "extra": f'{{"settings": {QUEUES[stated]}}}'})  # fmt: skip
        if changes and message == 2 * lives // 3:
            settings = '{"max_receives": 3, "dead_letter": "q2"}'
            rows.append({"kind": "QueueConfigured", "queue": 1,
                         "extra": f'{{"settings": {settings}}}'})  # fmt: skip
    for at, row in enumerate(rows):
        entry, index = divmod(at, 2)
        place = {"entry": entry + 1, "index": index, "sequence": (entry + 1 << INDEX_BITS) + index}
        place |= {"store": store, "shard": shard, "term": 1, "at_ms": T + at}
        # Each entry is at an offset of its own.
        place |= {"offset": 100 * (entry + 1)}
        size = at % 7 if row["kind"] == "Pushed" else None
        rows[at] = {**place, "body_bytes": size, **row}
    return as_events(rows)


def event(kind, entry, **more):
    """One event, as a batch of its own."""
    place = {"entry": entry, "index": 0, "sequence": entry << INDEX_BITS, "offset": entry * 100}
    return as_events(
        [{"store": STORE, "shard": 0, "term": 9, "kind": kind, "at_ms": T, **place, **more}]
    )


def add_events(spark, lake, events):
    """Adds events to the lake, of any journals, as a batch of each would be."""
    if not len(events):
        return
    journals = journals_table(lake)
    known = {row.store: row.journal for row in journals.frame(spark).collect()}
    new = [store for store in pc.unique(events["store"]).to_pylist() if store not in known]
    shards = dict(zip(events["store"].to_pylist(), events["shard"].to_pylist(), strict=True))
    rows = [(each, shards[each], number) for number, each in enumerate(new, 1 + len(known))]
    if rows:
        journals.add(journals.stage(spark.createDataFrame(rows, JOURNALS).coalesce(1)), {})
    known |= {store: number for store, _, number in rows}
    numbers = np.array([known[store] for store in events["store"].to_pylist()], np.int64)
    key = pc.bit_wise_or(pa.array(numbers << MESSAGE_BITS), events["message"])
    table = events_table(lake)
    frame = spark.createDataFrame(events.append_column("key", key))
    reached = events.group_by("store").aggregate([("offset", "max")]).to_pylist()
    table.add(
        table.stage(frame.coalesce(1)),
        {f"offset/{row['store']}": row["offset_max"] + 1 for row in reached},
    )


def await_ingested(lake, store):
    """Waits until a watching run has added all of a journal."""
    found = Lake.open(lake)
    until(lambda: not lag(found, str(store)).behind_bytes, timeout_s=300)


def cuts(rng, events, count):
    """The journal in so many batches, each of whole entries."""
    entries = sorted(set(events["entry"].to_pylist()))
    bounds = [0, *sorted(rng.sample(entries[1:], count - 1)), entries[-1] + 1]
    column = events["entry"]
    return [
        events.filter(pc.and_(pc.greater_equal(column, a), pc.less(column, b)))
        for a, b in pairwise(bounds)
    ]


def rows(path, query):
    """What another program finds in a table, through Delta alone; `{table}` is its name."""
    found = DeltaTable(str(path)).to_pyarrow_table()
    return duckdb.sql(query.format(table="found")).fetchall() if found is not None else []


def rows_of(lake, derived, *, without=()):
    """The rows of a table, in an order that does not depend on its files."""
    delta = table_of(lake, derived).delta()
    names = [name for name in derived.columns if name not in without]
    found = [] if delta is None else delta.to_pyarrow_table(columns=names).to_pylist()
    return sorted(repr(tuple(row.values())) for row in found)


def kept_findings(lake):
    return rows_of(lake, FINDINGS)


def version_of(table):
    delta = table.delta()
    return -1 if delta is None else delta.version()
