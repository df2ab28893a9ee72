"""Amazon SQS over JSON 1.0: bytes to an action's parameters, and its result to bytes.

POST / HTTP/1.1
Content-Type: application/x-amz-json-1.0
X-Amz-Target: AmazonSQS.SendMessage

{"QueueUrl": "…", "MessageBody": "…"}
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

_DECODERS: Final = {
    TARGET_PREFIX + name: (action, msgspec.json.Decoder(action.parameters))
    for name, action in ACTIONS.items()
}
# What is said of a number, a truth or nothing where text was expected, and of nothing in a list.
_CURABLE: Final = re.compile(
    "Expected `str[^`]*`, got `(int|float|bool|null)`|Expected `object`, got `null` - "
)
# What is said of a value of another kind: what was expected, what came, and where.
_OF_ANOTHER_KIND: Final = re.compile(r"Expected `(\w+)[^`]*`, got `(\w+)`(?: - at `\$\.?(.*)`)?")
_FOUND: Final = {
    "object": "Start of structure or map found where not expected.",
    "array": "Start of list found where not expected",
}
_KINDS: Final = {"int": "an Integer", "bytes": "a Blob"}
_TOKENS: Final = {"str": "STRING_VALUE", "int": "NUMBER_VALUE", "float": "NUMBER_VALUE"}
_encode = msgspec.json.Encoder().encode


def decode(target: str, body: bytes) -> tuple[Action, Shape]:
    """What the request asks for. Raises Refusal."""
    try:
        action, decoder = _DECODERS[target]
    except KeyError:
        raise Refusal(UNKNOWN_OPERATION, "") from None
    try:
        return action, decoder.decode(body or b"{}")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        if isinstance(error, msgspec.ValidationError) and _CURABLE.match(str(error)):
            with suppress(msgspec.MsgspecError, ValueError, RecursionError):
                told = _as_text(msgspec.json.decode(body), _kinds(action.parameters))
                return action, msgspec.convert(told, action.parameters)
        # A body nested a hundred thousand deep ends here too.
        raise Refusal(SERIALIZATION, _reason(error, body)) from None


def _as_text(value: Any, kind: Any) -> Any:
    """The same with numbers and truths as text where text is wanted, which Amazon takes too.

    A list's nulls are left out. Raises Refusal if a map has nothing where text is wanted.
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
        kinds = {field.encode_name: field.type for field in kind.fields}
        return {name: _as_text(value[name], kinds[name]) for name in value.keys() & kinds.keys()}
    return value


@cache
def _kinds(parameters: type[Shape]) -> Any:
    return inspect.type_info(parameters)


def _reason(error: Exception, body: bytes) -> str:
    """What is wrong with the bytes, in Amazon's words where it has some."""
    if isinstance(error, RecursionError):
        return "the request is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "the request is not UTF-8"
    said = str(error)
    found = _OF_ANOTHER_KIND.match(said)
    if found is None:
        return said
    expected, came, path = found[1], found[2], found[3] or ""
    if came in _FOUND:
        return _FOUND[came]
    if expected == "array":
        return "Expected list or null"
    if expected == "object":
        # A structure stands alone, in a list or in a map.
        return "Expected map or null" if path and not path.endswith("]") else "Expected null"
    if expected == "int" and came == "bool":
        return f"{_truth(body, path)}_VALUE can not be converted to an Integer"
    if expected in _KINDS and came in _TOKENS:
        return f"{_TOKENS[came]} can not be converted to {_KINDS[expected]}"
    return said


def _truth(body: bytes, path: str) -> str:
    """Which truth stands at a place: true, if the rest of the body does not let it be told."""
    with suppress(msgspec.MsgspecError, ValueError, RecursionError, LookupError, TypeError):
        if not value_at(msgspec.json.decode(body), path):
            return "FALSE"
    return "TRUE"


def encode(result: Shape | None) -> bytes:
    """The answer's body; an action that gives nothing has an empty one."""
    return b"" if result is None else _encode(result)


def encode_refusal(refusal: Refusal) -> tuple[bytes, str]:
    """The error's body, and the value of its `x-amzn-query-error` header."""
    fault = refusal.fault
    body = _encode({"__type": fault.json_type, "message": refusal.message})
    return body, f"{fault.query_code};{'Receiver' if fault.status >= 500 else 'Sender'}"
