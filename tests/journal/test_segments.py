"""The stream in real files: entries are read as they were written, across files and processes."""

import contextlib
import os
import random
import stat
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidField, JournalError, StoreInUse, StoreUnusable
from penstock.journal.reader import JournalReader
from penstock.journal.scan import Quarantined
from penstock.journal.segments import Segments
from tests.journal.disk import Disk

VERSION = b"TESTDATA"
FILE_BYTES = 8192
GOLDEN = Path(__file__).parent.parent / "golden" / "segments"


def open_in(path, **options):
    return Segments.open(path, **{"file_bytes": FILE_BYTES, "background": False} | options)


def open_as(path, writable):
    return open_in(path) if writable else JournalReader(path)


def append_all(segments, bodies):
    return [segments.append([body], version=VERSION) for body in bodies]


def bodies_of(segments):
    return [entry.data for entry in segments.entries()]


def open_descriptors(path):
    """Count this process's descriptors of files below `path`."""
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(descriptor).startswith(str(path))
    return count


def dump(image):
    """Return the lines of sixteen bytes that are not all zero, with their places."""
    lines = [(at, image[at : at + 16]) for at in range(0, len(image), 16)]
    return "".join(f"{at:08x} {line.hex(' ')}\n" for at, line in lines if any(line))


def undump(text, size):
    image = bytearray(size)
    for line in text.splitlines():
        at, digits = line.split(" ", 1)
        image[int(at, 16) : int(at, 16) + 16] = bytes.fromhex(digits)
    return bytes(image)


def write_golden_stream(path, monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda size: bytes(range(size)))
    with open_in(path) as segments:
        segments.append([b"first"], version=b"PENSTK01")
        segments.append([b"second ", b"in two parts"], version=b"PQUEUE01", ttl_s=60)
        segments.sync()
        segments.append([b"x" * 4100], version=b"PENSTK01")
        segments.sync()
        segments.advance(37)


def test_the_golden_files_are_what_is_written(tmp_path, monkeypatch):
    write_golden_stream(tmp_path, monkeypatch)
    for name in ("000000000000.seg", "000000000001.seg"):
        golden = (GOLDEN / f"listed-{name}.txt").read_text()
        assert dump((tmp_path / name).read_bytes()) == golden


@pytest.mark.parametrize("kind", ["", "listed-"])
def test_the_golden_files_are_read_as_their_entries(tmp_path, kind):
    """The files without a kind were written by a version that had no manifest."""
    for name in ("000000000000.seg", "000000000001.seg"):
        golden = (GOLDEN / f"{kind}{name}.txt").read_text()
        (tmp_path / name).write_bytes(undump(golden, FILE_BYTES))
    segments = JournalReader(tmp_path)
    assert segments.identity == bytes(range(16))
    assert (segments.first_id, segments.next_id, segments.durable_offset) == (2, 4, 4220)
    second, third = segments.entries()
    assert (second.entry_id, second.version, second.ttl_s) == (2, b"PQUEUE01", 60)
    assert second.data == b"second in two parts"
    assert (third.entry_id, third.offset, third.data) == (3, 88, b"x" * 4100)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.lists(st.binary(max_size=40), max_size=3),
            st.integers(0, 9000),
            st.integers(0, 2**32 - 1),
            st.booleans(),
        ),
        max_size=12,
    ),
    st.sampled_from([8192, 12288, 65536]),
)
def test_any_entries_are_read_as_written_across_files_and_reopening(steps, file_bytes):
    disk = Disk()
    segments = open_in(disk.path, storage=disk, file_bytes=file_bytes)
    expected = []
    for number, (parts, padding, ttl_s, reopen) in enumerate(steps, start=1):
        parts = [*parts, bytes(padding)]
        entry_id, data_offset = segments.append(parts, version=VERSION, ttl_s=ttl_s)
        data = b"".join(parts)
        assert entry_id == number
        assert segments.read(data_offset, len(data)) == data
        expected.append((number, data_offset, ttl_s, data))
        if reopen:
            segments.close()
            segments = open_in(disk.path, storage=disk, file_bytes=8192)
    segments.sync()
    found = [(e.entry_id, e.data_offset, e.ttl_s, e.data) for e in segments.entries()]
    assert found == expected
    assert segments.quarantined == []


def test_files_and_directory_are_private_and_preallocated(tmp_path):
    path = tmp_path / "deep" / "stream"
    with open_in(path, file_bytes=65536):
        names = sorted(os.listdir(path))
        assert names == ["000000000000.seg", "000000000001.seg", "manifest"]
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
        for name, size in zip(names, (65536, 65536, 4096), strict=True):
            about = os.stat(path / name)
            assert stat.S_IMODE(about.st_mode) == 0o600
            assert about.st_size == size
            assert about.st_blocks * 512 >= size


def test_the_spare_is_made_in_the_background_unless_that_is_turned_off(tmp_path):
    with Segments.open(tmp_path, file_bytes=FILE_BYTES) as segments:
        append_all(segments, [bytes(3000)] * 5)
        segments.sync()
        assert bodies_of(segments) == [bytes(3000)] * 5
    assert len(os.listdir(tmp_path)) >= 5


def test_a_part_of_an_entry_is_read_by_its_offset(tmp_path):
    with open_in(tmp_path) as segments:
        body = bytes(range(256)) * 60
        append_all(segments, [b"before"])
        _, data_offset = segments.append([memoryview(body)], version=VERSION)
        assert segments.read(data_offset + 5000, 300) == body[5000:5300]
        assert segments.read(data_offset, len(body)) == body
        assert segments.read(0, 0) == b""
        for offset, size in [(-1, 1), (0, -1), (segments.end_offset, 1), (0, 10**9)]:
            with pytest.raises(InvalidField, match="the stream holds"):
                segments.read(offset, size)


def test_only_durable_entries_are_read_unless_another_end_is_given(tmp_path):
    with open_in(tmp_path) as segments:
        append_all(segments, [b"durable"])
        segments.sync()
        append_all(segments, [b"not yet"])
        assert bodies_of(segments) == [b"durable"]
        ahead = segments.entries(segments.durable_offset, segments.end_offset)
        assert [entry.data for entry in ahead] == [b"not yet"]
        assert (segments.durable_next_id, segments.next_id) == (2, 3)


def test_dropping_unlinks_whole_files_and_survives_reopening(tmp_path):
    with open_in(tmp_path) as segments:
        offsets = [at - 32 for _, at in append_all(segments, [bytes(1000)] * 20)]
        assert segments.drop_before(offsets[10]) == 2
        assert segments.drop_before(offsets[3]) == 0
        assert [entry.entry_id for entry in segments.entries()] == list(range(11, 21))
        with pytest.raises(InvalidField):
            segments.read(0, 10)
    assert "000000000001.seg" not in os.listdir(tmp_path)
    with open_in(tmp_path) as segments:
        assert (segments.first_offset, segments.first_id) == (offsets[10], 11)
        assert [entry.entry_id for entry in segments.entries()] == list(range(11, 21))
        assert segments.drop_before(segments.end_offset) > 0
        assert bodies_of(segments) == []
        assert append_all(segments, [b"on"])[0][0] == 21


def test_dropping_beyond_the_end_is_refused(tmp_path):
    with open_in(tmp_path) as segments:
        append_all(segments, [b"x"])
        with pytest.raises(InvalidField, match="the stream holds 0 to 33"):
            segments.drop_before(34)


def test_dropped_files_are_kept_in_the_archive_and_read_there(tmp_path):
    stream, archive = tmp_path / "stream", tmp_path / "kept" / "archive"
    with open_in(stream) as segments:
        offsets = [at - 32 for _, at in append_all(segments, [bytes(1000)] * 20)]
        segments.drop_before(offsets[6], archive=archive)
        segments.drop_before(offsets[15], archive=archive)
        assert sorted(os.listdir(archive)) == [f"{n:012d}.seg" for n in range(3)]
    kept = JournalReader(archive, archive=archive)
    # The twelfth entry ends in a file that is still in the stream.
    assert [entry.entry_id for entry in kept.entries()] == list(range(1, 12))
    os.unlink(archive / "000000000000.seg")
    kept = JournalReader(archive, archive=archive)
    assert [entry.entry_id for entry in kept.entries()] == list(range(5, 12))
    assert kept.damage == []


def test_nothing_is_dropped_if_the_archive_has_another_file_of_that_name(tmp_path):
    archive = tmp_path / "archive"
    archive.mkdir()
    (archive / "000000000000.seg").write_bytes(b"another file")
    with open_in(tmp_path / "stream") as segments:
        append_all(segments, [bytes(3000)] * 3)
        with pytest.raises(JournalError, match="another file of that name"):
            segments.drop_before(segments.end_offset, archive=archive)
        assert segments.first_offset == 0
        segments.sync()
        assert bodies_of(segments) == [bytes(3000)] * 3


def test_an_interrupted_archive_is_finished_the_next_time(tmp_path):
    archive = tmp_path / "archive"
    archive.mkdir()
    with open_in(tmp_path / "stream") as segments:
        append_all(segments, [bytes(3000)] * 3)
        segments.sync()
        os.link(tmp_path / "stream" / "000000000000.seg", archive / "000000000000.seg")
        assert segments.drop_before(segments.end_offset, archive=archive) == 2


def test_a_reader_follows_a_live_writer_and_changes_nothing(tmp_path):
    with open_in(tmp_path) as segments:
        append_all(segments, [b"one"])
        segments.sync()
        reader = JournalReader(tmp_path)
        append_all(segments, [bytes(5000)])
        assert reader.refresh() == 35
        assert [entry.data for entry in reader.entries(0)] == [b"one"]
        segments.sync()
        append_all(segments, [bytes(9000)])
        segments.sync()
        before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
        assert reader.refresh() == segments.durable_offset
        assert [len(entry.data) for entry in reader.entries(0)] == [3, 5000, 9000]
        assert reader.read(32, 3) == b"one"
        reader.close()
        assert before == {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
        segments.drop_before(segments.end_offset)


def test_a_reader_gets_an_error_when_the_file_it_reads_is_dropped(tmp_path):
    with open_in(tmp_path) as segments:
        append_all(segments, [bytes(3000)] * 10)
        segments.sync()
        reader = JournalReader(tmp_path)
        walked = reader.entries()
        assert next(walked).entry_id == 1
        segments.drop_before(segments.end_offset)
        with pytest.raises(JournalError, match="dropped"):
            list(walked)
        assert reader.damage == []
        assert reader.refresh() == segments.end_offset


def test_appends_continue_during_syncs_in_another_thread(tmp_path):
    with open_in(tmp_path, file_bytes=65536, background=True) as segments:
        stop = threading.Event()
        seen = []

        def keep_syncing():
            while not stop.is_set():
                seen.append(segments.sync())

        thread = threading.Thread(target=keep_syncing)
        thread.start()
        bodies = [bytes([n % 256]) * (n % 700) for n in range(3000)]
        append_all(segments, bodies)
        stop.set()
        thread.join()
        segments.sync()
        assert seen == sorted(seen)
        assert bodies_of(segments) == bodies
    with open_in(tmp_path) as segments:
        assert bodies_of(segments) == bodies


def test_a_stream_of_more_files_than_are_kept_open_can_be_read(tmp_path):
    with open_in(tmp_path) as segments:
        places = []
        for n in range(150):
            places += append_all(segments, [bytes([n]) * 4000])
            segments.sync()
        for n in (0, 149, 75, 3, 148):
            assert segments.read(places[n][1], 4000) == bytes([n]) * 4000
        assert len(bodies_of(segments)) == 150
        assert open_descriptors(tmp_path) < 150


def test_an_existing_stream_keeps_its_file_size(tmp_path):
    open_in(tmp_path, file_bytes=12288).close()
    with open_in(tmp_path, file_bytes=8192) as segments:
        assert segments.file_bytes == 12288


@pytest.mark.parametrize("file_bytes", [0, 4096, 8191, 10000])
def test_an_invalid_file_size_is_refused(tmp_path, file_bytes):
    with pytest.raises(InvalidField, match="multiple of 4096"):
        open_in(tmp_path, file_bytes=file_bytes)


def test_the_error_of_a_second_writer_names_the_process_that_has_the_stream(tmp_path):
    with open_in(tmp_path), pytest.raises(StoreInUse) as refused:
        open_in(tmp_path)
    assert str(refused.value) == f"{tmp_path}: in use by process {os.getpid()}"
    open_in(tmp_path).close()


def test_the_error_of_an_unusable_path_names_it_and_nothing_is_changed(tmp_path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for path, why, writable in [
        ("file", "is not a directory", True),
        ("file/below", "cannot be used: Not a directory", True),
        ("link", "is a symbolic link", True),
        ("gone", "cannot be read: No such file or directory", False),
        ("empty", "holds no segment files", False),
    ]:
        with pytest.raises(StoreUnusable) as refused:
            open_as(tmp_path / path, writable)
        assert str(refused.value) == f"{tmp_path / path}: {why}"
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "link"]
    assert os.listdir(tmp_path / "empty") == []


def test_the_error_of_a_file_of_another_format_names_it_and_nothing_is_changed(tmp_path):
    with open_in(tmp_path) as segments:
        append_all(segments, [b"x"])
    name = tmp_path / "000000000000.seg"
    image = bytearray(name.read_bytes())
    image[8] = 2
    image[56:60] = zlib.crc32(bytes(image[:56])).to_bytes(4, "little")
    name.write_bytes(image)
    with pytest.raises(StoreUnusable, match=r"000000000000\.seg has format 2; this .* reads 1"):
        open_in(tmp_path)
    assert name.read_bytes() == image


def test_a_file_that_is_not_a_segment_but_has_the_name_of_one_is_refused(tmp_path):
    name = tmp_path / "000000000000.seg"
    name.write_bytes(b"not a segment" * 1000)
    with pytest.raises(StoreUnusable, match="is not a segment file, or is damaged"):
        open_in(tmp_path)
    assert name.read_bytes() == b"not a segment" * 1000


@pytest.mark.parametrize("file_bytes", [0, 4096, 8193, 2**63])
def test_a_header_with_an_invalid_file_size_is_refused(tmp_path, file_bytes):
    open_in(tmp_path).close()
    for name in sorted(tmp_path.iterdir()):
        image = bytearray(name.read_bytes())
        image[32:40] = file_bytes.to_bytes(8, "little")
        image[56:60] = zlib.crc32(bytes(image[:56])).to_bytes(4, "little")
        name.write_bytes(image)
    for writable in (False, True):
        with pytest.raises(StoreUnusable, match=f"{tmp_path}: "):
            open_as(tmp_path, writable).close()


@pytest.mark.parametrize("seed", range(40))
def test_damaged_files_are_refused_or_read_without_wrong_bytes(tmp_path, seed):
    rng = random.Random(seed)
    with open_in(tmp_path) as segments:
        append_all(segments, [bytes([n]) * 700 for n in range(15)])
    for name in sorted(tmp_path.iterdir()):
        image = bytearray(name.read_bytes())
        for _ in range(rng.randrange(4)):
            at, size = rng.randrange(len(image)), rng.choice([1, 64, 5000])
            image[at : at + size] = rng.randbytes(min(size, len(image) - at))
        name.write_bytes(image[: rng.choice([0, 100, 5000, 8192, 8192, 8192, 8192])])
    for writable in (False, True):
        try:
            with open_as(tmp_path, writable) as segments:
                for entry in segments.entries():
                    assert entry.data == bytes([entry.entry_id - 1]) * 700
        except JournalError as refused:
            assert str(tmp_path) in str(refused)  # noqa: PT017


def test_files_of_two_streams_in_one_directory_are_refused(tmp_path):
    open_in(tmp_path / "a").close()
    open_in(tmp_path / "b").close()
    os.replace(tmp_path / "b" / "000000000001.seg", tmp_path / "a" / "000000000001.seg")
    with pytest.raises(StoreUnusable, match="different streams"):
        open_in(tmp_path / "a")
    os.replace(tmp_path / "b" / "000000000000.seg", tmp_path / "b" / "000000000007.seg")
    with pytest.raises(StoreUnusable, match=r"000000000007\.seg says that it is file 0"):
        open_in(tmp_path / "b")


def test_a_symbolic_link_in_place_of_a_file_is_not_followed(tmp_path):
    open_in(tmp_path / "stream").close()
    os.replace(tmp_path / "stream" / "000000000000.seg", tmp_path / "elsewhere")
    (tmp_path / "stream" / "000000000000.seg").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreUnusable, match="symbolic link"):
        open_in(tmp_path / "stream")


AS_NOBODY = """
import os, sys
from penstock.errors import StoreUnusable
from penstock.journal.reader import JournalReader
from penstock.journal.segments import Segments
os.setegid(65534); os.seteuid(65534)
try:
    Segments.open(sys.argv[1])
except StoreUnusable as refused:
    sys.exit(str(refused))
"""


@pytest.mark.root
def test_the_error_of_an_unwritable_directory_names_it(tmp_path):
    path = tmp_path / "private" / "stream"
    open_in(path).close()
    result = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(path)], capture_output=True, text=True, check=False
    )
    assert result.stderr.strip() == f"{path}: cannot be used: Permission denied"


def test_a_closed_stream_refuses_and_may_be_closed_again(tmp_path):
    segments = open_in(tmp_path)
    segments.close()
    for call in (lambda: append_all(segments, [b"x"]), segments.sync, segments.prepare):
        with pytest.raises(JournalError, match="it was closed"):
            call()
    segments.close()


def test_quarantined_ranges_are_listed_in_stream_order(tmp_path):
    with open_in(tmp_path) as segments:
        append_all(segments, [bytes(100)] * 3)
    name = tmp_path / "000000000000.seg"
    image = bytearray(name.read_bytes())
    for place in (4096 + 32, 4096 + 264 + 32):
        image[place] ^= 1
    name.write_bytes(image)
    with open_in(tmp_path) as segments:
        assert [entry.entry_id for entry in segments.entries()] == [2]
        why = "data does not match its checksum"
        assert segments.quarantined == [Quarantined(0, 132, why), Quarantined(264, 132, why)]
