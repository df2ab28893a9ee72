"""Tables and findings do not depend on how a journal is cut into runs."""

import contextlib
import math
import random
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

import pyarrow as pa

from penstock import cli
from penstock.core.events import Pushed, QueueCreated
from penstock.service import QueueSettings
from penstock.spark import queries
from penstock.spark import update as updating
from penstock.spark.audit import audit
from penstock.spark.bronze import ingest
from penstock.spark.lake import VERSION, Lake, Table
from penstock.spark.report import make_report
from penstock.spark.tables import (
    BALANCES,
    FINDINGS,
    IRREGULAR_EVENTS,
    LATENCY,
    MESSAGES,
    QUEUE_EVENTS,
    REDELIVERIES,
    TABLES,
)
from penstock.spark.update import Updated, table_of, update
from tests.conftest import FULL, SEED
from tests.spark.journals import write_store
from tests.spark.lakes import (
    LIVES,
    Stopped,
    add_events,
    cuts,
    event,
    journal,
    kept_findings,
    no_spark,
    rows_of,
    stored_rows,
    version_of,
)

pytestmark = [pytest.mark.service("default-jre-headless"), pytest.mark.timeout(600)]
GOLDEN = Path(__file__).parents[1] / "golden" / "lakes"
# For a seed that differs from run to run, in parts as many as those of LIVES need be.
FEW_LIVES = 40
FEW_BITS = 4
BITS = 6
PART = 1 << BITS


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(queries, "PART_BITS", BITS)


@pytest.mark.parametrize(
    ("seed", "lives", "bits"),
    [*((seed, LIVES, BITS) for seed in range(8 if FULL else 1)), (SEED, FEW_LIVES, FEW_BITS)],
)
def test_a_journal_cut_into_runs_gives_the_tables_and_findings_of_all_of_it(
    spark, tmp_path, monkeypatch, seed, lives, bits
):
    """Shards advance at their own pace, one comes late; some runs are killed before a commit."""
    monkeypatch.setattr(queries, "PART_BITS", bits)
    rng = random.Random(seed)
    lake = Lake.open(tmp_path / "lake", create=True)
    journals = [journal(10 * seed + n, f"{n:032x}", n, lives, changes=n == 1) for n in range(2)]
    batches = [cuts(rng, events, 2) for events in journals]
    # The shards advance independently of one another, and the last comes when the first is done.
    order = [0, 0, 1, 1] if rng.random() < 0.5 else [0, 1, 0, 1]
    commit = Table._commit
    left = [rng.randrange(45) for _ in order]

    def counted(self, *arguments):
        left[0] -= 1
        if left[0] == 0:
            raise Stopped
        commit(self, *arguments)

    for which in order:
        add_events(spark, lake, batches[which].pop(0))
        with monkeypatch.context() as patch:
            patch.setattr(Table, "_commit", counted)
            with contextlib.suppress(Stopped):
                audit(lambda: spark, lake)
        left.pop(0)
    verdict = audit(lambda: spark, lake)
    assert verdict.events == sum(map(len, journals))
    grown = {each.name: rows_of(lake, each) for each in (QUEUE_EVENTS, *TABLES)}
    found = kept_findings(lake)
    assert len({row.split("'")[1] for row in found}) > (6 if lives == LIVES else 2)

    # Another lake that gets everything at once has the same tables, and the same findings.
    whole = Lake.open(tmp_path / "whole", create=True)
    add_events(spark, whole, pa.concat_tables(journals))
    expected = audit(lambda: spark, whole)
    for each in (QUEUE_EVENTS, *TABLES):
        assert rows_of(whole, each) == grown[each.name], each.name
    assert kept_findings(whole) == found
    assert (expected.events, expected.counts) == (verdict.events, verdict.counts)
    assert expected.parts == expected.judged_parts >= 2 * math.ceil(lives / (1 << bits))
    # With nothing new nothing is judged, and no table changes.
    versions = [version_of(table_of(lake, each)) for each in (*TABLES, FINDINGS, BALANCES)]
    assert update(no_spark, lake) == Updated()
    assert audit(lambda: spark, lake).judged_parts == 0
    assert versions == [version_of(table_of(lake, each)) for each in (*TABLES, FINDINGS, BALANCES)]


def test_only_the_parts_that_new_events_touch_are_made_and_judged_again(spark, tmp_path):
    lake = Lake.open(tmp_path / "lake", create=True)
    first = journal(4)
    add_events(spark, lake, first)
    everything = audit(lambda: spark, lake)
    assert everything.judged_parts == everything.parts == math.ceil(LIVES / PART)
    files = {each.part: each.path for each in table_of(lake, MESSAGES).files()}
    last = max(each for each in first["entry"].to_pylist() if each is not None)
    add_events(spark, lake, event("Pushed", last + 1, queue=1, message=LIVES - 1))
    verdict = audit(lambda: spark, lake)
    assert verdict.judged_parts == 1 < verdict.parts
    after = {each.part: each.path for each in table_of(lake, MESSAGES).files()}
    assert [part for part in files if files[part] != after[part]] == [
        max(part for part in files if part is not None)
    ]
    # A QueueStated event without new settings touches no part.
    stated = event("QueueStated", last + 2, queue=2, name="q2", extra='{"settings": {}}')
    add_events(spark, lake, stated)
    assert update(lambda: spark, lake).parts == 0
    assert audit(lambda: spark, lake).judged_parts == 0
    # A purge makes the parts again that have messages in its queue.
    add_events(spark, lake, event("QueuePurged", last + 3, queue=1, count=1))
    assert update(lambda: spark, lake).parts > 0
    assert not [
        row
        for row in stored_rows(table_of(lake, MESSAGES))
        if row["held_in_number"] == 1 and row["standing"]
    ]
    # After a change of a limit every part of the shard is judged again.
    changed = event(
        "QueueConfigured",
        last + 4,
        queue=1,
        extra='{"settings": {"max_receives": 7, "dead_letter": "q2"}}',
    )
    add_events(spark, lake, changed)
    verdict = audit(lambda: spark, lake)
    assert verdict.judged_parts == verdict.parts


def test_tables_are_right_when_parts_are_made_some_at_a_time(spark, tmp_path, monkeypatch):
    """And a regular life gives the same rows when its events are looked at one by one."""
    lake = Lake.open(tmp_path / "lake", create=True)
    add_events(spark, lake, journal(6))
    update(lambda: spark, lake)
    made = {each.name: rows_of(lake, each) for each in TABLES}
    assert any("True" in row for row in made["messages"])
    monkeypatch.setattr(updating, "PARTS_AT_ONCE", 2)
    load = queries.load_query

    def none_is_regular(name):
        query = load(name)
        return (
            f"SELECT * EXCEPT (regular), false AS regular FROM ({query})"
            if name == "messages"
            else query
        )

    monkeypatch.setattr("penstock.spark.tables.load_query", none_is_regular)
    update(lambda: spark, lake, rebuild=True)
    for each in TABLES:
        if each is not IRREGULAR_EVENTS:
            without = ("regular",) if each is MESSAGES else ()
            now = rows_of(lake, each, without=without)
            if each is MESSAGES:
                assert "True" not in " ".join(row.rpartition("dropped")[0] for row in now)
                continue
            assert now == made[each.name], each.name
    assert len(rows_of(lake, IRREGULAR_EVENTS)) > len(made["irregular_events"])


def test_percentiles_of_a_histogram_are_at_most_one_percent_off(spark):
    """Of spans from none to a year, by the texts of `latencies` and `latency`."""
    rng = random.Random(1)
    spans = [int(10 ** rng.uniform(0, 10.5)) for _ in range(20_000)] + [0] * 500
    session = queries.query_session(spark)
    took = session.createDataFrame([(each,) for each in spans], "took_ms bigint")
    lives = took.selectExpr(
        "took_ms % 2 AS part", "1L AS queue_number", "took_ms AS first_pulled_at_ms",
        "took_ms AS wait_ms", "0L AS ended_at_ms", "'live' AS state", "0L AS age_ms",
    )  # fmt: skip
    lives.createOrReplaceTempView("messages")
    lives.selectExpr("*", "0L AS hold_ms").where("false").createOrReplaceTempView("attempts")
    samples = session.sql(queries.load_query("rollup/latencies"))
    samples.selectExpr("*", "'a' AS store", "0 AS shard").createOrReplaceTempView("sums")
    names = "SELECT 'a' AS store, 0 AS shard, 1L AS queue_number, 'q' AS queue"
    session.sql(names).createOrReplaceTempView("queues")
    [row] = session.sql(LATENCY.query).collect()
    spans.sort()
    for share, name in ((0.5, "p50_ms"), (0.9, "p90_ms"), (0.99, "p99_ms"), (0.999, "p999_ms")):
        exact = spans[max(0, math.ceil(share * len(spans)) - 1)]
        assert abs(row[name] - exact) <= 0.01 * exact + 1, name
    assert (row["samples"], row["max_ms"]) == (len(spans), spans[-1])
    # Every value by itself, where bins are narrower than a millisecond and just above.
    for value in range(1, 2_000):
        bin_ = 1 + math.floor(math.log(value) / math.log(queries.BIN_RATIO))
        assert abs(round(queries.BIN_RATIO ** (bin_ - 0.5)) - value) <= 0.01 * value, value


def test_tables_of_older_queries_are_made_again(spark, tmp_path, monkeypatch):
    """Also if the run is killed."""
    lake = Lake.open(tmp_path / "lake", create=True)
    add_events(spark, lake, journal(7))
    with monkeypatch.context() as patch:
        patch.setattr(updating, "QUERIES_VERSION", 1)
        update(lambda: spark, lake)
    assert not updating.is_up_to_date(lake)
    commit = Table._commit

    def stop_late(self, *arguments):
        if self.path.name == REDELIVERIES.name:
            raise Stopped
        commit(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Table, "_commit", stop_late)
        with pytest.raises(Stopped):
            update(lambda: spark, lake)
    assert not updating.is_up_to_date(lake)
    assert update(lambda: spark, lake).parts == 0
    assert updating.is_up_to_date(lake)


NOTHING_NEW = """
import sys
from penstock.cli import main

store, lake, page = sys.argv[1:]
run = ["pipeline", "run", "--journal", store, "--lake", lake]
status = main([*run, "--audit", "--report", page])
status += main(["pipeline", "audit", "--lake", lake])
status += main(["pipeline", "report", "--lake", lake, "--output", page])
print(status, sorted({"pandas", "pyspark"} & set(sys.modules)))
"""


def test_with_nothing_new_and_nothing_found_spark_is_not_imported(spark, tmp_path):
    """Spark and pandas would each take longer than the answer."""
    pushes = [[Pushed(n, 1, n, b"x")] for n in range(1, 9)]
    store = write_store(tmp_path / "s", [[QueueCreated(1, 1, "q", QueueSettings())], *pushes])
    lake = Lake.open(tmp_path / "lake", create=True)
    ingest(lambda: spark, lake, str(store))
    assert audit(lambda: spark, lake).events == 9
    page = tmp_path / "page.html"
    page.write_text(make_report(spark, lake)[0])
    words = [sys.executable, "-c", NOTHING_NEW, str(store), str(lake.path), str(page)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "0 []"
    assert "9 events: every check holds" in done.stdout
    assert "judged 0 of 1 parts" in done.stdout
    left = f"{page}: 9 events, every check holds; it is of the lake as it is and was left"
    assert done.stdout.splitlines().count(left) == 2


def without(row, texts):
    """The row without these texts in it."""
    for text in texts:
        row = row.replace(text, "")
    return row


def test_a_lake_that_the_release_before_wrote_is_made_again_from_its_events(
    spark, tmp_path, capsys
):
    """`golden/lakes` has a store and its lake, whose position is in a checkpoint."""
    with tarfile.open(GOLDEN / "version-2-without-folds.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    store = tmp_path / "store"
    words = ["pipeline", "audit", "--lake", str(tmp_path / "lake")]
    assert cli.main(words) == 6
    assert "is a lake of an earlier release; the next `pipeline run`" in capsys.readouterr().err
    run = ["pipeline", "run", "--journal", str(store), "--lake", str(tmp_path / "lake")]
    assert cli.main(run) == 0
    [said] = capsys.readouterr().err.splitlines()
    assert said.endswith("lake: is of an earlier release; its tables are made again")
    lake = Lake.open(tmp_path / "lake")
    assert lake.version == VERSION
    verdict = audit(lambda: spark, lake)
    fresh = Lake.open(tmp_path / "fresh", create=True)
    ingest(lambda: spark, fresh, str(store))
    assert audit(lambda: spark, fresh).events == verdict.events > 60
    assert verdict.holds
    # Events that are read now show settings that were added since.
    added = (',"priority_age_ms":null', ',"paused":false')
    for each in (QUEUE_EVENTS, *TABLES):
        expected = [without(row, added) for row in rows_of(fresh, each)]
        assert rows_of(lake, each) == sorted(expected), each.name
