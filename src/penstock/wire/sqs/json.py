"""Amazon SQS over JSON 1.0: bytes to an action's parameters, and its result to bytes.

POST / HTTP/1.1
Content-Type: application/x-amz-json-1.0
X-Amz-Target: AmazonSQS.SendMessage

{"QueueUrl": "…", "MessageBody": "…"}

Decoding costs time and memory for each value, not for each byte. So a body over `SMALL_BYTES` is
first checked for how many bytes are outside its strings: a valid large request is a few long
strings. A body that passes has at most as many values as a small one can have.
"""

import re
from contextlib import suppress
from functools import cache
from typing import Any, Final

import msgspec
from msgspec import inspect

from penstock.wire.sqs.errors import (
    INVALID_PARAMETER_VALUE,
    SERIALIZATION,
    UNKNOWN_OPERATION,
    Refusal,
)
from penstock.wire.sqs.model import ACTIONS, Action, Shape, value_at

CONTENT_TYPE: Final = "application/x-amz-json-1.0"
TARGET_PREFIX: Final = "AmazonSQS."
# The largest body that is decoded without checking its structure, and the most bytes that a larger
# one may have outside its strings: about 10,000 values.
SMALL_BYTES: Final = 32 * 1024
STRINGS_MAX: Final = 10_000
# All messages of a request may have 1 MiB, each byte of which can be an escape; plus the names.
_ESCAPES_MAX: Final = 1024 * 1024 + SMALL_BYTES

_DECODERS: Final = {
    TARGET_PREFIX + name: (action, msgspec.json.Decoder(action.parameters))
    for name, action in ACTIONS.items()
}
# msgspec's message for a number, a boolean or null where a string was expected, or null in a list.
_CONVERTIBLE: Final = re.compile(
    "Expected `str[^`]*`, got `(int|float|bool|null)`|Expected `object`, got `null` - "
)
# msgspec's message for a value of another type: the expected type, the given one, and the path.
_TYPE_MISMATCH: Final = re.compile(r"Expected `(\w+)[^`]*`, got `(\w+)`(?: - at `\$\.?(.*)`)?")
_UNEXPECTED: Final = {
    "object": "Start of structure or map found where not expected.",
    "array": "Start of list found where not expected",
}
_TYPE_NAMES: Final = {"int": "an Integer", "bytes": "a Blob"}
_TOKENS: Final = {"str": "STRING_VALUE", "int": "NUMBER_VALUE", "float": "NUMBER_VALUE"}
_BACKSLASH: Final = ord("\\")
_encode = msgspec.json.Encoder().encode


def decode(target: str, body: bytes | bytearray) -> tuple[Action, Shape]:
    """The action that the request names and its parameters. Raises Refusal."""
    try:
        action, decoder = _DECODERS[target]
    except KeyError:
        raise Refusal(UNKNOWN_OPERATION, "") from None
    if len(body) > SMALL_BYTES:
        _check_structure(body)
    try:
        return action, decoder.decode(body or b"{}")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        if isinstance(error, msgspec.ValidationError) and _CONVERTIBLE.match(str(error)):
            with suppress(msgspec.MsgspecError, ValueError, RecursionError):
                values = _as_text(msgspec.json.decode(body), _type_info(action.parameters))
                return action, msgspec.convert(values, action.parameters)
        # A body nested a hundred thousand levels deep ends here too.
        raise Refusal(SERIALIZATION, _reason(error, body)) from None


def _check_structure(body: bytes | bytearray) -> None:
    """Refuses a large body that is many values instead of a few long strings. Raises Refusal."""
    quotes = body.count(b'"')
    if quotes > _ESCAPES_MAX or body.count(b"\\") > 2 * _ESCAPES_MAX:
        raise Refusal(SERIALIZATION, "the request has more escapes than 1 MiB of messages can need")
    if quotes > 2 * STRINGS_MAX:
        # Most of them must be escaped. Pairs of backslashes are removed first: a backslash that is
        # then left before a quote escapes it.
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
        if body.count(b'"') > 2 * STRINGS_MAX:
            raise Refusal(SERIALIZATION, f"the request has over {STRINGS_MAX} strings")
    if _outside_bytes(body) > SMALL_BYTES:
        reason = f"the request has over {SMALL_BYTES} bytes outside its strings"
        raise Refusal(SERIALIZATION, reason)


def _outside_bytes(body: bytes | bytearray) -> int:
    """How much of a body is outside its strings."""
    outside_bytes = 0
    end = -1
    while (start := body.find(b'"', end + 1)) >= 0:
        outside_bytes += start - end - 1
        end = body.find(b'"', start + 1)
        # An odd number of backslashes before a quote escapes it: the string goes on.
        while end >= 0 and body[end - 1] == _BACKSLASH:
            content = body[start + 1 : end]
            if (len(content) - len(content.rstrip(b"\\"))) % 2 == 0:
                break
            start = end
            end = body.find(b'"', start + 1)
        if end < 0:
            return outside_bytes
    return outside_bytes + len(body) - end - 1


def _as_text(value: Any, kind: Any) -> Any:
    """The value with numbers and booleans as text where text is expected, as Amazon reads them.

    A list's nulls are left out. Raises Refusal if a map has null where text is expected.
    """
    if isinstance(kind, inspect.UnionType):
        kind = next(each for each in kind.types if not isinstance(each, inspect.NoneType))
    if isinstance(kind, inspect.StrType) and isinstance(value, bool | int | float):
        return msgspec.json.encode(value).decode()
    if isinstance(value, list) and isinstance(kind, inspect.ListType):
        return [_as_text(item, kind.item_type) for item in value if item is not None]
    if isinstance(value, dict) and isinstance(kind, inspect.DictType):
        if None in value.values():
            raise Refusal(INVALID_PARAMETER_VALUE, "the parameter 'value' may not be null")
        return {name: _as_text(each, kind.value_type) for name, each in value.items()}
    if isinstance(value, dict) and isinstance(kind, inspect.StructType):
        types = _field_types(kind.cls)
        return {name: _as_text(value[name], types[name]) for name in value.keys() & types.keys()}
    return value


@cache
def _type_info(parameters: type[Shape]) -> Any:
    return inspect.type_info(parameters)


@cache
def _field_types(shape: type[Shape]) -> dict[str, Any]:
    return {field.encode_name: field.type for field in _type_info(shape).fields}


def _reason(error: Exception, body: bytes | bytearray) -> str:
    """What is wrong with the bytes, in Amazon's words where they are known."""
    if isinstance(error, RecursionError):
        return "the request is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "the request is not UTF-8"
    message = str(error)
    mismatch = _TYPE_MISMATCH.match(message)
    if mismatch is None:
        return message
    expected, given, path = mismatch[1], mismatch[2], mismatch[3] or ""
    if given in _UNEXPECTED:
        return _UNEXPECTED[given]
    if expected == "array":
        return "Expected list or null"
    if expected == "object":
        # Amazon's text depends on whether the structure is in a map, or alone or in a list.
        return "Expected map or null" if path and not path.endswith("]") else "Expected null"
    if expected == "int" and given == "bool":
        return f"{_boolean_at(body, path)}_VALUE can not be converted to an Integer"
    if expected in _TYPE_NAMES and given in _TOKENS:
        return f"{_TOKENS[given]} can not be converted to {_TYPE_NAMES[expected]}"
    return message


def _boolean_at(body: bytes | bytearray, path: str) -> str:
    """Which boolean is at a path; TRUE if the rest of the body cannot be decoded."""
    with suppress(msgspec.MsgspecError, ValueError, RecursionError, LookupError, TypeError):
        if not value_at(msgspec.json.decode(body), path):
            return "FALSE"
    return "TRUE"


def encode(result: Shape | None) -> bytes:
    """The answer's body; an action without a result has an empty one."""
    return b"" if result is None else _encode(result)


def encode_refusal(refusal: Refusal) -> tuple[bytes, str]:
    """The error's body, and the value of its `x-amzn-query-error` header."""
    fault = refusal.fault
    body = _encode({"__type": fault.json_type, "message": refusal.message})
    return body, f"{fault.query_code};{'Receiver' if fault.status >= 500 else 'Sender'}"
