"""Rows 3 and 4 of the scorecard, for the engine: errors name the missing files of a store.

A store is built and copied as a kill would leave it; files of the copy are removed or cut.
"""

import os
import shutil
import subprocess
import sys
import time

import pytest

import penstock
from penstock.backends.engine.store import open_engine
from penstock.cli import main
from penstock.errors import StoreUnusable
from penstock.journal.snapshot import snapshot_paths
from penstock.service import CreateQueue, ListQueues, Pull, Push, Stats
from tests.backends.engine.random_store import small_slices
from tests.backends.engine.test_opening import listing
from tests.backends.engine.test_upkeep import ReopenedStore
from tests.journal.test_manifest import damage_manifest

# Larger than the room that is reserved for deletes, so that there is one spare file and not dozens.
FILE_BYTES = 1024 * 1024
BODY_BYTES = 20_000
COUNT = 400


@pytest.fixture(autouse=True)
def _in_small_steps(monkeypatch):
    small_slices(monkeypatch)


@pytest.fixture(params=["journal", "snapshots"])
def killed(quick_path, request):
    """A store of 400 answered messages in eight files, as a kill leaves it."""
    store = ReopenedStore(quick_path, file_bytes=FILE_BYTES, archive=None, background=False)
    # Some of these tests open the store by the system's clock.
    store.clock.advance(seconds=time.time() - store.clock.now_ms() / 1_000)
    store(CreateQueue("q"))
    for number in range(COUNT):
        store(Push("q", b"%04d" % number + bytes(BODY_BYTES - 4)))
        if request.param == "snapshots" and number in (150, 300):
            store.run_pass()
    store.engine.journal.sync()
    copy = quick_path / "copy"
    shutil.copytree(quick_path / "store", copy)
    store.engine.close()
    return copy


def files_in(store):
    return sorted((store / "journal").glob("*.seg"))


def remove_files(store, which):
    files = files_in(store)
    taken = {"first": files[:1], "middle": files[3:4], "last": files[-3:]}[which]
    for path in taken:
        path.unlink()
    return [path.name for path in taken]


def open_copy(path, **options):
    return open_engine(path, file_bytes=FILE_BYTES, **options)


def only_queue(engine):
    """The name of the queue, which is another one if the entry that created it was lost."""
    (name,) = engine.submit(ListQueues())
    return name


def served(engine):
    """The numbers of all messages that can be pulled."""
    found = []
    while claims := engine.submit(Pull(only_queue(engine), 100)):
        found += [int(claim.body[:4]) for claim in claims]
        assert all(len(claim.body) == BODY_BYTES for claim in claims)
    return found


@pytest.mark.parametrize("which", ["first", "middle", "last"])
def test_a_store_that_misses_a_file_does_not_open_and_check_names_the_file(killed, which, capsys):
    names = remove_files(killed, which)
    before = listing(killed)
    with pytest.raises(StoreUnusable) as refused:
        open_copy(killed)
    assert names[0] in str(refused.value)
    assert main(["check", str(killed)]) == 6
    printed = capsys.readouterr().out
    for name in names:
        assert f"DAMAGED  journal: file {name} is missing; it held offsets" in printed
    assert listing(killed) == before


@pytest.mark.parametrize("which", ["first", "middle", "last"])
def test_an_accepted_loss_serves_all_that_the_other_files_hold(killed, which):
    remove_files(killed, which)
    engine = open_copy(killed, accept_loss=True)
    found = served(engine)
    assert found == sorted(set(found))
    # A file holds about fifty of these messages; no more than the missing ones are gone.
    per_file = FILE_BYTES // BODY_BYTES + 2
    assert COUNT - 2 * per_file <= len(found) < COUNT
    name = only_queue(engine)
    engine.submit(Push(name, b"9999" + bytes(BODY_BYTES - 4)))
    assert served(engine) == [9999]
    engine.close()
    again = open_copy(killed)
    assert again.submit(Stats(name)).in_flight == len(found) + 1
    again.close()


@pytest.mark.parametrize("left", [0, 4096, 500_000])
@pytest.mark.parametrize("which", ["middle", "last"])
def test_a_store_with_a_file_that_was_cut_does_not_open_and_check_names_it(
    killed, which, left, capsys
):
    files = files_in(killed)
    # The last file that is in use is followed by spares.
    path = {"middle": files[3], "last": files[-3]}[which]
    os.truncate(path, left)
    before = listing(killed)
    with pytest.raises(StoreUnusable, match=rf"{path.name} \((cut|emptied); offsets "):
        open_copy(killed)
    assert main(["check", str(killed)]) == 6
    assert f"DAMAGED  journal: file {path.name} was " in capsys.readouterr().out
    assert listing(killed) == before
    assert main(["check", "--accept-loss", str(killed)]) == 6
    printed = capsys.readouterr().out
    assert f"loss: accepted for {path.name}; the store opens without their content" in printed
    assert " entries are lost, ids " in printed
    engine = open_copy(killed)
    per_file = FILE_BYTES // BODY_BYTES + 2
    assert COUNT - per_file <= len(served(engine)) < COUNT
    engine.close()


def test_check_and_opening_report_a_damaged_manifest(killed, caplog, capsys):
    """Rows 3 and 4: it is made again if no file is missing, and refused if one may be."""
    damage_manifest(killed / "journal")
    incomplete = killed.parent / "incomplete"
    shutil.copytree(killed, incomplete)
    assert main(["check", str(killed)]) == 6
    assert "DAMAGED  journal: manifest does not match its checksum" in capsys.readouterr().out
    engine = open_copy(killed)
    assert any("manifest does not match its checksum" in each for each in caplog.messages)
    assert served(engine) == [*range(COUNT)]
    engine.close()
    assert main(["check", str(killed)]) == 0
    remove_files(incomplete, "last")
    capsys.readouterr()
    assert main(["check", str(incomplete)]) == 6
    assert (
        "DAMAGED  journal: manifest is damaged; it listed the files, so any behind 0000000000"
        in (capsys.readouterr().out)
    )
    with pytest.raises(StoreUnusable, match=r"manifest \(damaged; it listed the files"):
        open_copy(incomplete)
    assert main(["check", "--accept-loss", str(incomplete)]) == 6
    assert "loss: accepted for manifest; the store opens" in capsys.readouterr().out
    engine = open_copy(incomplete)
    assert len(served(engine)) > COUNT / 2
    engine.close()


def test_check_accepts_the_loss_of_the_manifest(killed, capsys):
    (killed / "journal" / "manifest").unlink()
    assert main(["check", "--accept-loss", str(killed)]) == 6
    assert "loss: accepted for manifest; the store opens" in capsys.readouterr().out
    engine = open_copy(killed)
    assert served(engine) == [*range(COUNT)]
    engine.close()


def test_the_command_line_accepts_a_loss_and_says_what_was_lost(killed, capsys):
    names = remove_files(killed, "last")
    assert main(["check", "--accept-loss", str(killed)]) == 6
    printed = capsys.readouterr().out
    assert (
        f"loss: accepted for {', '.join(names)}; the store opens without their content" in printed
    )
    assert "journal: at most " in printed
    assert "entries are lost, ids " in printed
    assert "is missing" not in printed
    url = f"file:{killed}?embedded=1"
    with penstock.connect(url) as queues:
        assert COUNT > queues.stats("q").messages > COUNT / 2
    assert main(["check", "--accept-loss", str(killed)]) == 6
    assert "no file is missing, so there is no loss to accept" in capsys.readouterr().out


def test_a_url_accepts_a_loss_and_a_warning_says_what_is_lost(killed, caplog):
    names = remove_files(killed, "middle")
    url = f"file:{killed}?embedded=1"
    with pytest.raises(StoreUnusable, match="accept_loss"):
        penstock.connect(url)
    assert caplog.messages == []
    with penstock.connect(url + "&accept_loss=1") as queues:
        assert queues.stats("q").messages > COUNT / 2
    assert {each.name for each in caplog.records} == {"penstock.journal"}
    assert {each.levelname for each in caplog.records} == {"WARNING"}
    first, *others = caplog.messages
    assert first.startswith(f"{killed}: the loss of files was accepted: {names[0]} (offsets ")
    assert any(" entries are lost, ids " in each for each in others)
    assert len(others) <= 21
    caplog.clear()
    with penstock.connect(url + "&accept_loss=1"):
        assert caplog.messages == []


def test_accepting_a_loss_leaves_a_complete_store_unchanged(killed):
    before = listing(killed / "journal").keys()
    engine = open_copy(killed, accept_loss=True)
    assert served(engine) == [*range(COUNT)]
    engine.close()
    assert before <= listing(killed / "journal").keys()


def test_a_missing_journal_of_a_store_in_use_is_not_replaced_by_an_empty_one(killed):
    shutil.rmtree(killed / "journal")
    for accept_loss in (False, True):
        with pytest.raises(StoreUnusable, match="is missing or empty, though"):
            open_copy(killed, accept_loss=accept_loss)


@pytest.mark.parametrize("name", ["000000000001.seg", "manifest"])
def test_a_named_pipe_in_the_journal_is_refused_at_once(killed, name):
    (killed / "journal" / name).unlink()
    os.mkfifo(killed / "journal" / name)
    program = "import sys; from penstock.cli import main; sys.exit(main(sys.argv[1:]))"
    for command in (["check"], ["inspect"], ["readers"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *command, str(killed)],
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 6
        assert f"{name} is a named pipe, not a regular file" in done.stderr
    with pytest.raises(StoreUnusable, match="is a named pipe, not a regular file"):
        open_copy(killed)


@pytest.mark.parametrize("name", ["store", "key"])
def test_a_named_pipe_beside_the_journal_is_refused_at_once(killed, name):
    (killed / name).unlink()
    os.mkfifo(killed / name)
    with pytest.raises(StoreUnusable, match="is a named pipe, not a regular file"):
        open_copy(killed)


def test_a_named_pipe_in_place_of_a_snapshot_is_ignored(killed):
    for path in snapshot_paths(killed)[:1]:
        path.unlink()
        os.mkfifo(path)
    engine = open_copy(killed)
    assert served(engine) == [*range(COUNT)]
    engine.close()
