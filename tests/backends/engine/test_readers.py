"""Named readers: their names, their floors, and readers of a journal that is written meanwhile."""

import os
from typing import Any

import pytest

import penstock
from penstock.backends.engine.blocking import BlockingEngine
from penstock.backends.engine.store import open_engine
from penstock.clock import ManualClock
from penstock.core.events import Expired, Moved, Pushed
from penstock.errors import InvalidField, JournalError, StoreUnusable
from penstock.journal import reader_positions
from penstock.journal.reader import JournalReader
from penstock.service import CreateQueue, Purge, Push
from tests.backends.engine.random_store import small_slices
from tests.backends.engine.test_upkeep import ReopenedStore
from tests.server.conftest import until


@pytest.fixture(autouse=True)
def _in_small_steps(monkeypatch):
    small_slices(monkeypatch)


@pytest.mark.parametrize("name", ["", ".hidden", "../store", "a/b", "a" * 81, "ä", "a\n", "a b"])
def test_a_reader_name_that_could_be_another_file_is_refused(tmp_path, name):
    with pytest.raises(InvalidField, match="reader"):
        reader_positions.register(tmp_path, name, 0, 1)
    assert reader_positions.forget(tmp_path, name) is False
    assert list(tmp_path.iterdir()) == []


def test_registering_a_reader_again_moves_its_floor(tmp_path):
    reader_positions.register(tmp_path, "b", 5, 1)
    reader_positions.register(tmp_path, "a", 7, 2)
    reader_positions.register(tmp_path, "b", 9, 3)
    found = [
        (each.name, each.floor_offset, each.moved_at_ms)
        for each in reader_positions.registered(tmp_path)
    ]
    assert found == [("a", 7, 2), ("b", 9, 3)]
    assert sorted(os.listdir(tmp_path / "readers")) == ["a.json", "b.json"]


def test_a_reader_that_cannot_be_stored_is_refused_and_leaves_no_files(tmp_path):
    (tmp_path / "readers").mkdir()
    (tmp_path / "readers" / "a.json").mkdir()
    with pytest.raises(StoreUnusable, match="cannot keep a reader"):
        reader_positions.register(tmp_path, "a", 0, 1)
    assert os.listdir(tmp_path / "readers") == ["a.json"]


@pytest.mark.parametrize("content", ["{", "[]", '{"x":' + "[" * 4_000])
def test_a_file_that_is_no_reader_is_one_error(tmp_path, content):
    reader_positions.register(tmp_path, "a", 0, 1)
    (tmp_path / "readers" / "b.json").write_text(content)
    with pytest.raises(StoreUnusable, match="cannot be read as a reader"):
        reader_positions.registered(tmp_path)


def test_while_the_file_of_a_reader_is_damaged_nothing_is_dropped(quick_path):
    store = ReopenedStore(quick_path, archive=None)
    store(CreateQueue("q"))
    reader_positions.register(quick_path / "store", "spark", 0, 1)
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


@pytest.mark.parametrize("durability", ["sync", "os"])
def test_a_reader_sees_what_time_did_to_a_store_that_nobody_uses(quick_path, durability):
    clock = ManualClock(1_000)
    engine = open_engine(quick_path / "store", clock=clock, durability=durability)
    store = BlockingEngine(engine)
    store.execute(CreateQueue("q"))
    store.execute(Push("q", b"", ttl_ms=1_000))
    clock.advance(seconds=1)
    with JournalReader(quick_path / "store" / "journal") as reader:

        def expired():
            reader.refresh()
            return any(isinstance(each.event, Expired) for each in reader.events())

        until(expired)
    store.close()


def test_the_watermark_of_an_idle_store_survives_a_power_cut(quick_path):
    engine: Any = open_engine(quick_path / "store")
    store = BlockingEngine(engine)
    store.execute(CreateQueue("q"))
    segments = engine.journal.segments
    until(lambda: not segments._watermark.is_pending)
    assert segments.durable_offset == segments.end_offset
    store.close()


def test_a_reader_sees_what_time_did_to_an_embedded_store_without_commands(quick_path):
    with penstock.connect(f"file:{quick_path / 'store'}?embedded=1") as queues:
        queues.create("dead")
        queues.create("q", visibility_timeout=0.01, dead_letter="dead", max_receives=1)
        queues.push("q", b"claimed")
        queues.pull("q")
        queues.push("q", b"short-lived", ttl=0.01)
        with JournalReader(quick_path / "store" / "journal") as reader:

            def settled():
                reader.refresh()
                return {type(each.event) for each in reader.events()} >= {Expired, Moved}

            until(settled)
