"""boto3 with a server process: what a new user does first."""

import hashlib
import os

import pytest
from botocore.exceptions import ClientError

from tests.measure import cpu_s
from tests.server.sqs.conftest import TIMEOUT_S, serve


def refused(call, **parameters):
    """The error response that a call raises."""
    with pytest.raises(ClientError) as caught:
        call(**parameters)
    return caught.value.response


def test_a_message_is_sent_received_and_deleted(sqs, queue):
    sent = sqs.send_message(QueueUrl=queue, MessageBody="grüße")
    assert sent["MD5OfMessageBody"] == hashlib.md5("grüße".encode()).hexdigest()
    (message,) = sqs.receive_message(QueueUrl=queue)["Messages"]
    assert (message["Body"], message["MessageId"]) == ("grüße", sent["MessageId"])
    assert "Messages" not in sqs.receive_message(QueueUrl=queue)
    sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])
    counts = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["All"])["Attributes"]
    assert counts["ApproximateNumberOfMessages"] == "0"
    assert counts["ApproximateNumberOfMessagesNotVisible"] == "0"


def test_attributes_of_every_type_come_back_as_they_were_sent(sqs, queue):
    attributes = {
        "text": {"DataType": "String", "StringValue": "ü"},
        "number": {"DataType": "Number.float", "StringValue": "-1.5e3"},
        "bytes": {"DataType": "Binary.png", "BinaryValue": b"\x00\xff"},
    }
    trace = {"AWSTraceHeader": {"DataType": "String", "StringValue": "Root=1-5759e988"}}
    sent = sqs.send_message(
        QueueUrl=queue, MessageBody="x", MessageAttributes=attributes, MessageSystemAttributes=trace
    )
    assert sent["MD5OfMessageSystemAttributes"]
    (message,) = sqs.receive_message(
        QueueUrl=queue, MessageAttributeNames=["All"], MessageSystemAttributeNames=["All"]
    )["Messages"]
    assert message["MessageAttributes"] == attributes
    assert message["MD5OfMessageAttributes"] == sent["MD5OfMessageAttributes"]
    assert message["Attributes"]["AWSTraceHeader"] == "Root=1-5759e988"
    assert message["Attributes"]["ApproximateReceiveCount"] == "1"


def test_a_batch_of_ten_succeeds_and_fails_entry_by_entry(sqs, queue):
    entries = [{"Id": str(number), "MessageBody": f"m{number}"} for number in range(9)]
    entries.append({"Id": "bad", "MessageBody": "\x00"})
    sent = sqs.send_message_batch(QueueUrl=queue, Entries=entries)
    assert [entry["Id"] for entry in sent["Successful"]] == [str(number) for number in range(9)]
    (failed,) = sent["Failed"]
    assert (failed["Id"], failed["SenderFault"]) == ("bad", True)
    assert failed["Code"] == "InvalidMessageContents"
    messages = sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10)["Messages"]
    assert [message["Body"] for message in messages] == [f"m{number}" for number in range(9)]
    entries = [
        {"Id": str(number), "ReceiptHandle": message["ReceiptHandle"]}
        for number, message in enumerate(messages)
    ]
    changed = sqs.change_message_visibility_batch(
        QueueUrl=queue, Entries=[{**entry, "VisibilityTimeout": 60} for entry in entries]
    )
    assert len(changed["Successful"]) == 9
    entries.append({"Id": "forged", "ReceiptHandle": "nonsense"})
    deleted = sqs.delete_message_batch(QueueUrl=queue, Entries=entries)
    assert len(deleted["Successful"]) == 9
    assert deleted["Failed"][0]["Code"] == "ReceiptHandleIsInvalid"


def test_an_error_carries_the_codes_of_both_protocols(sqs):
    error = refused(sqs.get_queue_url, QueueName="there-is-none")
    assert error["Error"]["Code"] == "AWS.SimpleQueueService.NonExistentQueue"
    assert error["Error"]["QueryErrorCode"] == "QueueDoesNotExist"
    assert error["Error"]["Message"] == "The specified queue does not exist."
    assert error["ResponseMetadata"]["HTTPStatusCode"] == 400


def test_a_long_poll_ends_when_a_message_arrives(server, sqs, queue):
    from concurrent.futures import ThreadPoolExecutor

    other = server.client()
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(other.receive_message, QueueUrl=queue, WaitTimeSeconds=20)
        attributes = {"QueueUrl": queue, "AttributeNames": ["All"]}
        while f'waiting_pulls{{queue="{queue.rsplit("/", 1)[1]}"}} 1.0' not in metrics(server):
            sqs.get_queue_attributes(**attributes)
        sqs.send_message(QueueUrl=queue, MessageBody="x")
        # A poll that ended by its time would have no messages.
        (message,) = received.result(TIMEOUT_S)["Messages"]
    assert message["Body"] == "x"
    other.close()


def metrics(server):
    from urllib.request import urlopen

    with urlopen(f"{server.url}/metrics") as answer:
        return answer.read().decode()


def test_regions_and_accounts_do_not_see_each_other(server, sqs, queue_name):
    here = sqs.create_queue(QueueName=queue_name)["QueueUrl"]
    elsewhere = server.client(region_name="eu-central-1")
    other = server.client(aws_access_key_id="111122223333")
    for client in (elsewhere, other):
        error = refused(client.get_queue_url, QueueName=queue_name)
        assert error["Error"]["QueryErrorCode"] == "QueueDoesNotExist"
    there = elsewhere.create_queue(QueueName=queue_name)["QueueUrl"]
    theirs = other.create_queue(QueueName=queue_name)["QueueUrl"]
    assert there == here
    assert theirs.endswith(f"/111122223333/{queue_name}")
    elsewhere.send_message(QueueUrl=there, MessageBody="there")
    assert "Messages" not in sqs.receive_message(QueueUrl=here)
    arn = elsewhere.get_queue_attributes(QueueUrl=there, AttributeNames=["QueueArn"])
    assert arn["Attributes"]["QueueArn"] == f"arn:aws:sqs:eu-central-1:000000000000:{queue_name}"
    elsewhere.close()
    other.close()


def test_without_keys_the_url_of_another_accounts_queue_opens_it(server, sqs, queue_name):
    url = sqs.create_queue(QueueName=queue_name)["QueueUrl"]
    other = server.client(aws_access_key_id="111122223333")
    owner = {"QueueName": queue_name, "QueueOwnerAWSAccountId": "000000000000"}
    assert other.get_queue_url(**owner)["QueueUrl"] == url
    other.send_message(QueueUrl=url, MessageBody="from another")
    received = sqs.receive_message(
        QueueUrl=url, VisibilityTimeout=0, MessageSystemAttributeNames=["SenderId"]
    )
    assert received["Messages"][0]["Attributes"] == {"SenderId": "111122223333"}
    (message,) = other.receive_message(QueueUrl=url)["Messages"]
    other.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    other.purge_queue(QueueUrl=url)
    assert "QueueUrls" not in other.list_queues(QueueNamePrefix=queue_name)
    elsewhere = server.client(aws_access_key_id="111122223333", region_name="eu-central-1")
    for call, asked in (
        (elsewhere.send_message, {"QueueUrl": url, "MessageBody": "lost"}),
        (elsewhere.get_queue_url, owner),
    ):
        error = refused(call, **asked)
        assert error["Error"]["QueryErrorCode"] == "QueueDoesNotExist"


def test_queues_and_messages_are_there_after_a_restart(tmp_path):
    with serve("--data", str(tmp_path / "data")) as first:
        sqs = first.client()
        queue = sqs.create_queue(QueueName="orders", Attributes={"VisibilityTimeout": "77"})
        url = queue["QueueUrl"]
        for body in ("one", "two", "three"):
            sqs.send_message(QueueUrl=url, MessageBody=body)
        (message,) = sqs.receive_message(QueueUrl=url)["Messages"]
        sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
        (held,) = sqs.receive_message(QueueUrl=url)["Messages"]
        sqs.close()
        assert first.stop() == 0
    with serve("--data", str(tmp_path / "data")) as second:
        sqs = second.client()
        url = sqs.get_queue_url(QueueName="orders")["QueueUrl"]
        shown = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
        assert shown["VisibilityTimeout"] == "77"
        assert shown["ApproximateNumberOfMessages"] == "1"
        (last,) = sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10)["Messages"]
        assert last["Body"] == "three"
        # A receipt from before the restart is still valid.
        sqs.delete_message(QueueUrl=url, ReceiptHandle=held["ReceiptHandle"])
        shown = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
        assert shown["ApproximateNumberOfMessagesNotVisible"] == "1"
        sqs.close()
        assert second.stop() == 0


def test_a_server_starts_with_less_than_two_seconds_of_processor_time(tmp_path):
    with serve("--data", str(tmp_path / "data")) as server:
        # The documented start-up time is 0.5 s on an idle machine.
        assert cpu_s(server.process.pid) < 2
        assert "signatures  not checked" in server.output
    assert os.path.isdir(tmp_path / "data")
