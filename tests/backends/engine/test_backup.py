"""Backups: taken beside a writer under load, with kills of either; what a restored store is."""

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.backends.engine.blocking import BlockingEngine
from penstock.backends.engine.store import open_engine
from penstock.cli import main
from penstock.client import Queues
from penstock.clock import ManualClock
from penstock.errors import InvalidReceipt, PenstockError, StoreUnusable
from penstock.journal import reader_positions
from penstock.journal.backup import back_up, read_mark, restore
from penstock.journal.disk import OsDirectory
from penstock.journal.verify import verify
from penstock.public import ClaimRef
from tests.server.conftest import until

CHILD = Path(__file__).parent / "child.py"
PENSTOCK = Path(sys.executable).with_name("penstock")
pytestmark = pytest.mark.timeout(600)


class LoadedStore:
    """A process that pushes, pulls and deletes, and what it has answered so far."""

    def __init__(self, path):
        self.store = path / "store"
        self.pushed: set[int] = set()
        self.deleting: set[int] = set()
        self.deleted: set[int] = set()
        self.answers = 0
        self._process = subprocess.Popen(
            [sys.executable, str(CHILD), str(path)], stdout=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, word, *_ = line.split()
            if kind in ("pushed", "deleting", "deleted"):
                getattr(self, kind).add(int(word))
            self.answers += 1

    def run_on(self, answers):
        """Waits for so many more answers."""
        wanted = self.answers + answers
        until(lambda: self.answers >= wanted or self._process.poll() is not None)

    def answered(self):
        """The numbers that a backup that begins now must have, and those that it must not."""
        deleted = set(self.deleted)
        pushed = set(self.pushed)
        return pushed, deleted

    def kill(self):
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def loaded(tmp_path):
    child = LoadedStore(tmp_path / "live")
    yield child
    child.kill()


def numbers_in(store):
    """The numbers of the messages in a store, whatever their state."""
    engine = open_engine(store, background=False)
    engine.upkeep = None
    found = set()
    for queue in engine.shard.queues.values():
        for delivery in queue.deliveries.values():
            content = delivery.content
            body = (engine.journal.load(content) if isinstance(content, int) else content).body
            number = int(body.split()[0])
            assert body == b"%d " % number * 40
            found.add(number)
    engine.close()
    return found


def check(loaded, before, backup, to):
    """A backup has what was answered before it, and nothing that was deleted before it."""
    pushed, deleted = before
    assert [each.text for each in verify(str(backup)) if each.is_damage] == []
    assert restore(backup, to).damage == []
    found = numbers_in(to)
    # What was being deleted while the backup was taken may be in it or not.
    assert pushed - loaded.deleting <= found
    assert not found & deleted


def test_a_backup_under_load_has_every_answered_push_and_no_answered_delete(loaded, tmp_path):
    loaded.run_on(300)
    for number in range(4):
        before = loaded.answered()
        made = back_up(loaded.store, tmp_path / f"backup{number}")
        assert made.damage == []
        check(loaded, before, made.path, tmp_path / f"restored{number}")
        loaded.run_on(600)
    assert [each.name for each in reader_positions.registered(loaded.store)] == []


def test_a_backup_goes_on_when_the_server_is_killed_meanwhile(tmp_path):
    rng = random.Random(1)
    for turn in range(3):
        loaded = LoadedStore(tmp_path / "live")
        loaded.run_on(rng.randrange(100, 800))
        before = loaded.answered()
        backup, draft = tmp_path / f"backup{turn}", tmp_path / f"backup{turn}.unfinished"
        taking = subprocess.Popen([PENSTOCK, "backup", backup, "--url", loaded.store])
        until(lambda draft=draft, taking=taking: draft.exists() or taking.poll() is not None)
        loaded.kill()
        assert taking.wait(120) == 0
        check(loaded, before, backup, tmp_path / f"restored{turn}")
        # The server was killed, so it opens its own store as always.
        pushed, deleted = loaded.answered()
        found = numbers_in(loaded.store)
        assert pushed - loaded.deleting <= found
        assert not found & deleted


def test_a_backup_that_is_killed_leaves_nothing_that_looks_like_one(loaded, tmp_path):
    backup, draft = tmp_path / "backup", tmp_path / "backup.unfinished"
    for files in (0, 1, 2, 4):
        loaded.run_on(200)
        taking = subprocess.Popen([PENSTOCK, "backup", backup, "--url", loaded.store])

        def has_begun(files=files, taking=taking):
            is_there = draft.exists() and sum(1 for _ in draft.rglob("*")) >= files
            return is_there or taking.poll() is not None

        until(has_begun)
        taking.send_signal(signal.SIGKILL)
        if taking.wait() == 0:
            # It was complete before the signal came.
            assert verify(str(backup))
            return
        assert not backup.exists()
        if draft.exists() and any(draft.iterdir()):
            with pytest.raises(PenstockError):
                restore(draft, tmp_path / "restored")
    before = loaded.answered()
    assert back_up(loaded.store, backup).damage == []
    assert not draft.exists()
    # The reader of a backup that was killed is removed by the next one.
    assert reader_positions.registered(loaded.store) == []
    check(loaded, before, backup, tmp_path / "restored")


def test_a_backup_leaves_the_readers_of_others_that_may_be_under_way(tmp_path):
    store = tmp_path / "store"
    with Queues(BlockingEngine(open_engine(store, background=False))) as queues:
        queues.create("orders")
        with subprocess.Popen(["true"]) as ended:
            ended.wait()
        here = Path("/proc/self/ns/pid").stat().st_ino
        names = [
            f"backup-{ended.pid}-{here}-1",
            # In a container that process may be running.
            f"backup-{ended.pid}-{here + 1}-1",
            f"backup-{os.getpid()}-{here}-999999",
        ]
        for name in names:
            reader_positions.register(store, name, 0, 0)
        # Two of one process, at a time.
        with ThreadPoolExecutor(2) as pool:
            made = [*pool.map(lambda name: back_up(store, tmp_path / name), ("one", "two"))]
        assert [each.damage for each in made] == [[], []]
        assert [each.name for each in reader_positions.registered(store)] == sorted(names[1:])


def test_what_is_answered_and_not_synced_is_in_a_backup(tmp_path):
    engine = open_engine(tmp_path / "store", durability="os", background=False)
    queues = Queues(BlockingEngine(engine))
    queues.create("q")
    for number in range(50):
        queues.push("q", b"%d " % number * 40)
    journal = engine.journal
    assert journal.segments.durable_offset < journal.segments.end_offset  # type: ignore[attr-defined]
    back_up(tmp_path / "store", tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "restored")
    assert numbers_in(tmp_path / "restored") == set(range(50))
    queues.close()


def make_store(path, clock=None):
    return Queues(BlockingEngine(open_engine(path, background=False, clock=clock)))


def test_receipts_from_before_are_refused_in_a_restored_store_and_claims_run_out(tmp_path):
    clock = ManualClock()
    queues = make_store(tmp_path / "store", clock)
    queues.create("q", visibility_timeout=30)
    kept = queues.push("q", b"kept").id
    claim = queues.pull("q")
    assert claim is not None
    back_up(tmp_path / "store", tmp_path / "backup")
    # The store goes on: this message gets the number that the next one gets in the restored store.
    queues.push("q", b"after the backup")
    later = queues.pull("q")
    assert later is not None
    queues.close()
    restore(tmp_path / "backup", tmp_path / "restored")
    restored = make_store(tmp_path / "restored", clock)
    assert restored.push("q", b"another").id not in (later.id, kept)
    assert [each.body for each in restored.pull_many("q", 9)] == [b"another"]
    for receipt in (claim.receipt, later.receipt):
        with pytest.raises(InvalidReceipt):
            restored.delete(ClaimRef("q", receipt))
    assert restored.stats("q").in_flight == 2
    clock.advance(seconds=31)
    assert sorted(each.body for each in restored.pull_many("q", 9)) == [b"another", b"kept"]
    restored.close()


def test_a_restored_store_has_the_queues_their_settings_and_what_waits(tmp_path):
    queues = make_store(tmp_path / "store")
    queues.create("q", dead_letter="dead", max_receives=2)
    queues.pause("q")
    queues.push("q", b"later", delay=600)
    queues.push("q", b"now", priority=3, dedup_id="7")
    settings = queues.describe("q").settings
    (tmp_path / "store" / "sqs").write_text('{"account":"000000000000","region":"eu-west-1"}')
    back_up(tmp_path / "store", tmp_path / "backup")
    queues.close()
    restore(tmp_path / "backup", tmp_path / "restored")
    home = (tmp_path / "store" / "sqs").read_text()
    assert (tmp_path / "restored" / "sqs").read_text() == home
    restored = make_store(tmp_path / "restored")
    assert restored.describe("q").settings == settings
    assert restored.list() == ["dead", "q"]
    stats = restored.stats("q")
    assert (stats.visible, stats.delayed, stats.paused) == (1, 1, True)
    restored.push("q", b"now", dedup_id="7")
    assert restored.stats("q").messages == 2
    restored.close()


@pytest.mark.parametrize("kind", ["store", "held store", "other files", "file", "link"])
def test_a_place_that_is_in_use_is_refused_and_stays_as_it_was(tmp_path, kind):
    queues = make_store(tmp_path / "store")
    queues.create("q")
    back_up(tmp_path / "store", tmp_path / "backup")
    to = tmp_path / "place"
    if kind == "file":
        to.write_text("mine")
    elif kind == "link":
        (tmp_path / "elsewhere").mkdir()
        to.symlink_to(tmp_path / "elsewhere")
    elif kind == "other files":
        to.mkdir()
        (to / "mine").write_text("mine")
    else:
        to = tmp_path / "store"
    if kind == "store":
        queues.close()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StoreUnusable, match="is in use; a store is restored into a directory"):
        restore(tmp_path / "backup", to)
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(StoreUnusable, match="is there already"):
        back_up(tmp_path / "store", to)
    assert sorted(tmp_path.rglob("*")) == before
    queues.close()


def test_a_place_within_the_store_is_refused(tmp_path):
    with Queues(BlockingEngine(open_engine(str(tmp_path / "store")))) as queues:
        queues.create("orders")
        before = sorted(tmp_path.rglob("*"))
        for to in (tmp_path / "store" / "backup", tmp_path / "store" / "journal" / "a" / "b"):
            with pytest.raises(StoreUnusable, match="is within the store"):
                back_up(tmp_path / "store", to)
        assert sorted(tmp_path.rglob("*")) == before


def test_the_command_restores_to_a_path_that_does_not_exist_yet(tmp_path, capsys):
    url = f"file:{tmp_path / 'store'}?embedded=1"
    assert main(["create", "orders", "--url", url]) == 0
    assert main(["push", "orders", "a", "--url", url]) == 0
    backup = str(tmp_path / "backup")
    assert main(["backup", backup, "--url", f"file:{tmp_path / 'store'}"]) == 0
    for words in ([str(tmp_path / "one")], ["--url", f"file:{tmp_path / 'two'}"]):
        capsys.readouterr()
        assert main(["restore", backup, *words]) == 0
        assert "1 queue with 1 message" in capsys.readouterr().out
    with Queues(BlockingEngine(open_engine(str(tmp_path / "two")))) as queues:
        assert [each.body for each in queues.pull_many("orders", 9)] == [b"a"]


def test_an_empty_directory_is_a_place_for_a_restored_store(tmp_path):
    make_store(tmp_path / "store").close()
    back_up(tmp_path / "store", tmp_path / "backup")
    (tmp_path / "place").mkdir()
    assert restore(tmp_path / "backup", tmp_path / "place").damage == []
    make_store(tmp_path / "place").close()


def test_a_backup_is_no_store_and_is_checked_like_one(tmp_path):
    queues = make_store(tmp_path / "store")
    queues.create("q")
    queues.push("q", b"x" * 1_000)
    made = back_up(tmp_path / "store", tmp_path / "backup")
    queues.close()
    assert (tmp_path / "backup").stat().st_mode & 0o777 == 0o700
    assert read_mark(made.path).store == str(tmp_path / "store")
    with pytest.raises(StoreUnusable, match="is a backup; make a store of it with: penstock res"):
        open_engine(made.path)
    assert any(each.text.startswith("state: 1 queue with 1 message") for each in made.findings)
    (file,) = (made.path / "journal").glob("*.seg")
    content = bytearray(file.read_bytes())
    content[4_096 + 600] ^= 1
    file.write_bytes(content)
    assert any(each.is_damage for each in verify(str(made.path)))
    with pytest.raises(StoreUnusable, match=r"is damaged: .*--accept-loss"):
        restore(made.path, tmp_path / "restored")
    assert not (tmp_path / "restored").exists()
    assert restore(made.path, tmp_path / "restored", accept_loss=True).damage != []


def test_the_damage_of_a_store_is_reported_when_its_backup_is_taken(tmp_path):
    queues = make_store(tmp_path / "store")
    queues.create("q")
    queues.push("q", b"x" * 1_000)
    queues.close()
    (file,) = (tmp_path / "store/journal").glob("*0.seg")
    content = bytearray(file.read_bytes())
    content[4_096 + 600] ^= 1
    file.write_bytes(content)
    done = subprocess.run(
        [PENSTOCK, "backup", tmp_path / "backup", "--url", tmp_path / "store", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 6
    assert "penstock: DAMAGED" in done.stderr
    assert json.loads(done.stdout)["sound"] is False


def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path, monkeypatch):
    make_store(tmp_path / "store").close()
    before = sorted(tmp_path.iterdir())
    real = OsDirectory.create

    def refuse(self, name, size_bytes, head):
        if ".unfinished" in self.path:
            raise OSError(28, os.strerror(28))
        return real(self, name, size_bytes, head)

    monkeypatch.setattr(OsDirectory, "create", refuse)
    with pytest.raises(PenstockError, match="No space left on device"):
        back_up(tmp_path / "store", tmp_path / "backup")
    assert sorted(tmp_path.iterdir()) == before


def test_two_backups_to_one_place_do_not_mix(tmp_path):
    make_store(tmp_path / "store").close()
    results: list[object] = []

    def take():
        try:
            results.append(back_up(tmp_path / "store", tmp_path / "backup").damage)
        except StoreUnusable as refused:
            results.append(str(refused))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert results.count([]) == 1
    assert not any(each.is_damage for each in verify(str(tmp_path / "backup")))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["backup", "store"]


def test_a_place_where_another_process_makes_a_backup_is_refused_and_left_alone(tmp_path):
    make_store(tmp_path / "store").close()
    draft = tmp_path / "backup.unfinished"
    draft.mkdir(mode=0o700)
    (draft / "half").write_text("of the other one")
    fd = os.open(draft, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(StoreUnusable, match="another process is making it now"):
            back_up(tmp_path / "store", tmp_path / "backup")
        assert (draft / "half").read_text() == "of the other one"
    finally:
        os.close(fd)
    # Its process has ended: what it left is replaced.
    assert back_up(tmp_path / "store", tmp_path / "backup").damage == []
    assert not draft.exists()
