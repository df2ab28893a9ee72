"""Only `create` makes a store, and commands that only look leave no daemon behind."""

import os
import sys
from contextlib import closing

import pytest

import penstock
from penstock.backends.engine.blocking import BlockingEngine
from penstock.backends.engine.store import open_engine
from penstock.backends.remote.starting import daemon_status
from penstock.cli.histories import read_history
from penstock.client import Queues
from penstock.errors import Overloaded
from penstock.journal.file_journal import FileJournal

LOOKS = ("list", "stats", "stats orders", "peek orders", "configure orders", "history ID", "why ID")
CHANGES = (
    "push orders hello",
    "pull orders",
    "purge orders",
    "remove orders",
    "redrive orders",
    "configure orders --delay 1s",
)
FILES = ("inspect", "check", "readers", "mirror --to redis://127.0.0.1:1")
TASKS_THAT_LOOK = ("list", "failed", "inspect ID")
TASKS = (*TASKS_THAT_LOOK, "retry --all", "cancel ID")
APP = """
from penstock.tasks import TaskApp
app = TaskApp(name="shop")

@app.task
def bill():
    raise ValueError("no price")
"""


@pytest.fixture
def app(tmp_path, monkeypatch):
    """The name of an app in a module of its own; its store is that of the environment."""
    module = f"app_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{module}.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield f"{module}:app"
    sys.modules.pop(module, None)


@pytest.fixture
def store(quick_path):
    """A store with one message, which no process holds."""
    path = quick_path / "shop"
    with penstock.connect(f"file:{path}?embedded=1") as queues:
        queues.create("orders")
        queues.push("orders", b"hello")
    return path


@pytest.mark.parametrize("options", ["", "?embedded=1"])
@pytest.mark.parametrize("words", [*LOOKS, *CHANGES, *FILES])
def test_a_path_without_a_store_stays_as_it_was(run_main, quick_path, words, options):
    path = quick_path / "typo"
    done = run_main(*words.split(), "--url", f"file:{path}{options}")
    assert (done.status, done.out) == (3, "")
    assert done.err == f"penstock: url: no store at {path}; penstock create makes one\n"
    assert not path.exists()


@pytest.mark.parametrize("words", TASKS)
def test_a_path_without_a_store_of_tasks_stays_as_it_was(run_main, quick_path, app, words):
    path = quick_path / "typo"
    action, *more = words.split()
    done = run_main("tasks", action, app, *more, "--url", str(path))
    assert (done.status, done.out) == (3, "")
    assert done.err == f"penstock: url: no store at {path}; penstock create makes one\n"
    assert not path.exists()


@pytest.mark.parametrize("words", ["list", *FILES])
def test_an_empty_directory_is_no_store(run_main, quick_path, words):
    (quick_path / "empty").mkdir()
    done = run_main(*words.split(), "--url", f"file:{quick_path / 'empty'}")
    assert done.status == 3
    assert "penstock create makes one" in done.err
    assert not [*(quick_path / "empty").iterdir()]


def test_a_mirror_is_of_one_store(run_main, store, monkeypatch):
    words = ("mirror", "--from", str(store), "--status")
    monkeypatch.setenv("PENSTOCK_URL", str(store))
    asked = run_main("mirror", "--status")
    assert (asked.status, asked.err) == (run_main(*words).status, run_main(*words).err)
    refused = run_main(*words, "--url", str(store))
    assert refused.status == 2
    assert "there is --from, too; give one of them" in refused.err


def test_commands_that_look_at_tasks_start_no_daemon(run_main, store, app):
    url = f"file:{store}"
    with penstock.connect(f"{url}?embedded=1") as queues:
        queues.create("shop")
        task_id = queues.push("shop", b"not a task").id
    for words, status, text in (
        (("list", app), 0, "bill"),
        (("failed", app), 1, "no task of shop has failed"),
        (("inspect", app, task_id), 0, task_id),
    ):
        done = run_main("tasks", *words, "--url", url)
        assert done.status == status, done.err
        assert text in done.out + done.err
    assert daemon_status(store) is None
    assert not (store / "daemon").exists()


def test_commands_that_look_start_no_daemon(run_main, store):
    url = f"file:{store}"
    found = run_main("peek", "orders", "--url", url, "--json")
    for words in LOOKS:
        done = run_main(*words.replace("ID", found.results[0]["id"]).split(), "--url", url)
        assert (done.status, done.err) == (0, ""), words
        assert "orders" in done.out or "hello" in done.out
    assert daemon_status(store) is None
    assert not (store / "daemon").exists()


def test_commands_that_look_ask_the_process_that_holds_the_store(run_main, store):
    with penstock.connect(f"file:{store}") as queues:
        queues.pull("orders")
        done = run_main("stats", "orders", "--url", f"file:{store}", "--json")
        assert done.results[0]["in_flight"] == 1


def test_a_store_that_a_program_has_opened_for_itself_is_named(run_main, store):
    with penstock.connect(f"file:{store}?embedded=1"):
        done = run_main("stats", "--url", f"file:{store}")
    assert done.status == 8
    assert f"{store / 'journal'}: in use by process {os.getpid()}; end that process" in done.err


def test_why_waits_while_the_store_reads_what_was_before_its_opening(store):
    with closing(penstock.connect(f"file:{store}?embedded=1")) as queues:
        ids = [queues.push("orders", b"x" * 900_000).id for _ in range(4)]
    engine = open_engine(store, background=False)
    assert isinstance(engine.journal, FileJournal)
    engine.journal.unindexed_s_max = 0
    with Queues(BlockingEngine(engine)) as queues:
        with pytest.raises(Overloaded, match="ask again"):
            queues.history(ids[-1])
        assert [each.kind for each in read_history(queues, ids[-1])] == ["Pushed"]
