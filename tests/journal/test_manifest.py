"""Rows 3 and 4 of the scorecard: opening finds files that are missing, swapped or not its own."""

import os
import random
import shutil
import stat

import pytest

from penstock.errors import JournalError, StoreFull, StoreUnusable
from penstock.journal.disk import OsStorage
from penstock.journal.header_page import PAGE_BYTES, SLOT_OFFSETS, pack_slot, unpack_slots
from penstock.journal.manifest import NAME, FileList, Manifest, read_manifest
from penstock.journal.segments import Segments
from tests.journal.disk import Disk
from tests.journal.test_segments import GOLDEN, dump, undump

VERSION = b"TESTDATA"
FILE_BYTES = 8192
PAYLOAD_BYTES = FILE_BYTES - PAGE_BYTES


def open_in(path, **options):
    return Segments.open(path, file_bytes=FILE_BYTES, background=False, **options)


def names_in(path):
    return sorted(path.glob("*.seg"))


@pytest.fixture
def killed(tmp_path):
    return make_killed(tmp_path)


def make_killed(tmp_path):
    """A stream of nineteen synced entries in five files and a spare, as a kill leaves it."""
    path = tmp_path / "stream"
    segments = open_in(path)
    for number in range(19):
        segments.append([bytes([number]) * 992], version=VERSION)
        segments.sync()
    shutil.copytree(path, tmp_path / "copy")
    segments.close()
    return tmp_path / "copy"


def found_in(path, **options):
    with open_in(path, **options) as segments:
        return [entry.entry_id for entry in segments.entries()], segments.next_id


MISSING = {
    "first": ([0], range(1, 5)),
    "middle": ([2], range(9, 13)),
    "two in the middle": ([1, 2], range(5, 13)),
    "last": ([5], range(0)),
    "last two": ([4, 5], range(17, 20)),
    "first and last": ([0, 4], [*range(1, 5), *range(17, 20)]),
}


@pytest.mark.parametrize("which", MISSING)
def test_a_stream_that_misses_a_file_does_not_open(killed, which):
    numbers, _ = MISSING[which]
    for number in numbers:
        os.unlink(killed / f"{number:012d}.seg")
    before = sorted(os.listdir(killed))
    with pytest.raises(StoreUnusable) as refused:
        open_in(killed)
    assert f"{len(numbers)} of its files are missing: {numbers[0]:012d}.seg" in str(refused.value)
    assert f"(offsets {numbers[0] * PAYLOAD_BYTES} to " in str(refused.value)
    assert "with accept_loss" in str(refused.value)
    assert sorted(os.listdir(killed)) == before


@pytest.mark.parametrize("which", MISSING)
def test_an_accepted_loss_costs_what_the_files_held_and_no_id_is_used_twice(killed, which):
    numbers, lost = MISSING[which]
    for number in numbers:
        os.unlink(killed / f"{number:012d}.seg")
    kept = [entry_id for entry_id in range(1, 20) if entry_id not in lost]
    assert found_in(killed, accept_loss=True)[0] == kept
    # The loss was accepted once: from now on the stream opens, and the missing range is damage.
    found, next_id = found_in(killed)
    assert found == kept
    assert next_id >= 20
    with open_in(killed) as segments:
        segments.append([b"later"], version=VERSION)
    with open_in(killed) as segments:
        assert [entry.entry_id for entry in segments.entries()] == [*kept, next_id]
        assert bool(segments.quarantined) == bool(lost or which == "last")


@pytest.mark.parametrize(
    ("numbers", "lost"),
    [([0], range(1, 5)), ([2], range(9, 13)), ([0, 2], [*range(1, 5), *range(9, 13)])],
)
def test_an_accepted_loss_keeps_the_entries_after_it_that_were_never_synced(
    tmp_path, numbers, lost
):
    """Rows 3 and 4: durability=os promises nothing, but what is on the disk is kept."""
    path = tmp_path / "stream"
    segments = open_in(path)
    for number in range(19):
        segments.append([bytes([number]) * 992], version=VERSION)
    shutil.copytree(path, tmp_path / "copy")
    segments.close()
    for number in numbers:
        os.unlink(tmp_path / "copy" / f"{number:012d}.seg")
    kept = [entry_id for entry_id in range(1, 20) if entry_id not in lost]
    assert found_in(tmp_path / "copy", accept_loss=True) == (kept, 20)
    with open_in(tmp_path / "copy") as segments:
        assert [entry.entry_id for entry in segments.entries()] == kept
        segments.append([b"later"], version=VERSION)
        assert sum(each.size_bytes for each in segments.quarantined) >= len(lost) * 992


def test_a_stream_opens_again_after_its_missing_file_was_put_back(killed, tmp_path):
    shutil.move(killed / "000000000002.seg", tmp_path / "aside")
    with pytest.raises(StoreUnusable, match="missing"):
        open_in(killed)
    shutil.move(tmp_path / "aside", killed / "000000000002.seg")
    assert found_in(killed) == ([*range(1, 20)], 20)


def test_a_stream_without_any_of_its_files_does_not_open_as_an_empty_one(killed):
    for path in names_in(killed):
        path.unlink()
    for accept_loss in (False, True):
        with pytest.raises(StoreUnusable, match="all of its files are missing"):
            open_in(killed, accept_loss=accept_loss)


def test_two_files_that_were_swapped_are_refused(killed):
    os.rename(killed / "000000000001.seg", killed / "aside")
    os.rename(killed / "000000000002.seg", killed / "000000000001.seg")
    os.rename(killed / "aside", killed / "000000000002.seg")
    with pytest.raises(StoreUnusable, match=r"000000000001\.seg says that it is file 2"):
        open_in(killed, accept_loss=True)


def test_a_file_of_another_stream_is_refused_by_name(killed, tmp_path):
    with open_in(tmp_path / "other") as other:
        for _ in range(19):
            other.append([bytes(992)], version=VERSION)
    shutil.copy(tmp_path / "other" / "000000000002.seg", killed / "000000000002.seg")
    with pytest.raises(
        StoreUnusable, match=r"not of the same stream as the others: 000000000002\.seg"
    ):
        open_in(killed, accept_loss=True)


def test_the_manifest_of_another_stream_is_refused(killed, tmp_path):
    open_in(tmp_path / "other").close()
    shutil.copy(tmp_path / "other" / NAME, killed / NAME)
    with pytest.raises(StoreUnusable, match="manifest belongs to another stream"):
        open_in(killed)


@pytest.mark.parametrize("number", [0, 2, 5])
@pytest.mark.parametrize("kind", ["fifo", "directory", "link", "device"])
def test_a_directory_or_pipe_in_place_of_a_file_is_refused_at_once(killed, number, kind):
    path = killed / f"{number:012d}.seg"
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(killed / "000000000001.seg")
    else:
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root makes devices")
    with pytest.raises(StoreUnusable, match="not a regular file"):
        open_in(killed)


def make_older(path):
    """Changes a stream to what a version without the manifest would have written."""
    (path / NAME).unlink()
    for each in names_in(path):
        with each.open("r+b") as file:
            page = file.read(PAGE_BYTES)
            for place, slot in unpack_slots(page):
                file.seek(SLOT_OFFSETS[place])
                file.write(pack_slot(slot._replace(is_listed=False)))


def test_a_stream_of_an_older_version_without_a_manifest_gets_one(killed):
    make_older(killed)
    assert found_in(killed) == ([*range(1, 20)], 20)
    assert read_manifest(OsStorage().open(str(killed), writable=False)) == FileList(1, 0, 5, 0)
    make_older(killed)
    os.unlink(killed / "000000000002.seg")
    with pytest.raises(StoreUnusable, match=r"missing: 000000000002\.seg"):
        open_in(killed)


@pytest.mark.parametrize("also", [[], [4, 5], [0]])
def test_a_stream_whose_manifest_was_removed_does_not_open(killed, also):
    """Rows 3 and 4: without its manifest it looks like a stream of an older version."""
    for number in also:
        os.unlink(killed / f"{number:012d}.seg")
    (killed / NAME).unlink()
    before = sorted(os.listdir(killed))
    with pytest.raises(StoreUnusable, match=r"missing: manifest \(which listed the files, and any"):
        open_in(killed)
    assert sorted(os.listdir(killed)) == before
    with open_in(killed, accept_loss=True) as segments:
        assert segments.accepted_loss.startswith("manifest (which listed the files, and any behind")
        assert "000000000000.seg" in segments.accepted_loss or 0 not in also
    # The loss was accepted once: there is a manifest again.
    open_in(killed).close()


def test_files_that_a_snapshot_knows_of_are_missed_in_a_stream_without_a_manifest(killed):
    make_older(killed)
    for number in (4, 5):
        os.unlink(killed / f"{number:012d}.seg")
    with pytest.raises(StoreUnusable, match=r"missing: 000000000004\.seg"):
        open_in(killed, known_end=4 * PAYLOAD_BYTES + 1)


def test_files_that_were_dropped_are_not_reported_as_missing(killed):
    with open_in(killed) as segments:
        segments.drop_before([entry.offset for entry in segments.entries()][9])
    assert found_in(killed)[0] == [*range(10, 20)]
    make_older(killed)
    assert found_in(killed)[0] == [*range(10, 20)]


def test_files_dropped_before_the_newest_files_were_lost_are_not_reported_as_missing(killed):
    with open_in(killed) as segments:
        segments.drop_before([entry.offset for entry in segments.entries()][9])
        shutil.copytree(killed, killed.parent / "later")
    for number in (4, 5):
        os.unlink(killed.parent / "later" / f"{number:012d}.seg")
    with pytest.raises(StoreUnusable, match=r"2 of its files are missing: 000000000004\.seg"):
        open_in(killed.parent / "later")


def test_a_spare_is_listed_before_it_is_used_and_a_manifest_that_fails_stops_no_append():
    disk = Disk()
    segments = open_on(disk)
    disk.failing_list_syncs = {disk.list_syncs + 1, disk.list_syncs + 2}
    for _ in range(12):
        segments.append([bytes(992)], version=VERSION)
        segments.sync()
    assert disk.list_syncs > 2
    segments.close()
    left = disk.after_cut(random.Random(1))
    assert open_on(left).next_id == 13


def test_an_append_that_needs_a_file_that_cannot_be_listed_is_refused():
    disk = Disk()
    segments = open_on(disk)
    disk.failing_list_syncs = set(range(1, 1000))
    with pytest.raises(JournalError, match="cannot make"):
        segments.append([bytes(9000)], version=VERSION)
    assert segments.end_offset == 0
    disk.failing_list_syncs = set()
    segments.append([bytes(992)], version=VERSION)
    segments.sync()


def test_a_full_disk_refuses_a_stream_that_cannot_be_listed_and_leaves_nothing():
    disk = Disk(room_bytes=FILE_BYTES)
    with pytest.raises((StoreUnusable, StoreFull)):
        open_on(disk)
    assert disk.names_now == {}


def test_a_stream_without_a_manifest_opens_on_a_full_disk():
    disk = Disk()
    open_on(disk).close()
    del disk.names_now[NAME], disk.names_stable[NAME]
    disk.room_bytes = 0
    open_on(disk).close()
    assert NAME not in disk.names_now


def open_on(disk, **options):
    return Segments.open(
        disk.path, storage=disk, file_bytes=FILE_BYTES, background=False, **options
    )


def damage_manifest(path, bit=99):
    page = bytearray((path / NAME).read_bytes())
    page[bit // 8] ^= 1 << bit % 8
    (path / NAME).write_bytes(page)


@pytest.mark.parametrize("bit", range(0, 44 * 8, 5))
def test_a_damaged_manifest_is_made_again_if_no_file_is_missing(killed, bit):
    damage_manifest(killed, bit)
    directory = OsStorage().open(str(killed), writable=False)
    assert read_manifest(directory) is None
    with open_in(killed) as segments:
        assert [entry.entry_id for entry in segments.entries()] == [*range(1, 20)]
        assert [each.why for each in segments.quarantined] == [
            "manifest does not match its checksum"
        ]
    assert read_manifest(directory) == FileList(1, 0, 5, 0)
    with open_in(killed) as segments:
        assert segments.quarantined == []


@pytest.mark.parametrize("gone", [[4, 5], [3, 4, 5], [4]])
def test_a_stream_with_a_damaged_manifest_that_may_have_listed_more_files_does_not_open(
    killed, gone
):
    """Rows 3 and 4: a damaged list cannot say that the files at the end are missing."""
    for number in gone:
        os.unlink(killed / f"{number:012d}.seg")
    damage_manifest(killed)
    with pytest.raises(StoreUnusable, match=r"missing or damaged: manifest \(damaged; it listed"):
        open_in(killed)
    kept = [*range(1, 4 * gone[0] + 1)]
    with open_in(killed, accept_loss=True) as segments:
        assert [entry.entry_id for entry in segments.entries()] == kept
    assert found_in(killed)[0] == kept


@pytest.mark.parametrize("gone", [[], [4, 5]])
def test_a_stream_whose_newest_list_is_damaged_does_not_open_if_it_may_have_listed_more(
    killed, gone
):
    """Rows 3 and 4: the older list is valid, and has one file less."""
    with open_in(killed) as segments:
        identity = segments.identity
    directory = OsStorage().open(str(killed), writable=True)
    manifest = Manifest(directory, identity, FILE_BYTES, read_manifest(directory))
    manifest.write(0, 3)
    manifest.write(0, 4)
    newest = read_manifest(directory)
    directory.close()
    assert newest is not None
    damage_manifest(killed, ((512, 1024)[newest.place] + 9) * 8)
    for number in gone:
        os.unlink(killed / f"{number:012d}.seg")
    if gone:
        with pytest.raises(StoreUnusable, match="any behind 000000000003"):
            open_in(killed)
    else:
        assert found_in(killed) == ([*range(1, 20)], 20)


def test_a_stream_without_files_and_with_a_damaged_manifest_is_not_made_anew(killed):
    for path in names_in(killed):
        path.unlink()
    damage_manifest(killed)
    with pytest.raises(StoreUnusable, match="all of its files are missing"):
        open_in(killed)


def test_if_one_slot_of_the_manifest_is_damaged_the_other_is_read(killed):
    directory = OsStorage().open(str(killed), writable=False)
    newest = read_manifest(directory)
    assert newest is not None
    page = bytearray((killed / NAME).read_bytes())
    page[(512, 1024)[newest.place] + 9] ^= 1
    (killed / NAME).write_bytes(page)
    older = read_manifest(directory)
    assert older is not None
    assert (older.serial, older.last) == (newest.serial - 1, newest.last - 1)


def test_the_golden_manifest_is_written_and_read_as_these_bytes(tmp_path):
    directory = OsStorage().open(str(tmp_path), writable=True)
    identity = bytes(range(16))
    manifest = Manifest(directory, identity, FILE_BYTES, None)
    manifest.write(0, 0)
    manifest.write(0, 1)
    manifest.write(1, 7)
    expected = (GOLDEN / "manifest.txt").read_text()
    assert dump((tmp_path / NAME).read_bytes()) == expected
    (tmp_path / NAME).write_bytes(undump(expected, PAGE_BYTES))
    assert read_manifest(directory, identity) == FileList(3, 1, 7, 0)
