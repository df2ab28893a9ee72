"""LocalStack's way to look at a queue: `/_aws/sqs/messages?QueueUrl=…`.

A receive at this path claims nothing: its messages are those that wait, in their order, with
`ShowDelayed` the delayed ones, too, and with `ShowInvisible` those in flight. What is asked of a
request anywhere else is asked here: with keys, it must be signed. The receipt of each message is
the text that LocalStack has in its place, with which nothing can be deleted.
"""

from typing import Final

from penstock.backends.loop import Steps
from penstock.errors import UnsupportedOperation
from penstock.server.http import Request
from penstock.server.sqs.lookup import Caller, QueueLookup
from penstock.server.sqs.messages import RECEIVE_BYTES_MAX
from penstock.service import Message, Peek, QueueInfo, State
from penstock.wire.sqs import json as sqs_json
from penstock.wire.sqs import model
from penstock.wire.sqs.errors import invalid_value
from penstock.wire.sqs.message import (
    attributes_digest,
    body_text,
    digest,
    show_attributes,
    system_attributes,
)
from penstock.wire.sqs.query import parameter_of

PEEK_PATH: Final = "/_aws/sqs/messages"
MESSAGES_MAX: Final = 1_000
_RECEIPT: Final = "SQS/BACKDOOR/ACCESS"
_TRUTHS: Final = {"": False, "false": False, "0": False, "true": True, "1": True}
_EVERYTHING: Final = ("All",)


def is_peek(request: Request) -> bool:
    """Whether a receive by this request only looks."""
    return request.path.rstrip("/") == PEEK_PATH


class PeekAction:
    """Shows the messages of a queue without claiming them."""

    def __init__(self, lookup: QueueLookup) -> None:
        self._lookup = lookup
        self._lacks = lookup.service.LACKS
        self._default_account = lookup.directory.default.account

    def peek(
        self, request: Request, asked: model.ReceiveMessageRequest, caller: Caller
    ) -> Steps[model.ReceiveResult]:
        """Up to MESSAGES_MAX messages, and of each state 2 MiB at most."""
        states: list[State] = ["visible"]
        states += ["delayed"] if _flag(request, "ShowDelayed") else []
        states += ["in_flight"] if _flag(request, "ShowInvisible") else []
        if "peek" in self._lacks:
            raise UnsupportedOperation(f"peek: {self._lacks['peek']}")
        queue = yield from self._lookup.locate(asked.queue_url or "", caller)
        shown: list[model.Received] = []
        for state in states:
            left = MESSAGES_MAX - len(shown)
            if left > 0:
                found: list[Message] = yield Peek(queue.queue, left, state, RECEIVE_BYTES_MAX)
                shown += [self._shown(message, queue) for message in found]
        return model.ReceiveResult(shown)

    def _shown(self, message: Message, queue: QueueInfo) -> model.Received:
        text = body_text(message.body)
        source_arn = None if message.source is None else self._lookup.arn(message.source)
        received = model.Received(
            message.id,
            _RECEIPT,
            digest(text.encode()),
            text,
            system_attributes(message, queue.settings.fifo, self._default_account, source_arn),
        )
        if message.attributes:
            given = show_attributes(message.attributes, message.context, _EVERYTHING)
            received.message_attributes = given
            received.md5_of_message_attributes = attributes_digest(given)
        return received


def _flag(request: Request, name: str) -> bool:
    """Whether a parameter that no action of SQS has is true. Raises Refusal."""
    text = parameter_of(form_of(request), name) or ""
    if text.lower() not in _TRUTHS:
        raise invalid_value(text[:40], name, "Must be true or false.")
    return _TRUTHS[text.lower()]


def form_of(request: Request) -> bytes:
    """The parameters of a request in its query, and in its body if that is a form."""
    headers, query = request.headers, request.query.encode("latin-1")
    has_form = request.method == "POST" and not (
        "x-amz-target" in headers or headers.get("content-type") == sqs_json.CONTENT_TYPE
    )
    return b"&".join(filter(None, (request.body if has_form else b"", query)))
