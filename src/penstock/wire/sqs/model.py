"""The 23 actions of Amazon SQS: the parameters and the result of each, once for both protocols.

A structure's fields are renamed to the names of the API (`queue_url` is `QueueUrl`), so JSON
decodes and encodes them directly, and the Query protocol by the same names. Every parameter may be
absent for the decoder: `Action.required` lists the required ones, because Amazon has its own error
text for a missing one.
"""

import re
from typing import Any, Final, NamedTuple

import msgspec

_STEPS: Final = re.compile(r"(\w+)|\[(\d+)\]")
_NAMES: Final = {
    "aws_account_ids": "AWSAccountIds",
    "queue_owner_account": "QueueOwnerAWSAccountId",
    "receipt": "ReceiptHandle",
    "task": "TaskHandle",
    "md5_of_body": "MD5OfBody",
    "md5_of_message_body": "MD5OfMessageBody",
    "md5_of_message_attributes": "MD5OfMessageAttributes",
    "md5_of_message_system_attributes": "MD5OfMessageSystemAttributes",
    "source_urls": "queueUrls",
    "creation_tags": "tags",
}


def wire_name(field: str) -> str:
    """The name of a field on the wire."""
    return _NAMES.get(field) or "".join(part.capitalize() for part in field.split("_"))


def value_at(parameters: Any, path: str) -> Any:
    """The value at a path in untyped parameters, such as `Entries[0].DelaySeconds`."""
    for key, index in _STEPS.findall(path):
        parameters = parameters[key or int(index)]
    return parameters


class Shape(msgspec.Struct, rename=wire_name, omit_defaults=True, gc=False):
    """Anything with named fields that goes over the wire."""


class AttributeValue(Shape):
    """A message attribute: its type, and its text or its bytes."""

    string_value: str | None = None
    binary_value: bytes | None = None
    string_list_values: list[str] | None = None
    binary_list_values: list[bytes] | None = None
    data_type: str | None = None


AttributeValues = dict[str, AttributeValue]


class QueueRequest(Shape):
    """The parameters of an action on one queue that has no others."""

    queue_url: str | None = None


class AddPermissionRequest(QueueRequest):
    label: str | None = None
    aws_account_ids: list[str] | None = None
    actions: list[str] | None = None


class RemovePermissionRequest(QueueRequest):
    label: str | None = None


class CreateQueueRequest(Shape):
    queue_name: str | None = None
    attributes: dict[str, str] | None = None
    creation_tags: dict[str, str] | None = None


class GetQueueUrlRequest(Shape):
    queue_name: str | None = None
    queue_owner_account: str | None = None


class ListQueuesRequest(Shape):
    queue_name_prefix: str | None = None
    next_token: str | None = None
    max_results: int | None = None


class GetQueueAttributesRequest(QueueRequest):
    attribute_names: list[str] | None = None


class SetQueueAttributesRequest(QueueRequest):
    attributes: dict[str, str] | None = None


class TagQueueRequest(QueueRequest):
    tags: dict[str, str] | None = None


class UntagQueueRequest(QueueRequest):
    tag_keys: list[str] | None = None


class ListDeadLetterSourceQueuesRequest(QueueRequest):
    next_token: str | None = None
    max_results: int | None = None


class SendMessageRequest(QueueRequest):
    message_body: str | None = None
    delay_seconds: int | None = None
    message_attributes: AttributeValues | None = None
    message_system_attributes: AttributeValues | None = None
    message_deduplication_id: str | None = None
    message_group_id: str | None = None


class SendEntry(Shape):
    """One message of a batch."""

    id: str | None = None
    message_body: str | None = None
    delay_seconds: int | None = None
    message_attributes: AttributeValues | None = None
    message_system_attributes: AttributeValues | None = None
    message_deduplication_id: str | None = None
    message_group_id: str | None = None


class SendMessageBatchRequest(QueueRequest):
    entries: list[SendEntry] | None = None


class ReceiveMessageRequest(QueueRequest):
    attribute_names: list[str] | None = None
    message_system_attribute_names: list[str] | None = None
    message_attribute_names: list[str] | None = None
    max_number_of_messages: int | None = None
    visibility_timeout: int | None = None
    wait_time_seconds: int | None = None
    receive_request_attempt_id: str | None = None


class DeleteMessageRequest(QueueRequest):
    receipt: str | None = None


class DeleteEntry(Shape):
    """One receipt of a batch."""

    id: str | None = None
    receipt: str | None = None


class DeleteMessageBatchRequest(QueueRequest):
    entries: list[DeleteEntry] | None = None


class ChangeMessageVisibilityRequest(QueueRequest):
    receipt: str | None = None
    visibility_timeout: int | None = None


class ChangeEntry(Shape):
    """One receipt of a batch, and how long its message should stay hidden."""

    id: str | None = None
    receipt: str | None = None
    visibility_timeout: int | None = None


class ChangeMessageVisibilityBatchRequest(QueueRequest):
    entries: list[ChangeEntry] | None = None


class StartMessageMoveTaskRequest(Shape):
    source_arn: str | None = None
    destination_arn: str | None = None
    max_number_of_messages_per_second: int | None = None


class CancelMessageMoveTaskRequest(Shape):
    task: str | None = None


class ListMessageMoveTasksRequest(Shape):
    source_arn: str | None = None
    max_results: int | None = None


# Results.


class QueueUrlResult(Shape):
    queue_url: str


class QueueUrlsResult(Shape):
    queue_urls: list[str] = []
    next_token: str | None = None


class SourceUrlsResult(Shape):
    source_urls: list[str]
    next_token: str | None = None


class AttributesResult(Shape):
    attributes: dict[str, str] = {}


class TagsResult(Shape):
    tags: dict[str, str] = {}


class SendResult(Shape):
    md5_of_message_body: str
    message_id: str
    md5_of_message_attributes: str | None = None
    md5_of_message_system_attributes: str | None = None
    sequence_number: str | None = None


class SendResultEntry(Shape):
    id: str
    message_id: str
    md5_of_message_body: str
    md5_of_message_attributes: str | None = None
    md5_of_message_system_attributes: str | None = None
    sequence_number: str | None = None


class ResultEntry(Shape):
    id: str


class ErrorEntry(Shape):
    """The error of one entry of a batch; the others are not affected."""

    id: str
    sender_fault: bool
    code: str
    message: str


class BatchResult(Shape):
    successful: list[Any] = []
    failed: list[ErrorEntry] = []


class Received(Shape):
    """One message as its receiver sees it."""

    message_id: str
    receipt: str
    md5_of_body: str
    body: str
    attributes: dict[str, str] | None = None
    md5_of_message_attributes: str | None = None
    message_attributes: AttributeValues | None = None


class ReceiveResult(Shape):
    messages: list[Received] = []


class StartMoveResult(Shape):
    task: str


class CancelMoveResult(Shape):
    approximate_number_of_messages_moved: int


class MoveTaskEntry(Shape):
    """How far one move task is."""

    status: str
    source_arn: str
    approximate_number_of_messages_moved: int
    task: str | None = None
    destination_arn: str | None = None
    max_number_of_messages_per_second: int | None = None
    approximate_number_of_messages_to_move: int | None = None
    failure_reason: str | None = None
    started_timestamp: int | None = None


class MoveTasksResult(Shape):
    results: list[MoveTaskEntry] = []


class Action(NamedTuple):
    """An action: its name, its parameters, and which of them are required."""

    name: str
    parameters: type[Shape]
    required: tuple[str, ...]


def _actions() -> dict[str, Action]:
    table: dict[str, tuple[type[Shape], tuple[str, ...]]] = {
        "AddPermission": (
            AddPermissionRequest,
            ("queue_url", "label", "aws_account_ids", "actions"),
        ),
        "CancelMessageMoveTask": (CancelMessageMoveTaskRequest, ("task",)),
        "ChangeMessageVisibility": (
            ChangeMessageVisibilityRequest,
            ("queue_url", "receipt", "visibility_timeout"),
        ),
        "ChangeMessageVisibilityBatch": (ChangeMessageVisibilityBatchRequest, ("queue_url",)),
        "CreateQueue": (CreateQueueRequest, ("queue_name",)),
        "DeleteMessage": (DeleteMessageRequest, ("queue_url", "receipt")),
        "DeleteMessageBatch": (DeleteMessageBatchRequest, ("queue_url",)),
        "DeleteQueue": (QueueRequest, ("queue_url",)),
        "GetQueueAttributes": (GetQueueAttributesRequest, ("queue_url",)),
        "GetQueueUrl": (GetQueueUrlRequest, ("queue_name",)),
        "ListDeadLetterSourceQueues": (ListDeadLetterSourceQueuesRequest, ("queue_url",)),
        "ListMessageMoveTasks": (ListMessageMoveTasksRequest, ("source_arn",)),
        "ListQueueTags": (QueueRequest, ("queue_url",)),
        "ListQueues": (ListQueuesRequest, ()),
        "PurgeQueue": (QueueRequest, ("queue_url",)),
        "ReceiveMessage": (ReceiveMessageRequest, ("queue_url",)),
        "RemovePermission": (RemovePermissionRequest, ("queue_url", "label")),
        "SendMessage": (SendMessageRequest, ("queue_url", "message_body")),
        "SendMessageBatch": (SendMessageBatchRequest, ("queue_url",)),
        "SetQueueAttributes": (SetQueueAttributesRequest, ("queue_url", "attributes")),
        "StartMessageMoveTask": (StartMessageMoveTaskRequest, ("source_arn",)),
        "TagQueue": (TagQueueRequest, ("queue_url", "tags")),
        "UntagQueue": (UntagQueueRequest, ("queue_url", "tag_keys")),
    }
    return {name: Action(name, shape, required) for name, (shape, required) in table.items()}


ACTIONS: Final = _actions()
# The actions that change nothing. A receive is none of them: it claims.
READ_ONLY_ACTIONS: Final = frozenset(
    {
        "GetQueueAttributes",
        "GetQueueUrl",
        "ListDeadLetterSourceQueues",
        "ListMessageMoveTasks",
        "ListQueueTags",
        "ListQueues",
    }
)
