"""What a run reads and writes again when few events are new: open parts, and the sums of sets."""

import json
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.spark import distribute, part_events
from penstock.spark import lake as lakes
from penstock.spark.audit import audit
from penstock.spark.derive import derive, table_of
from penstock.spark.ingest import events_table
from penstock.spark.lake import Lake, Table
from penstock.spark.retention import drop_before
from penstock.spark.seals import is_sealed
from penstock.spark.sums import SET_RANGES, set_of
from penstock.spark.tables import (
    FOLDS,
    OPEN_EVENTS,
    PART_TABLES,
    SUMMED_TABLES,
    TABLES,
    WHOLE_TABLES,
)
from tests.spark.test_checks import T
from tests.spark.test_increments import (
    PART,
    Stopped,
    add_events,
    event,
    journal,
    no_spark,
    rows_of,
)

STORE = "a" * 32


@pytest.fixture
def lake(tmp_path, monkeypatch):
    monkeypatch.setattr(part_events, "PART_MESSAGES", PART)
    monkeypatch.setattr(distribute, "LOCAL_MAX", 1_000)
    return Lake.open(tmp_path / "lake", create=True)


def paths_of(lake, derived):
    return {each.part: each.path for each in table_of(lake, derived).files()}


def lives(count, entry, ended=None):
    """Messages that are pushed; those before `ended` are claimed and deleted."""
    rows = [event("QueueCreated", entry, queue=1, name="q", extra='{"settings": {}}')]
    for message in range(1, count):
        for kind in ("Pushed", "Claimed", "Deleted")[: 3 if message < (ended or 0) else 1]:
            epoch = None if kind == "Pushed" else 1
            rows.append(event(kind, entry + len(rows), queue=1, message=message, epoch=epoch))
    return pa.concat_tables(rows)


def test_the_parts_of_a_set_are_open_or_closed_or_sealed_and_their_ranges_are_neighbours():
    shard = f"{STORE}-3"
    assert set_of(f"{shard}-0") == set_of(f"{shard}-999") == shard
    last = SET_RANGES - 1
    assert set_of(f"{shard}-0_1") == set_of(f"{shard}-{last}_7") == f"{shard}_0"
    assert set_of(f"{shard}-{SET_RANGES}_1") == f"{shard}_1"
    assert set_of(f"{shard}-{SET_RANGES}.2") == f"{shard}.1"


def test_only_the_sums_of_sets_with_a_part_that_changed_are_written_again(lake):
    ranges = SET_RANGES + 2
    rows = lives(ranges * PART, 1, ended=ranges * PART - 10)
    add_events(lake, rows)
    derive(no_spark, lake)
    shard = f"{STORE}-0"
    before = {each.name: paths_of(lake, each) for each in SUMMED_TABLES}
    assert set(before["part_minutes"]) == {shard, f"{shard}_0", f"{shard}_1"}
    assert len(paths_of(lake, FOLDS)) == ranges + 1
    # A claim of a message that waits: its part is in the set of open ones.
    entry = len(rows) + 1
    add_events(lake, event("Claimed", entry, queue=1, message=ranges * PART - 1, epoch=1))
    assert derive(no_spark, lake).parts == 1
    for each in SUMMED_TABLES:
        after = paths_of(lake, each)
        changed = {name for name in before[each.name] if after[name] != before[each.name][name]}
        assert changed <= {shard}, each.name
    assert paths_of(lake, SUMMED_TABLES[0])[shard] != before["part_minutes"][shard]
    made = {each.name: rows_of(lake, each) for each in WHOLE_TABLES}
    derive(no_spark, lake, rebuild=True)
    assert {each.name: rows_of(lake, each) for each in WHOLE_TABLES} == made


def test_an_open_part_is_made_again_without_the_files_of_its_old_events(lake):
    """And the file of `open_events` has its events alone."""
    rows = lives(2 * PART, 1, ended=PART - 5)
    add_events(lake, rows)
    derive(no_spark, lake)
    assert {f"{STORE}-0-0", f"{STORE}-0-1"} == set(paths_of(lake, OPEN_EVENTS))
    [old] = [Path(each.path) for each in lake.table("events", "").files()]
    add_events(lake, event("Claimed", len(rows) + 1, queue=1, message=PART - 1, epoch=1))
    hidden = old.rename(old.with_suffix(".hidden"))
    try:
        assert derive(no_spark, lake).parts == 1
    finally:
        hidden.rename(old)
    # Six messages wait, one of which is claimed now; with those of the next range.
    assert len(rows_of(lake, OPEN_EVENTS)) == 5 + 1 + PART
    made = {each.name: rows_of(lake, each) for each in PART_TABLES}
    derive(no_spark, lake, rebuild=True)
    assert {each.name: rows_of(lake, each) for each in PART_TABLES} == made


def test_new_events_that_were_joined_with_old_ones_in_a_file_count_once(lake):
    rows = lives(2 * PART, 1, ended=PART - 5)
    add_events(lake, rows)
    derive(no_spark, lake)
    add_events(lake, event("Claimed", len(rows) + 1, queue=1, message=PART - 1, epoch=1))
    assert events_table(lake).compact(0)["joined"] == 2
    assert derive(no_spark, lake).parts == 1
    made = {each.name: rows_of(lake, each) for each in TABLES}
    derive(no_spark, lake, rebuild=True)
    assert {each.name: rows_of(lake, each) for each in TABLES} == made
    assert len(rows_of(lake, OPEN_EVENTS)) == 5 + 1 + PART


def test_messages_that_a_purge_ended_are_closed_and_come_back_with_an_event(lake):
    """A message that came after the purge is not among them."""
    rows = lives(PART - 1, 1)
    entry = len(rows)
    later = [
        event("Claimed", entry + 1, queue=1, message=5, epoch=1),
        event("Released", entry + 2, queue=1, message=5, epoch=1),
        event("QueuePurged", entry + 3, queue=1, count=PART - 2),
        event("Pushed", entry + 4, queue=1, message=PART - 1),
    ]
    add_events(lake, pa.concat_tables([rows, *later]))
    assert audit(no_spark, lake).holds
    folds = {each.part: each for each in table_of(lake, FOLDS).files()}
    assert {name: each.rows for name, each in folds.items()} == {
        f"{STORE}-0-0": 1, f"{STORE}-0-0_1": PART - 2
    }  # fmt: skip
    assert folds[f"{STORE}-0-0_1"].largest["until"] == (entry + 3) << 20
    # One that is left: the closed part stays as it is.
    add_events(lake, event("Claimed", entry + 5, queue=1, message=PART - 1, epoch=1))
    assert derive(no_spark, lake).parts == 1
    assert audit(no_spark, lake).holds
    assert paths_of(lake, FOLDS)[f"{STORE}-0-0_1"] == folds[f"{STORE}-0-0_1"].path
    # A message that was purged has an event: that is found, and no row is lost.
    add_events(lake, event("Claimed", entry + 6, queue=1, message=7, epoch=1))
    found = audit(no_spark, lake).counts
    assert {check: n for check, n in found.items() if n} == {"nothing after the end": 1}
    assert len(rows_of(lake, FOLDS)) == PART - 1


@pytest.mark.parametrize("killed_at", [None, "part_status"])
def test_the_sums_of_sealed_parts_of_an_older_lake_are_kept(lake, monkeypatch, killed_at):
    """Its tables had a file for each part. What was dropped cannot be made again."""
    add_events(lake, journal(3, STORE, 0))
    drop_before(no_spark, lake, T + 1_000_000)
    audit(no_spark, lake)
    expected = {each.name: rows_of(lake, each) for each in WHOLE_TABLES}
    sealed = {str(each.part) for each in table_of(lake, FOLDS).files() if is_sealed(each.part)}
    assert sealed
    for each in SUMMED_TABLES:
        rows = pa.concat_tables(pq.read_table(p) for p in paths_of(lake, each).values())
        table = Table(lake.path / each.name, each.schema, in_parts=True)
        parts = set(rows["of_part"].to_pylist())
        files = [
            table.write(
                part,
                rows.filter(pc.equal(rows["of_part"], part)).drop("of_part"),
                part_events.PART_MESSAGES,
            )
            for part in parts
        ]
        table.replace(files, {"queries": 5})
        assert set(paths_of(lake, each)) == parts
    monkeypatch.setattr(lakes, "COMMITS_AT_ONCE", 1)
    commit = Table._commit

    def stop(self, *arguments):
        if self.path.name == killed_at:
            raise Stopped
        commit(self, *arguments)

    if killed_at is not None:
        with monkeypatch.context() as patch:
            patch.setattr(Table, "_commit", stop)
            with pytest.raises(Stopped):
                derive(no_spark, lake)
    derive(no_spark, lake)
    assert {each.name: rows_of(lake, each) for each in WHOLE_TABLES} == expected
    for each in SUMMED_TABLES:
        assert all(part.count("-") == 1 for part in paths_of(lake, each)), each.name
    assert {set_of(part) for part in sealed} <= set(paths_of(lake, SUMMED_TABLES[0]))


def test_a_plan_that_an_older_release_left_is_completed_and_the_tables_are_made_again(lake):
    rows = lives(PART, 1)
    add_events(lake, rows)
    derive(no_spark, lake)
    expected = {each.name: rows_of(lake, each) for each in TABLES}
    known = [each for each in PART_TABLES if each is not OPEN_EVENTS]
    plan = {
        "id": 7,
        "parts": [],
        "added": {each.name: [] for each in known},
        "transactions": {"queries": 5},
    }
    (lake.path / "parts.json").write_text(json.dumps(plan))
    assert derive(no_spark, lake).parts == 1
    assert not (lake.path / "parts.json").exists()
    assert {each.name: rows_of(lake, each) for each in TABLES} == expected
