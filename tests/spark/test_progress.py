"""What somebody who waits is shown: the step, how much of it is done, a time left that falls."""

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

import threading

from penstock.cli.lake.bar import line_of
from penstock.spark import progress
from penstock.spark.progress import StepStatus, status, step

pytestmark = pytest.mark.service("default-jre-headless")


class SetTime:
    """A `time` that the test sets."""

    def __init__(self):
        self.now_s = 1_000.0

    def monotonic(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = SetTime()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_the_time_left_follows_what_was_done_and_falls_while_nothing_is(clock):
    with step(None, "sending", 0, 100) as sending:
        assert status() == StepStatus("sending", 0.0)
        clock.now_s += 10
        sending.reached(20)
        assert status() == StepStatus("sending", 0.2, 0, 40.0)
        clock.now_s += 15
        assert status() == StepStatus("sending", 0.2, 0, 25.0)
        # Slower than it seemed: no time is better than one that rises while somebody looks.
        clock.now_s += 60
        found = status()
        assert found is not None
        assert line_of(found) == "sending ━━━━················  20%"
        sending.reached(50)
        assert status() == StepStatus("sending", 0.5, 0, 85.0)
    assert status() is None


def test_the_innermost_step_is_shown_and_the_outer_one_again_after_it(clock):
    with step(None, "report", 1, 4):
        with step(None, "starting Spark", expected_s=8):
            clock.now_s += 2
            assert status() == StepStatus("starting Spark", 0.25, 0, 6.0)
            clock.now_s += 20
            found = status()
            assert found is not None
            assert line_of(found) == "starting Spark ━━━━━━━━━━━━━━━━━━━·  95%"
        found = status()
        assert found is not None
        assert (found.name, found.part) == ("report", 0.25)


def test_a_line_is_one_line_whatever_is_in_the_name():
    shown = line_of(StepStatus("reading a\nb\x1b[2J\u202e", 0.5, 1_234_567, 75.0))
    assert (
        shown == r"reading a\nb\x1b[2J\u202e ━━━━━━━━━━··········  50%, 1,234,567 rows, 1m 15s left"
    )
    waiting = line_of(StepStatus("tables", 0.0, waits=True))
    assert waiting.endswith("  0%, waiting for an executor")


def test_a_step_without_a_count_follows_the_tasks_of_spark_and_names_its_jobs(spark, tmp_path):
    """One task of four waits until the status was seen."""
    import urllib.parse

    seen = tmp_path / "seen"
    path = urllib.parse.quote(str(seen))

    def wait_in_one_task(batches):
        import threading
        from pathlib import Path

        for batch in batches:
            if 3 in batch["id"].to_pylist():
                while not Path(urllib.parse.unquote(path)).exists():
                    threading.Event().wait(0.05)
            yield batch

    found: list[StepStatus] = []
    names: list[str | None] = []

    def look():
        while not seen.exists():
            now = status()
            if now is not None and now.part == 0.75:
                found.append(now)
                stages = spark.sparkContext._jsc.sc().statusStore().activeStages()
                names.append(stages.apply(0).description().get())
                seen.touch()
            threading.Event().wait(0.05)

    looking = threading.Thread(target=look, daemon=True)
    with step(spark, "counting"):
        looking.start()
        frame = spark.range(0, 4, 1, 4).mapInArrow(wait_in_one_task, "id long")
        assert [row.id for row in frame.collect()] == [0, 1, 2, 3]
    looking.join(60)
    assert [each.name for each in found] == ["counting"]
    assert names == ["counting"]
    assert spark.sparkContext.getLocalProperty("spark.job.description") is None
