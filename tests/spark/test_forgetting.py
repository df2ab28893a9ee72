"""What is forgotten is in no file of the lake: neither in rows, nor in Delta's log."""

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

import pyarrow.parquet as pq
from deltalake import DeltaTable

from penstock import cli
from penstock.core.events import Pushed, QueueCreated
from penstock.core.receipts import MessageIds
from penstock.service import QueueSettings
from penstock.spark.bronze import events_table, ingest
from penstock.spark.lake import OUTBOX, Lake, Table, locked
from penstock.spark.stream import Stream
from tests.spark.journals import write_store
from tests.spark.lakes import Stopped

QUEUE = [QueueCreated(1, 1, "q", QueueSettings())]


def push(number):
    """A push whose body and attribute are found by their texts."""
    return [Pushed(number, 1, number, b"secret-%02d" % number, attributes={"a": hidden(number)})]


def hidden(number):
    return f"hidden-{number:02d}"


def contents(number):
    return b"secret-%02d" % number, hidden(number).encode()


def id_of(store, number):
    stream = Stream(str(store))
    try:
        return MessageIds(stream.identity).show(number)
    finally:
        stream.close()


def all_bytes(root):
    """Every file below a directory, as it is and, of Parquet, as it is read."""
    found = []
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        found.append(path.read_bytes())
        if path.suffix == ".parquet":
            found.append(repr(pq.ParquetFile(path).read().to_pylist()).encode())
    return b"\n".join(found)


def a_lake(spark, tmp_path, pushes):
    """A lake of a store with these entries, each of them a batch and so a file of `events`."""
    store = write_store(tmp_path / "store", [QUEUE])
    lake = Lake.open(tmp_path / "lake", create=True)
    for each in pushes:
        write_store(store, [each])
        ingest(lambda: spark, lake, str(store))
    return store, lake


def forget(lake, *message_ids):
    return cli.main(["pipeline", "forget", "--lake", str(lake.path), *message_ids])


def test_forgetting_one_message_after_another_leaves_neither_in_any_byte_of_the_lake(
    spark, tmp_path, capsys
):
    store, lake = a_lake(spark, tmp_path, map(push, (1, 2, 3)))
    assert events_table(lake).compact(168)["joined"] == 3
    for number in (1, 2):
        assert all(each in all_bytes(lake.path) for each in contents(number))
        assert forget(lake, id_of(store, number)) == 0
        assert not any(each in all_bytes(lake.path) for each in contents(number))
    assert all(each in all_bytes(lake.path) for each in contents(3))
    assert events_table(lake).rows() == 4
    assert forget(lake, *(id_of(store, number) for number in (2, 3, 4))) == 1
    shown = capsys.readouterr().out.splitlines()[-3:]
    assert [line.partition(": ")[2] for line in shown] == [
        "forgotten in 1 rows", "forgotten in 1 rows", "is not in the lake, or was dropped",
    ]  # fmt: skip
    assert not any(each in all_bytes(lake.path) for each in contents(3))


def test_a_lake_of_an_earlier_release_forgets_what_stands_in_its_log(spark, tmp_path, monkeypatch):
    """Its tables had no limit to the statistics: a compaction wrote attributes into the log."""
    with monkeypatch.context() as patch:
        patch.setattr("penstock.spark.lake.table_properties", lambda schema: {})
        patch.setattr("penstock.spark.lake.keep_texts_out", lambda delta: None)
        store, lake = a_lake(spark, tmp_path, map(push, (1, 2, 3)))
        assert events_table(lake).compact(168)["joined"] == 3
    log = lake.path / "events" / "_delta_log"
    assert contents(1)[1] in b"".join(path.read_bytes() for path in log.iterdir())
    for number in (1, 3, 2):
        assert forget(lake, id_of(store, number)) == 0
        assert not any(each in all_bytes(lake.path) for each in contents(number))
    # The statistics that the pipeline uses are there.
    assert events_table(lake).files()[0].largest["message"] == 3


def test_what_killed_processes_left_is_forgotten_too(spark, tmp_path, monkeypatch):
    store, lake = a_lake(spark, tmp_path, [push(1)])
    write_store(store, [push(2)])
    commit = Table._commit

    def stop(self, *arguments):
        raise Stopped

    # Read and moved to its place, and then the process died; the next run reached further.
    monkeypatch.setattr(Table, "_commit", stop)
    with pytest.raises(Stopped):
        ingest(lambda: spark, lake, str(store))
    monkeypatch.setattr(Table, "_commit", commit)
    write_store(store, [push(3)])
    ingest(lambda: spark, lake, str(store))
    events = lake.path / "events"
    left = [
        events / "_staging-abc" / "span.parquet",
        events / "part-0.parquet#1",
        events / "_delta_log" / "00000000000000000009.json#1",
        lake.path / "outbox" / "part-0.parquet",
    ]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"".join(contents(2)))
    left.pop(), left.pop(0)
    assert forget(lake, id_of(store, 2)) == 0
    for path in (*left, events / "_staging-abc", lake.path / "outbox"):
        assert not path.exists()
    assert not any(each in all_bytes(lake.path) for each in contents(2))
    assert events_table(lake).rows() == 4


def test_forgetting_is_refused_while_a_run_or_a_replay_has_the_content_elsewhere(
    spark, tmp_path, capsys
):
    store, lake = a_lake(spark, tmp_path, [push(1)])
    with locked(lake, OUTBOX):
        before = all_bytes(lake.path)
        assert forget(lake, id_of(store, 1)) > 1
        assert "another process is replaying from it" in capsys.readouterr().err
    with locked(lake, "events"):
        assert forget(lake, id_of(store, 1)) > 1
        assert "another process is changing its events" in capsys.readouterr().err
    assert all_bytes(lake.path) == before


def test_versions_of_the_hours_that_are_kept_can_be_read_and_older_ones_are_gone(spark, tmp_path):
    _, lake = a_lake(spark, tmp_path, map(push, (1, 2, 3)))
    table = events_table(lake)
    table.compact(1)
    for version in range(1, 4):
        rows = DeltaTable(str(table.path), version=version).to_pyarrow_table()
        assert len(rows) == version + 1
    assert table.compact(0)["removed"] == 3
    with pytest.raises(Exception, match=r"No files in log segment|version"):
        DeltaTable(str(table.path), version=2).to_pyarrow_table()
    log = table.path / "_delta_log"
    assert len(list(log.glob("*.checkpoint.parquet"))) == 1
    # A log that is cut is read by the next process as well.
    again = DeltaTable(str(table.path))
    assert len(again.to_pyarrow_table()) == 4
    [file] = table.files()
    assert again.transaction_version(f"read/{file.smallest['store']}") is not None
    # Statistics are of whole numbers and the store, as those of files that tasks write.
    assert {name for name, value in file.smallest.items() if type(value) is str} == {"store"}
    assert (file.smallest["message"], file.largest["message"]) == (1, 3)
