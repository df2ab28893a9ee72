"""Entries of a journal as Arrow columns, decoded by numpy some megabytes at a time.

    bytes ──▶ entries, one behind the other, and checked (version, id, checksum of the data)
          ──▶ events, their 64-byte headers gathered into one array
          ──▶ columns, each made only if it is asked for; Arrow slices texts and bodies

Each id must be one more than the one before, each entry must begin where the one before ends, and
the checksum of the data must match: together these verify what the header's own checksum would.
Where one fails, the journal's `scan.walk` finds the next good entry, and the bytes before it become
a row of kind `Damaged`.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
from isal.isal_zlib import crc32

from penstock.core.receipts import MessageIds
from penstock.errors import StoreUnusable
from penstock.journal.codec import BLOCK_BYTES, EVENT_BYTES, KINDS, VERSION
from penstock.journal.entry import HEADER_BYTES, StoredEntry, unpack_header
from penstock.journal.scan import Limit, Quarantined, walk
from penstock.service import QueueSettings
from penstock.spark.stream import HEADER, Point, Scan

CHUNK_BYTES: Final = 4 << 20
INDEX_BITS: Final = 20
DAMAGED: Final = "Damaged"
# The index of a name is the kind's tag, from 1; bytes that could not be read have the last one.
KIND_NAMES: Final = ("", *(kind.__name__ for kind in KINDS), DAMAGED)
_KIND: Final = {name: tag for tag, name in enumerate(KIND_NAMES)}
_VERSION: Final = int.from_bytes(VERSION, "little")
_read_size = struct.Struct("<I").unpack_from

BLOCK: Final = np.dtype([("count", "<u4"), ("shard", "<i4"), ("term", "<i8")])
EVENT: Final = np.dtype(
    [
        ("kind", "u1"),
        ("priority", "u1"),
        ("flags", "<u2"),
        ("queue", "<u4"),
        ("number", "<i8"),
        ("at_ms", "<i8"),
        ("when_ms", "<i8"),
        ("other", "<i8"),
        ("epoch", "<u4"),
        ("body_bytes", "<u4"),
        ("first_bytes", "<u2"),
        ("second_bytes", "<u2"),
        ("extra_bytes", "<u4"),
        ("payload_at", "<u4"),
        ("payload_crc", "<u4"),
    ]
)
_PLAIN_EVENT: Final = np.dtype(f"V{EVENT_BYTES}")
assert EVENT.itemsize == EVENT_BYTES
assert BLOCK.itemsize == BLOCK_BYTES


@dataclass(frozen=True)
class Wanted:
    """Which events to keep. Empty or None keeps all."""

    kinds: tuple[str, ...] = ()
    queues: tuple[int, ...] | None = None
    from_entry: int | None = None
    to_entry: int | None = None
    from_ms: int | None = None
    to_ms: int | None = None
    from_offset: int | None = None

    def of(self, block: "Block") -> "Block":
        """The events of this block that are wanted."""
        keep = np.full(len(block.events), not block.damage or self.wants_damage())
        if self.from_offset is not None:
            keep &= block.offsets >= self.from_offset
        # A row of kind `Damaged` has no other columns to select by.
        if not block.damage:
            keep &= self._among(block)
        return block if keep.all() else block.only(keep)

    def _among(self, block: "Block") -> np.ndarray:
        events = block.events
        keep = np.ones(len(events), bool)
        if self.kinds:
            keep &= _among(events["kind"], *self.kinds)
        if self.queues is not None:
            keep &= np.isin(events["queue"], self.queues)
            keep |= (events["kind"] == _KIND["Moved"]) & np.isin(events["when_ms"], self.queues)
        if self.from_entry is not None:
            keep &= block.entries >= self.from_entry
        if self.to_entry is not None:
            keep &= block.entries < self.to_entry
        if self.from_ms is not None:
            keep &= events["at_ms"] >= self.from_ms
        if self.to_ms is not None:
            keep &= events["at_ms"] < self.to_ms
        return keep

    def wants_damage(self) -> bool:
        """Whether rows of kind `Damaged` are wanted."""
        return not self.kinds or DAMAGED in self.kinds


@dataclass
class Block:
    """Events as arrays of one length, over the bytes they were read from.

    `ats` holds the position in `data` of each event's header.
    """

    data: bytes
    identity: bytes
    events: np.ndarray
    ats: np.ndarray
    entries: np.ndarray
    indexes: np.ndarray
    offsets: np.ndarray
    shards: np.ndarray
    terms: np.ndarray
    damage: list[str] = field(default_factory=list)

    def only(self, keep: np.ndarray) -> "Block":
        """The events that `keep` selects."""
        return Block(
            self.data,
            self.identity,
            self.events.view(_PLAIN_EVENT)[keep].view(EVENT),
            self.ats[keep],
            self.entries[keep],
            self.indexes[keep],
            self.offsets[keep],
            self.shards[keep],
            self.terms[keep],
            [why for why, kept in zip(self.damage, keep.tolist(), strict=False) if kept],
        )

    @cached_property
    def payloads(self) -> np.ndarray:
        """Where in `data` each event's payload begins."""
        return np.asarray(self.ats + self.events["payload_at"])

    def having(self, *kinds: str) -> np.ndarray:
        """Which of the events are of these kinds."""
        return _among(self.events["kind"], *kinds)

    def arrow(self, names: list[str]) -> list[pa.Array]:
        """The columns of these names."""
        return [COLUMNS[name](self) for name in names]


def _among(kinds: np.ndarray, *names: str) -> np.ndarray:
    table = np.zeros(256, bool)
    table[[_KIND[name] for name in names]] = True
    return np.asarray(table[kinds])


def blocks(scan: Scan, identity: bytes, start: Point, end: Point, path: str) -> Iterator[Block]:
    """All events between two points, in order; what is damaged as rows of kind `Damaged`.

    Raises StoreUnusable at an entry of a version unknown here.
    """
    at = start
    size = CHUNK_BYTES
    while at.offset < end.offset:
        data = scan(at.offset, min(size, end.offset - at.offset))
        starts, sizes = _whole_entries(data, at.entry)
        if len(starts):
            yield from _read(data, identity, at, starts, sizes)
            after = int(starts[-1] + HEADER_BYTES + sizes[-1])
            at = Point(at.offset + after, at.entry + len(starts) if at.entry else 0)
            size = CHUNK_BYTES
            continue
        header = unpack_header(data[:HEADER_BYTES])
        if header is not None and header.version == VERSION and len(data) == size:
            needed = HEADER_BYTES + header.size_bytes
            if size < needed <= end.offset - at.offset:
                size = needed
                continue
        damage, at = _skip_damage(scan, at, end, path)
        size = CHUNK_BYTES
        if damage:
            yield _damaged_rows(identity, damage)


def _whole_entries(data: bytes, entry: int) -> tuple[np.ndarray, np.ndarray]:
    """The starts and sizes of the good entries from the first byte to the first bad one.

    `entry` is the id of the first, 0 if not known.
    """
    edges = _linked(data)
    starts = np.array(edges[:-1], np.int64)
    headers = _view_at(data, HEADER, starts)
    good = headers["version"] == _VERSION
    if len(starts):
        good &= headers["id"] == (entry or headers["id"][0]) + np.arange(len(starts))
    count = _first_false(good)
    begins = (starts[:count] + HEADER_BYTES).tolist()
    pieces = map(memoryview(data).__getitem__, map(slice, begins, edges[1:]))
    crcs = np.fromiter(map(crc32, pieces), np.uint32, count)
    count = _first_false(headers["data_crc"][:count] == crcs)
    return starts[:count], headers["size"][:count].astype(np.int64)


def _linked(data: bytes) -> list[int]:
    """The starts of entries, each at the end of the one before by its size, and the last end."""
    edges = [0]
    at, last = 0, len(data) - HEADER_BYTES
    while at <= last:
        at += HEADER_BYTES + _read_size(data, at + 12)[0]
        edges.append(at)
    if at > len(data):
        edges.pop()
    return edges


def _first_false(holds: np.ndarray) -> int:
    return len(holds) if holds.all() else int(np.argmin(holds))


def _view_at(data: bytes, type_: np.dtype, ats: np.ndarray) -> np.ndarray:
    """The bytes at these positions, read as an array of this type.

    They are copied as plain bytes: numpy copies a type with fields many times more slowly.
    """
    room = max(0, len(data) - type_.itemsize + 1)
    plain: np.ndarray = np.ndarray((room,), f"V{type_.itemsize}", data, strides=(1,))[ats]
    return plain.view(type_)


def _skip_damage(
    scan: Scan, at: Point, end: Point, path: str
) -> tuple[list[tuple[Point, Quarantined]], Point]:
    """What is damaged here, and where the next good entry begins."""
    found: list[Quarantined] = []
    limit = Limit(end.offset, end.entry or None)
    entry: StoredEntry | None = next(walk(scan, at.offset, at.entry, limit, found.append), None)
    after = end if entry is None else Point(entry.offset, entry.entry_id)
    if entry is not None and entry.version != VERSION:
        raise StoreUnusable(
            f"{path}: the entry at offset {entry.offset} is of the format {entry.version!r}; "
            f"this version of Penstock reads {VERSION!r}"
        )
    entries = range(at.entry, at.entry + len(found)) if at.entry else [0] * len(found)
    points = [Point(each.offset, id_) for each, id_ in zip(found, entries, strict=True)]
    return list(zip(points, found, strict=True)), after


def _read(
    data: bytes, identity: bytes, at: Point, starts: np.ndarray, sizes: np.ndarray
) -> Iterator[Block]:
    """The events of good entries; an entry with inconsistent events is damaged."""
    long_enough = sizes >= BLOCK_BYTES
    heads = np.zeros(len(starts), BLOCK)
    heads[long_enough] = _view_at(data, BLOCK, starts[long_enough] + HEADER_BYTES)
    ids = _view_at(data, HEADER, starts)["id"]
    counts = heads["count"].astype(np.int64)
    fits = long_enough & (BLOCK_BYTES + EVENT_BYTES * counts <= sizes)
    owners = np.repeat(np.flatnonzero(fits), counts[fits])
    firsts = np.cumsum(counts[fits]) - counts[fits]
    indexes = np.arange(len(owners)) - np.repeat(firsts, counts[fits])
    ats = starts[owners] + (HEADER_BYTES + BLOCK_BYTES) + EVENT_BYTES * indexes
    events = _view_at(data, EVENT, ats)
    ends = starts + HEADER_BYTES + sizes
    sound = _sound(events, ats, ends[owners], owners)
    if not sound.all():
        fits[np.unique(owners[~sound])] = False
    block = Block(
        data,
        identity,
        events,
        ats,
        ids[owners],
        indexes.astype(np.int32),
        at.offset + starts[owners],
        heads["shard"][owners],
        heads["term"][owners],
    )
    if not fits.all():
        block = block.only(fits[owners])
    yield block
    damage = [
        (
            Point(at.offset + int(starts[bad]), int(ids[bad])),
            Quarantined(
                at.offset + int(starts[bad]),
                HEADER_BYTES + int(sizes[bad]),
                "data cannot be read as events",
            ),
        )
        for bad in np.flatnonzero(~fits).tolist()
    ]
    if damage:
        yield _damaged_rows(identity, damage)


def _sound(events: np.ndarray, ats: np.ndarray, ends: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Which events are of a known kind, with payloads inside their entry and in order.

    Events may share a payload, so one may begin where the one before it does.
    """
    sizes = (
        events["body_bytes"].astype(np.int64)
        + events["first_bytes"]
        + events["second_bytes"]
        + events["extra_bytes"]
    )
    begins = ats + events["payload_at"]
    stops = begins + sizes
    sound = (events["kind"] >= 1) & (events["kind"] <= len(KINDS)) & (events["number"] >= 0)
    sound &= (begins >= ats + EVENT_BYTES) & (stops <= ends)
    follows = np.ones(len(events), bool)
    follows[1:] = (begins[1:] >= begins[:-1]) | (owners[1:] != owners[:-1])
    return np.asarray(sound & follows)


def _damaged_rows(identity: bytes, damage: list[tuple[Point, Quarantined]]) -> Block:
    """Damage as rows: the entry expected there, the offset, how many bytes and why."""
    count = len(damage)
    events = np.zeros(count, EVENT)
    events["kind"] = _KIND[DAMAGED]
    events["body_bytes"] = [min(found.size_bytes, 2**32 - 1) for _, found in damage]
    return Block(
        b"",
        identity,
        events,
        np.zeros(count, np.int64),
        np.array([point.entry for point, _ in damage], np.int64),
        np.full(count, 2**INDEX_BITS - 1, np.int32),
        np.array([point.offset for point, _ in damage], np.int64),
        np.zeros(count, np.int32),
        np.zeros(count, np.int64),
        [found.why for _, found in damage],
    )


def _number(name: str, type_: pa.DataType, *kinds: str, zero_is_null: bool = False) -> Any:
    """A column of numbers from the event headers, null for events of other kinds."""

    def column(block: Block) -> pa.Array:
        present = block.having(*kinds) if kinds else None
        if present is not None and not present.any():
            return pa.nulls(len(present), type_)
        values = block.events[name].astype(type_.to_pandas_dtype())
        if zero_is_null:
            present = values != 0 if present is None else present & (values != 0)
        return pa.array(values, type_, mask=None if present is None else ~present)

    return column


def _text(which: str, *kinds: str) -> Any:
    """A column of texts from the payloads, null where empty and for events of other kinds."""

    def column(block: Block) -> pa.Array:
        events = block.events
        at = np.flatnonzero(block.having(*kinds) & (events[which] != 0))
        begins = block.payloads[at] + events["body_bytes"][at]
        if which == "second_bytes":
            begins = begins + events["first_bytes"][at]
        cut = _cut(block, at, begins, events[which][at])
        try:
            return cut.cast(pa.string())
        except pa.ArrowInvalid:
            return pa.array(
                [
                    None if text is None else text.decode(errors="replace")
                    for text in cut.to_pylist()
                ]
            )

    return column


def _cut(block: Block, at: np.ndarray, begins: np.ndarray, sizes: np.ndarray) -> pa.Array:
    """The bytes at these places as an Arrow array: the values of the events `at`, others have none.

    `data` becomes one Arrow array without a copy: its even elements are the values, its odd ones
    the bytes between them. Taking the even ones copies each value once. The positions increase,
    because payloads are stored in the order of their events, unless events share theirs.
    """
    count = len(block.events)
    if not len(at):
        return pa.nulls(count, pa.binary())
    if (begins[1:] < begins[:-1] + sizes[:-1]).any():
        return _cut_shared(block, at, begins, sizes)
    edges = np.empty(2 * len(at), np.int32)
    edges[0::2] = begins
    edges[1::2] = begins + sizes
    shown = pa.Array.from_buffers(
        pa.binary(), len(edges) - 1, [None, pa.py_buffer(edges), pa.py_buffer(block.data)]
    )
    values = shown.take(pa.array(np.arange(0, len(edges), 2, dtype=np.int32))).buffers()[2]
    present = np.zeros(count, bool)
    present[at] = True
    ends = np.zeros(count + 1, np.int32)
    ends[at + 1] = sizes
    return pa.Array.from_buffers(
        pa.binary(), count, [_bits(present), pa.py_buffer(np.cumsum(ends, dtype=np.int32)), values]
    )


def _cut_shared(block: Block, at: np.ndarray, begins: np.ndarray, sizes: np.ndarray) -> pa.Array:
    """The same for values that share bytes: each place is cut out once."""
    places, of_place = np.unique(np.stack([begins, sizes]), axis=1, return_inverse=True)
    values = [bytes(block.data[begin : begin + size]) for begin, size in places.T.tolist()]
    numbers = np.zeros(len(block.events), np.int64)
    numbers[at] = of_place.reshape(-1)
    absent = np.ones(len(block.events), bool)
    absent[at] = False
    return pa.array(values, pa.binary()).take(pa.array(numbers, mask=absent))


def _bits(present: np.ndarray) -> pa.Buffer:
    return pa.py_buffer(np.packbits(present, bitorder="little"))


def _body(block: Block) -> pa.Array:
    at = np.flatnonzero(block.having("Pushed", "Carried"))
    return _cut(block, at, block.payloads[at], block.events["body_bytes"][at])


def _extra(block: Block) -> pa.Array:
    """What few events have, as JSON: a message's attributes, or a queue's settings."""
    events = block.events
    sizes = events["extra_bytes"].astype(np.int64)
    having = np.flatnonzero(sizes)
    if not len(having):
        return pa.nulls(len(events), pa.string())
    begins = block.payloads + events["body_bytes"] + events["first_bytes"] + events["second_bytes"]
    shown: list[str | None] = [None] * len(events)
    of_queue = block.having("QueueCreated", "QueueConfigured", "QueueStated")
    created = np.where(block.having("QueueStated"), events["when_ms"], 0)
    for at in having.tolist():
        packed = block.data[begins[at] : begins[at] + sizes[at]]
        shown[at] = _extra_json(packed, bool(of_queue[at]), int(created[at]))
    return pa.array(shown, pa.string())


def _extra_json(packed: bytes, of_queue: bool, created_at_ms: int) -> str | None:
    try:
        if of_queue:
            settings = msgspec.msgpack.decode(packed, type=QueueSettings)
            shown: dict[str, Any] = {"settings": msgspec.structs.asdict(settings)}
            if created_at_ms:
                shown["created_at_ms"] = created_at_ms
            return msgspec.json.encode(shown).decode()
        attributes, context, _ = msgspec.msgpack.decode(packed)
    except (msgspec.DecodeError, ValueError, TypeError):
        return None
    extra = {"attributes": attributes, "context": context}
    # JSON has no bytes: binary attributes go into an object of their own, encoded as base64.
    raw = {name: value for name, value in (attributes or {}).items() if isinstance(value, bytes)}
    if raw:
        extra["attributes"] = {name: attributes[name] for name in attributes if name not in raw}
        extra["attributes_base64"] = raw
    return msgspec.json.encode(extra).decode()


# Made at the first use: Spark starts several processes for every read that only plan it, and the
# first Arrow array that Python makes imports pandas, which takes longer than the planning.


@cache
def _kind_names() -> pa.Array:
    return pa.array(KIND_NAMES)


@cache
def _hex_digits() -> np.ndarray:
    """The four hexadecimal digits of every two bytes."""
    return np.array([b"%04x" % pair for pair in range(1 << 16)], "S4").view("<u4")


def _store(block: Block) -> pa.Array:
    name = block.identity.hex().encode()
    return _same_width(np.frombuffer(name * len(block.events), np.uint8), len(name), None)


def _message_id(block: Block) -> pa.Array:
    return message_ids(block.identity, block.events["number"])


def message_ids(identity: bytes, numbers: np.ndarray) -> pa.Array:
    """The ids of messages of a store by their numbers; null for 0, which no message has."""
    prefix = MessageIds(identity).prefix.encode()
    text = np.empty((len(numbers), len(prefix) + 12), np.uint8)
    text[:, : len(prefix)] = np.frombuffer(prefix, np.uint8)
    digits = np.empty((len(numbers), 3), "<u4")
    for at, shift in enumerate((32, 16, 0)):
        digits[:, at] = _hex_digits()[(numbers >> shift) & 0xFFFF]
    text[:, len(prefix) :] = digits.view(np.uint8)
    return _same_width(text, len(prefix) + 12, numbers != 0)


def _same_width(text: np.ndarray, width: int, present: np.ndarray | None) -> pa.Array:
    """An Arrow array of texts of one width, from their joined bytes."""
    count = text.size // width
    valid = None if present is None else _bits(present)
    ends = np.arange(0, width * (count + 1), width, dtype=np.int32)
    buffers = [valid, pa.py_buffer(ends), pa.py_buffer(text)]
    return pa.Array.from_buffers(pa.string(), count, buffers)


def _plain(values: Callable[[Block], np.ndarray], type_: pa.DataType) -> Any:
    return lambda block: pa.array(values(block).astype(type_.to_pandas_dtype()), type_)


def _at(block: Block) -> pa.Array:
    return pa.array(block.events["at_ms"] * 1_000).view(pa.timestamp("us", "UTC"))


def _damage(block: Block) -> pa.Array:
    if block.damage:
        return pa.array(block.damage, pa.string())
    return pa.nulls(len(block.events), pa.string())


_CLAIMS: Final = (
    "DelayEnded", "Claimed", "Extended", "Released", "ClaimExpired", "Deleted", "Lost",
    "Departed", "Arrived",
)  # fmt: skip
_CONTENT: Final = ("Pushed", "Carried")
_LONG: Final = pa.int64()


Column = Callable[[Block], pa.Array]
# Every column in order, and how it is made; docs/formats/lake.md says what each means.
COLUMNS: Final[dict[str, Column]] = {
    "store": _store,
    "shard": _plain(lambda block: block.shards, pa.int32()),
    "term": _plain(lambda block: block.terms, _LONG),
    "entry": _plain(lambda block: block.entries, _LONG),
    "index": _plain(lambda block: block.indexes, pa.int32()),
    "sequence": _plain(lambda block: (block.entries << INDEX_BITS) | block.indexes, _LONG),
    "offset": _plain(lambda block: block.offsets, _LONG),
    "kind": lambda block: _kind_names().take(pa.array(block.events["kind"])),
    "at": _at,
    "at_ms": _number("at_ms", _LONG),
    "queue": _number("queue", _LONG),
    "message": _number("number", _LONG, zero_is_null=True),
    "message_id": _message_id,
    "epoch": _number("epoch", _LONG, *_CLAIMS),
    "deadline_ms": _number("when_ms", _LONG, "Claimed", "Extended"),
    "visible_at_ms": _number("when_ms", _LONG, "Released", *_CONTENT, zero_is_null=True),
    "expires_at_ms": _number("other", _LONG, *_CONTENT, zero_is_null=True),
    "priority": _number("priority", pa.int32(), *_CONTENT),
    "group": _text("first_bytes", *_CONTENT),
    "dedup_id": _text("second_bytes", *_CONTENT),
    "attempt_id": _text("first_bytes", "Claimed"),
    "holder": _text("second_bytes", "Claimed"),
    "name": _text("first_bytes", "QueueCreated", "QueueStated", "Departed"),
    "to_queue": _number("when_ms", _LONG, "Moved"),
    "rank": _number("other", _LONG, "Moved"),
    "dead": lambda block: pa.array(
        (block.events["flags"] & 1).astype(bool), mask=~block.having("Moved")
    ),
    "count": _number("epoch", _LONG, "QueuePurged", "QueueRemoved"),
    "before": _number("other", _LONG, "QueuePurged"),
    "body_bytes": _number("body_bytes", _LONG, DAMAGED, *_CONTENT),
    "body": _body,
    "extra": _extra,
    "damage": _damage,
    "code": lambda block: pa.array(block.events["kind"].view(np.int8)),
}
