"""The benchmark of tasks: its ledger finds lost and repeated tasks, and a quick run prints all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ledgers = pytest.importorskip(
    "benchmarks.task_apps.ledger", reason="the source archive has no benchmarks"
)
ROOT = Path(__file__).parents[2]


def test_a_ledger_counts_what_is_missing_and_what_ran_twice(tmp_path):
    ledger = ledgers.make_ledger(tmp_path / "ledger", 5)
    same_file = ledgers.CallLedger(tmp_path / "ledger")
    for number in (0, 1, 1, 3):
        same_file.note(number)
    assert (ledger.missing(5), ledger.repeated(5)) == (2, 1)
    assert (ledger.missing(1), ledger.repeated(1)) == (0, 0)


def test_a_ledger_keeps_how_late_each_call_ran(tmp_path):
    ledger = ledgers.make_ledger(tmp_path / "ledger", 2 * 1_000)
    ledger.note_late_ms(999, 100_000)
    for number in range(600):  # more calls with one lateness than a byte can count
        ledger.note_late_ms(number, 3)
    ledger.note_late_ms(600, 0)
    assert ledger.late_ms() == [0, *[3] * 600, 0xFFFF - 1]


@pytest.mark.service("redis-server")
@pytest.mark.timeout(300)
def test_a_quick_run_prints_every_part():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tasks", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert {*figures["rates_per_s"]} == {"nothing", "sleep_10ms", "enqueue"}
    assert [target["name"] for target in figures["targets"]] == ["delayed calls, p99, ms"]


@pytest.mark.service("redis-server")
@pytest.mark.parametrize(
    ("only", "reason"),
    [
        ("rq", "benchmark: rq: not part of a quick run"),
        ("penstok", "--only: 'penstok' is none of penstock, dramatiq, taskiq, arq, huey"),
    ],
)
def test_a_peer_that_is_not_there_is_an_error_with_its_name(only, reason):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tasks", "--quick", "--only", only],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode != 0
    assert reason in done.stderr
    assert "calls a second" not in done.stdout
