"""Amazon SQS over JSON 1.0: bytes to an action's parameters, and its result to bytes.

POST / HTTP/1.1
Content-Type: application/x-amz-json-1.0
X-Amz-Target: AmazonSQS.SendMessage

{"QueueUrl": "…", "MessageBody": "…"}
"""

from typing import Final

import msgspec

from penstock.wire.sqs_errors import SERIALIZATION, UNKNOWN_OPERATION, Refusal
from penstock.wire.sqs_model import ACTIONS, Action, Shape

CONTENT_TYPE: Final = "application/x-amz-json-1.0"
TARGET_PREFIX: Final = "AmazonSQS."

_DECODERS: Final = {
    TARGET_PREFIX + name: (action, msgspec.json.Decoder(action.parameters))
    for name, action in ACTIONS.items()
}
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
        # A body nested a hundred thousand deep ends here too.
        raise Refusal(SERIALIZATION, _reason(error)) from None


def _reason(error: Exception) -> str:
    """What is wrong with the bytes, in Amazon's words where it has some."""
    if isinstance(error, RecursionError):
        return "the request is nested too deeply"
    said = str(error)
    if isinstance(error, msgspec.ValidationError):
        if "got `object`" in said:
            return "Start of structure or map found where not expected."
        if "got `array`" in said:
            return "Start of list found where not expected"
        if said.startswith("Expected `int") and "got `str`" in said:
            return "STRING_VALUE can not be converted to an Integer"
    return said


def encode(result: Shape | None) -> bytes:
    """The answer's body; an action that gives nothing has an empty one."""
    return b"" if result is None else _encode(result)


def encode_refusal(refusal: Refusal) -> tuple[bytes, str]:
    """The error's body, and the value of its `x-amzn-query-error` header."""
    fault = refusal.fault
    body = _encode({"__type": fault.json_type, "message": refusal.message})
    return body, f"{fault.query_code};{'Receiver' if fault.status >= 500 else 'Sender'}"
