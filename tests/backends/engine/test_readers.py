"""Named readers: their names, their floors, and readers of a journal that is written meanwhile."""

import os

import pytest

from penstock.core.events import Pushed
from penstock.errors import InvalidField, JournalError, StoreUnusable
from penstock.journal import readers
from penstock.journal.reader import JournalReader
from penstock.service import CreateQueue, Purge, Push
from tests.backends.engine.random_store import small_slices
from tests.backends.engine.test_upkeep import ReopenedStore


@pytest.fixture(autouse=True)
def _in_small_steps(monkeypatch):
    small_slices(monkeypatch)


@pytest.mark.parametrize("name", ["", ".hidden", "../store", "a/b", "a" * 81, "ä", "a\n", "a b"])
def test_a_reader_name_that_could_be_another_file_is_refused(tmp_path, name):
    with pytest.raises(InvalidField, match="reader"):
        readers.register(tmp_path, name, 0, 1)
    assert readers.forget(tmp_path, name) is False
    assert list(tmp_path.iterdir()) == []


def test_registering_a_reader_again_moves_its_floor(tmp_path):
    readers.register(tmp_path, "b", 5, 1)
    readers.register(tmp_path, "a", 7, 2)
    readers.register(tmp_path, "b", 9, 3)
    found = [
        (each.name, each.floor_offset, each.moved_at_ms) for each in readers.registered(tmp_path)
    ]
    assert found == [("a", 7, 2), ("b", 9, 3)]
    assert sorted(os.listdir(tmp_path / "readers")) == ["a.json", "b.json"]


def test_a_reader_that_cannot_be_stored_is_refused_and_leaves_no_files(tmp_path):
    (tmp_path / "readers").mkdir()
    (tmp_path / "readers" / "a.json").mkdir()
    with pytest.raises(StoreUnusable, match="cannot keep a reader"):
        readers.register(tmp_path, "a", 0, 1)
    assert os.listdir(tmp_path / "readers") == ["a.json"]


def test_while_the_file_of_a_reader_is_damaged_nothing_is_dropped(quick_path):
    store = ReopenedStore(quick_path, archive=None)
    store(CreateQueue("q"))
    readers.register(quick_path / "store", "spark", 0, 1)
    (quick_path / "store" / "readers" / "spark.json").write_bytes(b"{")
    for _ in range(4):
        store(*[Push("q", bytes(3_000))] * 20)
        store(Purge("q"))
        with pytest.raises(StoreUnusable, match="cannot be read as a reader"):
            store.run_pass()
    assert store.engine.journal.segments.first_offset == 0
    store.engine.close()


@pytest.mark.parametrize("archived", [True, False])
def test_a_reader_sees_every_push_while_the_writer_drops_files_it_has_read(quick_path, archived):
    archive = quick_path / "archive" if archived else None
    store = ReopenedStore(quick_path, archive=archive)
    store(CreateQueue("q"))
    store.engine.journal.sync()
    reader = JournalReader(quick_path / "store" / "journal", archive=archive)
    bodies = []
    for turn in range(30):
        for number in range(8):
            store(Push("q", b"%d " % (8 * turn + number) * 200))
        store(Purge("q"))
        store.run_pass()
        reader.refresh()
        bodies += [each.event.body for each in reader.events() if isinstance(each.event, Pushed)]
        assert reader.position == reader.durable_offset
    assert store.engine.journal.segments.first_offset > 0
    assert bodies == [b"%d " % number * 200 for number in range(240)]
    assert reader.damage == []
    reader.close()
    store.engine.close()


def test_a_reader_that_is_behind_reads_dropped_files_from_the_archive(quick_path):
    store = ReopenedStore(quick_path)
    store(CreateQueue("q"))
    store.engine.journal.sync()
    late = JournalReader(quick_path / "store" / "journal", archive=quick_path / "archive")
    without = JournalReader(quick_path / "store" / "journal")
    for _ in range(20):
        store(*[Push("q", b"x" * 700)] * 20)
        store(Purge("q"))
        store.run_pass()
    store.engine.journal.sync()
    late.refresh()
    assert sum(isinstance(each.event, Pushed) for each in late.events(0)) == 400
    without.refresh()
    with pytest.raises(JournalError, match="was dropped"):
        list(without.events(0))
    late.close()
    without.close()
    store.engine.close()
