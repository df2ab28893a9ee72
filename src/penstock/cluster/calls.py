"""Commands from a router to the owner of a shard, and replies back, over NATS subjects.

A request goes to `NAME.serve.SHARD.TERM`: the owner of that term alone listens there, so an owner
that was replaced cannot be asked by anyone who knows of its successor. Each message begins with one
byte that says what it is:

    request   c  a part of a command that is too large for one message; more follow
              C  a command, or its last part: a frame of our own wire
              X  the request of this reply subject is cancelled
    reply     p  a part of a reply; more follow
              R  a reply, or its last part
              E  the error that refused the command
              N  not the owner: nothing was done
              L  lost: the owner was replaced before the change was kept; it may have been done
              K  still at it: the pull waits, or the log does not answer yet

A reply that takes long is announced by K again and again; silence means that the owner is gone.
"""

import asyncio
from collections import deque
from typing import Any, Final

from nats.aio.client import Client

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
    FRAME_BYTES_MAX,
    HEADER,
    HEADER_BYTES,
    REPLY,
    decode_answer,
    encode_error,
)

COMMAND: Final = b"C"
COMMAND_PART: Final = b"c"
CANCEL: Final = b"X"
REPLY_WHOLE: Final = b"R"
REPLY_PART: Final = b"p"
REFUSED: Final = b"E"
NOT_OWNER: Final = b"N"
LOST: Final = b"L"
AT_IT: Final = b"K"
# What one message carries, below the ordinary limit of NATS.
PART_BYTES: Final = 900 * 1024
# How many requests may be half received; what a router that died left behind goes first.
_HALF_RECEIVED_MAX: Final = 256
KEEP_ALIVE_S: Final = 0.25


class Sender:
    """Publishes from plain callbacks, in order: NATS only publishes from coroutines."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._waiting: deque[tuple[str, bytes, str]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    def send(self, subject: str, data: bytes, reply: str = "") -> None:
        """Publishes, now or when what came before has been published."""
        self._waiting.append((subject, data, reply))
        if self._task is None:
            self._task = self._loop.create_task(self._publish())

    async def _publish(self) -> None:
        try:
            while self._waiting:
                subject, data, reply = self._waiting.popleft()
                await self._client.publish(subject, data, reply=reply)
        except Exception:
            # The connection is closed for good, or its buffer is full: callers hear nothing, and
            # ask again.
            self._waiting.clear()
        finally:
            self._task = None

    async def drain(self) -> None:
        """Waits until everything was handed to NATS."""
        while self._task is not None:
            await asyncio.wait([self._task])


def split(data: bytes, part: bytes, last: bytes) -> list[bytes]:
    """The messages that carry this, each with the byte that says what it is."""
    if len(data) <= PART_BYTES:
        return [last + data]
    cuts = range(0, len(data), PART_BYTES)
    return [
        (part if at + PART_BYTES < len(data) else last) + data[at : at + PART_BYTES] for at in cuts
    ]


class Assembly:
    """Puts parts together again, by the subject their reply goes to."""

    def __init__(self) -> None:
        self._parts: dict[str, list[bytes]] = {}

    def add(self, reply: str, data: bytes) -> None:
        """Keeps a part."""
        parts = self._parts.setdefault(reply, [])
        parts.append(data)
        too_large = sum(map(len, parts)) > FRAME_BYTES_MAX + PART_BYTES
        if too_large or len(self._parts) > _HALF_RECEIVED_MAX:
            self._parts.pop(reply if too_large else next(iter(self._parts)), None)

    def whole(self, reply: str, last: bytes) -> bytes:
        """What the parts and the last one are together."""
        parts = self._parts.pop(reply, None)
        return last if parts is None else b"".join([*parts, last])


def write_command(command: Command[Any]) -> list[bytes]:
    """The messages of a request. Raises InvalidField or MessageTooLarge."""
    return split(encode_command(0, command), COMMAND_PART, COMMAND)


def read_command(frame: bytes) -> Command[Any]:
    """The command of a request. Raises PenstockError for bytes that are none."""
    if len(frame) < HEADER_BYTES:
        raise ProtocolError("a command without a header")
    _, kind, _ = HEADER.unpack_from(frame)
    return decode_command(kind, frame[HEADER_BYTES:])


def write_reply(command: Command[Any], reply: Any) -> list[bytes]:
    """The messages of a reply."""
    kind = type(command).__name__
    if kind == "Pull":
        frame = encode_claims(0, reply)
    elif isinstance(command, PushMany):
        frame = encode_bulk_reply(0, reply)
    else:
        frame = encode_reply(0, reply)
    return split(frame[HEADER_BYTES:], REPLY_PART, REPLY_WHOLE)


def read_reply(command: Command[Any], body: bytes) -> Any:
    """The reply to a command. Raises ProtocolError."""
    return decode_answer(REPLY, body, DECODE_REPLY[type(command)])


def write_error(error: PenstockError) -> bytes:
    """The message by which a command is refused."""
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
