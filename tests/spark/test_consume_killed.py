"""Spark as a consumer, killed without warning: no message lost, none twice."""

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

import contextlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

from tests.spark.consumer import ledger

# How often the stream is killed: once in each window, and then anywhere.
KILLS = int(os.environ.get("PENSTOCK_SPARK_KILLS", "2"))


def bodies(claims):
    return [int(claim.body) for claim in claims]


def killed_when(words, reached, later_s=0.0):
    """Starts a stream, and kills it and all it has started when that file is there, or later."""
    program = [sys.executable, "-m", "tests.spark.consumer", *words]
    process = subprocess.Popen(program, start_new_session=True)
    try:
        while not reached.exists():
            with contextlib.suppress(subprocess.TimeoutExpired):
                pytest.fail(f"it ended by itself with {process.wait(timeout=0.1)}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=later_s)
    finally:
        kill_session(process.pid)
        process.wait()


def kill_session(leader):
    """Kills without warning: Spark's Python workers have groups of their own, but this session."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[3]) == leader:
                os.kill(int(stat.parent.name), signal.SIGKILL)


@pytest.mark.service("default-jre-headless")
@pytest.mark.timeout(200 * (KILLS + 1))
def test_killed_in_either_window_nothing_is_lost_and_nothing_comes_twice(url, queues, tmp_path):
    queues.create("orders")
    messages = 200 * KILLS
    for start in range(0, messages, 100):
        queues.push_many("orders", [b"%d" % number for number in range(start, start + 100)])
    # Ordinary consumers compete: one that takes its time, and below one that is quick.
    elsewhere = bodies(queues.pull_many("orders", 5, visibility=3_600))
    kept = ledger(tmp_path / "ledger")
    words = [url, str(tmp_path / "checkpoint"), str(tmp_path / "ledger")]
    offsets = tmp_path / "checkpoint" / "offsets"
    chance = random.Random(KILLS)
    for number in range(KILLS):
        batch = len(list(offsets.glob("[0-9]*")))
        if number < 2:
            where = ("before", "after")[number]
            reached = tmp_path / where
            killed_when([*words, where, str(batch), str(reached)], reached)
        else:
            killed_when(words, offsets / str(batch), chance.uniform(0, 3))
        quick = queues.pull_many("orders", 5)
        elsewhere += bodies(quick)
        queues.delete_many(quick)
    killed_when([*words, "end", "-1", str(tmp_path / "end")], tmp_path / "end")
    found = [int(body) for (body,) in kept.execute("SELECT body FROM messages")]
    kept.close()
    assert sorted(found + elsewhere) == list(range(messages))
    # All that is left is what somebody still holds.
    assert queues.stats("orders").messages == 5
