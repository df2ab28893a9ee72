"""The JSON protocol, byte for byte."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.sqs import json as sqs_json
from penstock.wire.sqs import model as model
from penstock.wire.sqs.errors import (
    INVALID_PARAMETER_VALUE,
    QUEUE_DOES_NOT_EXIST,
    SERVICE_UNAVAILABLE,
    Refusal,
)
from penstock.wire.sqs.json import decode, encode, encode_refusal
from tests.measure import SLACK, least_cpu_s

REQUESTS = [
    (
        "AmazonSQS.SendMessage",
        (
            b'{"QueueUrl":"u","MessageBody":"b","DelaySeconds":5,"Unknown":[1,{"a":2}],'
            b'"MessageAttributes":{"n":{"DataType":"Binary","BinaryValue":"AP8="}}}'
        ),
        model.SendMessageRequest(
            "u",
            "b",
            5,
            {"n": model.AttributeValue(binary_value=b"\x00\xff", data_type="Binary")},
        ),
    ),
    ("AmazonSQS.ListQueues", b"", model.ListQueuesRequest()),
    ("AmazonSQS.ListQueues", b'{"MaxResults":null}', model.ListQueuesRequest()),
    (
        "AmazonSQS.CreateQueue",
        b'{"QueueName":"q","Attributes":{"DelaySeconds":"1"},"tags":{"a":"b"}}',
        model.CreateQueueRequest("q", {"DelaySeconds": "1"}, {"a": "b"}),
    ),
    (
        "AmazonSQS.DeleteMessageBatch",
        b'{"QueueUrl":"u","Entries":[{"Id":"1","ReceiptHandle":"r"}]}',
        model.DeleteMessageBatchRequest("u", [model.DeleteEntry("1", "r")]),
    ),
    (
        "AmazonSQS.AddPermission",
        b'{"QueueUrl":"u","Label":"l","AWSAccountIds":["1"],"Actions":["*"]}',
        model.AddPermissionRequest("u", "l", ["1"], ["*"]),
    ),
]


@pytest.mark.parametrize(("target", "body", "expected"), REQUESTS)
def test_a_request_is_read_as_its_action(target, body, expected):
    action, asked = decode(target, body)
    assert f"AmazonSQS.{action.name}" == target
    assert asked == expected


ANSWERS = [
    (None, b""),
    (model.ReceiveResult([]), b"{}"),
    (model.QueueUrlResult("http://h/0/q"), b'{"QueueUrl":"http://h/0/q"}'),
    (model.SourceUrlsResult([]), b'{"queueUrls":[]}'),
    (
        model.SendResult("m", "i", "a", "s", "00000000000000000007"),
        (
            b'{"MD5OfMessageBody":"m","MessageId":"i","MD5OfMessageAttributes":"a",'
            b'"MD5OfMessageSystemAttributes":"s","SequenceNumber":"00000000000000000007"}'
        ),
    ),
    (
        model.ReceiveResult(
            [
                model.Received(
                    "i",
                    "r",
                    "m",
                    'a"b\n\u2028',
                    {"SenderId": "0"},
                    "d",
                    {"n": model.AttributeValue(binary_value=b"\x00", data_type="Binary")},
                )
            ]
        ),
        (
            b'{"Messages":[{"MessageId":"i","ReceiptHandle":"r","MD5OfBody":"m",'
            b'"Body":"a\\"b\\n\xe2\x80\xa8","Attributes":{"SenderId":"0"},'
            b'"MD5OfMessageAttributes":"d",'
            b'"MessageAttributes":{"n":{"BinaryValue":"AA==","DataType":"Binary"}}}]}'
        ),
    ),
    (
        model.BatchResult(
            [model.ResultEntry("1")], [model.ErrorEntry("2", True, "Code", "Message")]
        ),
        (
            b'{"Successful":[{"Id":"1"}],'
            b'"Failed":[{"Id":"2","SenderFault":true,"Code":"Code","Message":"Message"}]}'
        ),
    ),
]


@pytest.mark.parametrize(("result", "body"), ANSWERS)
def test_a_result_is_written_as_amazon_writes_it(result, body):
    assert encode(result) == body


def test_a_refusal_has_the_error_names_of_both_protocols():
    assert encode_refusal(Refusal(QUEUE_DOES_NOT_EXIST, "gone")) == (
        b'{"__type":"com.amazonaws.sqs#QueueDoesNotExist","message":"gone"}',
        "AWS.SimpleQueueService.NonExistentQueue;Sender",
    )
    assert encode_refusal(Refusal(INVALID_PARAMETER_VALUE, "bad")) == (
        b'{"__type":"com.amazon.coral.service#InvalidParameterValueException","message":"bad"}',
        "InvalidParameterValue;Sender",
    )
    assert encode_refusal(Refusal(SERVICE_UNAVAILABLE, ""))[1] == "ServiceUnavailable;Receiver"


@pytest.mark.parametrize(
    ("target", "body", "name"),
    [
        ("AmazonSQS.Explode", b"{}", "UnknownOperationException"),
        ("SendMessage", b"{}", "UnknownOperationException"),
        ("", b"{}", "UnknownOperationException"),
        ("AmazonSQS.ListQueues", b"{", "SerializationException"),
        ("AmazonSQS.ListQueues", b"[]", "SerializationException"),
        ("AmazonSQS.ListQueues", b'{"MaxResults":"1"}', "SerializationException"),
        ("AmazonSQS.ListQueues", b'{"x":' + b"[" * 99_999, "SerializationException"),
        ("AmazonSQS.SendMessage", b'{"MessageBody":"\\ud800"}', "SerializationException"),
        ("AmazonSQS.SendMessage", b'{"MessageBody":"\xff"}', "SerializationException"),
    ],
)
def test_a_request_that_cannot_be_read_is_refused(target, body, name):
    with pytest.raises(Refusal) as caught:
        decode(target, body)
    assert caught.value.fault.name == name


def test_numbers_and_booleans_are_accepted_where_text_is_expected():
    body = (
        b'{"QueueUrl":"u","MessageBody":0,"DelaySeconds":3,"MessageAttributes":'
        b'{"a":{"DataType":"String","StringValue":true},"b":{"DataType":"Number","StringValue":1.5}}}'
    )
    _, asked = decode("AmazonSQS.SendMessage", body)
    assert isinstance(asked, model.SendMessageRequest)
    assert (asked.message_body, asked.delay_seconds) == ("0", 3)
    assert asked.message_attributes is not None
    values = {name: value.string_value for name, value in asked.message_attributes.items()}
    assert values == {"a": "true", "b": "1.5"}
    body = b'{"QueueName":"q","Attributes":{"DelaySeconds":400},"more":[1]}'
    _, asked = decode("AmazonSQS.CreateQueue", body)
    assert isinstance(asked, model.CreateQueueRequest)
    assert asked.attributes == {"DelaySeconds": "400"}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"MessageBody":1,"DelaySeconds":"x"}', "Expected `str | null`, got `int`"),
        (b'{"MessageBody":{"a":1}}', "Start of structure or map found where not expected."),
        (b'{"MessageBody":1,"MessageAttributes":{"a":[]}}', "Expected `str | null`, got `int`"),
        (b'{"MessageBody":1,"deep":' + b"[" * 20_000, "Expected `str | null`, got `int`"),
        (b'{"DelaySeconds":false}', "FALSE_VALUE can not be converted to an Integer"),
        (b'{"DelaySeconds":false,"x":"\xff"}', "TRUE_VALUE can not be converted to an Integer"),
        (b'{"DelaySeconds":false,', "TRUE_VALUE can not be converted to an Integer"),
    ],
)
def test_a_value_of_another_type_is_refused(body, said):
    with pytest.raises(Refusal) as caught:
        decode("AmazonSQS.SendMessage", body)
    assert caught.value.message.startswith(said)


def test_a_wrong_value_is_refused_even_if_its_field_is_given_twice():
    body = b'{"Entries":[{"VisibilityTimeout":false}],"Entries":5}'
    with pytest.raises(Refusal) as caught:
        decode("AmazonSQS.ChangeMessageVisibilityBatch", body)
    assert caught.value.message == "TRUE_VALUE can not be converted to an Integer"


MEBIBYTE = 1_048_576


def filled(start, item, end, size_bytes=8 * MEBIBYTE):
    """A body of nearly that size, most of which is one item again and again."""
    return start + item * ((size_bytes - len(start) - len(end)) // len(item)) + end


MANY_VALUES = {
    "empty entries": ("SendMessageBatch", b'{"QueueUrl":"x","Entries":[', b"{},", b"{}]}"),
    "entries with a number": (
        *("SendMessageBatch", b'{"QueueUrl":"x","Entries":[', b'{"Id":1},', b"{}]}"),
    ),
    "one number, empty entries": (
        *("SendMessageBatch", b'{"QueueUrl":"x","Entries":[{"Id":1},', b"{},", b"{}]}"),
    ),
    "nulls": ("SendMessageBatch", b'{"QueueUrl":"x","Entries":[', b"null,", b"{}]}"),
    "names": ("ReceiveMessage", b'{"MessageAttributeNames":[', b'"ab",', b'""]}'),
    "numbers for names": ("ReceiveMessage", b'{"MessageAttributeNames":[', b"1,", b'""]}'),
    "unknown lists": ("ListQueues", b'{"x":[', b"[],", b"1]}"),
    "a boolean, then lists": ("ListQueues", b'{"MaxResults":true,"x":[', b"[],", b"1]}"),
    "the same key": ("ListQueues", b"{", b'"MaxResults":1,', b'"a":1}'),
    "spaces": ("ListQueues", b"{", b" ", b"}"),
    "a long number": ("ListQueues", b'{"MaxResults":', b"9", b"}"),
    "a long fraction": ("CreateQueue", b'{"QueueName":0.', b"9", b"}"),
    "an unclosed string": ("ListQueues", b'{"', b"9", b""),
    "quotes": ("ListQueues", b"{", b'"', b"}"),
}
LONG_STRINGS = {
    "plain": b"a",
    "escaped": b"\\u0041",
    "escaped quotes": b'\\"',
    "escaped backslashes": b"\\\\",
    "both": b'\\\\\\"',
    "two bytes each": "\u00fc".encode(),
    "no UTF-8": b"\xff",
}


@pytest.mark.parametrize("size_bytes", [32 * 1024, 8 * MEBIBYTE])
@pytest.mark.parametrize("case", MANY_VALUES)
def test_no_body_of_many_values_takes_longer_than_50_ms(case, size_bytes):
    """Row 20: a small one is decoded, a large one is refused for its structure."""
    action, start, item, end = MANY_VALUES[case]
    body = filled(start, item, end, size_bytes)
    assert least_cpu_s(lambda: decode(f"AmazonSQS.{action}", body), Refusal) <= 0.05 * SLACK
    if size_bytes > sqs_json.SMALL_BYTES:
        with pytest.raises(Refusal) as caught:
            decode(f"AmazonSQS.{action}", body)
        assert caught.value.fault.name == "SerializationException"


@pytest.mark.parametrize("case", LONG_STRINGS)
def test_no_long_string_takes_longer_than_50_ms(case):
    """Row 20."""
    body = filled(b'{"QueueUrl":"x","MessageBody":"', LONG_STRINGS[case], b'"}')
    assert least_cpu_s(lambda: decode("AmazonSQS.SendMessage", body), Refusal) <= 0.05 * SLACK


@pytest.mark.parametrize("text", ['"', "\\", '\\"', "<", "\u00fc", "{[,]}", '{"a":"b"}'])
def test_a_megabyte_of_any_character_is_decoded(text):
    content = text * (MEBIBYTE // len(text.encode()))
    asked = {"QueueUrl": "u", "MessageBody": content}
    escaped = "".join(f"\\u{ord(each):04x}" for each in text) * (len(content) // len(text))
    for body in (
        json.dumps(asked).encode(),
        msgspec.json.encode(asked),
        b'{"QueueUrl":"u","MessageBody":"%s"}' % escaped.encode(),
    ):
        _, decoded = decode("AmazonSQS.SendMessage", body)
        assert decoded == model.SendMessageRequest("u", content)


@given(st.lists(st.text('"\\a{[,')), st.integers(0, 3))
def test_bytes_outside_strings_are_counted_correctly(texts, indent):
    """Every string is long, so whatever was taken for structure by mistake would be too much."""
    texts = [text + "{" * sqs_json.SMALL_BYTES + text for text in texts]
    body = json.dumps({"MessageAttributeNames": texts}, indent=indent or None).encode()
    _, decoded = decode("AmazonSQS.ReceiveMessage", body)
    assert decoded == model.ReceiveMessageRequest(message_attribute_names=texts)
