"""Penstock's own wire: frames, and many requests in flight on one connection.

    connection   prelude · frame · frame · …       in each direction; the client sends first
    prelude      89 50 4E 53 54 4B, that is \\x89PNSTK (6) · version (2)
    frame        body size (4) · kind (1) · flags, all zero (1) · request (4) · body

Numbers are little-endian. A request's number is chosen by the client and repeated in the one frame
that answers it; answers come in any order. Number 0 is for frames about the connection. A command's
kind is its tag in `service`, its body the command in MessagePack; a reply's body is the command's
reply. An error's body is its message, its class and the bases of that, so that a peer without the
class raises the nearest one that it has.

`bodies` has commands and replies, `bulk` many pushes in one frame. `docs/formats/frames.md` is the
format, with the recipe for changing it. Nothing here does I/O.
"""

import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from penstock.errors import PenstockError, ProtocolError, error_class
from penstock.service import (
    Batch,
    ConfigureQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    DescribeQueue,
    DescribeQueues,
    Extend,
    History,
    ListQueues,
    Peek,
    PeekFrom,
    PeekIds,
    Pull,
    PullIds,
    Purge,
    Push,
    Redrive,
    RedriveIds,
    Release,
    ReturnIds,
    Stats,
)

MAGIC: Final = b"\x89PNSTK"
# Raise it, and follow the recipe in docs/formats/frames.md, when a peer of the old version would
# misread what is sent. Fields added at the end of a command or a reply need no new version.
VERSION: Final = 1
PRELUDE: Final = MAGIC + VERSION.to_bytes(2, "little")
PRELUDE_BYTES: Final = len(PRELUDE)
# Kind and flags are read as one number: an undefined flag makes an unknown kind.
HEADER: Final = struct.Struct("<IHI")
HEADER_BYTES: Final = HEADER.size
pack_header: Final = HEADER.pack
_unpack_header: Final = HEADER.unpack_from

FRAME_BYTES_MAX: Final = 65 * 1024 * 1024
# A frame this small cannot cost much memory, whatever its content; a larger one is decoded with
# stricter types. Only pushes may be larger.
SMALL_BYTES: Final = 64 * 1024
HELLO_BYTES_MAX: Final = 4 * 1024
REQUEST_MAX: Final = 2**32 - 1
# Limits for the answer to a pull, so that it takes little of the server's time.
PULL_MESSAGES_MAX: Final = 2_000
PULL_BYTES_MAX: Final = 8 * 1024 * 1024
_MESSAGE_CHARS_MAX: Final = 2_000

# The frames of a client that are not commands.
BULK_PUSH: Final = 0x20
HELLO: Final = 0x30
CANCEL: Final = 0x31
STATUS: Final = 0x32
# The frames of a server.
REPLY: Final = 0x81
ERROR: Final = 0x82
WELCOME: Final = 0x83
GOODBYE: Final = 0x84
# The kinds that may have request number 0. An error may be a request's, too.
OF_CONNECTION: Final = frozenset({HELLO, ERROR, WELCOME, GOODBYE})

KIND_OF: Final[dict[type, int]] = {
    Push: 1,
    Pull: 2,
    Delete: 3,
    Extend: 4,
    Release: 5,
    Peek: 6,
    Stats: 7,
    Purge: 8,
    Redrive: 9,
    CreateQueue: 10,
    ConfigureQueue: 11,
    DeleteQueue: 12,
    DescribeQueue: 13,
    ListQueues: 14,
    History: 15,
    Batch: 16,
    DescribeQueues: 17,
    PeekFrom: 18,
    PeekIds: 19,
    PullIds: 20,
    ReturnIds: 21,
    RedriveIds: 22,
}
# The commands of the first release; a newer server has their number in its WELCOME.
COMMANDS_KNOWN_MIN: Final = 16
PUSH: Final = KIND_OF[Push]
PULL: Final = KIND_OF[Pull]
PEEK: Final = KIND_OF[Peek]
REDRIVE: Final = KIND_OF[Redrive]
HISTORY: Final = KIND_OF[History]
DESCRIBE_QUEUES: Final = KIND_OF[DescribeQueues]
BATCH: Final = KIND_OF[Batch]

Body = bytes | memoryview
Frame = tuple[int, int, Body]


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The client's first frame: its software, and the token if the server requires one."""

    software: str
    token: str | None = None


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """The server's answer to it: its software, its limits, and the options of its store."""

    software: str
    frame_bytes_max: int
    waits_max: int
    options: dict[str, str]


def client_limits(frame_bytes_max: int = FRAME_BYTES_MAX) -> dict[int, int]:
    """The frames that a client may send after its WELCOME: the largest body of each kind."""
    limits = dict.fromkeys(KIND_OF.values(), SMALL_BYTES)
    limits |= dict.fromkeys((PUSH, BATCH, BULK_PUSH), frame_bytes_max)
    return limits | {CANCEL: 0, STATUS: 0}


def server_limits(frame_bytes_max: int = FRAME_BYTES_MAX) -> dict[int, int]:
    """The frames that a server may send: the largest body of each kind."""
    return {
        REPLY: frame_bytes_max,
        ERROR: SMALL_BYTES,
        WELCOME: SMALL_BYTES,
        GOODBYE: SMALL_BYTES,
    }


# The frames that a client may send before its hello is accepted: only the hello.
HELLO_LIMITS: Final[Mapping[int, int]] = {HELLO: HELLO_BYTES_MAX}


class FrameDecoder:
    """Splits the bytes of a peer, in any chunks, into frames.

    It buffers at most one incomplete frame. After a fault, which is then in `error`, it returns no
    more frames; those before the fault were returned.
    """

    __slots__ = (
        "_buffer",
        "_has_prelude",
        "_limits",
        "_peer",
        "error",
        "frame_bytes",
        "frames_seen",
    )

    def __init__(self, peer: str, limits: Mapping[int, int]) -> None:
        self._peer = peer
        self._limits = limits
        self._buffer = bytearray()
        self._has_prelude = False
        # The size of the frame that has begun, as far as is known.
        self.frame_bytes = PRELUDE_BYTES
        self.error: ProtocolError | None = None
        self.frames_seen = 0

    def admit(self, limits: Mapping[int, int]) -> None:
        """Sets the limits for the peer's next frames."""
        self._limits = limits

    @property
    def missing_bytes(self) -> int:
        """How many more bytes the next frame needs, as far as is known."""
        return self.frame_bytes - len(self._buffer)

    @property
    def is_amid_frame(self) -> bool:
        """Whether a frame has begun and is not complete."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now. Their bodies stay valid."""
        if self.error is not None:
            return []
        chunk: Body = data
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self.frame_bytes and self._has_prelude:
                return []
            # Bodies are views into a large buffer, which must stay unchanged: a new one is begun.
            chunk = memoryview(self._buffer)
            if len(chunk) <= SMALL_BYTES:
                chunk = bytes(chunk)
            self._buffer = bytearray()
        at = 0
        if not self._has_prelude:
            if not self._take_prelude(bytes(chunk[:PRELUDE_BYTES])):
                return []
            at = PRELUDE_BYTES
        frames: list[Frame] = []
        end = len(chunk)
        limits = self._limits
        need = HEADER_BYTES
        while end - at >= HEADER_BYTES:
            size, kind, request = _unpack_header(chunk, at)
            if size > limits.get(kind, -1) or (not request and kind not in OF_CONNECTION):
                self.error = self._refusal(size, kind, limits.get(kind))
                self.frames_seen += len(frames)
                return frames
            body_at = at + HEADER_BYTES
            stop = body_at + size
            if stop > end:
                need = stop - at
                break
            frames.append((kind, request, chunk[body_at:stop]))
            at = stop
            if kind == HELLO:
                # The limits for what follows depend on the hello, which is not checked yet.
                break
        self.frame_bytes = need
        if at < end:
            self._buffer = bytearray(chunk[at:])
        self.frames_seen += len(frames)
        return frames

    def _take_prelude(self, start: bytes) -> bool:
        """Whether the prelude is complete; buffers an incomplete one, or sets `error`."""
        if not MAGIC.startswith(start[: len(MAGIC)]):
            self.error = ProtocolError(
                f"the {self._peer} does not speak Penstock frames: it began with {start!r}"
            )
        elif len(start) < PRELUDE_BYTES:
            self._buffer = bytearray(start)
        else:
            version = int.from_bytes(start[len(MAGIC) :], "little")
            if version == VERSION:
                self._has_prelude = True
                return True
            self.error = ProtocolError(
                f"the {self._peer} speaks version {version} of the frames, and this side "
                f"version {VERSION}; use the same release of Penstock on both"
            )
        return False

    def _refusal(self, size: int, kind: int, limit: int | None) -> ProtocolError:
        if limit is not None and size <= limit:
            return ProtocolError(
                f"the {self._peer} sent a frame of kind {kind:#04x} with request number 0, which "
                "is for frames about the connection itself"
            )
        if limit is not None:
            return ProtocolError(
                f"the {self._peer} sent a frame of kind {kind:#04x} with a body of {size} bytes; "
                f"at most {limit} are allowed"
            )
        if kind > 0xFF:
            return ProtocolError(f"the {self._peer} set unknown flags {kind >> 8:#04x}")
        return ProtocolError(f"the {self._peer} sent a frame of kind {kind:#04x}, not allowed here")


_HTTP_METHODS: Final = (
    *(b"GET ", b"POST ", b"PUT ", b"HEAD ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"CONNECT "),
    *(b"TRACE ", b"PRI "),
)


def refusal(first: bytes, error: PenstockError) -> bytes:
    """The last bytes for a client that is refused: HTTP if it sent HTTP, else frames."""
    if not first.startswith(_HTTP_METHODS):
        return PRELUDE + encode_error(0, error)
    text = b"This port speaks Penstock frames, not HTTP. Use penstock.connect with its address.\n"
    return (
        b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(text), text)
    )


# Errors.


def error_words(error: PenstockError) -> list[str]:
    """An error for the wire: its message, its class, and the bases of that, nearest first."""
    names = [
        kind.__name__
        for kind in type(error).__mro__
        if issubclass(kind, PenstockError) and kind is not PenstockError
    ]
    return [str(error)[:_MESSAGE_CHARS_MAX], *names]


def error_from(words: list[str]) -> PenstockError:
    """The error from the wire, as the nearest class known here. Raises ProtocolError."""
    if not words:
        raise ProtocolError("the server sent an error without a message")
    return (error_class(words[1:]) or PenstockError)(words[0])


def _encode_item_error(value: object) -> dict[str, list[str]]:
    # In the replies to a batch, only an error is a map.
    if isinstance(value, PenstockError):
        return {"error": error_words(value)}
    raise TypeError(f"{type(value).__name__} cannot be sent")


encode_body: Final = msgspec.msgpack.Encoder(enc_hook=_encode_item_error).encode
_decode_words: Final = msgspec.msgpack.Decoder(list[str]).decode


# The exceptions of a MessagePack decoder for bad bytes.
DECODE_FAULTS: Final = (msgspec.DecodeError, RecursionError, ValueError, TypeError, OverflowError)


def pack(kind: int, request: int, body: bytes = b"") -> bytes:
    """One frame."""
    return pack_header(len(body), kind, request) + body


def encode_error(request: int, error: PenstockError) -> bytes:
    """The frame that refuses a request, or with number 0 the connection."""
    return pack(ERROR, request, encode_body(error_words(error)))


def encode_hello(hello: Hello) -> bytes:
    """The first bytes of a client."""
    return PRELUDE + pack(HELLO, 0, encode_body(hello))


def encode_welcome(welcome: Welcome) -> bytes:
    """The first bytes of a server."""
    return PRELUDE + pack(WELCOME, 0, encode_body(welcome))


def encode_goodbye(reason: str) -> bytes:
    """The last frame of a server: requests without an answer by now were not executed."""
    return pack(GOODBYE, 0, encode_body([reason]))


_decode_hello: Final = msgspec.msgpack.Decoder(Hello).decode
_decode_welcome: Final = msgspec.msgpack.Decoder(Welcome).decode
_decode_status: Final = msgspec.msgpack.Decoder(dict[str, Any]).decode


def decode_answer(kind: int, body: Body, decode: Callable[[Body], Any]) -> Any:
    """The reply a server sent. Raises the error it sent instead, or ProtocolError."""
    try:
        if kind == REPLY:
            return decode(body)
        error = error_from(_decode_words(body))
    except DECODE_FAULTS as fault:
        raise ProtocolError(f"the server sent an answer of the wrong shape: {fault}") from None
    raise error


def decode_hello(body: Body) -> Hello:
    """The client's hello. Raises ProtocolError."""
    try:
        hello: Hello = _decode_hello(body)
    except DECODE_FAULTS as fault:
        raise ProtocolError(f"the client's hello has the wrong shape: {fault}") from None
    return hello


def decode_welcome(frame: Frame) -> Welcome:
    """The server's welcome. Raises the error it sent instead, or ProtocolError."""
    kind, _, body = frame
    if kind not in (WELCOME, ERROR):
        raise ProtocolError(f"the server answered the hello with a frame of kind {kind:#04x}")
    welcome: Welcome = decode_answer(REPLY if kind == WELCOME else ERROR, body, _decode_welcome)
    return welcome


def decode_status(body: Body) -> dict[str, Any]:
    """The reply to STATUS."""
    status: dict[str, Any] = _decode_status(body)
    return status
