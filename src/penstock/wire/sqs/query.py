"""Amazon SQS over the Query protocol: reads forms, writes XML (or JSON, for a GET that accepts it).

Lists and maps are flat: `Attribute.1.Name=…&Attribute.1.Value=…`; one item needs no number. The
form first becomes a tree, split at the dots of its names, which is then decoded by the same types
as JSON. XML is only written here, never read.

The number of parameters is limited before any of them is decoded, and the work for each byte
(percent decoding, escaping) is done by functions in C: a form of 8 MiB takes milliseconds.
"""

import re
from base64 import b64encode
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final

import msgspec

from penstock.wire.sqs.errors import (
    INVALID_PARAMETER_VALUE,
    MISSING_ACTION,
    SERIALIZATION,
    UNKNOWN_OPERATION,
    Refusal,
    invalid_value,
)
from penstock.wire.sqs.model import ACTIONS, Action, ReceiveResult, Shape, value_at

CONTENT_TYPE: Final = "text/xml"
# The largest request SQS takes, ten messages with ten attributes each, has about 400.
FIELDS_MAX: Final = 1_000
NAME_BYTES_MAX: Final = 1_000
DEPTH_MAX: Final = 8
# All messages of a request may have 1 MiB, each byte of which can be an escape; in Base64, more.
_PERCENTS_MAX: Final = 3 * 1024 * 1024 // 2
_PLUS_TO_SPACE: Final = bytes.maketrans(b"+", b" ")
NAMESPACE: Final = "http://queue.amazonaws.com/doc/2012-11-05/"

Tree = dict[str, Any]
Write = Callable[[bytes], None]
# The names of lists and maps in a form, by their names in JSON.
_LISTS: Final = {
    "AttributeNames": "AttributeName",
    "MessageSystemAttributeNames": "MessageSystemAttributeName",
    "MessageAttributeNames": "MessageAttributeName",
    "TagKeys": "TagKey",
    "AWSAccountIds": "AWSAccountId",
    "Actions": "ActionName",
}
_MAPS: Final = {
    "Attributes": ("Attribute", "Name", "Value"),
    "MessageAttributes": ("MessageAttribute", "Name", "Value"),
    "MessageSystemAttributes": ("MessageSystemAttribute", "Name", "Value"),
    "Tags": ("Tag", "Key", "Value"),
    "tags": ("Tag", "Key", "Value"),
}
_ENTRIES: Final = {
    "SendMessageBatch": "SendMessageBatchRequestEntry",
    "DeleteMessageBatch": "DeleteMessageBatchRequestEntry",
    "ChangeMessageVisibilityBatch": "ChangeMessageVisibilityBatchRequestEntry",
}
# msgspec's message for a value of another type: the expected type, the given one, and the path.
_TYPE_MISMATCH: Final = re.compile(r"Expected `(\w+)[^`]*`, got `(\w+)` - at `\$\.([^`]+)`")
_NUMBER: Final = re.compile("[0-9]{1,6}")
# Actions that are not about one queue, and so are refused at a queue's URL.
_NOT_OF_A_QUEUE: Final = frozenset({"CreateQueue", "ListQueues"})
# In the older protocol's JSON two lists begin with a small letter.
_JSON_NAMES: Final = {"Messages": "messages", "QueueUrls": "queueUrls"}
# The names of the XML elements for the items of lists.
_ELEMENTS: Final = {
    "QueueUrls": "QueueUrl",
    "queueUrls": "QueueUrl",
    "Messages": "Message",
    "Failed": "BatchResultErrorEntry",
    "Results": "ListMessageMoveTasksResultEntry",
}
# A carriage return would be read back as a line feed unless it is written as a number.
_ESCAPES: Final = (
    (b"&", b"&amp;"),
    (b"<", b"&lt;"),
    (b">", b"&gt;"),
    (b'"', b"&quot;"),
    (b"\r", b"&#xD;"),
)
# XML cannot contain these. They can only have been pushed by another protocol, and are replaced.
_CONTROLS: Final = bytes(code for code in range(0x20) if code not in b"\t\n\r")
_NONCHARACTERS: Final = ("\ufffe".encode(), "\uffff".encode())
_REPLACEMENT: Final = "\ufffd".encode()


def decode(form: bytes | bytearray, default_url: str | None) -> tuple[Action, Shape]:
    """The action that the form names and its parameters; `default_url` names the queue if the form
    does not. Raises Refusal."""
    tree: Tree = {}
    for name, value in _pairs(form):
        _insert(tree, name, value)
    action_name = tree.get("Action")
    if not isinstance(action_name, str):
        raise Refusal(MISSING_ACTION, "The request must contain the parameter Action.")
    action = ACTIONS.get(action_name)
    if action is None or (default_url is not None and action_name in _NOT_OF_A_QUEUE):
        raise Refusal(
            UNKNOWN_OPERATION, f"The action {action_name} is not valid for this endpoint."
        )
    if default_url is not None:
        tree.setdefault("QueueUrl", default_url)
    fields = _fields(action.parameters, tree, action.name)
    if "AttributeNames" in fields:
        # If a list is given under both its names, only the older one counts here; in JSON both do.
        fields.pop("MessageSystemAttributeNames", None)
    try:
        return action, msgspec.convert(fields, action.parameters, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), fields) from None


def action_of(form: bytes | bytearray) -> str | None:
    """The action that `decode` would find in the form, if it finds one. Raises Refusal."""
    return parameter_of(form, "Action")


def parameter_of(form: bytes | bytearray, wanted: str) -> str | None:
    """The first value of a parameter of the form, if it has one. Raises Refusal."""
    return next((value for name, value in _pairs(form) if name == wanted), None)


def _pairs(form: bytes | bytearray) -> Iterator[tuple[str, str]]:
    """The names and values of a form. Raises Refusal."""
    view = memoryview(form)
    start = count = 0
    while start < len(form):
        end = form.find(b"&", start)
        end = len(form) if end < 0 else end
        equals = form.find(b"=", start, end)
        equals = end if equals < 0 else equals
        count += 1
        if count > FIELDS_MAX:
            raise _unreadable(f"it has over {FIELDS_MAX} parameters")
        if equals - start > NAME_BYTES_MAX:
            raise _unreadable(f"a parameter's name is over {NAME_BYTES_MAX} bytes")
        if end > start:
            yield _percent_decoded(view[start:equals]), _percent_decoded(view[equals + 1 : end])
        start = end + 1


def _percent_decoded(view: memoryview) -> str:
    """The text of a percent-encoded part of a form. Raises Refusal."""
    part = view.tobytes()
    if b"+" in part:
        part = part.translate(_PLUS_TO_SPACE)
    if b"%" in part:
        if part.count(b"%") > _PERCENTS_MAX:
            raise _unreadable("it has more escapes than 1 MiB of messages can need")
        # `%41` as `\\x41`: the codec decodes that in C, many times faster than urllib's loop.
        escaped = part.replace(b"\\", b"\\\\").replace(b"%", b"\\x")
        try:
            part = escaped.decode("unicode_escape").encode("latin-1")
        except UnicodeDecodeError:
            raise _unreadable("a % is not followed by two hexadecimal digits") from None
    try:
        return part.decode()
    except UnicodeDecodeError:
        raise _unreadable("it is not UTF-8") from None


def _unreadable(reason: str) -> Refusal:
    return Refusal(SERIALIZATION, f"The form cannot be read: {reason}")


def _invalid(message: str, fields: Tree) -> Refusal:
    mismatch = _TYPE_MISMATCH.match(message)
    if mismatch is not None and mismatch[2] == "object":
        reason = f"The parameter {mismatch[3]} has one value, and no parts."
        return Refusal(INVALID_PARAMETER_VALUE, reason)
    if mismatch is not None and mismatch[1] == "int":
        return invalid_value(value_at(fields, mismatch[3]), mismatch[3], "Must be an integer.")
    return Refusal(INVALID_PARAMETER_VALUE, f"A parameter is invalid: {message}")


def _insert(tree: Tree, name: str, value: str) -> None:
    """Inserts a value into the tree; of several for one place, the first counts."""
    if name.count(".") >= DEPTH_MAX:
        raise Refusal(SERIALIZATION, "A parameter's name has too many parts.")
    path = name.split(".")
    for part in path[:-1]:
        branch = tree.setdefault(part, {})
        if not isinstance(branch, dict):
            # A name that is both a value and a prefix of others: the value counts.
            return
        tree = branch
    tree.setdefault(path[-1], value)


def _fields(shape: type[Shape], tree: Tree, action: str) -> Tree:
    """The fields of a structure, taken from a tree and renamed as JSON names them."""
    fields: Tree = {}
    for name, entry in _field_names(shape):
        if name in _LISTS:
            value: Any = list(_numbered(tree, _LISTS[name], name))
        elif name in _MAPS:
            value = _map(tree, name)
        elif entry is not None:
            trees = _numbered(tree, _ENTRIES[action], name)
            value = [_fields(entry, each, action) for each in trees if isinstance(each, dict)]
        else:
            value = tree.get(name)
        if value is not None and value != [] and value != {}:
            fields[name] = value
    return fields


@cache
def _field_names(shape: type[Shape]) -> list[tuple[str, type[Shape] | None]]:
    """A structure's fields by their names in JSON, and of the entries of a batch their type."""
    return [
        # The type of a batch's entries is `list[structure] | None`.
        (field.encode_name, field.type.__args__[0].__args__[0])
        if field.encode_name == "Entries"
        else (field.encode_name, None)
        for field in msgspec.structs.fields(shape)
    ]


def _numbered(tree: Tree, *names: str) -> Iterator[Any]:
    """The items of a list, in the order of their numbers, under the first name that is given."""
    for name in names:
        branch = tree.get(name)
        if isinstance(branch, str):
            # An empty list is sent as its bare name.
            if branch:
                yield branch
            return
        if isinstance(branch, dict):
            numbers = sorted(int(key) for key in branch if _NUMBER.fullmatch(key))
            yield from (branch[str(number)] for number in numbers if str(number) in branch)
            return


def _map(tree: Tree, name: str) -> Tree:
    element, key_name, value_name = _MAPS[name]
    items: Tree = {}
    branch = tree.get(element)
    alone = isinstance(branch, dict) and key_name in branch
    for item in [branch] if alone else _numbered(tree, element, name):
        if isinstance(item, dict) and isinstance(item.get(key_name), str):
            items[item[key_name]] = item.get(value_name, "")
    return items


def encode(action: Action, result: Shape | None, request_id: str) -> bytes:
    """The answer as XML."""
    name = action.name
    parts = [f'<?xml version="1.0"?><{name}Response xmlns="{NAMESPACE}">'.encode()]
    if result is not None:
        fields = msgspec.to_builtins(result, builtin_types=(bytes,))
        if any(fields.values()):
            parts.append(f"<{name}Result>".encode())
            _write_fields(parts.append, fields, name)
            parts.append(f"</{name}Result>".encode())
        else:
            parts.append(f"<{name}Result/>".encode())
    parts.append(
        f"<ResponseMetadata><RequestId>{request_id}</RequestId></ResponseMetadata>"
        f"</{name}Response>".encode()
    )
    return b"".join(parts)


def encode_as_json(action: Action, result: Shape | None, request_id: str) -> bytes:
    """The answer as JSON, with the envelope of the Query protocol."""
    framed: Tree = {"ResponseMetadata": {"RequestId": request_id}}
    if result is not None:
        framed[f"{action.name}Result"] = _with_nulls(result)
    return msgspec.json.encode({f"{action.name}Response": framed})


def encode_as_elements(action: Action, result: Shape | None, request_id: str) -> bytes:
    """The answer as JSON with the elements of the XML, which is the JSON of LocalStack."""
    framed: Tree = {"ResponseMetadata": {"RequestId": request_id}}
    if result is not None:
        fields = msgspec.to_builtins(result, builtin_types=(bytes,))
        empty: Tree = {"Message": []} if isinstance(result, ReceiveResult) else {}
        framed[f"{action.name}Result"] = empty | _elements(fields, action.name)
    return msgspec.json.encode({f"{action.name}Response": framed})


def _elements(fields: Tree, action: str) -> Tree:
    found: Tree = {}
    for name, value in fields.items():
        if name in _MAPS:
            element, key_name, value_name = _MAPS[name]
            found[element] = [{key_name: key, value_name: each} for key, each in value.items()]
        elif isinstance(value, list):
            element = _ELEMENTS.get(name) or f"{action}ResultEntry"
            found[element] = [_elements(each, action) for each in value]
        else:
            found[name] = value
    return found


def _with_nulls(value: Any) -> Any:
    """A structure as the older JSON has it: every field, with null for one that has no value.

    Maps are lists of names and values, as the XML has them.
    """
    if isinstance(value, list):
        return [_with_nulls(item) for item in value]
    if not isinstance(value, Shape):
        return value
    fields: Tree = {}
    for field in msgspec.structs.fields(value):
        name, inner = field.encode_name, getattr(value, field.name)
        if name in _MAPS and inner is not None:
            _, key_name, value_name = _MAPS[name]
            inner = [
                {key_name: key, value_name: _with_nulls(each)} for key, each in inner.items()
            ] or None
        fields[_JSON_NAMES.get(name, name)] = _with_nulls(inner) if inner != [] else None
    return fields


def encode_refusal(refusal: Refusal, request_id: str) -> bytes:
    """The error as XML."""
    fault = refusal.fault
    side = "Receiver" if fault.status >= 500 else "Sender"
    start = f'<?xml version="1.0"?><ErrorResponse xmlns="{NAMESPACE}"><Error><Type>{side}</Type>'
    return b"".join(
        (
            f"{start}<Code>{fault.query_code}</Code><Message>".encode(),
            _text(refusal.message),
            f"</Message><Detail/></Error><RequestId>{request_id}</RequestId></ErrorResponse>".encode(),
        )
    )


def encode_refusal_as_json(refusal: Refusal, request_id: str) -> bytes:
    """The error as JSON, with the envelope of the Query protocol."""
    side = "Receiver" if refusal.fault.status >= 500 else "Sender"
    error = {"Code": refusal.fault.query_code, "Message": refusal.message, "Type": side}
    return msgspec.json.encode({"Error": error, "RequestId": request_id})


def _write_fields(write: Write, fields: Tree, action: str) -> None:
    for name, value in fields.items():
        if name in _MAPS:
            _write_map(write, name, value, action)
        elif isinstance(value, list):
            element = _ELEMENTS.get(name) or f"{action}ResultEntry"
            for item in value:
                _write(write, element, item, action)
        else:
            _write(write, name, value, action)


def _write_map(write: Write, name: str, items: Tree, action: str) -> None:
    element, key_name, value_name = _MAPS[name]
    for key, value in items.items():
        write(f"<{element}>".encode())
        _write(write, key_name, key, action)
        _write(write, value_name, value, action)
        write(f"</{element}>".encode())


def _write(write: Write, name: str, value: Any, action: str) -> None:
    write(f"<{name}>".encode())
    if isinstance(value, dict):
        _write_fields(write, value, action)
    elif isinstance(value, bool):
        write(b"true" if value else b"false")
    elif isinstance(value, bytes):
        write(b64encode(value))
    else:
        write(_text(str(value)))
    write(f"</{name}>".encode())


def _text(text: str) -> bytes:
    """The text escaped for XML, in UTF-8."""
    content = text.encode("utf-8", "replace")
    if text.isascii() and content.isalnum():
        return content
    if len(content.translate(None, _CONTROLS)) != len(content):
        for code in _CONTROLS:
            content = content.replace(bytes([code]), _REPLACEMENT)
    if not text.isascii():
        for noncharacter in _NONCHARACTERS:
            content = content.replace(noncharacter, _REPLACEMENT)
    for character, escape in _ESCAPES:
        if character in content:
            content = content.replace(character, escape)
    return content
