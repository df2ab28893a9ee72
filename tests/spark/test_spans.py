"""What a task does with its stretch of a journal, without a Spark around it."""

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

import subprocess
import sys

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql.types import LongType, StringType, StructType

import penstock
from penstock.core import events as facts
from penstock.errors import InvalidField, StoreUnusable
from penstock.spark import selection, spans
from penstock.spark.blocks import COLUMNS
from penstock.spark.schemas import arrow_schema
from penstock.spark.selection import SCHEMA, SourceOptions
from penstock.spark.source import JournalBatch, PenstockSource
from tests.spark.journals import flip, write_store

FILES = StructType().add("file", StringType()).add("rows", LongType())
ENTRY_BYTES = 32 + 16 + 64 + 40


@pytest.fixture
def store(tmp_path):
    return write_store(
        tmp_path / "s", [[facts.Pushed(at, 1, at, b"x" * 40)] for at in range(1, 1001)]
    )


def files_of(store, into, **options):
    """Every span of the store through `read_span`; the rows they gave."""
    given = {"path": str(store), "mode": "files", "into": str(into), **options}
    found = []
    for span in JournalBatch(SourceOptions.of(given), FILES).partitions():
        for batch in spans.read_span(span.value):
            found += batch.to_pylist()
    return found


def events_in(rows):
    return pa.concat_tables([pq.read_table(row["file"]) for row in rows])


def test_a_file_has_every_column_as_the_lake_has_it(store, tmp_path):
    rows = files_of(store, tmp_path / "into", spanBytes="50000")
    assert len(rows) > 2
    found = events_in(rows)
    assert found.schema.names == list(COLUMNS)
    assert found.schema.types == arrow_schema(SCHEMA).types
    assert found["entry"].to_pylist() == list(range(1, 1001))
    assert set(found["body"].to_pylist()) == {b"x" * 40}
    assert sum(row["rows"] for row in rows) == 1000


@pytest.mark.parametrize(
    ("range_mib", "span_mib"), [(0, 32), (60, 32), (400, 50), (1_000, 125), (10_000, 128)]
)
def test_a_task_reads_an_eighth_of_the_journal_within_limits(range_mib, span_mib):
    assert selection.usual_span_bytes(range_mib << 20) == span_mib << 20


def test_a_journal_of_any_size_has_work_for_eight_tasks(store, monkeypatch):
    monkeypatch.setattr(selection, "_SPAN_BYTES_MIN", 1)
    read = JournalBatch(
        SourceOptions.of({"path": str(store)}), StructType().add("entry", LongType())
    )
    parts = [
        [row["entry"] for batch in spans.read_span(part.value) for row in batch.to_pylist()]
        for part in read.partitions()
    ]
    # The last one has what the ends of entries leave of the journal.
    assert len(parts) in (8, 9)
    assert [entry for part in parts for entry in part] == list(range(1, 1001))


def test_the_size_of_spans_follows_from_what_is_read(store, monkeypatch):
    monkeypatch.setattr(selection, "_SPAN_BYTES_MIN", 1)
    given = {"path": str(store), "fromOffset": str(900 * ENTRY_BYTES)}
    read = JournalBatch(SourceOptions.of(given), StructType().add("entry", LongType()))
    parts = read.partitions()
    assert len(parts) in (8, 9)
    assert sum(len(batch) for part in parts for batch in spans.read_span(part.value)) == 100


def test_what_does_not_fit_a_row_group_goes_into_the_next(store, tmp_path, monkeypatch):
    monkeypatch.setattr(spans, "HELD_BYTES", 1)
    monkeypatch.setattr("penstock.spark.blocks.CHUNK_BYTES", 40 * ENTRY_BYTES)
    (row,) = files_of(store, tmp_path / "into")
    assert pq.read_metadata(row["file"]).num_row_groups == 25
    assert events_in([row])["entry"].to_pylist() == list(range(1, 1001))


def test_events_of_near_messages_are_in_near_rows(tmp_path, monkeypatch):
    """An old message that gets an event does not make every row group one that may have it."""
    monkeypatch.setattr(spans, "GROUP_ROWS", 20)
    monkeypatch.setattr(spans, "NEAR_MESSAGES", 10)
    path = tmp_path / "store"
    with penstock.connect(f"file:{path}?embedded=1") as queues:
        queues.create("old")
        queues.create("new")
        queues.push("old", b"x")
        for number in range(100):
            queues.push("new", b"x")
            if number % 10 == 0:
                [claim] = queues.pull_many("old", 1)
                queues.release(claim)
    (row,) = files_of(path, tmp_path / "into")
    footer = pq.read_metadata(row["file"])
    at = footer.schema.to_arrow_schema().get_field_index("message")
    stats = [footer.row_group(n).column(at).statistics for n in range(footer.num_row_groups)]
    assert len(stats) == 7
    assert sum(each.min == 1 for each in stats) == 2
    assert all(each.max - each.min < 30 for each in stats)
    found = events_in([row])
    old = found.filter(pc.equal(found["message"], 1))["sequence"].to_pylist()
    assert len(old) == 21
    assert old == sorted(old)


def test_a_task_that_is_repeated_writes_another_file(store, tmp_path):
    (first,), (second,) = (files_of(store, tmp_path / "into") for _ in range(2))
    assert first["file"] != second["file"]
    assert events_in([first]) == events_in([second])


def test_only_what_begins_at_the_offset_or_later_is_kept_damage_included(store, tmp_path):
    for entry in (300, 800):
        flip(store, (entry - 1) * ENTRY_BYTES + 120)
    found = events_in(files_of(store, tmp_path / "into", fromOffset=str(600 * ENTRY_BYTES - 1)))
    assert found["entry"].to_pylist() == list(range(601, 1001))
    assert [kind for kind in found["kind"].to_pylist() if kind == "Damaged"] == ["Damaged"]
    assert files_of(store, tmp_path / "none", fromOffset=str(1000 * ENTRY_BYTES)) == []
    assert not list((tmp_path / "none").glob("*"))


def test_a_directory_that_cannot_be_written_is_refused_in_one_sentence(store, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(StoreUnusable, match=r"taken: events cannot be written there: File exists"):
        files_of(store, tmp_path / "taken")


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


def test_the_mode_and_its_directory_belong_together(store):
    path = {"path": str(store)}
    with pytest.raises(InvalidField, match="option 'into': missing"):
        PenstockSource({**path, "mode": "files"}).reader(FILES)
    with pytest.raises(InvalidField, match="option 'into': is for mode 'files'"):
        PenstockSource({**path, "into": "here"}).reader(StructType())
    with pytest.raises(InvalidField, match="there is no column 'entry'; there are file, rows"):
        PenstockSource({**path, "mode": "files", "into": "here"}).reader(
            StructType().add("entry", LongType())
        )
