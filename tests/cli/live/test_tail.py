"""`penstock tail`: events of a store's journal, and changes of counts of anything else."""

import json
import subprocess

import pytest

import penstock
from tests.cli.conftest import EXECUTABLE
from tests.server.console.conftest import ConsoleServer


@pytest.fixture
def console(tmp_path):
    server = ConsoleServer(tmp_path / "store")
    yield server
    server.stop()


@pytest.fixture
def tail(console):
    """Starts `penstock tail orders --json`; a function that reads its next line."""
    started = []

    def begin(url, *options):
        process = subprocess.Popen(
            [EXECUTABLE, "tail", "orders", "--url", url, *options],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for each in started:
        each.kill()
        each.communicate()


def push_until(process, queues):
    """Pushes until the program, which takes a moment to begin, prints one; that line."""
    import threading

    stop = threading.Event()

    def push():
        while not stop.wait(0.3):
            queues.push("orders", "\x1b[31mhello", attributes={"a": "1"})

    thread = threading.Thread(target=push)
    thread.start()
    try:
        # What came just before may have become durable only after the program began.
        while "QueueCreated" in (line := process.stdout.readline()):
            continue
        return line
    finally:
        stop.set()
        thread.join()


def test_events_of_one_queue_of_a_store_are_printed_as_they_happen(console, tail, tmp_path):
    console.queues.create("other")
    console.queues.create("orders")
    url = f"file:{tmp_path / 'store'}"
    process = tail(url, "--json")
    first = json.loads(push_until(process, console.queues))
    assert (first["event"], first["queue"]) == ("Pushed", "orders")
    console.queues.push("other", "not this")
    claim = console.queues.pull("orders", holder="worker 7")
    console.queues.delete(claim)
    seen = {}
    while "Deleted" not in seen:
        line = json.loads(process.stdout.readline())
        assert line["queue"] == "orders"
        seen[line["event"]] = line
    assert seen["Claimed"]["holder"] == "worker 7"
    assert seen["Deleted"]["message"] == claim.id


def test_a_line_for_people_begins_with_the_time_and_escapes_the_body(console, tail, tmp_path):
    console.queues.create("orders")
    line = push_until(tail(f"file:{tmp_path / 'store'}"), console.queues)
    assert line.startswith("20")
    assert "Pushed" in line
    assert r"\x1b[31mhello" in line
    assert "\x1b" not in line


def test_over_http_changes_of_counts_are_printed_and_said_to_be_that(console, tail):
    console.queues.create("orders")
    process = tail(console.url, "--json")
    found = json.loads(push_until(process, console.queues))
    assert found["pushed"] >= 1
    assert found["visible"] >= 1
    process.kill()
    assert "this shows what changed when the queue was looked at" in process.communicate()[1]


def test_a_queue_that_is_deleted_ends_the_tail_over_http(console, tail):
    console.queues.create("orders")
    process = tail(console.url, "--json")
    push_until(process, console.queues)
    console.queues.remove("orders")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "'orders' was deleted" in err


@pytest.mark.parametrize("over", ["http", "store"])
def test_a_missing_queue_is_refused_with_those_that_are_like_it(console, tail, tmp_path, over):
    console.queues.create("order")
    process = tail(console.url if over == "http" else f"file:{tmp_path / 'store'}")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "no queue 'orders'" in err
    assert ("did you mean order?" in err) == (over == "store")


def test_a_store_in_memory_has_nobody_else_to_watch(process):
    done = process("tail", "orders", "--url", "memory:")
    assert done.status == 2
    assert "is opened for one process alone" in done.err
    assert penstock.connect("memory:").list() == []


def test_the_address_of_a_server_needs_no_scheme(process):
    done = process("tail", "orders", "--url", "127.0.0.1:1")
    assert done.status == 4
    assert done.err.startswith("penstock: http://127.0.0.1:1: cannot be reached")
