"""Every error that SQS declares becomes an error of Penstock, by what the caller can do."""

import gzip
import json
from pathlib import Path

import botocore
import pytest

from penstock.backends.sqs.errors import error_of
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
    UnavailableError,
)

MODEL = Path(botocore.__file__).parent / "data/sqs/2012-11-05/service-2.json.gz"
# Errors that the adapter's requests cannot cause, or whose text needs no addition.
GENERAL = {
    "BatchEntryIdsNotDistinct",
    "EmptyBatchRequest",
    "InvalidBatchEntryId",
    "InvalidIdFormat",
    "TooManyEntriesInBatchRequest",
    "KmsDisabled",
    "KmsInvalidKeyUsage",
    "KmsInvalidState",
    "KmsNotFound",
    "KmsOptInRequired",
}


def declared():
    with gzip.open(MODEL) as file:
        shapes = json.load(file)["shapes"]
    return {name for name, shape in shapes.items() if shape.get("exception")}


def test_only_the_listed_errors_of_sqs_become_plain_request_errors():
    plain = set()
    for name in declared():
        error = error_of(f"com.amazonaws.sqs#{name}", "why", 400, "orders")
        assert isinstance(error, PenstockError)
        if type(error) is RequestError and not str(error).startswith("credentials:"):
            plain.add(name)
    assert plain == GENERAL


@pytest.mark.parametrize(
    ("code", "message", "status", "kind", "words"),
    [
        ("AWS.SimpleQueueService.NonExistentQueue", "gone", 400, QueueNotFound, "no queue 'q'"),
        (
            "QueueAlreadyExists",
            (
                "A queue already exists with the same name and a different value for attribute "
                "VisibilityTimeout"
            ),
            400,
            QueueExists,
            "(visibility_timeout); configure",
        ),
        ("ReceiptHandleIsInvalid", "bad", 404, InvalidReceipt, "receipt: bad"),
        ("AWS.SimpleQueueService.MessageNotInflight", "no", 400, StaleReceipt, "receipt: no"),
        (
            "InvalidParameterValue",
            (
                "Value x for parameter ReceiptHandle is invalid. Reason: The receipt handle has "
                "expired."
            ),
            400,
            StaleReceipt,
            "receipt:",
        ),
        (
            "InvalidParameterValue",
            "One or more parameters are invalid. Reason: Message must be shorter than 2000 bytes.",
            400,
            MessageTooLarge,
            "2000 bytes",
        ),
        (
            "InvalidParameterValue",
            (
                "Value 9 for parameter ReceiveRequestAttemptId is invalid. Reason: The receive "
                "request attempt ID has expired, or its messages were changed."
            ),
            400,
            AttemptLapsed,
            "pull with a new id",
        ),
        (
            "InvalidParameterValue",
            "Value 901 for parameter DelaySeconds is invalid.",
            400,
            InvalidField,
            "delay: Value 901",
        ),
        ("InvalidMessageContents", "Invalid characters found.", 400, InvalidField, "body:"),
        ("AWS.SimpleQueueService.BatchRequestTooLong", "x", 400, MessageTooLarge, "body:"),
        ("OverLimit", "Too many messages in flight.", 403, InFlightLimit, "in flight"),
        ("AWS.SimpleQueueService.PurgeQueueInProgress", "60 s", 403, Overloaded, "60 s"),
        ("Throttling", "Rate exceeded", 400, Overloaded, "Rate exceeded"),
        ("AccessDenied", "no policy", 403, RequestError, "credentials: "),
        ("ExpiredToken", "old", 403, RequestError, "credentials: "),
        ("NewError", "text", 418, RequestError, "(NewError): text"),
        ("NewError", "text", 500, BackendLost, "(500 NewError)"),
        ("ServiceUnavailable", "", 503, Overloaded, "ServiceUnavailable"),
        ("429", "", 429, Overloaded, "overloaded"),
    ],
)
def test_an_error_says_what_to_do_next(code, message, status, kind, words):
    error = error_of(code, message, status, "q")
    assert type(error) is kind
    assert words in str(error)
    assert "\n" not in str(error)


def test_only_errors_after_which_a_retry_may_succeed_are_unavailable_errors():
    later = ["RequestThrottled", "ServiceUnavailable", "InternalFailure", "QueueDeletedRecently"]
    for name in later:
        assert isinstance(error_of(name, "", 503), UnavailableError)
    for name in declared() - {*later, "PurgeQueueInProgress", "KmsThrottled"}:
        assert isinstance(error_of(name, "", 400, "q"), RequestError), name
