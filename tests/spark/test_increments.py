"""However a journal is cut into runs, tables and findings are those of all of it at once."""

import random
from itertools import pairwise

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.spark import distribute, fold
from penstock.spark.audit import audit
from penstock.spark.checks import check_events
from penstock.spark.derive import Made, derive, table_of
from penstock.spark.duck import Duck
from penstock.spark.ingest import events_table
from penstock.spark.lake import Lake, Table
from penstock.spark.schemas import arrow_schema
from penstock.spark.source import SCHEMA
from penstock.spark.tables import BALANCES, FINDINGS, QUEUE_EVENTS, TABLES
from tests.conftest import FULL
from tests.spark.test_checks import T, some_journal

ARROW = arrow_schema(SCHEMA)
LIVES = 200
PART = 40


class NoSpark(Exception):
    """Spark was to be started."""


def no_spark():
    raise NoSpark


class Stopped(Exception):
    """Stands for a kill: nothing after it runs."""


def as_events(rows):
    """These rows with every column of `events`."""
    columns = [
        rows[name].cast(kind) if name in rows.column_names else pa.nulls(len(rows), kind)
        for name, kind in zip(ARROW.names, ARROW.types, strict=True)
    ]
    return pa.table(columns, ARROW)


def journal(seed, store, shard):
    """A journal with faults of every kind; each entry is at an offset of its own."""
    events = as_events(some_journal(seed, LIVES, changes=seed % 2 == 1))
    fixed = {
        "store": pa.array([store] * len(events)),
        "shard": pa.array([shard] * len(events), pa.int32()),
        "offset": pc.multiply(events["entry"], 100),
        "body_bytes": pa.array([n % 7 for n in range(len(events))], pa.int64()),
    }
    for name, values in fixed.items():
        at = events.schema.get_field_index(name)
        events = events.set_column(at, ARROW.field(name), values)
    return events


def bring_in(lake, events):
    """Adds events to the lake as one batch of a stream would."""
    if not len(events):
        return
    table = events_table(lake)
    table.path.mkdir(exist_ok=True)
    path = table.path / "_batch.parquet"
    pq.write_table(events, path)
    store = events["store"][0].as_py()
    version = version_of(table)
    table.append([str(path)], f"data/{version}", {f"offset/{store}": -1}, "offset")


def version_of(table):
    delta = table.delta()
    return -1 if delta is None else delta.version()


def cuts(rng, events, count):
    """The journal in so many batches, each of whole entries."""
    entries = sorted(set(events["entry"].to_pylist()))
    bounds = [0, *sorted(rng.sample(entries[1:], count - 1)), entries[-1] + 1]
    column = events["entry"]
    return [
        events.filter(pc.and_(pc.greater_equal(column, a), pc.less(column, b)))
        for a, b in pairwise(bounds)
    ]


def rows_of(lake, derived):
    """The rows of a table, in an order that does not depend on its files."""
    with Duck() as duck:
        paths = [each.path for each in table_of(lake, derived).files()]
        duck.files("found", paths, derived.types)
        return sorted(map(repr, duck.fetch("SELECT * FROM found")))


def kept_findings(lake):
    with Duck() as duck:
        duck.files("found", [e.path for e in table_of(lake, FINDINGS).files()], FINDINGS.types)
        return sorted(map(repr, duck.fetch("SELECT * FROM found")))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(8 if FULL else 1))
def test_a_journal_cut_into_runs_gives_the_tables_and_findings_of_all_of_it(
    tmp_path, monkeypatch, seed
):
    """Shards advance at their own pace, one comes late; some runs are killed before a commit."""
    monkeypatch.setattr(fold, "PART_MESSAGES", PART)
    monkeypatch.setattr(distribute, "FEW", 1_000)
    rng = random.Random(seed)
    lake = Lake.open(tmp_path / "lake", create=True)
    journals = [journal(10 * seed + n, f"{n:032x}", n) for n in range(3)]
    batches = [cuts(rng, events, 3 - which // 2) for which, events in enumerate(journals)]
    # The shards advance independently of one another, and the last comes when the first is done.
    order = [0, 1, 0, 1, 0, 2, 1, 2]
    commits = []
    commit = Table._commit

    def counted(self, *arguments):
        commits.append(self.path.name)
        if rng.random() < 0.02:
            raise Stopped
        commit(self, *arguments)

    for which in order:
        bring_in(lake, batches[which].pop(0))
        with monkeypatch.context() as patch:
            patch.setattr(Table, "_commit", counted)
            for step in (derive, audit):
                try:
                    step(no_spark, lake)
                except Stopped:
                    break
    verdict = audit(no_spark, lake)

    every = pa.concat_tables(journals)
    with Duck() as duck:
        duck.arrow("given_events", every)
        expected, total = check_events(duck, "given_events", {})
    assert verdict.events == total == len(every)
    counts: dict[str, int] = {}
    for finding in expected:
        counts[finding.check] = counts.get(finding.check, 0) + 1
    assert {check: count for check, count in verdict.counts.items() if count} == counts
    assert len(counts) > 6
    kept = set(kept_findings(lake))
    assert {repr(tuple(finding)) for finding in expected} <= kept

    # A rebuild makes the same of it, and judging everything finds the same.
    grown = {each.name: rows_of(lake, each) for each in (QUEUE_EVENTS, *TABLES)}
    found = kept_findings(lake)
    made = derive(no_spark, lake, rebuild=True)
    assert made.parts > 10
    for each in (QUEUE_EVENTS, *TABLES):
        assert rows_of(lake, each) == grown[each.name], each.name
    again = audit(no_spark, lake, everything=True)
    assert again.judged_parts == again.parts == made.parts
    assert again.counts == verdict.counts
    assert kept_findings(lake) == found
    # With nothing new nothing is judged, and no table changes.
    versions = [version_of(table_of(lake, each)) for each in (*TABLES, FINDINGS, BALANCES)]
    assert derive(no_spark, lake) == Made()
    assert audit(no_spark, lake).judged_parts == 0
    assert versions == [version_of(table_of(lake, each)) for each in (*TABLES, FINDINGS, BALANCES)]


def test_only_the_parts_that_new_events_touch_are_made_and_judged_again(tmp_path, monkeypatch):
    monkeypatch.setattr(fold, "PART_MESSAGES", PART)
    monkeypatch.setattr(distribute, "FEW", 1_000)
    lake = Lake.open(tmp_path / "lake", create=True)
    first = journal(4, "a" * 32, 0)
    bring_in(lake, first)
    audit(no_spark, lake)
    last = max(first["entry"].to_pylist())

    def event(kind, entry, **more):
        place = {"entry": entry, "index": 0, "sequence": entry << 20, "offset": entry * 100}
        row = {"store": "a" * 32, "shard": 0, "term": 9, "kind": kind, "at_ms": T, **place, **more}
        columns = {
            name: pa.array([row.get(name)], kind_)
            for name, kind_ in zip(ARROW.names, ARROW.types, strict=True)
        }
        return pa.table(columns)

    bring_in(lake, event("Pushed", last + 1, queue=1, message=LIVES - 1))
    assert derive(no_spark, lake).parts == 1
    verdict = audit(no_spark, lake)
    assert 0 < verdict.judged_parts <= 2 < verdict.parts
    # A statement of a queue that says nothing new touches no part.
    stated = event("QueueStated", last + 2, queue=2, name="q2", extra='{"settings": {}}')
    bring_in(lake, stated)
    assert derive(no_spark, lake).parts == 0
    assert audit(no_spark, lake).judged_parts == 0
    # A changed limit makes the checks of every message in the shard look again.
    changed = event(
        "QueueConfigured",
        last + 3,
        queue=1,
        extra='{"settings": {"max_receives": 7, "dead_letter": "q2"}}',
    )
    bring_in(lake, changed)
    verdict = audit(no_spark, lake)
    assert verdict.judged_parts == verdict.parts
