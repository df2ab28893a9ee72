"""The endpoint in front of `sqs://`, a local address for queues elsewhere, and of `mirror:`."""

import json
from urllib.request import urlopen

import pytest
from botocore.exceptions import ClientError

import penstock
from penstock.errors import UnsupportedOperation
from penstock.server.sqs.lookup import refusal_of
from tests.server.conftest import end_daemon, until
from tests.server.sqs.asking import (
    arn,
    bodies,
    make,
    make_fifo,
    push,
    receive,
    redrive,
    refused,
    send,
    shown,
)
from tests.server.sqs.conftest import Local, serve


@pytest.fixture(scope="module")
def backend(query_data):
    """The endpoint that has the queues."""
    server = Local(query_data)
    yield server
    server.close()


@pytest.fixture(scope="module")
def front(query_data, backend):
    """The endpoint whose store is the other one."""
    server = Local(query_data, url=f"sqs://us-east-1?endpoint={backend.url}")
    yield server
    server.close()


@pytest.fixture
def client(front):
    return front.client()


def test_messages_sent_through_serve_are_received_at_the_backend_and_vice_versa(
    client, backend, queue_name
):
    here = make(client, queue_name)
    there = backend.client().get_queue_url(QueueName=queue_name)["QueueUrl"]
    attributes = {"a": {"DataType": "String", "StringValue": "1"}}
    send(client, here, "from here", MessageAttributes=attributes)
    (message,) = receive(backend.client(), there, MessageAttributeNames=["All"])
    assert (message["Body"], message["MessageAttributes"]["a"]["StringValue"]) == ("from here", "1")
    send(backend.client(), there, "from there")
    (message,) = receive(client, here)
    assert message["Body"] == "from there"
    client.delete_message(QueueUrl=here, ReceiptHandle=message["ReceiptHandle"])
    assert shown(backend.client(), there)["ApproximateNumberOfMessagesNotVisible"] == "1"


def test_a_queue_is_created_although_its_in_flight_limit_cannot_be_set(client, queue_name):
    url = make(client, queue_name, VisibilityTimeout="7")
    assert shown(client, url)["VisibilityTimeout"] == "7"
    client.set_queue_attributes(QueueUrl=url, Attributes={"VisibilityTimeout": "9"})
    assert make(client, queue_name, VisibilityTimeout="9") == url
    client.delete_queue(QueueUrl=url)
    code, _ = refused(client.get_queue_url, QueueName=queue_name)
    assert code == "AWS.SimpleQueueService.NonExistentQueue"


def test_batches_visibility_and_long_polls_work(client, queue_name):
    url = make(client, queue_name)
    entries = [{"Id": str(n), "MessageBody": f"m{n}"} for n in range(3)]
    assert len(client.send_message_batch(QueueUrl=url, Entries=entries)["Successful"]) == 3
    first, *_ = received = receive(client, url, MaxNumberOfMessages=10)
    assert sorted(message["Body"] for message in received) == ["m0", "m1", "m2"]
    client.change_message_visibility(
        QueueUrl=url, ReceiptHandle=first["ReceiptHandle"], VisibilityTimeout=0
    )
    assert bodies(client, url, WaitTimeSeconds=2) == [first["Body"]]
    rest = [{"Id": m["MessageId"], "ReceiptHandle": m["ReceiptHandle"]} for m in received[1:]]
    assert len(client.delete_message_batch(QueueUrl=url, Entries=rest)["Successful"]) == 2


def test_fifo_queues_keep_their_order(client, queue_name):
    url = make_fifo(client, f"{queue_name}.fifo")
    push(client, url, "1")
    push(client, url, "2")
    push(client, url, "2")
    assert bodies(client, url) == ["1", "2"]


def test_dead_letters_move_and_are_moved_back(client, backend, queue_name):
    dead = make(client, f"{queue_name}-dead")
    source = make(client, queue_name, RedrivePolicy=redrive(arn(client, dead)))
    assert json.loads(shown(client, source)["RedrivePolicy"])["maxReceiveCount"] == 1
    listed = client.list_dead_letter_source_queues(QueueUrl=dead)["queueUrls"]
    assert listed == [source]
    send(client, source, "x")
    receive(client, source)
    backend.clock.advance(seconds=31)
    assert bodies(client, dead, VisibilityTimeout=0) == ["x"]


def test_an_operation_that_the_backend_lacks_is_refused_with_its_reason():
    refusal = refusal_of(UnsupportedOperation("ttl: SQS has a retention for a queue"))
    assert (refusal.fault.name, refusal.message) == (
        "UnsupportedOperation",
        "ttl: SQS has a retention for a queue",
    )


def test_a_backend_that_cannot_be_reached_is_a_503_with_the_reason(query_data, queue_name):
    backend = Local(query_data)
    front = Local(query_data, url=f"sqs://us-east-1?endpoint={backend.url}&timeout=5")
    try:
        url = make(front.client(), queue_name)
        backend.close()
        with pytest.raises(ClientError) as caught:
            send(front.client(), url, "x")
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503
        assert "127.0.0.1" in caught.value.response["Error"]["Message"]
    finally:
        front.close()


def test_health_and_metrics_are_those_of_the_backend(client, front, queue_name):
    send(client, make(client, queue_name), "x")
    with urlopen(f"{front.url}/health", timeout=60) as answer:
        assert json.load(answer) == {"status": "ok"}
    with urlopen(f"{front.url}/metrics", timeout=60) as answer:
        figures = answer.read().decode()
    assert f'penstock_messages{{queue="{queue_name}",state="visible"}} 1.0' in figures


def test_the_messages_of_a_mirrored_store_are_sent_received_and_mirrored(tmp_path):
    primary, mirror = tmp_path / "primary", tmp_path / "mirror"
    try:
        with serve("--store", f"mirror:?primary=file:{primary}&mirror=file:{mirror}") as server:
            client = server.client()
            url = make(client, "orders")
            send(client, url, "first")
            send(client, url, "second")
            (message,) = receive(client, url)
            assert message["Body"] == "first"
            client.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
            with penstock.connect(f"file:{mirror}") as mirrored:
                until(lambda: "orders" in mirrored.list())
                until(lambda: [each.body for each in mirrored.peek("orders", 5)] == [b"second"])
    finally:
        end_daemon(primary)
        end_daemon(mirror)
