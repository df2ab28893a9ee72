"""Events as the data of an entry: a block that numpy and Arrow can read without a loop.

    block    count (4) · shard (4) · term (8) · count × event header (64 each) · payloads

    event    0  kind (1)          the event's tag in `core.events`
    header   1  priority (1)
             2  flags (2)         1: a dead letter (Moved)
             4  queue (4)
             8  number (8)        the message; 0 for events of a queue
            16  at_ms (8)
            24  when_ms (8)       deadline (Claimed, Extended), visible at (Pushed, Released);
                                  the queue moved to (Moved); created at (QueueStated);
                                  the shard it left for (Departed) or is in (Arrived)
            32  other (8)         expires at (Pushed), rank (Moved), before (QueuePurged);
                                  configured at (QueueStated); its number there (Arrived)
            40  epoch (4)         the claim; the count (QueuePurged, QueueRemoved)
            44  body size (4)
            48  first text (2)    size of: group (Pushed), attempt id (Claimed), name (QueueCreated,
                                  QueueStated), queue there (Departed)
            50  second text (2)   size of: dedup id (Pushed), holder (Claimed)
            52  extra size (4)    msgpack: attributes, context and size (Pushed), settings (queues)
                                  Carried holds what Pushed held
            56  payload at (4)    from the start of this header
            60  payload crc32 (4)

    payload  body · first text · second text · extra

All integers are little-endian. A payload has its own checksum beside the entry's, because bodies
are read one by one, long after the entry as a whole was verified.
`docs/formats/block.md` is the format; `core` does not depend on it.
"""

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, repeat
from operator import add, or_, sub
from typing import Any, Final, NamedTuple, cast

import msgspec
from isal.isal_zlib import crc32

from penstock.core.delivery import Arrivals, Delivery
from penstock.core.events import (
    AnyEvent,
    Arrived,
    Carried,
    Claimed,
    ClaimExpired,
    DelayEnded,
    Deleted,
    Departed,
    Expired,
    Extended,
    Lost,
    Moved,
    Pushed,
    QueueConfigured,
    QueueCreated,
    QueuePurged,
    QueueRemoved,
    QueueStated,
    Released,
)
from penstock.core.runs import Run
from penstock.errors import CorruptEntry
from penstock.journal.columns import little, words
from penstock.journal.place import pack_place
from penstock.service import Attributes, QueueSettings

VERSION: Final = b"PENSTK01"
BLOCK: Final = struct.Struct("<IIQ")
EVENT: Final = struct.Struct("<BBHIQQQQIIHHIII")
BLOCK_BYTES: Final = BLOCK.size
EVENT_BYTES: Final = EVENT.size
KINDS: Final[tuple[type, ...]] = (
    QueueCreated,
    QueueConfigured,
    QueueRemoved,
    QueuePurged,
    Pushed,
    DelayEnded,
    Claimed,
    Extended,
    Released,
    ClaimExpired,
    Deleted,
    Expired,
    Moved,
    Lost,
    Carried,
    QueueStated,
    Departed,
    Arrived,
)
_KIND: Final = {kind: number for number, kind in enumerate(KINDS, 1)}
_DEAD: Final = 1
_PUSHED: Final = 5
_CLAIMED: Final = 7
_DELETED: Final = 11
_MOVED: Final = 13
_CARRIED: Final = 15
_CLAIMS_AND_DELETES: Final = frozenset({Claimed, Deleted})
_WITH_CONTENT: Final = frozenset({_PUSHED, _CARRIED})
# The headers of plain events of the three commonest kinds; fields that are zero are padding.
_pack_deleted = struct.Struct("<IIQQ16xI12xI4x").pack
_pack_claimed = struct.Struct("<IIQQQ8xI12xI4x").pack
_pack_held_claim = struct.Struct("<IIQQQ8xI6xH4xII").pack
_pack_pushed = struct.Struct("<HxxIQQQQ4xI8xII").pack
_pack_event = EVENT.pack
# One field of all headers: a slice of the block as an array of integers of the field's size.
_NUMBER_AT: Final = 8
_unpack_number: Final = struct.Struct("<Q").unpack_from
_NUMBER: Final = slice((BLOCK_BYTES + _NUMBER_AT) // 8, None, EVENT_BYTES // 8)
_BODY_BYTES: Final = slice((BLOCK_BYTES + 44) // 4, None, EVENT_BYTES // 4)
_SECOND_BYTES: Final = slice((BLOCK_BYTES + 50) // 2, None, EVENT_BYTES // 2)
_PAYLOAD_AT: Final = slice((BLOCK_BYTES + 56) // 4, None, EVENT_BYTES // 4)
_PAYLOAD_CRC: Final = slice((BLOCK_BYTES + 60) // 4, None, EVENT_BYTES // 4)


# A client can invent holders.
_HOLDERS_MAX: Final = 1_024
_HOLDERS: Final[dict[str, tuple[bytes, int]]] = {}
_NOT_PLAIN: Final = (b"", b"")

Extra = tuple[Attributes | None, dict[str, str] | None, int]
_to_msgpack = msgspec.msgpack.Encoder().encode
_read_extra = msgspec.msgpack.Decoder(Extra).decode
_read_settings = msgspec.msgpack.Decoder(QueueSettings).decode


class Fields(NamedTuple):
    """An event's header, as numbers."""

    kind: int
    priority: int
    flags: int
    queue: int
    number: int
    at_ms: int
    when_ms: int
    other: int
    epoch: int
    body_bytes: int
    first_bytes: int
    second_bytes: int
    extra_bytes: int
    payload_at: int
    payload_crc: int

    @property
    def payload_bytes(self) -> int:
        """The size of everything that belongs to this header."""
        return self.body_bytes + self.first_bytes + self.second_bytes + self.extra_bytes


def encode(
    events: Sequence[AnyEvent], shard: int = 0, term: int = 0
) -> tuple[bytes, list[tuple[int, int]]]:
    """The block of these events; the offset in it of each message's header, and the message's size.

    Messages are what `Pushed` and `Carried` hold.
    """
    headers = [BLOCK.pack(len(events), shard, term)]
    payloads: list[bytes] = []
    messages: list[tuple[int, int]] = []
    at = BLOCK_BYTES
    end = BLOCK_BYTES + EVENT_BYTES * len(events)
    if _CLAIMS_AND_DELETES.issuperset(map(type, events)):
        # Mostly none of many claims and deletes has a payload but the holder of all claims, which
        # they share: "payload at" then only decreases.
        packed = list(map(pack_plain, events, range(end - at, 0, -EVENT_BYTES)))
        holders = {event.holder for event in events if type(event) is Claimed}
        if len(holders) < 2 and _NOT_PLAIN not in packed:
            headers += [header for header, _ in packed]
            headers += [_held_by(each)[0] for each in holders if each is not None]
            return b"".join(headers), messages
    for event in events:
        header, payload = pack_plain(event, end - at)
        if not header:
            numbers, parts = _ENCODERS[type(event)](event)
            payload = b"".join(parts)
            header = _pack_event(*numbers, end - at, crc32(payload))
        headers.append(header)
        if type(event) is Pushed:
            messages.append((at, event.size_bytes))
        elif type(event) is Carried:
            messages.append((at, event.pushed.size_bytes))
        if payload:
            payloads.append(payload)
            end += len(payload)
        at += EVENT_BYTES
    return b"".join((*headers, *payloads)), messages


def encode_run(run: Run, shard: int = 0, term: int = 0) -> bytes:
    """The block of a run: the same bytes as `encode` makes of its events, made column by column."""
    bodies = run.bodies
    count = len(bodies)
    alike = _pack_event(_PUSHED, 0, 0, run.queue, 0, run.at_ms, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    head = bytearray(BLOCK.pack(count, shard, term) + alike * count)
    pairs, fours = memoryview(head).cast("H"), memoryview(head).cast("I")
    crcs: Iterable[int] = map(crc32, bodies)
    sizes: Iterable[int] = run.sizes
    payloads: Iterable[bytes] = bodies
    if run.dedup_ids is not None:
        texts = [dedup_id.encode() for dedup_id in run.dedup_ids]
        text_sizes = list(map(len, texts))
        pairs[_SECOND_BYTES] = _column("H", text_sizes)
        crcs = map(crc32, texts, crcs)
        sizes = map(add, sizes, text_sizes)
        payloads = chain.from_iterable(zip(bodies, texts, strict=True))
    # "payload at" is relative: from one header to the next it falls by a header's size, and rises
    # by the size of the payload before.
    steps = map(sub, sizes, repeat(EVENT_BYTES, count - 1))
    memoryview(head).cast("Q")[_NUMBER] = _column("Q", run.numbers)
    fours[_BODY_BYTES] = _column("I", run.sizes)
    fours[_PAYLOAD_AT] = _column("I", accumulate(steps, initial=EVENT_BYTES * count))
    fours[_PAYLOAD_CRC] = _column("I", crcs)
    return b"".join((head, *payloads))


def _column(kind: str, values: Iterable[int]) -> memoryview:
    """One field of many headers; `kind` is a type code of `array`."""
    return memoryview(little(array(kind, values)))


def places_of(run: Run, data_offset: int) -> list[int]:
    """The places of a run's messages, whose block begins at `data_offset` in the stream."""
    first = pack_place(data_offset + BLOCK_BYTES, 0)
    step = pack_place(EVENT_BYTES, 0)
    return list(map(or_, range(first, first + step * len(run), step), run.sizes))


def block_header(count: int, shard: int, term: int) -> bytes:
    """The first bytes of a block of `count` events."""
    return BLOCK.pack(count, shard, term)


def _held_by(holder: str) -> tuple[bytes, int]:
    """A holder's name as a payload, with its checksum: few holders make most claims."""
    try:
        return _HOLDERS[holder]
    except KeyError:
        if len(_HOLDERS) >= _HOLDERS_MAX:
            _HOLDERS.clear()
        payload = holder.encode()
        known = _HOLDERS[holder] = payload, crc32(payload)
        return known


def pack_plain(event: AnyEvent, payload_at: int) -> tuple[bytes, bytes]:
    """The header and the payload of an event of the commonest kinds; the header is else empty.

    The payload is a body, a claim's holder, or nothing.
    """
    # A `cast` would be a call; mypy narrows the type by `type(event) is`.
    if type(event) is Deleted:
        header = _pack_deleted(
            _DELETED, event.queue, event.number, event.at_ms, event.epoch, payload_at
        )
        return header, b""
    if type(event) is Claimed:
        if event.attempt_id is None:
            if event.holder is None:
                header = _pack_claimed(
                    _CLAIMED, event.queue, event.number, event.at_ms, event.deadline_ms,
                    event.epoch, payload_at,
                )  # fmt: skip
                return header, b""
            holder, crc = _held_by(event.holder)
            header = _pack_held_claim(
                _CLAIMED, event.queue, event.number, event.at_ms, event.deadline_ms, event.epoch,
                len(holder), payload_at, crc,
            )  # fmt: skip
            return header, holder
    elif type(event) is Pushed:
        e = event
        if e.group is None and e.dedup_id is None and e.attributes is None and e.context is None:
            header = _pack_pushed(
                _PUSHED | e.priority << 8, e.queue, e.number, e.at_ms, e.visible_at_ms,
                e.expires_at_ms, len(e.body), payload_at, crc32(e.body),
            )  # fmt: skip
            return header, e.body
    return _NOT_PLAIN


Encoded = tuple[tuple[int, ...], tuple[bytes, ...]]


def _encode_pushed(e: Pushed) -> Encoded:
    group = b"" if e.group is None else e.group.encode()
    dedup_id = b"" if e.dedup_id is None else e.dedup_id.encode()
    extra = b""
    if e.attributes is not None or e.context is not None:
        extra = _to_msgpack((e.attributes, e.context, e.size_bytes))
    return (
        _PUSHED, e.priority, 0, e.queue, e.number, e.at_ms, e.visible_at_ms, e.expires_at_ms, 0,
        len(e.body), len(group), len(dedup_id), len(extra),
    ), (e.body, group, dedup_id, extra)  # fmt: skip


def _encode_carried(e: Carried) -> Encoded:
    numbers, parts = _encode_pushed(e.pushed)
    _, priority, flags, _, number, _, when_ms, other, *rest = numbers
    return (_CARRIED, priority, flags, e.queue, number, e.at_ms, when_ms, other, *rest), parts


def _encode_claimed(e: Claimed) -> Encoded:
    attempt_id = b"" if e.attempt_id is None else e.attempt_id.encode()
    holder = b"" if e.holder is None else e.holder.encode()
    return (
        _CLAIMED, 0, 0, e.queue, e.number, e.at_ms, e.deadline_ms, 0, e.epoch,
        0, len(attempt_id), len(holder), 0,
    ), (attempt_id, holder)  # fmt: skip


def _encode_settings(e: QueueCreated | QueueConfigured) -> Encoded:
    name = e.name.encode() if isinstance(e, QueueCreated) else b""
    settings = _to_msgpack(e.settings)
    return (
        _KIND[type(e)], 0, 0, e.queue, 0, e.at_ms, 0, 0, 0, 0, len(name), 0, len(settings),
    ), (name, settings)  # fmt: skip


def _encode_stated(e: QueueStated) -> Encoded:
    name, settings = e.name.encode(), _to_msgpack(e.settings)
    return (
        _KIND[QueueStated], 0, 0, e.queue, 0, e.at_ms, e.created_at_ms, e.configured_at_ms, 0,
        0, len(name), 0, len(settings),
    ), (name, settings)  # fmt: skip


def _encode_moved(e: Moved) -> Encoded:
    flags = _DEAD if e.dead else 0
    return (_MOVED, 0, flags, e.queue, e.number, e.at_ms, e.to, e.rank, 0, 0, 0, 0, 0), ()


def _encode_departed(e: Departed) -> Encoded:
    name = e.to_queue.encode()
    return (
        _KIND[Departed], 0, 0, e.queue, e.number, e.at_ms, e.to_shard, 0, e.epoch,
        0, len(name), 0, 0,
    ), (name,)  # fmt: skip


def _encode_arrived(e: Arrived) -> Encoded:
    return (
        _KIND[Arrived], 0, 0, e.queue, e.number, e.at_ms, e.to_shard, e.to_number, e.epoch,
        0, 0, 0, 0,
    ), ()  # fmt: skip


def _encode_plain(e: Any) -> Encoded:
    """Any event that has only numbers, found by the names of its fields."""
    if isinstance(e, Extended):
        when_ms = e.deadline_ms
    else:
        when_ms = e.visible_at_ms if isinstance(e, Released) else 0
    counted = isinstance(e, QueuePurged | QueueRemoved)
    return (
        _KIND[type(e)], 0, 0, e.queue, getattr(e, "number", 0), e.at_ms, when_ms,
        getattr(e, "before", 0), e.count if counted else getattr(e, "epoch", 0), 0, 0, 0, 0,
    ), ()  # fmt: skip


_ENCODERS: Final[dict[type, Any]] = {
    **dict.fromkeys(KINDS, _encode_plain),
    Pushed: _encode_pushed,
    Claimed: _encode_claimed,
    QueueCreated: _encode_settings,
    QueueConfigured: _encode_settings,
    Moved: _encode_moved,
    QueueStated: _encode_stated,
    Departed: _encode_departed,
    Arrived: _encode_arrived,
    Carried: _encode_carried,
}


def decode(data: bytes, data_offset: int, bodies: bool = True) -> Iterator[tuple[AnyEvent, int]]:
    """The events of a block, each with the place of its content (0 for none).

    `data_offset` is where the block begins in the stream. Without `bodies`, a `Pushed` has an
    empty body, which is enough for a replay. Raises CorruptEntry if the block contradicts itself.
    """
    if len(data) < BLOCK_BYTES:
        raise CorruptEntry(f"a block of {len(data)} bytes at {data_offset} is too short")
    count, _, _ = BLOCK.unpack_from(data)
    end = BLOCK_BYTES + EVENT_BYTES * count
    if end > len(data):
        raise CorruptEntry(f"the block at {data_offset} says {count} events and is too short")
    at = data_offset + BLOCK_BYTES
    for row in EVENT.iter_unpack(memoryview(data)[BLOCK_BYTES:end]):
        kind = row[0]
        if kind == _DELETED:
            yield Deleted(row[5], row[3], row[4], row[8]), 0
        elif kind == _CLAIMED and not row[10] and not row[11]:
            yield Claimed(row[5], row[3], row[4], row[8], row[6]), 0
        elif kind == _PUSHED and not bodies and not row[10] and not row[11] and not row[12]:
            size = row[9]
            plain = Pushed(
                row[5], row[3], row[4], b"", None, row[1], None, None, row[6], row[7], None, size
            )
            yield plain, pack_place(at, size)
        else:
            yield _decode_event(Fields._make(row), data, at - data_offset, data_offset, bodies)
        at += EVENT_BYTES


def read_owner(data: bytes) -> tuple[int, int]:
    """The shard whose events a block holds, and the term of the owner that wrote them."""
    _, shard, term = BLOCK.unpack_from(data)
    return shard, term


def plain_arrivals(data: bytes, data_offset: int) -> Arrivals | None:
    """The messages of a block that pushes only plain messages to one queue; None for other blocks.

    For opening a store: applying a million events one by one takes several times as long.
    """
    count = BLOCK.unpack_from(data)[0] if len(data) >= BLOCK_BYTES else 0
    if not 1 < count <= (len(data) - BLOCK_BYTES) // EVENT_BYTES:
        return None
    # A header is eight words, so that a field of all of them is every eighth word.
    header_words = words(data[BLOCK_BYTES : BLOCK_BYTES + EVENT_BYTES * count])
    first, first_number = header_words[:2]
    of_one_kind_and_queue = header_words[::8].count(first) == count
    if not of_one_kind_and_queue or first & 0xFFFFFFFF != _PUSHED:
        return None
    delays, ttls, texts = header_words[3::8], header_words[4::8], header_words[6::8]
    numbers = header_words[1::8].tolist()
    in_order = numbers == list(range(first_number, first_number + count))
    if not in_order or any(delays) or any(ttls) or any(texts):
        return None
    queue = first >> 32
    sizes = [word >> 32 for word in header_words[5::8]]
    at = data_offset + BLOCK_BYTES
    headers_at = range(at, at + EVENT_BYTES * count, EVENT_BYTES)
    deliveries = list(
        map(
            Delivery,
            repeat(queue),
            numbers,
            numbers,
            map(pack_place, headers_at, sizes),
            header_words[2::8],
        )
    )
    return Arrivals(queue, numbers, deliveries, sum(sizes))


def _decode_event(
    f: Fields, data: bytes, at: int, data_offset: int, bodies: bool
) -> tuple[AnyEvent, int]:
    payload = data[at + f.payload_at : at + f.payload_at + f.payload_bytes]
    if f.kind in _WITH_CONTENT:
        pushed = _read_pushed(f, payload, bodies)
        found = pack_place(data_offset + at, pushed.size_bytes)
        if f.kind == _PUSHED:
            return pushed, found
        return Carried(f.at_ms, f.queue, f.number, pushed), found
    if not 1 <= f.kind <= len(KINDS):
        raise CorruptEntry(f"the block at {data_offset} holds an event of unknown kind {f.kind}")
    return _read_other(KINDS[f.kind - 1], f, payload), 0


def _read_pushed(f: Fields, payload: bytes, bodies: bool) -> Pushed:
    first = f.body_bytes
    second = first + f.first_bytes
    extra = second + f.second_bytes
    attributes, context, size_bytes = None, None, f.body_bytes
    if f.extra_bytes:
        attributes, context, size_bytes = _read_extra(payload[extra:])
    return Pushed(
        f.at_ms,
        f.queue,
        f.number,
        payload[:first] if bodies else b"",
        attributes,
        f.priority,
        payload[first:second].decode() if f.first_bytes else None,
        payload[second:extra].decode() if f.second_bytes else None,
        f.when_ms,
        f.other,
        context,
        size_bytes,
    )


def _read_other(kind: type, f: Fields, payload: bytes) -> AnyEvent:
    first = payload[: f.first_bytes].decode()
    second = payload[f.first_bytes : f.first_bytes + f.second_bytes].decode()
    extra = payload[f.first_bytes + f.second_bytes :]
    if kind is Claimed:
        return Claimed(
            f.at_ms, f.queue, f.number, f.epoch, f.when_ms, first or None, second or None
        )
    if kind is QueueCreated:
        return QueueCreated(f.at_ms, f.queue, first, _read_settings(extra))
    if kind is QueueStated:
        return QueueStated(f.at_ms, f.queue, first, _read_settings(extra), f.when_ms, f.other)
    if kind is QueueConfigured:
        return QueueConfigured(f.at_ms, f.queue, _read_settings(extra))
    if kind is Moved:
        return Moved(f.at_ms, f.queue, f.number, f.when_ms, f.other, bool(f.flags & _DEAD))
    if kind is Departed:
        return Departed(f.at_ms, f.queue, f.number, f.epoch, f.when_ms, first)
    if kind is Arrived:
        return Arrived(f.at_ms, f.queue, f.number, f.epoch, f.when_ms, f.other)
    if kind is QueuePurged:
        return QueuePurged(f.at_ms, f.queue, f.epoch, f.other)
    if kind is QueueRemoved:
        return QueueRemoved(f.at_ms, f.queue, f.epoch)
    if kind is Expired:
        return Expired(f.at_ms, f.queue, f.number)
    if kind is Extended or kind is Released:
        return cast(AnyEvent, kind(f.at_ms, f.queue, f.number, f.epoch, f.when_ms))
    return cast(AnyEvent, kind(f.at_ms, f.queue, f.number, f.epoch))


def decode_number(data: bytes, data_offset: int, number: int) -> Iterator[AnyEvent]:
    """The events of a block that are about one message, as `decode` without bodies gives them.

    Most blocks do not contain the number's bytes, which one search shows.
    """
    wanted = number.to_bytes(8, "little")
    count = BLOCK.unpack_from(data)[0] if len(data) >= BLOCK_BYTES else 0
    end = BLOCK_BYTES + EVENT_BYTES * count
    found = data.find(wanted, BLOCK_BYTES, end)
    while found >= 0:
        at = found - _NUMBER_AT
        if at >= BLOCK_BYTES and (at - BLOCK_BYTES) % EVENT_BYTES == 0:
            fields = read_header(data[at : at + EVENT_BYTES])
            yield _decode_event(fields, data, at, data_offset, False)[0]
        found = data.find(wanted, found + 1, end)


def numbers_in(data: bytes) -> Sequence[int]:
    """The numbers of the messages that the events of a block are about; 0 for those of queues."""
    count = BLOCK.unpack_from(data)[0] if len(data) >= BLOCK_BYTES else 0
    count = min(count, max(0, len(data) - BLOCK_BYTES) // EVENT_BYTES)
    if count == 1:
        # Most entries have one event: this takes a third of the time.
        return _unpack_number(data, BLOCK_BYTES + _NUMBER_AT)
    # A header is eight words, of which the second is the number.
    return words(data[BLOCK_BYTES : BLOCK_BYTES + EVENT_BYTES * count])[1::8]


def read_header(header: bytes) -> Fields:
    """The numbers of one event's header."""
    return Fields._make(EVENT.unpack(header))


def read_pushed(f: Fields, payload: bytes, header_offset: int) -> Pushed:
    """A `Pushed` from its header and payload. Raises CorruptEntry if they do not match."""
    if f.kind not in _WITH_CONTENT or crc32(payload) != f.payload_crc:
        raise CorruptEntry(f"the content of the message at offset {header_offset} is damaged")
    return _read_pushed(f, payload, bodies=True)
