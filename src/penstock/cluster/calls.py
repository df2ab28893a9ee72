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
       that adds nothing: answered like a repeated push if its dedup id is known, else with P
    Q  ends the wait of the pull with this token: it is answered at once
    X  cancels the command with this token

(the request number in the frame is the version of the queue's spread, 0 for none) and of a reply

    p  a part of a reply; more parts follow
    R  a reply, or its last part
    E  the error that refused the command
    N  this node is not the owner; nothing was changed
    S  the queue's spread has another version than the request; nothing was changed
    P  the push belongs to another shard of the queue; nothing was changed
    L  the owner was replaced before the change was durable; it may have been carried out or not
    K  keep-alive: the command is not finished

Until it replies, an owner sends K at intervals. If a router receives nothing, the owner has
stopped, or a message was lost.
"""

import asyncio
import itertools
import struct
from collections.abc import AsyncIterator, Hashable, Iterator
from typing import Any, Final, NamedTuple

from nats.aio.client import Client

from penstock.backends.remote.retry import is_repeatable
from penstock.errors import PenstockError, ProtocolError
from penstock.service import Batch, Command, Pull, PushMany
from penstock.wire.frames.bodies import (
    DECODE_REPLY,
    decode_command,
    encode_claims,
    encode_command,
    encode_reply,
)
from penstock.wire.frames.bulk import encode_bulk_reply
from penstock.wire.frames.frames import (
    FRAME_BYTES_MAX,
    HEADER,
    HEADER_BYTES,
    REPLY,
    decode_answer,
    encode_error,
)
from penstock.wire.frames.parts import LARGE_BYTES, parts_of

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
# How much of a message is handled in one turn of the event loop. After each turn its results are
# appended to the log, or sent, so that the log, owners and routers work at the same time.
SLICE_BYTES: Final = 2_048
KEEP_ALIVE_S: Final = 0.25
# If an owner sends nothing for one to two of these intervals, the shard's register is read.
SILENCE_S: Final = 0.35
# After this many intervals, a command to an owner that was not replaced is sent again.
_SILENT_SWEEPS_MAX: Final = 10
_ITEM: Final = struct.Struct("<QI")
# For how many of the last messages the tokens are known, in case NATS could not deliver one.
_SENT_MAX: Final = 4_096


class CallUnderWay:
    """A command that was sent to the owner of a term.

    The sender counts in `sweeps` how many intervals began since the owner last sent something. An
    owner that sends nothing for a whole interval may have been replaced. If it was not replaced and
    still sends nothing, the command or its answer was lost.
    """

    __slots__ = ("command", "shard", "sweeps", "term")

    def __init__(self, shard: int, term: int, command: Command[Any]) -> None:
        self.shard = shard
        self.term = term
        self.command = command
        self.sweeps = 0

    @property
    def is_silent(self) -> bool:
        """Whether the owner has sent nothing for a whole interval."""
        return self.sweeps >= 2

    @property
    def is_forgotten(self) -> bool:
        """Whether the owner has sent nothing for so long that no answer is expected."""
        return self.sweeps >= _SILENT_SWEEPS_MAX

    def is_given_up(self, shard: int, term: int | None) -> bool:
        """Whether to stop waiting for this call; `term` is that of the shard's owner as known now.

        After a change of owners a repeatable call is given up at once: the new owner answers it
        sooner. A call that must not be repeated still waits for the old owner's reply, and so does
        a pull: if its reply were ignored, the claims in it would block their messages.
        """
        if self.shard != shard:
            return False
        if self.term == term:
            return self.is_forgotten
        may_go = type(self.command) is not Pull and is_repeatable(self.command)
        return self.is_silent or may_go


class Sender:
    """Publishes items from plain callbacks; items for one subject share messages.

    With `replies`, a subject, each message has a reply subject below it that ends in a number. If
    the message's subject has no subscriber, NATS sends an error there, and `take_undelivered`
    says which tokens that message had.
    """

    def __init__(self, client: Client, replies: str = "") -> None:
        self._client = client
        self._replies = replies
        self._waiting: dict[str, list[tuple[int, bytes]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        # The tokens of the last messages, by their numbers.
        self._sent: dict[str, list[int]] = {}

    def send(self, subject: str, token: int, data: bytes) -> None:
        """Publishes an item in a later turn of the event loop."""
        self._waiting.setdefault(subject, []).append((token, data))
        if self._task is None:
            self._task = self._loop.create_task(self._publish())

    async def _publish(self) -> None:
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, {}
                for subject, items in waiting.items():
                    for tokens, message in _pack(items):
                        await self._client.publish(subject, message, reply=self._reply(tokens))
        except Exception:
            # The connection was closed, or its buffer is full. Receivers notice that nothing comes
            # and repeat their commands.
            self._waiting.clear()
        finally:
            self._task = None

    def _reply(self, tokens: list[int]) -> str:
        if not self._replies:
            return ""
        number = str(next(self._numbers))
        self._sent[number] = tokens
        if len(self._sent) > _SENT_MAX:
            del self._sent[next(iter(self._sent))]
        return f"{self._replies}.{number}"

    def take_undelivered(self, number: str) -> list[int]:
        """The tokens of a message that NATS could not deliver, by its number."""
        return self._sent.pop(number, [])

    async def drain(self) -> None:
        """Waits until all items were passed to the NATS client."""
        while self._task is not None:
            await asyncio.wait([self._task])


def _pack(items: list[tuple[int, bytes]]) -> Iterator[tuple[list[int], bytes]]:
    """Joins items into messages of limited size; each message with the tokens in it."""
    tokens: list[int] = []
    parts: list[bytes] = []
    size = 0
    for token, data in items:
        if parts and size + len(data) > PART_BYTES:
            yield tokens, b"".join(parts)
            tokens, parts, size = [], [], 0
        tokens.append(token)
        parts += (_ITEM.pack(token, len(data)), data)
        size += _ITEM.size + len(data)
    yield tokens, b"".join(parts)


def unpack(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The items of a message: token and data."""
    at = 0
    while at + _ITEM.size <= len(message):
        token, size = _ITEM.unpack_from(message, at)
        at += _ITEM.size
        yield token, message[at : at + size]
        at += size


async def in_slices(message: bytes) -> AsyncIterator[tuple[int, bytes]]:
    """The items of a message; after every `SLICE_BYTES` the event loop runs once."""
    handled = 0
    for token, data in unpack(message):
        if handled > SLICE_BYTES:
            handled = 0
            await asyncio.sleep(0)
        yield token, data
        handled += _ITEM.size + len(data)


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
            self._take(sender)
        while len(self._begun) > _HALF_RECEIVED_MAX or self._bytes > _HALF_RECEIVED_BYTES_MAX:
            self._take(next(iter(self._begun)))

    def whole(self, sender: Hashable, last: bytes) -> bytes:
        """All parts of this sender and the last one, joined."""
        return last if sender not in self._begun else bytes(self._take(sender) + last)

    def _take(self, sender: Hashable) -> bytearray:
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


class LargeCommand(NamedTuple):
    """A batch or bulk push that is executed in parts; the kind of its frame."""

    kind: int
    parts: Iterator[Batch | PushMany]
    spread_version: int


def read_large_command(frame: bytes) -> LargeCommand | None:
    """A request that is to be executed in parts; None for others. Raises PenstockError."""
    if len(frame) <= LARGE_BYTES:
        return None
    _, kind, spread_version = HEADER.unpack_from(frame)
    parts = parts_of(kind, memoryview(frame)[HEADER_BYTES:])
    return None if parts is None else LargeCommand(kind, parts, spread_version)


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
