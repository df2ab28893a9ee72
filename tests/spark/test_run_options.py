"""A run at a terminal with all that may follow it: audit, report, Spark's pages, event logs."""

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import penstock
from penstock import cli
from penstock.spark.lake import Lake

pytestmark = [pytest.mark.service("default-jre-headless"), pytest.mark.timeout(600)]
PENSTOCK = Path(sys.executable).with_name("penstock")
SMALL = ["--master", "local[2]", "--conf", "spark.driver.memory=1g"]
SMALL += ["--conf", "spark.sql.shuffle.partitions=2"]


@pytest.fixture
def store(tmp_path):
    with penstock.connect(f"file:{tmp_path / 'store'}?embedded=1") as queues:
        queues.create("orders")
        queues.push_many("orders", [b"%d" % number for number in range(30)])
    return tmp_path / "store"


def read_until(terminal, pattern, before=""):
    """What a terminal has shown, at least up to what the pattern finds."""
    shown = before
    while re.search(pattern, shown) is None:
        try:
            more = os.read(terminal, 1 << 16)
        except OSError:
            more = b""
        assert more, f"it ended: {shown}"
        shown += more.decode()
    return shown


def test_one_session_does_all_of_it_and_says_so_from_the_first_second(store, tmp_path):
    words = ["run", "--journal", "store", "--lake", "lake", "--audit", "--report", "report.html"]
    words += ["--ui", "--event-log", "history/new", *SMALL]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [PENSTOCK, "pipeline", *words], cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    try:
        # Before Java: the first thing on the terminal.
        shown = read_until(ours, "starting Spark")
        assert "http" not in shown
        shown = read_until(ours, r"http://\S+ is open until Ctrl-C", shown)
        found = re.search(r"(http://\S+:(\d+)) is open", shown)
        assert found is not None
        assert f"Spark's pages: {found[1]}\r\n" in shown
        with urllib.request.urlopen(f"{found[1]}/jobs/", timeout=60) as page:
            assert "report" in page.read().decode()
        # On loopback only.
        listening = subprocess.run(["ss", "-ltn"], capture_output=True, text=True, check=True)
        addresses = re.findall(rf"(\S+):{found[2]}\b", listening.stdout)
        assert addresses
        assert all("127.0.0.1" in each or "[::1]" in each for each in addresses), addresses
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            while os.read(ours, 1 << 16):
                continue
        os.close(ours)
    assert "0 B behind" in shown
    assert "every check holds" in shown
    assert "report.html: " in shown
    assert '"holds": true' in (tmp_path / "report.html").read_text()
    # One application, so one session.
    assert len(list((tmp_path / "history" / "new").iterdir())) == 1


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--watch", "--report", "report.html"], 2, "--audit, --report: not with --watch"),
        (["--report", "nowhere/report.html"], 2, "--report: 'nowhere/report.html' cannot be"),
        (["--ui", "--remote", "sc://127.0.0.1:1"], 4, "no Spark Connect server answers there"),
        (["--event-log", "file", *SMALL], 3, "event-log: 'file' cannot be"),
        (["--master", "banana"], 2, "'banana' is not a Spark master"),
        (["--conf", "nothing"], 2, "'nothing' is not of the form NAME=VALUE"),
    ],
)
def test_a_wrong_option_is_refused_before_a_lake_is_made(
    store, tmp_path, monkeypatch, capsys, words, status, said
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    before = ["pipeline", "run", "--journal", "store", "--lake", "lake", *words]
    assert cli.main(before) == status
    [line] = capsys.readouterr().err.splitlines()
    assert said in line
    assert not (tmp_path / "lake").exists()


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--conf", "spark.driver.memory=banana"], 4, r"at local\[\*\]: Java ended at once"),
        (["--conf", "spark.driver.memory=100m"], 4, r"System memory \d+ must be at least"),
        (["--master", "local[banana]"], 4, "Could not parse Master URL: 'local.banana.'"),
        (
            ["--conf", "spark.sql.shuffle.partitions=many"],
            4,
            "shuffle.partitions. is invalid. It should be",
        ),
    ],
)
def test_a_setting_that_spark_refuses_is_one_sentence(tmp_path, words, status, said):
    Lake.open(tmp_path / "lake", create=True)
    done = subprocess.run(
        [PENSTOCK, "pipeline", "sql", "--lake", "lake", "--quiet", "select 1", *words],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (status, "")
    # A JVM that does not start says why by itself.
    *java, line = done.stderr.splitlines()
    assert re.search(rf"^penstock: Spark did not start .*{said}", line), line
    assert all("Java" in each or "heap" in each or "exception" in each for each in java)
