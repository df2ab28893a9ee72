"""`penstock demo`: its shop, its kills, and a verdict that can be bad."""

import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from penstock.cli.shop.ledger import ShopLedger, judge
from penstock.cli.shop.supervisor import ServerProcess
from tests.cli.conftest import EXECUTABLE
from tests.server.conftest import until


@pytest.fixture
def write(tmp_path):
    """Writes lines into the ledger of one process."""

    def write(*lines):
        ledger = ShopLedger(tmp_path, "test")
        for line in lines:
            ledger.write(*line.split())
        return tmp_path

    return write


def test_an_order_that_was_answered_and_is_nowhere_is_lost(write):
    ledger = write("try a", "sent a", "try b", "sent b", "try c", "got b m1", "end b m1")
    verdict = judge(ledger, dead=set(), left=set())
    assert verdict.lost == ["a"]
    assert not verdict.holds
    # Its push had no answer: it may be nowhere.
    assert verdict.unknown == 1


@pytest.mark.parametrize("where", ["dead", "left"])
def test_an_order_that_is_in_a_queue_is_not_lost(write, where):
    ledger = write("try a", "sent a")
    assert judge(ledger, **{"dead": set(), "left": set(), where: {"a"}}).holds


def test_a_message_that_is_delivered_after_its_delete_was_answered_came_back(write):
    ledger = write("try a", "sent a", "got a m1", "end a m1", "done a m1", "got a m1")
    verdict = judge(ledger, set(), set())
    assert verdict.came_back == ["a"]
    assert not verdict.holds


def test_a_message_that_is_delivered_again_after_a_crash_is_no_fault(write):
    ledger = write("try a", "sent a", "got a m1", "got a m1", "end a m1", "done a m1")
    verdict = judge(ledger, set(), set())
    assert (verdict.holds, verdict.again, verdict.finished) == (True, 1, 1)


def test_an_interrupt_while_the_server_starts_leaves_no_server_behind(tmp_path):
    # Made in two steps: what an interrupted constructor has made is nobody's.
    server: Any = object.__new__(ServerProcess)

    def interrupt():
        until(lambda: hasattr(server, "_process"))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        server.__init__(tmp_path / "store", 0)
    thread.join()
    assert server._process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("client", ["boto3", "penstock"])
def test_a_demo_kills_its_server_and_finds_that_nothing_was_lost(process, tmp_path, client):
    path = tmp_path / "demo"
    done = process(
        "demo", "--seconds", "6", "--client", client, "--data", str(path), "--no-spark", "--json"
    )
    verdict = done.results[0]
    assert done.status == 0, done.err
    assert verdict["holds"]
    assert verdict["server_kills"] == len(verdict["restarts_s"]) == 1
    assert verdict["sent"] > 20
    assert verdict["lost"] == verdict["came_back"] == []
    # The second verdict says which it is.
    assert "penstock check, which verifies the journal; not the pipeline's audit" in done.err
    assert (path / "store").is_dir()


def test_a_key_kills_the_server_and_another_shows_the_verdict(tmp_path):
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [EXECUTABLE, "demo", "--no-spark", "--no-browser", "--data", str(tmp_path / "demo")],
        stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
    )  # fmt: skip
    os.close(follower)
    seen = b""

    def read_until(text):
        nonlocal seen
        until_s = time.monotonic() + 100
        while text not in seen:
            ready, _, _ = select.select([leader], [], [], max(0.0, until_s - time.monotonic()))
            assert ready, seen.decode(errors="replace")
            seen += os.read(leader, 65_536)

    try:
        read_until(b"(k: kill it, q: verdict)")
        os.write(leader, b"k")
        read_until(b"it answers again after")
        os.write(leader, b"q")
        read_until(b"nothing was lost")
        read_until(b"sound")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def test_a_directory_with_something_in_it_is_refused(process, tmp_path):
    (tmp_path / "mine").touch()
    done = process("demo", "--data", str(tmp_path))
    assert done.status == 2
    assert "is not empty; a demo begins with nothing" in done.err
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


def test_a_port_that_is_taken_is_said_and_nothing_stays(process, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = process("demo", "--port", port, "--data", str(tmp_path / "demo"))
    assert done.status == 4
    assert "the server did not start" in done.err
    assert port in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("words", [["--seconds", "1"], ["--client", "boto"], ["--port", "x"]])
def test_wrong_arguments_start_nothing(process, words):
    done = process("demo", *words)
    assert (done.status, done.out) == (2, "")


def test_without_boto3_the_extra_is_named(tmp_path):
    code = (
        "import sys; sys.modules['boto3'] = None; from penstock.cli import main; "
        "sys.exit(main(['demo', '--client', 'boto3']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 3
    assert "install it with pip install 'PATH-OF-THE-CLONE[demo]'" in done.stderr
    assert done.stdout == ""
