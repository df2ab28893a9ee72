"""Whatever a journal says, plain lives set apart change nothing in what the checks find."""

import random
import re

import pytest

pytest.importorskip("pyarrow", reason="service not installed: penstock[spark]")

import pyarrow as pa

from penstock.spark import checks, judge
from penstock.spark.blocks import INDEX_BITS
from penstock.spark.duck import DuckConnection
from penstock.spark.queries import DIRECTORY, load_query
from penstock.spark.tables import FOLDS, IRREGULAR_EVENTS

T = 1_700_000_000_000
LIVES = 3_000
TYPES = {
    "string": pa.string(), "int": pa.int32(), "bigint": pa.int64(), "boolean": pa.bool_(),
}  # fmt: skip
COLUMNS = {name: TYPES[kind] for name, kind in map(str.split, checks.SCHEMA.split(", "))}
QUEUES = {1: '{"max_receives": 2, "dead_letter": "q2"}', 2: "{}", 3: '{"fifo": true}'}
COLUMN_LINE = re.compile(r"--   (?=\w)(\w+(?:, \w+)*),?(?:  |$)")
ENDS = ("Deleted", "Released", "ClaimExpired", "Lost", "Expired", "Moved", "Extended")


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


def some_journal(seed, lives=LIVES, *, changes=False):
    """Lives that overlap, among them queues that are emptied."""
    rng = random.Random(seed)
    rows = [
        {"kind": "QueueCreated", "queue": queue, "name": f"q{queue}",
         "extra": f'{{"settings": {settings}}}'}
        for queue, settings in QUEUES.items()
    ]  # fmt: skip
    open_lives = []
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
        rows[at] = {"store": "s", "shard": 0, "term": 1, "at_ms": T + at, **place, **row}
    return pa.table({name: pa.array([row.get(name) for row in rows], kind)
                     for name, kind in COLUMNS.items()})  # fmt: skip


def found_in(events):
    with DuckConnection() as duck:
        duck.arrow("given_events", events)
        findings, total = checks.check_events(duck, "given_events", {"q1": 7})
        stores = duck.fetch("SELECT * FROM stores")
    return sorted(findings, key=repr), total, stores


@pytest.mark.parametrize("seed", [1, 2])
def test_messages_with_plain_lives_pass_every_check(monkeypatch, seed):
    events = some_journal(seed)
    findings, total, stores = found_in(events)
    assert {"pushed first", "one holder", "epochs rise", "nothing after the end", "terms rise",
            "order in the group", "one message per dedup id", "nothing lost",
            } <= {finding[0] for finding in findings}  # fmt: skip

    def none_is_plain(name):
        query = load_query(name)
        return f"SELECT * REPLACE (false AS plain) FROM ({query})" if "/messages" in name else query

    monkeypatch.setattr(judge, "load_query", none_is_plain)
    assert found_in(events) == (findings, total, stores)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_period_of_an_event_is_the_same_in_any_number_of_spans(monkeypatch, seed):
    """In one span every event is compared with all periods of its queue."""
    events = some_journal(seed, changes=True)
    found = []
    rows = []
    make = judge._span_periods

    def counted(duck):
        make(duck)
        rows.append(duck.fetch("SELECT count(DISTINCT span), count(*) FROM spanned_periods")[0])

    monkeypatch.setattr(judge, "_span_periods", counted)
    for most in (1, 3, judge.SPANS_MAX):
        monkeypatch.setattr(judge, "SPANS_MAX", most)
        found.append(found_in(events))
    assert found[0] == found[1] == found[2]
    assert [spans for spans, _ in rows[:2]] == [1, 3]
    assert rows[2][0] >= 3
    assert rows[0][1] < rows[1][1] <= rows[2][1]


def documented_columns(name):
    """The columns that the head of a query's file describes, in order."""
    lines = (DIRECTORY / f"{name}.sql").read_text().splitlines()
    found = [match[1] for line in lines if (match := COLUMN_LINE.match(line))]
    return ", ".join(found).split(", ") if found else []


def test_the_comment_of_every_step_names_its_columns_in_order():
    with DuckConnection() as duck:
        duck.arrow("given_events", some_journal(1))
        checks.check_events(duck, "given_events", {"q1": 7})
        made = (*checks.OF_QUEUES, *checks.OF_STORES, *judge.STEPS)
        for name in made:
            assert documented_columns(f"audit/{name}") == duck.columns(name), name
    for each in (FOLDS, IRREGULAR_EVENTS):
        assert documented_columns(f"audit/{each.name}") == each.columns
