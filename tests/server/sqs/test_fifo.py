"""FIFO queues and groups over both protocols."""

import pytest

from tests.server.sqs.asking import (
    bodies,
    entries,
    make,
    make_fifo,
    push,
    receive,
    refused,
    send,
    shown,
)


def test_the_attributes_of_a_fifo_queue_include_fifo_queue(either):
    url = make_fifo(either, ContentBasedDeduplication="true")
    attributes = shown(either, url)
    assert attributes["FifoQueue"] == "true"
    assert attributes["ContentBasedDeduplication"] == "true"
    assert attributes["DeduplicationScope"] == "queue"
    assert attributes["FifoThroughputLimit"] == "perQueue"
    change = {"DeduplicationScope": "messageGroup", "FifoThroughputLimit": "perMessageGroupId"}
    either.set_queue_attributes(QueueUrl=url, Attributes=change)
    assert {name: shown(either, url)[name] for name in change} == change
    assert refused(
        either.set_queue_attributes, QueueUrl=url, Attributes={"DeduplicationScope": "queue"}
    )[0] == ("InvalidAttributeValue")


def test_the_type_of_a_queue_cannot_be_changed(either):
    fifo, standard = make_fifo(either), make(either)
    change = either.set_queue_attributes
    assert refused(change, QueueUrl=standard, Attributes={"FifoQueue": "true"}) == (
        "InvalidAttributeName",
        "Unknown Attribute FifoQueue.",
    )
    assert refused(change, QueueUrl=fifo, Attributes={"FifoQueue": "false"}) == (
        "InvalidAttributeValue",
        "Invalid value for the parameter FifoQueue. Reason: Modifying queue type is not supported.",
    )
    for name in ("DeduplicationScope", "FifoThroughputLimit"):
        assert refused(change, QueueUrl=standard, Attributes={name: "queue"}) == (
            "InvalidAttributeName",
            f"You can specify the {name} only when FifoQueue is set to true.",
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


@pytest.mark.parametrize("parameter", ["MessageGroupId", "MessageDeduplicationId"])
def test_ids_are_of_plain_characters_and_not_too_long(either, parameter):
    url = make_fifo(either)
    given = {"MessageGroupId": "g", "MessageDeduplicationId": "d"}
    send(either, url, **{**given, parameter: "!" * 128})
    for bad in ("x" * 129, "ü", "a b", "\n"):
        code, message = refused(
            either.send_message, QueueUrl=url, MessageBody="x", **{**given, parameter: bad}
        )
        assert code == "InvalidParameterValue"
        assert f"{parameter} can only include alphanumeric and punctuation characters" in message


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


def test_duplicates_within_five_minutes_are_accepted_and_not_delivered(local, either):
    url = make_fifo(either)
    first = push(either, url, "x", MessageDeduplicationId="d")
    assert push(either, url, "y", MessageDeduplicationId="d")["MessageId"] == first["MessageId"]
    (message,) = receive(either, url)
    either.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    local.clock.advance(seconds=299)
    push(either, url, "z", MessageDeduplicationId="d")
    assert bodies(either, url) == []
    local.clock.advance(seconds=1)
    push(either, url, "later", MessageDeduplicationId="d")
    assert bodies(either, url) == ["later"]


def test_duplicates_are_recognised_by_content_and_by_group_if_configured(either):
    url = make_fifo(either, ContentBasedDeduplication="true", DeduplicationScope="messageGroup")
    for group in ("a", "a", "b"):
        send(either, url, "same", MessageGroupId=group)
    assert bodies(either, url) == ["same", "same"]


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


def test_parameters_of_fifo_queues_are_refused_for_standard_queues(either):
    url = make(either)
    for call, more in [
        (either.send_message, {"MessageBody": "x", "MessageDeduplicationId": "d"}),
        (either.receive_message, {"ReceiveRequestAttemptId": "d"}),
    ]:
        code, message = refused(call, QueueUrl=url, **more)
        assert code == "InvalidParameterValue"
        assert "not valid for this queue type" in message


def test_a_noisy_group_does_not_starve_the_others(either):
    url = make(either)
    for _ in range(10):
        either.send_message_batch(QueueUrl=url, Entries=entries(10, MessageGroupId="noisy"))
    for _ in range(4):
        receive(either, url, MaxNumberOfMessages=10)
    send(either, url, "quiet", MessageGroupId="quiet")
    (message,) = receive(either, url, AttributeNames=["MessageGroupId"])
    assert (message["Body"], message["Attributes"]) == ("quiet", {"MessageGroupId": "quiet"})


@pytest.mark.parametrize(
    "entry",
    [
        {"MessageBody": ""},
        {"DelaySeconds": 3},
        {"MessageBody": "x" * 1025},
        {"MessageGroupId": "a b"},
    ],
)
def test_a_bad_message_of_a_batch_is_refused_and_the_others_are_sent(either, entry):
    url = make_fifo(either, ContentBasedDeduplication="true", MaximumMessageSize="1024")
    first, second = entries(2, MessageGroupId="g")
    batch = [{**first, "MessageBody": "first"}, {**second, "MessageBody": "second", **entry}]
    answer = either.send_message_batch(QueueUrl=url, Entries=batch)
    assert [each["Id"] for each in answer["Successful"]] == [first["Id"]]
    assert [(each["Id"], each["SenderFault"]) for each in answer["Failed"]] == [
        (second["Id"], True)
    ]
    assert bodies(either, url) == ["first"]


def test_a_missing_group_is_refused_before_any_other_fault(either):
    url = make_fifo(either)
    assert refused(either.send_message_batch, QueueUrl=url, Entries=entries(1)) == (
        "InvalidParameterValue",
        "The request must contain the parameter MessageGroupId.",
    )
