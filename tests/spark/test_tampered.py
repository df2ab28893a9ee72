"""Row 28: a lake that somebody has changed by hand leads to no file outside of it."""

import json

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.spark.bronze import reached_point
from penstock.spark.lake import MARKER, VERSION, AddedFile, Lake, LakeUnusable

SCHEMA = "message bigint, name string"
OURS = pa.table({"message": [1, 2], "name": ["a", "b"]})
OUTSIDE = pa.table({"message": [7], "name": ["mine"]})


@pytest.fixture
def table(tmp_path):
    """A table of two files."""
    table = Lake.open(tmp_path / "lake", create=True).table("events", SCHEMA)
    for number in (1, 2):
        file = table.path / "data" / f"{number}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(OURS, file)
        table.add([AddedFile.of(table.path, file)], {"test": number})
    return table


@pytest.fixture
def outside(tmp_path):
    """A file that is not of the lake."""
    path = tmp_path / "elsewhere" / "mine.parquet"
    path.parent.mkdir()
    pq.write_table(OUTSIDE, path)
    yield path
    assert pq.read_table(path).equals(OUTSIDE)
    assert [*path.parent.iterdir()] == [path]


def commit(table, kind, path):
    """Adds a commit to the log of a table as a program that checks nothing would."""
    log = table.path / "_delta_log"
    number = 1 + max(int(each.stem) for each in log.glob("*.json"))
    action = {"path": path, "partitionValues": {}, "size": 1_000, "dataChange": True}
    if kind == "add":
        action |= {"modificationTime": 0, "stats": '{"numRecords": 1}'}
    else:
        action |= {"deletionTimestamp": 1, "extendedFileMetadata": True}
    (log / f"{number:020}.json").write_text(json.dumps({kind: action}) + "\n")


NAMES = [
    "../../elsewhere/mine.parquet",
    "data/../../../elsewhere/mine.parquet",
    "{outside}",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_log_that_names_a_file_elsewhere_is_not_followed(table, outside, name):
    commit(table, "add", name.format(outside=outside))
    with pytest.raises(LakeUnusable, match="which is not within it"):
        table.files()
    with pytest.raises(LakeUnusable, match="which is not within it"):
        table.update("message = 7", {"name": "NULL"})
    with pytest.raises(LakeUnusable, match="which is not within it"):
        table.compact(0)


@pytest.mark.parametrize(
    "name", [*NAMES, "file://{outside}", "%2e%2e/%2e%2e/elsewhere/mine.parquet"]
)
def test_a_file_elsewhere_that_a_log_says_was_removed_stays(table, outside, name):
    commit(table, "remove", name.format(outside=outside))
    assert table.compact(0)["joined"] == 2
    table.drop_versions(0)
    assert table.rows() == 4


def test_a_link_in_the_place_of_a_file_is_not_read(table, outside):
    (table.path / "data" / "link.parquet").symlink_to(outside)
    commit(table, "add", "data/link.parquet")
    for change in (table.files, lambda: table.compact(0)):
        with pytest.raises(LakeUnusable, match="which is not within it"):
            change()


def test_files_behind_a_link_to_a_directory_are_not_removed(table, outside):
    (table.path / "more").symlink_to(outside.parent)
    for change in (lambda: table.drop_versions(0), lambda: table.compact(0)):
        with pytest.raises(LakeUnusable, match="'more' in it is a link"):
            change()
    assert table.rows() == 4


@pytest.mark.parametrize("id_", [None, 7, "", "../../x", "a\x00b"])
def test_a_marker_without_an_id_is_one_sentence(tmp_path, id_):
    Lake.open(tmp_path / "lake", create=True)
    (tmp_path / "lake" / MARKER).write_text(json.dumps({"version": VERSION, "id": id_}))
    with pytest.raises(LakeUnusable, match="has no id of a lake"):
        Lake.open(tmp_path / "lake")


@pytest.mark.parametrize("content", ["", "v1\nnonsense", "v1\n[]", '{"offset": 1}', "[" * 100_000])
def test_a_checkpoint_of_an_earlier_release_that_is_none_is_one_sentence(table, tmp_path, content):
    checkpoint = tmp_path / "lake" / "checkpoints" / "store"
    for name in ("commits", "offsets"):
        (checkpoint / name).mkdir(parents=True)
        (checkpoint / name / "0").write_text(content)
    lake = Lake.open(tmp_path / "lake")
    with pytest.raises(LakeUnusable, match="checkpoints/store: cannot be read as a checkpoint"):
        reached_point(lake, "store")
    (checkpoint / "commits" / "1.crc").touch()
    with pytest.raises(LakeUnusable, match="cannot be read as a checkpoint"):
        reached_point(lake, "store")
