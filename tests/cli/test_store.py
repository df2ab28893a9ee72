"""`penstock inspect`, `check` and `readers`: what they print, and that they change nothing."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import penstock
from penstock.cli import main
from penstock.journal import reader_positions
from penstock.journal.snapshot import snapshot_paths
from penstock.service import CreateQueue, Delete, Pull, Purge, Push
from tests.backends.engine.random_store import small_slices
from tests.backends.engine.test_damage import flip
from tests.backends.engine.test_opening import listing
from tests.backends.engine.test_upkeep import ReopenedStore

EXECUTABLE = str(Path(sys.executable).with_name("penstock"))


@pytest.fixture(autouse=True)
def _in_small_steps(monkeypatch):
    small_slices(monkeypatch)


@pytest.fixture
def run(capsys):
    """Runs a command line; its status and what it printed. Nothing it looks at may change."""

    def run(*words, untouched=None):
        before = None if untouched is None else listing(untouched)
        status = main([str(word) for word in words])
        if untouched is not None:
            assert listing(untouched) == before
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.fixture
def busy(quick_path):
    """A store with an archive, snapshots, a reader and a few messages, still open."""
    store = ReopenedStore(quick_path)
    store(CreateQueue("orders"), CreateQueue("other"))
    reader_positions.register(quick_path / "store", "spark", 0, 1)
    for turn in range(6):
        store(*[Push("other", bytes(2_000))] * 12)
        store(Push("orders", b"order %d" % turn))
        store(Purge("other"))
        if turn == 2:
            floor = store.engine.journal.segments.end_offset
            reader_positions.register(quick_path / "store", "spark", floor, 2)
        store.run_pass()
    (claim,) = store(Pull("orders"))
    store(Delete("orders", claim.receipt))
    store.engine.journal.sync()
    yield store
    store.engine.close()


def test_inspect_shows_an_event_a_line_with_names_from_the_snapshot(run, busy):
    path = busy.root / "store"
    status, out, err = run("inspect", path, "--queue", "orders", untouched=busy.root)
    assert (status, err) == (0, "")
    last = out.splitlines()[-1].split()
    assert last[4:6] == ["Deleted", "orders"]
    assert last[7] == "epoch=1"
    assert any("order 5" in line and "Pushed" in line for line in out.splitlines())


def test_inspect_of_the_archive_and_the_journal_together_shows_every_event(run, busy):
    path, archive = busy.root / "store", busy.root / "archive"
    status, out, _ = run("inspect", path, "--archive", archive, "--json", untouched=busy.root)
    events = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert events[0]["event"] == "QueueCreated"
    assert events[0]["offset"] == 0
    bodies = [each["body"] for each in events if each["queue"] == "orders" and "body" in each]
    assert list(dict.fromkeys(bodies)) == [f"order {turn}" for turn in range(6)]
    assert sorted({each["entry"] for each in events}) == list(range(1, events[-1]["entry"] + 1))


def test_inspect_begins_at_the_given_offset_even_within_an_entry(run, busy):
    _, out, _ = run("inspect", busy.root / "store", "--json")
    events = [json.loads(line) for line in out.splitlines()]
    offset = events[-3]["offset"]
    for start in (offset, offset - 1):
        _, out, _ = run("inspect", busy.root / "store", "--json", "--from", start)
        assert json.loads(out.splitlines()[0])["offset"] == offset
    status, _, err = run("inspect", busy.root / "store", "--from", 10**9)
    assert status == 3
    assert "holds" in err


def test_inspect_follows_a_writer_as_it_writes(tmp_path):
    with penstock.connect(f"file:{tmp_path}/store?embedded=1") as queues:
        queues.create("q")
        command = [EXECUTABLE, "inspect", str(tmp_path / "store"), "--follow", "--json"]
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as tail:
            assert tail.stdout is not None
            assert json.loads(tail.stdout.readline())["event"] == "QueueCreated"
            for body in ("one", "two"):
                queues.push("q", body)
                assert json.loads(tail.stdout.readline())["body"] == body
            tail.terminate()


def test_check_of_an_undamaged_store_in_use_reports_it_and_changes_nothing(run, busy):
    path, archive = busy.root / "store", busy.root / "archive"
    for words in ([path], [path, "--archive", archive], [archive], [f"file:{path}?embedded=1"]):
        status, out, err = run("check", *words, untouched=busy.root)
        assert (status, err, out.splitlines()[-1]) == (0, "", "sound"), out
    status, out, _ = run("check", path, "--archive", archive)
    assert "2 queues with 5 messages" in out
    assert out.count("ok       snapshot-") == 2
    assert "reader spark: has read to" in out


def test_check_beside_a_writer_that_drops_files_finds_no_damage(tmp_path):
    with penstock.connect(f"file:{tmp_path}/store?embedded=1&durability=os") as queues:
        queues.create("q")
        command = [EXECUTABLE, "check", str(tmp_path / "store"), "--json"]
        upkeep = queues.service._engine.upkeep  # type: ignore[attr-defined]
        for _ in range(3):
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as check:
                assert check.stdout is not None
                while check.poll() is None:
                    queues.push_many("q", [bytes(3_000)] * 50)
                    queues.delete_many(queues.pull_many("q", 45))
                    upkeep.run_pass()
                found = json.loads(check.stdout.read())
            assert found["damaged"] == []
            assert check.returncode == 0


def test_check_names_what_is_damaged_and_where(run, busy, quick_path):
    offset = busy.engine.journal.segments.end_offset - 50
    payload_bytes = busy.engine.journal.segments.payload_bytes
    busy.engine.close()
    damage = {
        "data does not match its checksum": lambda path: flip(
            path / "journal" / f"{offset // payload_bytes:012d}.seg",
            4096 + offset % payload_bytes,
            2,
        ),
        "is not whole": lambda path: flip(snapshot_paths(path)[0], 70, 1),
        "key: holds 5 bytes": lambda path: (path / "key").write_bytes(b"short"),
        "cannot be read as a reader": lambda path: (path / "readers" / "spark.json").write_text(
            "{"
        ),
    }
    for words, spoil in damage.items():
        copy = quick_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(busy.root / "store", copy)
        spoil(copy)
        status, out, _ = run("check", copy, untouched=copy)
        assert status == 6, words
        (line,) = [line for line in out.splitlines() if line.startswith("DAMAGED")]
        assert words in line
        assert out.splitlines()[-1] == "1 damaged"


def test_check_names_the_message_whose_content_is_damaged(run, quick_path):
    store = ReopenedStore(quick_path, archive=None)
    store(CreateQueue("q"), Push("q", b"whole"))
    lost = store(Push("q", b"damaged")).id
    place = store.engine.shard.queues[1].deliveries[2].content >> 32
    store.run_pass()
    store.engine.close()
    flip(quick_path / "store" / "journal" / "000000000000.seg", 4096 + place + 64, 3)
    status, out, _ = run("check", quick_path / "store")
    assert status == 6
    assert f"message {lost} in q: its content at offset {place} is damaged" in out
    status, out, _ = run("inspect", quick_path / "store")
    assert status == 6
    assert "DAMAGED: data does not match its checksum" in out


def test_check_finds_a_file_that_is_missing(run, busy, quick_path):
    number = busy.engine.journal.segments.first_offset // busy.engine.journal.segments.payload_bytes
    busy.engine.close()
    (busy.root / "store" / "journal" / f"{number + 1:012d}.seg").unlink()
    status, out, _ = run("check", busy.root / "store")
    assert status == 6
    assert f"file {number + 1:012d}.seg is missing" in out


def test_readers_are_listed_and_forgotten(run, busy):
    path = busy.root / "store"
    status, out, _ = run("readers", path, untouched=busy.root)
    assert status == 0
    assert out.splitlines()[1].split()[0] == "spark"
    status, out, _ = run("readers", path, "--json")
    assert json.loads(out)["name"] == "spark"
    assert json.loads(out)["behind_bytes"] > 0
    assert run("readers", path, "--forget", "nobody")[0] == 1
    assert run("readers", path, "--forget", "../store")[0] == 1
    assert run("readers", path, "--forget", "spark")[0] == 0
    assert run("readers", path)[1] == ""


@pytest.mark.parametrize("command", ["inspect", "check", "readers"])
def test_a_path_that_is_no_store_is_refused_in_one_line_and_unchanged(run, tmp_path, command):
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"cat")
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "store").write_bytes(b"penstock store, format 7\n")
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / "store").write_bytes(b"penstock store, format 1\n")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "000000000000.seg").write_bytes(b"not a segment" * 999)
    for name, words in {
        "missing": "no store at",
        "file": "is a file; a store is a directory",
        "empty": "no store at",
        "photos": "is not empty, and is not a Penstock store",
        "newer": "is a store of another format",
        "hollow": "cannot be read: No such file or directory",
        "odd": "is not a segment file, or is damaged",
    }.items():
        status, out, err = run(command, tmp_path / name, untouched=tmp_path)
        assert (status, out) == (3 if words == "no store at" else 6, ""), name
        assert err.count("\n") == 1
        assert err.startswith("penstock: ")
        assert str(tmp_path / name) in err
        assert words in err


def test_a_reader_sees_an_entry_soon_after_its_sync(tmp_path):
    with penstock.connect(f"file:{tmp_path}/store?embedded=1&durability=interval") as queues:
        queues.create("q")
        queues.push("q", "soon")
        give_up = time.monotonic() + 60
        seen = ""
        while "soon" not in seen:
            assert time.monotonic() < give_up
            command = [EXECUTABLE, "inspect", str(tmp_path / "store")]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            seen = done.stdout
        assert queues.stats("q").visible == 1


@pytest.mark.parametrize("words", [["check"], ["inspect"], ["readers"], ["daemon", "status"]])
def test_a_url_beside_a_path_is_refused(tmp_path, capsys, words):
    """The command would look at another store than the one of --url."""
    assert main(["--url", "redis://user:secret@host", *words, str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "--url redis://…@host: there is a PATH, too; give one of them" in error


@pytest.mark.parametrize("words", [["check"], ["inspect"], ["readers"], ["daemon", "status"]])
def test_a_path_with_a_question_mark_is_not_cut_there(tmp_path, capsys, words):
    main([*words, str(tmp_path / "what?")])
    assert "what?" in "".join(capsys.readouterr())
    assert main([*words, f"file:{tmp_path}?embedded"]) == 3


def test_json_of_a_daemon_in_the_foreground_is_refused(tmp_path, capsys):
    assert main(["daemon", "run", str(tmp_path), "--json"]) == 2
    assert "ask daemon status --json" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
