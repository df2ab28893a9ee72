"""FIFO queues and groups over both protocols."""

from tests.server.sqs.asking import (
    bodies,
    entries,
    make_fifo,
    push,
    receive,
    refused,
)


def test_a_fifo_queue_needs_a_group_and_a_dedup_id_or_dedup_by_content(either):
    url = make_fifo(either)
    call = either.send_message
    assert refused(call, QueueUrl=url, MessageBody="x", MessageDeduplicationId="1") == (
        "MissingParameter",
        "The request must contain the parameter MessageGroupId.",
    )
    needs = (
        "InvalidParameterValue",
        (
            "The queue should either have ContentBasedDeduplication enabled or "
            "MessageDeduplicationId provided explicitly"
        ),
    )
    assert refused(call, QueueUrl=url, MessageBody="x", MessageGroupId="g") == needs
    batch = either.send_message_batch
    assert refused(batch, QueueUrl=url, Entries=entries(1, MessageGroupId="g")) == needs
    assert refused(batch, QueueUrl=url, Entries=entries(1, MessageDeduplicationId="d")) == (
        "InvalidParameterValue",
        "The request must contain the parameter MessageGroupId.",
    )
    assert refused(
        call,
        QueueUrl=url,
        MessageBody="x",
        MessageGroupId="g",
        MessageDeduplicationId="d",
        DelaySeconds=2,
    ) == (
        "InvalidParameterValue",
        (
            "Value 2 for parameter DelaySeconds is invalid. "
            "Reason: The request include parameter that is not valid for this queue type."
        ),
    )


def test_a_group_is_received_in_order_and_blocked_while_a_message_is_in_flight(local, either):
    url = make_fifo(either, VisibilityTimeout="10")
    sent = [
        push(either, url, body, group) for body, group in [("a1", "a"), ("a2", "a"), ("b1", "b")]
    ]
    numbers = [answer["SequenceNumber"] for answer in sent]
    assert numbers == sorted(numbers)
    # Twenty digits, also if it is read as a number; it must not contain a part of an account id.
    assert {len(str(int(number))) for number in numbers} == {20}
    assert "000000" not in numbers[0]
    (first,) = receive(either, url, AttributeNames=["All"])
    assert first["Body"] == "a1"
    assert first["Attributes"]["SequenceNumber"] == numbers[0]
    assert first["Attributes"]["MessageGroupId"] == "a"
    assert first["Attributes"]["MessageDeduplicationId"] == "a1"
    assert bodies(either, url) == ["b1"]
    local.clock.advance(seconds=10)
    assert bodies(either, url) == ["a1", "a2", "b1"]
    assert refused(either.delete_message, QueueUrl=url, ReceiptHandle=first["ReceiptHandle"]) == (
        "InvalidParameterValue",
        (
            f"Value {first['ReceiptHandle']} for parameter ReceiptHandle is invalid. "
            "Reason: The receipt handle has expired."
        ),
    )


def test_a_repeated_receive_gives_the_same_messages_and_receipts(local, either):
    url = make_fifo(either, VisibilityTimeout="30")
    push(either, url, "a")
    push(either, url, "b")
    attempt = {"ReceiveRequestAttemptId": "try-1", "MaxNumberOfMessages": 10}
    first = receive(either, url, **attempt)
    local.clock.advance(seconds=20)
    again = receive(either, url, **attempt)
    assert [m["ReceiptHandle"] for m in again] == [m["ReceiptHandle"] for m in first]
    # The repeated receive hides them for another thirty seconds.
    local.clock.advance(seconds=20)
    assert bodies(either, url) == []
    either.delete_message(QueueUrl=url, ReceiptHandle=first[0]["ReceiptHandle"])
    assert refused(either.receive_message, QueueUrl=url, **attempt)[0] == "InvalidParameterValue"
    local.clock.advance(seconds=300)
    assert bodies(either, url, **attempt) == ["b"]


def test_a_missing_group_is_refused_before_any_other_fault(either):
    url = make_fifo(either)
    assert refused(either.send_message_batch, QueueUrl=url, Entries=entries(1)) == (
        "InvalidParameterValue",
        "The request must contain the parameter MessageGroupId.",
    )
