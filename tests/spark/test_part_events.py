"""The events of a range: which rows of which files they are, and their order."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.spark.ordering import order_by, stable_order
from penstock.spark.part_events import COLUMNS, LakePart, read_events
from penstock.spark.schemas import arrow_schema
from penstock.spark.selection import SCHEMA

ARROW = arrow_schema(SCHEMA)
PART = LakePart("a" * 32, 0, 1, 10)


def write_events(path, *rows, group_rows=100, without=(), **options):
    """A file of events, each given as (message, sequence), perhaps with a store and a shard."""
    usual = (None, None, "a" * 32, 0)
    names = ("message", "sequence", "store", "shard")
    named = [dict(zip(names, (*row, *usual[len(row) :]), strict=True)) for row in rows]
    columns = {
        each.name: pa.array([{"kind": "Pushed", **row}.get(each.name) for row in named], each.type)
        for each in ARROW
        if each.name not in without
    }
    pq.write_table(pa.table(columns), path, row_group_size=group_rows, **options)
    return str(path)


def read(*files, wanted=None):
    """The messages and sequences that are read, in their order."""
    events = read_events(files, PART, np.ones(10, bool) if wanted is None else wanted)
    rows = events.rows.take(pa.array(events.order))
    assert rows.column_names == list(COLUMNS)
    return list(zip(rows["message"].to_pylist(), rows["sequence"].to_pylist(), strict=True))


def test_only_events_of_the_range_in_its_shard_are_read(tmp_path):
    rows = [(9, 1), (10, 2), (None, 3), (19, 4), (20, 5), (11, 6, "b" * 32, 0)]
    file = write_events(tmp_path / "1", *rows, (12, 7, "a" * 32, 1), (13, 8))
    assert read(file) == [(10, 2), (13, 8), (19, 4)]
    wanted = np.zeros(10, bool)
    wanted[[3, 9]] = True
    assert read(file, wanted=wanted) == [(13, 8), (19, 4)]
    assert read(write_events(tmp_path / "2", (9, 1), (None, 2))) == []
    assert read() == []


def test_events_are_in_the_order_of_the_journal_whatever_files_they_are_in(tmp_path):
    files = [
        write_events(tmp_path / "1", (12, 30), (11, 9)),
        write_events(tmp_path / "2", (11, 5), (12, 4)),
    ]
    assert read(*files) == [(11, 5), (11, 9), (12, 4), (12, 30)]


def test_a_file_of_an_older_release_may_lack_columns(tmp_path):
    old = write_events(tmp_path / "1", (12, 30), without=("holder", "rank", "body"))
    new = write_events(tmp_path / "2", (12, 31))
    assert read(old, new) == [(12, 30), (12, 31)]


def test_a_file_may_store_texts_in_an_encoding_that_has_no_dictionary(tmp_path):
    given = {"use_dictionary": False, "column_encoding": {"kind": "DELTA_BYTE_ARRAY"}}
    files = [
        write_events(tmp_path / "1", (12, 30), **given),
        write_events(tmp_path / "2", (12, 31)),
    ]
    assert read(*files) == [(12, 30), (12, 31)]


def test_row_groups_without_a_wanted_message_are_not_read(tmp_path, monkeypatch):
    """Not even those whose statistics include one, as where an old message has an event."""
    rows = [(15, 1), (15, 2), (1, 3), (300, 4), (12, 5), (16, 6), (200, 7), (201, 8)]
    file = write_events(tmp_path / "1", *rows, group_rows=2)
    read_columns = []
    really_read = pq.ParquetFile.read_row_group

    def counted(self, number, columns, **more):
        read_columns.append((number, len(columns)))
        return really_read(self, number, columns, **more)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    wanted = np.ones(10, bool)
    wanted[5] = False
    assert read(file, wanted=wanted) == [(12, 5), (16, 6)]
    assert read_columns == [(0, 1), (1, 1), (2, 1), (2, len(COLUMNS))]


@pytest.mark.parametrize("bits", [8, 16, 17, 40, 63])
def test_numbers_of_any_size_are_sorted_and_equal_ones_stay_in_order(bits):
    rng = np.random.default_rng(bits)
    numbers = rng.integers(-(1 << bits - 1), (1 << bits - 1) - 1, 2_000)
    numbers[::3] = numbers[0]
    assert stable_order(numbers).tolist() == np.argsort(numbers, kind="stable").tolist()
    assert stable_order(numbers[:0]).tolist() == []
    keys = rng.integers(0, 5, 2_000), numbers, rng.integers(0, 3, 2_000)
    assert order_by(*keys).tolist() == np.lexsort(keys[::-1]).tolist()
