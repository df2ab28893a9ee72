"""Tables and findings do not depend on how a journal is cut into runs."""

import json
import math
import os
import pty
import random
import subprocess
import sys
import tarfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable

from penstock import cli
from penstock.core.events import Pushed, QueueCreated
from penstock.core.receipts import MessageIds
from penstock.service import QueueSettings
from penstock.spark import derive as deriving
from penstock.spark import distribute, fold, judge, part_events, tables
from penstock.spark import lake as lakes
from penstock.spark.audit import audit
from penstock.spark.checks import check_events
from penstock.spark.derive import DerivedTables, derive, table_of
from penstock.spark.duck import DuckConnection, read_files
from penstock.spark.ingest import copy_events, events_table, ingest, last_offset, reached_point
from penstock.spark.lake import AddedFile, Lake, Table
from penstock.spark.queries import BIN_RATIO, NO_LIMIT, load_query
from penstock.spark.regular import FoldedRange, fold_regular
from penstock.spark.schemas import arrow_rows, arrow_schema
from penstock.spark.selection import SCHEMA
from penstock.spark.stream import Stream
from penstock.spark.tables import (
    ATTEMPTS,
    BALANCES,
    FINDINGS,
    FOLDS,
    IRREGULAR_EVENTS,
    LATENCIES,
    LATENCY,
    MESSAGES,
    PART_DEAD_LETTERS,
    PART_TABLES,
    QUEUE_EVENTS,
    REDELIVERIES,
    TABLES,
    WHOLE_TABLES,
)
from tests.conftest import FULL, SEED
from tests.spark.journals import write_store
from tests.spark.test_checks import T, some_journal

ARROW = arrow_schema(SCHEMA)
GOLDEN = Path(__file__).parents[1] / "golden" / "lakes"
LIVES = 200
# For a seed that differs from run to run.
FEW_LIVES = 40
PART = 40
# Tables whose rows do not depend on how messages are divided into parts.
WITHOUT_PARTS = (
    QUEUE_EVENTS, FOLDS, IRREGULAR_EVENTS, MESSAGES, ATTEMPTS, PART_DEAD_LETTERS, *WHOLE_TABLES,
)  # fmt: skip


class NoSpark(Exception):
    """Spark was to be started."""


def no_spark():
    raise NoSpark


class Stopped(Exception):
    """Simulates a kill: nothing after it runs."""


def as_events(rows):
    """These rows with every column of `events`."""
    columns = [
        rows[name].cast(kind) if name in rows.column_names else pa.nulls(len(rows), kind)
        for name, kind in zip(ARROW.names, ARROW.types, strict=True)
    ]
    return pa.table(columns, ARROW)


def journal(seed, store, shard, lives=LIVES):
    """A journal with faults of every kind; each entry is at an offset of its own."""
    events = as_events(some_journal(seed, lives, changes=seed % 2 == 1))
    kinds = events["kind"].to_pylist()
    fixed = {
        "store": pa.array([store] * len(events)),
        "shard": pa.array([shard] * len(events), pa.int32()),
        "offset": pc.multiply(events["entry"], 100),
        "body_bytes": pa.array(
            [n % 7 if kind == "Pushed" else None for n, kind in enumerate(kinds)], pa.int64()
        ),
    }
    for name, values in fixed.items():
        at = events.schema.get_field_index(name)
        events = events.set_column(at, ARROW.field(name), values)
    return events


def add_events(lake, events):
    """Adds events to the lake as one batch of a stream would."""
    if not len(events):
        return
    table = events_table(lake)
    table.path.mkdir(exist_ok=True)
    path = table.path / "_batch.parquet"
    pq.write_table(events, path)
    store = events["store"][0].as_py()
    added = table.move_in([str(path)], f"data/{version_of(table)}")
    table.add(added, {f"offset/{store}": last_offset(added) + 1})


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


def event(kind, entry, **more):
    """One event, as a batch of its own."""
    place = {"entry": entry, "index": 0, "sequence": entry << 20, "offset": entry * 100}
    row = {"store": "a" * 32, "shard": 0, "term": 9, "kind": kind, "at_ms": T, **place, **more}
    columns = {
        name: pa.array([row.get(name)], kind_)
        for name, kind_ in zip(ARROW.names, ARROW.types, strict=True)
    }
    return pa.table(columns)


def rows_of(lake, derived):
    """The rows of a table, in an order that does not depend on its files."""
    with DuckConnection() as duck:
        paths = [each.path for each in table_of(lake, derived).files()]
        duck.files("found", paths, derived.types)
        # Of which part a row is depends on when messages ended between runs.
        columns = "COLUMNS(name -> name <> 'of_part')"
        return sorted(map(repr, duck.fetch(f"SELECT {columns} FROM found")))


def kept_findings(lake):
    with DuckConnection() as duck:
        duck.files("found", [e.path for e in table_of(lake, FINDINGS).files()], FINDINGS.types)
        return sorted(map(repr, duck.fetch("SELECT * FROM found")))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("seed", "lives"), [*((seed, LIVES) for seed in range(8 if FULL else 1)), (SEED, FEW_LIVES)]
)
def test_a_journal_cut_into_runs_gives_the_tables_and_findings_of_all_of_it(
    tmp_path, monkeypatch, seed, lives
):
    """Shards advance at their own pace, one comes late; some runs are killed before a commit."""
    monkeypatch.setattr(part_events, "PART_MESSAGES", PART)
    monkeypatch.setattr(distribute, "LOCAL_MAX", 1_000)
    rng = random.Random(seed)
    lake = Lake.open(tmp_path / "lake", create=True)
    journals = [journal(10 * seed + n, f"{n:032x}", n, lives) for n in range(3)]
    batches = [cuts(rng, events, 3 - which // 2) for which, events in enumerate(journals)]
    # The shards advance independently of one another, and the last comes when the first is done.
    order = [0, 1, 0, 1, 0, 2, 1, 2]
    commits = []
    commit = Table._commit
    # The same commit is the one before which a run is killed, whenever the test is run.
    monkeypatch.setattr(lakes, "COMMITS_AT_ONCE", 1)

    def counted(self, *arguments):
        commits.append(self.path.name)
        # Most runs are killed before one of their thirty commits.
        if rng.random() < 0.04:
            raise Stopped
        commit(self, *arguments)

    for which in order:
        add_events(lake, batches[which].pop(0))
        with monkeypatch.context() as patch:
            patch.setattr(Table, "_commit", counted)
            # Each part by itself, some of them or all of a shard together.
            patch.setattr(judge, "TASK_ROWS", rng.choice((0, 4 * PART, judge.TASK_ROWS)))
            for step in (derive, audit):
                try:
                    step(no_spark, lake)
                except Stopped:
                    break
    verdict = audit(no_spark, lake)

    every = pa.concat_tables(journals)
    with DuckConnection() as duck:
        duck.arrow("given_events", every)
        expected, total = check_events(duck, "given_events", {})
    assert verdict.events == total == len(every)
    counts: dict[str, int] = {}
    for finding in expected:
        counts[finding.check] = counts.get(finding.check, 0) + 1
    assert {check: count for check, count in verdict.counts.items() if count} == counts
    assert len(counts) > (6 if lives == LIVES else 2)
    kept = set(kept_findings(lake))
    assert {repr(tuple(finding)) for finding in expected} <= kept

    # A rebuild gives the same tables, and an audit of everything the same findings.
    grown = {each.name: rows_of(lake, each) for each in WITHOUT_PARTS}
    found = kept_findings(lake)
    made = derive(no_spark, lake, rebuild=True)
    assert made.parts >= 3 * math.ceil(lives / PART)
    for each in WITHOUT_PARTS:
        assert rows_of(lake, each) == grown[each.name], each.name
    again = audit(no_spark, lake, everything=True)
    assert again.judged_parts == again.parts == made.parts
    assert again.counts == verdict.counts
    assert kept_findings(lake) == found
    # With nothing new nothing is judged, and no table changes.
    versions = [version_of(table_of(lake, each)) for each in (*TABLES, FINDINGS, BALANCES)]
    assert derive(no_spark, lake) == DerivedTables()
    assert audit(no_spark, lake).judged_parts == 0
    assert versions == [version_of(table_of(lake, each)) for each in (*TABLES, FINDINGS, BALANCES)]


def test_only_the_parts_that_new_events_touch_are_made_and_judged_again(tmp_path, monkeypatch):
    monkeypatch.setattr(part_events, "PART_MESSAGES", PART)
    monkeypatch.setattr(distribute, "LOCAL_MAX", 1_000)
    lake = Lake.open(tmp_path / "lake", create=True)
    first = journal(4, "a" * 32, 0)
    add_events(lake, first)
    audit(no_spark, lake)
    last = max(first["entry"].to_pylist())
    add_events(lake, event("Pushed", last + 1, queue=1, message=LIVES - 1))
    assert 0 < derive(no_spark, lake).parts <= 2
    verdict = audit(no_spark, lake)
    assert 0 < verdict.judged_parts <= 2 < verdict.parts
    # A QueueStated event without new settings touches no part.
    stated = event("QueueStated", last + 2, queue=2, name="q2", extra='{"settings": {}}')
    add_events(lake, stated)
    assert derive(no_spark, lake).parts == 0
    assert audit(no_spark, lake).judged_parts == 0
    # After a change of a limit every part of the shard is judged again.
    changed = event(
        "QueueConfigured",
        last + 3,
        queue=1,
        extra='{"settings": {"max_receives": 7, "dead_letter": "q2"}}',
    )
    add_events(lake, changed)
    verdict = audit(no_spark, lake)
    assert verdict.judged_parts == verdict.parts


def judged_rows(lake, derived):
    """The rows of each part of a table."""
    with DuckConnection() as duck:
        return {
            each.part: sorted(map(repr, duck.fetch(f"SELECT * FROM {read_files(each.path)}")))
            for each in table_of(lake, derived).files()
        }


def test_parts_that_are_judged_together_have_the_verdicts_of_each_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(part_events, "PART_MESSAGES", PART)
    monkeypatch.setattr(distribute, "LOCAL_MAX", 1_000)
    lake = Lake.open(tmp_path / "lake", create=True)
    for shard in range(2):
        add_events(lake, journal(4 + shard, f"{shard:032x}", shard))
    derive(no_spark, lake)
    files = [table_of(lake, each).files() for each in (FOLDS, IRREGULAR_EVENTS)]
    parts = judge.parts_of(*files)
    found = []
    tasks = []
    for rows in (0, 4 * PART, judge.TASK_ROWS):
        monkeypatch.setattr(judge, "TASK_ROWS", rows)
        tasks.append(len(judge.tasks_of(parts)))
        audit(no_spark, lake, everything=True)
        found.append([judged_rows(lake, each) for each in (FINDINGS, BALANCES)])
    assert found[0] == found[1] == found[2]
    assert sum(1 for rows in found[0][0].values() if rows) > 2
    assert len(parts) == tasks[0] > tasks[1] > tasks[2] == 2


def test_closed_parts_are_judged_apart_from_open_ones_and_open_no_files_of_those(monkeypatch):
    """Every range has an open part: tasks that opened all of them would grow with their square."""
    monkeypatch.setattr(judge, "TASK_ROWS", 100)

    def part(name, first, last, until):
        return judge.PartFiles(
            f"a-0-{name}",
            "a",
            0,
            f"{name}.parquet",
            None,
            first,
            last,
            until,
            50,
            None,
            None,
            False,
        )

    open_parts = [part(str(n), 10 * n, 1_000, NO_LIMIT) for n in range(4)]
    closed = [part(f"{n}_1", 10 * n, 10 * n + 12, 10 * n + 12) for n in range(4)]
    parts = [*open_parts, *closed]
    tasks = judge.tasks_of(parts)
    assert tasks == [tuple(open_parts[:2]), tuple(open_parts[2:]), tuple(closed[:2]),
                     tuple(closed[2:])]  # fmt: skip
    near = judge.parts_with_groups(tasks[3], parts, {("a", 0)}, waiting=True)
    assert near == (closed[1],)
    monkeypatch.setattr(judge, "TASK_ROWS", 400)
    assert len(judge.tasks_of(parts)) == 1


def test_ranges_that_are_folded_together_have_the_parts_of_each_by_itself(tmp_path, monkeypatch):
    """Closed parts among them, and ranges whose closed part stays."""
    monkeypatch.setattr(part_events, "PART_MESSAGES", PART)
    monkeypatch.setattr(distribute, "LOCAL_MAX", 1_000)
    batches = cuts(random.Random(3), journal(4, "a" * 32, 0), 2)
    found: list[list[dict[str, list[str]]]] = []
    for divide in (lambda ranges: [(part,) for part in ranges], lambda ranges: [tuple(ranges)]):
        lake = Lake.open(tmp_path / str(len(found)), create=True)
        monkeypatch.setattr(deriving, "tasks_of_ranges", divide)
        files = []
        for events in batches:
            add_events(lake, events)
            assert derive(no_spark, lake).parts > 2
            files.append(part_files(lake))
        assert any("_" in part and files[1].get(part) == path for part, path in files[0].items())
        found.append([judged_rows(lake, each) for each in PART_TABLES])
    assert found[0] == found[1]
    assert len({"_" in part for part in found[0][0]}) == 2


def test_a_task_folds_no_more_messages_than_a_range_has_unless_it_is_one_range():
    def part(shard, nth):
        return part_events.LakePart("a", shard, nth, 100)

    ranges = {part(0, 1): 30, part(0, 4): 100, part(0, 2): 60, part(0, 3): 20, part(1, 3): 10}
    assert fold.tasks_of_ranges(ranges) == [
        (part(0, 4),), (part(0, 3), part(0, 2)), (part(1, 3),), (part(0, 1),)
    ]  # fmt: skip


def part_files(lake):
    """The file of each part in `folds`, by the part's name without the store."""
    files = table_of(lake, FOLDS).files()
    return {str(each.part).partition("-")[2]: each.path for each in files}


def test_messages_that_have_ended_are_closed_and_made_again_only_if_one_has_an_event(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(part_events, "PART_MESSAGES", PART)
    monkeypatch.setattr(distribute, "LOCAL_MAX", 1_000)
    lake = Lake.open(tmp_path / "lake", create=True)
    created = event("QueueCreated", 1, queue=1, name="q", extra='{"settings": {}}')
    rows = [created]
    for message in range(1, PART):
        # The last ten messages have not ended.
        kinds = ("Pushed", "Claimed", "Deleted")[: 3 if message < PART - 10 else 1]
        for kind in kinds:
            epoch = None if kind == "Pushed" else 1
            rows.append(event(kind, len(rows) + 1, queue=1, message=message, epoch=epoch))
    add_events(lake, pa.concat_tables(rows))
    assert audit(no_spark, lake).holds
    before = part_files(lake)
    assert set(before) == {"0-0", "0-0_1"}
    # An event of a message that has not ended: the closed part is neither made nor judged again.
    add_events(lake, event("Claimed", len(rows) + 1, queue=1, message=PART - 1, epoch=1))
    assert derive(no_spark, lake).parts == 1
    verdict = audit(no_spark, lake)
    assert (verdict.holds, verdict.judged_parts, verdict.parts) == (True, 1, 2)
    after = part_files(lake)
    assert after["0-0_1"] == before["0-0_1"]
    assert after["0-0"] != before["0-0"]
    # New messages end too: they become another closed part.
    for message in range(PART - 10, PART):
        for kind in ("Claimed", "Deleted") if message < PART - 1 else ("Deleted",):
            rows.append(event(kind, len(rows) + 2, queue=1, message=message, epoch=1))
    add_events(lake, pa.concat_tables(rows[-19:]))
    assert audit(no_spark, lake).holds
    assert set(part_files(lake)) == {"0-0_1", "0-0_2"}
    assert part_files(lake)["0-0_1"] == before["0-0_1"]
    # An event of a message that had ended: its whole range is made again, and the event is found.
    add_events(lake, event("Claimed", len(rows) + 2, queue=1, message=3, epoch=2))
    verdict = audit(no_spark, lake)
    assert {check: n for check, n in verdict.counts.items() if n} == {"nothing after the end": 1}
    assert set(part_files(lake)) == {"0-0", "0-0_1"}
    tables = {each.name: rows_of(lake, each) for each in (QUEUE_EVENTS, *TABLES)}
    derive(no_spark, lake, rebuild=True)
    assert {each.name: rows_of(lake, each) for each in (QUEUE_EVENTS, *TABLES)} == tables
    assert len(rows_of(lake, MESSAGES)) == PART - 1


def test_a_regular_life_gives_the_same_rows_when_its_events_are_folded_one_by_one(
    tmp_path, monkeypatch
):
    """What all other tables take from the folds of regular lives equals the general path.

    Three ways: found by numpy, found by the query of the folds, and none held to be regular.
    """
    others = [each for each in TABLES if each not in (FOLDS, IRREGULAR_EVENTS)]
    monkeypatch.setattr(distribute, "LOCAL_MAX", 1_000)
    lake = Lake.open(tmp_path / "lake", create=True)
    add_events(lake, journal(6, "a" * 32, 0))
    derive(no_spark, lake)
    short = {each.name: rows_of(lake, each) for each in TABLES}
    assert "True" in " ".join(short["folds"])

    def leave_to_queries(events):
        nothing = fold_regular(events.only(np.zeros(len(events.places), bool)))
        assert not len(nothing.lives)
        return FoldedRange(nothing.lives, events.rows.take(events.order))

    monkeypatch.setattr(fold, "fold_regular", leave_to_queries)
    derive(no_spark, lake, rebuild=True)
    assert {each.name: rows_of(lake, each) for each in TABLES} == short

    def none_is_regular(name):
        query = load_query(name)
        whole = f"SELECT * REPLACE (false AS regular) FROM ({query})"
        return whole if name == "audit/folds" else query

    monkeypatch.setattr(tables, "load_query", none_is_regular)
    derive(no_spark, lake, rebuild=True)
    assert {each.name: rows_of(lake, each) for each in others} == {
        each.name: short[each.name] for each in others
    }


def test_percentiles_of_a_histogram_are_at_most_one_percent_off():
    """Of spans from none to a year, by the text that `latency` and `latencies` share."""
    rng = random.Random(1)
    spans = [int(10 ** rng.uniform(0, 10.5)) for _ in range(20_000)] + [0] * 500
    with DuckConnection() as duck:
        duck.arrow("spans", pa.table({"took_ms": pa.array(spans, pa.int64())}))
        duck.table("part", "SELECT 'a' AS store, 0 AS shard")
        duck.table("queue_names", "SELECT 1 AS queue_number, 'q' AS queue")
        # In two parts.
        duck.table(
            "lives",
            "SELECT took_ms % 2 AS part_number, 1 AS queue_number, took_ms AS first_pulled_at_ms, "
            "0 AS pushed_at_ms, NULL AS visible_at_ms, 0 AS ended_at_ms, 'live' AS state "
            "FROM spans",
        )
        duck.table("claims", "SELECT *, 0 AS started_at_ms FROM lives LIMIT 0")
        duck.table("latencies", LATENCIES.text)
        [row] = duck.dicts(LATENCY.rows)
    spans.sort()
    for share, name in ((0.5, "p50_ms"), (0.9, "p90_ms"), (0.99, "p99_ms"), (0.999, "p999_ms")):
        exact = spans[max(0, math.ceil(share * len(spans)) - 1)]
        assert abs(row[name] - exact) <= 0.01 * exact, name
    assert row["samples"] == len(spans)
    assert row["max_ms"] == spans[-1]
    # Every value by itself, where bins are narrower than a millisecond and just above.
    for value in range(1, 2_000):
        bin_ = 1 + math.floor(math.log(value) / math.log(BIN_RATIO))
        assert abs(round(BIN_RATIO ** (bin_ - 0.5)) - value) <= 0.01 * value, value


def test_a_lake_of_an_earlier_release_is_updated_by_the_next_run(tmp_path, monkeypatch):
    """Its tables lack a column and a version of the queries; the run may be killed."""
    monkeypatch.setattr(distribute, "LOCAL_MAX", 1_000)
    lake = Lake.open(tmp_path / "lake", create=True)
    add_events(lake, journal(7, "a" * 32, 0))
    version = version_of(events_table(lake))
    old = REDELIVERIES.schema.rpartition(", ")[0]
    table = lake.table("redeliveries", old)
    path = table.new_file()
    pq.write_table(arrow_rows(old, [("x", "old", 1, 1, 0, 0, 1, 0)]), path)
    table.replace([AddedFile.of(table.path, path)], {"events": version})
    assert not deriving.is_up_to_date(lake)
    commit = Table._commit
    made: list[Table] = []

    def stop_late(self, *arguments):
        if self.path.name == "redeliveries" and not made:
            made.append(self)
            raise Stopped
        commit(self, *arguments)

    monkeypatch.setattr(Table, "_commit", stop_late)
    with pytest.raises(Stopped):
        derive(no_spark, lake)
    assert derive(no_spark, lake).parts == 0
    assert deriving.is_up_to_date(lake)
    found = DeltaTable(str(table.path)).to_pyarrow_table().to_pylist()
    assert "old" not in {row["queue"] for row in found}
    assert all(row["dead"] is not None for row in found)


def test_tables_and_audits_report_progress_task_by_task(tmp_path, monkeypatch):
    monkeypatch.setattr(part_events, "PART_MESSAGES", PART)
    # A task for each part.
    monkeypatch.setattr(judge, "TASK_ROWS", 0)
    monkeypatch.setattr(distribute, "LOCAL_MAX", 1_000)
    lake = Lake.open(tmp_path / "lake", create=True)
    add_events(lake, journal(5, "a" * 32, 0))
    for step in (derive, audit):
        shown: list[float] = []
        step(no_spark, lake, progress=shown.append)
        assert shown == sorted(shown)
        # At least one step a task; the first half of an audit is the tables, current here.
        assert len(set(shown)) >= LIVES // PART
        assert shown[0] < 0.7
        assert shown[-1] == 1


NOTHING_NEW = """
import sys
from penstock.cli import main

store, lake = sys.argv[1:]
status = main(["pipeline", "run", "--journal", store, "--lake", lake])
status += main(["pipeline", "audit", "--lake", lake])
print(status, sorted({"pandas", "pyspark"} & set(sys.modules)))
"""


def test_a_terminal_shows_a_bar_and_with_nothing_new_spark_is_not_imported(tmp_path):
    """Spark and pandas would each take longer than the answer."""
    pushes = [[Pushed(n, 1, n, b"x")] for n in range(1, 9)]
    store = write_store(tmp_path / "s", [[QueueCreated(1, 1, "q", QueueSettings())], *pushes])
    words = [sys.executable, "-c", NOTHING_NEW, store, tmp_path / "lake"]
    ours, theirs = pty.openpty()
    subprocess.run(words, stdout=subprocess.DEVNULL, stderr=theirs, check=True)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    for label in ("tables", "audit"):
        assert f"{label} {'━' * 20} 100%" in shown
    # The line is removed at the end: what follows begins at the left.
    assert shown.endswith("\r\x1b[K")
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "0 []"
    assert "judged 0 of 1 parts" in done.stdout


def test_what_is_forgotten_is_in_no_file_of_the_lake(tmp_path, capsys):
    pushes = [[Pushed(n, 1, n, b"secret-%d" % n, attributes={"a": f"hidden-{n}"})] for n in (1, 2)]
    store = write_store(tmp_path / "s", [[QueueCreated(1, 1, "q", QueueSettings())], *pushes])
    lake = Lake.open(tmp_path / "lake", create=True)
    copy_events(no_spark, lake, str(store), None, bodies=True)
    audit(no_spark, lake)
    stream = Stream(str(store))
    first, second = map(MessageIds(stream.identity).show, (1, 2))
    stream.close()
    command = ["pipeline", "forget", "--lake", str(lake.path)]
    assert cli.main([*command, first]) == 0
    assert "forgotten in 1 rows" in capsys.readouterr().out
    held = b"".join(read_all(path) for path in lake.path.rglob("*.parquet"))
    assert b"secret-1" not in held
    assert b"hidden-1" not in held
    assert b"secret-2" in held
    # What happened to it stays, and no table is made again because of it.
    assert audit(no_spark, lake).holds
    assert derive(no_spark, lake) == DerivedTables()
    found = DeltaTable(str(lake.path / "messages")).to_pyarrow_table()
    assert sorted(found["message_id"].to_pylist()) == sorted([first, second])
    assert cli.main([*command, first.replace(first[:8], "0" * 8)]) == 1
    assert "is not in the lake" in capsys.readouterr().out
    assert cli.main([*command, "' OR true --"]) == 2


def read_all(path):
    """Every value in a Parquet file, as bytes."""
    return repr(pq.ParquetFile(path).read().to_pylist()).encode()


def test_a_lake_with_its_position_in_a_checkpoint_continues_from_there(tmp_path):
    """As in lakes of an earlier release; without the checkpoint, no event is copied twice."""
    pushes = [[Pushed(n, 1, n, b"x")] for n in range(1, 41)]
    store = write_store(tmp_path / "s", [[QueueCreated(1, 1, "q", QueueSettings())], *pushes[:20]])
    stream = Stream(str(store))
    name, end = stream.identity.hex(), stream.end
    stream.close()
    for has_checkpoint in (True, False):
        lake = Lake.open(tmp_path / f"lake-{has_checkpoint}", create=True)
        copy_events(no_spark, lake, str(store), None)
        if has_checkpoint:
            for directory in ("commits", "offsets"):
                (lake.path / "checkpoints" / name / directory).mkdir(parents=True)
            (lake.path / "checkpoints" / name / "commits" / "0").write_text("v1\n{}")
            place = {"store": name, "offset": end.offset, "entry": end.entry}
            offsets = lake.path / "checkpoints" / name / "offsets" / "0"
            offsets.write_text("v1\n{}\n" + json.dumps(place))
            assert reached_point(lake, name) == end
    write_store(store, pushes[20:])
    for has_checkpoint in (True, False):
        lake = Lake.open(tmp_path / f"lake-{has_checkpoint}")
        assert ingest(no_spark, lake, str(store)).behind_bytes == 0
        found = DeltaTable(str(lake.path / "events")).to_pyarrow_table()
        assert sorted(found["entry"].to_pylist()) == list(range(1, 42))


@pytest.mark.parametrize("killed_at", ["folds", "queue_status", None] if FULL else ["folds"])
def test_a_lake_that_an_earlier_release_wrote_is_migrated_in_place(
    tmp_path, monkeypatch, killed_at
):
    """`golden/lakes` has a store and its lake, made before tables were kept for the audit."""
    with tarfile.open(GOLDEN / "version-2-without-folds.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    lake, store = Lake.open(tmp_path / "lake"), tmp_path / "store"
    assert not (lake.path / "folds").exists()
    commit = Table._commit

    def stop(self, *arguments):
        if self.path.name == killed_at:
            raise Stopped
        commit(self, *arguments)

    words = ["pipeline", "run", "--lake", str(lake.path), "--journal", str(store)]
    if killed_at is not None:
        with monkeypatch.context() as patch:
            patch.setattr(Table, "_commit", stop)
            with pytest.raises(Stopped):
                cli.main(words)
    assert cli.main(words) == 0
    verdict = audit(no_spark, lake)
    assert verdict.holds
    fresh = Lake.open(tmp_path / "fresh", create=True)
    ingest(no_spark, fresh, str(store))
    assert audit(no_spark, fresh).events == verdict.events > 60
    # Events that are read now show a setting that was added since.
    added = ',"priority_age_ms":null'
    for each in (QUEUE_EVENTS, *TABLES):
        expected = [row.replace(added, "") for row in rows_of(fresh, each)]
        assert rows_of(lake, each) == sorted(expected), each.name
