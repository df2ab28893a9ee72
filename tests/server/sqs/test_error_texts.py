"""The texts of Amazon's errors for bad input, word for word."""

import http.client
import json

import pytest

from tests.server.sqs.asking import (
    arn,
    make,
    make_fifo,
    make_pair,
    push,
    receive,
    refused,
    send,
    shown,
)

TEXT = {"DataType": "String", "StringValue": "x"}
USER = "Message (user) attribute"


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"": TEXT}, "The request must contain non-empty message (user) attribute names."),
        ({"a" * 257: TEXT}, f"{USER} name must be shorter than 256 bytes."),
        (
            {"a!b": TEXT},
            (
                "Invalid non-alphanumeric character '#x21' was found in the message attribute "
                "name. "
                "Can only include alphanumeric characters, hyphens, underscores, or dots."
            ),
        ),
        (
            {"aWs.x": TEXT},
            (
                "You can't use message attribute names beginning with 'AWS.' or 'Amazon'. "
                "These strings are reserved for internal use."
            ),
        ),
        ({".x": TEXT}, f"{USER} name must not begin with character '.'."),
        ({"x.": TEXT}, f"{USER} name must not end with character '.'."),
        ({"x..y": TEXT}, f"{USER} name must not have successive '.' characters."),
        (
            {"x": {"DataType": "Text", "StringValue": "x"}},
            (
                "The type of message (user) attribute 'x' is invalid. You must use only the "
                "following "
                "supported type prefixes: Binary, Number, String."
            ),
        ),
        (
            {"x": {"DataType": "String." + "y" * 256, "StringValue": "x"}},
            f"{USER} type must be shorter than 256 bytes.",
        ),
        (
            {"x": {"DataType": "String", "StringValue": ""}},
            f"{USER} 'x' must contain a non-empty value of type 'String'.",
        ),
        (
            {"x": {"DataType": "Number", "StringValue": "many"}},
            "Can't cast the value of message (user) attribute 'x' to a number.",
        ),
        (
            {"x": {"DataType": "String", "BinaryValue": b"x"}},
            f"{USER} 'x' with type 'String' must use field 'String'.",
        ),
        (
            {"x": {"DataType": "Binary", "StringValue": "x"}},
            f"{USER} 'x' with type 'Binary' must use field 'Binary'.",
        ),
        (
            {"x": {"DataType": "String", "StringValue": "x", "BinaryValue": b"x"}},
            f"{USER} 'x' must have a single value.",
        ),
        (
            {f"x{n}": TEXT for n in range(11)},
            "Number of message attributes [11] exceeds the allowed maximum [10].",
        ),
    ],
)
def test_a_bad_message_attribute_is_refused_with_amazons_text(plain, attributes, message):
    client = plain.client()
    url = make(client, "words")
    assert refused(
        client.send_message, QueueUrl=url, MessageBody="x", MessageAttributes=attributes
    ) == ("InvalidParameterValue", message)
    assert receive(client, url) == []


def test_a_list_of_values_is_not_supported(plain):
    client = plain.client()
    values = {"x": {"DataType": "String", "StringListValues": ["a"]}}
    url = make(client, "words")
    assert refused(
        client.send_message, QueueUrl=url, MessageBody="x", MessageAttributes=values
    ) == (
        "AWS.SimpleQueueService.UnsupportedOperation",
        "Message attribute list values in SendMessage operation are not supported.",
    )


def test_an_entry_of_a_batch_is_refused_with_its_own_text(either):
    url = make(either, MaximumMessageSize="1024")
    result = either.send_message_batch(
        QueueUrl=url,
        Entries=[
            {"Id": "fits", "MessageBody": "x" * 1024},
            {"Id": "large", "MessageBody": "x" * 1025},
            {"Id": "empty", "MessageBody": ""},
            {"Id": "dedup", "MessageBody": "x", "MessageDeduplicationId": "d"},
        ],
    )
    assert [each["Id"] for each in result["Successful"]] == ["fits"]
    assert {each["Id"]: (each["Code"], each["Message"]) for each in result["Failed"]} == {
        "large": (
            "InvalidParameterValue",
            (
                "One or more parameters cannot be validated. Reason: Message must be shorter than "
                "1024 bytes."
            ),
        ),
        "empty": (
            "MissingParameter",
            "The request must contain the parameter SendMessageBatchRequestEntry.3.MessageBody.",
        ),
        "dedup": (
            "InvalidParameterValue",
            (
                "Value d for parameter MessageDeduplicationId is invalid. Reason: The request "
                "include "
                "parameter that is not valid for this queue type."
            ),
        ),
    }


def test_nulls_in_a_list_are_ignored(plain):
    url = make(plain.client(), "words")
    asked = {"QueueUrl": url, "Entries": [None, {"Id": "a", "MessageBody": "x"}, None]}
    answer, result = post(plain, "SendMessageBatch", asked)
    assert (answer.status, [sent["Id"] for sent in result["Successful"]]) == (200, ["a"])
    asked = {"QueueUrl": url, "AttributeNames": [None, "DelaySeconds"]}
    answer, result = post(plain, "GetQueueAttributes", asked)
    assert (answer.status, result) == (200, {"Attributes": {"DelaySeconds": "0"}})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"MessageBody": {}}, "Start of structure or map found where not expected."),
        ({"MessageBody": []}, "Start of list found where not expected"),
        ({"DelaySeconds": "soon"}, "STRING_VALUE can not be converted to an Integer"),
        ({"DelaySeconds": 1.5}, "NUMBER_VALUE can not be converted to an Integer"),
        ({"DelaySeconds": True}, "TRUE_VALUE can not be converted to an Integer"),
        ({"DelaySeconds": False}, "FALSE_VALUE can not be converted to an Integer"),
        ({"MessageAttributes": 1}, "Expected map or null"),
        ({"MessageAttributes": {"a": "b"}}, "Expected null"),
        ({"MessageAttributes": {"a": {"StringListValues": "b"}}}, "Expected list or null"),
        (
            {"MessageAttributes": {"a": {"BinaryValue": 1}}},
            "NUMBER_VALUE can not be converted to a Blob",
        ),
    ],
)
def test_a_value_of_another_type_is_refused_with_amazons_text(plain, body, message):
    url = make(plain.client(), "words")
    asked = {"QueueUrl": url, "MessageBody": "x", **body}
    answer, error = post(plain, "SendMessage", asked)
    assert (answer.status, answer.headers["x-amzn-query-error"]) == (400, "MalformedInput;Sender")
    assert error == {
        "__type": "com.amazon.coral.service#SerializationException",
        "message": message,
    }


def post(server, action, asked):
    """The answer to JSON that no SDK would send, and its content."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port))
    connection.request("POST", "/", json.dumps(asked), {"X-Amz-Target": f"AmazonSQS.{action}"})
    answer = connection.getresponse()
    message = json.loads(answer.read())
    connection.close()
    return answer, message


@pytest.mark.parametrize(
    ("action", "asked"),
    [
        ("CreateQueue", {"QueueName": "never", "Attributes": {"DelaySeconds": None}}),
        ("CreateQueue", {"QueueName": "never", "tags": {"valid": "x", "empty": None}}),
        ("SetQueueAttributes", {"Attributes": {"VisibilityTimeout": "1", "DelaySeconds": None}}),
        ("TagQueue", {"Tags": {"valid": "x", "empty": None}}),
    ],
)
def test_null_in_place_of_a_required_value_is_refused(plain, action, asked):
    client = plain.client()
    url = make(client, "words")
    before = shown(client, url)
    answer, error = post(plain, action, {"QueueUrl": url, **asked})
    assert (answer.status, error) == (
        400,
        {
            "__type": "com.amazon.coral.service#InvalidParameterValueException",
            "message": "the parameter 'value' may not be null",
        },
    )
    assert (shown(client, url), client.list_queue_tags(QueueUrl=url).get("Tags")) == (before, None)
    assert not client.list_queues(QueueNamePrefix="never").get("QueueUrls")


def test_setting_no_attributes_is_refused(plain):
    client = plain.client()
    url = make(client, "words")
    assert refused(client.set_queue_attributes, QueueUrl=url, Attributes={}) == (
        "MissingParameter",
        "The request must contain the parameter Attribute.Name.",
    )


def test_a_policy_of_too_many_statements_is_refused(plain):
    client = plain.client()
    policy = json.dumps({"Statement": [{"Sid": str(number)} for number in range(21)]})
    url = make(client, "words")
    assert refused(client.set_queue_attributes, QueueUrl=url, Attributes={"Policy": policy}) == (
        "OverLimit",
        "21 statements were found in the submitted policy, max allowed is 20",
    )


def test_wrong_parameters_of_a_paged_list_are_refused(local):
    client = local.client()
    for number in range(3):
        make(client, f"p{number}")
    invalid = "InvalidParameterValue"
    for limit in (0, 1001):
        assert refused(client.list_queues, MaxResults=limit) == (
            invalid,
            (
                "Value for parameter MaxResults is invalid. Reason: MaxResults must be an integer "
                "between 1 and 1000."
            ),
        )
    token = client.list_queues(MaxResults=2, QueueNamePrefix="p")["NextToken"]
    assert refused(client.list_queues, NextToken=token, QueueNamePrefix="p") == (
        invalid,
        "MaxResults is a mandatory parameter when you provide a value for NextToken.",
    )
    assert refused(client.list_queues, NextToken="a", MaxResults=2) == (
        invalid,
        "Invalid NextToken value.",
    )
    assert refused(client.list_queues, NextToken=token, MaxResults=2) == (
        invalid,
        (
            "Invalid NextToken value. If you are passing in NextToken, you must not change the "
            "other "
            "request parameters."
        ),
    )
    rest = client.list_queues(NextToken=token, MaxResults=2, QueueNamePrefix="p")
    assert [url.rsplit("/")[-1] for url in rest["QueueUrls"]] == ["p2"]
    assert "NextToken" not in rest


def test_a_permission_for_an_owner_only_action_is_refused(either):
    url = make(either)
    allow = {"QueueUrl": url, "Label": "l", "AWSAccountIds": ["111122223333"]}
    assert refused(either.add_permission, **allow, Actions=["RemovePermission"]) == (
        "InvalidParameterValue",
        (
            "Value SQS:RemovePermission for parameter ActionName is invalid. "
            "Reason: Only the queue owner is allowed to invoke this action."
        ),
    )
    assert refused(either.add_permission, **allow, Actions=["Fly"]) == (
        "InvalidParameterValue",
        (
            "Value SQS:Fly for parameter ActionName is invalid. "
            "Reason: Please refer to the appropriate WSDL for a list of valid actions."
        ),
    )
    bad_account = {**allow, "AWSAccountIds": ["me"], "Actions": ["SendMessage"]}
    assert refused(either.add_permission, **bad_account) == (
        "InvalidParameterValue",
        "Value [me] for parameter PrincipalId is invalid. Reason: Unable to verify.",
    )


def test_permissions_without_an_account_and_tags_without_keys_are_refused(plain):
    client = plain.client()
    url = make(client, "words")
    no_account = {"QueueUrl": url, "Label": "l", "AWSAccountIds": [], "Actions": ["SendMessage"]}
    assert refused(client.add_permission, **no_account) == (
        "InvalidParameterValue",
        "Value [] for parameter PrincipalId is invalid. Reason: Unable to verify.",
    )
    assert refused(client.untag_queue, QueueUrl=url, TagKeys=[]) == (
        "InvalidParameterValue",
        "Tag keys must be between 1 and 128 characters in length.",
    )


def test_a_move_task_with_wrong_parameters_is_refused(either):
    source, dead = make_pair(either)
    fifo = make_fifo(either)
    start = either.start_message_move_task
    format_of = "arn:<partition>:<service>:<region>:<account-id>:<resource-id>"
    dead_arn = arn(either, dead)
    for parameters, message in [
        ({"SourceArn": "x"}, f"You must use this format to specify the SourceArn: {format_of}"),
        (
            {"SourceArn": dead_arn, "DestinationArn": ""},
            f"You must use this format to specify the DestinationArn: {format_of}",
        ),
        (
            {"SourceArn": dead_arn, "DestinationArn": dead_arn},
            "Source queue arn and destination queue arn cannot be the same.",
        ),
        (
            {"SourceArn": dead_arn, "DestinationArn": arn(either, fifo)},
            "The source queue and destination queue must be of the same queue type.",
        ),
        (
            {"SourceArn": dead_arn, "MaxNumberOfMessagesPerSecond": 501},
            (
                "Value for parameter MaxNumberOfMessagesPerSecond is invalid. Reason: You must "
                "enter "
                "a number that's between 1 and 500."
            ),
        ),
        (
            {"SourceArn": arn(either, source)},
            "Source queue must be configured as a Dead Letter Queue.",
        ),
    ]:
        assert refused(start, **parameters) == ("InvalidParameterValue", message)
    assert refused(either.list_message_move_tasks, SourceArn=dead_arn, MaxResults=11) == (
        "InvalidParameterValue",
        (
            "Value for parameter MaxResults is invalid. Reason: You must enter a number that's "
            "between 1 and 10."
        ),
    )


def test_an_attempt_that_cannot_be_repeated_is_refused(local, either):
    url = make_fifo(either)
    push(either, url, "one")
    (message,) = receive(either, url, ReceiveRequestAttemptId="again")
    either.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    send_again = {"QueueUrl": url, "ReceiveRequestAttemptId": "again"}
    assert refused(either.receive_message, **send_again) == (
        "InvalidParameterValue",
        (
            "Value again for parameter ReceiveRequestAttemptId is invalid. Reason: The "
            "receiveRequestAttemptId is not valid anymore since the receive call is not retryable."
        ),
    )


def test_a_dead_letter_target_that_does_not_exist_is_refused(plain):
    client = plain.client()
    policy = json.dumps(
        {"deadLetterTargetArn": "arn:aws:sns:us-east-1:000000000000:t", "maxReceiveCount": 1}
    )
    assert refused(client.create_queue, QueueName="none", Attributes={"RedrivePolicy": policy}) == (
        "InvalidParameterValue",
        (
            f"Value {policy} for parameter RedrivePolicy is invalid. Reason: Only SQS queues are "
            "valid "
            "resources for deadLetterTargetArn."
        ),
    )
    # No queue was created: this one has other attributes.
    send(client, make(client, "none"))


ALLOW = "Amazon SQS can't create the redrive allow policy."


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ({"redrivePermission": "byQueue"}, "When you specify the byQueue permission type, you "),
        (
            {"redrivePermission": "byQueue", "sourceQueueArns": []},
            "When you specify the byQueue permission type, you must also specify one or more ",
        ),
        (
            {"redrivePermission": "denyAll", "sourceQueueArns": []},
            "To specify one or more source queue ARNs, you must set redrivePermission to byQueue.",
        ),
    ],
)
def test_an_allow_policy_that_contradicts_itself_is_refused(plain, policy, reason):
    client = plain.client()
    url = make(client, "words")
    text = json.dumps(policy)
    code, message = refused(
        client.set_queue_attributes, QueueUrl=url, Attributes={"RedriveAllowPolicy": text}
    )
    start = f"Value {text} for parameter RedriveAllowPolicy is invalid. Reason: {ALLOW} {reason}"
    assert (code, message.startswith(start)) == ("InvalidParameterValue", True)


@pytest.mark.parametrize("policy", ["no", "[]", "{}", '{"redrivePermission": "maybe"}'])
def test_an_allow_policy_that_cannot_be_read_is_refused(plain, policy):
    client = plain.client()
    given = {"RedriveAllowPolicy": policy}
    url = make(client, "words")
    assert refused(client.set_queue_attributes, QueueUrl=url, Attributes=given) == (
        "InvalidParameterValue",
        (
            "Invalid value for the parameter RedriveAllowPolicy. Reason: Amazon SQS can't create "
            "the redrive allow policy, as it\u2019s in an unsupported format."
        ),
    )


def test_a_redrive_policy_with_an_unknown_field_is_refused(plain):
    client = plain.client()
    dead_arn = arn(client, make(client, "words"))
    policy = json.dumps({"deadLetterTargetArn": dead_arn, "maxReceiveCount": 1, "more": 2})
    code, message = refused(
        client.create_queue, QueueName="more", Attributes={"RedrivePolicy": policy}
    )
    assert code == "InvalidParameterValue"
    assert message.endswith(
        "Reason: Only following attributes are supported: [deadLetterTargetArn, maxReceiveCount]."
    )


@pytest.mark.parametrize("value", ["", " 6", "6 ", "6.0", "-6", "+6", "six", "901"])
def test_a_value_that_is_not_a_number_is_refused(plain, value):
    client = plain.client()
    assert refused(client.create_queue, QueueName="number", Attributes={"DelaySeconds": value}) == (
        "InvalidAttributeValue",
        "Invalid value for the parameter DelaySeconds.",
    )


def test_bad_entries_of_a_visibility_change_fail_with_amazons_texts(plain):
    client = plain.client()
    url = make(client, "words")
    result = client.change_message_visibility_batch(
        QueueUrl=url,
        Entries=[
            {"Id": "a", "ReceiptHandle": "x"},
            {"Id": "b", "ReceiptHandle": "", "VisibilityTimeout": 1},
            {"Id": "c", "ReceiptHandle": "x", "VisibilityTimeout": 43_201},
        ],
    )
    assert "Successful" not in result
    assert [(each["Code"], each["Message"]) for each in result["Failed"]] == [
        (
            "MissingParameter",
            (
                "The request must contain the parameter "
                "ChangeMessageVisibilityBatchRequestEntry.1.VisibilityTimeout."
            ),
        ),
        ("MissingParameter", "The request must contain the parameter ReceiptHandle."),
        (
            "InvalidParameterValue",
            (
                "Value 43201 for parameter VisibilityTimeout is invalid. Reason: "
                "VisibilityTimeout must be an integer between 0 and 43200."
            ),
        ),
    ]


def test_an_empty_receipt_is_refused_as_missing(plain):
    client = plain.client()
    url = make(client, "words")
    message = ("MissingParameter", "The request must contain the parameter ReceiptHandle.")
    assert refused(client.delete_message, QueueUrl=url, ReceiptHandle="") == message
    change = {"QueueUrl": url, "ReceiptHandle": "", "VisibilityTimeout": 1}
    assert refused(client.change_message_visibility, **change) == message
    result = client.delete_message_batch(QueueUrl=url, Entries=[{"Id": "a", "ReceiptHandle": ""}])
    assert [each["Code"] for each in result["Failed"]] == ["MissingParameter"]


def test_a_permission_may_be_added_twice_but_twenty_are_the_limit(local, either):
    url = make(either)
    allow = {"QueueUrl": url, "AWSAccountIds": ["111122223333"], "Actions": ["SendMessage"]}
    for number in range(20):
        for _ in range(2):
            either.add_permission(**allow, Label=f"l{number}")
    assert refused(either.add_permission, **{**allow, "Actions": ["*"]}, Label="l0") == (
        "InvalidParameterValue",
        "Value l0 for parameter Label is invalid. Reason: Already exists.",
    )
    assert refused(either.add_permission, **allow, Label="more") == (
        "OverLimit",
        "21 Statements were found, maximum allowed is 20.",
    )
    batch = {**allow, "Actions": ["SendMessageBatch"]}
    assert refused(either.add_permission, **batch, Label="l0")[1].startswith(
        "Value SQS:SendMessageBatch for parameter ActionName is invalid."
    )
