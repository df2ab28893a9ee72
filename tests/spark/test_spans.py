"""What a task does with its stretch of a journal, without a Spark around it."""

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

import subprocess
import sys

from pyspark.sql.types import LongType, StringType, StructType

from penstock.core import events as facts
from penstock.spark import selection, spans
from penstock.spark.selection import SourceOptions
from penstock.spark.source import JournalBatch
from tests.spark.journals import flip, write_store

ENTRY_BYTES = 32 + 16 + 64 + 40


@pytest.fixture
def store(tmp_path):
    return write_store(
        tmp_path / "s", [[facts.Pushed(at, 1, at, b"x" * 40)] for at in range(1, 1001)]
    )


def events_of(store, **options):
    """The rows of each span of the store."""
    given = {"path": str(store), **options}
    columns = StructType().add("entry", LongType()).add("kind", StringType())
    return [
        [row for batch in spans.read_span(part.value) for row in batch.to_pylist()]
        for part in JournalBatch(SourceOptions.of(given), columns).partitions()
    ]


@pytest.mark.parametrize(
    ("range_mib", "span_mib"), [(0, 32), (60, 32), (400, 50), (1_000, 125), (10_000, 128)]
)
def test_a_task_reads_an_eighth_of_the_journal_within_limits(range_mib, span_mib):
    assert selection.usual_span_bytes(range_mib << 20) == span_mib << 20


def test_a_journal_of_any_size_has_work_for_eight_tasks(store, monkeypatch):
    monkeypatch.setattr(selection, "_SPAN_BYTES_MIN", 1)
    parts = events_of(store)
    # The last one has what the ends of entries leave of the journal.
    assert len(parts) in (8, 9)
    assert [row["entry"] for part in parts for row in part] == list(range(1, 1001))


def test_the_size_of_spans_follows_from_what_is_read(store, monkeypatch):
    monkeypatch.setattr(selection, "_SPAN_BYTES_MIN", 1)
    parts = events_of(store, fromOffset=str(900 * ENTRY_BYTES))
    assert len(parts) in (8, 9)
    assert sum(map(len, parts)) == 100


def test_only_what_begins_at_the_offset_or_later_is_kept_damage_included(store, tmp_path):
    for entry in (300, 800):
        flip(store, (entry - 1) * ENTRY_BYTES + 120)
    (found,) = events_of(store, fromOffset=str(600 * ENTRY_BYTES - 1))
    assert [row["entry"] for row in found] == list(range(601, 1001))
    assert [row["kind"] for row in found if row["kind"] == "Damaged"] == ["Damaged"]
    assert events_of(store, fromOffset=str(1000 * ENTRY_BYTES)) == [[]]


def test_planning_a_read_or_a_write_does_not_wait_for_pandas():
    """Spark starts a process for each step of it, and pandas takes longer than all the rest."""
    modules = "pyspark_penstock, penstock.spark.sink"
    said = subprocess.run(
        [sys.executable, "-c", f"import sys, {modules}; print('pandas' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == "False\n"
