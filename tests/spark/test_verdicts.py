"""The same verdicts from a journal and from a lake, by what the lake keeps, of any hours."""

import math
import random
import shutil
from collections import Counter
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

import pyarrow as pa

from penstock.service import HOUR_MS
from penstock.spark.audit import AuditFinding, audit, audit_journal
from penstock.spark.duck import DuckConnection
from penstock.spark.ingest import ingest
from penstock.spark.lake import Lake
from penstock.spark.tables import LATENCIES, LATENCY
from tests.spark.journals import write_store
from tests.spark.test_audit import FAULTS, MADE, QUEUES
from tests.spark.test_increments import add_events, journal, no_spark


def test_an_audit_reads_what_is_kept_of_events_and_no_events(tmp_path):
    lake = Lake.open(tmp_path / "lake", create=True)
    # An entry from a replaced owner, or one that is missing, is looked for among all events.
    events = journal(4, "a" * 32, 0)
    events = events.set_column(
        events.schema.get_field_index("term"),
        events.schema.field("term"),
        pa.array([1] * len(events), pa.int64()),
    )
    add_events(lake, events)
    first = audit(no_spark, lake, shown_max=0)
    assert sum(1 for count in first.counts.values() if count) > 6
    shutil.move(lake.path / "events" / "data", tmp_path / "elsewhere")
    again = audit(no_spark, lake, shown_max=0, everything=True)
    assert again == first
    assert again.judged_parts == again.parts == 1


# Faults whose events do not concern each other's messages, so that one journal can have them all;
# a purge concerns all messages before it, and comes first.
TOGETHER = (
    "nothing lost", "pushed once", "one holder", "claim of the visible", "epochs rise",
    "current claim only", "expiry of the current claim", "expiry after the deadline",
    "delay in full", "expired when due", "move of the visible", "arrival of the departed",
    "dead letter after N", "one message per dedup id", "order in the group",
)  # fmt: skip


def with_faults(store):
    """One journal with all of these, each with messages of its own."""
    events = [
        msgspec.structs.replace(event, number=event.number + 100 * nth)
        if hasattr(event, "number")
        else event
        for nth, name in enumerate(TOGETHER)
        for event in FAULTS[name][0]
    ]
    write_store(store, [QUEUES, *([event] for event in events)])


def test_a_journal_by_itself_has_the_findings_of_a_lake(tmp_path):
    lake = Lake.open(tmp_path / "lake", create=True)
    counts: Counter[str] = Counter()
    findings: list[AuditFinding] = []
    makers = [MADE[name][0] for name in ("replaced owner", "hole")]
    for nth, make in enumerate((with_faults, *makers)):
        store = str(tmp_path / str(nth))
        make(Path(store))
        verdict = audit_journal(no_spark, store, shown_max=1_000)
        counts.update(verdict.counts)
        findings += verdict.findings
        ingest(no_spark, lake, store)
    together = audit(no_spark, lake, shown_max=1_000)
    assert together.counts == dict(counts)
    assert sorted(map(repr, together.findings)) == sorted(map(repr, findings))
    found = {check for check, count in counts.items() if count}
    assert found >= {*TOGETHER, "terms rise", "no gaps"}


def test_percentiles_of_two_hours_of_three_are_those_of_their_samples():
    rng = random.Random(2)
    hours = {
        hour: [int(10 ** rng.uniform(0, spread)) for _ in range(2_000)]
        for hour, spread in ((470_000, 2), (470_001, 6), (470_002, 4))
    }
    rows = [
        (hour * HOUR_MS + rng.randrange(HOUR_MS), took_ms)
        for hour, samples in hours.items()
        for took_ms in samples
    ]
    chosen = sorted(hours[470_000] + hours[470_002])
    with DuckConnection() as duck:
        at_ms, took_ms = (pa.array(column) for column in zip(*rows, strict=True))
        duck.arrow("samples", pa.table({"at_ms": at_ms, "took_ms": took_ms}))
        duck.table("part", "SELECT 'a' AS store, 0 AS shard")
        duck.table("queue_names", "SELECT 1 AS queue_number, 'q' AS queue")
        duck.table(
            "lives",
            "SELECT 0 AS part_number, 1 AS queue_number, at_ms AS first_pulled_at_ms, "
            "at_ms - took_ms AS pushed_at_ms, NULL AS visible_at_ms, 0 AS ended_at_ms, "
            "'live' AS state FROM samples",
        )
        duck.table("claims", "SELECT *, 0 AS started_at_ms FROM lives LIMIT 0")
        duck.table("every_hour", LATENCIES.text)
        assert duck.fetch("SELECT DISTINCT hour FROM every_hour ORDER BY 1") == [
            (hour,) for hour in hours
        ]
        duck.view("latencies", "SELECT * FROM every_hour WHERE hour IN (470000, 470002)")
        [row] = duck.dicts(LATENCY.rows)
    assert row["samples"] == len(chosen)
    assert row["max_ms"] == chosen[-1]
    for share, name in ((0.5, "p50_ms"), (0.9, "p90_ms"), (0.99, "p99_ms"), (0.999, "p999_ms")):
        exact = chosen[math.ceil(share * len(chosen)) - 1]
        assert abs(row[name] - exact) <= 0.01 * exact, name
