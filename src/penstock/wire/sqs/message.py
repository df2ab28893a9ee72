"""Translates SQS messages for the core, and back: attributes, their types, sizes and digests.

The core stores an attribute as text or bytes. Its SQS data type, if it is not just `String` or
`Binary`, is stored in the message's context under `type:NAME`. The context also has the sender's
account (`sender`) and X-Ray's header (`trace`).

The digest of attributes is MD5 over, for each in order of name:

    length (4) · name · length (4) · data type · 1 or 2 for text or bytes · length (4) · value
"""

import re
from collections.abc import Iterable
from typing import Final

from penstock.service import Attributes, Claim, Message
from penstock.wire.sqs.errors import (
    INVALID_MESSAGE_CONTENTS,
    INVALID_PARAMETER_VALUE,
    UNSUPPORTED_OPERATION,
    Refusal,
    invalid_value,
    missing,
)
from penstock.wire.sqs.model import AttributeValue, AttributeValues

try:
    # For a body of a few hundred bytes, Python's own MD5 is faster than setting up OpenSSL's.
    from _md5 import md5  # type: ignore[import-not-found]
except ImportError:
    from hashlib import md5

ATTRIBUTES_MAX: Final = 10
NAME_CHARS_MAX: Final = 256
TYPE_CHARS_MAX: Final = 256
NUMBER_CHARS_MAX: Final = 1_024
BAD_CHARACTERS: Final = (
    "Invalid characters found. Valid unicode characters are "
    "#x9 | #xA | #xD | #x20 to #xD7FF | #xE000 to #xFFFD | #x10000 to #x10FFFF"
)
TRACE_HEADER: Final = "AWSTraceHeader"
# Its sum with any sequence has twenty digits, without twelve zeros that look like an account.
_SEQUENCE_BEGINNING: Final = 3 * 2**62
SENDER: Final = "sender"
TRACE: Final = "trace"
_TYPE: Final = "type:"
_TEXT: Final = 1
_BYTES: Final = 2

# Amazon refuses what XML cannot contain, in any protocol: most control characters, U+FFFE, U+FFFF.
_PLAIN: Final = bytes([9, 10, 13, *range(0x20, 0x80)])
_ALLOWED: Final = _PLAIN + bytes(range(0x80, 0x100))
_NONCHARACTERS: Final = ("\ufffe".encode(), "\uffff".encode())
# Letters of Latin alphabets too: Amazon takes them, although its documentation does not say so.
_NOT_OF_A_NAME: Final = re.compile("[^A-Za-z0-9_.\u00c0-\u017f-]")
_TYPE_NAME: Final = re.compile(r"(String|Number|Binary)(\..+)?", re.DOTALL)
_NUMBER: Final = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,4})?", re.ASCII)
_IDENTIFIER: Final = re.compile(r"[!-~]{1,128}", re.ASCII)


def body_bytes(body: str | None) -> bytes:
    """A message's body as the core keeps it. Raises Refusal."""
    if not body:
        raise missing("MessageBody")
    encoded = body.encode()
    # The fast path: of plain ASCII nothing is left after this.
    if encoded.translate(None, _PLAIN) and _has_forbidden(encoded):
        raise Refusal(INVALID_MESSAGE_CONTENTS, BAD_CHARACTERS)
    return encoded


def _has_forbidden(encoded: bytes) -> bool:
    """Whether a text in UTF-8 has a character that is not allowed, without a Python loop."""
    return bool(encoded.translate(None, _ALLOWED)) or any(
        noncharacter in encoded for noncharacter in _NONCHARACTERS
    )


def body_text(body: bytes) -> str:
    """A body as SQS returns it.

    One that is not UTF-8 was pushed by another protocol; its invalid bytes are replaced. The digest
    is that of the returned text, because the receiver can check only that.
    """
    return body.decode("utf-8", "replace")


def digest(body: bytes) -> str:
    """The MD5 of a body, or of attributes."""
    hexadecimal: str = md5(body, usedforsecurity=False).hexdigest()
    return hexadecimal


def check_identifier(value: str, parameter: str) -> str:
    """A group id, dedup id or attempt id. Raises Refusal."""
    if _IDENTIFIER.fullmatch(value) is None:
        raise invalid_value(
            value,
            parameter,
            f"{parameter} can only include alphanumeric and punctuation characters. "
            "1 to 128 in length.",
        )
    return value


def read_attributes(given: AttributeValues) -> tuple[Attributes, dict[str, str], int]:
    """Attributes as the core keeps them, the context with their types, and their size.

    Raises Refusal.
    """
    if len(given) > ATTRIBUTES_MAX:
        raise Refusal(
            INVALID_PARAMETER_VALUE,
            f"Number of message attributes [{len(given)}] exceeds the allowed maximum "
            f"[{ATTRIBUTES_MAX}].",
        )
    attributes: Attributes = {}
    context: dict[str, str] = {}
    size_bytes = 0
    for name, given_value in given.items():
        _check_name(name)
        if given_value.string_list_values or given_value.binary_list_values:
            raise Refusal(
                UNSUPPORTED_OPERATION,
                "Message attribute list values in SendMessage operation are not supported.",
            )
        data_type = given_value.data_type
        if not data_type:
            empty = given_value.string_value is None and given_value.binary_value is None
            raise Refusal(
                INVALID_PARAMETER_VALUE,
                f"The message (user) attribute '{name}' must contain a non-empty message attribute "
                f"{'value' if empty else 'type'}.",
            )
        if _TYPE_NAME.fullmatch(data_type) is None:
            raise Refusal(
                INVALID_PARAMETER_VALUE,
                f"The type of message (user) attribute '{name}' is invalid. You must use only the "
                "following supported type prefixes: Binary, Number, String.",
            )
        if len(data_type) > TYPE_CHARS_MAX:
            raise Refusal(
                INVALID_PARAMETER_VALUE,
                "Message (user) attribute type must be shorter than 256 bytes.",
            )
        value = _read_value(name, data_type, given_value)
        attributes[name] = value
        if data_type != ("Binary" if isinstance(value, bytes) else "String"):
            context[_TYPE + name] = data_type
        size_bytes += len(name.encode()) + len(data_type.encode()) + len(_as_bytes(value))
    return attributes, context, size_bytes


def _check_name(name: str) -> None:
    """Raises Refusal for a name no attribute may have."""
    reason = None
    if not name:
        reason = "The request must contain non-empty message (user) attribute names."
    elif len(name) > NAME_CHARS_MAX:
        reason = "Message (user) attribute name must be shorter than 256 bytes."
    elif bad := _NOT_OF_A_NAME.search(name):
        reason = (
            f"Invalid non-alphanumeric character '#x{ord(bad[0]):X}' was found in the message "
            "attribute name. Can only include alphanumeric characters, hyphens, underscores, or "
            "dots."
        )
    elif name.lower().startswith(("aws.", "amazon.")):
        reason = (
            "You can't use message attribute names beginning with 'AWS.' or 'Amazon'. "
            "These strings are reserved for internal use."
        )
    elif name[0] == ".":
        reason = "Message (user) attribute name must not begin with character '.'."
    elif name[-1] == ".":
        reason = "Message (user) attribute name must not end with character '.'."
    elif ".." in name:
        reason = "Message (user) attribute name must not have successive '.' characters."
    if reason is not None:
        raise Refusal(INVALID_PARAMETER_VALUE, reason)


def _read_value(name: str, data_type: str, given: AttributeValue) -> str | bytes:
    kind = data_type.partition(".")[0]
    if given.string_value is not None and given.binary_value is not None:
        raise _bad_attribute(name, "must have a single value")
    if kind == "Binary":
        if given.string_value:
            raise _bad_attribute(name, f"with type '{data_type}' must use field 'Binary'")
        if not given.binary_value:
            raise _bad_attribute(name, "must contain a non-empty value of type 'Binary'")
        return given.binary_value
    value = given.string_value
    if given.binary_value:
        raise _bad_attribute(name, f"with type '{data_type}' must use field 'String'")
    if not value:
        raise _bad_attribute(name, f"must contain a non-empty value of type '{kind}'")
    if kind == "Number":
        if len(value) > NUMBER_CHARS_MAX or _NUMBER.fullmatch(value) is None:
            raise Refusal(
                INVALID_PARAMETER_VALUE,
                f"Can't cast the value of message (user) attribute '{name}' to a number.",
            )
    elif _has_forbidden(value.encode()):
        raise Refusal(INVALID_PARAMETER_VALUE, BAD_CHARACTERS)
    return value


def _bad_attribute(name: str, reason: str) -> Refusal:
    return Refusal(INVALID_PARAMETER_VALUE, f"Message (user) attribute '{name}' {reason}.")


def read_trace(given: AttributeValues) -> str:
    """The one system attribute a sender may set. Raises Refusal."""
    for name in given:
        if name != TRACE_HEADER:
            raise Refusal(
                INVALID_PARAMETER_VALUE,
                f"Message system attribute name '{name}' is invalid.",
            )
    trace = given.get(TRACE_HEADER)
    if trace is None or trace.data_type != "String" or not trace.string_value:
        raise Refusal(
            INVALID_PARAMETER_VALUE,
            f"Message (system) attribute '{TRACE_HEADER}' must contain a non-empty value of type "
            "'String'.",
        )
    if not trace.string_value.isprintable():
        raise Refusal(
            INVALID_PARAMETER_VALUE, f"Message (system) attribute '{TRACE_HEADER}' is invalid."
        )
    return trace.string_value


def trace_of_header(value: str | None) -> str | None:
    """The trace that the header `X-Amzn-Trace-Id` gives a message, if it can be kept."""
    return value if value and value.isprintable() else None


def show_attributes(
    attributes: Attributes, context: dict[str, str] | None, wanted: Iterable[str]
) -> AttributeValues:
    """The attributes a receiver asked for, by name, by `prefix.*`, or all of them."""
    names = frozenset(wanted)
    everything = bool(names & {"All", ".*", "*"})
    prefixes = tuple(name[:-2] for name in names if name.endswith(".*"))
    types = context or {}
    shown: AttributeValues = {}
    for name, value in attributes.items():
        if everything or name in names or (prefixes and name.startswith(prefixes)):
            data_type = types.get(_TYPE + name)
            if isinstance(value, bytes):
                shown[name] = AttributeValue(None, value, None, None, data_type or "Binary")
            else:
                shown[name] = AttributeValue(value, None, None, None, data_type or "String")
    return shown


def system_attributes(
    claim: Message, fifo: bool, account: str, source_arn: str | None
) -> dict[str, str]:
    """All attributes that SQS itself gives a message. `account` is that of bare names."""
    context = claim.context or {}
    receives = claim.receives
    if claim.source and isinstance(claim, Claim):
        # The epoch also counts the receives in the queue a dead letter came from; `receives`
        # restarts when it is moved back.
        receives = claim.epoch
    found = {
        "SenderId": context.get(SENDER, account),
        "ApproximateFirstReceiveTimestamp": str(claim.first_pulled_at_ms or 0),
        "ApproximateReceiveCount": str(receives),
        "SentTimestamp": str(claim.pushed_at_ms),
    }
    if fifo:
        found["SequenceNumber"] = sequence_number(claim.sequence)
        # For a dead letter it is the message id: two of them may have had the same dedup id.
        dedup_id = claim.dedup_id if claim.source is None else claim.id
        found["MessageDeduplicationId"] = dedup_id or ""
    if claim.group is not None:
        found["MessageGroupId"] = claim.group
    if TRACE in context:
        found[TRACE_HEADER] = context[TRACE]
    if source_arn is not None:
        found["DeadLetterQueueSourceArn"] = source_arn
    return found


def sequence_number(sequence: int) -> str:
    """Twenty digits, as on Amazon SQS, that increase both as numbers and as text."""
    return str(_SEQUENCE_BEGINNING + sequence)


def attributes_digest(given: AttributeValues) -> str:
    """The MD5 that receivers check their attributes against."""
    parts: list[bytes] = []
    for name in sorted(given):
        value = given[name]
        content = value.string_value if value.binary_value is None else value.binary_value
        kind = _TEXT if value.binary_value is None else _BYTES
        parts += (_sized(name), _sized(value.data_type or ""), bytes([kind]), _sized(content or ""))
    return digest(b"".join(parts))


def _sized(part: str | bytes) -> bytes:
    content = _as_bytes(part)
    return len(content).to_bytes(4, "big") + content


def _as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
