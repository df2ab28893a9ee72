"""Penstock's own wire: commands, replies and errors as frames, many in flight on one connection.

    connection   prelude · frame · frame · …       in each direction; the client speaks first
    prelude      89 50 4E 53 54 4B, that is \\x89PNSTK (6) · version (2)
    frame        body size (4) · kind (1) · flags, all zero (1) · request (4) · body

Numbers are little-endian. A request's number is chosen by the client and comes back with the one
frame that answers it; answers come in any order. Number 0 speaks of the connection itself. A
command's kind is its tag in `service`, its body the command in MessagePack; a reply's body is the
command's reply. An error's body is its message and then its class and the bases of that, so that a
peer who does not know the class finds the nearest one it knows.

`docs/formats/frames.md` is the format, with the recipe for changing it. Nothing here does I/O.
"""

import re
import struct
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec.structs import astuple

from penstock import errors
from penstock.errors import (
    InvalidField,
    InvalidReceipt,
    MessageNotFound,
    MessageTooLarge,
    PenstockError,
    ProtocolError,
)
from penstock.service import (
    ATTRIBUTES_MAX,
    BATCH_ITEMS_MAX,
    Batch,
    Claim,
    Command,
    ConfigureQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    DescribeQueue,
    Extend,
    History,
    HistoryEvent,
    ListQueues,
    Message,
    Peek,
    Pull,
    Purge,
    Push,
    PushReply,
    QueueInfo,
    QueueStats,
    Redrive,
    Release,
    Stats,
)

MAGIC: Final = b"\x89PNSTK"
# Raise it, and follow the recipe in docs/formats/frames.md, when a peer of the old version would
# misread what is sent. Fields added at the end of a command or a reply need no new version.
VERSION: Final = 1
PRELUDE: Final = MAGIC + VERSION.to_bytes(2, "little")
PRELUDE_BYTES: Final = len(PRELUDE)
# Kind and flags are read as one number: a flag nobody has defined makes an unknown kind.
HEADER: Final = struct.Struct("<IHI")
HEADER_BYTES: Final = HEADER.size

FRAME_BYTES_MAX: Final = 65 * 1024 * 1024
# A frame this small cannot be made to cost much memory, whatever it holds; a larger one is decoded
# by stricter types. Only pushes may be larger.
SMALL_BYTES: Final = 64 * 1024
HELLO_BYTES_MAX: Final = 4 * 1024
REQUEST_MAX: Final = 2**32 - 1
_MESSAGE_CHARS_MAX: Final = 2_000

# What a client sends, beside commands.
BULK_PUSH: Final = 0x20
HELLO: Final = 0x30
CANCEL: Final = 0x31
STATUS: Final = 0x32
# What a server sends.
REPLY: Final = 0x81
ERROR: Final = 0x82
WELCOME: Final = 0x83
GOODBYE: Final = 0x84

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
}
PUSH: Final = KIND_OF[Push]
PULL: Final = KIND_OF[Pull]
PEEK: Final = KIND_OF[Peek]
BATCH: Final = KIND_OF[Batch]
_BY_RECEIPT: Final = frozenset({KIND_OF[Delete], KIND_OF[Extend], KIND_OF[Release]})
_TYPE_OF: Final = {kind: command for command, kind in KIND_OF.items()}

Body = bytes | memoryview
Frame = tuple[int, int, Body]


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The client's first frame: what it is, and the token if the server wants one."""

    software: str
    token: str | None = None


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """The server's answer to it: what it is, its limits, and the options its store runs with."""

    software: str
    frame_bytes_max: int
    waits_max: int
    options: dict[str, str]


def client_limits(frame_bytes_max: int = FRAME_BYTES_MAX) -> dict[int, int]:
    """What a client may send once it is welcome: the largest body of each kind of frame."""
    limits = dict.fromkeys(KIND_OF.values(), SMALL_BYTES)
    limits |= dict.fromkeys((PUSH, BATCH, BULK_PUSH), frame_bytes_max)
    return limits | {CANCEL: 0, STATUS: 0}


def server_limits(frame_bytes_max: int = FRAME_BYTES_MAX) -> dict[int, int]:
    """What a server may send: the largest body of each kind of frame."""
    return {
        REPLY: frame_bytes_max,
        ERROR: SMALL_BYTES,
        WELCOME: SMALL_BYTES,
        GOODBYE: SMALL_BYTES,
    }


# Before it is welcome, nobody gets to have more than this buffered.
STRANGER_LIMITS: Final[Mapping[int, int]] = {HELLO: HELLO_BYTES_MAX}


class FrameDecoder:
    """Cuts what a peer sent, in whatever chunks it came, into frames.

    It buffers at most one frame that is not yet complete. What is wrong with the peer's bytes is
    in `error`, after which it gives no frames any more; those before the fault have been given.
    """

    __slots__ = ("_buffer", "_greeted", "_limits", "_need", "_peer", "error", "frames_seen")

    def __init__(self, peer: str, limits: Mapping[int, int]) -> None:
        self._peer = peer
        self._limits = limits
        self._buffer = bytearray()
        self._greeted = False
        self._need = PRELUDE_BYTES
        self.error: ProtocolError | None = None
        self.frames_seen = 0

    def admit(self, limits: Mapping[int, int]) -> None:
        """Changes what the peer may send from the next frame on."""
        self._limits = limits

    @property
    def missing_bytes(self) -> int:
        """How much more must come before there is a next frame, as far as is known."""
        return self._need - len(self._buffer)

    @property
    def is_amid_frame(self) -> bool:
        """Whether the peer owes the rest of something it began."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now. Their bodies stay valid."""
        if self.error is not None:
            return []
        chunk: Body = data
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._need and self._greeted:
                return []
            # The views into a large buffer keep it; a new one takes its place.
            chunk = memoryview(self._buffer)
            if len(chunk) <= SMALL_BYTES:
                chunk = bytes(chunk)
            self._buffer = bytearray()
        at = 0
        if not self._greeted:
            if not self._greet(bytes(chunk[:PRELUDE_BYTES])):
                return []
            at = PRELUDE_BYTES
        return self._cut(chunk, at)

    def _cut(self, chunk: Body, at: int) -> list[Frame]:
        frames: list[Frame] = []
        end = len(chunk)
        limits = self._limits
        need = HEADER_BYTES
        while end - at >= HEADER_BYTES:
            size, kind, request = HEADER.unpack_from(chunk, at)
            limit = limits.get(kind)
            if limit is None or size > limit:
                self.error = self._refusal(size, kind, limit)
                self.frames_seen += len(frames)
                return frames
            stop = at + HEADER_BYTES + size
            if stop > end:
                need = stop - at
                break
            frames.append((kind, request, chunk[at + HEADER_BYTES : stop]))
            at = stop
            if kind == HELLO:
                # What may follow depends on whether the hello was good: the rest waits for that.
                break
        self._need = need
        if at < end:
            self._buffer = bytearray(chunk[at:])
        self.frames_seen += len(frames)
        return frames

    def _greet(self, start: bytes) -> bool:
        """Whether the prelude is there; keeps what there is of it, or notes what is wrong."""
        if not MAGIC.startswith(start[: len(MAGIC)]):
            self.error = ProtocolError(
                f"the {self._peer} does not speak Penstock frames: it began with {start!r}"
            )
        elif len(start) < PRELUDE_BYTES:
            self._buffer = bytearray(start)
        else:
            version = int.from_bytes(start[len(MAGIC) :], "little")
            if version == VERSION:
                self._greeted = True
                return True
            self.error = ProtocolError(
                f"the {self._peer} speaks version {version} of the frames, and this side "
                f"version {VERSION}; use the same release of Penstock on both"
            )
        return False

    def _refusal(self, size: int, kind: int, limit: int | None) -> ProtocolError:
        if limit is not None:
            return ProtocolError(
                f"the {self._peer} sent a frame of kind {kind:#04x} with a body of {size} bytes; "
                f"at most {limit} are allowed"
            )
        if kind > 0xFF:
            return ProtocolError(f"the {self._peer} set flags {kind >> 8:#04x} that mean nothing")
        return ProtocolError(f"the {self._peer} sent a frame of kind {kind:#04x}, not allowed here")


_HTTP_METHODS: Final = (
    *(b"GET ", b"POST ", b"PUT ", b"HEAD ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"CONNECT "),
    *(b"TRACE ", b"PRI "),
)


def refusal(first: bytes, error: PenstockError) -> bytes:
    """What to send a stranger before closing: in HTTP if that is what it spoke, else in frames."""
    if not first.startswith(_HTTP_METHODS):
        return PRELUDE + encode_error(0, error)
    said = b"This port speaks Penstock frames, not HTTP. Use penstock.connect with its address.\n"
    return (
        b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(said), said)
    )


# Errors.

_ERRORS: Final[dict[str, type[PenstockError]]] = {
    name: error
    for name, error in vars(errors).items()
    if isinstance(error, type) and issubclass(error, PenstockError)
}


def error_words(error: PenstockError) -> list[str]:
    """An error as it travels: its message, its class, and the bases of that, nearest first."""
    names = [
        kind.__name__
        for kind in type(error).__mro__
        if issubclass(kind, PenstockError) and kind is not PenstockError
    ]
    return [str(error)[:_MESSAGE_CHARS_MAX], *names]


def error_from(words: list[str]) -> PenstockError:
    """The error that travelled, as the nearest class known here. Raises ProtocolError."""
    if not words:
        raise ProtocolError("the server sent an error that says nothing")
    kind = next((_ERRORS[name] for name in words[1:] if name in _ERRORS), PenstockError)
    return kind(words[0])


def _told(value: object) -> dict[str, list[str]]:
    # In a batch, an error stands among the replies; it is the only kind of map there.
    if isinstance(value, PenstockError):
        return {"error": error_words(value)}
    raise TypeError(f"{type(value).__name__} cannot travel")


_encode: Final = msgspec.msgpack.Encoder(enc_hook=_told).encode
_decode_words: Final = msgspec.msgpack.Decoder(list[str]).decode


def pack(kind: int, request: int, body: bytes = b"") -> bytes:
    """One frame."""
    return HEADER.pack(len(body), kind, request) + body


def encode_error(request: int, error: PenstockError) -> bytes:
    """The frame by which a request, or with number 0 the connection, is refused."""
    return pack(ERROR, request, _encode(error_words(error)))


def encode_hello(hello: Hello) -> bytes:
    """The first thing a client sends."""
    return PRELUDE + pack(HELLO, 0, _encode(hello))


def encode_welcome(welcome: Welcome) -> bytes:
    """The first thing a server sends."""
    return PRELUDE + pack(WELCOME, 0, _encode(welcome))


def encode_goodbye(reason: str) -> bytes:
    """The last thing a server sends: what it has not answered by now, it has not done."""
    return pack(GOODBYE, 0, _encode([reason]))


# Commands.


class _WirePush(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=1):
    # A push as it is decoded: MessagePack tells text from bytes, but no typed decoder takes both.
    queue: str
    body: bytes
    delay_ms: int | None = None
    priority: int = 0
    ttl_ms: int | None = None
    dedup_id: str | None = None
    group: str | None = None
    attributes: dict[str, Any] | None = None
    context: dict[str, str] | None = None


class _LargePush(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=1):
    queue: str
    body: bytes
    delay_ms: int | None = None
    priority: int = 0
    ttl_ms: int | None = None
    dedup_id: str | None = None
    group: str | None = None
    attributes: (
        Annotated[dict[str, msgspec.Raw], msgspec.Meta(max_length=ATTRIBUTES_MAX)] | None
    ) = None
    context: Annotated[dict[str, str], msgspec.Meta(max_length=ATTRIBUTES_MAX)] | None = None


class _LargeDelete(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=3):
    queue: str
    receipt: str


class _LargeExtend(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=4):
    queue: str
    receipt: str
    visibility_ms: int


class _LargeRelease(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=5):
    queue: str
    receipt: str
    delay_ms: int = 0


_NotPush = (
    Pull
    | Delete
    | Extend
    | Release
    | Peek
    | Stats
    | Purge
    | Redrive
    | CreateQueue
    | ConfigureQueue
    | DeleteQueue
    | DescribeQueue
    | ListQueues
    | History
)
_Items = msgspec.Meta(max_length=BATCH_ITEMS_MAX)


class _WireBatch(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=16):
    # What may not stand in a batch is refused by the engine, item by item.
    items: Annotated[list[_WirePush | _NotPush], _Items]


class _LargeBatch(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=16):
    items: Annotated[list[_LargePush | _LargeDelete | _LargeExtend | _LargeRelease], _Items]


class _RawBatch(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=16):
    items: Annotated[list[msgspec.Raw], _Items]


class BadItem:
    """An item of a batch that could not be decoded, and why; its neighbours are none the worse."""

    __slots__ = ("error",)

    def __init__(self, error: PenstockError) -> None:
        self.error = error


_decode_wire_push: Final = msgspec.msgpack.Decoder(_WirePush).decode
_decode_large_push: Final = msgspec.msgpack.Decoder(_LargePush).decode
_decode_wire_batch: Final = msgspec.msgpack.Decoder(_WireBatch).decode
_decode_large_batch: Final = msgspec.msgpack.Decoder(_LargeBatch).decode
_decode_raw_batch: Final = msgspec.msgpack.Decoder(_RawBatch).decode
_decode_item: Final = msgspec.msgpack.Decoder(
    _LargePush | _LargeDelete | _LargeExtend | _LargeRelease
).decode
_decode_any: Final = msgspec.msgpack.Decoder().decode
_LARGE: Final[dict[type, type]] = {
    _LargeDelete: Delete,
    _LargeExtend: Extend,
    _LargeRelease: Release,
}


def _decode_push(body: Body) -> Push:
    if len(body) <= SMALL_BYTES:
        return Push(*astuple(_decode_wire_push(body)))
    push: Push = _from_large(_decode_large_push(body))
    return push


def _decode_batch(body: Body) -> Batch:
    try:
        if len(body) > SMALL_BYTES:
            return Batch([_from_large(item) for item in _decode_large_batch(body).items])
        items: list[Any] = _decode_wire_batch(body).items
    except (msgspec.ValidationError, InvalidField):
        return Batch(_decode_one_by_one(body))
    for place, item in enumerate(items):
        if type(item) is _WirePush:
            items[place] = Push(*astuple(item))
    return Batch(items)


def _decode_one_by_one(body: Body) -> list[Any]:
    """The items of a batch in which something is wrong, with a BadItem wherever it is."""
    items: list[Any] = []
    for place, raw in enumerate(_decode_raw_batch(body).items):
        try:
            items.append(_from_large(_decode_item(raw)))
        except (msgspec.ValidationError, InvalidField) as fault:
            start = bytes(memoryview(raw)[:2])
            error = command_fault(start[1] if len(start) == 2 else 0, fault)
            items.append(BadItem(type(error)(f"items[{place}]: {error}")))
    return items


def _from_large(item: Any) -> Any:
    if type(item) is not _LargePush:
        return _LARGE[type(item)](*astuple(item))
    fields: list[Any] = [*astuple(item)]
    if item.attributes is not None:
        fields[7] = read_attributes(item.attributes)
    return Push(*fields)


def read_attributes(raw: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """Attributes that were left undecoded because they could hold anything.

    Raises InvalidField for a value that is neither text nor bytes, without having built it.
    """
    found = {}
    for name, value in raw.items():
        first = memoryview(value)[0]
        # fixstr, str 8 to 32, bin 8 to 32: everything else could be a list of a million lists.
        if not (0xA0 <= first <= 0xBF or 0xD9 <= first <= 0xDB or 0xC4 <= first <= 0xC6):
            raise InvalidField(f"attributes[{name!r}]: expected text or bytes")
        found[name] = _decode_any(value)
    return found


DECODE: Final[dict[int, Callable[[Body], Any]]] = {
    kind: msgspec.msgpack.Decoder(command).decode
    for command, kind in KIND_OF.items()
    if command not in (Push, Batch)
} | {PUSH: _decode_push, BATCH: _decode_batch}


def decode_command(kind: int, body: Body) -> Command[Any]:
    """The command of a frame. Raises InvalidField, InvalidReceipt or ProtocolError."""
    try:
        command: Command[Any] = DECODE[kind](body)
    except Exception as fault:
        raise command_fault(kind, fault) from None
    return command


def command_fault(kind: int, fault: Exception) -> PenstockError:
    """What to say about a body that could not be decoded.

    A body of the wrong shape is the fault of one request. A body that is not MessagePack at all
    shows that the peer cannot be trusted with the next frame either.
    """
    if isinstance(fault, PenstockError):
        return fault
    if isinstance(fault, msgspec.ValidationError):
        field, said = _place(kind, str(fault))
        # The same class as the engine itself would raise for what is not even text.
        named = {"receipt": InvalidReceipt, "id": MessageNotFound}.get(field, InvalidField)
        return named(f"{field}: {said}")
    if isinstance(fault, msgspec.DecodeError | RecursionError | UnicodeDecodeError):
        return ProtocolError(
            f"the client sent a frame of kind {kind:#04x} whose body is not what it should be: "
            f"{str(fault)[:200]}"
        )
    raise fault


def _place(kind: int, said: str) -> tuple[str, str]:
    """The name of the field that a decoder's complaint is about, and the complaint."""
    said, _, path = said.partition(" - at ")
    found = re.search(r"\$\[(\d+)\]", path)
    command = _TYPE_OF.get(kind)
    said = said.replace("`", "")
    if found is None or command is None:
        return "command", said
    fields = ("command", *command.__struct_fields__)  # type: ignore[attr-defined]
    place = int(found[1])
    name = fields[place] if place < len(fields) else "command"
    rest = path[found.end() :].strip("`. ")
    return name, said + (f" (at {rest})" if rest else "")


def encode_command(
    request: int, command: Command[Any], frame_bytes_max: int = FRAME_BYTES_MAX
) -> bytes:
    """The frame of a command. Raises InvalidField or MessageTooLarge for what cannot travel."""
    kind = KIND_OF.get(type(command))
    if kind is None:
        raise InvalidField(f"command: {type(command).__name__} is not one the engine knows")
    try:
        body = _encode(command)
    except (TypeError, ValueError, OverflowError, RecursionError):
        body = _encode_with_care(command)
    if kind == PUSH and type(command.body) is not bytes:  # type: ignore[attr-defined]
        given = type(command.body).__name__  # type: ignore[attr-defined]
        raise InvalidField(f"body: expected bytes, got {given}")
    if len(body) > SMALL_BYTES:
        _check_size(kind, len(body), frame_bytes_max)
    return HEADER.pack(len(body), kind, request) + body


def _check_size(kind: int, size: int, frame_bytes_max: int) -> None:
    if kind in _BY_RECEIPT:
        raise InvalidReceipt("receipt: not one that any store has made: it is far too long")
    if kind not in (PUSH, BATCH):
        raise InvalidField(
            f"command: {size} bytes in all; at most {SMALL_BYTES} can travel in one "
            f"{_TYPE_OF[kind].__name__}"
        )
    if size > frame_bytes_max:
        kind_of_error = MessageTooLarge if kind == PUSH else InvalidField
        field = "body" if kind == PUSH else "items"
        raise kind_of_error(
            f"{field}: {size} bytes with everything around it; a frame takes at most "
            f"{frame_bytes_max}"
        )


def _encode_with_care(command: Command[Any]) -> bytes:
    """Encodes what could not be encoded as it stands, or says which field is to blame."""
    if isinstance(command, Delete | Extend | Release):
        command = _with_text(command)
    elif isinstance(command, Batch) and type(command.items) is list:
        command = Batch([_with_text(item) for item in command.items])
    try:
        return _encode(command)
    except (TypeError, ValueError, OverflowError, RecursionError):
        pass
    for field in command.__struct_fields__:
        value = getattr(command, field)
        blamed = _fault_in(value)
        if blamed and field == "receipt":
            raise InvalidReceipt("receipt: not text; use the one the pull gave")
        if blamed and type(value) is dict:
            named = next((name for name, each in value.items() if _fault_in(each)), "")
            raise InvalidField(f"{field}[{named!r}]: cannot be sent: {blamed}")
        if blamed:
            raise InvalidField(f"{field}: cannot be sent: {blamed}")
    raise InvalidField("command: cannot be sent")


def _fault_in(value: object) -> str:
    try:
        _encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as fault:
        return str(fault)[:200]
    return ""


def _with_text(command: Any) -> Any:
    """A command with the text of its receipt: a claim's own proof means nothing elsewhere."""
    if isinstance(command, Delete | Extend | Release) and type(command.receipt) is not str:
        return msgspec.structs.replace(command, receipt=str(command.receipt))
    return command


# Replies.


class _WireMessage(msgspec.Struct, frozen=True, gc=False, array_like=True):
    id: str
    queue: str
    body: bytes
    attributes: dict[str, Any]
    priority: int
    group: str | None
    dedup_id: str | None
    pushed_at_ms: int
    sequence: int
    receives: int
    first_pulled_at_ms: int | None
    source: str | None
    context: dict[str, str] | None


class _WireClaim(_WireMessage, frozen=True, gc=False, array_like=True):
    proof: str
    epoch: int
    deadline_ms: int


_PROOF: Final = Claim.__struct_fields__.index("proof")
_decode_wire_claims: Final = msgspec.msgpack.Decoder(list[_WireClaim]).decode
_decode_wire_messages: Final = msgspec.msgpack.Decoder(list[_WireMessage]).decode
_decode_wire_replies: Final = msgspec.msgpack.Decoder(
    list[PushReply | bool | int | dict[str, list[str]] | None]
).decode


def encode_reply(request: int, reply: Any) -> bytes:
    """The frame of a reply to anything but a pull."""
    body = _encode(reply)
    return HEADER.pack(len(body), REPLY, request) + body


def encode_claims(request: int, claims: list[Claim]) -> bytes:
    """The frame of the reply to a pull; what proves each claim becomes text here."""
    rows = []
    for claim in claims:
        row: list[Any] = [*astuple(claim)]
        row[_PROOF] = str(row[_PROOF])
        rows.append(row)
    body = _encode(rows)
    return HEADER.pack(len(body), REPLY, request) + body


def _decode_claims(body: Body) -> list[Claim]:
    return [Claim(*astuple(row)) for row in _decode_wire_claims(body)]


def _decode_messages(body: Body) -> list[Message]:
    return [Message(*astuple(row)) for row in _decode_wire_messages(body)]


def _decode_replies(body: Body) -> list[Any]:
    replies: list[Any] = _decode_wire_replies(body)
    for place, reply in enumerate(replies):
        if type(reply) is dict:
            replies[place] = error_from(reply.get("error", []))
    return replies


def _decoder(reply: Any) -> Callable[[Body], Any]:
    return msgspec.msgpack.Decoder(reply).decode


DECODE_REPLY: Final[dict[type, Callable[[Body], Any]]] = {
    Push: _decoder(PushReply),
    Pull: _decode_claims,
    Delete: _decoder(bool),
    Extend: _decoder(int),
    Release: _decoder(None),
    Peek: _decode_messages,
    Stats: _decoder(QueueStats),
    Purge: _decoder(int),
    Redrive: _decoder(int),
    CreateQueue: _decoder(QueueInfo),
    ConfigureQueue: _decoder(QueueInfo),
    DeleteQueue: _decoder(None),
    DescribeQueue: _decoder(QueueInfo),
    ListQueues: _decoder(list[str]),
    History: _decoder(list[HistoryEvent]),
    Batch: _decode_replies,
}
_decode_hello: Final = _decoder(Hello)
_decode_welcome: Final = _decoder(Welcome)
_decode_status: Final = _decoder(dict[str, Any])


def decode_answer(kind: int, body: Body, decode: Callable[[Body], Any]) -> Any:
    """The reply a server sent. Raises the error it sent instead, or ProtocolError."""
    try:
        if kind == REPLY:
            return decode(body)
        error = error_from(_decode_words(body))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as fault:
        raise ProtocolError(f"the server sent an answer of the wrong shape: {fault}") from None
    raise error


def decode_hello(body: Body) -> Hello:
    """The client's hello. Raises ProtocolError."""
    try:
        hello: Hello = _decode_hello(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as fault:
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
    """What a server says of itself."""
    status: dict[str, Any] = _decode_status(body)
    return status
