"""The journals that the benchmark makes pass every check; a wrong count voids the run."""

from collections import Counter

import pytest

pytest.importorskip("pyarrow", reason="service not installed: penstock[spark]")
spark = pytest.importorskip("benchmarks.spark", reason="the source archive has no benchmarks")

from benchmarks import chaos, harness  # noqa: E402
from penstock.journal.reader import JournalReader  # noqa: E402


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A short store as the benchmark makes it, with purges and removals more often than there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chaos, "UPSET_EVERY", 100)
        return chaos.make_store(tmp_path_factory.mktemp("chaos") / "store", 3, 12_000)


def test_the_journal_has_every_kind_of_event_of_messages_and_queues(made):
    with JournalReader(made.path / "journal") as reader:
        kinds = Counter(type(each.event).__name__ for each in reader.events(reader.first_offset))
    assert {"Pushed", "Claimed", "Extended", "Released", "ClaimExpired", "Deleted", "Expired",
            "Moved", "DelayEnded", "QueuePurged", "QueueRemoved"} <= set(kinds)  # fmt: skip
    assert spark.count_events([str(made.path)])[0] == kinds.total()
    assert kinds.total() > 12_000


def test_a_decode_that_misses_an_event_voids_the_run(made):
    events, _ = spark.count_events([str(made.path)])
    assert spark.decode_bare([str(made.path)], events) > 0
    with pytest.raises(harness.Void, match="the bare decode found"):
        spark.decode_bare([str(made.path)], events + 1)


def test_every_target_is_computed_from_ratios_within_a_round():
    journals = [spark.WrittenJournals([], count, 0, {}) for count in (1_000_000, 10_000_000)]
    audit = {"spark small": [1.0, 2.0], "spark large": [10.0, 20.0]}
    rates = {
        "source": [6.0, 3.0],
        "bare": [6.0, 3.0],
        "narrow": [12.0, 6.0],
        "prebuilt": [8.0, 4.0],
    }
    lake = {"tables_s": [30.0, 9.0, 10.0], "tenth_s": 2.0, "new_s": 1.0, "rebuild_s": 20.0,
            "bare_s": 4.0, "bronze_s": 5.0, "least_s": 1.5, "driver_bytes": 3 << 30}  # fmt: skip
    commands = {"run": 5.0, "audit": 4.0, "run, nothing new": 0.5, "audit, nothing new": 0.6}
    commands |= {name: 1.0 + nth for nth, name in enumerate(spark.KEPT)}
    sink = {"sink": [12.0], "client": [2.0]}
    run = spark.SparkFigures(*journals, {}, rates, lake, audit, commands, sink)
    found = {target.name: target.value for target in spark.targets(run)}
    assert found == {
        "source / prebuilt into Spark": 0.75,
        "source, six columns / all": 2,
        "lake to tables, thousand events/s": 1_000,
        "lake to tables / bare job": 0.4,
        "journal to lake, million events/s": 2,
        "audit, thousand events/s": 10_000 / 15,
        "audit, time of all / of a tenth": 10,
        "tables, time of all / of a tenth": 5,
        "60,000 messages: run and audit, seconds": 9,
        "run, nothing new, seconds": 0.5,
        "audit, nothing new, seconds": 0.6,
        "session kept: slowest of sql, report and audit, seconds": 3,
        "an entry new: run and audit, seconds": 1.5,
        "1% new, time / rebuild": 0.05,
        "memory of the driver, GiB": 3,
        "sink / client in tens": 6,
    }
