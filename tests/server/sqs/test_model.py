"""The endpoint compared with botocore's model of SQS: every action, field and declared error."""

import http.client
import json

import msgspec
import pytest
from botocore.exceptions import ClientError

from penstock.service import ConfigureQueue
from penstock.testing.sqs.query import sqs_model as load_model
from penstock.wire.sqs import model as sqs_model
from penstock.wire.sqs.attributes import KNOWN
from penstock.wire.sqs.errors import MODELLED
from penstock.wire.sqs.model import ACTIONS, wire_name
from tests.server.sqs.asking import arn, entries, make, make_pair, receive, send
from tests.server.sqs.conftest import Local

MODEL = load_model()
RESULTS = {
    "CancelMessageMoveTask": sqs_model.CancelMoveResult,
    "ChangeMessageVisibilityBatch": sqs_model.BatchResult,
    "CreateQueue": sqs_model.QueueUrlResult,
    "DeleteMessageBatch": sqs_model.BatchResult,
    "GetQueueAttributes": sqs_model.AttributesResult,
    "GetQueueUrl": sqs_model.QueueUrlResult,
    "ListDeadLetterSourceQueues": sqs_model.SourceUrlsResult,
    "ListMessageMoveTasks": sqs_model.MoveTasksResult,
    "ListQueueTags": sqs_model.TagsResult,
    "ListQueues": sqs_model.QueueUrlsResult,
    "ReceiveMessage": sqs_model.ReceiveResult,
    "SendMessage": sqs_model.SendResult,
    "SendMessageBatch": sqs_model.BatchResult,
    "StartMessageMoveTask": sqs_model.StartMoveResult,
}
NESTED = {
    "SendMessageBatchRequestEntry": sqs_model.SendEntry,
    "DeleteMessageBatchRequestEntry": sqs_model.DeleteEntry,
    "ChangeMessageVisibilityBatchRequestEntry": sqs_model.ChangeEntry,
    "SendMessageBatchResultEntry": sqs_model.SendResultEntry,
    "DeleteMessageBatchResultEntry": sqs_model.ResultEntry,
    "ChangeMessageVisibilityBatchResultEntry": sqs_model.ResultEntry,
    "BatchResultErrorEntry": sqs_model.ErrorEntry,
    "Message": sqs_model.Received,
    "MessageAttributeValue": sqs_model.AttributeValue,
    "MessageSystemAttributeValue": sqs_model.AttributeValue,
    "ListMessageMoveTasksResultEntry": sqs_model.MoveTaskEntry,
}
# Errors that the model declares and that this endpoint never gives, with the reason.
UNREACHABLE = {
    "InvalidIdFormat": "Amazon has deprecated it: a bad receipt is ReceiptHandleIsInvalid",
    "UnsupportedOperation": "there is no action this endpoint cannot do",
    **{
        name: "this endpoint has no KMS: the attributes are only stored and returned"
        for name in MODEL["shapes"]
        if name.startswith("Kms")
    },
}


def names(shape):
    return {field.encode_name for field in msgspec.structs.fields(shape)}


def members(shape):
    return set(MODEL["shapes"][shape]["members"])


def test_the_actions_are_those_of_the_model():
    assert set(ACTIONS) == set(MODEL["operations"])
    assert len(ACTIONS) == 23


@pytest.mark.parametrize("action", MODEL["operations"])
def test_an_action_has_the_parameters_and_results_of_the_model(action):
    operation = MODEL["operations"][action]
    assert names(ACTIONS[action].parameters) == members(operation["input"]["shape"])
    required = {wire_name(name) for name in ACTIONS[action].required}
    # An absent list of entries is an empty batch, which has an error of its own.
    modelled = set(MODEL["shapes"][operation["input"]["shape"]].get("required", ())) - {"Entries"}
    assert required == modelled
    if "output" in operation:
        assert names(RESULTS[action]) == members(operation["output"]["shape"])
    else:
        assert action not in RESULTS


@pytest.mark.parametrize("shape", NESTED)
def test_a_structure_has_the_fields_of_the_model(shape):
    assert names(NESTED[shape]) == members(shape)


def test_the_queue_attributes_are_those_of_the_model():
    assert set(MODEL["shapes"]["QueueAttributeName"]["enum"]) == set(KNOWN)


def test_every_declared_error_is_implemented_or_listed_with_a_reason():
    declared = {
        error["shape"]
        for operation in MODEL["operations"].values()
        for error in operation.get("errors", [])
    }
    assert declared - set(UNREACHABLE) <= set(MODELLED)
    assert set(MODELLED) <= declared


class FilledServer:
    """A server with queues of each kind and a message in flight, and valid requests to it."""

    def __init__(self, local):
        self.local = local
        self.client = client = local.client()
        self.queue = make(client)
        self.fifo = make(client, "q.fifo", FifoQueue="true")
        self.source, self.dead = make_pair(client)
        send(client, self.queue)
        (self.message,) = receive(client, self.queue)
        self.receipt = self.message["ReceiptHandle"]
        self.dead_arn = arn(client, self.dead)

    def valid(self):
        """Parameters for each action with which it succeeds."""
        url = {"QueueUrl": self.queue}
        held = {"ReceiptHandle": self.receipt}
        return {
            "AddPermission": {
                **url,
                "Label": "l",
                "AWSAccountIds": ["111122223333"],
                "Actions": ["*"],
            },
            "CancelMessageMoveTask": {"TaskHandle": "x"},
            "ChangeMessageVisibility": {**url, **held, "VisibilityTimeout": 1},
            "ChangeMessageVisibilityBatch": {
                **url,
                "Entries": [{"Id": "a", **held, "VisibilityTimeout": 1}],
            },
            "CreateQueue": {"QueueName": "new"},
            "DeleteMessage": {**url, **held},
            "DeleteMessageBatch": {**url, "Entries": [{"Id": "a", **held}]},
            "DeleteQueue": url,
            "GetQueueAttributes": {**url, "AttributeNames": ["All"]},
            "GetQueueUrl": {"QueueName": "q"},
            "ListDeadLetterSourceQueues": url,
            "ListMessageMoveTasks": {"SourceArn": self.dead_arn},
            "ListQueueTags": url,
            "ListQueues": {},
            "PurgeQueue": url,
            "ReceiveMessage": url,
            "RemovePermission": {**url, "Label": "l"},
            "SendMessage": {**url, "MessageBody": "x"},
            "SendMessageBatch": {**url, "Entries": entries(1)},
            "SetQueueAttributes": {**url, "Attributes": {"DelaySeconds": "1"}},
            "StartMessageMoveTask": {"SourceArn": self.dead_arn},
            "TagQueue": {**url, "Tags": {"a": "b"}},
            "UntagQueue": {**url, "TagKeys": ["a"]},
        }

    def ask(self, action, client=None, **changes):
        """The error of an action with these changes to valid parameters."""
        call = (client or self.client)._make_api_call
        with pytest.raises(ClientError) as caught:
            call(action, {**self.valid()[action], **changes})
        return caught.value.response


def raw(server, action, parameters, headers):
    """The error of a request with these headers."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port))
    sent = {"X-Amz-Target": f"AmazonSQS.{action}", **headers}
    connection.request("POST", "/", json.dumps(parameters), sent)
    answer = connection.getresponse()
    error = json.loads(answer.read())
    code = answer.headers["x-amzn-query-error"].split(";")[0]
    connection.close()
    return {
        "Error": {"QueryErrorCode": error["__type"].split("#")[1], "Code": code},
        "ResponseMetadata": {"HTTPStatusCode": answer.status},
    }


@pytest.fixture(scope="module")
def filled(query_data):
    local = Local(query_data, aws_limits=True)
    yield FilledServer(local)
    local.close()


@pytest.fixture(scope="module")
def guarded(query_data):
    """A server that checks signatures; a request without one is refused before it is read."""
    local = Local(query_data, keys={"key": "secret"})
    yield local
    local.close()


@pytest.fixture(scope="module")
def ending(query_data):
    """A server that is stopping."""
    local = Local(query_data, aws_limits=True)
    filled = FilledServer(local)
    local.call(local.running._endpoint.end_waits)
    yield filled
    local.close()


def no_queue(filled, action):
    return filled.ask(action, QueueUrl=f"{filled.local.url}/000000000000/none")


def bad_address(filled, action):
    if "QueueUrl" in filled.valid()[action]:
        return filled.ask(action, QueueUrl="http://127.0.0.1/nowhere")
    return raw(filled.local, action, filled.valid()[action], {"Host": "a/b"})


def too_many(filled, action):
    receipt = {"ReceiptHandle": "x", "VisibilityTimeout": 1}
    entry = {"MessageBody": "x"} if action == "SendMessageBatch" else receipt
    if action == "DeleteMessageBatch":
        entry = {"ReceiptHandle": "x"}
    return [{"Id": str(number), **entry} for number in range(11)]


def batch(filled, action, change):
    entries = [dict(entry) for entry in too_many(filled, action)]
    return filled.ask(action, Entries=change(entries))


def over_limit(filled, action):
    if action == "SetQueueAttributes":
        policy = json.dumps({"Statement": [{"Sid": str(number)} for number in range(21)]})
        return filled.ask(action, Attributes={"Policy": policy})
    if action == "AddPermission":
        return filled.ask(action, Actions=["SendMessage"] * 8)
    url = make(filled.client, "narrow")
    send(filled.client, url)
    receive(filled.client, url)
    narrow = ConfigureQueue("narrow", {"in_flight_max": 1})
    filled.local.execute(narrow)
    return filled.ask(action, QueueUrl=url)


def deleted_recently(filled, action):
    url = make(filled.client, "short-lived")
    filled.client.delete_queue(QueueUrl=url)
    return filled.ask(action, QueueName="short-lived")


def not_in_flight(filled, action):
    client, url = filled.client, filled.fifo
    client.send_message(
        QueueUrl=url, MessageBody="x", MessageGroupId="g", MessageDeduplicationId="d"
    )
    (message,) = receive(client, url)
    held = {"QueueUrl": url, "ReceiptHandle": message["ReceiptHandle"]}
    client.change_message_visibility(**held, VisibilityTimeout=0)
    return filled.ask(action, **held)


def twice_purged(filled, action):
    url = make(filled.client, "purged")
    filled.client.purge_queue(QueueUrl=url)
    return filled.ask(action, QueueUrl=url)


def missing_resource(filled, action):
    if action == "CancelMessageMoveTask":
        import base64

        task = json.dumps({"taskId": "x", "sourceArn": filled.dead_arn}).encode()
        return filled.ask(action, TaskHandle=base64.b64encode(task).decode())
    return filled.ask(action, SourceArn="arn:aws:sqs:us-east-1:000000000000:none")


LARGE = [{"Id": "a", "MessageBody": "x" * 1_048_577}]
WAYS = {
    "BatchEntryIdsNotDistinct": lambda s, a: batch(s, a, lambda e: [e[0], e[0]]),
    "BatchRequestTooLong": lambda s, a: s.ask(a, Entries=LARGE),
    "EmptyBatchRequest": lambda s, a: batch(s, a, lambda e: []),
    "InvalidAddress": bad_address,
    "InvalidAttributeName": lambda s, a: (
        s.ask(a, AttributeNames=["Nope"])
        if a == "GetQueueAttributes"
        else s.ask(a, Attributes={"Nope": "1"})
    ),
    "InvalidAttributeValue": lambda s, a: s.ask(a, Attributes={"DelaySeconds": "x"}),
    "InvalidBatchEntryId": lambda s, a: batch(s, a, lambda e: [{**e[0], "Id": "a:b"}]),
    "InvalidMessageContents": lambda s, a: s.ask(a, MessageBody="\x00"),
    "MessageNotInflight": not_in_flight,
    "OverLimit": over_limit,
    "PurgeQueueInProgress": twice_purged,
    "QueueDeletedRecently": deleted_recently,
    "QueueDoesNotExist": lambda s, a: (
        s.ask(a, QueueName="none") if a == "GetQueueUrl" else no_queue(s, a)
    ),
    "QueueNameExists": lambda s, a: s.ask(a, QueueName="q", Attributes={"DelaySeconds": "7"}),
    "ReceiptHandleIsInvalid": lambda s, a: s.ask(a, ReceiptHandle="x"),
    "ResourceNotFoundException": missing_resource,
    "TooManyEntriesInBatchRequest": lambda s, a: batch(s, a, lambda e: e),
}
DECLARED = [
    (action, error["shape"])
    for action, operation in MODEL["operations"].items()
    for error in operation.get("errors", [])
    if error["shape"] not in UNREACHABLE
]


@pytest.mark.parametrize(("action", "error"), DECLARED)
def test_every_declared_error_of_every_action_is_reached(filled, guarded, ending, action, error):
    if error == "RequestThrottled":
        response = ending.ask(action)
    elif error == "InvalidSecurity":
        response = raw(guarded, action, filled.valid()[action], {"Authorization": "AWS a:b"})
    else:
        response = WAYS[error](filled, action)
    fault = MODELLED[error]
    assert response["Error"]["QueryErrorCode"] == error
    assert response["Error"]["Code"] == fault.query_code
    assert response["ResponseMetadata"]["HTTPStatusCode"] == fault.status
    assert 400 <= fault.status < 500


@pytest.mark.parametrize("action", ACTIONS)
def test_a_missing_parameter_is_named(filled, action):
    host, port = filled.local.url.removeprefix("http://").split(":")
    for name in ACTIONS[action].required:
        parameters = dict(filled.valid()[action])
        parameters.pop(wire_name(name))
        connection = http.client.HTTPConnection(host, int(port))
        target = {"X-Amz-Target": f"AmazonSQS.{action}"}
        connection.request("POST", "/", json.dumps(parameters), target)
        answer = connection.getresponse()
        error = json.loads(answer.read())
        connection.close()
        assert answer.status == 400
        if (action, name) == ("CreateQueue", "queue_name"):
            assert error == {
                "__type": "com.amazon.coral.service#InvalidParameterValueException",
                "message": (
                    "Value for parameter QueueName is invalid. Reason: Must specify a queue name."
                ),
            }
            continue
        shown_name = "Attribute.Name" if action == "SetQueueAttributes" else wire_name(name)
        if name == "queue_url":
            shown_name = "QueueUrl"
        assert error == {
            "__type": "com.amazon.coral.service#MissingRequiredParameterException",
            "message": f"The request must contain the parameter {shown_name}.",
        }
