"""Spark as a consumer: no message lost, none twice, whatever is killed and whenever."""

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

import json
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql.types import StringType, StructField, StructType

import penstock
from penstock.clock import ManualClock
from penstock.core.queue import ATTEMPTS_MAX
from penstock.errors import InvalidField
from penstock.spark.consume import ConsumeOptions, ConsumeStream, committed_places, settle
from penstock.spark.parts import (
    Part,
    Settled,
    Source,
    claims_of,
    group_parts,
    pull_part,
    resume_claims,
    settle_part,
)
from penstock.spark.source import PenstockSource

WHERE = {"mode": "consume", "url": "file:store", "queue": "orders"}
SOURCE = Source("orders", 60_000, "spark")


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def near(clock):
    """Queues in this process, with a manual clock."""
    with penstock.connect("memory:", clock=clock) as near:
        near.create("orders")
        near.push_many("orders", [b"%d" % number for number in range(10)])
        yield near


def pulled(service, name="reader:1:0", limit=4):
    found = pull_part(service, SOURCE, name, limit)
    assert found is not None
    return found


def bodies(claims):
    return [int(claim.body) for claim in claims]


def test_a_part_has_the_same_claims_in_every_process(near):
    part, claims = pulled(near.service)
    assert (part.size, bodies(claims)) == (4, [0, 1, 2, 3])
    assert claims_of(near.service, SOURCE, part) == claims
    assert resume_claims(near.service, SOURCE, part)[0].receipt == part.first_receipt
    # A process that repeats the pull of a lost one gets the same claims.
    assert pulled(near.service) == (part, claims)
    assert near.stats("orders").in_flight == 4


def test_a_part_that_has_lapsed_stays_empty(near, clock):
    part, _ = pulled(near.service)
    clock.advance(seconds=60)
    assert claims_of(near.service, SOURCE, part) == []
    assert resume_claims(near.service, SOURCE, part) == []
    assert near.stats("orders").in_flight == 0
    again, claims = pulled(near.service)
    assert (again.attempt_id, bodies(claims)) == ("reader:1:0.1", [0, 1, 2, 3])
    assert claims_of(near.service, SOURCE, part) == []


def test_a_part_that_another_process_resumes_is_held_for_the_full_timeout(near, clock):
    part, _ = pulled(near.service)
    clock.advance(seconds=50)
    assert len(resume_claims(near.service, SOURCE, part)) == 4
    clock.advance(seconds=50)
    assert near.stats("orders").in_flight == 4


def test_a_part_that_the_queue_forgot_never_gets_other_messages(near, clock):
    part, claims = pulled(near.service, limit=1)
    near.push_many("orders", [b"x"] * 9_991)
    for number in range(ATTEMPTS_MAX):
        claim = near.pull("orders", attempt_id=str(number))
        near.release(claim)
    assert claims_of(near.service, SOURCE, part) == []
    stats = near.stats("orders")
    assert (stats.in_flight, stats.messages) == (1, 10_001)
    assert near.delete(claims[0])


def test_a_settled_part_is_deleted_and_settling_it_again_changes_nothing(near):
    part, _ = pulled(near.service)
    assert settle_part(near.service, SOURCE, part) == Settled(4, 0)
    assert settle_part(near.service, SOURCE, part) == Settled(0, 0)
    assert near.stats("orders").messages == 6


def test_what_lapsed_before_it_was_settled_is_counted_and_comes_again(near, clock):
    part, _ = pulled(near.service)
    clock.advance(seconds=60)
    assert settle_part(near.service, SOURCE, part) == Settled(0, 4)
    assert near.stats("orders").visible == 10


def test_where_one_claim_has_ended_nothing_of_its_part_is_deleted(near):
    # A task finds the part lapsed, so it read none of the other messages either.
    part, claims = pulled(near.service)
    near.release(claims[2])
    assert claims_of(near.service, SOURCE, part) == []
    assert settle_part(near.service, SOURCE, part) == Settled(0, 4)
    assert near.stats("orders").messages == 10


def test_nothing_is_pulled_at_the_limit_of_messages_in_flight(near):
    near.configure("orders", max_in_flight=2)
    assert bodies(pulled(near.service)[1]) == [0, 1]
    assert pull_part(near.service, SOURCE, "reader:1:1", 4) is None


def test_small_parts_share_a_task():
    parts = [Part(str(number), size, "") for number, size in enumerate([3, 4, 4, 9, 1, 1, 8])]
    shares = group_parts(parts, 8)
    assert [[part.size for part in share] for share in shares] == [[3, 4], [4], [9], [1, 1], [8]]
    assert [part for share in shares for part in share] == parts


def test_a_checkpoint_of_another_queue_is_refused(near):
    part, _ = pulled(near.service)
    near.remove("orders")
    near.create("orders")
    for use in (resume_claims, settle_part):
        with pytest.raises(InvalidField, match="is not the one the checkpoint was made with"):
            use(near.service, SOURCE, part)
    stream = ConsumeStream(ConsumeOptions.of(WHERE), StructType())
    offset = {**stream.initialOffset(), "queue": "bills"}
    with pytest.raises(InvalidField, match="this checkpoint is of 'bills', not of 'orders'"):
        stream.partitions(offset, offset)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": ""}, "option 'url': missing"),
        ({"queue": ""}, "option 'queue': missing"),
        ({"queue": "a b"}, "option 'queue': 'a b' is not a queue name"),
        ({"url": "memory:"}, "within one process"),
        ({"path": "store"}, "option 'path': unknown; there are mode, url, queue, reader"),
        ({"maxMessagesPerTrigger": "0"}, "'maxMessagesPerTrigger': 0 is outside 1 to"),
        (
            {"maxMessagesPerTrigger": "many"},
            "'maxMessagesPerTrigger': 'many' is not a whole number",
        ),
        ({"messagesPerPartition": "10001"}, "'messagesPerPartition': 10001 is outside 1 to 10000"),
        ({"visibilityTimeout": "43201"}, "'visibilityTimeout': 43201 is outside 1 to 43200"),
        ({"reader": "r" * 65}, "option 'reader': longer than 64 characters"),
        ({"mode": "eat"}, "option 'mode': 'eat' is none of journal, consume"),
    ],
)
def test_a_wrong_option_is_named(options, said):
    source = PenstockSource({**WHERE, **options})
    with pytest.raises(InvalidField, match=said):
        source.schema()
    # Spark hides errors that occur before there is a reader.
    with pytest.raises(InvalidField, match=said):
        source.streamReader(StructType()).initialOffset()


def test_what_a_consuming_stream_cannot_do_is_refused():
    wrong = StructType([StructField("receipt", StringType())])
    refused = PenstockSource(WHERE).streamReader(wrong)
    with pytest.raises(InvalidField, match="by a stream; use readStream"):
        PenstockSource(WHERE).reader(StructType())
    with pytest.raises(InvalidField, match="no column 'receipt'; there are message_id, queue"):
        refused.initialOffset()
    with pytest.raises(InvalidField, match="'/nowhere' is not the directory of a checkpoint"):
        committed_places("/nowhere")


def consumed(spark, url, checkpoint, use, **options):
    """A query over the queue, started; `use` is called with each batch's rows and number."""
    stream = spark.readStream.format("penstock").options(**{**WHERE, "url": url, **options})
    frame = stream.load()
    query = frame.writeStream.foreachBatch(lambda frame, number: use(frame.collect(), number))
    return query.option("checkpointLocation", str(checkpoint))


def to_the_end(query):
    query = query.trigger(availableNow=True).start()
    query.awaitTermination()
    return query


@pytest.mark.service("default-jre-headless")
def test_a_queue_is_drained_and_its_last_batch_settled(spark, url, queues, tmp_path):
    queues.create("orders")
    queues.push("orders", b"\xff", attributes={"a": "b", "c": b"d"}, group="eu", priority=3)
    queues.push_many("orders", [b"%d" % number for number in range(24)])
    batches: dict[int, list[Any]] = {}
    options = {"maxMessagesPerTrigger": 10, "messagesPerPartition": 4}
    query = consumed(
        spark,
        url,
        tmp_path / "checkpoint",
        lambda rows, number: batches.update({number: rows}),
        **options,
    )
    progress = to_the_end(query).lastProgress
    assert [len(rows) for _, rows in sorted(batches.items())] == [10, 10, 5]
    first = batches[0][0]
    assert (bytes(first.body), first.group, first.priority) == (b"\xff", "eu", 3)
    assert (first.attributes, first.binary_attributes) == ({"a": "b"}, {"c": b"d"})
    assert (first.queue, first.receives, first.epoch) == ("orders", 1, 1)
    assert first.pushed_at.tzinfo is None
    assert queues.stats("orders").messages == 0
    assert json.loads(progress.sources[0].endOffset)["lapsed"] == 0
    assert settle(str(tmp_path / "checkpoint"), url) == Settled(0, 0)


@pytest.mark.service("default-jre-headless")
def test_a_batch_whose_claims_lapsed_comes_back_empty_and_is_counted(spark, url, queues, tmp_path):
    queues.create("orders")
    queues.push_many("orders", [b"%d" % number for number in range(8)])
    seen: list[tuple[int, list[int]]] = []

    def use(rows, number):
        seen.append((number, sorted(int(row.body) for row in rows)))
        if len(seen) == 1:
            raise RuntimeError("the sink is not there")

    query = consumed(
        spark, url, tmp_path / "checkpoint", use, maxMessagesPerTrigger=6, messagesPerPartition=3
    )
    with pytest.raises(StreamingQueryException, match="the sink is not there"):
        to_the_end(query)
    offset = json.loads((tmp_path / "checkpoint/offsets/0").read_text().splitlines()[-1])
    part = Part(*offset["parts"][1])
    for claim in queues.pull_many("orders", part.size, attempt_id=part.attempt_id):
        queues.release(claim)
    queues.push("orders", b"8")
    progress = to_the_end(query).lastProgress
    assert seen[:2] == [(0, [0, 1, 2, 3, 4, 5]), (0, [0, 1, 2])]
    assert sorted(body for _, rows in seen[2:] for body in rows) == [3, 4, 5, 6, 7, 8]
    assert json.loads(progress.sources[0].endOffset)["lapsed"] == 3
    assert queues.stats("orders").messages == 0


@pytest.mark.service("default-jre-headless")
def test_claims_last_as_long_as_their_batch_does(spark, url, queues, tmp_path):
    queues.create("orders")
    queues.push("orders", b"one")
    found: list[object] = []

    def use(rows, number):
        # Longer than the claims were made for. They are extended each second, and lapse only if
        # the machine delays that by two.
        found.append(queues.pull("orders", wait=4) if rows else None)

    to_the_end(consumed(spark, url, tmp_path / "checkpoint", use, visibilityTimeout=3))
    assert found[0] is None
    assert queues.stats("orders").messages == 0


@pytest.mark.service("default-jre-headless")
def test_a_stopped_stream_is_settled_by_its_checkpoint(spark, url, queues, tmp_path):
    queues.create("orders")
    queues.push_many("orders", [b"one", b"two"])
    query = consumed(spark, url, tmp_path / "checkpoint", lambda rows, number: None)
    query = query.trigger(processingTime="1 day").start()
    while not (tmp_path / "checkpoint/commits/0").exists():
        assert not query.awaitTermination(0.1)
    query.stop()
    queues.push("orders", b"three")
    assert queues.stats("orders").in_flight == 2
    assert settle(f"file://{tmp_path}/checkpoint", url) == Settled(2, 0)
    assert settle(f"file://{tmp_path}/checkpoint", url) == Settled(0, 0)
    assert queues.stats("orders").messages == 1
