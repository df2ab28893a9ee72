"""The Query protocol as a script uses it: GETs and forms on the URL of a queue, with a header."""

import json
import socket
from hashlib import md5
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest

from tests.server.sqs.asking import make, receive, send


@pytest.fixture(scope="module")
def url(plain):
    return make(plain.client(), "query")


# A server without keys accepts any such header; a web page cannot send one.
SIGNED = {"Authorization": "none"}


def ask(url, data=None, accept="*/*", headers=SIGNED, **parameters):
    """The status and the text of an answer."""
    query = f"?{urlencode(parameters)}" if parameters else ""
    try:
        with urlopen(Request(url + query, data, {"Accept": accept, **headers})) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_message_is_sent_and_received_by_gets(url):
    status, text = ask(url, Action="SendMessage", MessageBody="a <b> & c")
    assert status == 200
    assert "<MD5OfMessageBody>" in text
    status, text = ask(url, Action="ReceiveMessage", VisibilityTimeout="0")
    assert "<Body>a &lt;b&gt; &amp; c</Body>" in text
    status, text = ask(url, Action="PurgeQueue")
    assert status == 200
    status, text = ask(url, Action="ReceiveMessage")
    assert (status, "<ReceiveMessageResult/>" in text) == (200, True)


def test_a_form_may_be_posted_to_the_root_and_to_the_queue(plain, url):
    form = urlencode({"Action": "SendMessage", "QueueUrl": url, "MessageBody": "x"}).encode()
    assert ask(f"{plain.url}/", form)[0] == 200
    assert ask(url, b"Action=SendMessage&MessageBody=x")[0] == 200
    assert ask(url, b"MessageBody=x", Action="SendMessage")[0] == 200


def test_a_get_that_accepts_json_is_answered_in_json(url):
    status, text = ask(
        url, None, "application/json", **{"Action": "GetQueueAttributes", "AttributeName.1": "All"}
    )
    result = json.loads(text)["GetQueueAttributesResponse"]["GetQueueAttributesResult"]
    assert status == 200
    assert {"Name": "VisibilityTimeout", "Value": "30"} in result["Attributes"]
    status, text = ask(url, None, "application/json", Action="ListQueues")
    assert (status, json.loads(text)["Error"]["Code"]) == (400, "InvalidAction")


def test_a_get_without_an_action_is_refused_with_the_reason(url):
    for accept in ("*/*", "application/json"):
        status, text = ask(url, None, accept)
        assert (status, "<UnknownOperationException" in text) == (404, True)


@pytest.mark.parametrize(
    ("parameters", "code", "message"),
    [
        (
            {"Action": "FooBar"},
            "InvalidAction",
            "The action FooBar is not valid for this endpoint.",
        ),
        (
            {"Action": "SendMessage"},
            "MissingParameter",
            "The request must contain the parameter MessageBody.",
        ),
        (
            {"Action": "GetQueueAttributes", "AttributeName.1": "Foobar"},
            "InvalidAttributeName",
            "Unknown Attribute Foobar.",
        ),
    ],
)
def test_an_error_is_answered_in_xml(url, parameters, code, message):
    status, text = ask(url, **parameters)
    assert status == 400
    for part in ("<Type>Sender</Type>", f"<Code>{code}</Code>", f"<Message>{message}</Message>"):
        assert part in text


@pytest.mark.parametrize(
    ("form", "code"),
    [(b"", "MissingAction"), (b"a=b", "MissingAction"), (b"Action=", "InvalidAction")],
)
def test_a_form_without_an_action_is_refused(plain, form, code):
    status, text = ask(f"{plain.url}/queue/q", form)
    assert (status, f"<Code>{code}</Code>" in text) == (400, True)


def test_a_missing_queue_has_the_error_text_of_the_query_protocol(plain):
    status, text = ask(f"{plain.url}/000000000000/none", Action="PurgeQueue")
    assert status == 400
    assert "<Code>AWS.SimpleQueueService.NonExistentQueue</Code>" in text
    assert "The specified queue does not exist for this wsdl version." in text


def test_json_without_a_target_is_refused_in_json(plain):
    request = Request(f"{plain.url}/", b"{}", {"Content-Type": "application/x-amz-json-1.0"})
    with pytest.raises(HTTPError) as caught:
        urlopen(request)
    with caught.value as error:
        assert error.code == 400
        assert json.loads(error.read())["__type"].endswith("#UnknownOperationException")


def test_a_get_that_accepts_json_gets_every_field_with_null_if_absent(local):
    client = local.client()
    url = make(client)
    accept = {"Accept": "application/json", **SIGNED}

    def get(action, **parameters):
        form = urlencode({"Action": action, "Version": "2012-11-05", **parameters})
        with urlopen(Request(f"{url}?{form}", headers=accept)) as answer:
            response = json.load(answer)[f"{action}Response"]
        assert response["ResponseMetadata"]["RequestId"]
        return response[f"{action}Result"]

    assert get("ReceiveMessage") == {"messages": None}
    sent = get("SendMessage", MessageBody='a"&\r')
    assert sent.pop("MessageId")
    assert sent == {
        "MD5OfMessageBody": md5(b'a"&\r').hexdigest(),
        "MD5OfMessageAttributes": None,
        "MD5OfMessageSystemAttributes": None,
        "SequenceNumber": None,
    }
    (message,) = get("ReceiveMessage")["messages"]
    assert message["Body"] == 'a"&\r'
    assert message["Attributes"] is message["MessageAttributes"] is None
    attributes = get("GetQueueAttributes", **{"AttributeName.1": "VisibilityTimeout"})
    assert attributes == {"Attributes": [{"Name": "VisibilityTimeout", "Value": "30"}]}


def test_an_empty_list_of_names_returns_no_attributes(local, either):
    url = make(either)
    send(either, url)
    (message,) = receive(either, url, AttributeNames=[], MessageAttributeNames=[])
    assert "Attributes" not in message
    assert either.get_queue_attributes(QueueUrl=url, AttributeNames=[]).get("Attributes", {}) == {}


def test_over_query_only_the_older_name_of_the_system_attributes_is_used(local):
    names = {"MessageSystemAttributeNames": ["All"], "AttributeNames": ["SenderId"]}
    seen = {}
    for protocol in ("json", "query"):
        client = local.client(protocol)
        url = make(client)
        send(client, url)
        (message,) = receive(client, url, VisibilityTimeout=0, **names)
        seen[protocol] = set(message["Attributes"])
        client.purge_queue(QueueUrl=url)
        local.clock.advance(seconds=61)
    assert seen["query"] == {"SenderId"}
    assert seen["json"] > {"SenderId", "SentTimestamp"}


def test_a_head_is_answered_without_a_body_and_the_connection_stays_open(plain):
    host, port = plain.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        for method in ("HEAD", "GET"):
            connection.sendall(f"{method} /none HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            answer = b""
            while not answer.endswith(b"\r\n\r\n" if method == "HEAD" else b"/>\n"):
                answer += connection.recv(65_536)
            assert answer.startswith(b"HTTP/1.1 40")


def test_one_item_of_a_list_or_a_map_needs_no_number(plain):
    url = make(plain.client(), "unnumbered")
    ask(url, Action="SendMessage", MessageBody="x")
    status, text = ask(url, Action="ReceiveMessage", AttributeName="ApproximateReceiveCount")
    assert "<Attribute><Name>ApproximateReceiveCount</Name><Value>1</Value></Attribute>" in text
    setting = {"Attribute.Name": "VisibilityTimeout", "Attribute.Value": "35"}
    assert ask(url, Action="SetQueueAttributes", **setting)[0] == 200
    status, text = ask(url, Action="GetQueueAttributes", AttributeName="VisibilityTimeout")
    assert "<Attribute><Name>VisibilityTimeout</Name><Value>35</Value></Attribute>" in text
    tag = {"Tag.Key": "kind", "Tag.Value": "test"}
    assert ask(url, Action="TagQueue", **tag)[0] == 200
    assert "<Tag><Key>kind</Key><Value>test</Value></Tag>" in ask(url, Action="ListQueueTags")[1]
    assert ask(url, Action="UntagQueue", TagKey="kind")[0] == 200
    assert "<Tag>" not in ask(url, Action="ListQueueTags")[1]
    message = {
        "MessageAttribute.Name": "a",
        "MessageAttribute.Value.DataType": "String",
        "MessageAttribute.Value.StringValue": "b",
    }
    status, text = ask(url, Action="SendMessage", MessageBody="x", **message)
    assert (status, "<MD5OfMessageAttributes>" in text) == (200, True)


def test_a_value_that_is_not_a_number_is_refused_by_name(url):
    status, text = ask(url, Action="ReceiveMessage", MaxNumberOfMessages="many")
    assert status == 400
    assert "<Code>InvalidParameterValue</Code>" in text
    reason = "is invalid. Reason: Must be an integer."
    assert f"Value many for parameter MaxNumberOfMessages {reason}" in text
    entry = "SendMessageBatchRequestEntry.1"
    form = {f"{entry}.Id": "a", f"{entry}.MessageBody": "x", f"{entry}.DelaySeconds": "soon"}
    status, text = ask(url, Action="SendMessageBatch", **form)
    assert (status, f"Value soon for parameter Entries[0].DelaySeconds {reason}" in text) == (
        400,
        True,
    )


def test_a_structured_value_for_a_plain_parameter_is_refused_by_name(url):
    for name in ("MaxNumberOfMessages", "ReceiveRequestAttemptId"):
        status, text = ask(url, Action="ReceiveMessage", **{f"{name}.1": "1"})
        assert (status, "<Code>InvalidParameterValue</Code>" in text) == (400, True)
        assert f"<Message>The parameter {name} has one value, and no parts.</Message>" in text
