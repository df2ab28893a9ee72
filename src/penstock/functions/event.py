"""The event that a function is given for a batch of messages, as Lambda makes it; pure."""

from base64 import b64encode
from collections.abc import Sequence
from typing import Any, Final

from penstock.service import Claim
from penstock.wire.sqs.address import Owner, QueueDirectory
from penstock.wire.sqs.message import body_text, digest, show_attributes, system_attributes

_EVERY: Final = ("All",)


def sqs_event(claims: Sequence[Claim], home: Owner, *, fifo: bool) -> dict[str, Any]:
    """The event of a batch; queues with bare names belong to `home`."""
    return {"Records": [sqs_entry(claim, home, fifo=fifo) for claim in claims]}


def sqs_entry(claim: Claim, home: Owner, *, fifo: bool) -> dict[str, Any]:
    """One message of an event."""
    directory = QueueDirectory(home)
    try:
        text = claim.body.decode()
    except UnicodeDecodeError:
        text = body_text(claim.body)
    source_arn = None if claim.source is None else directory.arn(claim.source)
    return {
        "messageId": claim.id,
        "receiptHandle": claim.receipt,
        "body": text,
        "attributes": system_attributes(claim, fifo, home.account, source_arn),
        "messageAttributes": _attributes(claim),
        "md5OfBody": digest(text.encode()),
        "eventSource": "aws:sqs",
        "eventSourceARN": directory.arn(claim.queue),
        "awsRegion": directory.address(claim.queue).owner.region,
    }


def _attributes(claim: Claim) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, value in show_attributes(claim.attributes, claim.context, _EVERY).items():
        shown: dict[str, Any] = {}
        if value.binary_value is not None:
            shown["binaryValue"] = b64encode(value.binary_value).decode()
        else:
            shown["stringValue"] = value.string_value
        found[name] = {
            **shown,
            "stringListValues": [],
            "binaryListValues": [],
            "dataType": value.data_type,
        }
    return found
