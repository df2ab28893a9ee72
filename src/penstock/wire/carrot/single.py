"""The original Carrot protocol: one request for each connection.

    WRITE     00 · length (1) · queue · 00 · message (length)
    READ      0F · queue · 00
    ADD       F0 · queue · 00
    REMOVE    FF · queue · 00
    answer    status (1) · text · 00                      status: 00 SUCCESS, 01 ERROR
    message   00 · length (1) · message (length)          the answer to a READ that found one
    verdict   00 ACK · 01 NACK                            the client's answer to that message

A verdict is answered like a request. TOKEN, `A0 · token · 00`, may precede the request, and must
if the broker requires a token. docs/formats/carrot.md is the specification. Nothing here does I/O;
each `read_…` function takes the bytes received so far and returns None if they are incomplete.
"""

from typing import Final, NamedTuple

from penstock.errors import InvalidField, ProtocolError

WRITE: Final = 0x00
READ: Final = 0x0F
ADD: Final = 0xF0
REMOVE: Final = 0xFF
TOKEN: Final = 0xA0
SINGLE_OPCODES: Final = frozenset({WRITE, READ, ADD, REMOVE})

SUCCESS: Final = 0
ERROR: Final = 1
ACK: Final = 0
NACK: Final = 1

MESSAGE_BYTES_MAX: Final = 255
# A queue's name of 80 characters, an @ and a scope of 80.
QUEUE_BYTES_MAX: Final = 161
TOKEN_BYTES_MAX: Final = 1_024
# Of the text in an answer. A client reads no further.
TEXT_BYTES_MAX: Final = 4_096


class SingleRequest(NamedTuple):
    """A request; `message` is empty unless it is a WRITE."""

    opcode: int
    queue: str
    message: bytes = b""


class SingleAnswer(NamedTuple):
    """The answer to a request or a verdict."""

    status: int
    text: str


def encode_request(request: SingleRequest) -> bytes:
    """The bytes of a request. Raises InvalidField."""
    opcode, queue, message = request
    name = _with_nul("queue", queue, QUEUE_BYTES_MAX)
    if opcode not in SINGLE_OPCODES:
        raise InvalidField(f"opcode: {opcode:#04x} is not one of a single request")
    if opcode != WRITE:
        return bytes((opcode,)) + name
    if len(message) > MESSAGE_BYTES_MAX:
        raise InvalidField(
            f"message: {len(message)} bytes; a WRITE takes at most {MESSAGE_BYTES_MAX}, PUT more"
        )
    return bytes((opcode, len(message))) + name + message


def encode_token(token: str) -> bytes:
    """The bytes of a token, which a client sends before its request. Raises InvalidField."""
    return bytes((TOKEN,)) + _with_nul("token", token, TOKEN_BYTES_MAX)


def encode_text(field: str, text: object) -> bytes:
    """The bytes of a name or token. Raises InvalidField.

    A lone surrogate is sent as it is, and the broker refuses it.
    """
    if not isinstance(text, str):
        raise InvalidField(f"{field}: expected text, got {type(text).__name__}")
    return text.encode(errors="surrogatepass")


def _with_nul(field: str, text: str, most: int) -> bytes:
    data = encode_text(field, text)
    if b"\0" in data or not 1 <= len(data) <= most:
        raise InvalidField(f"{field}: expected 1 to {most} bytes without NUL, got {len(data)}")
    return data + b"\0"


def read_request(data: bytes | bytearray) -> SingleRequest | None:
    """The request that has arrived. Raises ProtocolError as soon as the bytes are invalid."""
    if not data:
        return None
    opcode = data[0]
    if opcode not in SINGLE_OPCODES:
        raise ProtocolError(f"opcode {opcode:#04x} is unknown; see docs/formats/carrot.md")
    start = 2 if opcode == WRITE else 1
    end = data.find(b"\0", start, start + QUEUE_BYTES_MAX + 1)
    if end < 0:
        if len(data) > start + QUEUE_BYTES_MAX:
            raise ProtocolError(
                f"the queue's id has no NUL among its first {QUEUE_BYTES_MAX + 1} bytes"
            )
        return None
    queue = bytes(data[start:end]).decode("latin-1")
    if opcode != WRITE:
        return SingleRequest(opcode, queue)
    if len(data) < end + 1 + data[1]:
        return None
    return SingleRequest(opcode, queue, bytes(data[end + 1 : end + 1 + data[1]]))


def read_token(data: bytes | bytearray) -> tuple[bytes, int] | None:
    """The token that has arrived, and where the request after it begins. Raises ProtocolError."""
    end = data.find(b"\0", 1, TOKEN_BYTES_MAX + 2)
    if end >= 0:
        return bytes(data[1:end]), end + 1
    if len(data) > TOKEN_BYTES_MAX + 1:
        raise ProtocolError(f"the token has no NUL among its first {TOKEN_BYTES_MAX + 1} bytes")
    return None


def encode_answer(status: int, text: bytes = b"") -> bytes:
    """The answer to a request or a verdict; `text` has no NUL."""
    return b"%c%b\0" % (status, text)


def encode_message(message: bytes) -> bytes:
    """The answer to a READ that found a message of at most MESSAGE_BYTES_MAX."""
    return bytes((SUCCESS, len(message))) + message


def read_answer(data: bytes | bytearray) -> SingleAnswer | None:
    """The answer that has arrived. Raises ProtocolError."""
    if data and data[0] not in (SUCCESS, ERROR):
        raise ProtocolError(f"the server does not speak Carrot: it began with {bytes(data[:20])!r}")
    end = data.find(b"\0", 1, TEXT_BYTES_MAX + 2)
    if end >= 0:
        return SingleAnswer(data[0], bytes(data[1:end]).decode(errors="replace"))
    if len(data) > TEXT_BYTES_MAX + 1:
        raise ProtocolError(f"the broker's text has no NUL among its first {TEXT_BYTES_MAX} bytes")
    return None


def read_message(data: bytes | bytearray) -> bytes | SingleAnswer | None:
    """The message that a READ was answered with, or the ERROR. Raises ProtocolError."""
    if not data or data[0] != SUCCESS:
        return read_answer(data)
    if len(data) < 2 or len(data) < 2 + data[1]:
        return None
    return bytes(data[2 : 2 + data[1]])
