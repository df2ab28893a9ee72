"""A run that watches, when it is stopped, when it fails, and when it has gone on for long."""

import os
import shutil
import signal
import subprocess
import threading
import urllib.request

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

from penstock import cli
from penstock.cli.lake.watch import Watch
from penstock.core.events import AnyEvent, Claimed, Deleted, Pushed, QueueCreated
from penstock.service import QueueSettings
from penstock.spark import upkeep
from penstock.spark.audit import is_judged
from penstock.spark.bronze import events_table
from penstock.spark.lake import WATCH, Lake, LakeFull, LakeUnusable, Table, locked, our_errors
from penstock.spark.tables import BALANCES, FINDINGS, QUEUE_EVENTS, TABLES
from penstock.spark.update import is_up_to_date, table_of
from tests.conftest import FULL
from tests.journal.test_failing_disk import mounted
from tests.ports import lasting_port
from tests.server.conftest import until
from tests.spark.journals import write_store
from tests.spark.lakes import await_ingested, rows

# The tables whose first commit is the last for which the disk has room.
FULL_FROM = ["events", "messages"] + ["queue_events", "rollup", "findings"] * FULL
pytestmark = [
    pytest.mark.service("default-jre-headless"), pytest.mark.usefixtures("spark"),
    pytest.mark.timeout(600),
]  # fmt: skip
QUEUE = [QueueCreated(1, 1, "q", QueueSettings())]
# Never set: waiting for it is a pause.
PAUSE = threading.Event()


@pytest.fixture
def store(tmp_path):
    return write_store(tmp_path / "s", [QUEUE, *pushes(1, 41)])


@pytest.fixture
def words(tmp_path, store):
    return ["pipeline", "run", "--lake", str(tmp_path / "lake"), "--journal", str(store)]


def pushes(first, end):
    return [[Pushed(n, 1, n, b"x" * 100)] for n in range(first, end)]


def only_sentence(capsys):
    """The only line on stderr."""
    [line] = capsys.readouterr().err.splitlines()
    assert "Traceback" not in line
    return line


def do_between_rounds(monkeypatch, *steps):
    """Calls one of these after each round, in place of the wait; the run ends after the last."""
    left = list(steps)

    def wait(self):
        if left:
            left.pop(0)()
            return True
        return False

    monkeypatch.setattr(Watch, "wait", wait)


def on_commit(monkeypatch, table, number, step):
    """Calls the step when this table has had so many commits."""
    commit = Table._commit
    seen = []

    def watched(self, *arguments):
        commit(self, *arguments)
        if self.path.name == table:
            seen.append(1)
            if len(seen) == number:
                step()

    monkeypatch.setattr(Table, "_commit", watched)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_an_ingest_ends_the_run_when_the_batch_is_committed(
    words, tmp_path, monkeypatch, capsys, number
):
    monkeypatch.setattr(Watch, "wait", lambda self: pytest.fail("there was another round"))
    on_commit(monkeypatch, "events", 3, lambda: os.kill(os.getpid(), number))
    assert cli.main([*words, "--watch", "--batch", "1KiB"]) == 0
    events = events_table(Lake.open(tmp_path / "lake"))
    assert 0 < events.rows() < 41
    # The first makes the table, and one more may be under way.
    assert 4 <= events.commits() <= 5
    assert capsys.readouterr().err == ""
    monkeypatch.undo()
    assert cli.main(words) == 0
    assert rows(tmp_path / "lake" / "messages", "SELECT count(*) FROM {table}") == [(40,)]


def test_a_signal_while_tables_are_made_ends_the_run_when_the_round_is_complete(
    words, tmp_path, monkeypatch
):
    on_commit(monkeypatch, "messages", 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    # Not replaced: the wait ends at once.
    assert cli.main([*words, "--watch", "--every", "10m"]) == 0
    assert rows(tmp_path / "lake" / "messages", "SELECT count(*) FROM {table}") == [(40,)]


def test_a_signal_while_what_is_appended_is_added_ends_the_run_when_it_is_committed(
    words, store, tmp_path, monkeypatch, capsys
):
    lake = tmp_path / "lake"

    def grow():
        on_commit(monkeypatch, "events", 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
        write_store(store, pushes(41, 61))
        await_ingested(lake, store)

    do_between_rounds(monkeypatch, grow)
    assert cli.main([*words, "--watch", "--every", "100ms"]) == 0
    assert events_table(Lake.open(lake)).rows() == 61
    assert capsys.readouterr().err == ""


def test_what_is_appended_waits_for_another_process_that_changes_the_lake(
    words, store, tmp_path, monkeypatch
):
    lake = Lake.open(tmp_path / "lake", create=True)
    first = []

    def grow():
        with locked(lake, "events"):
            write_store(store, pushes(41, 43))
            # Longer than the time between two rounds: the batch has been planned.
            until(lambda: len(list(lake.path.glob("streams/*/offsets/[0-9]*"))) > 1)
            first.append(events_table(lake).rows())
        await_ingested(lake.path, store)

    do_between_rounds(monkeypatch, grow)
    assert cli.main([*words, "--watch", "--every", "100ms"]) == 0
    assert first == [41]
    assert rows(lake.path / "messages", "SELECT count(*) FROM {table}") == [(42,)]


def test_a_second_interrupt_ends_the_run_at_once(words, monkeypatch):
    # Spark sets its own in a process that has used it.
    handler = signal.getsignal(signal.SIGINT)

    def interrupt():
        # A batch is in a thread of its own, and two signals at once would be one.
        os.kill(os.getpid(), signal.SIGINT)
        while signal.getsignal(signal.SIGINT) is not handler:
            PAUSE.wait(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    on_commit(monkeypatch, "events", 1, interrupt)
    assert cli.main([*words, "--watch"]) == 130
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_watching_run_of_a_lake_is_refused(words, tmp_path, capsys):
    lake = Lake.open(tmp_path / "lake", create=True)
    with locked(lake, WATCH):
        assert cli.main([*words, "--watch"]) == 4
        assert "lake: another process is watching for it; wait" in only_sentence(capsys)
    assert events_table(lake).delta() is None


def test_a_round_that_meets_another_process_is_repeated_and_counted(
    words, tmp_path, monkeypatch, capsys
):
    lake = Lake.open(tmp_path / "lake", create=True)
    port = lasting_port()
    pages = []

    def look():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            pages.append(answer.read().decode())

    other = locked(lake, "events")
    other.__enter__()
    do_between_rounds(monkeypatch, lambda: other.__exit__(None, None, None), look)
    assert cli.main([*words, "--watch", "--metrics-port", str(port)]) == 0
    said = only_sentence(capsys)
    assert "another process is changing its events" in said
    assert said.endswith("; the next round repeats it")
    assert "penstock_lake_failed_rounds_total 1.0" in pages[0]
    assert rows(tmp_path / "lake" / "messages", "SELECT count(*) FROM {table}") == [(40,)]


def test_a_journal_that_is_removed_ends_the_run_in_one_sentence(words, store, monkeypatch, capsys):
    do_between_rounds(monkeypatch, lambda: shutil.rmtree(store), lambda: None)
    assert cli.main([*words, "--watch"]) == 6
    assert f"{store}: cannot be read: No such file" in only_sentence(capsys)


def test_a_lake_that_is_removed_ends_the_run_and_is_not_made_again(
    words, store, tmp_path, monkeypatch, capsys
):
    def remove():
        shutil.rmtree(tmp_path / "lake")
        write_store(store, pushes(41, 43))

    do_between_rounds(monkeypatch, remove, lambda: None)
    assert cli.main([*words, "--watch"]) == 6
    assert "lake: was removed while it was used" in only_sentence(capsys)
    assert not (tmp_path / "lake").exists()


def test_a_lake_that_is_removed_during_a_round_ends_the_run_in_one_sentence(
    words, tmp_path, monkeypatch, capsys
):
    # Renamed, not removed file by file: other threads of the run are writing there.
    lake = tmp_path / "lake"
    on_commit(monkeypatch, "messages", 1, lambda: lake.rename(tmp_path / "elsewhere"))
    assert cli.main([*words, "--watch"]) == 6
    assert "lake: was removed while it was used" in only_sentence(capsys)


def test_a_lake_that_was_replaced_by_another_is_noticed(tmp_path):
    lake = Lake.open(tmp_path / "lake", create=True)
    lake.check_exists()
    shutil.rmtree(lake.path)
    Lake.open(lake.path, create=True)
    with pytest.raises(LakeUnusable, match="lake: was replaced by another lake"):
        lake.check_exists()


@pytest.fixture
def small_disk(tmp_path):
    """A file system with room for a small lake."""
    target = mounted(tmp_path, "tmpfs", "4m")
    yield target
    # From the directory at once, and from the kernel when the last file there is closed: other
    # tasks of a job that failed may still be ending.
    subprocess.run(["umount", "--lazy", str(target)], check=True)


def fill(disk):
    """Takes all room of a file system, by one file."""
    with (disk / "filler").open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while file.write(bytes(size)):
                    continue
            except OSError:
                continue


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("full_from", FULL_FROM)
def test_a_full_disk_is_one_sentence_and_the_round_is_repeated_when_there_is_room(
    store, small_disk, monkeypatch, capsys, full_from
):
    lake = small_disk / "lake"
    there = ["--lake", str(lake), "--journal", str(store)]
    on_commit(monkeypatch, full_from, 1, lambda: fill(small_disk))
    do_between_rounds(monkeypatch, (small_disk / "filler").unlink, lambda: None)
    assert cli.main(["pipeline", "run", "--watch", "--on-finding", "true", *there]) == 0
    said = only_sentence(capsys)
    assert "No space left on device" in said
    assert said.endswith("free some space; the next round repeats it")
    assert rows(lake / "messages", "SELECT count(*) FROM {table}") == [(40,)]
    assert is_judged(Lake.open(lake))


@pytest.mark.filterwarnings("default")
def test_a_run_without_room_is_one_sentence_and_leaves_nothing_in_the_way(
    store, small_disk, capsys
):
    words = ["pipeline", "run", "--lake", str(small_disk / "lake"), "--journal", str(store)]
    (small_disk / "lake").mkdir()
    fill(small_disk)
    assert cli.main(words) == 6
    assert "lake: cannot be used: No space left on device" in only_sentence(capsys)
    (small_disk / "filler").unlink()
    Lake.open(small_disk / "lake", create=True)
    fill(small_disk)
    assert cli.main(words) == 4
    assert "No space left on device" in only_sentence(capsys)


def test_what_a_killed_process_left_of_a_new_lake_is_no_obstacle(tmp_path):
    (tmp_path / "lake").mkdir()
    (tmp_path / "lake" / ".lake.json.1").write_text("{")
    assert Lake.open(tmp_path / "lake", create=True).path == tmp_path / "lake"


def test_a_damaged_file_of_the_lake_is_one_sentence(words, store, tmp_path, capsys):
    assert cli.main(words) == 0
    for path in (tmp_path / "lake" / "messages").rglob("*.parquet"):
        path.write_bytes(b"damaged")
    capsys.readouterr()
    assert cli.main(["pipeline", "audit", "--all", "--lake", str(tmp_path / "lake")]) == 6
    assert "a file of the lake cannot be used: " in only_sentence(capsys)


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("x\n[FAILED_READ_FILE.NO_HINT] Encountered a\n\tat org.x", LakeUnusable, "used: Encount"),
        ("x\njava.io.IOException: No space left on device\n\tat x", LakeFull, "^No space left"),
        ("x\nCaused by: java.io.IOException: No space left on device\n", LakeFull, "^No space"),
        ("OSError: [Errno 122] Disk quota exceeded: '/x'", LakeFull, r"exceeded: '/x': nothing"),
    ],
)
def test_what_spark_and_java_raise_about_files_is_an_error_of_the_lake(text, kind, said):
    with pytest.raises(kind, match=said), our_errors():
        raise RuntimeError(text)


def test_a_command_that_does_not_end_is_killed_when_the_run_is_to_end(
    words, store, tmp_path, monkeypatch, capsys
):
    write_store(store, [[Pushed(1, 1, 1, b"again")]])
    begun = tmp_path / "begun"
    os.mkfifo(begun)

    def stop():
        # Opened when the command has begun.
        begun.read_bytes()
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    stopper.start()
    command = f"echo >{begun}; sleep 1000 | cat"
    assert cli.main([*words, "--watch", "--every", "10m", "--on-finding", command]) == 0
    stopper.join()
    assert "--on-finding: ended with status -9" in only_sentence(capsys)


def test_a_watching_run_keeps_the_logs_and_the_files_of_its_lake_few(
    words, store, tmp_path, monkeypatch
):
    """As after weeks: the limits are low, and nothing is kept for readers of older versions."""
    monkeypatch.setattr(upkeep, "COMMITS_MAX", 3)
    for name in ("UPKEEP_S", "WATCH_KEEP_HOURS", "WATCH_COMMIT_HOURS"):
        monkeypatch.setattr(upkeep, name, 0)
    lake = Lake.open(tmp_path / "lake", create=True)
    derived = (QUEUE_EVENTS, *TABLES, FINDINGS, BALANCES)
    tables = [events_table(lake), *(table_of(lake, each) for each in derived)]
    rounds, bound = (12, (4, 3)) if FULL else (2, (2, 2))
    most = []

    def grow():
        # The last round has compacted, if that was due.
        most.append(max((each.commits(), len(each.files())) for each in tables))
        first = 36 + 5 * len(most)
        lives: list[list[AnyEvent]] = [
            [Pushed(n, 1, n, b"x"), Claimed(n, 1, n, 1, n + 9, None, "w"), Deleted(n, 1, n, 1)]
            for n in range(first, first + 5)
        ]
        write_store(store, lives)
        await_ingested(lake.path, store)

    do_between_rounds(monkeypatch, *[grow] * rounds)
    assert cli.main([*words, "--watch", "--every", "100ms"]) == 0
    # Without upkeep there would be a commit a round, and one that made the table.
    assert max(most) <= bound, most
    assert rows(lake.path / "messages", "SELECT count(*) FROM {table}") == [(40 + 5 * rounds,)]
    assert is_up_to_date(lake)


def test_a_watching_run_compacts_its_lake_at_most_once_an_hour(words, store, monkeypatch):
    monkeypatch.setattr(upkeep, "COMMITS_MAX", 1)
    done = []

    def compact(*given):
        done.append(given[2:])
        return iter(())

    monkeypatch.setattr(upkeep, "compact_lake", compact)
    do_between_rounds(monkeypatch, lambda: None, lambda: None)
    assert cli.main([*words, "--watch"]) == 0
    assert done == [(24, 1)]
