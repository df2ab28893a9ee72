"""The bodies of frames: commands and replies in MessagePack, encoded and decoded.

    command   array: its tag, then its fields in the order of its class in `service`
    reply     the reply type of the command's class; of a pull, arrays with the receipt as text;
              of a batch, an array of replies in which an error is a map: {"error": its words}

Bodies may come from any client that can connect. Their shape is checked while they are decoded. A
large one is decoded with stricter types, so that a megabyte of bytes cannot become a gigabyte of
lists.
"""

import re
import struct
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec.structs import astuple

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
    DescribeQueues,
    Extend,
    History,
    HistoryEvent,
    ListQueues,
    Message,
    Peek,
    PeekFrom,
    PeekIds,
    Pull,
    PullIds,
    Purge,
    Push,
    PushMany,
    PushReply,
    QueueInfo,
    QueueStats,
    Redrive,
    RedriveIds,
    Release,
    ReturnIds,
    Stats,
)
from penstock.wire.frames.attributes import read_attributes
from penstock.wire.frames.bulk import decode_bulk, decode_bulk_reply, encode_bulk
from penstock.wire.frames.frames import (
    BATCH,
    BULK_PUSH,
    FRAME_BYTES_MAX,
    KIND_OF,
    PUSH,
    REPLY,
    SMALL_BYTES,
    Body,
    encode_body,
    error_from,
    pack_header,
)

_BY_RECEIPT: Final = frozenset({KIND_OF[Delete], KIND_OF[Extend], KIND_OF[Release]})
_TYPE_OF: Final = {kind: command for command, kind in KIND_OF.items()}


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
    late: bool = False


class _LargeExtend(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=4):
    queue: str
    receipt: str
    visibility_ms: int
    late: bool = False
    held_ms_max: int | None = None


class _LargeRelease(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=5):
    queue: str
    receipt: str
    delay_ms: int = 0
    late: bool = False


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
    | DescribeQueues
    | ListQueues
    | History
)
_Items = msgspec.Meta(max_length=BATCH_ITEMS_MAX)


class _WireBatch(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=16):
    # The engine refuses each command that is not allowed in a batch.
    items: Annotated[list[Push | _NotPush], _Items]


class _LargeBatch(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=16):
    items: Annotated[list[_LargePush | _LargeDelete | _LargeExtend | _LargeRelease], _Items]


class _RawBatch(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=16):
    items: Annotated[list[msgspec.Raw], _Items]


class BadItem:
    """An item of a batch that could not be decoded, and why; the other items are not affected."""

    __slots__ = ("error",)

    def __init__(self, error: PenstockError) -> None:
        self.error = error


_decode_small_push: Final = msgspec.msgpack.Decoder(Push).decode
_decode_large_push: Final = msgspec.msgpack.Decoder(_LargePush).decode
_decode_wire_batch: Final = msgspec.msgpack.Decoder(_WireBatch).decode
_decode_large_batch: Final = msgspec.msgpack.Decoder(_LargeBatch).decode
_decode_raw_batch: Final = msgspec.msgpack.Decoder(_RawBatch).decode
_decode_item: Final = msgspec.msgpack.Decoder(
    _LargePush | _LargeDelete | _LargeExtend | _LargeRelease
).decode
_LARGE: Final[dict[type, type]] = {
    _LargeDelete: Delete,
    _LargeExtend: Extend,
    _LargeRelease: Release,
}


def _decode_push(body: Body) -> Push:
    if len(body) <= SMALL_BYTES:
        return _decode_small_push(body)
    push: Push = _from_large(_decode_large_push(body))
    return push


def _decode_batch(body: Body) -> Batch:
    try:
        if len(body) > SMALL_BYTES:
            return Batch([_from_large(item) for item in _decode_large_batch(body).items])
        items: list[Any] = _decode_wire_batch(body).items
    except (msgspec.ValidationError, InvalidField):
        return Batch(_decode_one_by_one(body))
    return Batch(items)


def _decode_one_by_one(body: Body) -> list[Any]:
    """The items of a batch with a fault in it, with a BadItem for each that is wrong."""
    return decode_items(raw_items(body), 0)


def raw_items(body: Body) -> list[msgspec.Raw]:
    """The items of a batch, undecoded. Raises what the decoder raises."""
    return _decode_raw_batch(body).items


def decode_items(raws: Sequence[msgspec.Raw], first: int) -> list[Any]:
    """Items of a batch, the first of them at place `first`, with a BadItem for one that is wrong.

    Raises what the decoder raises for one that is not MessagePack.
    """
    items: list[Any] = []
    for place, raw in enumerate(raws, first):
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


DECODE: Final[dict[int, Callable[[Body], Any]]] = {
    kind: msgspec.msgpack.Decoder(command).decode
    for command, kind in KIND_OF.items()
    if command not in (Push, Batch)
} | {PUSH: _decode_push, BATCH: _decode_batch, BULK_PUSH: decode_bulk}


def decode_command(kind: int, body: Body) -> Command[Any]:
    """The command of a frame. Raises InvalidField, InvalidReceipt or ProtocolError."""
    try:
        command: Command[Any] = DECODE[kind](body)
    except Exception as fault:
        raise command_fault(kind, fault) from None
    return command


def command_fault(kind: int, fault: Exception) -> PenstockError:
    """The error for a body that could not be decoded.

    A body of the wrong shape refuses one request. A body that is not MessagePack at all is a
    ProtocolError, which ends the connection.
    """
    if isinstance(fault, PenstockError):
        return fault
    if isinstance(fault, msgspec.ValidationError):
        field, reason = _place(kind, str(fault))
        # The same classes as the engine raises for a value that is not text.
        named = {"receipt": InvalidReceipt, "id": MessageNotFound}.get(field, InvalidField)
        return named(f"{field}: {reason}")
    return ProtocolError(
        f"the client sent a frame of kind {kind:#04x} whose body is not MessagePack: "
        f"{str(fault)[:200]}"
    )


def _place(kind: int, message: str) -> tuple[str, str]:
    """The name of the field that a decoder's message is about, and the reason it gives."""
    reason, _, path = message.partition(" - at ")
    found = re.search(r"\$\[(\d+)\]", path)
    command = _TYPE_OF.get(kind)
    reason = reason.replace("`", "")
    if found is None or command is None:
        return "command", reason
    fields = ("command", *command.__struct_fields__)  # type: ignore[attr-defined]
    place = int(found[1])
    name = fields[place] if place < len(fields) else "command"
    rest = path[found.end() :].strip("`. ")
    return name, reason + (f" (at {rest})" if rest else "")


# With fewer messages a batch is faster: one call decodes all of it, and one its reply. The columns
# of a bulk push have a fixed cost of about 15 µs, and need less time for each message.
BULK_MIN: Final = 20


def as_sent(command: PushMany) -> PushMany | Batch:
    """The command to send for many pushes: a Batch with the same effect if they are few.

    Raises InvalidField.
    """
    return command if len(command.bodies) >= BULK_MIN else Batch([*command.pushes()])


def encode_command(
    request: int, command: Command[Any], frame_bytes_max: int = FRAME_BYTES_MAX
) -> bytes:
    """The frame of a command. Raises InvalidField or MessageTooLarge if it cannot be sent."""
    kind = KIND_OF.get(type(command))
    if kind is None:
        if isinstance(command, PushMany):
            return encode_bulk(request, command, frame_bytes_max)
        raise InvalidField(f"command: the engine has no command {type(command).__name__}")
    try:
        body = encode_body(command)
    except (TypeError, ValueError, OverflowError, RecursionError):
        body = _encode_checked(command)
    if kind == PUSH and type(command.body) is not bytes:  # type: ignore[attr-defined]
        given = type(command.body).__name__  # type: ignore[attr-defined]
        raise InvalidField(f"body: expected bytes, got {given}")
    if len(body) > SMALL_BYTES:
        _check_size(kind, len(body), frame_bytes_max)
    return pack_header(len(body), kind, request) + body


def _check_size(kind: int, size: int, frame_bytes_max: int) -> None:
    if kind in _BY_RECEIPT:
        raise InvalidReceipt("receipt: too long; use the one that the pull returned")
    if kind not in (PUSH, BATCH):
        raise InvalidField(
            f"command: {size} bytes in all; at most {SMALL_BYTES} are allowed in one "
            f"{_TYPE_OF[kind].__name__}"
        )
    if size > frame_bytes_max:
        kind_of_error = MessageTooLarge if kind == PUSH else InvalidField
        field = "body" if kind == PUSH else "items"
        raise kind_of_error(
            f"{field}: {size} bytes with all other fields; a frame takes at most {frame_bytes_max}"
        )


def _encode_checked(command: Command[Any]) -> bytes:
    """Encodes a command after turning its receipts into text. Raises an error for the bad field."""
    if isinstance(command, Delete | Extend | Release):
        command = _with_text(command)
    elif isinstance(command, Batch) and type(command.items) is list:
        command = Batch([_with_text(item) for item in command.items])
    try:
        return encode_body(command)
    except (TypeError, ValueError, OverflowError, RecursionError):
        pass
    for field in command.__struct_fields__:
        value = getattr(command, field)
        fault = _fault_in(value)
        if fault and field == "receipt":
            raise InvalidReceipt("receipt: not text; use the one the pull returned")
        if fault and type(value) is dict:
            named = next((name for name, each in value.items() if _fault_in(each)), "")
            raise InvalidField(f"{field}[{named!r}]: cannot be sent: {fault}")
        if fault:
            raise InvalidField(f"{field}: cannot be sent: {fault}")
    raise InvalidField("command: cannot be sent")


def _fault_in(value: object) -> str:
    try:
        encode_body(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as fault:
        return str(fault)[:200]
    return ""


def _with_text(command: Any) -> Any:
    """A command with its receipt as text: a claim's proof object is valid in one process only."""
    if isinstance(command, Delete | Extend | Release) and type(command.receipt) is not str:
        return msgspec.structs.replace(command, receipt=str(command.receipt))
    return command


# Replies.


# MessagePack: an array of fewer than sixteen has a header of one byte, others here one of three.
_FIXED_ARRAY_MAX: Final = 16
_ARRAY_HEADER: Final = struct.Struct(">BH")
_LONG_ARRAY_HEADER: Final = struct.Struct(">BI")
_PROOF: Final = Claim.__struct_fields__.index("proof")
_decode_wire_replies: Final = msgspec.msgpack.Decoder(
    list[PushReply | bool | int | dict[str, list[str]] | None]
).decode


def encode_reply(request: int, reply: Any) -> bytes:
    """The frame of a reply to anything but a pull."""
    body = encode_body(reply)
    return pack_header(len(body), REPLY, request) + body


def encode_rows(replies: list[Any]) -> bytes:
    """Up to 65,535 rows of a reply, without the array around them."""
    return encode_body(replies)[1 if len(replies) < _FIXED_ARRAY_MAX else 3 :]


def encode_row_reply(request: int, count: int, rows: Sequence[bytes]) -> bytes:
    """The frame of a reply of many rows, which are encoded already."""
    is_short = count < 2**16
    header = _ARRAY_HEADER.pack(0xDC, count) if is_short else _LONG_ARRAY_HEADER.pack(0xDD, count)
    size = len(header) + sum(map(len, rows))
    return pack_header(size, REPLY, request) + b"".join((header, *rows))


def encode_claims(request: int, claims: list[Claim]) -> bytes:
    """The frame of the reply to a pull; proofs become text."""
    rows = []
    for claim in claims:
        row: list[Any] = [*astuple(claim)]
        row[_PROOF] = str(row[_PROOF])
        rows.append(row)
    body = encode_body(rows)
    return pack_header(len(body), REPLY, request) + body


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
    Pull: _decoder(list[Claim]),
    Delete: _decoder(bool),
    Extend: _decoder(int),
    Release: _decoder(None),
    Peek: _decoder(list[Message]),
    Stats: _decoder(QueueStats),
    Purge: _decoder(int),
    Redrive: _decoder(int),
    CreateQueue: _decoder(QueueInfo),
    ConfigureQueue: _decoder(QueueInfo),
    DeleteQueue: _decoder(None),
    DescribeQueue: _decoder(QueueInfo),
    DescribeQueues: _decoder(list[QueueInfo]),
    ListQueues: _decoder(list[str]),
    History: _decoder(list[HistoryEvent]),
    Batch: _decode_replies,
    PushMany: decode_bulk_reply,
    PeekFrom: _decoder(list[Message]),
    PeekIds: _decoder(list[Message]),
    PullIds: _decoder(list[Claim]),
    ReturnIds: _decoder(int),
    RedriveIds: _decoder(int),
}
