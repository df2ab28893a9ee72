"""Work done here or by Spark, whose errors are raised as ours; a table is opened once a commit."""

import gc
import os
import shutil
import threading
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import write_deltalake

from penstock.errors import InvalidField, JournalError, StoreUnusable
from penstock.spark.distribute import distribute
from penstock.spark.duck import DuckConnection, quoted
from penstock.spark.lake import AddedFile, Lake, LakeUnusable, our_errors
from penstock.spark.versions import newest_commit
from tests.spark.test_increments import no_spark


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})


def test_as_many_pieces_as_cores_run_at_once_and_a_single_one_has_all_cores(two_cores, tmp_path):
    together = threading.Barrier(2)

    def run(piece, threads):
        together.wait(timeout=60)
        return (piece, threads)

    shown: list[float] = []
    found = distribute(no_spark, run, range(4), tuple, tmp_path, shown.append)
    assert sorted(found) == [(piece, 1) for piece in range(4)]
    assert shown == [0.25, 0.5, 0.75, 1]
    assert distribute(no_spark, lambda *given: given, ["one"], tuple, tmp_path) == [("one", 2)]
    assert distribute(no_spark, run, [], tuple, tmp_path) == []


def test_collections_of_garbage_in_tasks_of_spark_spare_what_is_loaded(spark, tmp_path):
    def run(piece, threads):
        return gc.get_freeze_count()

    counts = distribute(lambda: spark, run, range(3), int, tmp_path, local_max=0)
    assert min(counts) > 10_000


def test_a_piece_that_fails_ends_the_work_with_its_error(two_cores, tmp_path):
    ran = []
    never = threading.Event()

    def run(piece, threads):
        ran.append(piece)
        if piece == 0:
            raise StoreUnusable("a file is gone")
        never.wait(0.05)

    # All of them would take ten seconds.
    with pytest.raises(StoreUnusable, match="a file is gone"):
        distribute(no_spark, run, range(400), object, tmp_path, local_max=400)
    assert len(ran) < 400


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("File x\npenstock.errors.InvalidField: option 'n': -1\nat org.x", InvalidField, "option"),
        ("penstock.errors.RequestError: a\npenstock.errors.StoreUnusable: b", StoreUnusable, "b"),
        # Classes of other modules, and names of `penstock.errors` that are no errors.
        ("penstock.spark.lake.LakeUnusable: not a lake", JournalError, "not a lake"),
        ("penstock.errors.Sequence: not an error", JournalError, "not an error"),
    ],
)
def test_an_error_of_a_task_is_raised_again_by_the_class_that_its_text_names(text, kind, message):
    with pytest.raises(kind, match=f"^{message}") as caught, our_errors():
        raise RuntimeError(f"Job aborted: Traceback (most recent call last):\n{text}")
    assert type(caught.value) is kind


def test_an_interrupt_that_duckdb_noticed_is_an_interrupt():
    with pytest.raises(KeyboardInterrupt), our_errors():
        raise RuntimeError("Query interrupted") from KeyboardInterrupt()


@pytest.mark.parametrize("text", ["no error of ours", "mypenstock.errors.InvalidField: x", ""])
def test_an_error_that_names_no_class_of_the_package_is_left_as_it_is(text):
    with pytest.raises(RuntimeError), our_errors():
        raise RuntimeError(text)


def test_a_table_is_opened_again_when_it_has_another_commit(tmp_path):
    table = Lake.open(tmp_path / "lake", create=True).table("numbers", "n bigint")
    rows = pa.table({"n": pa.array([1, 2], pa.int64())})

    def add():
        path = table.new_file()
        pq.write_table(rows, path)
        table.add([AddedFile.of(table.path, path)], {})

    assert table.delta() is None
    add()
    first = table.delta()
    assert first is not None
    assert table.delta() is first
    # As another process would.
    write_deltalake(str(table.path), rows, mode="append")
    assert (table.rows(), first.version()) == (4, 1)
    assert table.compact(0)["joined"] == 2
    assert len(table.files()) == 1
    add()
    assert table.rows() == 6
    # A table that is removed and made again has a commit of the same name.
    shutil.rmtree(table.path)
    assert table.delta() is None
    add()
    assert table.rows() == 2


def test_a_table_made_again_with_the_inode_and_time_of_the_old_commit_is_opened_again(tmp_path):
    lake = Lake.open(tmp_path / "lake", create=True)
    tables = [lake.table(name, "n bigint") for name in ("old", "new")]
    for rows, table in enumerate(tables, 1):
        write_deltalake(str(table.path), pa.table({"n": pa.array([7] * rows, pa.int64())}))
    old, new = (table.path for table in tables)
    assert tables[0].rows() == 1
    commit = old / "_delta_log" / f"{0:020d}.json"
    before = commit.stat()
    for path in new.glob("*.parquet"):
        shutil.copy(path, old)
    commit.write_bytes((new / "_delta_log" / commit.name).read_bytes())
    os.utime(commit, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = commit.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert tables[0].rows() == 2


def test_opening_a_table_never_reads_more_than_twenty_commits(tmp_path):
    """A watching run makes a commit of each table in every round."""
    table = Lake.open(tmp_path / "lake", create=True).table("numbers", "n bigint")
    since: list[int] = []
    checkpoints: list[int] = []
    for round_ in range(45):
        table.add([], {"events": round_})
        names = os.listdir(table.path / "_delta_log")
        checkpoints = [int(name[:20]) for name in names if ".checkpoint." in name]
        last = max((int(name[:20]) for name in names if name[0] == "0"), default=0)
        since.append(last - max(checkpoints, default=-1))
        assert table.committed("events") == round_
    assert max(since) <= 20
    assert len(checkpoints) == 2


def test_looking_for_a_new_commit_lists_no_log_and_probes_few_names(tmp_path, monkeypatch):
    """The log of a watching run has thousands of commits, and each table is looked at often."""
    table = Lake.open(tmp_path / "lake", create=True).table("numbers", "n bigint")
    for round_ in range(30):
        table.add([], {"events": round_})
    log = table.path / "_delta_log"
    probed = []
    exists = Path.exists

    def probe(self, **more):
        probed.append(self.name)
        return exists(self, **more)

    monkeypatch.setattr(os, "listdir", lambda path: pytest.fail(f"{path} was listed"))
    monkeypatch.setattr(Path, "exists", probe)
    found = newest_commit(log)
    assert found is not None
    assert found.version == 30
    assert len(probed) <= 20
    probed.clear()
    assert newest_commit(log, 30) == found
    assert probed == [f"{at:020d}.json" for at in (30, 31)]
    # Another process has removed the commit that was known, and has made newer ones.
    assert newest_commit(log, 99) == found


def test_a_log_without_a_readable_checkpoint_is_listed(tmp_path):
    table = Lake.open(tmp_path / "lake", create=True).table("numbers", "n bigint")
    log = table.path / "_delta_log"
    assert newest_commit(log) is None
    for round_ in range(25):
        table.add([], {"events": round_})
    found = newest_commit(log)
    for hint in (b"", b"{}", b"[]", b'{"version": 7000}', b'{"version": "x"}'):
        (log / "_last_checkpoint").write_bytes(hint)
        assert newest_commit(log) == found
    (log / "_last_checkpoint").unlink()
    assert newest_commit(log) == found


def test_commits_are_removed_oldest_first(tmp_path, monkeypatch):
    """A process that knows an old commit looks for the one behind it, also during the removal."""
    table = Lake.open(tmp_path / "lake", create=True).table("numbers", "n bigint")
    for round_ in range(25):
        table.add([], {"events": round_})
    log = table.path / "_delta_log"
    newest = newest_commit(log)
    seen = []
    unlink = Path.unlink

    def remove(self, **more):
        unlink(self, **more)
        seen.append({newest_commit(log, known) for known in range(25)})

    monkeypatch.setattr(Path, "unlink", remove)
    table.drop_versions(0)
    assert len(seen) > 20
    assert set().union(*seen) == {newest}


def test_a_damaged_log_is_one_sentence(tmp_path):
    table = Lake.open(tmp_path / "lake", create=True).table("numbers", "n bigint")
    table.add([], {})
    for commit in (table.path / "_delta_log").glob("*.json"):
        commit.write_text("{damaged")
    with pytest.raises(LakeUnusable, match="numbers: cannot be read as a table: ") as caught:
        table.rows()
    assert len(str(caught.value).splitlines()) == 1
    assert "unknown>" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_spark_and_arrow_read_the_files_that_duckdb_writes(spark, tmp_path):
    """Columns that repeat and columns that never do, which are encoded in different ways."""
    path = tmp_path / "rows.parquet"
    query = """
        SELECT n AS number, CASE WHEN n % 3 > 0 THEN n * 1000003 END AS sparse,
          CAST(n % 7 AS int) AS small, 'queue' || n % 5 AS repeated, 'id' || n AS unique_text,
          CASE WHEN n % 2 = 0 THEN 'even' || n END AS sparse_text, n % 11 = 0 AS flag,
          make_timestamptz(n * 1000000) AS instant
        FROM range(3000) AS given (n)"""
    with DuckConnection() as duck:
        duck.write(query, str(path))
        columns = "path_in_schema, encodings"
        encodings = dict(duck.fetch(f"SELECT {columns} FROM parquet_metadata({quoted(str(path))})"))
        rows = duck.dicts(
            f"SELECT * REPLACE (epoch_ms(instant) AS instant) FROM ({query}) ORDER BY number"
        )
    assert (
        encodings["number"] == encodings["sparse"] == encodings["instant"] == "DELTA_BINARY_PACKED"
    )
    assert encodings["small"] == encodings["repeated"] == "RLE_DICTIONARY"
    assert "DICTIONARY" not in encodings["unique_text"]
    by_spark = spark.sql(f"SELECT * FROM parquet.`{path}` ORDER BY number").toArrow()
    for table in (by_spark, pq.read_table(path).sort_by("number")):
        millis = pc.divide(table["instant"].cast(pa.timestamp("us", "UTC")).cast(pa.int64()), 1000)
        at = table.schema.get_field_index("instant")
        assert table.set_column(at, "instant", millis).to_pylist() == rows


def test_spark_reads_a_lake_in_a_directory_of_any_name(spark, tmp_path):
    rows = pa.table({"n": pa.array([1, 2], pa.int64())})
    for name in ("a space", "é", "100%", "#1", "[ab]", "{1,2}", "a*", "why?"):
        table = Lake.open(tmp_path / name, create=True).table("numbers", "n bigint")
        path = table.new_file()
        pq.write_table(rows, path)
        table.add([AddedFile.of(table.path, path)], {})
        assert table.frame(spark).count() == 2, name
