"""Messages over both protocols: sent, received, delayed, hidden, deleted, also in batches."""

from tests.server.sqs.asking import bodies, make, receive, refused, send, shown


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
