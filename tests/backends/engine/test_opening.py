"""Opening a store: what cannot be opened is refused in one sentence, and nothing is changed."""

import os
import shutil
import subprocess
import sys
from contextlib import closing
from zlib import crc32

import pytest

import penstock
from penstock.backends.engine.store import open_engine
from penstock.errors import InvalidField, StoreInUse, StoreUnusable
from penstock.service import Batch, CreateQueue, DeleteQueue, History, Pull, Push, Release
from tests.backends.engine.test_upkeep import ReopenedStore

FILE_BYTES = 65_536


def listing(path):
    """Every name below a path with its size and the time of its last change."""
    found = {}
    for each in sorted([path, *path.rglob("*")]):
        about = each.lstat()
        found[str(each)] = (about.st_mode, about.st_size, about.st_mtime_ns, about.st_ino)
    return found


def refuse(path, words, error=StoreUnusable):
    before = listing(path.parent)
    with pytest.raises(error) as caught:
        open_engine(path, file_bytes=FILE_BYTES)
    assert listing(path.parent) == before
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


@pytest.fixture
def closed(tmp_path):
    """A store with one message in it, closed."""
    path = tmp_path / "store"
    engine = open_engine(path, file_bytes=FILE_BYTES)
    engine.submit(CreateQueue("q"))
    engine.submit(Push("q", b"one"))
    engine.close()
    return path


def test_a_batch_larger_than_an_entry_can_be_is_refused_and_the_engine_continues(tmp_path):
    with penstock.connect(f"file:{tmp_path / 'store'}?embedded=1") as queues:
        queues.create("q")
        body = bytes(64 * 1024 * 1024)
        with pytest.raises(InvalidField, match="at most 1073741824 can be pushed in one command"):
            queues.push_many("q", [body] * 70)
        queues.push("q", b"small")
        assert queues.stats("q").messages == 1


@pytest.mark.parametrize("items", [None, 5, "ab", {}])
def test_a_batch_that_is_not_a_list_is_refused(closed, items):
    engine = open_engine(closed)
    with pytest.raises(InvalidField, match="items: expected a list"):
        engine.submit(Batch(items))
    assert len(engine.submit(Pull("q"))) == 1
    engine.close()


def test_a_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"text")
    refuse(tmp_path / "file", "is a file; a store is a directory")


def test_a_path_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"text")
    refuse(tmp_path / "file" / "store", "cannot be used: Not a directory")


def test_a_directory_with_other_files_is_refused(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"cat")
    refuse(tmp_path / "photos", "is not empty, and is not a Penstock store")


def test_a_store_of_another_version_is_refused(closed):
    (closed / "store").write_bytes(b"penstock store, format 2\n")
    refuse(closed, "is a store of another format (b'penstock store, format 2")


def test_segment_files_of_another_version_are_refused(closed):
    for path in (closed / "journal").glob("*.seg"):
        with path.open("r+b") as file:
            page = bytearray(file.read(4096))
            page[8] = 9
            page[56:60] = crc32(page[:56]).to_bytes(4, "little")
            file.seek(0)
            file.write(page)
    refuse(closed, "has format 9; this version reads 1")


def test_a_file_that_is_not_a_segment_is_refused(closed):
    for path in (closed / "journal").glob("*.seg"):
        path.write_bytes(b"not a segment" * 1_000)
    refuse(closed, "is not a segment file, or is damaged")


def test_a_key_that_was_cut_short_is_refused(closed):
    (closed / "key").write_bytes(b"short")
    refuse(closed, "holds 5 bytes where a key has 32")


def test_a_journal_that_is_missing_beside_its_snapshots_is_refused(quick_path):
    store = ReopenedStore(quick_path, archive=None)
    store(CreateQueue("q"), Push("q", b"one"))
    store.run_pass()
    store.engine.close()
    shutil.rmtree(quick_path / "store" / "journal")
    refuse(quick_path / "store", "is missing or empty, though there are snapshots of it")


def test_the_error_of_a_store_in_use_names_the_process(closed):
    engine = open_engine(closed, file_bytes=FILE_BYTES)
    refuse(closed, f"in use by process {os.getpid()}; end that process", StoreInUse)
    assert [claim.body for claim in engine.submit(Pull("q"))] == [b"one"]
    engine.close()


UNWRITABLE = """
import os, sys
from penstock.backends.engine.store import open_engine
from penstock.errors import StoreUnusable
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    open_engine(sys.argv[1], file_bytes=65536, other_owner=True)
except StoreUnusable as refused:
    print(refused)
"""


@pytest.mark.parametrize("exists", [True, False])
def test_a_directory_that_may_not_be_written_is_refused(closed, exists):
    path = closed if exists else closed.parent / "new" / "store"
    for each in (closed, *closed.rglob("*")):
        each.chmod(0o555 if each.is_dir() else 0o444)
    closed.parent.chmod(0o555)
    before = listing(closed.parent)
    # The child runs as the user `nobody`, because root may write anywhere; it must reach the path.
    parents = [closed.parent, *closed.parent.parents]
    opened = [(each, each.stat().st_mode) for each in parents if not each.stat().st_mode & 0o001]
    for each, mode in opened:
        each.chmod(mode | 0o011)
    try:
        done = subprocess.run(
            [sys.executable, "-c", UNWRITABLE, str(path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    finally:
        for each, mode in opened:
            each.chmod(mode)
        closed.parent.chmod(0o755)
    assert "Permission denied" in done.stdout
    assert done.stdout.count("\n") == 1
    after = listing(closed.parent)
    del before[str(closed.parent)], after[str(closed.parent)]
    assert after == before


def test_a_new_store_that_does_not_fit_on_the_disk_leaves_no_files(tmp_path):
    before = listing(tmp_path)
    with pytest.raises(StoreUnusable, match=r"No space left|File too large"):
        # No disk has room for a file of this size.
        open_engine(tmp_path / "deep" / "store", file_bytes=1 << 52)
    after = listing(tmp_path)
    assert after.keys() == before.keys()


def test_a_store_whose_creation_was_interrupted_is_created_at_the_next_opening(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / ".store.4711").write_bytes(b"pens")
    engine = open_engine(tmp_path / "store", file_bytes=FILE_BYTES)
    engine.submit(CreateQueue("q"))
    engine.close()
    assert not (tmp_path / "store" / ".store.4711").exists()


def test_only_the_owner_may_read_a_store(closed):
    modes = {each.name: each.stat().st_mode & 0o777 for each in (closed, *closed.rglob("*"))}
    assert modes.pop("store") in (0o600, 0o700)
    assert modes.pop("journal") == 0o700
    assert closed.stat().st_mode & 0o777 == 0o700
    assert set(modes.values()) == {0o600}


@pytest.mark.parametrize(
    ("url", "field"),
    [
        ("file:", "names no path"),
        ("file://host/path", "names a host"),
        ("file:{path}?durability=maybe", "durability: 'maybe' is none of sync, interval, os"),
        ("file:{path}?embedded=1&speed=11", "has no option 'speed'"),
        ("file:{path}?interval_ms=-1", "interval_ms='-1'"),
        ("file:{path}?interval_ms=soon", "interval_ms='soon'"),
        ("file:{path}?interval_ms=0", "interval_ms: 0 is outside 1 to 3600000"),
        ("file:{path}?embedded=1&interval_ms=0", "interval_ms: 0 is outside 1 to 3600000"),
        ("file:{path}?timeout=999999999999", "timeout: 999999999999 is outside 1 to 86400"),
    ],
)
def test_a_wrong_url_is_refused_before_anything_is_created(tmp_path, url, field):
    with pytest.raises(penstock.errors.InvalidField, match=field):
        penstock.connect(url.format(path=tmp_path / "store"))
    assert list(tmp_path.iterdir()) == []


def test_receipts_and_ids_are_valid_after_closing_and_opening(closed):
    with penstock.connect(f"file:{closed}?embedded=1") as queues:
        claim = queues.pull("q")
        assert claim is not None
        receipt = claim.receipt
    with penstock.connect(f"file:{closed}?embedded=1") as queues:
        assert queues.delete(claim) is True
        assert queues.history(claim.id)[-1].kind == "Deleted"
        assert queues.stats("q").messages == 0
    assert receipt == claim.receipt


def test_the_history_of_a_message_names_queues_that_were_removed(quick_path):
    with closing(open_engine(quick_path / "store", file_bytes=FILE_BYTES)) as engine:
        engine.submit(CreateQueue("orders", {"dead_letter": "dead", "max_receives": 1}))
        message_id = engine.submit(Push("orders", b"x")).id
        (claim,) = engine.submit(Pull("orders"))
        engine.submit(Release("orders", claim.proof))
        for name in ("orders", "dead"):
            engine.submit(DeleteQueue(name))
        # A queue of the same name is another one.
        engine.submit(CreateQueue("orders"))
        told = [(each.queue, each.to) for each in engine.submit(History(message_id))]
        assert told == [("orders", None)] * 3 + [("orders", "dead")]
    with closing(open_engine(quick_path / "store", file_bytes=FILE_BYTES)) as engine:
        assert [(each.queue, each.to) for each in engine.submit(History(message_id))] == told
