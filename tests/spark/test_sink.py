"""A DataFrame into a queue: every row once, with all it says, or a sentence why not."""

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

import pickle
from collections import Counter

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from pyspark import TaskContext
from pyspark.errors import PythonException
from pyspark.sql.types import (
    BinaryType,
    DoubleType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
)

import penstock
from penstock.errors import InvalidField
from penstock.spark import sink
from penstock.spark.rowids import RowIds
from penstock.spark.sink import Plan, bulks
from penstock.spark.source import PenstockSource

WHERE = {"url": "file:store", "queue": "orders"}
TYPES = {
    "string": StringType(),
    "binary": BinaryType(),
    "int": IntegerType(),
    "double": DoubleType(),
    "counts": MapType(StringType(), IntegerType()),
}


def schema_of(text):
    """A schema, each column as `name:type`, without a session to parse it."""
    columns = [column.split(":") for column in text.split()]
    return StructType([StructField(name, TYPES[kind]) for name, kind in columns])


def plan_of(columns, **options):
    return Plan.of({**WHERE, **options}, schema_of(columns))


def pulled(queues, queue="orders"):
    found = []
    while claims := queues.pull_many(queue, 1_000):
        found += claims
    return found


def written(frame, url, **options):
    writer = frame.write.format("penstock").options(url=url, queue="orders", **options)
    writer.mode("append").save()


@pytest.mark.service("default-jre-headless")
def test_a_row_becomes_a_message_with_all_of_its_columns(spark, url, queues):
    queues.create("orders")
    rows = [
        (b"plain", "a", None, None, None, None, None),
        (b"later", "b", 3600, None, None, None, None),
        (b"first", "c", None, 9, "eu", 60.5, {"kind": "test", "none": None}),
        (b"again", "a", None, None, None, None, None),
    ]
    columns = "body binary, key string, delay long, priority int, group string, ttl double"
    frame = spark.createDataFrame(rows, columns + ", attributes map<string,string>").coalesce(1)
    written(frame, url)
    assert queues.stats("orders").delayed == 1
    first, plain = pulled(queues)
    assert (first.body, first.priority, first.group) == (b"first", 9, "eu")
    assert (first.dedup_id, first.attributes) == ("c", {"kind": "test"})
    # Of the two with one key the first was pushed, and counted once.
    assert (plain.body, plain.priority, plain.group, plain.attributes) == (b"plain", 0, None, {})
    expiry = [event for event in queues.history(first.id) if event.kind == "Pushed"]
    assert f"expires_at_ms={first.pushed_at_ms + 60_500}" in expiry[0].detail


@pytest.mark.service("default-jre-headless")
def test_an_option_gives_a_column_its_role(spark, url, queues):
    queues.create("orders")
    rows = [(7, "zwölf", "de", b"\x00"), (8, "douze", None, b"\x01")]
    frame = spark.createDataFrame(rows, "id long, word string, country string, flag binary")
    written(frame.coalesce(1), url, body="word", key="id", attributes="country, flag")
    one, two = pulled(queues)
    assert (one.body, one.dedup_id) == ("zwölf".encode(), "7")
    assert one.attributes == {"country": "de", "flag": b"\x00"}
    assert two.attributes == {"flag": b"\x01"}


@pytest.mark.service("default-jre-headless")
def test_a_task_that_is_tried_again_adds_nothing_twice(spark, url, queues):
    queues.create("orders")

    def fail_once(batches):
        task = TaskContext.get()
        assert task is not None
        for number, batch in enumerate(batches):
            yield batch
            if number == 5 and task.attemptNumber() == 0:
                with penstock.connect(url) as queues:
                    claim = queues.pull("orders", wait=60)
                    assert claim is not None, "nothing was pushed yet"
                    queues.release(claim)
                raise RuntimeError("the worker is lost")

    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "500")
    try:
        frame = spark.range(5_000, numPartitions=1)
        frame = frame.selectExpr("rpad(cast(id % 3000 as string), 500, ' ') as body")
        written(frame.mapInArrow(fail_once, frame.schema), url)
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    found = Counter(int(claim.body) for claim in pulled(queues))
    # Equal rows are separate messages; rows that were sent twice are not.
    assert found == Counter(number % 3_000 for number in range(5_000))


@pytest.mark.service("default-jre-headless")
def test_a_replayed_batch_of_a_stream_adds_nothing_twice(spark, url, queues, tmp_path):
    queues.create("orders")
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    source.mkdir()
    (source / "1").write_text("one\ntwo\nthree\n")

    def run():
        frame = spark.readStream.text(str(source)).withColumnRenamed("value", "body")
        stream = frame.writeStream.format("penstock").options(url=url, queue="orders")
        stream = stream.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
        stream.start().awaitTermination()

    run()
    (checkpoint / "commits" / "0").unlink()
    (checkpoint / "commits" / ".0.crc").unlink()
    (source / "2").write_text("four\n")
    run()
    assert sorted(claim.body for claim in pulled(queues)) == [b"four", b"one", b"three", b"two"]


@pytest.mark.service("default-jre-headless")
def test_a_row_that_is_refused_fails_the_write_and_is_named(spark, url, queues):
    queues.create("orders", max_body_bytes=5)
    frame = spark.createDataFrame([("short", 1), ("too long", 2)], "body string, key int")
    with pytest.raises(PythonException) as refused:
        written(frame.coalesce(1), url)
    said = str(refused.value)
    assert "MessageTooLarge: row 2 of partition 0, key '2', was refused: body: 8 bytes" in said
    assert "takes at most 5" in said
    assert [claim.body for claim in pulled(queues)] == [b"short"]


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        ("body:string", {"queue": ""}, "option 'queue': missing"),
        ("body:string", {"url": ""}, "option 'url': missing"),
        ("body:string", {"url": "memory:"}, "within one process"),
        ("body:string", {"url": "file:x?embedded=1"}, "within one process"),
        ("body:string", {"url": "nowhere"}, "has no scheme"),
        ("body:string", {"queue": "a b"}, "is not a queue name"),
        ("body:string", {"keys": "id"}, "option 'keys': unknown; there are url, queue, body"),
        ("text:string", {}, "option 'body': there is no column 'body'; there are text"),
        ("body:string", {"key": "id"}, "option 'key': there is no column 'id'"),
        ("body:int", {}, "column 'body': is int, and as body it must be text or bytes"),
        ("body:string delay:string", {}, "as delay it must be a number of seconds"),
        ("body:string priority:double", {}, "as priority it must be a whole number"),
        ("body:string attributes:counts", {}, "must be a map from text to text or bytes"),
        ("body:string kind:int", {"attributes": "kind"}, "'kind' is not a column of text or bytes"),
        ("body:string other:string", {}, "column 'other': has no role"),
    ],
)
def test_what_cannot_be_written_is_named_before_anything_is(columns, options, said):
    with pytest.raises(InvalidField, match=said):
        plan_of(columns, **options)


def test_rows_never_replace_what_a_queue_holds():
    source = PenstockSource(WHERE)
    for writer in (source.writer, source.streamWriter):
        with pytest.raises(InvalidField, match="cannot replace its messages; use 'append'"):
            writer(schema_of("body:string"), overwrite=True)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"body": pa.array(["a", None])}, "column 'body': is null in 1 of 2 rows"),
        ({"body": pa.array(["a"]), "key": pa.array([None], pa.string())}, "column 'key': is null"),
        (
            {"body": pa.array(["a"]), "delay": pa.array([float("nan")])},
            "column 'delay': has a value that is not a duration",
        ),
    ],
)
def test_a_row_without_what_it_needs_is_refused(columns, said):
    batch = pa.RecordBatch.from_pydict(columns)
    plan = Plan("file:store", "orders", {name: name for name in columns}, ())
    with pytest.raises(InvalidField, match=said):
        list(bulks(plan, batch, RowIds("task")))


def test_frames_are_cut_by_their_rows_and_by_their_bytes(monkeypatch):
    monkeypatch.setattr(sink, "FRAME_ROWS_MAX", 3)
    monkeypatch.setattr(sink, "FRAME_BYTES_MAX", 10)
    bodies = [b"a", b"b", b"c", b"d" * 4, b"e" * 6, b"f" * 50, b"g"]
    batch = pa.RecordBatch.from_pydict({"body": bodies, "delay": [0.0015] * 7})
    plan = plan_of("body:binary delay:double")
    found = list(bulks(plan, batch, RowIds("task")))
    sizes = [len(bulk.bodies) for bulk in found]
    assert sizes == [3, 2, 1, 1]
    assert [body for bulk in found for body in bulk.bodies] == bodies
    assert {delay for bulk in found for delay in bulk.delays_ms or ()} == {2}
    assert len({name for bulk in found for name in bulk.dedup_ids or ()}) == 7


def test_rows_are_pushed_to_any_backend_and_duplicates_are_counted():
    batch = pa.RecordBatch.from_pydict({"body": [b"a", b"b"], "key": ["1", "1"]})
    (bulk,) = bulks(plan_of("body:binary key:string"), batch, RowIds("task"))
    with penstock.connect("memory:") as queues:
        queues.create("orders")
        replies = queues.service.execute(bulk)
        assert [getattr(reply, "duplicate", reply) for reply in replies] == [False, True]
        assert [message.body for message in queues.peek("orders", 5)] == [b"a"]


def named(scope, rows):
    ids = RowIds(scope)
    made = []
    for start in range(0, len(rows), 3):
        part = np.empty(len(rows[start : start + 3]), dtype=object)
        part[:] = rows[start : start + 3]
        made += ids.of(part)
    return made


@given(st.lists(st.binary(max_size=2), max_size=12), st.randoms(use_true_random=False))
def test_rows_have_the_same_ids_in_any_order(rows, random):
    names = named("one", rows)
    assert len(set(names)) == len(rows)
    shuffled = random.sample(rows, len(rows))
    assert sorted(named("one", shuffled)) == sorted(names)
    assert not set(names) & set(named("another", rows))


def test_a_writer_can_be_sent_to_its_tasks():
    writer = PenstockSource(WHERE).writer(schema_of("body:string"), overwrite=False)
    assert vars(pickle.loads(pickle.dumps(writer))) == vars(writer)
