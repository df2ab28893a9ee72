"""The examples for data engineers: each runs on a lake, and finds in it what is there."""

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pyspark

import penstock
from penstock import cli
from penstock.spark.session import prepare_environment
from tools.tidy import ROOT

pytestmark = [pytest.mark.service("default-jre-headless"), pytest.mark.timeout(600)]
EXAMPLES = ROOT / "examples"
MESSAGES = 40


@pytest.fixture(scope="module")
def lake(spark, tmp_path_factory):
    place = tmp_path_factory.mktemp("examples")
    with penstock.connect(f"file:{place / 'store'}?embedded=1") as queues:
        queues.create("orders")
        queues.push_many("orders", [b"%d" % number for number in range(MESSAGES)])
        queues.delete_many(queues.pull_many("orders", 10))
    words = ["pipeline", "run", "--journal", str(place / "store"), "--lake", str(place / "lake")]
    assert cli.main(words) == 0
    return place / "lake"


def test_every_cell_of_the_notebook_runs_and_it_is_kept_without_outputs(lake, monkeypatch, capsys):
    monkeypatch.setenv("LAKE", str(lake))
    notebook = json.loads((EXAMPLES / "silver.ipynb").read_text())
    cells = [each for each in notebook["cells"] if each["cell_type"] == "code"]
    assert all(each["outputs"] == [] and each["execution_count"] is None for each in cells)
    found: dict[str, object] = {}
    for each in cells:
        exec(compile("".join(each["source"]), "silver.ipynb", "exec"), found)
    shown = capsys.readouterr().out
    assert f"|orders|{MESSAGES}" in shown
    assert "== Physical Plan ==" in shown


def test_the_tables_of_a_lake_have_names_in_the_catalog(spark, lake, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["catalog.py", str(lake), "shop"])
    # Twice: as after a second run.
    for _ in range(2):
        runpy.run_path(str(EXAMPLES / "catalog.py"))
    try:
        query = "SELECT state, count(*) FROM shop.messages GROUP BY state ORDER BY state"
        assert [tuple(row) for row in spark.sql(query).collect()] == [("deleted", 10), ("live", 30)]
        # A table without rows has its columns.
        assert spark.sql("SELECT at FROM shop.dead_letters").count() == 0
    finally:
        spark.sql("DROP DATABASE shop CASCADE")


def test_a_declarative_pipeline_makes_tables_from_the_events(lake, tmp_path):
    shutil.copytree(EXAMPLES / "declarative", tmp_path, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_HOME", str(Path(pyspark.__file__).parent))
        prepare_environment()
        # By this Spark chooses the port of the server that it starts for the pipeline.
        environment = {**os.environ, "LAKE": str(lake), "SPARK_TESTING": "1"}
    done = subprocess.run(
        [Path(pyspark.__file__).parent / "bin" / "spark-pipelines", "run"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-4_000:]
    found = {
        name: pq.read_table(tmp_path / "spark-warehouse" / name).to_pylist()
        for name in ("kinds", "pushes")
    }
    counts = {row["kind"]: 0 for row in found["kinds"]}
    for row in found["kinds"]:
        counts[row["kind"]] += row["events"]
    assert (counts["Pushed"], counts["Claimed"], counts["Deleted"]) == (MESSAGES, 10, 10)
    assert sum(row["pushed"] for row in found["pushes"]) == MESSAGES
    assert {row["largest_bytes"] for row in found["pushes"]} <= {1, 2}
