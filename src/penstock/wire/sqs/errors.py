"""The errors of Amazon SQS: the name in JSON, the code in the Query protocol, the status.

The two protocols name an error differently. JSON has `com.amazonaws.sqs#QueueDoesNotExist`, and
also sends the code of Query, `AWS.SimpleQueueService.NonExistentQueue`, in a header, because SDKs
written for Query look for it. A `Refusal` is raised where a request is found wrong, before anything
is changed.
"""

from typing import Final, NamedTuple

MESSAGE_CHARS_MAX: Final = 4_096

_MODELLED: Final = "com.amazonaws.sqs"
_GENERAL: Final = "com.amazon.coral.service"


class Fault(NamedTuple):
    """One error of the API."""

    name: str
    query_code: str
    status: int
    namespace: str = _MODELLED

    @property
    def json_type(self) -> str:
        """The value of `__type`."""
        return f"{self.namespace}#{self.name}"


class Refusal(Exception):
    """The request is refused; the fault says which error of the API this is.

    A message that quotes a long value is cut: the answer's size must not follow the request's.
    """

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__()
        self.fault = fault
        self.message = message if len(message) <= MESSAGE_CHARS_MAX else _cut(message)

    def __str__(self) -> str:
        return self.message


def _cut(message: str) -> str:
    half = MESSAGE_CHARS_MAX // 2
    return f"{message[:half]} … {message[-half:]}"


def _of_queue_service(name: str, code: str = "", status: int = 400) -> Fault:
    return Fault(name, f"AWS.SimpleQueueService.{code or name}", status)


BATCH_ENTRY_IDS_NOT_DISTINCT: Final = _of_queue_service("BatchEntryIdsNotDistinct")
BATCH_REQUEST_TOO_LONG: Final = _of_queue_service("BatchRequestTooLong")
EMPTY_BATCH_REQUEST: Final = _of_queue_service("EmptyBatchRequest")
INVALID_BATCH_ENTRY_ID: Final = _of_queue_service("InvalidBatchEntryId")
MESSAGE_NOT_INFLIGHT: Final = _of_queue_service("MessageNotInflight")
PURGE_QUEUE_IN_PROGRESS: Final = _of_queue_service("PurgeQueueInProgress", status=403)
QUEUE_DELETED_RECENTLY: Final = _of_queue_service("QueueDeletedRecently")
QUEUE_DOES_NOT_EXIST: Final = _of_queue_service("QueueDoesNotExist", "NonExistentQueue")
TOO_MANY_ENTRIES: Final = _of_queue_service("TooManyEntriesInBatchRequest")
UNSUPPORTED_OPERATION: Final = _of_queue_service("UnsupportedOperation")
INVALID_ADDRESS: Final = Fault("InvalidAddress", "InvalidAddress", 404)
INVALID_ATTRIBUTE_NAME: Final = Fault("InvalidAttributeName", "InvalidAttributeName", 400)
INVALID_ATTRIBUTE_VALUE: Final = Fault("InvalidAttributeValue", "InvalidAttributeValue", 400)
INVALID_MESSAGE_CONTENTS: Final = Fault("InvalidMessageContents", "InvalidMessageContents", 400)
INVALID_SECURITY: Final = Fault("InvalidSecurity", "InvalidSecurity", 403)
OVER_LIMIT: Final = Fault("OverLimit", "OverLimit", 403)
QUEUE_NAME_EXISTS: Final = Fault("QueueNameExists", "QueueAlreadyExists", 400)
RECEIPT_IS_INVALID: Final = Fault("ReceiptHandleIsInvalid", "ReceiptHandleIsInvalid", 404)
REQUEST_THROTTLED: Final = Fault("RequestThrottled", "RequestThrottled", 403)
RESOURCE_NOT_FOUND: Final = Fault("ResourceNotFoundException", "ResourceNotFoundException", 404)

# Errors that the model of SQS does not list, because all services of Amazon have them.
INVALID_PARAMETER_VALUE: Final = Fault(
    "InvalidParameterValueException", "InvalidParameterValue", 400, _GENERAL
)
MISSING_PARAMETER: Final = Fault(
    "MissingRequiredParameterException", "MissingParameter", 400, _GENERAL
)
MISSING_ACTION: Final = Fault("MissingActionException", "MissingAction", 400, _GENERAL)
SERIALIZATION: Final = Fault("SerializationException", "MalformedInput", 400, _GENERAL)
UNKNOWN_OPERATION: Final = Fault("UnknownOperationException", "InvalidAction", 400, _GENERAL)
NO_OPERATION: Final = Fault("UnknownOperationException", "UnknownOperation", 404, _GENERAL)
ACCESS_DENIED: Final = Fault("AccessDeniedException", "AccessDenied", 403, _GENERAL)
MISSING_TOKEN: Final = Fault(
    "MissingAuthenticationTokenException", "MissingAuthenticationToken", 403, _GENERAL
)
SIGNATURE: Final = Fault("InvalidSignatureException", "SignatureDoesNotMatch", 403, _GENERAL)
SERVICE_UNAVAILABLE: Final = Fault(
    "ServiceUnavailableException", "ServiceUnavailable", 503, _GENERAL
)

MODELLED: Final = {
    fault.name: fault
    for fault in list(globals().values())
    if isinstance(fault, Fault) and fault.namespace == _MODELLED
}


def invalid_value(value: object, parameter: str, reason: str) -> Refusal:
    """The refusal of a parameter's value, in the words Amazon uses."""
    shown = str(value)
    return Refusal(
        INVALID_PARAMETER_VALUE,
        f"Value {shown} for parameter {parameter} is invalid. Reason: {reason}",
    )


def missing(parameter: str) -> Refusal:
    """The refusal of a request without a required parameter."""
    return Refusal(MISSING_PARAMETER, f"The request must contain the parameter {parameter}.")


def absent(action: str, parameter: str) -> Refusal:
    """The refusal of an action without a required parameter; two have words of their own."""
    if (action, parameter) == ("CreateQueue", "QueueName"):
        return Refusal(
            INVALID_PARAMETER_VALUE,
            "Value for parameter QueueName is invalid. Reason: Must specify a queue name.",
        )
    if (action, parameter) == ("SetQueueAttributes", "Attributes"):
        return missing("Attribute.Name")
    return missing(parameter)
