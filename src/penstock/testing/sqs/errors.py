"""Errors and answers as they are on the wire, in both protocols; these requests use no SDK."""

import json
import re
from urllib.parse import urlencode

from penstock.testing.sqs.checks import check, expect, require
from penstock.testing.sqs.target import CheckedServer, path_of

JSON = "errors in JSON"
QUERY = "the Query protocol"
MISSING = "AWS.SimpleQueueService.NonExistentQueue"


def _error(text: str) -> tuple[str, str]:
    """Type and code of an error in XML."""
    found = [re.search(f"<{name}>(.*?)</{name}>", text, re.DOTALL) for name in ("Type", "Code")]
    kind, code = (each[1].strip() if each else "" for each in found)
    return kind, code


@check(JSON)
def a_json_error_has_a_type_and_a_message(target: CheckedServer) -> None:
    """AWS JSON 1.0: status 400, __type with the namespace com.amazonaws.sqs, and message."""
    status, _, text = target.raw_json("GetQueueUrl", {"QueueName": target.name()})
    answer = json.loads(text)
    found = (status, answer.get("__type"))
    expect(found, (400, "com.amazonaws.sqs#QueueDoesNotExist"), "the answer")
    require(answer.get("message"), "there is no message")
    if target.texts:
        expect(answer["message"], "The specified queue does not exist.", "the message")


@check(JSON)
def a_json_error_has_the_code_of_the_query_protocol_too(target: CheckedServer) -> None:
    """awsQueryCompatible: the header x-amzn-query-error has code and fault for older handlers."""
    _, headers, _ = target.raw_json("GetQueueUrl", {"QueueName": target.name()})
    found = headers.get("x-amzn-query-error")
    expect(found, f"{MISSING};Sender", "the header x-amzn-query-error")


@check(JSON)
def a_json_answer_has_a_type_and_a_request_id(target: CheckedServer) -> None:
    """AWS JSON 1.0: Content-Type application/x-amz-json-1.0, and x-amzn-RequestId."""
    status, headers, text = target.raw_json("ListQueues", {"QueueNamePrefix": target.name()})
    expect(status, 200, "the status")
    expect(headers.get("Content-Type"), "application/x-amz-json-1.0", "Content-Type")
    require(headers.get("x-amzn-RequestId"), "there is no x-amzn-RequestId")
    require(isinstance(json.loads(text), dict), "the body is no JSON object")


@check(JSON)
def an_unknown_action_is_refused_in_json(target: CheckedServer) -> None:
    """AWS JSON 1.0: UnknownOperationException for an action that there is not."""
    status, _, text = target.raw_json("NoSuchAction", {})
    name = str(json.loads(text).get("__type", "")).rpartition("#")[2]
    expect((status, name), (400, "UnknownOperationException"), "the answer")


@check(JSON)
def json_that_cannot_be_read_is_refused(target: CheckedServer) -> None:
    """AWS JSON 1.0: a body that is no JSON is the sender's error, not the server's."""
    status, _, text = target.raw_json("ListQueues", b"{nonsense")
    expect(status, 400, "the status")
    require("__type" in json.loads(text), "there is no __type")


@check(JSON)
def a_missing_parameter_is_refused_in_json(target: CheckedServer) -> None:
    """SendMessage without MessageBody: MissingParameter."""
    url = target.queue()
    status, headers, text = target.raw_json("SendMessage", {"QueueUrl": url})
    found = f"{json.loads(text).get('__type')} {headers.get('x-amzn-query-error')}"
    require(status == 400 and "MissingParameter" in found, f"the answer is {status} {found}")


@check(QUERY)
def an_error_is_answered_in_xml(target: CheckedServer) -> None:
    """Query: status 400, ErrorResponse with Type Sender, the code, a message and a RequestId."""
    status, headers, text = target.raw_query(Action="GetQueueUrl", QueueName=target.name())
    expect((status, *_error(text)), (400, "Sender", MISSING), "the answer")
    require("<Message>" in text, "there is no Message")
    require(re.search(r"<RequestId>.+</RequestId>", text), "there is no RequestId")
    require("text/xml" in (headers.get("Content-Type") or ""), "the Content-Type is not text/xml")


@check(QUERY)
def an_unknown_action_is_refused_in_xml(target: CheckedServer) -> None:
    """Query: InvalidAction for an action that there is not."""
    status, _, text = target.raw_query(Action="NoSuchAction")
    expect((status, *_error(text)), (400, "Sender", "InvalidAction"), "the answer")


@check(QUERY)
def a_missing_parameter_is_refused_in_xml(target: CheckedServer) -> None:
    """Query, SendMessage without MessageBody: MissingParameter."""
    url = target.queue()
    status, _, text = target.raw_query(Action="SendMessage", QueueUrl=url)
    expect((status, *_error(text)), (400, "Sender", "MissingParameter"), "the answer")


@check(QUERY)
def a_form_is_accepted_at_the_root_and_at_the_queue(target: CheckedServer) -> None:
    """Query: the address of a request is the queue's URL, as older SDKs send it, or QueueUrl."""
    url = target.queue()
    for path, more in ((path_of(url), {}), ("/", {"QueueUrl": url})):
        status, _, text = target.raw_query(path, Action="SendMessage", MessageBody="x", **more)
        expect(status, 200, f"the status at {path}")
        require("<MD5OfMessageBody>" in text and "<MessageId>" in text, f"the answer is {text}")
    expect(target.count(url), 2, "the count")


@check(QUERY)
def an_action_may_be_a_get(target: CheckedServer) -> None:
    """Query: parameters of a GET are in the address."""
    url = target.queue()
    query = urlencode({"Action": "SendMessage", "MessageBody": "a b", "Version": "2012-11-05"})
    status, _, _ = target.raw(f"{path_of(url)}?{query}", None, {})
    expect(status, 200, "the status")
    expect(target.bodies(url), ["a b"], "what is received")


@check(QUERY)
def an_answer_names_its_action_and_request(target: CheckedServer) -> None:
    """Query: ActionResponse with ActionResult and ResponseMetadata."""
    status, _, text = target.raw_query(Action="ListQueues", QueueNamePrefix=target.name())
    found = [
        word in text for word in ("<ListQueuesResponse", "<ListQueuesResult", "<ResponseMetadata>")
    ]
    expect((status, found), (200, [True, True, True]), "the answer")
