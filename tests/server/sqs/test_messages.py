"""Messages over both protocols: sent, received, delayed, hidden, deleted, also in batches."""

import pytest

from tests.server.sqs.asking import bodies, entries, make, receive, refused, send, shown


def test_a_receipt_of_an_older_receive_deletes_nothing(local, either):
    url = make(either, VisibilityTimeout="5")
    send(either, url)
    (old,) = receive(either, url)
    local.clock.advance(seconds=5)
    (new,) = receive(either, url)
    either.delete_message(QueueUrl=url, ReceiptHandle=old["ReceiptHandle"])
    hidden = shown(either, url, "ApproximateNumberOfMessagesNotVisible")
    assert hidden == {"ApproximateNumberOfMessagesNotVisible": "1"}
    either.delete_message(QueueUrl=url, ReceiptHandle=new["ReceiptHandle"])
    either.delete_message(QueueUrl=url, ReceiptHandle=new["ReceiptHandle"])
    hidden = shown(either, url, "ApproximateNumberOfMessagesNotVisible")
    assert hidden == {"ApproximateNumberOfMessagesNotVisible": "0"}


def test_a_receipt_of_another_queue_or_a_forged_one_is_invalid(either):
    one, other = make(either, "one"), make(either, "other")
    send(either, one)
    (message,) = receive(either, one)
    for receipt in (message["ReceiptHandle"], "forged", "0" * 80):
        for call, more in (
            (either.delete_message, {}),
            (either.change_message_visibility, {"VisibilityTimeout": 0}),
        ):
            assert refused(call, QueueUrl=other, ReceiptHandle=receipt, **more) == (
                "ReceiptHandleIsInvalid",
                f'The input receipt handle "{receipt}" is not a valid receipt handle.',
            )


def test_visibility_can_be_changed_while_a_message_is_in_flight(local, either):
    url = make(either)
    send(either, url)
    (message,) = receive(either, url, VisibilityTimeout=10)
    held = {"QueueUrl": url, "ReceiptHandle": message["ReceiptHandle"]}
    either.change_message_visibility(**held, VisibilityTimeout=100)
    local.clock.advance(seconds=99)
    assert receive(either, url) == []
    either.change_message_visibility(**held, VisibilityTimeout=0)
    (again,) = receive(either, url, AttributeNames=["ApproximateReceiveCount"])
    assert again["Attributes"] == {"ApproximateReceiveCount": "2"}
    local.clock.advance(seconds=30)
    assert refused(either.change_message_visibility, **held, VisibilityTimeout=1)[0] == (
        "InvalidParameterValue"
    )
    (last,) = receive(either, url)
    held["ReceiptHandle"] = last["ReceiptHandle"]
    for value in (-1, 43_201):
        assert refused(either.change_message_visibility, **held, VisibilityTimeout=value)[0] == (
            "InvalidParameterValue"
        )
    either.delete_message(**held)
    code, message = refused(either.change_message_visibility, **held, VisibilityTimeout=1)
    assert code == "InvalidParameterValue"
    assert "Message does not exist or is not available" in message


def test_the_delay_of_a_message_replaces_that_of_its_queue(local, either):
    url = make(either, DelaySeconds="10")
    send(either, url, "queue's")
    send(either, url, "own", DelaySeconds=20)
    send(either, url, "none", DelaySeconds=0)
    assert bodies(either, url) == ["none"]
    local.clock.advance(seconds=10)
    assert bodies(either, url) == ["queue's"]
    local.clock.advance(seconds=10)
    assert bodies(either, url) == ["own"]
    for delay in (-1, 901):
        assert refused(either.send_message, QueueUrl=url, MessageBody="x", DelaySeconds=delay) == (
            "InvalidParameterValue",
            (
                f"Value {delay} for parameter DelaySeconds is invalid. "
                "Reason: DelaySeconds must be >= 0 and <= 900."
            ),
        )
    send(either, url, DelaySeconds=900)


def test_a_message_is_removed_when_its_retention_ends(local, either):
    url = make(either, MessageRetentionPeriod="60")
    send(either, url)
    local.clock.advance(seconds=59)
    assert bodies(either, url, VisibilityTimeout=0) == ["x"]
    local.clock.advance(seconds=1)
    assert bodies(either, url) == []


def test_a_body_may_be_one_mebibyte_and_no_more(either):
    url = make(either)
    largest = "x" * 1_048_576
    send(either, url, largest)
    assert bodies(either, url) == [largest]
    assert refused(either.send_message, QueueUrl=url, MessageBody=largest + "x") == (
        "InvalidParameterValue",
        "One or more parameters are invalid. Reason: Message must be shorter than 1048576 bytes.",
    )
    small = make(either, "small", MaximumMessageSize="1024")
    attribute = {"ab": {"DataType": "String", "StringValue": "c" * 16}}
    send(either, small, "x" * 1_000, MessageAttributes=attribute)
    assert refused(
        either.send_message, QueueUrl=small, MessageBody="x" * 1_001, MessageAttributes=attribute
    ) == (
        "InvalidParameterValue",
        "One or more parameters are invalid. Reason: Message must be shorter than 1024 bytes.",
    )


@pytest.mark.parametrize("body", ["\x00", "a\x08", "\x1f", "\ufffe", "\uffff"])
def test_characters_that_xml_does_not_allow_are_refused(either, body):
    url = make(either)
    code, message = refused(either.send_message, QueueUrl=url, MessageBody=body)
    assert code == "InvalidMessageContents"
    assert "#x9 | #xA | #xD" in message


@pytest.mark.parametrize("body", ["\t\r\n", "<a>&amp;\"'</a>", "\x7f\x85\u2028", "😀\ue000\ufffd"])
def test_every_other_character_is_received_as_it_was_sent(either, body):
    url = make(either)
    send(either, url, body)
    assert bodies(either, url) == [body]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("", {"DataType": "String", "StringValue": "x"}),
        ("AWS.x", {"DataType": "String", "StringValue": "x"}),
        ("amazon.x", {"DataType": "String", "StringValue": "x"}),
        (".x", {"DataType": "String", "StringValue": "x"}),
        ("x.", {"DataType": "String", "StringValue": "x"}),
        ("a..b", {"DataType": "String", "StringValue": "x"}),
        ("a b", {"DataType": "String", "StringValue": "x"}),
        ("a§b", {"DataType": "String", "StringValue": "x"}),
        ("a" * 257, {"DataType": "String", "StringValue": "x"}),
        ("a", {"DataType": "Text", "StringValue": "x"}),
        ("a", {"DataType": "", "StringValue": "x"}),
        ("a", {"DataType": "String"}),
        ("a", {"DataType": "Binary"}),
        ("a", {"DataType": "Binary", "StringValue": "x"}),
        ("a", {"DataType": "Number", "StringValue": "x"}),
        ("a", {"DataType": "String", "StringValue": "\x00"}),
        ("a", {"DataType": "String." + "x" * 256, "StringValue": "x"}),
    ],
)
def test_a_bad_message_attribute_is_refused(either, name, value):
    url = make(either)
    call = either.send_message
    code, _ = refused(call, QueueUrl=url, MessageBody="x", MessageAttributes={name: value})
    assert code == "InvalidParameterValue"
    assert bodies(either, url) == []


def test_ten_message_attributes_are_accepted_and_eleven_are_refused(either):
    url = make(either)
    ten = {f"attr.{n}øßä": {"DataType": "String", "StringValue": "x"} for n in range(10)}
    send(either, url, MessageAttributes=ten)
    (message,) = receive(either, url, MessageAttributeNames=["All"])
    assert message["MessageAttributes"] == ten
    eleven = {**ten, "a10": {"DataType": "String", "StringValue": "x"}}
    call = either.send_message
    code, _ = refused(call, QueueUrl=url, MessageBody="x", MessageAttributes=eleven)
    assert code == "InvalidParameterValue"


def test_message_attributes_are_chosen_by_name_and_by_prefix(either):
    url = make(either, VisibilityTimeout="0")
    # Names and values whose digests are known from Amazon.
    names = {"Hello": "There", "General": "Kenobi", "Help.Me": "Me"}
    sent = send(
        either,
        url,
        MessageAttributes={n: {"DataType": "String", "StringValue": v} for n, v in names.items()},
    )
    assert sent["MD5OfMessageAttributes"] == "4c360f3fdafd970e05fae2f149d997f5"
    for wanted, found, digest in [
        ([], set(), None),
        (["All"], set(names), "4c360f3fdafd970e05fae2f149d997f5"),
        ([".*"], set(names), "4c360f3fdafd970e05fae2f149d997f5"),
        (["*"], set(names), "4c360f3fdafd970e05fae2f149d997f5"),
        (["AWS."], set(), None),
        (["Nope"], set(), None),
        (["Hello", "General"], {"Hello", "General"}, "fca026605781cb4126a1e9044df24232"),
        (["Hello", "Nope"], {"Hello"}, "a311262e065454b75da111d535b8dacd"),
        (["Hel.*"], {"Hello", "Help.Me"}, "83fee93c1bcd8b9a5a923ffacdc636c7"),
    ]:
        (message,) = receive(either, url, MessageAttributeNames=wanted)
        assert set(message.get("MessageAttributes", {})) == found
        assert message.get("MD5OfMessageAttributes") == digest


def test_system_attributes_are_chosen_by_name(either):
    url = make(either, VisibilityTimeout="0")
    send(either, url)
    (message,) = receive(either, url, AttributeNames=["All"])
    assert message["Attributes"] == {
        "SenderId": "000000000000",
        "SentTimestamp": "1700000000000",
        "ApproximateFirstReceiveTimestamp": "1700000000000",
        "ApproximateReceiveCount": "1",
    }
    (message,) = receive(either, url, MessageSystemAttributeNames=["SenderId", "MessageGroupId"])
    assert message["Attributes"] == {"SenderId": "000000000000"}
    assert "Attributes" not in receive(either, url)[0]
    assert refused(either.receive_message, QueueUrl=url, AttributeNames=["Nope"]) == (
        "InvalidAttributeName",
        "Unknown Attribute Nope.",
    )


def test_only_the_trace_header_may_be_set_on_sending(either):
    url = make(either)
    call = either.send_message
    for name, value in [
        ("AWSTraceHeader", {"DataType": "Number", "StringValue": "1"}),
        ("SenderId", {"DataType": "String", "StringValue": "1"}),
    ]:
        code, _ = refused(
            call, QueueUrl=url, MessageBody="x", MessageSystemAttributes={name: value}
        )
        assert code == "InvalidParameterValue"


@pytest.mark.parametrize(
    ("parameter", "values", "reason"),
    [
        ("MaxNumberOfMessages", (0, 11, -1), "Must be between 1 and 10, if provided."),
        ("WaitTimeSeconds", (-1, 21), "Must be >= 0 and <= 20, if provided."),
        ("VisibilityTimeout", (-1, 43_201), "Must be >= 0 and <= 43200, if provided."),
    ],
)
def test_a_receive_with_a_parameter_outside_of_its_limits_is_refused(
    either, parameter, values, reason
):
    url = make(either)
    for value in values:
        assert refused(either.receive_message, QueueUrl=url, **{parameter: value}) == (
            "InvalidParameterValue",
            f"Value {value} for parameter {parameter} is invalid. Reason: {reason}",
        )


def test_a_batch_must_have_one_to_ten_entries_with_different_ids(either):
    url = make(either)
    send_batch = either.send_message_batch
    assert refused(send_batch, QueueUrl=url, Entries=[]) == (
        "AWS.SimpleQueueService.EmptyBatchRequest",
        "There should be at least one SendMessageBatchRequestEntry in the request.",
    )
    assert refused(send_batch, QueueUrl=url, Entries=entries(11)) == (
        "AWS.SimpleQueueService.TooManyEntriesInBatchRequest",
        "Maximum number of entries per request are 10. You have sent 11.",
    )
    assert refused(send_batch, QueueUrl=url, Entries=entries(1) * 2) == (
        "AWS.SimpleQueueService.BatchEntryIdsNotDistinct",
        "Id e0 repeated.",
    )
    for bad in ("", "a" * 81, "a:b", "ü"):
        assert refused(send_batch, QueueUrl=url, Entries=[{"Id": bad, "MessageBody": "x"}]) == (
            "AWS.SimpleQueueService.InvalidBatchEntryId",
            (
                "A batch entry id can only contain alphanumeric characters, hyphens and "
                "underscores. It can be at most 80 letters long."
            ),
        )
    assert len(send_batch(QueueUrl=url, Entries=entries(10))["Successful"]) == 10


def test_batches_of_deletes_and_visibility_changes_have_the_same_rules(either):
    url = make(either)
    for call, more in [
        (either.delete_message_batch, {}),
        (either.change_message_visibility_batch, {"VisibilityTimeout": 1}),
    ]:
        entry = {"ReceiptHandle": "x", **more}
        for given, expected in [
            ([], "EmptyBatchRequest"),
            ([{"Id": str(n), **entry} for n in range(11)], "TooManyEntriesInBatchRequest"),
            ([{"Id": "a", **entry}] * 2, "BatchEntryIdsNotDistinct"),
            ([{"Id": "a:b", **entry}], "InvalidBatchEntryId"),
        ]:
            code, _ = refused(call, QueueUrl=url, Entries=given)
            assert code == f"AWS.SimpleQueueService.{expected}"
        answer = call(QueueUrl=url, Entries=[{"Id": "a", **entry}])
        assert answer["Failed"][0]["Code"] == "ReceiptHandleIsInvalid"
        assert answer["Failed"][0]["SenderFault"] is True


def test_a_batch_larger_than_one_mebibyte_is_refused(either):
    url = make(either)
    half = "x" * 524_288
    pair = [{"Id": "1", "MessageBody": half}, {"Id": "2", "MessageBody": half}]
    assert len(either.send_message_batch(QueueUrl=url, Entries=pair)["Successful"]) == 2
    pair[1]["MessageBody"] += "x"
    assert refused(either.send_message_batch, QueueUrl=url, Entries=pair) == (
        "AWS.SimpleQueueService.BatchRequestTooLong",
        "Batch requests cannot be longer than 1048576 bytes. You have sent 1048577 bytes.",
    )
    assert len(bodies(either, url)) == 2


def test_bad_entries_of_a_batch_fail_and_the_good_ones_are_sent(either):
    url = make(either, MaximumMessageSize="1024")
    given = [
        {"Id": "good", "MessageBody": "x"},
        {"Id": "large", "MessageBody": "x" * 1_025},
        {"Id": "late", "MessageBody": "x", "DelaySeconds": 901},
    ]
    answer = either.send_message_batch(QueueUrl=url, Entries=given)
    assert [entry["Id"] for entry in answer["Successful"]] == ["good"]
    assert [(entry["Id"], entry["Code"]) for entry in answer["Failed"]] == [
        ("large", "InvalidParameterValue"),
        ("late", "InvalidParameterValue"),
    ]


def test_a_queues_name_is_accepted_as_its_url(local, either):
    url = make(either, "by-name")
    assert send(either, "by-name", "hello")["MessageId"]
    assert bodies(either, url) == ["hello"]
    assert refused(either.get_queue_attributes, QueueUrl="none")[0] == (
        "AWS.SimpleQueueService.NonExistentQueue"
    )
    other = local.client(aws_access_key_id="111122223333")
    assert refused(other.get_queue_attributes, QueueUrl="by-name")[0] == (
        "AWS.SimpleQueueService.NonExistentQueue"
    )


def test_the_trace_header_of_a_request_is_received_with_its_message(either):
    trace = "Root=1-3152b799-8954dae64eda91bc9a23a7e8;Parent=7fa8c0f79203be72;Sampled=1"

    def add(request, **_):
        request.headers["X-Amzn-Trace-Id"] = trace

    url = make(either)
    either.meta.events.register("before-send.sqs.SendMessage", add)
    sent = send(either, url)
    assert "MD5OfMessageSystemAttributes" not in sent
    given = {"AWSTraceHeader": {"DataType": "String", "StringValue": "Root=mine"}}
    send(either, url, MessageSystemAttributes=given)
    options = {"MaxNumberOfMessages": 10, "AttributeNames": ["AWSTraceHeader"]}
    first, second = receive(either, url, **options)
    assert first["Attributes"] == {"AWSTraceHeader": trace}
    assert second["Attributes"] == {"AWSTraceHeader": "Root=mine"}
