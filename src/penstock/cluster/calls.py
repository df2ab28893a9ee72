"""Commands from a router to the owner of a shard, and replies back, over NATS subjects.

A request goes to `NAME.serve.SHARD.TERM`: the owner of that term alone listens there, so an owner
that was replaced cannot be asked by anyone who knows of its successor. What goes to one subject in
one turn of the event loop shares a message: it is a row of items

    token (8) · size (4) · one byte that says what it is · the rest

in which the token is the router's number of the command. Replies go to the subject to which the
requests say they should, with the same tokens. Of a request the byte is

    c  a part of a command that is too large for one message; more follow
    C  a command, or its last part: a frame of our own wire
    V  a pull that only looks: answered without claims once it may find a message, or in vain; with
       an attempt id that is known there, with the claims of that attempt. Or a push that only
       looks: answered as one that was sent again if its dedup id is known there, else with P
    Q  the wait of the pull of this token ends: it is answered with what it has
    X  the command of this token is cancelled

(the frame's request number is the version of the queue's spread, 0 if it has none) and of a reply

    p  a part of a reply; more follow
    R  a reply, or its last part
    E  the error that refused the command
    N  not the owner: nothing was done
    S  the queue is spread otherwise than the request says: nothing was done
    P  the push belongs in another shard of the queue: nothing was done
    L  lost: the owner was replaced before the change was kept; it may have been done
    K  still at it: the pull waits, or the log does not answer yet

A reply that takes long is announced by K again and again; silence means that the owner is gone, or
that the reply was lost on its way.
"""

import asyncio
import itertools
import struct
from collections.abc import AsyncIterator, Hashable, Iterator
from typing import Any, Final

from nats.aio.client import Client

from penstock.backends.remote.retry import is_repeatable
from penstock.errors import PenstockError, ProtocolError
from penstock.service import Command, Pull, PushMany
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
LOOK: Final = b"V"
END_WAIT: Final = b"Q"
CANCEL: Final = b"X"
REPLY_WHOLE: Final = b"R"
REPLY_PART: Final = b"p"
REFUSED: Final = b"E"
NOT_OWNER: Final = b"N"
SPREAD_OTHERWISE: Final = b"S"
NOT_PLACED_HERE: Final = b"P"
LOST: Final = b"L"
AT_IT: Final = b"K"
# Below the subject that a router's messages name for their replies: where they go.
REPLIES: Final = ".replies"
# What one message carries, below the ordinary limit of NATS.
PART_BYTES: Final = 900 * 1024
# How many requests may be half received; what a router that died left behind goes first.
_HALF_RECEIVED_MAX: Final = 256
# So much of a message is handled in one turn of the event loop. Between two turns, what the first
# part led to is appended, or sent: so the log, owners and routers work at the same time.
SLICE_BYTES: Final = 2_048
KEEP_ALIVE_S: Final = 0.25
# Without a word from an owner for once or twice so long, a router looks whether there is another.
SILENCE_S: Final = 0.35
# After so many times that span, a command to one that is still the owner is sent again.
_SILENT_SWEEPS_MAX: Final = 10
_ITEM: Final = struct.Struct("<QI")
# So many messages back it is known what was in one that nobody heard.
_SENT_MAX: Final = 4_096


class CallUnderWay:
    """A command that was sent to the owner of a term.

    Whoever sent it counts in `sweeps` how many intervals have begun since the owner was asked, or
    last spoke. One that is silent for a whole interval may have been replaced. If it was not, and
    stays silent, its answer was lost on its way.
    """

    __slots__ = ("command", "shard", "sweeps", "term")

    def __init__(self, shard: int, term: int, command: Command[Any]) -> None:
        self.shard = shard
        self.term = term
        self.command = command
        self.sweeps = 0

    @property
    def is_silent(self) -> bool:
        """Whether the owner has said nothing for a whole interval between sweeps."""
        return self.sweeps >= 2

    def is_given_up(self, shard: int, term: int | None) -> bool:
        """Whether to ask again, now that the owner of this shard is known to have this term.

        After a change of owners a call that may be repeated is given up at once: it is sooner
        answered by the new owner. For another one the reply of the old owner, if it comes, is worth
        more than not to know; and the claims in the reply to a pull would be held by nobody.
        """
        if self.shard != shard:
            return False
        if self.term == term:
            return self.sweeps >= _SILENT_SWEEPS_MAX
        may_go = type(self.command) is not Pull and is_repeatable(self.command)
        return self.is_silent or may_go


class Sender:
    """Publishes items from plain callbacks; what goes to one subject at a time shares messages.

    With `replies`, the subject to which replies are to go, each message names a subject below it
    by a number of its own: if nobody listens, NATS says so there. `unheard` is called with the
    tokens of a message that was said to be unheard.
    """

    def __init__(self, client: Client, replies: str = "") -> None:
        self._client = client
        self._replies = replies
        self._waiting: dict[str, list[tuple[int, bytes]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        # The tokens of the last messages, by number, in case they are unheard.
        self._sent: dict[int, list[int]] = {}

    def send(self, subject: str, token: int, data: bytes) -> None:
        """Publishes an item, soon."""
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
            # The connection is closed for good, or its buffer is full: callers hear nothing, and
            # ask again.
            self._waiting.clear()
        finally:
            self._task = None

    def _reply(self, tokens: list[int]) -> str:
        if not self._replies:
            return ""
        number = next(self._numbers)
        self._sent[number] = tokens
        if len(self._sent) > _SENT_MAX:
            del self._sent[next(iter(self._sent))]
        return f"{self._replies}.{number}"

    def unheard(self, number: int) -> list[int]:
        """The tokens of a message of which NATS says that nobody listens."""
        return self._sent.pop(number, [])

    async def drain(self) -> None:
        """Waits until everything was handed to NATS."""
        while self._task is not None:
            await asyncio.wait([self._task])


def _pack(items: list[tuple[int, bytes]]) -> Iterator[tuple[list[int], bytes]]:
    """Items as messages of a limited size, each with its tokens."""
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
    """The items of a message: token and data. What is cut short ends them."""
    at = 0
    while at + _ITEM.size <= len(message):
        token, size = _ITEM.unpack_from(message, at)
        at += _ITEM.size
        yield token, message[at : at + size]
        at += size


async def in_slices(message: bytes) -> AsyncIterator[tuple[int, bytes]]:
    """The items of a message, with a turn of the event loop between some of them."""
    handled = 0
    for token, data in unpack(message):
        if handled > SLICE_BYTES:
            handled = 0
            await asyncio.sleep(0)
        yield token, data
        handled += len(data)


def split(data: bytes, part: bytes, last: bytes) -> list[bytes]:
    """The messages that carry this, each with the byte that says what it is."""
    if len(data) <= PART_BYTES:
        return [last + data]
    cuts = range(0, len(data), PART_BYTES)
    return [
        (part if at + PART_BYTES < len(data) else last) + data[at : at + PART_BYTES] for at in cuts
    ]


class Assembly:
    """Puts parts together again, by who sent them."""

    def __init__(self) -> None:
        self._parts: dict[Hashable, list[bytes]] = {}

    def add(self, sender: Hashable, data: bytes) -> None:
        """Keeps a part."""
        parts = self._parts.setdefault(sender, [])
        parts.append(data)
        too_large = sum(map(len, parts)) > FRAME_BYTES_MAX + PART_BYTES
        if too_large or len(self._parts) > _HALF_RECEIVED_MAX:
            self._parts.pop(sender if too_large else next(iter(self._parts)), None)

    def whole(self, sender: Hashable, last: bytes) -> bytes:
        """What the parts and the last one are together."""
        parts = self._parts.pop(sender, None)
        return last if parts is None else b"".join([*parts, last])


def write_command(
    command: Command[Any], spread_version: int = 0, kind: bytes = COMMAND
) -> list[bytes]:
    """The messages of a request. Raises InvalidField or MessageTooLarge."""
    return split(encode_command(spread_version, command), COMMAND_PART, kind)


def read_command(frame: bytes) -> tuple[Command[Any], int]:
    """A request's command, and the spread it goes by. Raises PenstockError for other bytes."""
    if len(frame) < HEADER_BYTES:
        raise ProtocolError("a command without a header")
    _, kind, spread_version = HEADER.unpack_from(frame)
    return decode_command(kind, frame[HEADER_BYTES:]), spread_version


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


# The body of the reply to a pull that found nothing.
NO_CLAIMS: Final = encode_claims(0, [])[HEADER_BYTES:]


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
