"""Commands from a router to the owner of a shard, and replies back, over NATS subjects.

A request is published on `NAME.serve.SHARD.TERM`. Only the owner of that term subscribes to it, so
a router that knows a new owner cannot reach the old one. All that is sent to one subject in one
turn of the event loop is one NATS message, a sequence of items

    token (8) · size (4) · kind (1) · data

The token is the router's number of the command. Replies go to the reply subject of the request,
with the same token. The kinds of a request are

    c  a part of a command that is too large for one message; more parts follow
    C  a command, or its last part: a frame of `wire.frames`
    V  a pull that claims nothing: answered when a message may be available, or after its wait; if
       its attempt id is known to the shard, answered with the claims of that attempt. Or a push
       that adds nothing: answered like a repeated push if its dedup id is known, else with P. Or
       stats that a router acts on in other shards: they are confirmed
    Q  ends the wait of the pull with this token: it is answered at once
    X  cancels the command with this token

(the request number in the frame is the version of the queue's spread, 0 for none) and of a reply

    p  a part of a reply; more parts follow
    R  a reply, or its last part
    E  the error that refused the command
    N  nothing was changed: this node is not the owner, or the reason in the data
    S  the queue's spread has another version than the request; nothing was changed
    P  the push belongs to another shard of the queue; nothing was changed
    L  the owner was replaced before the change was durable, or the reason in the data; it may have
       been carried out or not
    K  keep-alive: the command is not finished

Until it replies, an owner sends K at intervals. If a router receives nothing, the owner has
stopped, or a message was lost.
"""

import struct
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Final

from penstock.errors import PenstockError, ProtocolError
from penstock.service import Command, PushMany
from penstock.wire.frames.bodies import (
    DECODE_REPLY,
    decode_command,
    encode_claims,
    encode_command,
    encode_reply,
)
from penstock.wire.frames.bulk import encode_bulk_reply
from penstock.wire.frames.frames import (
    DESCRIBE_QUEUES,
    FRAME_BYTES_MAX,
    HEADER,
    HEADER_BYTES,
    REPLY,
    decode_answer,
    encode_error,
)
from penstock.wire.frames.split_batches import AnswerSteps, long_answer

COMMAND: Final = b"C"
COMMAND_PART: Final = b"c"
WATCH: Final = b"V"
END_WAIT: Final = b"Q"
CANCEL: Final = b"X"
REPLY_WHOLE: Final = b"R"
REPLY_PART: Final = b"p"
REFUSED: Final = b"E"
NOT_OWNER: Final = b"N"
SPREAD_CHANGED: Final = b"S"
NOT_PLACED: Final = b"P"
LOST: Final = b"L"
IN_PROGRESS: Final = b"K"
# The last part of the subject of replies; it follows the router's inbox.
REPLIES: Final = ".replies"
# The largest data of one message, below the default limit of NATS (1 MiB).
PART_BYTES: Final = 900 * 1024
# How many requests may be incomplete, and their bytes; over that, the oldest, whose router has
# probably ended, is dropped.
_HALF_RECEIVED_MAX: Final = 256
_HALF_RECEIVED_BYTES_MAX: Final = 256 * 1024 * 1024
KEEP_ALIVE_S: Final = 0.25
# If an owner sends nothing for one to two of these intervals, the shard's register is read.
SILENCE_S: Final = 0.35
ITEM: Final = struct.Struct("<QI")


def pack(items: list[tuple[int, bytes]]) -> Iterator[tuple[list[int], bytes]]:
    """Joins items into messages of limited size; each message with the tokens in it."""
    tokens: list[int] = []
    parts: list[bytes] = []
    size = 0
    for token, data in items:
        if parts and size + len(data) > PART_BYTES:
            yield tokens, b"".join(parts)
            tokens, parts, size = [], [], 0
        tokens.append(token)
        parts += (ITEM.pack(token, len(data)), data)
        size += ITEM.size + len(data)
    yield tokens, b"".join(parts)


def unpack(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The items of a message: token and data."""
    at = 0
    while at + ITEM.size <= len(message):
        token, size = ITEM.unpack_from(message, at)
        at += ITEM.size
        yield token, message[at : at + size]
        at += size


def split(data: bytes, part: bytes, last: bytes) -> list[bytes]:
    """Splits data into parts of limited size, each preceded by its kind."""
    if len(data) <= PART_BYTES:
        return [last + data]
    cuts = range(0, len(data), PART_BYTES)
    return [
        (part if at + PART_BYTES < len(data) else last) + data[at : at + PART_BYTES] for at in cuts
    ]


class Assembly:
    """Joins the parts of requests again, by sender.

    A request that becomes too large is dropped, and so are the oldest ones if there are too many,
    or if they take too much memory.
    """

    def __init__(self) -> None:
        self._begun: dict[Hashable, bytearray] = {}
        self._bytes = 0

    def add(self, sender: Hashable, data: bytes) -> None:
        """Keeps a part."""
        begun = self._begun.setdefault(sender, bytearray())
        begun += data
        self._bytes += len(data)
        if len(begun) > FRAME_BYTES_MAX + PART_BYTES:
            self._drop(sender)
        while len(self._begun) > _HALF_RECEIVED_MAX or self._bytes > _HALF_RECEIVED_BYTES_MAX:
            self._drop(next(iter(self._begun)))

    def whole(self, sender: Hashable, last: bytes) -> bytes:
        """All parts of this sender and the last one, joined."""
        return last if sender not in self._begun else bytes(self._drop(sender) + last)

    def _drop(self, sender: Hashable) -> bytearray:
        begun = self._begun.pop(sender)
        self._bytes -= len(begun)
        return begun


def write_command(
    command: Command[Any], spread_version: int = 0, kind: bytes = COMMAND
) -> list[bytes]:
    """The messages of a request. Raises InvalidField or MessageTooLarge."""
    return split(encode_command(spread_version, command), COMMAND_PART, kind)


def read_command(frame: bytes) -> tuple[Command[Any], int]:
    """The command of a request, and the version of the spread. Raises PenstockError if invalid."""
    if len(frame) < HEADER_BYTES:
        raise ProtocolError(f"a command of {len(frame)} bytes has no header")
    _, kind, spread_version = HEADER.unpack_from(frame)
    return decode_command(kind, frame[HEADER_BYTES:]), spread_version


def changes_messages(frame: bytes) -> bool:
    """Whether a request for `long_answer_to` changes messages."""
    _, kind, _ = HEADER.unpack_from(frame)
    return bool(kind != DESCRIBE_QUEUES)


def long_answer_to(frame: bytes, check: Callable[[Command[Any], int], None]) -> AnswerSteps | None:
    """The steps of a request that may be long (`long_answer`); None for others.

    `check` gets the command and the version of the spread. Raises PenstockError.
    """
    if len(frame) < HEADER_BYTES:
        return None
    _, kind, spread_version = HEADER.unpack_from(frame)
    body = memoryview(frame)[HEADER_BYTES:]
    return long_answer(
        kind, 0, body, FRAME_BYTES_MAX, lambda command: check(command, spread_version)
    )


def write_reply(command: Command[Any], reply: Any) -> list[bytes]:
    """The messages of a reply."""
    kind = type(command).__name__
    if kind == "Pull":
        frame = encode_claims(0, reply)
    elif isinstance(command, PushMany):
        frame = encode_bulk_reply(0, reply)
    else:
        frame = encode_reply(0, reply)
    return write_reply_frame(frame)


def write_reply_frame(frame: bytes) -> list[bytes]:
    """The messages of a reply that is encoded already."""
    return split(frame[HEADER_BYTES:], REPLY_PART, REPLY_WHOLE)


def read_reply(command: Command[Any], body: bytes) -> Any:
    """The reply to a command. Raises ProtocolError."""
    return decode_answer(REPLY, body, DECODE_REPLY[type(command)])


# The body of the reply to a pull that found nothing.
NO_CLAIMS: Final = encode_claims(0, [])[HEADER_BYTES:]


def write_error(error: PenstockError) -> bytes:
    """The message that refuses a command with this error."""
    return REFUSED + encode_error(0, error)[HEADER_BYTES:]


def read_error(body: bytes) -> PenstockError:
    """The error that refused a command."""
    try:
        decode_answer(0, body, _nothing)
    except PenstockError as error:
        return error
    raise AssertionError("an error was expected")


def _nothing(body: object) -> None:
    raise AssertionError("a reply was not expected")
