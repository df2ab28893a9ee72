"""The first page of a segment file: its identity, and two slots with the durable end of the stream.

    offset  size  field (page of 4,096 bytes; all other bytes are zero)
         0     8  magic "PENSTSEG"
         8     4  format, 1
        12     4  size of this page, 4096
        16     8  file number, from 0
        24     8  stream offset of the first byte after this page
        32     8  size of the file
        40    16  identity of the stream, random, the same in all its files
        56     4  crc32 of the 56 bytes before it
       512    64  slot 0
      1024    64  slot 1

    a slot
         0     4  crc32 of the 60 bytes that follow it
         4     4  1 if a manifest lists the stream's files, 0 in slots of older versions
         8     8  serial: the greater of two valid slots is the newer
        16    16  identity of the stream
        32     8  durable offset: every byte before it is on the disk
        40     8  id of the entry that begins, or will begin, there
        48     8  first offset: where the stream begins since the last drop
        56     8  id of the entry there, 0 if not known

Each slot has a sector of its own, so that writing one cannot tear the other or the identity.
Nothing here touches a file.
"""

import struct
from typing import NamedTuple

from isal.isal_zlib import crc32

from penstock.errors import InvalidField

PAGE_BYTES = 4096
FORMAT = 1
MAGIC = b"PENSTSEG"
SLOT_OFFSETS = (512, 1024)
SLOT_BYTES = 64

_HEADER = struct.Struct("<8sIIQQQ16s")
_SLOT = struct.Struct("<IQ16sQQQQ")
_CRC = struct.Struct("<I")


def check_file_size(file_bytes: object) -> int:
    """Returns the size of a stream's files if they can have it. Raises InvalidField."""
    if type(file_bytes) is int and file_bytes >= 2 * PAGE_BYTES and file_bytes % PAGE_BYTES == 0:
        return file_bytes
    raise InvalidField(
        f"file_size: a multiple of {PAGE_BYTES}, from {2 * PAGE_BYTES} on, not {file_bytes!r}"
    )


class FileHeader(NamedTuple):
    """The part of the page that never changes."""

    format: int
    number: int
    base_offset: int
    file_bytes: int
    identity: bytes


class Slot(NamedTuple):
    """The durable end and the beginning of the stream at the time the slot was written."""

    serial: int
    identity: bytes
    durable_offset: int
    next_id: int
    first_offset: int
    first_id: int
    is_listed: bool = False


def pack_page(header: FileHeader) -> bytes:
    """Returns the page of a new file, its slots empty."""
    fields = _HEADER.pack(
        MAGIC,
        header.format,
        PAGE_BYTES,
        header.number,
        header.base_offset,
        header.file_bytes,
        header.identity,
    )
    return (fields + _CRC.pack(crc32(fields))).ljust(PAGE_BYTES, b"\0")


def unpack_header(page: bytes) -> FileHeader | None:
    """Returns the page's fixed part, or None if its checksum or its magic does not match."""
    fields = page[: _HEADER.size]
    if len(page) < _HEADER.size + 4 or _CRC.unpack_from(page, _HEADER.size)[0] != crc32(fields):
        return None
    magic, format_, _, number, base_offset, file_bytes, identity = _HEADER.unpack(fields)
    if magic != MAGIC:
        return None
    return FileHeader(format_, number, base_offset, file_bytes, identity)


def pack_slot(slot: Slot) -> bytes:
    """Returns the slot's 64 bytes."""
    *stated, is_listed = slot
    fields = _SLOT.pack(is_listed, *stated)
    return _CRC.pack(crc32(fields)) + fields


def unpack_slots(page: bytes) -> list[tuple[int, Slot]]:
    """Returns the slots whose checksum matches, with their places (0, 1).

    Any other is ignored: it may be damaged, or its write was interrupted.
    """
    found: list[tuple[int, Slot]] = []
    for place, at in enumerate(SLOT_OFFSETS):
        packed = page[at : at + SLOT_BYTES]
        if len(packed) == SLOT_BYTES and _CRC.unpack_from(packed)[0] == crc32(packed[4:]):
            flags, *stated = _SLOT.unpack(packed[4:])
            found.append((place, Slot._make([*stated, bool(flags & 1)])))
    return found
