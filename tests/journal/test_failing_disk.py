"""Rows 5 and 6 of the scorecard: a failed sync stops the stream; a full disk stops only appends."""

import contextlib
import errno
import os
import random
import resource
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from penstock.errors import JournalError, StoreFull, StoreUnusable, UnavailableError
from penstock.journal.reader import JournalReader
from penstock.journal.segments import Segments
from tests.conftest import FULL
from tests.journal.disk import Disk

VERSION = b"TESTDATA"
FILE_BYTES = 8192
PAGE_BYTES = 4096
CHILD = Path(__file__).parent / "child.py"

FAILING_SYNC = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
static int calls;
int fdatasync(int fd) {
    int (*real)(int) = dlsym(RTLD_NEXT, "fdatasync");
    if (++calls == atoi(getenv("FAIL_AT"))) { errno = EIO; return -1; }
    return real(fd);
}
"""


def open_on(disk, **options):
    options = {"file_bytes": FILE_BYTES, "background": False} | options
    return Segments.open(disk.path, storage=disk, **options)


def fill(segments, body, **options):
    """Append until refused; return how many fitted, and the error."""
    for count in range(100_000):
        try:
            segments.append([body], version=VERSION, **options)
        except StoreFull as refused:
            return count, str(refused)
    raise AssertionError("the disk never filled")


@pytest.mark.parametrize("call", range(1, 51 if FULL else 11))
def test_after_a_failed_sync_nothing_is_answered_and_nothing_answered_is_lost(call):
    disk = Disk()
    segments = open_on(disk)
    disk.failing_syncs = {disk.syncs + call}
    answered = 0
    with contextlib.suppress(JournalError):
        while True:
            segments.append([bytes(1500)], version=VERSION)
            segments.sync()
            answered += 1
    assert answered < 10
    syncs = disk.syncs
    durable = segments.durable_offset
    for later in (segments.sync, segments.sync_watermark, segments.publish, segments.prepare):
        with pytest.raises(JournalError, match="failed: Input/output error"):
            later()
    with pytest.raises(JournalError):
        segments.append([b"x"], version=VERSION)
    with pytest.raises(JournalError):
        segments.drop_before(durable)
    segments.close()
    assert disk.syncs == syncs, "a sync that failed was tried again"
    assert segments.durable_offset == durable
    left = disk.after_cut(random.Random(call))
    assert open_on(left).next_id - 1 >= answered


def build_shim(tmp_path):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        warnings.warn(
            "no C compiler: fsync failures of a real process are not tested", stacklevel=2
        )
        pytest.skip("no C compiler")
    source, shim = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text(FAILING_SYNC)
    command = [compiler, "-shared", "-fPIC", "-o", str(shim), str(source), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return shim


@pytest.mark.parametrize("call", [5, 17])
def test_a_real_process_whose_fdatasync_fails_stops_and_loses_nothing(tmp_path, call):
    shim = build_shim(tmp_path)
    environment = os.environ | {"LD_PRELOAD": str(shim), "FAIL_AT": str(call)}
    command = [sys.executable, str(CHILD), str(tmp_path / "stream"), "100"]
    first = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    lines = first.stdout.splitlines()
    answered = sum(line.startswith("answered") for line in lines)
    assert lines[-3].startswith("refused JournalError")
    assert "Input/output error" in lines[-3]
    assert lines[-2:] == ["still refused JournalError"] * 2
    with Segments.open(tmp_path / "stream") as segments:
        assert answered < segments.next_id <= answered + 2


@pytest.mark.parametrize("body_bytes", [100, 5000])
def test_a_full_disk_refuses_appends_and_lets_reserved_ones_use_the_reserve(body_bytes):
    disk = Disk(room_bytes=6 * FILE_BYTES + PAGE_BYTES)
    segments = open_on(disk)
    count, why = fill(segments, bytes(body_bytes))
    assert count > 0
    assert why == "disk: cannot make 000000000006.seg: No space left on device"
    end = segments.end_offset
    with pytest.raises(StoreFull):
        segments.append([bytes(body_bytes)], version=VERSION)
    assert segments.end_offset == end
    deletes, _ = fill(segments, b"a delete", reserved=True)
    assert deletes * 40 >= segments.payload_bytes // 2 - 40 - body_bytes
    segments.sync()
    assert len(list(segments.entries())) == count + deletes
    reopened = open_on(disk)
    assert reopened.next_id == count + deletes + 1
    with pytest.raises(StoreFull):
        reopened.append([bytes(body_bytes)], version=VERSION)


def test_appends_are_accepted_again_when_there_is_room_again():
    disk = Disk(room_bytes=4 * FILE_BYTES + PAGE_BYTES)
    segments = open_on(disk)
    count, _ = fill(segments, bytes(1000))
    disk.room_bytes = 8 * FILE_BYTES + PAGE_BYTES
    more, _ = fill(segments, bytes(1000))
    assert more >= 4 * 4
    segments.drop_before(segments.end_offset)
    again, _ = fill(segments, bytes(1000))
    assert again >= more
    segments.sync()
    assert len(list(segments.entries())) == again
    assert count + more + again + 1 == segments.next_id


def test_an_append_for_which_room_was_ensured_is_not_refused():
    disk = Disk(room_bytes=5 * FILE_BYTES + PAGE_BYTES)
    segments = open_on(disk)
    appended = 0
    with contextlib.suppress(StoreFull):
        while True:
            segments.ensure_room(3000, reserved=False)
            segments.append([bytes(3000)], version=VERSION)
            appended += 1
    assert appended > 3
    end = segments.end_offset
    segments.ensure_room(1000, reserved=True)
    disk.room_bytes = 0
    segments.append([bytes(1000)], version=VERSION, reserved=True)
    assert segments.end_offset == end + 1032
    with pytest.raises(StoreFull):
        segments.ensure_room(4096, reserved=True)


def test_a_larger_reserve_is_prepared_and_kept():
    disk = Disk(room_bytes=10 * FILE_BYTES + PAGE_BYTES)
    segments = open_on(disk, reserve_bytes=3 * 4096)
    fill(segments, bytes(200))
    deletes, _ = fill(segments, b"x" * 32, reserved=True)
    assert deletes * 64 >= 3 * 4096 - 232
    segments.drop_before(segments.end_offset)
    segments.reserve_bytes = 6 * 4096
    fill(segments, bytes(200))
    deletes, _ = fill(segments, b"x" * 32, reserved=True)
    assert deletes * 64 >= 6 * 4096 - 232


def test_an_entry_larger_than_the_disk_is_refused_and_nothing_is_written():
    disk = Disk(room_bytes=5 * FILE_BYTES + PAGE_BYTES)
    segments = open_on(disk)
    segment_files = {name: file for name, file in disk.names_now.items() if name != "manifest"}
    before = {name: bytes(inode.cache) for name, inode in segment_files.items()}
    with pytest.raises(StoreFull):
        segments.append([b"x" * 100_000], version=VERSION)
    for name, image in before.items():
        assert bytes(disk.names_now[name].cache) == image
    segments.append([b"small"], version=VERSION)
    segments.sync()
    assert [entry.entry_id for entry in segments.entries()] == [1]


def test_a_new_stream_on_a_full_disk_is_refused_and_leaves_nothing():
    disk = Disk(room_bytes=FILE_BYTES - 1)
    with pytest.raises(StoreUnusable, match="disk: cannot be used: No space left on device"):
        open_on(disk)
    assert disk.names_now == {}


def test_without_descriptors_an_append_that_needs_a_file_is_refused_until_there_are_some():
    disk = Disk()
    disk.open_files_max = 2
    segments = open_on(disk)
    count, why = fill(segments, bytes(1000))
    assert count > 0
    assert "Too many open files" in why
    disk.open_files_max = 5
    assert fill(segments, bytes(1000))[0] > 0


def mounted(tmp_path, kind, size="1m"):
    """Mount a small file system; warn and skip the test if that is not possible."""
    target = tmp_path / "mounted"
    target.mkdir()
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(target)]
    else:
        image = tmp_path / "image"
        with open(image, "wb") as file:
            file.truncate(4 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-m0", str(image)], check=False, capture_output=True)
        command = ["mount", "-o", "loop", str(image), str(target)]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        why = done.stderr
    except FileNotFoundError as error:
        done, why = None, str(error)
    if done is None or done.returncode:
        warnings.warn(f"cannot mount a {kind}: a real full disk is not tested: {why}", stacklevel=2)
        pytest.skip(f"cannot mount a {kind}")
    return target


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
@pytest.mark.filterwarnings("default")
def test_a_real_full_disk_gives_a_clear_error_and_no_signal(tmp_path, kind):
    target = mounted(tmp_path, kind)
    try:
        with Segments.open(target / "stream", file_bytes=131072, background=False) as segments:
            count, why = fill(segments, bytes(3000))
            assert "No space left on device" in why
            assert fill(segments, b"a delete", reserved=True)[0] > 1000
            segments.sync()
            assert segments.drop_before(segments.end_offset) > 0
            assert fill(segments, bytes(3000))[0] > count // 2
            segments.sync()
        with Segments.open(target / "stream") as segments:
            assert segments.quarantined == []
    finally:
        subprocess.run(["umount", str(target)], check=True)


def test_a_process_out_of_descriptors_still_reads_and_appends(tmp_path):
    segments = Segments.open(tmp_path / "stream", file_bytes=FILE_BYTES, background=False)
    places = []
    for number in range(30):
        places.append(segments.append([bytes([number]) * 3000], version=VERSION)[1])
        segments.sync()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The lowest free descriptor becomes the limit, so that no file can be opened.
    probe = os.open(tmp_path, os.O_RDONLY)
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files") as refused:
            os.open(tmp_path, os.O_RDONLY)
        assert refused.value.errno == errno.EMFILE
        with pytest.raises(StoreUnusable, match="Too many open files"):
            Segments.open(tmp_path / "other", file_bytes=FILE_BYTES)
        for number in (0, 29, 7):
            assert segments.read(places[number], 3000) == bytes([number]) * 3000
        count, why = fill(segments, bytes(1000))
        assert "Too many open files" in why
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    segments.append([b"resumed"], version=VERSION)
    segments.close()
    with Segments.open(tmp_path / "stream") as segments:
        assert segments.next_id == 30 + count + 2
        assert segments.quarantined == []


def test_a_reader_out_of_descriptors_gets_a_clear_error(tmp_path):
    with Segments.open(tmp_path, file_bytes=FILE_BYTES, background=False) as segments:
        segments.append([bytes(3000)], version=VERSION)
    reader = JournalReader(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.open(tmp_path, os.O_RDONLY)
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe, before[1]))
    try:
        with pytest.raises(UnavailableError, match=r"cannot open 000000000000\.seg: Too many"):
            reader.read(0, 10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(reader.read(0, 10)) == 10
