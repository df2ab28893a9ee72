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
from penstock.spark import queries
from penstock.spark.audit import audit
from penstock.spark.bronze import events_table, ingest
from penstock.spark.lake import Lake, LakeBusy, Table, locked
from penstock.spark.retention import drop_before
from penstock.spark.tables import MESSAGES, QUEUE_EVENTS, TABLES
from penstock.spark.update import Updated, count_dropped, is_up_to_date, table_of, update
from tests.conftest import FULL
from tests.spark.lakes import (
    Stopped,
    T,
    add_events,
    cuts,
    event,
    journal,
    kept_findings,
    rows_of,
    stored_rows,
)
from tests.spark.test_forgetting import all_bytes

pytestmark = [pytest.mark.service("default-jre-headless"), pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(queries, "PART_BITS", 6)


def every_row(lake):
    """All that the lake says, but whether a message's events are dropped."""
    return {
        each.name: rows_of(lake, each, without=("dropped",)) for each in (QUEUE_EVENTS, *TABLES)
    }


@pytest.mark.parametrize("seed", range(8 if FULL else 1))
def test_dropping_events_between_runs_changes_no_table_and_no_finding(spark, tmp_path, seed):
    """A journal with faults of every kind and a gap, dropped behind each of its batches."""
    events = journal(seed + 1)
    late = events["entry"][9 * len(events) // 10].as_py()
    # An entry in the middle is missing: the audit looks for it among all entries, dropped or not.
    missing = events["entry"][len(events) // 3].as_py()
    events = events.filter(pc.not_equal(events["entry"], missing))
    lake, plain = (Lake.open(tmp_path / name, create=True) for name in ("lake", "plain"))
    # The last batch begins late enough for many messages to have ended before.
    first, second = cuts(random.Random(seed), events.filter(pc.less(events["entry"], late)), 2)
    third = events.filter(pc.greater_equal(events["entry"], late))
    for batch in (pa.concat_tables([first, second]), third):
        add_events(spark, lake, batch)
        # No message has an event so long after its end.
        drop_before(lambda: spark, lake, batch["at_ms"][0].as_py() - 100)
        assert update(lambda: spark, lake) == Updated()
    add_events(spark, plain, events)
    verdict, expected = audit(lambda: spark, lake), audit(lambda: spark, plain)
    assert verdict.dropped == count_dropped(lake) > 5
    assert events_table(lake).rows() < events_table(plain).rows() - 5
    assert verdict.events == expected.events == len(events)
    assert verdict.counts == expected.counts
    assert {check for check, count in expected.counts.items() if count} >= {"no gaps", "terms rise"}
    assert kept_findings(lake) == kept_findings(plain)
    tables = every_row(plain)
    assert every_row(lake) == tables
    # The parts are made again and everything is judged again: nothing changes.
    update(lambda: spark, lake, rebuild=True)
    again = audit(lambda: spark, lake, everything=True)
    assert again.judged_parts == again.parts == verdict.parts
    assert again.counts == expected.counts
    assert every_row(lake) == tables
    assert count_dropped(lake) == verdict.dropped
    # Nothing of a message with a finding is dropped: the audit shows its events.
    for finding in again.findings:
        assert finding.message_id is None or "dropped" not in " ".join(finding.events)
        assert finding.message_id is None or finding.events


def test_an_event_of_a_message_whose_events_were_dropped_is_found(spark, tmp_path):
    lake = Lake.open(tmp_path / "lake", create=True)
    events = journal(2)
    add_events(spark, lake, events)
    drop_before(lambda: spark, lake, T + 1_000_000)
    before = audit(lambda: spark, lake).counts
    messages = stored_rows(table_of(lake, MESSAGES))
    dropped = sorted(row["message"] for row in messages if row["dropped"])
    again, late = dropped[0], dropped[-1]
    last = max(events["entry"].to_pylist())
    more = [event("Pushed", last + 1, queue=1, message=again),
            event("Deleted", last + 2, queue=1, message=late, epoch=1)]  # fmt: skip
    add_events(spark, lake, pa.concat_tables(more))
    verdict = audit(lambda: spark, lake, shown_max=1_000)
    new = {name: n - before[name] for name, n in verdict.counts.items() if n != before[name]}
    assert new == {"pushed once": 1, "nothing after the end": 1}
    [found] = [
        each for each in verdict.findings
        if each.check == "nothing after the end" and each.entry == last + 2
    ]  # fmt: skip
    assert found.events[0] == "earlier events were dropped by compact --keep"
    assert "Deleted claim 1" in found.events[1]
    assert found.detail == "Deleted by claim 1 of a message that was gone"


def test_a_retention_that_is_refused_or_killed_is_completed_and_changes_no_table(
    spark, tmp_path, monkeypatch
):
    lake = Lake.open(tmp_path / "lake", create=True)
    events = journal(3)
    first, second = cuts(random.Random(1), events, 2)
    add_events(spark, lake, first)
    expected = audit(lambda: spark, lake)
    tables = every_row(lake)
    for name in ("events", "verdicts"):
        with locked(lake, name), pytest.raises(LakeBusy, match=f"changing its {name}"):
            drop_before(lambda: spark, lake, T + 1_000_000)
    commit = Table._commit
    for killed_at in ("messages", "events"):

        def stop(self, *arguments, killed_at=killed_at):
            if self.path.name == killed_at:
                raise Stopped
            commit(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(Table, "_commit", stop)
            with pytest.raises(Stopped):
                drop_before(lambda: spark, lake, T + 1_000_000)
        assert (count_dropped(lake) > 0) == (killed_at == "events")
        assert events_table(lake).rows() == len(first)
        verdict = audit(lambda: spark, lake)
        assert verdict.counts == expected.counts
        assert every_row(lake) == tables
    # New events come in before the events are dropped: those of dropped messages count once.
    add_events(spark, lake, second)
    audit(lambda: spark, lake)
    drop_before(lambda: spark, lake, T + 1_000_000)
    verdict = audit(lambda: spark, lake)
    assert verdict.events == len(events)
    assert is_up_to_date(lake)
    # Each event is stored, or counted in the row of a message whose events are dropped.
    messages = stored_rows(table_of(lake, MESSAGES))
    dropped = sum(row["events"] for row in messages if row["dropped"])
    assert dropped > 20
    assert events_table(lake).rows() + dropped == len(events)


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
    ingest(lambda: spark, lake, str(store))
    there = ["--lake", str(lake.path)]
    # The manual clock of this store starts at 0: all messages that ended are old.
    for words in (["--keep", "-1d"], ["--keep", "soon"]):
        assert cli.main(["pipeline", "compact", *there, *words]) == 2
    capsys.readouterr()
    assert cli.main(["pipeline", "compact", *there, "--keep", "90d", "--keep-versions", "0"]) == 0
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
    assert cli.main(["pipeline", "report", *there, "--output", str(tmp_path / "page.html")]) == 0
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
