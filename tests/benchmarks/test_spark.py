"""The journals that the benchmark makes pass every check; a wrong count voids the run."""

from collections import Counter

import pytest

pytest.importorskip("pyarrow", reason="service not installed: penstock[spark]")
spark = pytest.importorskip("benchmarks.spark", reason="the source archive has no benchmarks")

import pyarrow as pa  # noqa: E402

from benchmarks import chaos, harness, lakes  # noqa: E402
from penstock.journal.reader import JournalReader  # noqa: E402
from penstock.spark.blocks import blocks  # noqa: E402
from penstock.spark.checks import SCHEMA, check_events  # noqa: E402
from penstock.spark.derive import derive  # noqa: E402
from penstock.spark.duck import DuckConnection  # noqa: E402
from penstock.spark.ingest import ingest  # noqa: E402
from penstock.spark.lake import Lake  # noqa: E402
from penstock.spark.stream import Stream  # noqa: E402


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


def audited(made, held):
    names = [column.split()[0] for column in SCHEMA.split(", ")]
    stream = Stream(str(made.path))
    read = blocks(stream.scan, stream.identity, stream.first, stream.end, "here")
    events = pa.Table.from_batches(
        [pa.RecordBatch.from_arrays(block.arrow(names), names) for block in read]
    )
    stream.close()
    with DuckConnection() as duck:
        duck.arrow("given_events", events)
        findings, _ = check_events(duck, "given_events", held)
    return [(finding.check, finding.detail) for finding in findings]


def test_the_audit_has_no_findings_and_agrees_with_the_engine(made):
    assert audited(made, made.messages) == []


def test_a_queue_that_the_engine_counts_differently_is_found(made):
    name, count = next(iter(made.messages.items()))
    assert audited(made, made.messages | {name: count + 1}) == [
        ("nothing lost", f"the engine holds {count + 1}, the journal {count}")
    ]


def test_a_decode_that_misses_an_event_voids_the_run(made):
    events, _ = spark.count_events([str(made.path)])
    assert spark.decode_bare([str(made.path)], events) > 0
    with pytest.raises(harness.Void, match="the bare decode found"):
        spark.decode_bare([str(made.path)], events + 1)


def test_every_target_is_computed_from_ratios_within_a_round():
    journals = [spark.WrittenJournals([], count, 0, {}) for count in (1_000_000, 10_000_000)]
    audit = {"spark small": [1.0, 2.0], "spark large": [10.0, 20.0], "duckdb large": [4.0, 8.0]}
    rates = {
        "source": [6.0, 3.0],
        "bare": [6.0, 3.0],
        "narrow": [12.0, 6.0],
        "prebuilt": [8.0, 4.0],
    }
    lake = {"tables_s": [30.0, 9.0, 10.0], "tenth_s": 2.0, "new_s": 1.0, "rebuild_s": 20.0}
    commands = {"run": 5.0, "audit": 4.0, "run, nothing new": 0.5, "audit, nothing new": 0.6}
    sink = {"sink": [12.0], "client": [2.0]}
    run = spark.SparkFigures(*journals, {}, rates, lake, audit, commands, sink)
    found = {target.name: target.value for target in spark.targets(run)}
    assert found == {
        "source / prebuilt into Spark": 0.75,
        "source, six columns / all": 2,
        "lake to tables, million events/s": 1,
        "audit / DuckDB, time": 2.5,
        "audit, million events/s": 10 / 15,
        "audit of a tenth, seconds": 1.5,
        "audit, time of all / of a tenth": 10,
        "tables, time of all / of a tenth": 5,
        "60,000 messages: run, seconds": 5,
        "60,000 messages: audit, seconds": 4,
        "run, nothing new, seconds": 0.5,
        "audit, nothing new, seconds": 0.6,
        "1% new, time / rebuild": 0.05,
        "sink / client in tens": 6,
    }


def test_copying_the_tables_leaves_the_lake_as_it_was(made, tmp_path):
    lake = Lake.open(tmp_path / "lake", create=True)
    ingest(no_spark, lake, str(made.path))
    derive(no_spark, lake)
    before = sorted(path for path in lake.path.rglob("*") if path.is_file())
    assert lakes.copy_tables(str(lake.path)) > 0
    assert sorted(path for path in lake.path.rglob("*") if path.is_file()) == before


def no_spark():
    raise AssertionError("Spark was started")
