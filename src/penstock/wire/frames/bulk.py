"""Many pushes to one queue in one frame: the bodies one after another, shared fields only once.

    body     head size (4) · head · count × body size (4 each) · bodies, one after another
    head     MessagePack array: queue, count, then fields that all messages share (delay_ms,
             priority, ttl_ms, group, attributes), then columns with one value per message, or nil
             for no column (delays_ms, priorities, ttls_ms, groups, dedup_ids, attributes)
    reply    MessagePack array: count, then of the messages pushed the ids (the start that all
             share, and the rest of each), the sequences (8 bytes each) and which were duplicates;
             then the errors, each with the numbers of the messages it refused

A value in a column replaces the shared one; nil in a column means the shared one. The frame is a
`PushMany`, each message of which is accepted or refused alone. `BulkFrame` can decode any range of
the messages: a server executes a large frame in parts (`split_batches`).
"""

import struct
import sys
from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise, repeat
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec.structs import astuple

from penstock.errors import InvalidField, PenstockError, ProtocolError
from penstock.service import (
    ATTRIBUTES_MAX,
    BATCH_ITEMS_MAX,
    NumberedReplies,
    PushMany,
    PushReply,
)
from penstock.wire.frames.attributes import read_attributes
from penstock.wire.frames.frames import (
    BULK_PUSH,
    DECODE_FAULTS,
    FRAME_BYTES_MAX,
    REPLY,
    Body,
    error_from,
    error_words,
    pack_header,
)

T = TypeVar("T")
_SIZE: Final = struct.Struct("<I")
_SIZE_BYTES: Final = _SIZE.size
_IS_BIG_ENDIAN: Final = sys.byteorder == "big"
_Raw = Annotated[dict[str, msgspec.Raw], msgspec.Meta(max_length=ATTRIBUTES_MAX)]
_Rows = msgspec.Meta(max_length=BATCH_ITEMS_MAX)


class _Head(msgspec.Struct, frozen=True, array_like=True):
    queue: str
    count: Annotated[int, msgspec.Meta(ge=0, le=BATCH_ITEMS_MAX)]
    delay_ms: int | None = None
    priority: int = 0
    ttl_ms: int | None = None
    group: str | None = None
    attributes: _Raw | None = None
    delays_ms: Annotated[list[int | None], _Rows] | None = None
    priorities: Annotated[list[int | None], _Rows] | None = None
    ttls_ms: Annotated[list[int | None], _Rows] | None = None
    groups: Annotated[list[str | None], _Rows] | None = None
    dedup_ids: Annotated[list[str | None], _Rows] | None = None
    # Undecoded, because 10,000 messages may have 640,000 attributes.
    each_attributes: Annotated[list[msgspec.Raw], _Rows] | None = None


class _HeadStart(msgspec.Struct, frozen=True, array_like=True):
    """The first fields of a head; the others are skipped undecoded."""

    queue: str
    count: int


class _Reply(msgspec.Struct, frozen=True, array_like=True):
    count: int
    id_start: str
    id_rests: bytes | list[str]
    sequences: bytes
    duplicates: list[int]
    errors: list[tuple[list[str], list[int]]]


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_head: Final = msgspec.msgpack.Decoder(_Head).decode
_decode_head_start: Final = msgspec.msgpack.Decoder(_HeadStart).decode
_decode_row: Final = msgspec.msgpack.Decoder(_Raw | None).decode
_decode_reply: Final = msgspec.msgpack.Decoder(_Reply).decode
_NUMBER_DIGITS: Final = 12
_COLUMNS: Final = ("delays_ms", "priorities", "ttls_ms", "groups", "dedup_ids", "each_attributes")


def encode_bulk(request: int, bulk: PushMany, frame_bytes_max: int = FRAME_BYTES_MAX) -> bytes:
    """The frame of many pushes. Raises InvalidField if they cannot be encoded."""
    bodies = bulk.bodies
    count = len(bodies)
    if count > BATCH_ITEMS_MAX:
        raise InvalidField(f"bodies: {count} of them; at most {BATCH_ITEMS_MAX} in one go")
    columns = (
        bulk.delays_ms,
        bulk.priorities,
        bulk.ttls_ms,
        bulk.groups,
        bulk.dedup_ids,
        bulk.each_attributes,
    )
    _check_columns(columns, count)
    try:
        head = _encode(
            (
                bulk.queue,
                count,
                bulk.delay_ms,
                bulk.priority,
                bulk.ttl_ms,
                bulk.group,
                bulk.attributes,
                *columns,
            )
        )
        sizes = array("I", map(len, bodies))
        total = _SIZE_BYTES + len(head) + _SIZE_BYTES * count + sum(sizes)
        if total > frame_bytes_max:
            raise InvalidField(
                f"bodies: {total} bytes in all; a frame takes at most {frame_bytes_max}"
            )
        if _IS_BIG_ENDIAN:
            sizes.byteswap()
        start = pack_header(total, BULK_PUSH, request) + _SIZE.pack(len(head))
        # One join: copying half a megabyte a second time costs more than everything else here.
        return b"".join((start, head, sizes, *bodies))
    except (TypeError, ValueError, OverflowError) as fault:
        raise InvalidField(f"bulk: cannot be sent: {str(fault)[:200]}") from None


def _check_columns(columns: tuple[Sequence[Any] | None, ...], count: int) -> None:
    """Raises InvalidField for a column without a value for each of the messages."""
    if columns.count(None) == len(columns):
        return
    for name, column in zip(_COLUMNS, columns, strict=True):
        if column is not None and len(column) != count:
            raise InvalidField(f"{name}: {len(column)} values for {count} bodies")


def bulk_count(body: Body) -> int | None:
    """How many messages a bulk push has by its head; None if that cannot be read."""
    view = memoryview(body)
    try:
        (size,) = _SIZE.unpack_from(view)
        return _decode_head_start(view[_SIZE_BYTES : _SIZE_BYTES + size]).count
    except (struct.error, *DECODE_FAULTS):
        return None


def decode_bulk(body: Body) -> PushMany:
    """The command of a bulk push. Raises InvalidField or ProtocolError."""
    frame = BulkFrame(body)
    return frame.part(0, frame.count)


class BulkFrame:
    """The body of a bulk push, of which any range of messages can be decoded.

    Raises InvalidField or ProtocolError if the head or the sizes are wrong.
    """

    __slots__ = ("_bodies", "_head", "count", "ends")

    def __init__(self, body: Body) -> None:
        view = memoryview(body)
        if len(view) < _SIZE_BYTES:
            raise ProtocolError("the client sent a bulk push without a head")
        head_end = _SIZE_BYTES + _SIZE.unpack_from(view)[0]
        if head_end > len(view):
            raise ProtocolError("the client sent a bulk push whose head is longer than itself")
        try:
            head = _decode_head(view[_SIZE_BYTES:head_end])
        except msgspec.ValidationError as fault:
            raise _wrong_shape(fault) from None
        except DECODE_FAULTS as fault:
            raise ProtocolError(f"the client sent a bulk push with a bad head: {fault}") from None
        self._head = head
        self.count = head.count
        sizes_end = head_end + _SIZE_BYTES * head.count
        self._bodies = view[sizes_end:]
        # Where each body begins, and as the last element where all of them end.
        self.ends = _ends(view[head_end:sizes_end], head.count, len(self._bodies))

    @property
    def is_plain(self) -> bool:
        """Whether the messages have only bodies and dedup ids: many of them cost little."""
        head = self._head
        others = (
            head.delay_ms,
            head.ttl_ms,
            head.group,
            head.attributes,
            head.delays_ms,
            head.priorities,
            head.ttls_ms,
            head.groups,
            head.each_attributes,
        )
        return not head.priority and others.count(None) == len(others)

    def part(self, start: int, stop: int) -> PushMany:
        """The pushes from one place to another. Raises InvalidField for wrong attributes."""
        head = self._head
        _check_columns(astuple(head)[-len(_COLUMNS) :], self.count)
        ends = self.ends
        first = ends[start]
        # One copy to bytes, whose slices are the bodies; each slice of a view needs its own copy.
        joined = bytes(self._bodies[first : ends[stop]])
        return PushMany(
            head.queue,
            [joined[at - first : end - first] for at, end in pairwise(ends[start : stop + 1])],
            _cut(head.dedup_ids, start, stop),
            head.delay_ms,
            head.priority,
            head.ttl_ms,
            head.group,
            None if head.attributes is None else read_attributes(head.attributes),
            _cut(head.delays_ms, start, stop),
            _cut(head.priorities, start, stop),
            _cut(head.ttls_ms, start, stop),
            _cut(head.groups, start, stop),
            _read_each(head.each_attributes, start, stop),
        )


def _ends(view: memoryview, count: int, bodies_bytes: int) -> list[int]:
    if len(view) < _SIZE_BYTES * count:
        raise ProtocolError(f"the client sent a bulk push too short for {count} sizes")
    sizes = array("I")
    sizes.frombytes(view)
    if _IS_BIG_ENDIAN:
        sizes.byteswap()
    ends = list(accumulate(sizes, initial=0))
    if ends[-1] != bodies_bytes:
        raise ProtocolError(
            f"the client sent a bulk push of {bodies_bytes} bytes whose sizes add up to {ends[-1]}"
        )
    return ends


def _cut(column: list[T] | None, start: int, stop: int) -> list[T] | None:
    return None if column is None else column[start:stop]


def _read_each(
    column: list[msgspec.Raw] | None, start: int, stop: int
) -> list[dict[str, Any] | None] | None:
    if column is None:
        return None
    try:
        rows = [_decode_row(row) for row in column[start:stop]]
    except msgspec.ValidationError as fault:
        raise _wrong_shape(fault) from None
    except DECODE_FAULTS as fault:
        raise ProtocolError(f"the client sent a bulk push with a bad head: {fault}") from None
    return [None if row is None else read_attributes(row) for row in rows]


def _wrong_shape(fault: msgspec.ValidationError) -> InvalidField:
    return InvalidField(f"bulk: {str(fault).replace('`', '')}")


def encode_bulk_reply(
    request: int, replies: NumberedReplies | Sequence[PushReply | PenstockError]
) -> bytes:
    """The frame that answers a bulk push."""
    if isinstance(replies, NumberedReplies):
        return _encode_numbered(request, replies)
    ids: list[str] = []
    sequences = array("Q")
    duplicates: list[int] = []
    refused: dict[tuple[str, ...], list[int]] = {}
    for number, reply in enumerate(replies):
        if isinstance(reply, PushReply):
            ids.append(reply.id)
            sequences.append(reply.sequence)
            if reply.duplicate:
                duplicates.append(number)
        else:
            refused.setdefault(tuple(error_words(reply)), []).append(number)
    start = _shared_start(ids)
    rests = [id_[len(start) :] for id_ in ids]
    joined = "".join(rests)
    # Joined if all have the same width, which the reader computes from the count; else a list.
    is_even = joined and joined.isascii() and len(set(map(len, rests))) == 1
    if _IS_BIG_ENDIAN:
        sequences.byteswap()
    body = _encode(
        (
            len(replies),
            start,
            joined.encode() if is_even else rests,
            sequences.tobytes(),
            duplicates,
            list(refused.items()),
        )
    )
    return pack_header(len(body), REPLY, request) + body


def _encode_numbered(request: int, reply: NumberedReplies) -> bytes:
    numbers = reply.numbers
    sequences = array("Q", numbers)
    if _IS_BIG_ENDIAN:
        sequences.byteswap()
    packed = sequences.tobytes()
    # The digits in which the first and the last number differ, in whole bytes.
    width = max(1, ((numbers[0] ^ numbers[-1]).bit_length() + 7) // 8)
    rests = bytearray(width * len(numbers))
    for place in range(width):
        rests[width - 1 - place :: width] = packed[place :: sequences.itemsize]
    start = f"{numbers[0]:0{_NUMBER_DIGITS}x}"[: _NUMBER_DIGITS - 2 * width]
    fields = (
        len(numbers), reply.id_start + start, rests.hex().encode(), packed, (), (),
    )  # fmt: skip
    body = _encode(fields)
    return pack_header(len(body), REPLY, request) + body


def _shared_start(texts: list[str]) -> str:
    if not texts:
        return ""
    low, high = min(texts), max(texts)
    # At least one character is left for the rest, also if there is only one id.
    for place, (one, other) in enumerate(zip(low[:-1], high, strict=False)):
        if one != other:
            return low[:place]
    return low[:-1]


def decode_bulk_reply(body: Body) -> list[PushReply | PenstockError]:
    """Each message's reply or error, in order. Raises ProtocolError."""
    try:
        reply = _decode_reply(body)
        sequences = array("Q")
        sequences.frombytes(reply.sequences)
        if _IS_BIG_ENDIAN:
            sequences.byteswap()
        refused = {number: words for words, numbers in reply.errors for number in numbers}
        rests = reply.id_rests
        if isinstance(rests, bytes):
            rests = _even_parts(rests.decode("ascii"), len(sequences))
        if len(rests) != len(sequences) or len(rests) + len(refused) != reply.count:
            raise ValueError("its parts do not add up")
        if not refused and not reply.duplicates:
            ids = map(reply.id_start.__add__, rests)
            return list(map(PushReply, ids, sequences, repeat(False)))
        pushed = zip(rests, sequences, strict=True)
        duplicates = frozenset(reply.duplicates)
        return [
            error_from(refused[number])
            if number in refused
            else _pushed(reply.id_start, next(pushed), number in duplicates)
            for number in range(min(reply.count, BATCH_ITEMS_MAX))
        ]
    except (*DECODE_FAULTS, StopIteration, RuntimeError) as fault:
        raise ProtocolError(f"the server sent a bulk reply of the wrong shape: {fault}") from None


def _pushed(start: str, row: tuple[str, int], duplicate: bool) -> PushReply:
    return PushReply(start + row[0], row[1], duplicate)


def _even_parts(text: str, count: int) -> list[str]:
    if not count or len(text) % count:
        raise ValueError("its ids do not have one width")
    width = len(text) // count
    return [text[at : at + width] for at in range(0, len(text), width)]
