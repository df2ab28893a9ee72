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

from tests.conftest import FULL
from tests.spark.consumer import BATCH_MESSAGES, QUEUES, consume, ledger

# How often the streams are killed: once in each window, and then anywhere.
KILLS = int(os.environ.get("PENSTOCK_SPARK_KILLS", "4" if FULL else "1"))


def bodies(claims):
    return [int(claim.body) for claim in claims]


def killed_when(words, reached, later_s=0.0):
    """Runs streams, and kills them and all they have started when those files are there, or later.

    They are expected to reach that point, and not to end before.
    """
    program = [sys.executable, "-m", "tests.spark.consumer", *words]
    process = subprocess.Popen(program, start_new_session=True)
    try:
        while not all(path.exists() for path in reached):
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
def test_a_stream_killed_before_or_after_its_sink_loses_and_repeats_nothing(
    spark, url, queues, tmp_path
):
    """One process has two streams: one is killed before its sink commits, the other after it.

    The session of these tests continues from their checkpoints.
    """
    places = [tmp_path / name for name in QUEUES]
    messages = (2 * KILLS + 1) * BATCH_MESSAGES
    elsewhere = {}
    for place in places:
        place.mkdir()
        queues.create(place.name)
        for start in range(0, messages, 100):
            queues.push_many(place.name, [b"%d" % n for n in range(start, start + 100)])
        # Ordinary consumers compete: a slow one here, a fast one below.
        elsewhere[place] = bodies(queues.pull_many(place.name, 5, visibility_timeout=3_600))
    chance = random.Random(KILLS)
    for number in range(KILLS):
        # A batch was committed before the first kill.
        batch = 1 if number == 0 else -1
        reached = [place / "reached" for place in places]
        if number:
            offsets = [place / "checkpoint" / "offsets" for place in places]
            reached = [path / str(len(list(path.glob("[0-9]*")))) for path in offsets]
        later_s = chance.uniform(0, 3) if number else 0.0
        killed_when([url, str(tmp_path), str(batch)], reached, later_s)
        for place in places:
            quick = queues.pull_many(place.name, 5)
            elsewhere[place] += bodies(quick)
            queues.delete_many(quick)
    before, after = (batches_of(place) for place in places)
    if KILLS == 1:
        assert (before, after) == ([0], [0, 1])
    for query in [consume(spark, url, place) for place in places]:
        assert query.awaitTermination(180)
    for place in places:
        kept = ledger(place)
        found = [int(body) for (body,) in kept.execute("SELECT body FROM messages")]
        kept.close()
        assert sorted(found + elsewhere[place]) == list(range(messages))
        # Only messages that a consumer still holds are left.
        assert queues.stats(place.name).messages == 5


def batches_of(place):
    """The numbers of the batches that the sink has committed."""
    kept = ledger(place)
    found = [number for (number,) in kept.execute("SELECT number FROM batches ORDER BY 1")]
    kept.close()
    return found
