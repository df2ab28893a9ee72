"""Amazon's errors as ours: sorted by what the caller should do next.

Endpoints name one error in several ways (`AWS.SimpleQueueService.NonExistentQueue` and
`QueueDoesNotExist` are the same): what counts is the part after the last dot.
"""

import re
from typing import Final

from penstock.errors import (
    AttemptLapsed,
    BackendLost,
    InFlightLimit,
    InvalidField,
    InvalidReceipt,
    MessageTooLarge,
    Overloaded,
    PenstockError,
    QueueExists,
    QueueNotFound,
    RequestError,
    StaleReceipt,
    UnsupportedOperation,
)

# Amazon's parameters and attributes, by the names they have here.
_FIELDS: Final = {
    "VisibilityTimeout": "visibility_timeout",
    "DelaySeconds": "delay",
    "WaitTimeSeconds": "wait",
    "ReceiveMessageWaitTimeSeconds": "wait",
    "MessageRetentionPeriod": "retention",
    "MaximumMessageSize": "max_body_bytes",
    "RedrivePolicy": "dead_letter",
    "FifoQueue": "fifo",
    "ContentBasedDeduplication": "dedup_by_content",
    "DeduplicationScope": "dedup_per_group",
    "MessageGroupId": "group",
    "MessageDeduplicationId": "dedup_id",
    "ReceiveRequestAttemptId": "attempt_id",
    "MaxNumberOfMessages": "limit",
    "MessageBody": "body",
    "MessageAttributes": "attributes",
    "ReceiptHandle": "receipt",
    "QueueName": "queue",
    "QueueUrl": "queue",
    "DestinationArn": "to",
    "SourceArn": "queue",
    "Tags": "annotations",
    "TagKey": "annotations",
    "TagValue": "annotations",
}
_NAMED: Final = re.compile("|".join(sorted(_FIELDS, key=len, reverse=True)))

_KINDS: Final[dict[str, type[PenstockError]]] = {
    "NonExistentQueue": QueueNotFound,
    "QueueDoesNotExist": QueueNotFound,
    "ResourceNotFoundException": QueueNotFound,
    "QueueAlreadyExists": QueueExists,
    "QueueNameExists": QueueExists,
    "ReceiptHandleIsInvalid": InvalidReceipt,
    "MessageNotInflight": StaleReceipt,
    "OverLimit": InFlightLimit,
    "BatchRequestTooLong": MessageTooLarge,
    "UnsupportedOperation": UnsupportedOperation,
    **dict.fromkeys(
        (
            "InvalidParameterValue",
            "InvalidParameterValueException",
            "InvalidParameterCombination",
            "InvalidAttributeName",
            "InvalidAttributeValue",
            "InvalidMessageContents",
            "MissingParameter",
            "MissingRequiredParameterException",
            "InvalidAddress",
        ),
        InvalidField,
    ),
    **dict.fromkeys(
        (
            "RequestThrottled",
            "Throttling",
            "ThrottlingException",
            "ThrottledException",
            "TooManyRequestsException",
            "RequestLimitExceeded",
            "SlowDown",
            "KmsThrottled",
            "PurgeQueueInProgress",
            "QueueDeletedRecently",
            "ServiceUnavailable",
            "ServiceUnavailableException",
        ),
        Overloaded,
    ),
    **dict.fromkeys(("InternalFailure", "InternalError", "InternalServerError"), BackendLost),
}
_NOT_LET_IN: Final = frozenset(
    {
        "AccessDenied",
        "AccessDeniedException",
        "ExpiredToken",
        "ExpiredTokenException",
        "IncompleteSignature",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "InvalidSecurity",
        "InvalidSignatureException",
        "KmsAccessDenied",
        "MissingAuthenticationToken",
        "MissingAuthenticationTokenException",
        "NotAuthorized",
        "OptInRequired",
        "RequestExpired",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
    }
)


def error_of(code: str, message: str, status: int, queue: str | None = None) -> PenstockError:
    """The error that stands for an answer of SQS, about this queue if about any."""
    name = code.rpartition(".")[2].rpartition("#")[2]
    said = " ".join(message.split()) or name
    if name in _NOT_LET_IN:
        return RequestError(f"credentials: Amazon SQS does not let them do this ({name}): {said}")
    kind = _KINDS.get(name)
    if kind is None:
        if status in (429, 503):
            return Overloaded(f"Amazon SQS asks for patience ({name}): {said}")
        if status >= 500:
            return BackendLost(f"Amazon SQS failed ({status} {name}): {said}")
        return RequestError(f"Amazon SQS refuses this ({name}): {said}")
    if kind is QueueNotFound:
        return no_queue(queue) if queue is not None else QueueNotFound(f"queue: {said}")
    if kind is QueueExists:
        return QueueExists(
            f"queue: {queue!r} exists with other settings ({field_in(said) or said}); "
            "configure it instead"
        )
    if kind is InvalidField:
        return _invalid(said)
    if kind in (InvalidReceipt, StaleReceipt):
        return kind(f"receipt: {said}")
    if kind is MessageTooLarge:
        return MessageTooLarge(f"body: {said}")
    return kind(f"Amazon SQS says {name}: {said}")


def no_queue(queue: str) -> QueueNotFound:
    """There is no such queue."""
    return QueueNotFound(f"queue: there is no queue {queue!r}; create it first")


def field_in(said: str) -> str | None:
    """The name here of the first parameter or attribute that Amazon's words mention."""
    found = _NAMED.search(said)
    return None if found is None else _FIELDS[found[0]]


def _invalid(said: str) -> PenstockError:
    lowered = said.lower()
    if "shorter than" in lowered or "message too long" in lowered:
        return MessageTooLarge(f"body: with its attributes it is too large: {said}")
    field = field_in(said)
    if field == "receipt":
        # A receipt that SQS can read, but that holds no message any more.
        return StaleReceipt(f"receipt: {said}")
    if field == "attempt_id" and "expired" in lowered:
        return AttemptLapsed(f"attempt_id: {said}; pull with a new id")
    if "task running" in lowered:
        return Overloaded(f"queue: {said}")
    if "dead letter queue" in lowered and field is None:
        return InvalidField(f"to: {said} Say where its messages should go")
    if "characters found" in lowered:
        field = "body"
    return InvalidField(f"{field or 'request'}: {said}")
