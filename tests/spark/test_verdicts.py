"""The same verdicts from a journal and from a lake, and by what the lake keeps."""

import shutil
from collections import Counter
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

import pyarrow as pa

from penstock.spark.audit import AuditFinding, audit, audit_journal
from penstock.spark.bronze import ingest
from penstock.spark.lake import Lake
from tests.spark.journals import write_store
from tests.spark.lakes import add_events, journal
from tests.spark.test_audit import FAULTS, MADE, QUEUES

pytestmark = [pytest.mark.service("default-jre-headless"), pytest.mark.timeout(600)]


def test_an_audit_reads_what_is_kept_of_events_and_no_events(spark, tmp_path):
    lake = Lake.open(tmp_path / "lake", create=True)
    # An entry from a replaced owner, or one that is missing, is looked for among all events.
    events = journal(4)
    events = events.set_column(
        events.schema.get_field_index("term"),
        events.schema.field("term"),
        pa.array([1] * len(events), pa.int64()),
    )
    add_events(spark, lake, events)
    first = audit(lambda: spark, lake, shown_max=0)
    assert sum(1 for count in first.counts.values() if count) > 6
    shutil.move(lake.path / "events" / "data", tmp_path / "elsewhere")
    again = audit(lambda: spark, lake, shown_max=0, everything=True)
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


def test_a_journal_by_itself_has_the_findings_of_a_lake(spark, tmp_path):
    lake = Lake.open(tmp_path / "lake", create=True)
    counts: Counter[str] = Counter()
    findings: list[AuditFinding] = []
    makers = [MADE[name][0] for name in ("replaced owner", "hole")]
    for nth, make in enumerate((with_faults, *makers)):
        store = str(tmp_path / str(nth))
        make(Path(store))
        verdict = audit_journal(lambda: spark, store, shown_max=1_000)
        counts.update(verdict.counts)
        findings += verdict.findings
        ingest(lambda: spark, lake, store)
    together = audit(lambda: spark, lake, shown_max=1_000)
    assert together.counts == dict(counts)
    assert sorted(map(repr, together.findings)) == sorted(map(repr, findings))
    found = {check for check, count in counts.items() if count}
    assert found >= {*TOGETHER, "terms rise", "no gaps"}
