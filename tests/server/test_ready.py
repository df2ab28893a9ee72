"""The programs of --ready-dir run once the server answers, in order, and cannot reach AWS."""

import subprocess
from pathlib import Path

from tests.server.conftest import until
from tests.server.sqs.conftest import PENSTOCK, clean_environment
from tests.server.test_lines import Served

MAKES = """
import boto3
print(boto3.client("sqs").create_queue(QueueName="made")["QueueUrl"])
"""


def programs(directory, **texts):
    directory.mkdir()
    for name, text in texts.items():
        path = directory / name.replace("_", ".")
        path.write_text(text)
        if text.startswith("#!"):
            path.chmod(0o755)
    return str(directory)


def is_running(pid):
    try:
        # The state follows the name, which is in brackets.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def served(*arguments):
    return Served("--store", "memory:", *arguments)


def ended(*arguments):
    """A server that ends by itself, or is not started."""
    return subprocess.run(
        [PENSTOCK, "serve", "--port", "0", "--store", "memory:", *arguments],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_programs_run_in_the_order_of_their_names_against_the_server(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "production")
    monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", "http://127.0.0.1:1")
    directory = programs(
        tmp_path / "ready.d",
        b_py=MAKES,
        a_sh='echo "at $AWS_ENDPOINT_URL as $AWS_ACCESS_KEY_ID in $AWS_REGION$AWS_PROFILE"',
        c="#!/bin/sh\nprintf 'no newline, and \\033[31mred' >&2",
        notes_txt="not a program",
    )
    server = served("--ready-dir", directory)
    try:
        assert server.line("ready").endswith("ready programs=3 failed=0\n")
    finally:
        server.stop()
    url = server.line("started").partition("url=")[2].split()[0]
    assert [line for line in server.lines if not line.startswith("penstock: ")] == [
        f"a.sh: at {url} as test in us-east-1\n",
        f"b.py: {url}/000000000000/made\n",
        "c: no newline, and \\x1b[31mred\n",
    ]
    assert server.process.returncode == 0


def test_a_program_that_fails_is_named_and_the_others_and_the_server_go_on(tmp_path):
    directory = programs(
        tmp_path / "ready.d", a="#!/bin/sh\nexit 7", b="#!/no/such/program", c_sh="echo here"
    )
    server = served("--ready-dir", directory)
    try:
        assert "program=a status=7" in server.line("ready-failed")
        assert 'program=b status="No such file or directory"' in server.line("ready-failed", 1)
        assert "programs=3 failed=2" in server.line("ready")
        assert "c.sh: here\n" in server.lines
        assert server.process.poll() is None
    finally:
        server.stop()


def test_with_ready_strict_a_program_that_fails_ends_the_server(tmp_path):
    directory = programs(tmp_path / "ready.d", a_sh="exit 1", b_sh="exit 0", c_sh="exit 1")
    done = ended("--ready-dir", directory, "--ready-strict")
    assert done.returncode == 3
    assert done.stderr.endswith("penstock: ready_dir: failed: a.sh, c.sh\n")


def test_a_server_that_stops_ends_the_program_that_runs(tmp_path):
    texts = {"a_sh": "echo pid $$; exec tail -f /dev/null", "b_sh": "echo b"}
    server = served("--ready-dir", programs(tmp_path / "ready.d", **texts))
    said = until(lambda: [line for line in server.lines if line.startswith("a.sh: pid ")])
    server.stop()
    assert server.process.returncode == 0
    assert "b.sh: b\n" not in server.lines
    until(lambda: not is_running(int(said[0].split()[-1])))


def test_a_directory_that_cannot_be_read_is_refused_before_anything_is_opened(tmp_path):
    done = ended("--ready-dir", str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (3, "")
    assert "none': No such file or directory" in done.stderr
    assert "give ready_dir, too" in ended("--ready-strict").stderr
