"""The journals of the benchmark pass every check; what it measures leaves the lake as it was."""

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")
chaos = pytest.importorskip("benchmarks.chaos", reason="the source archive has no benchmarks")

from benchmarks import lakes  # noqa: E402
from penstock.spark.audit import audit  # noqa: E402
from penstock.spark.bronze import copy_events  # noqa: E402
from penstock.spark.lake import Lake  # noqa: E402


@pytest.mark.timeout(600)
@pytest.mark.service("default-jre-headless")
def test_the_audit_has_no_findings_and_agrees_with_the_engine(spark, tmp_path, monkeypatch):
    """And a queue that the engine counts differently is found."""
    monkeypatch.setattr(chaos, "UPSET_EVERY", 100)
    made = chaos.make_store(tmp_path / "store", 3, 12_000)
    lake = Lake.open(tmp_path / "lake", create=True)
    copy_events(lambda: spark, lake, str(made.path), None)
    assert audit(lambda: spark, lake, made.messages).findings == ()
    name, count = next(iter(made.messages.items()))
    [finding] = audit(lambda: spark, lake, made.messages | {name: count + 1}).findings
    detail = f"the engine holds {count + 1}, the journal {count}"
    assert (finding.check, finding.detail) == ("nothing lost", detail)
    before = sorted(path for path in lake.path.rglob("*") if path.is_file())
    assert lakes.bare_job(spark, str(lake.path)) > 0
    assert lakes.fold_by_spark(spark, str(lake.path)) > 0
    assert lakes.fold_by_duckdb(str(lake.path)) > 0
    assert sorted(path for path in lake.path.rglob("*") if path.is_file()) == before
