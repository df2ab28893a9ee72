"""The pipeline and Spark on a store that `penstock serve` holds: they start no daemon beside it."""

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

from deltalake import DeltaTable

from penstock.backends.remote.daemon import running_pid
from penstock.spark.bronze import ingest
from penstock.spark.lake import Lake
from tests.server.conftest import end_daemon
from tests.server.sqs.conftest import serve

pytestmark = pytest.mark.service("default-jre-headless")


@pytest.fixture
def store(tmp_path):
    yield tmp_path / "store"
    end_daemon(tmp_path / "store")


@pytest.mark.timeout(600)
def test_a_lake_and_a_batch_of_rows_reach_the_store_that_serve_holds(spark, store, tmp_path):
    lake = Lake.open(tmp_path / "lake", create=True)
    with serve("--data", str(store)) as server:
        client = server.client()
        url = client.create_queue(QueueName="orders")["QueueUrl"]
        client.send_message(QueueUrl=url, MessageBody="from SQS")
        rows = spark.createDataFrame([("from Spark",)], "body string")
        writer = rows.write.format("penstock").options(url=f"file:{store}", queue="orders")
        writer.mode("append").save()
        # What `pipeline run` does first.
        assert ingest(lambda: spark, lake, str(store), None).behind_bytes == 0
        answer = client.receive_message(QueueUrl=url, MaxNumberOfMessages=10)
        assert sorted(each["Body"] for each in answer["Messages"]) == ["from SQS", "from Spark"]
        assert running_pid(store) == server.process.pid
    kinds = DeltaTable(str(lake.path / "events")).to_pyarrow_table()["kind"].to_pylist()
    assert kinds.count("Pushed") == 2
