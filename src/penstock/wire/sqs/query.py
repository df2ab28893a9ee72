"""Amazon SQS over the Query protocol: forms in, XML out (or JSON, to a GET that asks for it).

Lists and maps are flat: `Attribute.1.Name=…&Attribute.1.Value=…`; one item needs no number. The
form is first folded into a tree by its dots, then read by the same parameter types JSON uses. XML
is only ever written here, never read.
"""

import re
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec

from penstock.wire.sqs.errors import (
    INVALID_PARAMETER_VALUE,
    MISSING_ACTION,
    SERIALIZATION,
    UNKNOWN_OPERATION,
    Refusal,
    invalid_value,
)
from penstock.wire.sqs.model import ACTIONS, Action, Shape, value_at

CONTENT_TYPE: Final = "text/xml"
FIELDS_MAX: Final = 5_000
DEPTH_MAX: Final = 8
NAMESPACE: Final = "http://queue.amazonaws.com/doc/2012-11-05/"

Tree = dict[str, Any]
# The names under which lists and maps go in a form, by the names they have in JSON.
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
# What is said of a value of another kind: what was expected, what came, and where.
_OF_ANOTHER_KIND: Final = re.compile(r"Expected `(\w+)[^`]*`, got `(\w+)` - at `\$\.([^`]+)`")
# What cannot be asked of one queue, at its own URL.
_NOT_OF_A_QUEUE: Final = frozenset({"CreateQueue", "ListQueues"})
# In the older protocol's JSON two lists begin with a small letter.
_JSON_NAMES: Final = {"Messages": "messages", "QueueUrls": "queueUrls"}
# And the names of the elements that lists and maps become in an answer.
_ELEMENTS: Final = {
    "QueueUrls": "QueueUrl",
    "queueUrls": "QueueUrl",
    "Messages": "Message",
    "Failed": "BatchResultErrorEntry",
    "Results": "ListMessageMoveTasksResultEntry",
}
# A carriage return would be read back as a line feed unless it is written as a number; what XML
# cannot hold at all can only have come by another door, and is shown as what it is not.
_ESCAPES: Final = {code: "\ufffd" for code in range(0x20) if code not in (0x09, 0x0A)} | {
    ord("&"): "&amp;",
    ord("<"): "&lt;",
    ord(">"): "&gt;",
    ord('"'): "&quot;",
    ord("\r"): "&#xD;",
    0xFFFE: "\ufffd",
    0xFFFF: "\ufffd",
}


def decode(form: str, default_url: str | None) -> tuple[Action, Shape]:
    """What the form asks for; a request to a queue's own URL need not name it. Raises Refusal."""
    try:
        pairs = parse_qsl(form, keep_blank_values=True, errors="strict", max_num_fields=FIELDS_MAX)
    except UnicodeDecodeError:
        raise Refusal(SERIALIZATION, "The form cannot be read: it is not UTF-8") from None
    except ValueError as error:
        raise Refusal(SERIALIZATION, f"The form cannot be read: {error}") from None
    tree: Tree = {}
    for name, value in pairs:
        _plant(tree, name.split("."), value)
    asked = tree.get("Action")
    if not isinstance(asked, str):
        raise Refusal(MISSING_ACTION, "The request must contain the parameter Action.")
    action = ACTIONS.get(asked)
    if action is None or (default_url is not None and asked in _NOT_OF_A_QUEUE):
        raise Refusal(UNKNOWN_OPERATION, f"The action {asked} is not valid for this endpoint.")
    if default_url is not None:
        tree.setdefault("QueueUrl", default_url)
    fields = _fields(action.parameters, tree, action.name)
    if "AttributeNames" in fields:
        # The older of two names for one thing counts alone; over JSON both do.
        fields.pop("MessageSystemAttributeNames", None)
    try:
        return action, msgspec.convert(fields, action.parameters, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), fields) from None


def _invalid(said: str, fields: Tree) -> Refusal:
    found = _OF_ANOTHER_KIND.match(said)
    if found is not None and found[2] == "object":
        reason = f"The parameter {found[3]} has one value, and no parts."
        return Refusal(INVALID_PARAMETER_VALUE, reason)
    if found is not None and found[1] == "int":
        return invalid_value(value_at(fields, found[3]), found[3], "Must be an integer.")
    return Refusal(INVALID_PARAMETER_VALUE, f"A parameter is invalid: {said}")


def _plant(tree: Tree, path: list[str], value: str) -> None:
    if len(path) > DEPTH_MAX:
        raise Refusal(SERIALIZATION, "A parameter's name has too many parts.")
    for part in path[:-1]:
        branch = tree.setdefault(part, {})
        if not isinstance(branch, dict):
            # A name that is both a value and a prefix of others: the value stands.
            return
        tree = branch
    tree.setdefault(path[-1], value)


def _fields(shape: type[Shape], tree: Tree, action: str) -> Tree:
    """The fields of a structure, found in a tree and renamed as JSON names them."""
    fields: Tree = {}
    for field in msgspec.structs.fields(shape):
        name = field.encode_name
        found: Any = None
        if name in _LISTS:
            found = list(_numbered(tree, _LISTS[name], name))
        elif name in _MAPS:
            found = _map(tree, name)
        elif name == "Entries":
            entry = _entry_type(field.type)
            trees = _numbered(tree, _ENTRIES[action], name)
            found = [_fields(entry, each, action) for each in trees if isinstance(each, dict)]
        else:
            found = tree.get(name)
        if found is not None and found != [] and found != {}:
            fields[name] = found
    return fields


def _entry_type(union: Any) -> type[Shape]:
    """The structure in `list[structure] | None`."""
    entry: type[Shape] = union.__args__[0].__args__[0]
    return entry


def _numbered(tree: Tree, *names: str) -> Iterator[Any]:
    """The items of a list, in the order of their numbers, by the first name it goes under."""
    for name in names:
        branch = tree.get(name)
        if isinstance(branch, str):
            # An empty list is sent as its bare name.
            if branch:
                yield branch
            return
        if isinstance(branch, dict):
            numbers = sorted(int(key) for key in branch if key.isdecimal() and len(key) <= 6)
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
    parts = [
        f'<?xml version="1.0"?><{action.name}Response xmlns="{NAMESPACE}">',
    ]
    if result is not None:
        fields = msgspec.to_builtins(result)
        if any(fields.values()):
            parts.append(f"<{action.name}Result>")
            _write_fields(parts.append, fields, action.name)
            parts.append(f"</{action.name}Result>")
        else:
            parts.append(f"<{action.name}Result/>")
    parts.append(
        f"<ResponseMetadata><RequestId>{request_id}</RequestId></ResponseMetadata>"
        f"</{action.name}Response>"
    )
    return "".join(parts).encode()


def encode_as_json(action: Action, result: Shape | None, request_id: str) -> bytes:
    """The answer as JSON, in the frame the Query protocol puts around it."""
    framed: Tree = {"ResponseMetadata": {"RequestId": request_id}}
    if result is not None:
        framed[f"{action.name}Result"] = _told(result)
    return msgspec.json.encode({f"{action.name}Response": framed})


def _told(value: Any) -> Any:
    """A structure with everything it might say, null where it says nothing.

    Maps are lists of names and values, as the XML has them.
    """
    if isinstance(value, list):
        return [_told(item) for item in value]
    if not isinstance(value, Shape):
        return value
    told: Tree = {}
    for field in msgspec.structs.fields(value):
        name, inner = field.encode_name, getattr(value, field.name)
        if name in _MAPS and inner is not None:
            _, key_name, value_name = _MAPS[name]
            inner = [{key_name: key, value_name: _told(v)} for key, v in inner.items()] or None
        told[_JSON_NAMES.get(name, name)] = _told(inner) if inner != [] else None
    return told


def encode_refusal(refusal: Refusal, request_id: str) -> bytes:
    """The error as XML."""
    fault = refusal.fault
    side = "Receiver" if fault.status >= 500 else "Sender"
    return (
        f'<?xml version="1.0"?><ErrorResponse xmlns="{NAMESPACE}"><Error><Type>{side}</Type>'
        f"<Code>{fault.query_code}</Code><Message>{_text(refusal.message)}</Message><Detail/>"
        f"</Error><RequestId>{request_id}</RequestId></ErrorResponse>"
    ).encode()


def encode_refusal_as_json(refusal: Refusal, request_id: str) -> bytes:
    """The error as JSON, in the frame the Query protocol puts around it."""
    side = "Receiver" if refusal.fault.status >= 500 else "Sender"
    error = {"Code": refusal.fault.query_code, "Message": refusal.message, "Type": side}
    return msgspec.json.encode({"Error": error, "RequestId": request_id})


def _write_fields(write: Callable[[str], None], fields: Tree, action: str) -> None:
    for name, value in fields.items():
        if name in _MAPS:
            _write_map(write, name, value, action)
        elif isinstance(value, list):
            element = _ELEMENTS.get(name) or f"{action}ResultEntry"
            for item in value:
                _write(write, element, item, action)
        else:
            _write(write, name, value, action)


def _write_map(write: Callable[[str], None], name: str, items: Tree, action: str) -> None:
    element, key_name, value_name = _MAPS[name]
    for key, value in items.items():
        write(f"<{element}><{key_name}>{_text(key)}</{key_name}>")
        _write(write, value_name, value, action)
        write(f"</{element}>")


def _write(write: Callable[[str], None], name: str, value: Any, action: str) -> None:
    write(f"<{name}>")
    if isinstance(value, dict):
        _write_fields(write, value, action)
    elif isinstance(value, bool):
        write("true" if value else "false")
    elif isinstance(value, bytes):
        write(b64encode(value).decode())
    else:
        write(_text(str(value)))
    write(f"</{name}>")


def _text(text: str) -> str:
    return text.translate(_ESCAPES)
