"""The body of a task's message: the task's name, its arguments, and the tasks that follow it.

JSON, as docs/formats/tasks.md describes it. A message names a task and never code: a worker looks
the name up among the tasks that its app has registered, and imports nothing for it.
"""

from typing import Final

import msgspec

from penstock.errors import ProtocolError

TRACEBACK_CHARS_MAX: Final = 16_000
ERROR_CHARS_MAX: Final = 1_000


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """The failure of an attempt; `is_final` if the task is not to be tried again."""

    error: str
    traceback: str = ""
    at_ms: int = 0
    queue: str = ""
    is_final: bool = False
    retry_ms: int | None = None


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """A task that is pushed when another has ended; the result becomes the argument `first`."""

    task: str
    args: msgspec.Raw
    queue: str
    first: str
    priority: int = 0
    ttl_ms: int | None = None
    id: str | None = None


class GroupPlace(msgspec.Struct, frozen=True, omit_defaults=True):
    """A task's place in a group, and the task that is pushed when all members have succeeded."""

    id: str
    index: int
    size: int
    final: Step | None = None


class Envelope(msgspec.Struct, frozen=True, omit_defaults=True):
    """One task as it is pushed.

    `id` is the task's id where that is not the message's own: a task that is tried again is a new
    message with the old id. `failures` counts the attempts that failed.
    """

    task: str
    args: msgspec.Raw
    id: str | None = None
    failures: int = 0
    expires_at_ms: int | None = None
    then: list[Step] = []
    group: GroupPlace | None = None
    failure: Failure | None = None


class StoredResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """A result as it is stored: the task's value, or its failure."""

    id: str
    state: str
    value: msgspec.Raw = msgspec.Raw(b"null")
    failure: Failure | None = None
    index: int = 0


DONE: Final = "done"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"

_envelopes: Final = msgspec.json.Decoder(Envelope)
_results: Final = msgspec.json.Decoder(StoredResult)
encode: Final = msgspec.json.encode


def body_start(task: str) -> bytes:
    """The bytes of a plain envelope before its arguments; only a closing brace follows them.

    `encode(Envelope(task, args))` gives the same bytes; a test compares them.
    """
    return b'{"task":' + encode(task) + b',"args":'


def decode_envelope(body: bytes) -> Envelope:
    """The task in a message. Raises ProtocolError if the body is not a task."""
    try:
        return _envelopes.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the body of the message is not a task: {error}") from None


def decode_result(body: bytes) -> StoredResult:
    """The result in a message. Raises ProtocolError."""
    try:
        return _results.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the body of the message is no result: {error}") from None


def shortened(text: str, chars_max: int) -> str:
    """The beginning and the end of a text that is too long."""
    if len(text) <= chars_max:
        return text
    half = chars_max // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
