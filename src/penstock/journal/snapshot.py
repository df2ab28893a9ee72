"""A shard's state in a file, written a slice at a time while the shard lives on.

The file is a row of entries (the 32-byte header of `entry`, version PSNAPS01): first the outline
with the point in the journal where it was taken, then slices of deliveries, last the number of
slices. A file without its last entry, or with a damaged one, is no snapshot; the one before it
still is. Two are kept.
"""

import os
from pathlib import Path
from typing import Final

import msgspec

from penstock.core.delivery import Delivery
from penstock.core.shard import ShardSnapshot, ShardState
from penstock.errors import StoreFull
from penstock.journal.entry import HEADER_BYTES, pack, unpack_header

VERSION: Final = b"PSNAPS01"
KEPT: Final = 2
_NAME: Final = "snapshot-{:016x}"
_encode = msgspec.msgpack.Encoder().encode
_decode_slice = msgspec.msgpack.Decoder(list[Delivery]).decode


class Outline(msgspec.Struct, array_like=True):
    """Where in the journal the snapshot begins, and all of the state but its messages."""

    offset: int
    at_ms: int
    shard: ShardSnapshot


class End(msgspec.Struct, array_like=True):
    """How many slices there must be."""

    slices: int


class SnapshotWriter:
    """A snapshot in the making: it counts for nothing until `finish` returns."""

    def __init__(self, directory: Path, outline: Outline) -> None:
        self._directory = directory
        self._offset = outline.offset
        self._slices = 0
        self._path = directory / "snapshot.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(self._path, flags, 0o600), "wb")
        self._write(0, _encode(outline))

    def add(self, packed: bytes) -> None:
        """Adds a slice, as `pack_slice` made it."""
        self._slices += 1
        self._write(self._slices, packed)

    def _write(self, entry_id: int, data: bytes) -> None:
        try:
            self._file.write(pack(VERSION, 0, entry_id, data))
        except OSError as error:
            raise StoreFull(f"{self._path}: cannot write a snapshot: {error.strerror}") from error

    def finish(self) -> None:
        """Makes the snapshot durable and the newest; lets the oldest go."""
        self._write(self._slices + 1, _encode(End(self._slices)))
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._path, self._directory / _NAME.format(self._offset))
            _sync_directory(self._directory)
        except OSError as error:
            raise StoreFull(f"{self._path}: cannot keep a snapshot: {error.strerror}") from error
        for old in snapshot_paths(self._directory)[KEPT:]:
            old.unlink(missing_ok=True)

    def abandon(self) -> None:
        """Leaves things as they were."""
        self._file.close()
        self._path.unlink(missing_ok=True)


def pack_slice(deliveries: list[Delivery]) -> bytes:
    """Deliveries as they are at this instant."""
    return _encode(deliveries)


def snapshot_paths(directory: Path) -> list[Path]:
    """The snapshots there are, newest first."""
    return sorted(directory.glob("snapshot-" + "[0-9a-f]" * 16), reverse=True)


def offset_of(path: Path) -> int:
    """The point in the journal that a snapshot's name gives."""
    return int(path.name.rpartition("-")[2], 16)


def read_snapshot(path: Path) -> tuple[Outline, ShardState] | None:
    """The state a file holds, or None if it is not whole."""
    data = memoryview(path.read_bytes())
    packed: list[memoryview] = []
    at = 0
    while at < len(data):
        header = unpack_header(bytes(data[at : at + HEADER_BYTES]))
        if header is None or header.version != VERSION or header.entry_id != len(packed):
            return None
        at += HEADER_BYTES
        entry = data[at : at + header.size_bytes]
        if not header.holds(entry):
            return None
        packed.append(entry)
        at += header.size_bytes
    if len(packed) < 2:
        return None
    try:
        end = msgspec.msgpack.decode(packed[-1], type=End)
        if end.slices != len(packed) - 2:
            return None
        outline = msgspec.msgpack.decode(packed[0], type=Outline)
        return outline, _assemble(outline.shard, packed[1:-1])
    except msgspec.ValidationError:
        return None


def _assemble(outline: ShardSnapshot, slices: list[memoryview]) -> ShardState:
    by_queue: dict[int, list[Delivery]] = {kept.number: [] for kept in outline.queues}
    for packed in slices:
        for delivery in _decode_slice(packed):
            # A queue made after the outline: the journal tells of it and of what it holds.
            if delivery.queue in by_queue:
                by_queue[delivery.queue].append(delivery)
    for kept in outline.queues:
        kept.deliveries = by_queue[kept.number]
        kept.deliveries.sort(key=_rank)
    return ShardState.restore(outline)


def _rank(delivery: Delivery) -> int:
    return delivery.rank


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
