"""Whatever a journal says, plain lives set apart change nothing in what the checks find."""

import random

import pytest

pytest.importorskip("pyarrow", reason="service not installed: penstock[spark]")
duck = pytest.importorskip("benchmarks.duck", reason="the source archive has no benchmarks")

import pyarrow as pa  # noqa: E402

from penstock.spark import checks  # noqa: E402
from penstock.spark.blocks import INDEX_BITS  # noqa: E402
from penstock.spark.queries import documented_columns  # noqa: E402

T = 1_700_000_000_000
LIVES = 3_000
TYPES = {
    "string": pa.string(), "int": pa.int32(), "bigint": pa.int64(), "boolean": pa.bool_(),
}  # fmt: skip
COLUMNS = {name: TYPES[kind] for name, kind in map(str.split, checks.SCHEMA.split(", "))}
QUEUES = {1: '{"max_receives": 2, "dead_letter": "dead"}', 2: "{}", 3: '{"fifo": true}'}
ENDS = ("Deleted", "Released", "ClaimExpired", "Lost", "Expired", "Moved", "Extended")


def a_life(rng, message):
    """Mostly what befalls a message, in order; now and then anything at any place."""
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


def some_journal(seed):
    """Lives that overlap, among them queues that are emptied."""
    rng = random.Random(seed)
    rows = [
        {"kind": "QueueCreated", "queue": queue, "name": f"q{queue}",
         "extra": f'{{"settings": {settings}}}'}
        for queue, settings in QUEUES.items()
    ]  # fmt: skip
    open_lives = []
    for message in range(1, LIVES):
        open_lives.append(a_life(rng, message))
        while open_lives and (len(open_lives) > 20 or message == LIVES - 1):
            life = rng.choice(open_lives)
            if life:
                rows.append(life.pop(0))
            else:
                open_lives.remove(life)
        if message % 500 == 0:
            rows.append({"kind": "QueuePurged", "queue": rng.choice(list(QUEUES)), "count": 1})
    for at, row in enumerate(rows):
        entry, index = divmod(at, 2)
        place = {"entry": entry + 1, "index": index, "sequence": (entry + 1 << INDEX_BITS) + index}
        rows[at] = {"store": "s", "shard": 0, "term": 1, "at_ms": T + at, **place, **row}
    return pa.table({name: pa.array([row.get(name) for row in rows], kind)
                     for name, kind in COLUMNS.items()})  # fmt: skip


def found_in(events):
    runner = duck.Duck(threads=1)
    engine = runner.rows(pa.table({"name": ["q1"], "counted": [7]}))
    found, stores = checks.check_all(runner, runner.rows(events), engine)
    findings = runner.fetch(f'SELECT "check", message, queue, sequence, detail FROM {found}')
    return sorted(findings, key=repr), runner.fetch(f"SELECT * FROM {stores}")


@pytest.mark.parametrize("seed", [1, 2])
def test_messages_set_apart_as_plain_are_right_by_every_check(monkeypatch, seed):
    events = some_journal(seed)
    findings, stores = found_in(events)
    assert {"pushed first", "one holder", "epochs rise", "nothing after the end", "terms rise",
            "order in the group", "one message per dedup id", "nothing lost",
            } <= {finding[0] for finding in findings}  # fmt: skip
    none_plain = f"SELECT * REPLACE (false AS plain) FROM ({checks.STEPS['messages']})"
    monkeypatch.setitem(checks.STEPS, "messages", none_plain)
    assert found_in(events) == (findings, stores)


class Describing:
    """DuckDB as a runner that compares each step's columns with the head of its file."""

    def __init__(self):
        self.duck = duck.Duck(threads=1)
        self.keep, self.send, self.any = self.duck.keep, self.duck.send, self.duck.any
        self.described = set()
        self.names = {query: name for name, query in checks.STEPS.items()}

    def ask(self, query, **tables):
        made = self.duck.ask(query, **tables)
        name = self.names.get(query)
        if name is not None:
            columns = [row[0] for row in self.duck.fetch(f"DESCRIBE {made}")]
            assert documented_columns(f"audit/{name}") in (columns, []), name
            self.described.add(name)
        return made


def test_the_head_of_every_step_names_its_columns_in_order():
    runner = Describing()
    engine = runner.duck.rows(pa.table({"name": ["q1"], "counted": [7]}))
    checks.check_all(runner, runner.duck.rows(some_journal(1)), engine)
    assert set(checks.STEPS) - runner.described <= {"gap_findings"}
    assert [name for name in checks.STEPS if not documented_columns(f"audit/{name}")] == [
        "queue_changes"
    ]
