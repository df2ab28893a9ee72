"""The SQS adapter beyond the contract, against Penstock's own SQS endpoint."""

import asyncio
import json
import secrets
import threading
from pathlib import Path

import pytest

import penstock
import penstock.aio
from penstock.backends.sqs.client import read_endpoint
from penstock.backends.sqs.lacks import LACKS, WEAKER_AT_AMAZON
from penstock.errors import (
    BatchRefused,
    EngineClosed,
    InvalidField,
    InvalidReceipt,
    MessageTooLarge,
    Overloaded,
    QueueExists,
    QueueInUse,
    QueueNotFound,
    RequestError,
    StaleReceipt,
    UnsupportedOperation,
)
from penstock.public import ClaimRef
from penstock.service import Batch, CreateQueue, Delete, Extend, Push, PushReply, Release, Stats
from penstock.testing.conformance import BEHAVIOURS
from penstock.url import read_url
from tests.server.conftest import until
from tests.server.sqs.conftest import Local, serve

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "sqs-adapter.md"
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def server():
    with serve("--store", "memory:") as running:
        yield running


@pytest.fixture(scope="module")
def queues(server):
    with penstock.connect(f"sqs://us-east-1?endpoint={server.url}") as queues:
        yield queues


@pytest.fixture(scope="module")
def sqs(server):
    return server.client()


@pytest.fixture
def name():
    return f"q-{secrets.token_hex(6)}"


@pytest.fixture
def local():
    server = Local(None, aws_limits=True)
    yield server
    server.close()


@pytest.fixture
def timed(local):
    """Queues of an endpoint whose clock the test moves."""
    with penstock.connect(f"sqs://us-east-1?endpoint={local.url}", clock=local.clock) as queues:
        yield queues


# Batches.


def test_a_batch_of_any_length_is_split_and_joined(queues, name):
    queues.create(name, visibility_timeout=600)
    bodies = [f"m{number}" for number in range(35)]
    replies = queues.push_many(name, bodies)
    assert len({reply.id for reply in replies}) == 35
    claims = queues.pull_many(name, 100)
    assert [claim.body.decode() for claim in claims] == bodies
    assert [claim.id for claim in claims] == [reply.id for reply in replies]
    assert queues.delete_many(claims) == [True] * 35
    assert queues.stats(name).messages == 0


def test_a_pull_returns_no_more_than_its_limit(queues, name):
    queues.create(name, visibility_timeout=600)
    queues.push_many(name, [str(number) for number in range(25)])
    assert [len(queues.pull_many(name, limit)) for limit in (12, 20)] == [12, 13]


def test_bodies_that_are_too_large_for_one_request_are_sent_in_several(queues, name):
    queues.create(name)
    replies = queues.push_many(name, [bytes([65 + number]) * 400_000 for number in range(6)])
    assert [type(reply) for reply in replies] == [PushReply] * 6
    assert queues.stats(name).visible == 6


def test_each_item_of_a_batch_has_its_own_reply_or_error(queues, name):
    queues.create(name, max_body_bytes=1_024, visibility_timeout=600)
    queues.push_many(name, ["a", "b", "c"])
    first, second, third = queues.pull_many(name, 3)
    replies = queues.service.execute(
        Batch(
            [
                Push(name, b"x" * 1_025),
                Push(name, b"x", priority=1),
                Push(name, b"fine"),
                Delete(name, first.receipt),
                Delete(name, "no receipt at all"),
                Extend(name, second.receipt, 60_000),
                Extend(name, second.receipt, 0),
                Release(name, third.receipt),
                Release(name, third.receipt, 50_000_000),
            ]
        )
    )
    assert [type(reply) for reply in replies] == [
        MessageTooLarge,
        UnsupportedOperation,
        PushReply,
        bool,
        InvalidReceipt,
        int,
        InvalidField,
        type(None),
        InvalidField,
    ]
    stats = queues.stats(name)
    assert (stats.visible, stats.in_flight) == (2, 1)


def test_a_fifo_batch_keeps_its_order_and_its_bad_items_do_not_stop_it(queues, name):
    queue = f"{name}.fifo"
    queues.create(queue, fifo=True)
    pushes = [Push(queue, b"%d" % number, group="g") for number in range(12)]
    replies = queues.service.execute(Batch([*pushes[:5], Push(queue, b"groupless"), *pushes[5:]]))
    assert isinstance(replies.pop(5), InvalidField)
    sequences = [reply.sequence for reply in replies]
    assert sequences == sorted(sequences)
    assert [claim.body for claim in queues.pull_many(queue, 10)] == [
        b"%d" % number for number in range(10)
    ]


# What other programs see.


def test_messages_can_be_exchanged_with_other_sqs_clients(queues, sqs, name):
    queues.create(name)
    url = sqs.get_queue_url(QueueName=name)["QueueUrl"]
    queues.push(name, "水門", attributes={"kind": "test"})
    (message,) = sqs.receive_message(QueueUrl=url, MessageAttributeNames=["All"])["Messages"]
    assert message["Body"] == "水門"
    assert message["MessageAttributes"]["kind"]["StringValue"] == "test"
    count = {"DataType": "Number", "StringValue": "7"}
    sqs.send_message(QueueUrl=url, MessageBody="theirs", MessageAttributes={"count": count})
    claim = queues.pull(name)
    assert (claim.body, claim.attributes) == (b"theirs", {"count": "7"})
    assert claim.context == {"type:count": "Number"}


def test_a_receipt_is_valid_in_another_client(queues, server, name):
    queues.create(name)
    queues.push(name, "a")
    receipt = queues.pull(name).receipt
    with penstock.connect(f"sqs://us-east-1?endpoint={server.url}") as others:
        assert others.extend(ClaimRef(name, receipt), 60) > 0
        assert others.delete(ClaimRef(name, receipt)) is True
    assert queues.stats(name).messages == 0


def test_settings_are_attributes_and_annotations_are_tags(queues, sqs, name):
    dead = f"{name}-dead"
    queues.create(
        name,
        visibility_timeout=7,
        delay=8,
        wait=9,
        retention=60,
        max_body_bytes=2_048,
        dead_letter=dead,
        max_receives=3,
        annotations={"team": "core"},
    )
    url = sqs.get_queue_url(QueueName=name)["QueueUrl"]
    shown = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    assert {key: shown[key] for key in list(shown) if "Seconds" in key or "Timeout" in key} == {
        "VisibilityTimeout": "7",
        "DelaySeconds": "8",
        "ReceiveMessageWaitTimeSeconds": "9",
    }
    assert (shown["MessageRetentionPeriod"], shown["MaximumMessageSize"]) == ("60", "2048")
    policy = json.loads(shown["RedrivePolicy"])
    assert (policy["deadLetterTargetArn"].rpartition(":")[2], policy["maxReceiveCount"]) == (
        dead,
        3,
    )
    assert sqs.list_queue_tags(QueueUrl=url)["Tags"] == {"team": "core"}

    queues.configure(name, dead_letter=None, max_receives=None, annotations={"owner": "me"})
    settings = queues.describe(name).settings
    assert (settings.dead_letter, settings.max_receives) == (None, None)
    assert sqs.list_queue_tags(QueueUrl=url)["Tags"] == {"owner": "me"}
    with pytest.raises(QueueExists, match="annotations"):
        queues.create(name, annotations={"owner": "you"})


def test_fractions_of_a_second_are_rounded_up(timed):
    timed.create("orders", visibility_timeout=1.2)
    assert timed.describe("orders").settings.visibility_timeout == 2
    timed.push("orders", "a")
    claim = timed.pull("orders", visibility_timeout=30.01)
    assert claim.deadline_ms - claim.first_pulled_at_ms == 31_000


def test_a_removed_queue_is_dropped_from_the_cache_and_found_when_it_is_created_again(timed, local):
    sqs = local.client()
    timed.create("orders")
    timed.push("orders", "a")
    sqs.delete_queue(QueueUrl=sqs.get_queue_url(QueueName="orders")["QueueUrl"])
    with pytest.raises(QueueNotFound, match="'orders'"):
        timed.push("orders", "b")
    with pytest.raises(Overloaded, match="60 seconds"):
        timed.create("orders")
    local.clock.advance(seconds=61)
    sqs.create_queue(QueueName="orders")
    timed.push("orders", "c")
    assert timed.pull("orders").body == b"c"


def test_a_second_purge_within_a_minute_is_an_unavailable_error(timed):
    timed.create("orders")
    assert timed.purge("orders") == 0
    with pytest.raises(Overloaded, match="60 seconds"):
        timed.purge("orders")


def test_names_are_listed_beyond_one_page_and_by_any_prefix(timed, local):
    for number in range(1_005):
        local.call(local.running.engine.submit, CreateQueue(f"n{number:04}"))
    timed.create("m.fifo", fifo=True)
    assert len(timed.list(limit=5_000)) == 1_006
    assert timed.list("n", after="n1001") == ["n1002", "n1003", "n1004"]
    assert timed.list("m.fi") == ["m.fifo"]
    assert timed.list("größe") == []


def test_a_queue_can_be_named_with_its_account(queues, server, name):
    queues.create(name)
    queues.push(f"{name}@000000000000", "a")
    assert queues.pull(name).body == b"a"
    with (
        penstock.connect(f"sqs://us-east-1?endpoint={server.url}&account=111122223333") as others,
        pytest.raises(QueueNotFound),
    ):
        others.push(name, "a")
    for bad in (f"{name}@elsewhere", f"{name}@1234"):
        with pytest.raises(InvalidField, match="12 digits"):
            queues.push(bad, "a")
    with pytest.raises(InvalidField, match="another account"):
        queues.create(f"{name}@000000000000")


# FIFO.


def test_the_claim_of_a_push_without_a_dedup_id_has_none(queues, name):
    queue = f"{name}.fifo"
    queues.create(queue)
    assert queues.describe(queue).settings.fifo is True
    queues.push(queue, "same", group="a")
    queues.push(queue, "same", group="a")
    queues.push(queue, "named", group="b", dedup_id="42")
    assert {claim.dedup_id for claim in queues.pull_many(queue, 10)} == {None, "42"}


def test_a_dedup_id_of_a_fifo_queue_holds_for_five_minutes(timed, local):
    timed.create("q.fifo")
    first = timed.push("q.fifo", "a", group="g", dedup_id="42").id
    local.clock.advance(seconds=299)
    assert timed.push("q.fifo", "a", group="g", dedup_id="42").id == first
    local.clock.advance(seconds=1)
    assert timed.push("q.fifo", "a", group="g", dedup_id="42").id != first


def test_an_old_receipt_of_a_fifo_queue_is_refused(timed, local):
    timed.create("q.fifo", visibility_timeout=5)
    timed.push("q.fifo", "a", group="g")
    old = timed.pull("q.fifo")
    local.clock.advance(seconds=5)
    new = timed.pull("q.fifo")
    with pytest.raises(StaleReceipt):
        timed.delete(old)
    with pytest.raises(BatchRefused) as refused:
        timed.delete_many([old])
    assert isinstance(refused.value.results[0], StaleReceipt)
    assert timed.delete(new) is True


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"retention": 59}, "retention: Amazon SQS takes 60 to 1209600 s; got 59 s"),
        ({"wait": 21}, "^wait: "),
        ({"delay": 901}, "^delay: "),
        ({"max_body_bytes": 1_023}, "^max_body_bytes: "),
        ({"max_receives": 1_001, "dead_letter": "d"}, "max_receives"),
        ({"dead_letter": "d.fifo", "max_receives": 1}, "both be fifo"),
        ({"dead_letter": "a.b", "max_receives": 1}, "dead_letter"),
        ({"fifo": True}, r"end in \.fifo"),
        ({"max_messages": 5}, "^max_messages: "),
        ({"max_bytes": 5}, "^max_bytes: "),
        ({"max_in_flight": 5}, "120,000"),
        ({"priority_age": 5}, "^priority_age: SQS has no priorities"),
        ({"dedup_by_content": True}, "FIFO"),
    ],
    ids=str,
)
def test_settings_that_sqs_does_not_support_are_refused_and_no_queue_is_created(
    queues, name, settings, field
):
    with pytest.raises(RequestError, match=field):
        queues.create(name, **settings)
    assert queues.list(name) == []


def test_a_refused_queue_creates_no_dead_letter_queue(queues, name):
    queues.create(name, visibility_timeout=45)
    with pytest.raises(QueueExists, match="visibility_timeout"):
        queues.create(name, visibility_timeout=46, dead_letter=f"{name}-dead", max_receives=3)
    assert queues.list(name) == [name]


def test_a_standard_queue_with_a_fifo_name_is_refused(queues, name):
    with pytest.raises(InvalidField, match="fifo"):
        queues.create(f"{name}.fifo", fifo=False)
    with pytest.raises(InvalidField, match="cannot be a queue of Amazon SQS"):
        queues.create(f"{name}.x")


# What SQS does not have.


def test_operations_that_sqs_does_not_have_are_refused_with_the_reason_in_the_table(queues, name):
    queue = f"{name}.fifo"
    queues.create(name)
    queues.create(queue)
    for use, lacking in (
        (lambda: queues.push(name, "x", priority=1), "priority order"),
        (lambda: queues.push(name, "x", ttl=60), "ttl"),
        (lambda: queues.push(name, "x", dedup_id="42"), "dedup"),
        (lambda: queues.push(queue, "x", group="g", delay=5), "fifo delay"),
        (lambda: queues.pull(name, attempt_id="x"), "attempts"),
        (lambda: queues.peek(name), "peek"),
        (lambda: queues.history("x"), "history"),
    ):
        with pytest.raises(UnsupportedOperation) as caught:
            use()
        assert LACKS[lacking] in str(caught.value)
    assert queues.stats(name).messages == queues.stats(queue).messages == 0


@pytest.mark.parametrize("field", ["group", "dedup_id"])
def test_an_id_that_sqs_would_refuse_is_refused_before_it_is_sent(queues, name, field):
    queue = f"{name}.fifo"
    queues.create(queue)
    with pytest.raises(InvalidField, match=f"{field}: Amazon SQS takes"):
        queues.push(queue, "x", **{"group": "g", field: "two words"})


def test_a_message_released_with_a_delay_comes_back_after_it(timed, local):
    timed.create("orders", visibility_timeout=600)
    timed.push("orders", "a")
    timed.release(timed.pull("orders"), delay=10)
    local.clock.advance(seconds=9)
    assert timed.pull("orders") is None
    local.clock.advance(seconds=1)
    assert timed.pull("orders").receives == 2


# Redrives.


def dead_letter_all(queues, name, *bodies):
    dead = f"{name}-dead"
    queues.create(name, dead_letter=dead, max_receives=1, visibility_timeout=600)
    queues.push_many(name, bodies)
    for claim in queues.pull_many(name, len(bodies)):
        queues.release(claim)
    return dead


def test_a_whole_queue_is_redriven_by_a_task_of_sqs(queues, sqs, name):
    dead = dead_letter_all(queues, name, *(f"m{number}" for number in range(30)))
    assert queues.redrive(dead) == 30
    assert [queues.stats(each).visible for each in (name, dead)] == [30, 0]
    url = sqs.get_queue_url(QueueName=dead)["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]
    (task,) = sqs.list_message_move_tasks(SourceArn=arn["QueueArn"])["Results"]
    assert (task["Status"], task["ApproximateNumberOfMessagesMoved"]) == ("COMPLETED", 30)


def test_a_part_of_a_queue_is_redriven_message_by_message_with_all_fields(queues, name):
    dead = f"{name}-dead.fifo"
    queue = f"{name}.fifo"
    queues.create(queue, dead_letter=dead, max_receives=1)
    for number in range(15):
        options = {"group": f"g{number}", "attributes": {"n": str(number), "raw": b"\xff"}}
        queues.push(queue, b"\x00%d" % number, **options)
    for claim in queues.pull_many(queue, 10) + queues.pull_many(queue, 10):
        queues.release(claim)
    assert queues.redrive(dead, limit=12) == 12
    assert [queues.stats(each).visible for each in (queue, dead)] == [12, 3]
    claim = queues.pull(queue)
    assert (claim.body, claim.group) == (b"\x000", "g0")
    assert claim.attributes == {"n": "0", "raw": b"\xff"}


def test_a_queue_that_is_not_a_dead_letter_queue_can_be_redriven_to_a_named_queue(queues, name):
    other = f"{name}-other"
    queues.create(name)
    queues.create(other)
    queues.push_many(name, ["a", "b"])
    with pytest.raises(InvalidField, match="to: "):
        queues.redrive(name)
    with pytest.raises(InvalidField, match="to: "):
        queues.redrive(name, limit=1)
    assert queues.stats(name).visible == 2
    assert queues.redrive(name, to=other) == 2
    assert [claim.body for claim in queues.pull_many(other)] == [b"a", b"b"]


# Waiting.


def in_thread(function):
    outcome = []

    def run():
        try:
            outcome.append(function())
        except penstock.PenstockError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def until_waiting(local, queue):
    """Returns once a pull waits at the endpoint."""
    until(
        lambda: local.call(local.running.engine.submit, Stats(queue)).waiting_pulls > 0, TIMEOUT_S
    )


def test_a_pull_waits_for_longer_than_one_poll_of_sqs_may(timed, local):
    timed.create("orders")
    thread, outcome = in_thread(lambda: timed.pull("orders", wait=50))
    until_waiting(local, "orders")
    local.clock.advance(seconds=45)
    until_waiting(local, "orders")
    assert outcome == []
    timed.push("orders", "late")
    thread.join(TIMEOUT_S)
    assert outcome[0].body == b"late"


def test_a_long_wait_ends_at_its_time(timed, local):
    timed.create("orders")
    thread, outcome = in_thread(lambda: timed.pull("orders", wait=50))
    for seconds in (20, 20, 10):
        until_waiting(local, "orders")
        assert outcome == []
        local.clock.advance(seconds=seconds)
    thread.join(TIMEOUT_S)
    assert outcome == [None]


def test_closing_fails_the_pulls_that_wait(local):
    queues = penstock.connect(f"sqs://us-east-1?endpoint={local.url}", clock=local.clock)
    queues.create("orders")
    thread, outcome = in_thread(lambda: queues.pull("orders", wait=3_600))
    until_waiting(local, "orders")
    queues.close()
    thread.join(TIMEOUT_S)
    assert type(outcome[0]) is EngineClosed
    with pytest.raises(EngineClosed):
        queues.stats("orders")


def test_messages_received_for_a_cancelled_pull_are_released(local):
    async def run():
        url = f"sqs://us-east-1?endpoint={local.url}"
        async with await penstock.aio.connect(url, clock=local.clock) as queues:
            await queues.create("orders", visibility_timeout=600)
            pull = asyncio.create_task(queues.pull("orders", wait=3_600))
            await asyncio.to_thread(until_waiting, local, "orders")
            pull.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pull
            await queues.push("orders", "for others")
            # The poll of the cancelled pull may receive it first, and then releases it.
            return await queues.pull("orders", wait=20)

    assert asyncio.run(run()).body == b"for others"


def test_hundreds_of_waiting_pulls_do_not_delay_a_push(local):
    async def run():
        url = f"sqs://us-east-1?endpoint={local.url}"
        async with await penstock.aio.connect(url, clock=local.clock) as queues:
            await queues.create("orders")
            pulls = [asyncio.create_task(queues.pull("orders", wait=20)) for _ in range(200)]
            replies = await queues.push_many("orders", [str(number) for number in range(200)])
            claims = await asyncio.gather(*pulls)
            return replies, claims

    replies, claims = asyncio.run(run())
    assert {reply.id for reply in replies} == {claim and claim.id for claim in claims}


# The URL, and the documentation.


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("sqs://region!", "has no valid region"),
        ("sqs://eu-west-1/orders", "has no valid region"),
        ("sqs://user:secret@eu-west-1", "has no valid region"),
        ("sqs://eu-west-1?colour=red", "no option 'colour'"),
        ("sqs://eu-west-1?endpoint=ftp://host", "http://HOST:PORT"),
        ("sqs://eu-west-1?endpoint=127.0.0.1:9324", "http://HOST:PORT"),
        ("sqs://eu-west-1?endpoint=http://[", "http://HOST:PORT"),
        ("sqs://eu-west-1?endpoint=http://host:99999", "http://HOST:PORT"),
        ("sqs://eu-west-1?account=42", "twelve digits"),
        ("sqs://eu-west-1?timeout=soon", "whole number"),
        ("sqs://eu-west-1?profile=unknown-profile", "unknown-profile"),
    ],
)
def test_a_bad_url_is_refused_in_one_sentence(url, words):
    with pytest.raises(RequestError, match=words) as caught:
        penstock.connect(url)
    assert "\n" not in str(caught.value)


def test_a_url_gives_region_endpoint_profile_and_account():
    url = "sqs://eu-west-1?endpoint=http://127.0.0.1:9324&profile=me&account=111122223333&timeout=5"
    expected = ("eu-west-1", "http://127.0.0.1:9324", "me", "111122223333", 5.0)
    assert read_endpoint(read_url(url)) == expected
    assert read_endpoint(read_url(url)).on_loopback
    assert not read_endpoint(read_url("sqs://eu-west-1?endpoint=https://example.org")).on_loopback
    assert read_endpoint(read_url("sqs:")) == (None, None, None, None, 30.0)


def test_the_documentation_has_both_tables():
    page = PAGE.read_text()
    for table in (LACKS, WEAKER_AT_AMAZON):
        for behaviour, reason in table.items():
            assert f"| {behaviour} | {reason} |" in page
    lacking = page.partition("## What SQS cannot do")[2]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in lacking.splitlines()]
    printed = [row for row in rows if row in BEHAVIOURS]
    assert sorted(printed) == sorted([*LACKS, *WEAKER_AT_AMAZON])


def test_a_created_dead_letter_queue_is_named_and_can_be_removed_by_force_only(queues, name):
    made = queues.create(name, dead_letter=f"{name}-dead", max_receives=3)
    assert made.also_created == [f"{name}-dead"]
    assert queues.configure(name, dead_letter=f"{name}-2", max_receives=3).also_created == [
        f"{name}-2"
    ]
    with pytest.raises(QueueInUse, match=f"'{name}-2' is the dead-letter queue of '{name}'"):
        queues.remove(f"{name}-2")
    queues.remove(f"{name}-dead")
    queues.remove(f"{name}-2", force=True)
    assert queues.list(name) == [name]
