"""Rows 3 and 4 of the scorecard: a stream that lacks synced bytes of its files does not open."""

import os
import random

import pytest

from penstock.errors import StoreUnusable
from penstock.journal.disk import OsStorage
from penstock.journal.header_page import PAGE_BYTES
from penstock.journal.manifest import read_manifest
from penstock.journal.reader import JournalReader
from tests.journal.test_manifest import (
    FILE_BYTES,
    PAYLOAD_BYTES,
    VERSION,
    damage_manifest,
    found_in,
    make_killed,
    make_older,
    open_in,
)

ENTRY_BYTES = 1024
TAIL, SPARE = 4, 5
# Four entries of 1,024 bytes fill a file; the tail has three.
IDS = [*range(1, 20)]


@pytest.fixture
def killed(tmp_path):
    return make_killed(tmp_path)


def file_of(path, number):
    return path / f"{number:012d}.seg"


def blank_out(path, number, how):
    """Removes the whole content of a file, its header page included."""
    file = file_of(path, number)
    if how == "zeroed":
        file.write_bytes(bytes(FILE_BYTES))
    elif how == "garbled":
        file.write_bytes(random.Random(number).randbytes(FILE_BYTES))
    else:
        os.truncate(file, {"emptied": 0, "cut in its page": 1500}[how])


def contents_of(path):
    return {each.name: each.read_bytes() for each in path.iterdir()}


@pytest.mark.parametrize("is_older", [False, True], ids=["", "without a manifest"])
@pytest.mark.parametrize("how", ["emptied", "zeroed", "garbled"])
@pytest.mark.parametrize("numbers", [[TAIL], [TAIL, SPARE], [3, TAIL]])
def test_a_stream_whose_newest_files_were_emptied_does_not_open(killed, numbers, how, is_older):
    """The newest watermark was in them, and the older one does not know of what they held."""
    if is_older:
        make_older(killed)
    for number in numbers:
        blank_out(killed, number, how)
    before = contents_of(killed)
    with pytest.raises(StoreUnusable, match=rf"{numbers[0]:012d}\.seg \(emptied; offsets "):
        open_in(killed)
    assert contents_of(killed) == before
    with JournalReader(killed) as reader:
        loss = reader.loss()
        assert loss is not None
        assert loss.emptied == numbers
    kept = [each for each in IDS if each <= 4 * numbers[0]]
    assert found_in(killed, accept_loss=True)[0] == kept
    found, next_id = found_in(killed)
    assert found == kept
    assert next_id >= 20
    with open_in(killed) as segments:
        segments.append([b"later"], version=VERSION)
        segments.sync()
        assert [entry.entry_id for entry in segments.entries()] == [*kept, next_id]
        assert segments.quarantined != []


@pytest.mark.parametrize("number", [0, 2, 3, TAIL])
@pytest.mark.parametrize("left", [0, 1500, PAGE_BYTES, PAGE_BYTES + 1, PAGE_BYTES + 2500])
def test_a_stream_with_a_file_that_was_cut_below_the_watermark_does_not_open(killed, number, left):
    os.truncate(file_of(killed, number), left)
    before = contents_of(killed)
    is_unknown = number == TAIL and left < PAGE_BYTES and left < 1088
    how = "emptied" if is_unknown else "cut"
    with pytest.raises(StoreUnusable, match=rf"{number:012d}\.seg \({how}; offsets "):
        open_in(killed)
    assert contents_of(killed) == before
    held = 4 * number + max(0, left - PAGE_BYTES) // ENTRY_BYTES
    kept = [each for each in IDS if each <= held or each > 4 * (number + 1)]
    assert found_in(killed, accept_loss=True)[0] == kept
    # The loss was accepted once: from now on the lost range is damage.
    with open_in(killed) as segments:
        assert [entry.entry_id for entry in segments.entries()] == kept
        assert segments.next_id >= 20
        assert segments.accepted_loss == ""
        assert sum(each.size_bytes for each in segments.quarantined) >= (19 - len(kept)) * 1024


@pytest.mark.parametrize("how", ["emptied", "zeroed", "garbled", "cut in its page"])
def test_a_spare_that_was_emptied_is_restored(killed, how):
    """It had no entry: the entries end before it."""
    blank_out(killed, SPARE, how)
    assert found_in(killed) == (IDS, 20)
    assert os.path.getsize(file_of(killed, SPARE)) == FILE_BYTES


def test_bytes_that_were_never_synced_may_be_missing(tmp_path):
    """A file that is short behind the watermark is filled up, as for durability=os."""
    path = tmp_path / "stream"
    segments = open_in(path)
    for number in range(2):
        segments.append([bytes([number]) * 992], version=VERSION)
    segments.sync()
    segments.append([b"x" * 992], version=VERSION)
    segments._files.directory.close()
    os.truncate(file_of(path, 0), PAGE_BYTES + 2 * ENTRY_BYTES + 50)
    assert found_in(path) == ([1, 2], 3)
    os.truncate(file_of(path, 0), PAGE_BYTES + 2 * ENTRY_BYTES - 1)
    with pytest.raises(StoreUnusable, match=r"cut; offsets 2047 to 2048"):
        open_in(path)


def test_a_damaged_page_of_the_newest_file_costs_nothing_if_its_entries_are_whole(killed):
    with file_of(killed, TAIL).open("r+b") as file:
        file.write(bytes(PAGE_BYTES))
    assert found_in(killed) == (IDS, 20)


def test_a_stream_that_dropped_files_does_not_miss_what_they_held(killed):
    with open_in(killed) as segments:
        segments.drop_before([entry.offset for entry in segments.entries()][9])
    os.truncate(file_of(killed, 2), PAGE_BYTES + 100)
    with pytest.raises(StoreUnusable, match=rf"cut; offsets {9 * ENTRY_BYTES} to "):
        open_in(killed)


def test_everything_that_is_missing_is_named_in_one_error(killed):
    os.unlink(file_of(killed, 0))
    os.truncate(file_of(killed, 2), PAGE_BYTES)
    blank_out(killed, TAIL, "emptied")
    damage_manifest(killed)
    with pytest.raises(StoreUnusable) as refused:
        open_in(killed)
    text = str(refused.value)
    assert "3 of its files are missing or damaged" in text
    assert f"000000000000.seg (offsets 0 to {PAYLOAD_BYTES})" in text
    assert "000000000002.seg (cut; offsets " in text
    assert "000000000004.seg (emptied; offsets " in text
    assert found_in(killed, accept_loss=True)[0] == [*range(5, 9), *range(13, 17)]
    assert read_manifest(OsStorage().open(str(killed), writable=False)) is not None
