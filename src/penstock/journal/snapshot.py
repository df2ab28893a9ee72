"""A shard's state in a file, written a slice at a time while the shard works.

The file is a sequence of entries (the 32-byte header of `entry`, version PSNAPS03): first the
outline with the journal offset where it was taken, then slices of dedup ids and of deliveries, last
the number of slices. A file without its last entry, or with a damaged one, is not used; the
snapshot before it is. Two are kept.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import msgspec

from penstock.core.delivery import OUTBOX, Arrivals, Delivery
from penstock.core.shard import ShardSnapshot, ShardState
from penstock.core.window import Key
from penstock.errors import StoreFull
from penstock.files import open_in, sync_directory
from penstock.journal.columns import pack_columns, unpack_columns
from penstock.journal.entry import HEADER_BYTES, pack, unpack_header

VERSION: Final = b"PSNAPS03"
KEPT: Final = 2
_SYNC_BYTES: Final = 2 * 1024 * 1024
_NAME: Final = "snapshot-{:016x}"
_encode = msgspec.msgpack.Encoder().encode
Dedups = list[tuple[int, Key, int]]
# The first element of a slice of dedup ids; that of a slice of messages is their number.
_DEDUPS: Final = -1
# How to read a slice of messages in each version; the first one cannot hold places at four
# gigabytes or more in the stream.
_SLICES: Final[dict[bytes, Callable[[bytes], Arrivals | list[Delivery]]]] = {
    b"PSNAPS01": msgspec.msgpack.Decoder(list[Delivery]).decode,
    b"PSNAPS02": unpack_columns,
    VERSION: unpack_columns,
}


class Outline(msgspec.Struct, array_like=True):
    """Where in the journal the snapshot begins, and the state without what is in the slices.

    `number` is the shard's, and `term` the term of its owner when the snapshot was taken.
    """

    offset: int
    at_ms: int
    shard: ShardSnapshot
    number: int = 0
    term: int = 0


class End(msgspec.Struct, array_like=True):
    """How many slices there must be."""

    slices: int


_decode_outline = msgspec.msgpack.Decoder(Outline).decode
_decode_dedups = msgspec.msgpack.Decoder(tuple[int, int, Dedups]).decode
_dedups_begin: Final = _encode([_DEDUPS, 0, []])[:2]
_decode_end = msgspec.msgpack.Decoder(End).decode


class SnapshotWriter:
    """Writes a snapshot; it counts only once `finish` has returned."""

    def __init__(self, directory: Path, outline: Outline, *, syncs: bool = True) -> None:
        """With `syncs` the file is durable; without, it is only for this process to read."""
        self._syncs = syncs
        self._directory = directory
        self._offset = outline.offset
        self._slices = 0
        self._unsynced_bytes = 0
        self._path = directory / "snapshot.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._file = os.fdopen(open_in(directory, self._path.name, flags), "wb")
        except OSError as error:
            raise StoreFull(f"{self._path}: cannot be made: {error.strerror}") from error
        try:
            self._write(0, _encode(outline))
        except BaseException:
            self.abandon()
            raise

    def add(self, packed: bytes) -> None:
        """Adds a slice, as `pack_slice` or `pack_dedups` made it."""
        self._slices += 1
        self._write(self._slices, packed)

    def _write(self, entry_id: int, data: bytes) -> None:
        try:
            self._file.write(pack(VERSION, 0, entry_id, data))
            self._unsynced_bytes += len(data)
            if self._syncs and self._unsynced_bytes > _SYNC_BYTES:
                # In small parts, so that the journal's syncs never wait for one large flush.
                self._unsynced_bytes = 0
                self._file.flush()
                os.fdatasync(self._file.fileno())
        except OSError as error:
            raise StoreFull(f"{self._path}: cannot write a snapshot: {error.strerror}") from error

    def finish(self) -> None:
        """Makes the snapshot complete, durable and the newest; removes the oldest."""
        self._write(self._slices + 1, _encode(End(self._slices)))
        try:
            self._file.flush()
            if self._syncs:
                os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._path, snapshot_path(self._directory, self._offset))
            if self._syncs:
                sync_directory(self._directory)
        except OSError as error:
            raise StoreFull(f"{self._path}: cannot keep a snapshot: {error.strerror}") from error
        for old in snapshot_paths(self._directory)[KEPT:]:
            # One that cannot be removed now is removed after the next snapshot.
            with suppress(OSError):
                old.unlink()

    def abandon(self) -> None:
        """Removes what was written; the snapshots before it are as they were."""
        # Closing writes the buffer, which fails on a full disk: those bytes are not needed.
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._path.unlink()


def pack_slice(deliveries: list[Delivery]) -> bytes:
    """Deliveries as they are at this instant."""
    return pack_columns(deliveries)


def pack_dedups(queue: int, dedups: Dedups) -> bytes:
    """Dedup ids of one queue, oldest first: when each was used, the id, and its message."""
    return _encode([_DEDUPS, queue, dedups])


def snapshot_paths(directory: Path) -> list[Path]:
    """The snapshots there are, newest first."""
    return sorted(directory.glob("snapshot-" + "[0-9a-f]" * 16), reverse=True)


def snapshot_path(directory: Path, offset: int) -> Path:
    """The path of the snapshot that begins at this offset of the journal."""
    return directory / _NAME.format(offset)


def offset_of(path: Path) -> int:
    """The offset of the journal in a snapshot's name."""
    return int(path.name.rpartition("-")[2], 16)


class Taken(NamedTuple):
    """A snapshot read back: the state, and messages whose queue is not in the outline.

    `early` has the messages of queues that were made after the outline, by the queue's number:
    they are added when its creation is replayed. `is_ordered` is false if a message moved after the
    outline: messages of lower rank, which are still in the journal, then come after it.
    """

    outline: Outline
    shard: ShardState
    early: dict[int, list[Delivery]]
    is_ordered: bool


class _NotWhole(Exception):
    """The file is not a complete snapshot."""


def read_snapshot(path: Path) -> Taken | None:
    """The state a file holds, or None if it is not whole or cannot be read."""
    try:
        with os.fdopen(open_in(path.parent, path.name), "rb") as file:
            return _assemble(_entries(file))
    except (OSError, ValueError, KeyError, _NotWhole):
        return None


def read_outline(path: Path) -> Outline | None:
    """A snapshot's outline, or None if that part is not whole."""
    try:
        with os.fdopen(open_in(path.parent, path.name), "rb") as file:
            return _decode_outline(next(_entries(file))[1])
    except (OSError, StopIteration, msgspec.DecodeError, _NotWhole):
        return None


def _entries(file: BinaryIO) -> Iterator[tuple[bytes, bytes]]:
    """Version and data of each entry, one at a time: a snapshot may be larger than memory."""
    number = 0
    while head := file.read(HEADER_BYTES):
        header = unpack_header(head)
        if header is None or header.version not in _SLICES or header.entry_id != number:
            raise _NotWhole
        data = file.read(header.size_bytes)
        if not header.holds(data):
            raise _NotWhole
        yield header.version, data
        number += 1


def _assemble(entries: Iterator[tuple[bytes, bytes]]) -> Taken:
    _, first = next(entries, (b"", b""))
    version, held = next(entries, (b"", b""))
    if not first or not held:
        raise _NotWhole
    outline = _decode_outline(first)
    by_queue: defaultdict[int, _QueueParts] = defaultdict(_QueueParts)
    kept_by_number = {kept.number: kept for kept in outline.shard.queues}
    slices = 0
    for following, data in entries:
        slices += 1
        if version == VERSION and held.startswith(_dedups_begin):
            _, queue, dedups = _decode_dedups(held)
            kept_by_number[queue].dedups += dedups
        else:
            _add_messages(by_queue, _SLICES[version](held))
        version, held = following, data
    if _decode_end(held).slices != slices:
        raise _NotWhole
    shard = ShardState.restore(outline.shard)
    shard.departed.restored(by_queue.pop(OUTBOX, _QueueParts()).sorted())
    is_ordered = all(each.highest_rank < shard.next_number for each in by_queue.values())
    for number, queue_state in shard.queues.items():
        if number in by_queue:
            shard.restored(queue_state, by_queue.pop(number).in_order())
    early = {number: each.sorted() for number, each in by_queue.items()}
    return Taken(outline, shard, early, is_ordered)


def _add_messages(
    by_queue: "defaultdict[int, _QueueParts]", found: Arrivals | list[Delivery]
) -> None:
    if isinstance(found, Arrivals):
        by_queue[found.queue].add(found, found.numbers)
        return
    for queue, mates in groupby(found, attrgetter("queue")):
        of_queue = list(mates)
        by_queue[queue].add(of_queue, [each.rank for each in of_queue])


class _QueueParts:
    """The messages of one queue, in parts: one of each slice."""

    def __init__(self) -> None:
        self._parts: list[Arrivals | list[Delivery]] = []
        self._is_ordered = True
        self.highest_rank = 0

    def add(self, part: Arrivals | list[Delivery], ranks: Sequence[int]) -> None:
        self._parts.append(part)
        # Slices are in order of number; the rank of a message that moved is higher.
        self._is_ordered &= ranks[0] > self.highest_rank and ranks == sorted(ranks)
        self.highest_rank = max(self.highest_rank, max(ranks))

    def in_order(self) -> list[Arrivals | list[Delivery]]:
        """All of them in order of rank, in parts."""
        return self._parts if self._is_ordered else [self.sorted()]

    def sorted(self) -> list[Delivery]:
        """All of them in order of rank."""
        lists = (part.deliveries if isinstance(part, Arrivals) else part for part in self._parts)
        return sorted(chain.from_iterable(lists), key=attrgetter("rank"))
