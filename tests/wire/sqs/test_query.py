"""The Query protocol, byte for byte."""

import re
from functools import partial
from urllib.parse import parse_qsl, quote, quote_plus, urlencode
from xml.etree.ElementTree import fromstring

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.sqs import model as model
from penstock.wire.sqs import query as query
from penstock.wire.sqs.errors import QUEUE_DOES_NOT_EXIST, Refusal
from penstock.wire.sqs.model import ACTIONS
from penstock.wire.sqs.query import (
    decode,
    encode,
    encode_as_json,
    encode_refusal,
    encode_refusal_as_json,
)
from tests.measure import SLACK, least_cpu_s

FORMS = [
    (
        (
            "Action=SendMessage&QueueUrl=u&MessageBody=a+b%2B&DelaySeconds=5"
            "&MessageAttribute.1.Name=n&MessageAttribute.1.Value.DataType=Binary"
            "&MessageAttribute.1.Value.BinaryValue=AP8%3D"
            "&MessageSystemAttribute.1.Name=AWSTraceHeader"
            "&MessageSystemAttribute.1.Value.DataType=String"
            "&MessageSystemAttribute.1.Value.StringValue=t&Version=2012-11-05"
        ),
        model.SendMessageRequest(
            "u",
            "a b+",
            5,
            {"n": model.AttributeValue(binary_value=b"\x00\xff", data_type="Binary")},
            {"AWSTraceHeader": model.AttributeValue(string_value="t", data_type="String")},
        ),
    ),
    (
        (
            "Action=CreateQueue&QueueName=q&Attribute.1.Name=DelaySeconds&Attribute.1.Value=1"
            "&Attribute.2.Name=Policy&Attribute.2.Value=&Tag.1.Key=a&Tag.1.Value=b"
        ),
        model.CreateQueueRequest("q", {"DelaySeconds": "1", "Policy": ""}, {"a": "b"}),
    ),
    (
        (
            "Action=GetQueueAttributes&QueueUrl=u&AttributeName.2=b&AttributeName.1=a"
            "&AttributeName.10=c"
        ),
        model.GetQueueAttributesRequest("u", ["a", "b", "c"]),
    ),
    (
        (
            "Action=SendMessageBatch&QueueUrl=u"
            "&SendMessageBatchRequestEntry.1.Id=1&SendMessageBatchRequestEntry.1.MessageBody=x"
            "&SendMessageBatchRequestEntry.1.MessageAttribute.1.Name=n"
            "&SendMessageBatchRequestEntry.1.MessageAttribute.1.Value.StringValue=v"
            "&SendMessageBatchRequestEntry.2.Id=2&SendMessageBatchRequestEntry.2.DelaySeconds=7"
        ),
        model.SendMessageBatchRequest(
            "u",
            [
                model.SendEntry(
                    "1", "x", message_attributes={"n": model.AttributeValue(string_value="v")}
                ),
                model.SendEntry("2", delay_seconds=7),
            ],
        ),
    ),
    (
        "Action=AddPermission&QueueUrl=u&Label=l&AWSAccountId.1=1&AWSAccountId.2=2&ActionName.1=*",
        model.AddPermissionRequest("u", "l", ["1", "2"], ["*"]),
    ),
    ("Action=UntagQueue&QueueUrl=u&TagKey.1=a", model.UntagQueueRequest("u", ["a"])),
    ("Action=TagQueue&QueueUrl=u&Tag.1.Key=a&Tag.1.Value=", model.TagQueueRequest("u", {"a": ""})),
]


@pytest.mark.parametrize(("form", "expected"), FORMS)
def test_a_form_is_read_as_its_action(form, expected):
    action, asked = decode(form.encode(), None)
    assert action is ACTIONS[form.split("&")[0].removeprefix("Action=")]
    assert asked == expected


def test_a_request_to_a_queues_url_need_not_name_it():
    _, asked = decode(b"Action=PurgeQueue", "http://h/000000000000/q")
    assert asked == model.QueueRequest("http://h/000000000000/q")
    _, asked = decode(b"Action=PurgeQueue&QueueUrl=other", "http://h/000000000000/q")
    assert asked == model.QueueRequest("other")


@pytest.mark.parametrize("action", ["CreateQueue", "ListQueues"])
def test_an_action_on_all_queues_is_refused_at_a_queues_url(action):
    with pytest.raises(Refusal) as caught:
        decode(f"Action={action}&QueueName=q".encode(), "http://h/000000000000/q")
    assert caught.value.fault.query_code == "InvalidAction"
    assert caught.value.message == f"The action {action} is not valid for this endpoint."


HEAD = '<?xml version="1.0"?><{0}Response xmlns="http://queue.amazonaws.com/doc/2012-11-05/">'
TAIL = "<ResponseMetadata><RequestId>id</RequestId></ResponseMetadata></{0}Response>"
ANSWERS = [
    ("DeleteMessage", None, ""),
    ("ReceiveMessage", model.ReceiveResult([]), "<ReceiveMessageResult/>"),
    (
        "ReceiveMessage",
        model.ReceiveResult(
            [
                model.Received(
                    "i",
                    "r",
                    "m",
                    "<a>&\r\n",
                    {"SenderId": "0"},
                    "d",
                    {"n": model.AttributeValue(binary_value=b"\x00", data_type="Binary")},
                )
            ]
        ),
        (
            "<ReceiveMessageResult><Message><MessageId>i</MessageId><ReceiptHandle>r</ReceiptHandle>"
            "<MD5OfBody>m</MD5OfBody><Body>&lt;a&gt;&amp;&#xD;\n</Body>"
            "<Attribute><Name>SenderId</Name><Value>0</Value></Attribute>"
            "<MD5OfMessageAttributes>d</MD5OfMessageAttributes><MessageAttribute><Name>n</Name><Value>"
            "<BinaryValue>AA==</BinaryValue><DataType>Binary</DataType></Value></MessageAttribute>"
            "</Message></ReceiveMessageResult>"
        ),
    ),
    (
        "SendMessageBatch",
        model.BatchResult(
            [model.SendResultEntry("1", "i", "m")], [model.ErrorEntry("2", True, "C", "M")]
        ),
        (
            "<SendMessageBatchResult><SendMessageBatchResultEntry><Id>1</Id><MessageId>i</MessageId>"
            "<MD5OfMessageBody>m</MD5OfMessageBody></SendMessageBatchResultEntry>"
            "<BatchResultErrorEntry><Id>2</Id><SenderFault>true</SenderFault><Code>C</Code>"
            "<Message>M</Message></BatchResultErrorEntry></SendMessageBatchResult>"
        ),
    ),
    (
        "ListQueues",
        model.QueueUrlsResult(["u", "v"], "t"),
        (
            "<ListQueuesResult><QueueUrl>u</QueueUrl><QueueUrl>v</QueueUrl><NextToken>t</NextToken>"
            "</ListQueuesResult>"
        ),
    ),
    (
        "ListQueueTags",
        model.TagsResult({"a": "b"}),
        "<ListQueueTagsResult><Tag><Key>a</Key><Value>b</Value></Tag></ListQueueTagsResult>",
    ),
    (
        "ListMessageMoveTasks",
        model.MoveTasksResult([model.MoveTaskEntry("COMPLETED", "arn", 3)]),
        (
            "<ListMessageMoveTasksResult><ListMessageMoveTasksResultEntry><Status>COMPLETED</Status>"
            "<SourceArn>arn</SourceArn>"
            "<ApproximateNumberOfMessagesMoved>3</ApproximateNumberOfMessagesMoved>"
            "</ListMessageMoveTasksResultEntry></ListMessageMoveTasksResult>"
        ),
    ),
]


@pytest.mark.parametrize(("name", "result", "inside"), ANSWERS)
def test_a_result_is_written_as_xml(name, result, inside):
    whole = HEAD.format(name) + inside + TAIL.format(name)
    assert encode(ACTIONS[name], result, "id").decode() == whole


def test_characters_that_xml_cannot_hold_are_replaced():
    shown = model.ReceiveResult([model.Received("i", "r", "m", "a\x00\x1f\uffffb\t\n")])
    assert (
        "<Body>a\ufffd\ufffd\ufffdb\t\n</Body>"
        in encode(ACTIONS["ReceiveMessage"], shown, "id").decode()
    )


def test_a_refusal_is_written_as_xml_or_as_json():
    refusal = Refusal(QUEUE_DOES_NOT_EXIST, "<gone>")
    assert encode_refusal(refusal, "id").decode() == (
        '<?xml version="1.0"?>'
        '<ErrorResponse xmlns="http://queue.amazonaws.com/doc/2012-11-05/"><Error>'
        "<Type>Sender</Type><Code>AWS.SimpleQueueService.NonExistentQueue</Code>"
        "<Message>&lt;gone&gt;</Message><Detail/></Error><RequestId>id</RequestId></ErrorResponse>"
    )
    assert encode_refusal_as_json(refusal, "id") == (
        b'{"Error":{"Code":"AWS.SimpleQueueService.NonExistentQueue","Message":"<gone>",'
        b'"Type":"Sender"},"RequestId":"id"}'
    )


def test_a_result_is_written_as_json_if_the_client_accepts_it():
    assert encode_as_json(ACTIONS["GetQueueUrl"], model.QueueUrlResult("u"), "id") == (
        b'{"GetQueueUrlResponse":{"ResponseMetadata":{"RequestId":"id"},'
        b'"GetQueueUrlResult":{"QueueUrl":"u"}}}'
    )
    assert encode_as_json(
        ACTIONS["GetQueueAttributes"], model.AttributesResult({"a": "b"}), "id"
    ) == (
        b'{"GetQueueAttributesResponse":{"ResponseMetadata":{"RequestId":"id"},'
        b'"GetQueueAttributesResult":{"Attributes":[{"Name":"a","Value":"b"}]}}}'
    )
    assert encode_as_json(ACTIONS["PurgeQueue"], None, "id") == (
        b'{"PurgeQueueResponse":{"ResponseMetadata":{"RequestId":"id"}}}'
    )


@pytest.mark.parametrize(
    ("form", "code"),
    [
        ("", "MissingAction"),
        ("QueueName=x", "MissingAction"),
        ("Action.1=x", "MissingAction"),
        ("Action=Explode", "InvalidAction"),
        ("Action=ListQueues&MaxResults=x", "InvalidParameterValue"),
        ("Action=ListQueues&MaxResults.1=x", "InvalidParameterValue"),
        ("Action=ListQueues&" + "a.b.c.d.e.f.g.h.i.j=1", "MalformedInput"),
        ("Action=ListQueues" + "&a=b" * 1_001, "MalformedInput"),
        ("Action=ListQueues&a=%zz", "MalformedInput"),
        ("Action=ListQueues&a=%4", "MalformedInput"),
        ("Action=ListQueues&%=a", "MalformedInput"),
        ("Action=CreateQueue&QueueName=%ff", "MalformedInput"),
    ],
)
def test_a_form_that_cannot_be_read_is_refused(form, code):
    with pytest.raises(Refusal) as caught:
        decode(form.encode(), None)
    assert caught.value.fault.query_code == code


def test_names_that_collide_do_no_harm():
    _, asked = decode(b"Action=CreateQueue&QueueName=q&Attribute=x&Attribute.1.Name=a", None)
    assert asked == model.CreateQueueRequest("q")
    _, asked = decode(b"Action=CreateQueue&QueueName=q&QueueName=r&QueueName.x=s", None)
    assert asked == model.CreateQueueRequest("q")


@given(st.lists(st.tuples(st.text(), st.text()), max_size=20), st.booleans())
def test_percent_encoding_is_undone_as_urllib_does_it(pairs, with_plus):
    form = urlencode(pairs, quote_via=quote_plus if with_plus else quote)
    assert [*query._pairs(form.encode())] == parse_qsl(form, keep_blank_values=True)


def test_characters_that_were_not_percent_encoded_are_utf_8():
    _, asked = decode("Action=SendMessage&MessageBody=\u00fc\\x41\u20ac%20%5Cn".encode(), None)
    assert asked == model.SendMessageRequest(message_body="\u00fc\\x41\u20ac \\n")


@given(st.text(st.characters(codec="utf-8")))
def test_text_in_xml_is_read_back_as_it_was_or_with_the_replacement_character(text):
    shown = fromstring(b"<a>%s</a>" % query._text(text)).text or ""
    kept = re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]", "\ufffd", text)
    assert shown == kept


MEBIBYTE = 1_048_576
LARGE_FORMS = {
    "percent signs": b"%" * 4 * MEBIBYTE,
    "an encoded body": b"Action=SendMessage&MessageBody=" + b"%41" * (2 * MEBIBYTE),
    "a body half encoded": b"Action=SendMessage&MessageBody=" + b"%41a" * (2 * MEBIBYTE),
    "plus signs": b"Action=SendMessage&MessageBody=" + b"+" * (8 * MEBIBYTE),
    "dots": b"Action=ListQueues&" + b"." * (8 * MEBIBYTE) + b"=1",
    "ampersands": b"&" * (8 * MEBIBYTE),
    "no UTF-8": b"Action=SendMessage&MessageBody=" + b"\xff" * (8 * MEBIBYTE),
    "many entries": b"Action=SendMessageBatch"
    + b"".join(b"&SendMessageBatchRequestEntry.%d.Id=1" % n for n in range(998)),
    "many attributes": b"Action=CreateQueue"
    + b"".join(b"&Attribute.%d.Name=a%d" % (n, n) for n in range(998)),
}


@pytest.mark.parametrize("case", LARGE_FORMS)
def test_no_form_takes_longer_than_50_ms_to_read(case):
    """Row 20."""
    form = LARGE_FORMS[case]
    assert least_cpu_s(lambda: decode(form, None), Refusal) <= 0.05 * SLACK


def test_no_text_takes_longer_than_50_ms_to_escape():
    """Row 20."""
    for text in ("<", "\x00", "\u00fc<", "\uffff"):
        assert least_cpu_s(partial(query._text, text * MEBIBYTE)) <= 0.05 * SLACK
