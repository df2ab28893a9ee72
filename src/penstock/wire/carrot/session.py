"""The Carrot extension: many requests on one connection, messages of any size, waiting reads.

    request   opcode (1) · queue length (1) · count (2) · number (4) · body size (4) · queue · body
    answer    status (1) · 00 · count (2) · number (4) · body size (4) · body

Integers are little-endian. The client chooses a request's number; its answer has the same number.
Answers are sent as soon as they are ready, in any order. The bodies:

    PUT        C0   the message                        → the message's id
    PUT_MANY   C1   count × size (4) · the messages    → nothing, or what was refused
    GET        C2   wait in ms (4) · tag (4) …         → count × [tag · size · receives] (4 each) ·
                                                         the messages
    ACK        C3   count × tag (4)                    → nothing, or what was refused
    NACK       C4   count × tag (4)                    → nothing, or what was refused
    EXTEND     C5   visibility in ms (4) · tag (4) …   → nothing, or what was refused
    ADD        C6   nothing, or visibility in ms (4) · messages at most (4)
    REMOVE     C7   nothing

A tag is a number that the broker gives to a claim; it is valid on the connection that read the
message. In a GET, `count` is how many messages are wanted at most, and the tags are acknowledged
before it reads. An ERROR has a reason; of several items that were not all refused, the body is
count × status (1) and then the reason for the first that was. Nothing here does I/O.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, cast

from penstock.errors import InvalidField, ProtocolError
from penstock.service import BATCH_ITEMS_MAX, BODY_BYTES_MAX, part_ranges
from penstock.wire.carrot.single import ERROR, QUEUE_BYTES_MAX, SUCCESS, encode_text

PUT: Final = 0xC0
PUT_MANY: Final = 0xC1
GET: Final = 0xC2
SESSION_ACK: Final = 0xC3
SESSION_NACK: Final = 0xC4
EXTEND: Final = 0xC5
SESSION_ADD: Final = 0xC6
SESSION_REMOVE: Final = 0xC7

HEAD: Final = struct.Struct("<BBHII")
HEAD_BYTES: Final = HEAD.size
# An answer with one message: its head and the message's row.
_ONE_MESSAGE: Final = struct.Struct("<BBHIIIII")
_ROW: Final = struct.Struct("<III")
_ROW_BYTES: Final = _ROW.size
_ADD_BODY: Final = struct.Struct("<II")
UINT: Final = struct.Struct("<I")
REQUEST_MAX: Final = 2**32 - 1
# In a GET: wait as long as the queue's own setting says.
WAIT_BY_QUEUE: Final = 2**32 - 1

_TAGS_BYTES_MAX: Final = 4 + 4 * BATCH_ITEMS_MAX
MANY_BYTES_MAX: Final = BODY_BYTES_MAX + 4 * BATCH_ITEMS_MAX
# Of each opcode, the largest body and the largest count.
REQUEST_LIMITS: Final[dict[int, tuple[int, int]]] = {
    PUT: (BODY_BYTES_MAX, 0),
    PUT_MANY: (MANY_BYTES_MAX, BATCH_ITEMS_MAX),
    GET: (_TAGS_BYTES_MAX, BATCH_ITEMS_MAX),
    SESSION_ACK: (_TAGS_BYTES_MAX, BATCH_ITEMS_MAX),
    SESSION_NACK: (_TAGS_BYTES_MAX, BATCH_ITEMS_MAX),
    EXTEND: (_TAGS_BYTES_MAX, BATCH_ITEMS_MAX),
    SESSION_ADD: (_ADD_BODY.size, 0),
    SESSION_REMOVE: (0, 0),
}
_NAMES: Final = ("PUT", "PUT_MANY", "GET", "ACK", "NACK", "EXTEND", "ADD", "REMOVE")
# The largest body that the broker accepts or sends; an answer has only as many messages as fit.
FRAME_BYTES_MAX: Final = HEAD_BYTES + QUEUE_BYTES_MAX + MANY_BYTES_MAX
# Limits for the answer to a GET, so that it takes little of the broker's time.
READ_ITEMS_MAX: Final = 2_000
READ_BYTES_MAX: Final = 8 * 1024 * 1024
# A request of more bytes than this is not copied as a whole.
_LARGE_BYTES: Final = 64 * 1024

# opcode, count, number, queue, body; the body of a large PUT_MANY is a view of what was received.
SessionRequest = tuple[int, int, int, bytes, bytes]


class SessionDecoder:
    """Splits the bytes of a client, in any chunks, into requests.

    It buffers at most one incomplete request. After a fault, which is then in `error`, it returns
    no more requests; those before the fault were returned.
    """

    __slots__ = ("_buffer", "_need", "error", "requests_seen")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._need = HEAD_BYTES
        self.error: ProtocolError | None = None
        self.requests_seen = 0

    @property
    def missing_bytes(self) -> int:
        """How many more bytes the next request needs, as far as is known."""
        return self._need - len(self._buffer)

    @property
    def frame_bytes(self) -> int:
        """The size of the request that has begun, as far as is known."""
        return self._need if self._buffer else 0

    @property
    def is_amid_frame(self) -> bool:
        """Whether a request has begun and is not complete."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[SessionRequest]:
        """The requests that are complete now."""
        if self.error is not None:
            return []
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._need:
                return []
            whole, self._buffer = self._buffer, bytearray()
            if len(whole) > _LARGE_BYTES:
                return self._cut_large(whole)
            data = bytes(whole)
        return self._cut(data)

    def _cut_large(self, whole: bytearray) -> list[SessionRequest]:
        """The same as `_cut`, but a PUT_MANY is not copied; its messages are copied later."""
        requests = self._cut(cast(bytes, memoryview(whole)))
        return [
            (opcode, count, number, bytes(queue), body if opcode == PUT_MANY else bytes(body))
            for opcode, count, number, queue, body in requests
        ]

    def _cut(self, data: bytes) -> list[SessionRequest]:
        requests: list[SessionRequest] = []
        at = 0
        end = len(data)
        unpack, limits = HEAD.unpack_from, REQUEST_LIMITS
        self._need = HEAD_BYTES
        while end - at >= HEAD_BYTES:
            opcode, queue_bytes, count, number, size = unpack(data, at)
            limit = limits.get(opcode)
            if limit is None or size > limit[0] or count > limit[1] or not number:
                self.error = _refusal(opcode, count, size)
                break
            start = at + HEAD_BYTES
            body = start + queue_bytes
            stop = body + size
            if stop > end:
                self._need = stop - at
                break
            requests.append((opcode, count, number, data[start:body], data[body:stop]))
            at = stop
        if at < end and self.error is None:
            self._buffer += data[at:]
        self.requests_seen += len(requests)
        return requests


def _refusal(opcode: int, count: int, size: int) -> ProtocolError:
    limit = REQUEST_LIMITS.get(opcode)
    if limit is None:
        return ProtocolError(f"opcode {opcode:#04x} is not one of a session")
    name = _NAMES[opcode - PUT]
    if size > limit[0]:
        return ProtocolError(f"a {name} with a body of {size} bytes; at most {limit[0]}")
    if count > limit[1]:
        return ProtocolError(f"a {name} with a count of {count}; at most {limit[1]}")
    return ProtocolError(f"a {name} with number 0, which is for answers about the connection")


# Requests.


def encode_session_request(
    opcode: int, number: int, queue: str, body: bytes = b"", count: int = 0
) -> bytes:
    """The bytes of a request. Raises InvalidField."""
    name = encode_text("queue", queue)
    if len(name) > QUEUE_BYTES_MAX:
        raise InvalidField(f"queue: {len(name)} bytes; at most {QUEUE_BYTES_MAX} are allowed")
    size_max, count_max = REQUEST_LIMITS[opcode]
    if len(body) > size_max or count > count_max:
        shown = _NAMES[opcode - PUT]
        raise InvalidField(
            f"{shown}: {len(body)} bytes, count {count}; at most {size_max} and {count_max}"
        )
    return HEAD.pack(opcode, len(name), count, number, len(body)) + name + body


def encode_messages(messages: Sequence[bytes]) -> bytes:
    """The body of a PUT_MANY."""
    sizes = struct.pack(f"<{len(messages)}I", *map(len, messages))
    return sizes + b"".join(messages)


def read_messages(
    count: int, body: bytes | memoryview, items_max: int = BATCH_ITEMS_MAX
) -> Iterator[list[bytes]]:
    """The messages of a PUT_MANY, in parts of at most `items_max`. Raises InvalidField at once."""
    start = 4 * count
    if not count or len(body) < start:
        raise InvalidField(f"PUT_MANY: {count} sizes in a body of {len(body)} bytes")
    sizes = struct.unpack_from(f"<{count}I", body)
    end = start + sum(sizes)
    if end != len(body):
        raise InvalidField(f"PUT_MANY: sizes that add up to {end} bytes in a body of {len(body)}")
    return _cut_messages(sizes, body, start, items_max)


def _cut_messages(
    sizes: Sequence[int], body: bytes | memoryview, at: int, items_max: int
) -> Iterator[list[bytes]]:
    for first, after in part_ranges(sizes, items_max):
        messages = []
        for size in sizes[first:after]:
            messages.append(bytes(body[at : at + size]))
            at += size
        yield messages


def encode_tags(tags: Sequence[int], first: int | None = None) -> bytes:
    """The body of an ACK or NACK; with `first`, which is a time in ms, of a GET or EXTEND."""
    numbers = tags if first is None else (first, *tags)
    return struct.pack(f"<{len(numbers)}I", *numbers)


def read_tags(body: bytes) -> tuple[int, ...]:
    """The numbers in the body of an ACK, NACK, GET or EXTEND. Raises InvalidField."""
    if len(body) % 4:
        raise InvalidField(f"tags: {len(body)} bytes are not whole numbers of 4 bytes")
    return struct.unpack(f"<{len(body) // 4}I", body)


def encode_add(visibility_ms: int, messages_max: int) -> bytes:
    """The body of an ADD with settings; 0 for the broker's default and for no limit."""
    return _ADD_BODY.pack(visibility_ms, messages_max)


def read_add(body: bytes) -> tuple[int, int]:
    """The settings of an ADD, 0 for those not given. Raises InvalidField."""
    if not body:
        return 0, 0
    if len(body) != _ADD_BODY.size:
        raise InvalidField(f"ADD: a body of {len(body)} bytes; it has 0 or {_ADD_BODY.size}")
    visibility_ms, messages_max = _ADD_BODY.unpack(body)
    return visibility_ms, messages_max


# Answers.


class GivenMessage(NamedTuple):
    """One message of the answer to a GET."""

    tag: int
    receives: int
    body: bytes


class SessionAnswer(NamedTuple):
    """An answer, its body not read yet."""

    status: int
    items: int
    number: int
    body: bytes


def encode_session_answer(status: int, number: int, body: bytes = b"", count: int = 0) -> bytes:
    """The bytes of an answer."""
    return HEAD.pack(status, 0, count, number, len(body)) + body


def encode_done(number: int) -> bytes:
    """A SUCCESS without a body; the same as `encode_session_answer` of it."""
    return HEAD.pack(SUCCESS, 0, 0, number, 0)


def encode_one(number: int, tag: int, receives: int, body: bytes) -> bytes:
    """The answer to a GET with one message; the same as `encode_given` of it."""
    size = len(body)
    return _ONE_MESSAGE.pack(SUCCESS, 0, 1, number, _ROW_BYTES + size, tag, size, receives) + body


def encode_given(number: int, messages: Sequence[GivenMessage]) -> bytes:
    """The answer to a GET."""
    rows = [_ROW.pack(tag, len(body), receives) for tag, receives, body in messages]
    parts = b"".join([*rows, *[each.body for each in messages]])
    return encode_session_answer(SUCCESS, number, parts, len(messages))


def read_given(count: int, body: bytes) -> list[GivenMessage]:
    """The messages of the answer to a GET. Raises ProtocolError."""
    at = _ROW_BYTES * count
    if len(body) < at:
        raise ProtocolError(f"the broker sent {count} messages in {len(body)} bytes")
    messages = []
    for tag, size, receives in _ROW.iter_unpack(body[:at]):
        messages.append(GivenMessage(tag, receives, body[at : at + size]))
        at += size
    if at != len(body):
        raise ProtocolError(f"the broker sent messages of {at} bytes in {len(body)}")
    return messages


def read_session_answer(data: bytes | bytearray) -> SessionAnswer | None:
    """The first answer among the bytes that have arrived. Raises ProtocolError."""
    if len(data) < HEAD_BYTES:
        return None
    status, zero, count, number, size = HEAD.unpack_from(data)
    if status not in (SUCCESS, ERROR) or zero:
        raise ProtocolError(f"the server does not speak Carrot: it began with {bytes(data[:20])!r}")
    if size > FRAME_BYTES_MAX:
        raise ProtocolError(f"the broker sent an answer of {size} bytes")
    if len(data) < HEAD_BYTES + size:
        return None
    return SessionAnswer(status, count, number, bytes(data[HEAD_BYTES : HEAD_BYTES + size]))


def encode_refused(number: int, statuses: Sequence[int], reason: bytes) -> bytes:
    """The answer to several items of which some were refused; `reason` is the first one's."""
    return encode_session_answer(ERROR, number, bytes(statuses) + reason, len(statuses))
