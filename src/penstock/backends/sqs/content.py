"""Translates messages between Penstock's form and that of Amazon SQS.

SQS accepts a body of at least one character that XML allows, and up to ten attributes that have
plain names and are not empty. Content that fits is sent unchanged, so that other programs can read
it. Other content is encoded, and two attributes say how:

    Penstock.Body   base64   the body is the base64 of the bytes pushed
                    empty    the body pushed was empty
    Penstock.More   JSON     {"text": {…}, "base64": {…}, "context": {…}}: attributes that did not
                             fit, as text or as bytes, and the context of the push
"""

import re
import secrets
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from penstock.errors import InvalidField, MessageTooLarge
from penstock.service import (
    DELAY_MS_MAX,
    PRIORITY_MAX,
    TTL_MS_MAX,
    Attributes,
    Claim,
    Push,
    check_id,
    check_number,
    check_pairs,
)
from penstock.wire.sqs.errors import Refusal
from penstock.wire.sqs.message import ATTRIBUTES_MAX, body_bytes, check_identifier

BODY: Final = "Penstock.Body"
MORE: Final = "Penstock.More"
MESSAGE_BYTES_MAX: Final = 1_048_576
# Dedup ids of this prefix were made here, for pushes that had none.
_OWN_DEDUP: Final = "penstock-"
_PLAIN_NAME: Final = re.compile(r"(?!aws\.|amazon\.|\.)(?!.*\.\.)[A-Z0-9_.-]{1,256}(?<!\.)", re.I)
_EMPTY: Final = "empty"
_BASE64: Final = "base64"
# Sent in place of an empty body, which SQS refuses.
_PLACEHOLDER: Final = "-"


class More(msgspec.Struct, omit_defaults=True):
    """The content of `Penstock.More`."""

    text: dict[str, str] = {}
    base64: dict[str, bytes] = {}
    context: dict[str, str] | None = None


def check_push(command: Push) -> None:
    """Checks the fields of a push as every backend does. Raises InvalidField."""
    if type(command.body) is not bytes:
        raise InvalidField(f"body: expected bytes, got {type(command.body).__name__}")
    if command.attributes is not None:
        check_pairs("attributes", command.attributes, allow_bytes=True)
    if command.context is not None:
        check_pairs("context", command.context, allow_bytes=False)
    check_number("priority", command.priority, 0, PRIORITY_MAX)
    if command.delay_ms is not None:
        check_number("delay_ms", command.delay_ms, 0, DELAY_MS_MAX)
    if command.ttl_ms is not None:
        check_number("ttl_ms", command.ttl_ms, 1, TTL_MS_MAX)
    for field, value in (("group", command.group), ("dedup_id", command.dedup_id)):
        if value is not None:
            check_id(field, value)
            check_plain_id(field, value)


def check_plain_id(field: str, value: str) -> str:
    """Returns an identifier that SQS accepts. Raises InvalidField."""
    try:
        return check_identifier(value, field)
    except Refusal:
        raise InvalidField(
            f"{field}: Amazon SQS takes 1 to 128 letters, digits and punctuation marks of ASCII, "
            f"and no spaces; got {value!r}"
        ) from None


def encode(command: Push) -> dict[str, Any]:
    """The body and attributes of a message to send. Raises MessageTooLarge."""
    text, mark = _encode_body(command.body)
    sent: dict[str, Any] = {"MessageBody": text}
    attributes = _encode_attributes(command.attributes or {}, command.context, mark)
    if attributes:
        sent["MessageAttributes"] = attributes
    size_bytes = size_of(sent)
    if size_bytes > MESSAGE_BYTES_MAX:
        coded = f", as base64 of {len(command.body)}" if mark == _BASE64 else ""
        raise MessageTooLarge(
            f"body: {size_bytes} bytes with its attributes{coded}; "
            f"Amazon SQS takes at most {MESSAGE_BYTES_MAX}"
        )
    return sent


def _encode_body(body: bytes) -> tuple[str, str | None]:
    if not body:
        return _PLACEHOLDER, _EMPTY
    try:
        text = body.decode()
        body_bytes(text)
    except (UnicodeDecodeError, Refusal):
        return b64encode(body).decode(), _BASE64
    return text, None


def _encode_attributes(
    given: Attributes, context: dict[str, str] | None, mark: str | None
) -> dict[str, dict[str, Any]]:
    fits = {name: value for name, value in given.items() if _is_plain(name, value)}
    room = ATTRIBUTES_MAX - (mark is not None)
    if len(fits) > room or len(fits) < len(given) or context:
        # One of the ten is the attribute that holds the rest.
        fits = dict(list(fits.items())[: room - 1])
    sent: dict[str, dict[str, Any]] = {}
    for name, value in fits.items():
        if isinstance(value, bytes):
            sent[name] = {"DataType": "Binary", "BinaryValue": value}
        else:
            sent[name] = {"DataType": "String", "StringValue": value}
    if mark is not None:
        sent[BODY] = {"DataType": "String", "StringValue": mark}
    rest = {name: value for name, value in given.items() if name not in fits}
    if rest or context:
        more = More(context=context or None)
        for name, value in rest.items():
            if isinstance(value, bytes):
                more.base64[name] = value
            else:
                more.text[name] = value
        text = msgspec.json.encode(more).decode()
        sent[MORE] = {"DataType": "String", "StringValue": text}
    return sent


def _is_plain(name: str, value: str | bytes) -> bool:
    if not value or name in (BODY, MORE) or not name.isascii() or not _PLAIN_NAME.fullmatch(name):
        return False
    if isinstance(value, bytes):
        return True
    try:
        body_bytes(value)
    except Refusal:
        return False
    return True


def size_of(sent: Mapping[str, Any]) -> int:
    """The size of a message to send, as SQS counts it."""
    size_bytes = len(sent["MessageBody"].encode())
    for name, value in sent.get("MessageAttributes", {}).items():
        content = value.get("BinaryValue") or value.get("StringValue", "").encode()
        size_bytes += len(name.encode()) + len(value["DataType"]) + len(content)
    return size_bytes


def new_dedup_id() -> str:
    """A dedup id for a push that has none: the SDK may send one request twice."""
    return _OWN_DEDUP + secrets.token_hex(16)


def decode(queue: str, received: Mapping[str, Any], source: str | None, deadline_ms: int) -> Claim:
    """A received message as a claim."""
    system = received.get("Attributes", {})
    attributes, context, mark = _decode_attributes(received.get("MessageAttributes", {}))
    receives = int(system.get("ApproximateReceiveCount", 1))
    first_ms = system.get("ApproximateFirstReceiveTimestamp")
    dedup_id = system.get("MessageDeduplicationId") or None
    if dedup_id is not None and dedup_id.startswith(_OWN_DEDUP):
        dedup_id = None
    return Claim(
        id=received["MessageId"],
        queue=queue,
        body=_decode_body(received.get("Body", ""), mark),
        attributes=attributes,
        priority=0,
        group=system.get("MessageGroupId"),
        dedup_id=dedup_id,
        pushed_at_ms=int(system.get("SentTimestamp", 0)),
        # Amazon's have up to 128 bits; the lower 63 keep the order of messages that exist together.
        sequence=int(system.get("SequenceNumber", 0)) % 2**63,
        receives=receives,
        first_pulled_at_ms=None if first_ms is None else int(first_ms),
        source=source,
        context=context,
        proof=received["ReceiptHandle"],
        epoch=receives,
        deadline_ms=deadline_ms,
    )


def _decode_body(text: str, mark: str | None) -> bytes:
    if mark == _EMPTY:
        return b""
    if mark == _BASE64:
        try:
            return b64decode(text, validate=True)
        except ValueError:
            # Another program made the mark: the body is returned as it was sent.
            pass
    return text.encode()


def _decode_attributes(
    received: Mapping[str, Mapping[str, Any]],
) -> tuple[Attributes, dict[str, str] | None, str | None]:
    attributes: Attributes = {}
    context: dict[str, str] = {}
    mark: str | None = None
    for name, value in received.items():
        data_type = value.get("DataType", "String")
        if name == BODY:
            mark = value.get("StringValue")
        elif name == MORE:
            more = _decode_more(value.get("StringValue", ""))
            attributes |= more.text
            attributes |= more.base64
            context |= more.context or {}
        elif data_type.startswith("Binary"):
            attributes[name] = value.get("BinaryValue", b"")
        else:
            attributes[name] = value.get("StringValue", "")
        if data_type not in ("String", "Binary"):
            context[f"type:{name}"] = data_type
    return attributes, context or None, mark


def _decode_more(text: str) -> More:
    try:
        return msgspec.json.decode(text, type=More)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return More()
