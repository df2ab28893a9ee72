"""boto3 with `penstock serve --store amqp://…`: SQS clients on the queues of RabbitMQ."""

import json
from concurrent.futures import ThreadPoolExecutor
from urllib.request import urlopen

import pytest

import penstock
from tests.server.conftest import until
from tests.server.sqs.asking import arn, bodies, make, receive, redrive, refused, send, shown
from tests.server.sqs.conftest import TIMEOUT_S, serve

pytestmark = pytest.mark.service("rabbitmq-server")


@pytest.fixture(scope="module")
def server(rabbit):
    with serve("--store", rabbit.url) as server:
        yield server


@pytest.fixture(scope="module")
def sqs(server):
    return server.client()


def test_the_password_is_not_printed(server, rabbit):
    assert f"in amqp://…@127.0.0.1:{rabbit.port}/" in server.output
    assert "guest" not in server.output


def test_a_message_is_sent_received_and_deleted(sqs, rabbit, queue_name):
    url = make(sqs, queue_name, VisibilityTimeout="300")
    attributes = {
        "text": {"DataType": "String", "StringValue": "ü"},
        "number": {"DataType": "Number", "StringValue": "5"},
        "bytes": {"DataType": "Binary", "BinaryValue": b"\x00\xff"},
    }
    sent = sqs.send_message(QueueUrl=url, MessageBody="grüße", MessageAttributes=attributes)
    (message,) = receive(
        sqs, url, MessageAttributeNames=["All"], MessageSystemAttributeNames=["All"]
    )
    assert (message["Body"], message["MessageId"]) == ("grüße", sent["MessageId"])
    assert message["MessageAttributes"] == attributes
    assert message["Attributes"]["ApproximateReceiveCount"] == "1"
    assert shown(sqs, url)["ApproximateNumberOfMessagesNotVisible"] == "1"
    sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    assert shown(sqs, url)["ApproximateNumberOfMessagesNotVisible"] == "0"
    with penstock.connect(rabbit.url) as queues:
        assert queues.stats(queue_name).messages == 0


def test_batches_succeed_and_fail_entry_by_entry(sqs, queue_name):
    url = make(sqs, queue_name)
    entries = [{"Id": str(n), "MessageBody": f"m{n}"} for n in range(10)]
    assert len(sqs.send_message_batch(QueueUrl=url, Entries=entries)["Successful"]) == 10
    received = receive(sqs, url, MaxNumberOfMessages=10)
    assert [message["Body"] for message in received] == [f"m{n}" for n in range(10)]
    entries = [
        {"Id": message["MessageId"], "ReceiptHandle": message["ReceiptHandle"]}
        for message in received
    ]
    entries.append({"Id": "forged", "ReceiptHandle": "forged"})
    with pytest.raises(sqs.exceptions.ClientError):
        sqs.delete_message_batch(QueueUrl=url, Entries=entries)
    deleted = sqs.delete_message_batch(QueueUrl=url, Entries=entries[1:])
    assert len(deleted["Successful"]) == 9
    assert deleted["Failed"][0]["Code"] == "ReceiptHandleIsInvalid"


def test_visibility_delays_and_long_polls_work(sqs, queue_name):
    url = make(sqs, queue_name)
    send(sqs, url, "much later", DelaySeconds=900)
    send(sqs, url, "now")
    assert shown(sqs, url)["ApproximateNumberOfMessagesDelayed"] == "1"
    (message,) = receive(sqs, url)
    assert message["Body"] == "now"
    sqs.change_message_visibility(
        QueueUrl=url, ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=0
    )
    assert bodies(sqs, url, WaitTimeSeconds=20) == ["now"]
    send(sqs, url, "later", DelaySeconds=1)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(bodies, sqs, url, WaitTimeSeconds=20)
        assert received.result(TIMEOUT_S) == ["later"]


def test_a_delete_with_a_late_receipt_holds_when_the_message_is_delivered_again(sqs, queue_name):
    url = make(sqs, queue_name, VisibilityTimeout="1")
    send(sqs, url, "late")
    (message,) = receive(sqs, url)
    until(lambda: shown(sqs, url)["ApproximateNumberOfMessages"] == "1")
    for _ in range(2):
        sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    assert bodies(sqs, url) == []
    assert shown(sqs, url)["ApproximateNumberOfMessages"] == "0"
    # Not once the message was received again.
    send(sqs, url, "again")
    (first,) = receive(sqs, url)
    (second,) = receive(sqs, url, WaitTimeSeconds=20, VisibilityTimeout=60)
    sqs.delete_message(QueueUrl=url, ReceiptHandle=first["ReceiptHandle"])
    sqs.change_message_visibility(
        QueueUrl=url, ReceiptHandle=second["ReceiptHandle"], VisibilityTimeout=0
    )
    assert bodies(sqs, url, WaitTimeSeconds=20) == ["again"]


def test_the_visibility_timeout_that_celery_uses_is_accepted(sqs, queue_name):
    url = make(sqs, queue_name, VisibilityTimeout="1800")
    send(sqs, url, "x")
    assert bodies(sqs, url) == ["x"]


def test_dead_letters_move_and_are_moved_back(sqs, queue_name):
    dead = make(sqs, f"{queue_name}-dead")
    source = make(sqs, queue_name, RedrivePolicy=redrive(arn(sqs, dead)))
    assert json.loads(shown(sqs, source)["RedrivePolicy"])["maxReceiveCount"] == 1
    send(sqs, source, "x")
    (message,) = receive(sqs, source)
    sqs.change_message_visibility(
        QueueUrl=source, ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=0
    )
    assert bodies(sqs, source) == []
    names = ["ApproximateReceiveCount"]
    (letter,) = receive(sqs, dead, VisibilityTimeout=0, MessageSystemAttributeNames=names)
    # Its receives in the queue that it came from are counted too.
    assert (letter["Body"], letter["Attributes"][names[0]]) == ("x", "2")
    sqs.start_message_move_task(SourceArn=arn(sqs, dead))
    assert bodies(sqs, source, WaitTimeSeconds=20) == ["x"]


def test_what_rabbitmq_cannot_do_is_an_unsupported_operation(sqs, queue_name):
    code, text = refused(
        sqs.create_queue, QueueName=f"{queue_name}.fifo", Attributes={"FifoQueue": "true"}
    )
    assert code == "AWS.SimpleQueueService.UnsupportedOperation"
    assert "RabbitMQ has no groups" in text


def test_queues_are_listed_tagged_purged_and_deleted(sqs, server, queue_name):
    url = make(sqs, queue_name)
    assert sqs.list_queues(QueueNamePrefix=queue_name)["QueueUrls"] == [url]
    sqs.tag_queue(QueueUrl=url, Tags={"team": "blue"})
    assert sqs.list_queue_tags(QueueUrl=url)["Tags"] == {"team": "blue"}
    send(sqs, url, "x")
    with urlopen(f"{server.url}/metrics", timeout=30) as answer:
        assert f'queue="{queue_name}",state="visible"}} 1.0' in answer.read().decode()
    sqs.purge_queue(QueueUrl=url)
    assert bodies(sqs, url) == []
    sqs.delete_queue(QueueUrl=url)
    code, _ = refused(sqs.get_queue_url, QueueName=queue_name)
    assert code == "AWS.SimpleQueueService.NonExistentQueue"
