"""Messages: bodies, attributes, digests, delays, retention, and the limits of each."""

import hashlib

from penstock.testing.sqs.checks import check, expect, require
from penstock.testing.sqs.target import CheckedServer, entries

SEND = "send and receive"
LIMITS = "limits of a message"
ATTRIBUTES = "message attributes and MD5"
DELAYS = "delays and retention"
TEXT = {"DataType": "String", "StringValue": "x"}
KIB, MIB = 1_024, 1_048_576


@check(SEND)
def a_message_is_sent_received_and_deleted(target: CheckedServer) -> None:
    """SendMessage, ReceiveMessage, DeleteMessage: one id and one body, until it is deleted."""
    url = target.queue()
    sent = target.send(url, "grüße")
    message = target.receive_one(url)
    found = (message["Body"], message["MessageId"])
    expect(found, ("grüße", sent["MessageId"]), "the message")
    expect(target.receive(url), [], "a receive while it is in flight")
    target.delete(url, message)
    left = [target.count(url, state) for state in ("", "NotVisible")]
    expect(left, [0, 0], "what is left")


@check(ATTRIBUTES)
def the_digest_of_a_body_is_its_md5(target: CheckedServer) -> None:
    """MD5OfMessageBody and MD5OfBody: of the body's bytes in UTF-8, for the SDK to compare."""
    url = target.queue()
    digest = hashlib.md5("grüße".encode()).hexdigest()
    expect(target.send(url, "grüße")["MD5OfMessageBody"], digest, "MD5OfMessageBody")
    expect(target.receive_one(url)["MD5OfBody"], digest, "MD5OfBody")


@check(SEND)
def a_receive_of_an_empty_queue_gives_none(target: CheckedServer) -> None:
    """ReceiveMessage: an empty queue gives an answer without messages, not an error."""
    expect(target.receive(target.queue(), WaitTimeSeconds=0), [], "the answer")


@check(SEND)
def a_receive_gives_one_message_unless_more_are_asked_for(target: CheckedServer) -> None:
    """ReceiveMessage, MaxNumberOfMessages: 1 is the default, never more than asked are given."""
    url = target.queue()
    target.client.send_message_batch(QueueUrl=url, Entries=entries(5))
    expect(len(target.receive(url)), 1, "the number without a parameter")
    found = len(target.receive(url, MaxNumberOfMessages=3))
    require(1 <= found <= 3, f"of 3 asked for, {found} are given")


def _refused_receives(
    target: CheckedServer, name: str, values: tuple[int, ...], reason: str
) -> None:
    url = target.queue()
    for value in values:
        target.refuses(
            target.client.receive_message,
            "InvalidParameterValue",
            f"Value {value} for parameter {name} is invalid. Reason: {reason}",
            QueueUrl=url,
            **{name: value},
        )


@check(LIMITS)
def a_receive_asks_for_1_to_10_messages(target: CheckedServer) -> None:
    """ReceiveMessage, MaxNumberOfMessages: valid values are 1 to 10."""
    reason = "Must be between 1 and 10, if provided."
    _refused_receives(target, "MaxNumberOfMessages", (0, 11, -1), reason)


@check(LIMITS)
def a_receive_waits_0_to_20_seconds(target: CheckedServer) -> None:
    """ReceiveMessage, WaitTimeSeconds: at most 20."""
    reason = "Must be >= 0 and <= 20, if provided."
    _refused_receives(target, "WaitTimeSeconds", (-1, 21), reason)


@check(LIMITS)
def a_receive_hides_for_0_to_43200_seconds(target: CheckedServer) -> None:
    """ReceiveMessage, VisibilityTimeout: 0 to 43,200."""
    reason = "Must be >= 0 and <= 43200, if provided."
    _refused_receives(target, "VisibilityTimeout", (-1, 43_201), reason)


@check(LIMITS)
def a_message_may_have_one_mebibyte(target: CheckedServer) -> None:
    """SendMessage: a body from one character to 1 MiB."""
    url = target.queue()
    largest = "x" * MIB
    target.send(url, largest)
    require(target.receive_one(url)["Body"] == largest, "the largest body is changed")


@check(LIMITS)
def a_message_of_more_than_one_mebibyte_is_refused(target: CheckedServer) -> None:
    """SendMessage: InvalidParameterValue for a body over 1 MiB, also by one byte."""
    url = target.queue()
    target.refuses(
        target.client.send_message,
        "InvalidParameterValue",
        "One or more parameters are invalid. Reason: Message must be shorter than 1048576 bytes.",
        QueueUrl=url,
        MessageBody="x" * (MIB + 1),
    )
    expect(target.receive(url), [], "what was stored")


@check(LIMITS)
def attributes_count_for_the_size_of_a_message(target: CheckedServer) -> None:
    """Quotas for messages: name, type and value of each attribute are part of the size."""
    url = target.queue(MaximumMessageSize="1024")
    attribute = {"ab": {"DataType": "String", "StringValue": "c" * 16}}
    target.send(url, "x" * 1_000, MessageAttributes=attribute)
    target.refuses(
        target.client.send_message,
        "InvalidParameterValue",
        "One or more parameters are invalid. Reason: Message must be shorter than 1024 bytes.",
        QueueUrl=url,
        MessageBody="x" * 1_001,
        MessageAttributes=attribute,
    )


@check(LIMITS)
def a_message_over_the_size_of_its_queue_is_refused(target: CheckedServer) -> None:
    """SetQueueAttributes, MaximumMessageSize: the most bytes before a message is refused."""
    url = target.queue(MaximumMessageSize="1024")
    target.send(url, "ü" * 512)
    target.refuses(
        target.client.send_message,
        "InvalidParameterValue",
        QueueUrl=url,
        MessageBody="ü" * 512 + "x",
    )


@check(LIMITS)
def an_empty_body_is_refused(target: CheckedServer) -> None:
    """SendMessage: the minimum size is one character."""
    target.refuses(
        target.client.send_message, "MissingParameter", QueueUrl=target.queue(), MessageBody=""
    )


@check(LIMITS)
def characters_that_xml_does_not_have_are_refused(target: CheckedServer) -> None:
    """SendMessage: InvalidMessageContents for characters outside of #x9, #xA, #xD, #x20 and on."""
    url = target.queue()
    for body in ("\x00", "a\x08", "\x1f", "\ufffe", "\uffff"):
        asked = {"QueueUrl": url, "MessageBody": body}
        text = target.refuses(target.client.send_message, "InvalidMessageContents", **asked)
        require(not target.texts or "#x9 | #xA | #xD" in text, f"the text is {text}")
    expect(target.receive(url), [], "what was stored")


@check(SEND)
def every_other_character_comes_back_as_it_was_sent(target: CheckedServer) -> None:
    """SendMessage: a body is XML, JSON or text with any of the allowed characters."""
    url = target.queue()
    for body in ("\t\r\n", "<a>&amp;\"'</a>", "\x7f\x85\u2028", "😀\ue000\ufffd", " x "):
        target.send(url, body)
        message = target.receive_one(url)
        expect(message["Body"], body, "the body")
        target.delete(url, message)


@check(ATTRIBUTES)
def attributes_of_every_type_come_back_as_they_were_sent(target: CheckedServer) -> None:
    """MessageAttributes: String, Number and Binary, each with a label of one's own if wanted."""
    url = target.queue()
    attributes = {
        "text": {"DataType": "String", "StringValue": "ü"},
        "number": {"DataType": "Number.float", "StringValue": "-1.5e3"},
        "bytes": {"DataType": "Binary.png", "BinaryValue": b"\x00\xff"},
    }
    target.send(url, MessageAttributes=attributes)
    message = target.receive_one(url, MessageAttributeNames=["All"])
    expect(message.get("MessageAttributes"), attributes, "MessageAttributes")


@check(ATTRIBUTES)
def the_digest_of_attributes_is_that_of_amazon(target: CheckedServer) -> None:
    """MD5OfMessageAttributes: over sorted names, types and values, each after its length."""
    url = target.queue()
    texts = {"Hello": "There", "General": "Kenobi", "Help.Me": "Me"}
    sent = target.send(
        url,
        MessageAttributes={
            name: {"DataType": "String", "StringValue": text} for name, text in texts.items()
        },
    )
    digest = "4c360f3fdafd970e05fae2f149d997f5"
    expect(sent.get("MD5OfMessageAttributes"), digest, "MD5OfMessageAttributes of the send")
    message = target.receive_one(url, MessageAttributeNames=["All"])
    expect(message.get("MD5OfMessageAttributes"), digest, "MD5OfMessageAttributes of the receive")


@check(ATTRIBUTES)
def attributes_are_chosen_by_name_and_by_prefix(target: CheckedServer) -> None:
    """ReceiveMessage, MessageAttributeNames: names, All or .*, or a prefix with .* at its end."""
    url = target.queue(VisibilityTimeout="0")
    names = {"Hello", "General", "Help.Me"}
    target.send(url, MessageAttributes=dict.fromkeys(names, TEXT))
    for wanted, found in (
        ([], set()),
        (["All"], names),
        ([".*"], names),
        (["Nope"], set()),
        (["Hello", "General"], {"Hello", "General"}),
        (["Hello", "Nope"], {"Hello"}),
        (["Hel.*"], {"Hello", "Help.Me"}),
    ):
        message = target.receive_one(url, MessageAttributeNames=wanted)
        expect(set(message.get("MessageAttributes", {})), found, f"what {wanted} gives")


@check(ATTRIBUTES)
def the_digest_of_a_receive_is_of_the_attributes_it_gives(target: CheckedServer) -> None:
    """ReceiveMessage: SDKs compare MD5OfMessageAttributes with the attributes they receive."""
    url = target.queue(VisibilityTimeout="0")
    texts = {"Hello": "There", "General": "Kenobi", "Help.Me": "Me"}
    given = {name: {"DataType": "String", "StringValue": text} for name, text in texts.items()}
    target.send(url, MessageAttributes=given)
    for wanted, digest in (
        ([], None),
        (["Hello", "General"], "fca026605781cb4126a1e9044df24232"),
        (["Hello", "Nope"], "a311262e065454b75da111d535b8dacd"),
        (["Hel.*"], "83fee93c1bcd8b9a5a923ffacdc636c7"),
    ):
        message = target.receive_one(url, MessageAttributeNames=wanted)
        expect(message.get("MD5OfMessageAttributes"), digest, f"the digest for {wanted}")


@check(ATTRIBUTES)
def a_message_has_at_most_ten_attributes(target: CheckedServer) -> None:
    """Quotas for messages: up to ten metadata attributes."""
    url = target.queue()
    ten = {f"attr.{number}": TEXT for number in range(10)}
    target.send(url, MessageAttributes=ten)
    message = target.receive_one(url, MessageAttributeNames=["All"])
    expect(message.get("MessageAttributes"), ten, "MessageAttributes")
    target.refuses(
        target.client.send_message,
        "InvalidParameterValue",
        "Number of message attributes [11] exceeds the allowed maximum [10].",
        QueueUrl=url,
        MessageBody="x",
        MessageAttributes={**ten, "eleven": TEXT},
    )


@check(ATTRIBUTES)
def names_of_attributes_follow_the_documented_form(target: CheckedServer) -> None:
    """Message attribute components: letters, digits, - _ . in order; not AWS. or Amazon.; 256."""
    url = target.queue()
    for name in ("", "AWS.x", "amazon.x", ".x", "x.", "a..b", "a b", "a§b", "a" * 257):
        target.refuses(
            target.client.send_message,
            "InvalidParameterValue",
            QueueUrl=url,
            MessageBody="x",
            MessageAttributes={name: TEXT},
        )
    expect(target.receive(url), [], "what was stored")


@check(ATTRIBUTES)
def a_value_must_fit_the_type_of_its_attribute(target: CheckedServer) -> None:
    """Message attribute data types: String, Number or Binary, a value that is one, not empty."""
    url = target.queue()
    for value in (
        {"DataType": "Text", "StringValue": "x"},
        {"DataType": "", "StringValue": "x"},
        {"DataType": "String"},
        {"DataType": "String", "StringValue": ""},
        {"DataType": "Binary"},
        {"DataType": "Binary", "StringValue": "x"},
        {"DataType": "Number", "StringValue": "x"},
        {"DataType": "String", "StringValue": "\x00"},
        {"DataType": "String." + "x" * 256, "StringValue": "x"},
    ):
        target.refuses(
            target.client.send_message,
            "InvalidParameterValue",
            QueueUrl=url,
            MessageBody="x",
            MessageAttributes={"a": value},
        )
    expect(target.receive(url), [], "what was stored")


@check(SEND)
def system_attributes_are_chosen_by_name(target: CheckedServer) -> None:
    """ReceiveMessage: MessageSystemAttributeNames chooses; All has sender, times and a count."""
    url = target.queue(VisibilityTimeout="0")
    target.send(url)
    # Over the Query protocol only the older name of the parameter is used.
    parameter = "MessageSystemAttributeNames" if target.protocol == "json" else "AttributeNames"
    shown = target.receive_one(url, **{parameter: ["All"]}).get("Attributes", {})
    expected = {
        "SenderId",
        "SentTimestamp",
        "ApproximateFirstReceiveTimestamp",
        "ApproximateReceiveCount",
    }
    expect(set(shown), expected, "the names")
    for name in ("SentTimestamp", "ApproximateFirstReceiveTimestamp"):
        require(len(shown[name]) == 13 and shown[name].isdigit(), f"{name} is no time in ms")
    some = target.receive_one(url, **{parameter: ["SentTimestamp", "MessageGroupId"]})
    expect(set(some.get("Attributes", {})), {"SentTimestamp"}, "what two names give")
    require(
        not target.receive_one(url).get("Attributes"), "attributes are given that nobody asked for"
    )


@check(SEND)
def the_older_name_of_the_system_attributes_is_understood(target: CheckedServer) -> None:
    """ReceiveMessage, AttributeNames: deprecated, and works as MessageSystemAttributeNames."""
    url = target.queue()
    target.send(url)
    shown = target.receive_one(url, AttributeNames=["ApproximateReceiveCount"])
    expect(shown.get("Attributes"), {"ApproximateReceiveCount": "1"}, "Attributes")


@check(SEND)
def a_system_attribute_that_there_is_not_is_refused(target: CheckedServer) -> None:
    """ReceiveMessage: AttributeNames has a list of valid values."""
    target.refuses(
        target.client.receive_message,
        "InvalidAttributeName",
        "Unknown Attribute Nope.",
        QueueUrl=target.queue(),
        AttributeNames=["Nope"],
    )


@check(SEND)
def receives_are_counted(target: CheckedServer) -> None:
    """ApproximateReceiveCount: how often a message was received without being deleted."""
    url = target.queue(VisibilityTimeout="0")
    target.send(url)
    counts = [
        target.receive_one(url, AttributeNames=["ApproximateReceiveCount"])["Attributes"]
        for _ in range(3)
    ]
    expect([each["ApproximateReceiveCount"] for each in counts], ["1", "2", "3"], "the counts")


@check(ATTRIBUTES)
def the_trace_header_is_the_only_system_attribute_of_a_send(target: CheckedServer) -> None:
    """SendMessage, MessageSystemAttributes: AWSTraceHeader only, of the type String."""
    url = target.queue()
    trace = {"AWSTraceHeader": {"DataType": "String", "StringValue": "Root=1-5759e988"}}
    sent = target.send(url, MessageSystemAttributes=trace)
    require(sent.get("MD5OfMessageSystemAttributes"), "there is no digest of it")
    shown = target.receive_one(url, AttributeNames=["AWSTraceHeader"])
    expect(shown.get("Attributes"), {"AWSTraceHeader": "Root=1-5759e988"}, "Attributes")
    for name, value in (
        ("AWSTraceHeader", {"DataType": "Number", "StringValue": "1"}),
        ("SenderId", {"DataType": "String", "StringValue": "1"}),
    ):
        target.refuses(
            target.client.send_message,
            "InvalidParameterValue",
            QueueUrl=url,
            MessageBody="x",
            MessageSystemAttributes={name: value},
        )


@check(DELAYS, wait_s=4)
def the_delay_of_a_message_replaces_that_of_its_queue(target: CheckedServer) -> None:
    """SendMessage, DelaySeconds: applies to this message; without it that of the queue does."""
    url = target.queue(DelaySeconds="2")
    first, second = target.span(2), target.span(4)
    target.send(url, "queue's")
    target.send(url, "own", DelaySeconds=4)
    target.send(url, "none", DelaySeconds=0)
    expect(target.bodies(url), ["none"], "what is received at once")
    expect(target.count(url, "Delayed"), 2, "ApproximateNumberOfMessagesDelayed")
    first.over()
    expect(target.bodies(url), ["queue's"], "what is received after 2 s")
    second.over()
    expect(target.bodies(url), ["own"], "what is received after 4 s")


@check(DELAYS)
def a_message_is_delayed_by_0_to_900_seconds(target: CheckedServer) -> None:
    """SendMessage, DelaySeconds: valid values are 0 to 900."""
    url = target.queue()
    target.send(url, DelaySeconds=900)
    for delay in (-1, 901):
        target.refuses(
            target.client.send_message,
            "InvalidParameterValue",
            f"Value {delay} for parameter DelaySeconds is invalid. Reason: "
            "DelaySeconds must be >= 0 and <= 900.",
            QueueUrl=url,
            MessageBody="x",
            DelaySeconds=delay,
        )


@check(DELAYS)
def a_change_of_the_delay_does_not_affect_messages_of_a_standard_queue(
    target: CheckedServer,
) -> None:
    """SetQueueAttributes: the delay of standard queues is not retroactive."""
    url = target.queue(DelaySeconds="900")
    target.send(url, "early")
    target.set(url, DelaySeconds="0")
    target.send(url, "later")
    expect(target.bodies(url), ["later"], "what is received")


@check(DELAYS, wait_s=61)
def a_message_is_removed_when_its_retention_ends(target: CheckedServer) -> None:
    """MessageRetentionPeriod: how long a message is kept, from the moment it was sent."""
    url = target.queue(MessageRetentionPeriod="60")
    minute = target.span(60)
    target.send(url)
    minute.nearly()
    expect(target.bodies(url, VisibilityTimeout=0), ["x"], "what is received before the end")
    minute.over()
    expect(target.bodies(url), [], "what is received after the end")
    expect(target.count(url), 0, "the count after the end")
