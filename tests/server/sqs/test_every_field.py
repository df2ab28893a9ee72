"""Row 20: every parameter of every action, as large as a request may be, in both protocols.

The requests are made from the model of the actions, so that later actions are tested, too.
"""

import json
import typing
from pathlib import Path

import msgspec
import pytest

from penstock.wire.sqs.model import ACTIONS, AttributeValue, Shape
from tests.measure import SLACK
from tests.server.sqs.conftest import serve
from tests.server.sqs.test_attacks import BODY_BYTES_MAX, answer, connect, filled, form, post

PROCESSING_MS_MAX = 50 * SLACK
# Other processes displace data from the caches. A request that is slow by itself is so every time.
ROUNDS = 4
URL = "http://localhost/000000000000/target"
# A parameter with this value is replaced by a value that fills the request.
HERE = "@here@"
TEXTS = {"letters": "a", "digits": "9", "colons": ":", "escapes": "\\u0041", "quotes": '\\"'}
LISTS = {"empty texts": '"",', "numbers": "1,", "objects": "{},", "lists": "[],"}
MAPS = {"one key again": '"a":"",', "objects": '"a":{},', "Policy": '"Policy":"[",'}


def spent_ms(pid):
    """The processor time of a process's first thread, in which its event loop runs."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e6


def fields_of(shape):
    """The fields of a structure: name on the wire, and type without None."""
    hints = typing.get_type_hints(shape)
    for field in msgspec.structs.fields(shape):
        (kind,) = (each for each in typing.get_args(hints[field.name]) if each is not type(None))
        yield field.encode_name, kind


def fills(kind):
    """JSON values of a type, or a similar one, to be as large as possible: start, item, end."""
    origin = typing.get_origin(kind) or kind
    if origin is list:
        for name, item in LISTS.items():
            yield name, "[", item, "0]"
    elif origin is dict:
        for name, item in MAPS.items():
            yield name, "{", item, '"b":0}'
        yield "all keys differ", "{", None, '"b":""}'
    elif origin is int:
        yield "digits", "", "9", "9"
        yield "a text of digits", '"', "9", '"'
    else:
        for name, item in TEXTS.items():
            yield name, '"', item, '"'


def parameters(action):
    """Every parameter of an action, and of its entries, as HERE among valid other parameters."""
    rest = {"QueueUrl": URL, "QueueName": "target", "MessageBody": "x", "VisibilityTimeout": 0}
    rest |= {"ReceiptHandle": "x", "TaskHandle": "x", "SourceArn": "x", "Label": "x"}
    rest |= {"MaxResults": 5}
    known = {name for name, _ in fields_of(action.parameters)}
    given = {name: value for name, value in rest.items() if name in known}
    for name, kind in fields_of(action.parameters):
        yield name, kind, given | {name: HERE}
        arguments = typing.get_args(kind)
        inner = arguments[-1] if arguments else None
        if not (isinstance(inner, type) and issubclass(inner, Shape)):
            continue
        for inner_name, inner_kind in fields_of(inner):
            entry = {"Id": "1"} if inner is not AttributeValue else {"DataType": "String"}
            entry |= {inner_name: HERE}
            value = {"a": entry} if inner is AttributeValue else [entry]
            yield f"{name}.{inner_name}", inner_kind, given | {name: value}


def json_requests():
    for action in ACTIONS.values():
        for name, kind, given in parameters(action):
            start, end = json.dumps(given).split(json.dumps(HERE))
            for fill, opening, item, closing in fills(kind):
                head, tail = (start + opening).encode(), (closing + end).encode()
                if item is None:
                    count = (BODY_BYTES_MAX - len(head) - len(tail)) // 13
                    body = head + b"".join(b'"%07d":"",' % n for n in range(count)) + tail
                else:
                    body = filled(head, item.encode(), tail)
                yield f"{action.name} {name}: {fill}", post(action.name, body)


def query_requests():
    for action in ACTIONS.values():
        for name, _ in fields_of(action.parameters):
            singular = name.removesuffix("s")
            start = f"Action={action.name}&QueueUrl={URL}&QueueName=target&".encode()
            values = {"one value": b"%s=" % name.encode(), "an item": b"%s.1=" % singular.encode()}
            values["an item's name"] = b"%s.1.Name=" % singular.encode()
            for fill, field in values.items():
                yield f"{action.name} {name}: {fill}", form(filled(start + field, b"%2C", b""))
            items = b"&".join(b"%s.%d.Name=" % (singular.encode(), n) for n in range(990))
            yield f"{action.name} {name}: many items", form(start + items)


@pytest.fixture(scope="module")
def server():
    with serve("--store", "memory:") as server:
        server.client().create_queue(QueueName="target")
        yield server


def least_ms(server, wire, request):
    """The least processor time of some rounds, and the last answer."""
    pid = server.process.pid
    least, received = float("inf"), b""
    for _ in range(ROUNDS):
        before_ms = spent_ms(pid)
        wire.sendall(request)
        received = answer(wire)
        least = min(least, spent_ms(pid) - before_ms)
        if least <= PROCESSING_MS_MAX:
            break
    return least, received


@pytest.mark.parametrize("requests", [json_requests, query_requests])
def test_no_parameter_takes_longer_than_50_ms_of_the_processor(server, requests, record_property):
    worst_ms, worst, count = 0.0, "", 0
    with connect(server) as wire:
        for case, request in requests():
            took_ms, received = least_ms(server, wire, request)
            assert received.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 4")), case
            assert took_ms <= PROCESSING_MS_MAX, case
            count += 1
            worst_ms, worst = max((worst_ms, worst), (took_ms, case))
    record_property("figure", f"{count} requests, the longest {worst_ms:.0f} ms ({worst})")
