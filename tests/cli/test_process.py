"""The real executable, as a process: its main paths, its exit statuses, and bad input."""

import os
import pty
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

import penstock
from tests.cli.conftest import EXECUTABLE

FLOW = b"""
create orders --visibility-timeout 1m   # a comment
push orders hello --attribute kind=test
push orders world
pull orders -n 5 --delete
stats
"""


def one_line(done):
    """The one line an error is."""
    assert done.err.startswith("penstock: ")
    assert done.err.count("\n") == 1
    assert "Traceback" not in done.err
    return done.err


def test_the_version_is_that_of_the_package(process):
    assert process("--version").out == f"penstock {penstock.__version__}\n"


def test_the_module_is_the_command_line_too():
    command = [sys.executable, "-m", "penstock", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"penstock {penstock.__version__}\n"


def test_help_names_every_command_and_every_exit_status(process):
    done = process("--help")
    assert done.status == 0
    for word in ["create", "history", "shell", "RequestError", "JournalError", "PENSTOCK_URL"]:
        assert word in done.out


def test_starting_imports_neither_asyncio_nor_any_command(process):
    code = "import sys, penstock.cli.parser as p; p.make_parser(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "asyncio" not in loaded
    assert "penstock.cli.push" not in loaded


def test_a_script_of_commands_runs_in_one_process(process):
    done = process("shell", "--url", "memory:", stdin=FLOW)
    assert (done.status, done.err) == (0, "")
    assert "body       hello" in done.out
    assert "body      world" in done.out
    assert done.out.splitlines()[-1].split() == ["orders", "0", "0", "0", "0", "B", "-", "0"]


def test_the_store_may_be_named_by_the_environment(process):
    done = process("create", "orders", "--json", PENSTOCK_URL="memory:")
    assert done.status == 0
    assert done.results[0]["queue"] == "orders"


def test_the_store_may_be_named_before_the_command(process):
    assert process("--url", "memory:", "create", "orders").status == 0


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["list"], 2, "PENSTOCK_URL"),
        ([], 2, "the command is missing"),
        (["shove", "orders"], 2, "shove"),
        (["push", "orders"], 2, "BODY"),
        (["push", "orders", "x", "--delay", "soon"], 2, "'soon' is not a duration"),
        (["push", "orders", "x", "--attribute", "kind"], 2, "NAME=VALUE"),
        (["pull", "orders", "-n", "many"], 2, "whole number"),
        (["push", "orders", "@no/such/file", "--url", "memory:"], 2, "No such file"),
        (["push", "orders", "@.", "--url", "memory:"], 2, "directory"),
        (["list", "--url", "nowhere:"], 3, "unknown URL scheme 'nowhere'"),
        (["push", "orders", "x", "--url", "memory:"], 3, "'orders'"),
        (["create", "no spaces", "--url", "memory:"], 3, "not a queue name"),
        (["create", "q", "--max-receives", "0", "--url", "memory:"], 3, "max_receives"),
        (["create", "q", "--retention", "9999d", "--url", "memory:"], 3, "retention: "),
    ],
)
def test_bad_input_is_one_line_and_an_exit_status(process, words, status, said):
    done = process(*words)
    assert (done.status, done.out) == (status, "")
    assert said in one_line(done)


def test_a_body_that_is_not_text_survives_the_command_line(process):
    script = b"create q\npush q '\xff\xfe'\npull q\n"
    done = process("shell", "--url", "memory:", "--json", stdin=script)
    assert done.results[-1]["body_base64"] == "//4="
    assert "body" not in done.results[-1]


def test_an_interrupt_ends_a_waiting_pull_without_a_traceback():
    child = subprocess.Popen(
        [EXECUTABLE, "shell", "--url", "memory:"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A suite that a shell started in the background ignores interrupts, and its children do.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdin.write(b"create q --json\npull q --wait 10m\n")
        child.stdin.flush()
        assert b'"queue":"q"' in child.stdout.readline()
        # The first may come before the pull has begun to wait, and end nothing. One that comes
        # while the process is ending would be printed.
        for _ in range(6):
            child.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                assert child.wait(timeout=10) == 130
                break
        else:
            child.kill()
            pytest.fail("the pull went on")
        assert child.stderr.read() == b""


def test_a_closed_output_pipe_ends_the_command_without_a_traceback():
    reading, writing = os.pipe()
    os.close(reading)
    script = b"create q\npush q precious\npull q --delete\nstats q\n"
    done = subprocess.run(
        [EXECUTABLE, "shell", "--url", "memory:"],
        input=script,
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_at_a_terminal_the_shell_prompts_and_continues_after_an_error():
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [EXECUTABLE, "shell", "--url", "memory:"],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TERM": "dumb"},
    )
    os.close(theirs)
    os.write(ours, b"frobnicate\ncreate orders\nexit\n")
    said = child.communicate(timeout=60)[0].decode()
    os.close(ours)
    assert child.returncode == 0
    assert "penstock> " in said
    assert "penstock: frobnicate is not a command (see penstock --help)" in said
    assert "visibility-timeout  30s" in said


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_output_to_a_full_disk_is_an_error_of_one_line():
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [EXECUTABLE, "--url", "memory:", "create", "q"],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == b"penstock: No space left on device\n"


def test_a_terminal_without_unicode_still_shows_the_message(process):
    done = process(
        "shell",
        "--url",
        "memory:",
        stdin="create q\npush q grün\npull q\n".encode(),
        PYTHONIOENCODING="ascii",
        PYTHONUTF8="0",
    )
    assert done.status == 0
    assert "gr\\xfcn" in done.out


def test_an_address_that_is_taken_has_an_exit_status_of_its_own(process, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = process("daemon", "run", str(tmp_path / "data"), "--listen", address)
    assert done.status == 7
    assert f"another program listens on {address}" in one_line(done)
