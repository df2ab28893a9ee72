"""Translates Amazon's errors into Penstock's.

Endpoints name one error in several ways (`AWS.SimpleQueueService.NonExistentQueue` and
`QueueDoesNotExist` are the same): only the part after the last dot is used.
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
_DENIED: Final = frozenset(
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
    """Translates an error of SQS; `queue` is the queue of the request, if any."""
    name = code.rpartition(".")[2].rpartition("#")[2]
    text = " ".join(message.split()) or name
    if name in _DENIED:
        return RequestError(f"credentials: Amazon SQS denies this request ({name}): {text}")
    kind = _KINDS.get(name)
    if kind is None:
        if status in (429, 503):
            return Overloaded(f"Amazon SQS is overloaded ({name}): {text}")
        if status >= 500:
            return BackendLost(f"Amazon SQS failed ({status} {name}): {text}")
        return RequestError(f"Amazon SQS refuses this ({name}): {text}")
    if kind is QueueNotFound:
        return no_queue(queue) if queue is not None else QueueNotFound(f"queue: {text}")
    if kind is QueueExists:
        return QueueExists(
            f"queue: {queue!r} exists with other settings ({field_in(text) or text}); "
            "configure it instead"
        )
    if kind is InvalidField:
        return _invalid(text)
    if kind in (InvalidReceipt, StaleReceipt):
        return kind(f"receipt: {text}")
    if kind is MessageTooLarge:
        return MessageTooLarge(f"body: {text}")
    return kind(f"Amazon SQS says {name}: {text}")


def no_queue(queue: str) -> QueueNotFound:
    """The error for a queue that does not exist."""
    return QueueNotFound(f"queue: there is no queue {queue!r}; create it first")


def field_in(text: str) -> str | None:
    """Penstock's name of the first parameter or attribute that a message of Amazon's mentions."""
    found = _NAMED.search(text)
    return None if found is None else _FIELDS[found[0]]


def _invalid(text: str) -> PenstockError:
    lowered = text.lower()
    if "shorter than" in lowered or "message too long" in lowered:
        return MessageTooLarge(f"body: with its attributes it is too large: {text}")
    field = field_in(text)
    if field == "receipt":
        # A receipt that SQS can read, but whose message is gone.
        return StaleReceipt(f"receipt: {text}")
    if field == "attempt_id" and "expired" in lowered:
        return AttemptLapsed(f"attempt_id: {text}; pull with a new id")
    if "task running" in lowered:
        return Overloaded(f"queue: {text}")
    if "dead letter queue" in lowered and field is None:
        return InvalidField(f"to: {text} Say where its messages should go")
    if "characters found" in lowered:
        field = "body"
    return InvalidField(f"{field or 'request'}: {text}")
