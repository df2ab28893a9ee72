"""Dropping old events loses their content and nothing else: tables and findings stay the same."""

import json
import random
import shutil

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

import pyarrow as pa
import pyarrow.compute as pc

import penstock
from penstock import cli
from penstock.clock import ManualClock
from penstock.spark import distribute, part_events, retention, seals
from penstock.spark import lake as lakes
from penstock.spark.audit import audit, is_judged
from penstock.spark.checks import check_events
from penstock.spark.derive import DerivedTables, derive, is_up_to_date, table_of
from penstock.spark.duck import DuckConnection
from penstock.spark.ingest import events_table, ingest
from penstock.spark.lake import Lake, LakeBusy, Table, locked
from penstock.spark.retention import drop_before
from penstock.spark.seals import count_dropped, pending_plan
from penstock.spark.tables import MESSAGES, PART_TABLES, QUEUE_EVENTS, WHOLE_TABLES
from tests.conftest import FULL
from tests.spark.test_checks import T
from tests.spark.test_forgetting import all_bytes
from tests.spark.test_increments import (
    ARROW,
    Stopped,
    add_events,
    cuts,
    journal,
    kept_findings,
    no_spark,
)

MESSAGE_TABLES = [each for each in PART_TABLES if each.name in ("folds", "messages", "attempts")]
STORE = "a" * 32
PART = 100


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(part_events, "PART_MESSAGES", PART)
    monkeypatch.setattr(distribute, "LOCAL_MAX", 1_000)
    # In these journals few messages have ended without a finding.
    monkeypatch.setattr(retention, "_SHARE", 20)


def rows_of(lake, derived):
    """The rows of a table without the column that says whether a message's events are dropped."""
    with DuckConnection() as duck:
        duck.files("found", [e.path for e in table_of(lake, derived).files()], derived.types)
        left_out = "EXCLUDE (dropped)" if derived is MESSAGES else ""
        return sorted(map(repr, duck.fetch(f"SELECT * {left_out} FROM found")))


def every_row(lake):
    """All that the lake says, but for tables whose rows depend on how messages are split."""
    chosen = (QUEUE_EVENTS, *MESSAGE_TABLES, *WHOLE_TABLES)
    return {each.name: rows_of(lake, each) for each in chosen}


def event(entry, kind, message, **more):
    """One event, as a batch of its own."""
    place = {"entry": entry, "index": 0, "sequence": entry << 20, "offset": entry * 100}
    row = {"store": STORE, "shard": 0, "term": 9, "kind": kind, "at_ms": T + 9_999, "queue": 1}
    row |= {"message": message, **place, **more}
    columns = {
        name: pa.array([row.get(name)], kind_)
        for name, kind_ in zip(ARROW.names, ARROW.types, strict=True)
    }
    return pa.table(columns)


@pytest.mark.parametrize("seed", range(8 if FULL else 1))
def test_dropping_events_between_runs_changes_no_table_and_no_finding(tmp_path, seed):
    """A journal with faults of every kind and a gap, dropped behind each of its batches."""
    events = journal(seed + 1, STORE, 0)
    late = events["entry"][9 * len(events) // 10].as_py()
    # An entry in the middle is missing: the audit looks for it among all entries, dropped or not.
    missing = events["entry"][len(events) // 3].as_py()
    events = events.filter(pc.not_equal(events["entry"], missing))
    lake, plain = (Lake.open(tmp_path / name, create=True) for name in ("lake", "plain"))
    # The last batch begins late enough for many messages to have ended before.
    first, second = cuts(random.Random(seed), events.filter(pc.less(events["entry"], late)), 2)
    third = events.filter(pc.greater_equal(events["entry"], late))
    for batch in (first, second, third):
        for each in (lake, plain):
            add_events(each, batch)
        # No message has an event so long after its end.
        before_ms = batch["at_ms"][0].as_py() - 100
        drop_before(no_spark, lake, before_ms)
        assert derive(no_spark, lake) == DerivedTables()
    verdict, expected = audit(no_spark, lake), audit(no_spark, plain)
    assert verdict.dropped == count_dropped(lake) > 5
    assert events_table(lake).rows() < events_table(plain).rows() - 5
    assert verdict.events == expected.events == len(events)
    assert verdict.counts == expected.counts
    assert {check for check, count in expected.counts.items() if count} >= {"no gaps", "terms rise"}
    assert kept_findings(lake) == kept_findings(plain)
    with DuckConnection() as duck:
        duck.arrow("given_events", events)
        assert len(check_events(duck, "given_events", {})[0]) == sum(verdict.counts.values())
    tables = every_row(plain)
    assert every_row(lake) == tables
    # The parts are made again and everything is judged again: nothing changes.
    derive(no_spark, lake, rebuild=True)
    again = audit(no_spark, lake, everything=True)
    assert again.judged_parts == again.parts > verdict.parts // 2
    assert again.counts == expected.counts
    assert every_row(lake) == tables
    # Nothing of a message with a finding is dropped: the audit shows its events.
    for finding in again.findings:
        assert finding.message_id is None or "dropped" not in " ".join(finding.events)
        assert finding.message_id is None or finding.events


def test_an_event_of_a_message_whose_events_were_dropped_is_found(tmp_path):
    lake = Lake.open(tmp_path / "lake", create=True)
    events = journal(2, STORE, 0)
    add_events(lake, events)
    drop_before(no_spark, lake, T + 1_000_000)
    before = audit(no_spark, lake).counts
    dropped = sorted(
        row[0] for row in query(lake, MESSAGES, "SELECT message FROM found WHERE dropped")
    )
    again, late = dropped[0], dropped[-1]
    last = max(events["entry"].to_pylist())
    add_events(lake, event(last + 1, "Pushed", again))
    add_events(lake, event(last + 2, "Deleted", late, epoch=1))
    verdict = audit(no_spark, lake, shown_max=1_000)
    new = {name: n - before[name] for name, n in verdict.counts.items() if n != before[name]}
    assert new == {"pushed once": 1, "nothing after the end": 1}
    [found] = [
        each for each in verdict.findings
        if each.check == "nothing after the end" and each.entry == last + 2
    ]  # fmt: skip
    assert found.events[0] == "earlier events were dropped by compact --keep"
    assert "Deleted claim 1" in found.events[1]
    assert found.detail == "Deleted by claim 1 of a message that was gone"


def query(lake, derived, text):
    with DuckConnection() as duck:
        duck.files("found", [e.path for e in table_of(lake, derived).files()], derived.types)
        return duck.fetch(text)


STEPS = 2 + len(PART_TABLES) + 1


@pytest.mark.parametrize("step", range(STEPS) if FULL else (2, STEPS - 1))
def test_a_retention_killed_at_any_step_is_completed_and_changes_no_table(
    tmp_path, monkeypatch, step
):
    """Killed before the plan, between two of its commits, or before the plan is removed."""
    lake = Lake.open(tmp_path / "lake", create=True)
    events = journal(3, STORE, 0)
    # A cut for which the retention has every one of its steps.
    first, second = cuts(random.Random(STEPS - 1), events, 2)
    add_events(lake, first)
    expected = audit(no_spark, lake)
    tables = every_row(lake)
    left = iter(range(step + 1))

    def stopping(function):
        def stopped(*arguments):
            if next(left, None) is None:
                raise Stopped
            return function(*arguments)

        return stopped

    # The audit before it has nothing to commit: every commit here is one of the retention's.
    with monkeypatch.context() as patch:
        next(left)
        patch.setattr(lakes, "COMMITS_AT_ONCE", 1)
        patch.setattr(Table, "_commit", stopping(Table._commit))
        patch.setattr(Table, "overwrite", stopping(Table.overwrite))
        patch.setattr(seals.PartsPlan, "save", stopping(seals.PartsPlan.save))
        patch.setattr(retention, "forget_plan", stopping(seals.forget_plan))
        with pytest.raises(Stopped):
            drop_before(no_spark, lake, T + 1_000_000)
    assert (pending_plan(lake) is None) == (step == 0)
    assert is_judged(lake) == (step < 2)
    if step == 2:
        # It removes no file that the plan names.
        assert cli.main(["pipeline", "compact", "--lake", str(lake.path), "--keep-hours", "0"]) == 0
    verdict = audit(no_spark, lake)
    assert verdict.counts == expected.counts
    assert every_row(lake) == tables
    # New events come in before the events are dropped: those of sealed messages count once.
    add_events(lake, second)
    audit(no_spark, lake)
    drop_before(no_spark, lake, T + 1_000_000)
    drop_before(no_spark, lake, T + 1_000_000)
    assert pending_plan(lake) is None
    verdict = audit(no_spark, lake)
    assert verdict.events == len(events)
    assert is_up_to_date(lake)
    # Each event is stored, or counted in the row of a message whose events are dropped.
    [(dropped,)] = query(lake, MESSAGES, "SELECT sum(events) FROM found WHERE dropped")
    assert dropped > 20
    assert events_table(lake).rows() + dropped == len(events)


def test_a_retention_is_refused_at_once_while_another_process_works(tmp_path):
    lake = Lake.open(tmp_path / "lake", create=True)
    add_events(lake, journal(3, STORE, 0))
    for name in ("events", "verdicts"):
        with locked(lake, name), pytest.raises(LakeBusy, match=f"changing its {name}"):
            drop_before(no_spark, lake, T)
    assert count_dropped(lake) == 0


@pytest.mark.timeout(600)
@pytest.mark.service("default-jre-headless")
def test_the_commands_count_messages_whose_events_were_dropped(spark, tmp_path, capsys):
    clock = ManualClock()
    store = tmp_path / "store"
    with penstock.connect(f"file:{store}?embedded=1&durability=os", clock=clock) as queues:
        queues.create("dead")
        queues.create("orders", dead_letter="dead", max_receives=1)
        for n in range(100):
            queues.push("orders", b"%d" % n, attributes={"a": f"hidden-{n:02d}"})
        for claim in queues.pull_many("orders", 90):
            queues.delete(claim)
        for claim in queues.pull_many("orders", 5):
            queues.release(claim)
    lake = Lake.open(tmp_path / "lake", create=True)
    ingest(no_spark, lake, str(store))
    there = ["--lake", str(lake.path)]
    # The manual clock of this store starts at 0: all messages that ended are old.
    for words in (["--keep", "-1d"], ["--keep", "soon"]):
        assert cli.main(["pipeline", "compact", *there, *words]) == 2
    capsys.readouterr()
    assert cli.main(["pipeline", "compact", *there, "--keep", "90d", "--keep-hours", "0"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "270 events of 90 messages dropped"
    # In no file of the lake: neither in rows nor in Delta's log.
    held = all_bytes(lake.path)
    for body, attribute in ((b"b'95'", b"hidden-95"), (b"b'99'", b"hidden-99")):
        assert body in held
        assert attribute in held
    assert b"b'10'" not in held
    assert not any(b"hidden-%02d" % n in held for n in range(90))
    assert is_up_to_date(lake)
    assert cli.main(["pipeline", "compact", *there, "--keep", "90d", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0]) == {
        "dropped_messages": 0, "dropped_events": 0,
    }  # fmt: skip
    run = ["pipeline", "run", *there, "--journal", str(store)]
    for words in ([], ["--rebuild"]):
        assert cli.main([*run, *words]) == 0
        capsys.readouterr()
        assert cli.main(["pipeline", "audit", *there, "--all"]) == 0
        shown = capsys.readouterr().out
        assert "every check holds" in shown
        # Every part was judged: none is as before.
        assert "the others are as before" not in shown
        assert "90 messages by what is kept of them" in shown
    assert cli.main(["pipeline", "status", *there, "--journal", str(store)]) == 0
    assert "events of 90 messages were dropped" in capsys.readouterr().out
    assert cli.main(["pipeline", "report", *there, "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert '"dropped": 90' in page
    assert '"events": 297' in page
    capsys.readouterr()
    target = f"file:{tmp_path / 'target'}?embedded=1"
    with penstock.connect(target) as queues:
        queues.create("again")
    replay = ["pipeline", "replay", *there, "--url", target, "--to", "again"]
    assert cli.main([*replay, "--where", "state = 'deleted'"]) == 1
    shown = capsys.readouterr()
    assert "sent 0 messages" in shown.out
    assert "90 messages have no body in the lake: 90 were dropped by `compact --keep`" in shown.err
    assert cli.main([*replay, "--where", "not dropped"]) == 0
    assert "sent 10 messages" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "target")
