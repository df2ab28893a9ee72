"""Mirrors between processes: beside a daemon, to a server that goes away, and the command line."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import urllib.request
from typing import Any

import pytest

import penstock
from penstock import aio
from penstock.backends.mirror.service import MirrorService
from penstock.backends.remote.daemon import running_pid
from penstock.cli import main
from penstock.journal import reader_positions
from tests.ports import lasting_port, refusing_port
from tests.server.conftest import TIMEOUT_S, DaemonProcess, end_daemon, until
from tests.server.sqs.conftest import PENSTOCK, clean_environment, serve

connect: Any = penstock.connect
MIRROR_SERVICE: Any = MirrorService


@pytest.fixture
def store(quick_path):
    yield quick_path / "store"
    end_daemon(quick_path / "store")


@pytest.fixture
def other(quick_path):
    yield quick_path / "other"
    end_daemon(quick_path / "other")


@pytest.fixture
def run(capsys):
    """Run a command in this process; give what it printed."""

    def run(*words, status=0):
        found = main(list(words))
        printed = capsys.readouterr()
        assert found == status, printed.err
        return printed.out or printed.err

    return run


def until_mirrored(queues, mirrored):
    """Waits until all commands so far are mirrored.

    What the mirror says of itself may be older than the last commands; a new queue is not.
    """
    queues.create("end")
    until(lambda: "end" in mirrored.list())


def test_a_mirror_url_is_the_primary_and_the_mirror_follows(store, other):
    with connect(f"mirror:?primary=file:{store}&mirror=file:{other}") as queues:
        assert type(queues.service) is MIRROR_SERVICE
        queues.create("orders")
        queues.push_many("orders", [b"%d" % i for i in range(100)])
        queues.delete(queues.pull("orders"))
        with connect(f"file:{other}") as mirrored:
            until_mirrored(queues, mirrored)
            bodies = [each.body for each in mirrored.peek("orders", 100)]
        assert bodies == [b"%d" % i for i in range(1, 100)]
    with connect(f"mirror:?primary=file:{store}&mirror=file:{other}") as queues:
        queues.push("orders", b"after a restart")
        with connect(f"file:{other}") as mirrored:
            until(lambda: mirrored.stats("orders").visible == 100)


async def use_awaited(url):
    opened: Any = await aio.connect(url)
    async with opened as queues:
        await queues.create("orders")
        await queues.push("orders", b"x")
        until(lambda: queues.service.mirror.progress is not None)
        until(lambda: queues.service.mirror.progress.pushed == 1)


def test_the_awaited_methods_have_the_mirror_too(store, other):
    asyncio.run(use_awaited(f"mirror:?primary=file:{store}&mirror=file:{other}"))
    with connect(f"file:{other}") as mirrored:
        assert mirrored.stats("orders").visible == 1


def test_a_server_killed_and_started_again_has_every_message_once(store, other):
    """Row 12: the other service goes away in the middle of a load, and comes back."""
    port = lasting_port()
    words = ("--listen", f"127.0.0.1:{port}")
    server = DaemonProcess(other, *words)
    try:
        url = f"mirror:?primary=file:{store}&mirror=penstock://127.0.0.1:{port}"
        with connect(url) as queues:
            queues.create("orders")
            for turn in range(30):
                queues.push_many("orders", [b"%d.%d" % (turn, i) for i in range(100)])
                for claim in queues.pull_many("orders", 30):
                    queues.delete(claim)
                if turn in (10, 20):
                    server.process.kill()
                    server.stop()
                if turn in (13, 23):
                    server = DaemonProcess(other, *words)
            expected = [each.body for each in queues.peek("orders", 1_000)]
            with connect(f"file:{other}") as mirrored:
                until_mirrored(queues, mirrored)
                assert [each.body for each in mirrored.peek("orders", 1_000)] == expected
            assert queues.service.mirror.failure is None
    finally:
        server.stop()


def test_a_mirror_that_cannot_be_reached_does_not_delay_the_primary(store, other):
    port = lasting_port()
    url = f"mirror:?primary=file:{store}&mirror=penstock://127.0.0.1:{port}?timeout=1"
    with connect(url) as queues:
        queues.create("orders")
        queues.push("orders", b"x")
        until(lambda: queues.service.mirror.error is not None)
        assert queues.service.mirror.progress is None
        server = DaemonProcess(other, "--listen", f"127.0.0.1:{port}")
        try:
            with connect(f"file:{other}") as mirrored:
                until(lambda: mirrored.list() == ["orders"])
                until(lambda: mirrored.stats("orders").visible == 1)
            mirror = queues.service.mirror
            until(lambda: mirror.progress is not None and mirror.progress.behind_bytes == 0)
        finally:
            server.stop()
        # While it waits for the other service, it is behind by all that was pushed meanwhile.
        queues.push("orders", bytes(1_000))
        until(lambda: mirror.progress.error is not None)
        queues.push("orders", bytes(100_000))
        until(lambda: mirror.progress.behind_bytes > 101_000)


def test_the_command_mirrors_beside_a_server_and_its_lag_is_seen(store, other, run):
    with serve("--data", str(store)) as server:
        with connect(f"file:{store}") as queues:
            queues.create("orders")
            queues.push("orders", b"before")
            said = run("mirror", "--from", f"file:{store}", "--to", f"file:{other}", "--once")
            assert said.startswith("0 B behind")
            assert "1 pushed" in said
            queues.push_many("orders", [bytes(1_000)] * 50)
        with urllib.request.urlopen(f"{server.url}/metrics") as page:
            lines = page.read().decode().splitlines()
        (behind,) = [line for line in lines if line.startswith("penstock_reader_behind_bytes{")]
        assert behind.startswith('penstock_reader_behind_bytes{reader="mirror"} ')
        assert float(behind.split()[-1]) > 50_000
        shown = run("stats", "--url", f"file:{store}")
        assert "reader mirror: " in shown
        status = json.loads(run("mirror", "--from", f"file:{store}", "--status", "--json"))
        assert status["behind_bytes"] > 50_000
        assert status["is_complete"] is True
        process = subprocess.Popen(
            [PENSTOCK, "mirror", "--from", f"file:{store}", "--to", f"file:{other}", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean_environment(),
        )
        try:
            with connect(f"file:{other}") as mirrored:
                until(lambda: mirrored.stats("orders").visible == 51)
            refused = run(
                "mirror", "--from", f"file:{store}", "--to", f"file:{other}", "--once", status=8
            )
            assert "another process mirrors it as 'mirror'" in refused
        finally:
            process.terminate()
            out, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, errors
        assert json.loads(out.splitlines()[0])["refused"] == 0
    (reader,) = reader_positions.registered(store)
    assert reader.name == "mirror"


def test_what_cannot_be_mirrored_is_refused_with_a_reason(store, other, run):
    assert "no journal that can be followed" in run(
        "mirror", "--from", "memory:", "--to", "memory:", status=3
    )
    assert "give --to URL" in run("mirror", "--from", f"file:{store}", status=2)
    assert f"no store at {store}; penstock create makes one" in run(
        "mirror", "--from", f"file:{store}", "--to", f"file:{other}", "--once", status=3
    )
    assert not other.exists()
    run("mirror", "--from", f"file:{store}", "--status", status=3)
    with connect(f"file:{store}") as queues:
        queues.create("orders")
    said = run("mirror", "--from", f"file:{store}", "--status", status=1)
    assert said == f"penstock: {store}: no mirror with the name 'mirror' was started\n"
    with connect(f"file:{other}") as queues:
        queues.create("orders")
        queues.push("orders", b"x")
    said = run("mirror", "--from", f"file:{store}", "--to", f"file:{other}", "--once", status=3)
    assert "its queue 'orders' has messages already" in said


def test_a_primary_that_is_killed_and_started_again_is_followed_without_loss(store, other):
    """Row 12: the mirror goes on reading the journal of the next process that holds the store."""
    expected: list[bytes] = []
    with connect(f"file:{store}") as queues:
        queues.create("orders")
    process = subprocess.Popen(
        [PENSTOCK, "mirror", "--from", f"file:{store}", "--to", f"file:{other}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    try:
        for turn in range(3):
            with connect(f"file:{store}") as queues:
                queues.push_many("orders", [b"%d.%d" % (turn, i) for i in range(50)])
                for claim in queues.pull_many("orders", 20):
                    queues.delete(claim)
                expected = [each.body for each in queues.peek("orders", 1_000)]
            pid = running_pid(store)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            until(lambda: running_pid(store) is None)
        with connect(f"file:{store}") as queues, connect(f"file:{other}") as mirrored:
            until_mirrored(queues, mirrored)
            assert [each.body for each in mirrored.peek("orders", 1_000)] == expected
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, errors) == (0, "")


def test_a_name_has_one_target_unless_that_has_moved(store, other, run, caplog):
    """Another service would have only the messages pushed since the first one stopped."""
    third = other.with_name("third")
    command = ("mirror", "--from", f"file:{store}", "--once", "--to")
    try:
        with connect(f"file:{store}") as queues:
            queues.create("orders")
            queues.push("orders", b"before")
            run(*command, f"file:{other}")
            said = run(*command, f"file:{third}", status=3)
            assert said.startswith(f"penstock: mirror: 'mirror' mirrors to file:{other}, and ")
            assert "give another --name" in said
            assert "pass --moved" in said
            assert not third.exists()
            shown = json.loads(run("mirror", "--from", f"file:{store}", "--status", "--json"))
            assert shown["target"] == f"file:{other}"
            run(*command, f"file:{third}", "--name", "second")
            with connect(f"file:{third}") as mirrored:
                assert mirrored.stats("orders").visible == 1
            queues.push("orders", b"after")
        with connect(f"mirror:?primary=file:{store}&mirror=file:{third}") as queues:
            until(lambda: queues.service.mirror.failure is not None)
            assert queues.service.mirror.progress is None
        (logged,) = caplog.messages
        assert logged.startswith(f"the mirror mirror of {store} has ended: mirror: 'mirror' mirr")
        end_daemon(third)
        end_daemon(other)
        shutil.rmtree(third)
        other.rename(third)
        assert "1 pushed" in run(*command, f"file:{third}", "--moved")
        run(*command, f"file:{third}")
        with connect(f"file:{third}") as mirrored:
            assert [each.body for each in mirrored.peek("orders", 9)] == [b"before", b"after"]
    finally:
        end_daemon(third)


def test_while_it_waits_the_command_prints_the_reason_on_stderr_only(store, other):
    with connect(f"file:{store}") as queues:
        queues.create("orders")
    with refusing_port() as port:
        url = f"penstock://127.0.0.1:{port}?timeout=1"
        process = subprocess.Popen(
            [PENSTOCK, "mirror", "--from", f"file:{store}", "--to", url, "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(),
        )
        assert process.stderr is not None
        line = process.stderr.readline()
        process.terminate()
        out, errors = process.communicate(timeout=TIMEOUT_S)
    assert line.startswith(f"penstock: waiting: penstock://127.0.0.1:{port}: cannot be reached")
    assert (process.returncode, out, errors) == (0, "", "")
