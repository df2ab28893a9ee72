"""One entry of a stream: a 32-byte header that checks itself and its data, then the data.

    offset  size  field
         0     4  metadata crc32, of the 28 bytes that follow it
         4     8  version: names the format of the data, eight bytes, the first not zero
        12     4  size of the data
        16     4  time to live in seconds, 0 for no limit
        20     8  id: the entry's number in its stream, from 1, without gaps
        28     4  data crc32
        32     …  data

All integers are little-endian. Nothing here touches a file.
"""

import struct
from typing import NamedTuple

from isal.isal_zlib import crc32

from penstock.errors import CorruptEntry, InvalidField

HEADER_BYTES = 32
SIZE_BYTES_MAX = 2**32 - 1
TTL_S_MAX = 2**32 - 1

_pack_crc = struct.Struct("<I").pack
_pack_rest = struct.Struct("<8sIIQI").pack
_unpack_rest = struct.Struct("<8sIIQI").unpack_from
_unpack_crc = struct.Struct("<I").unpack_from


class Header(NamedTuple):
    """The fields of a header whose checksum was verified."""

    version: bytes
    size_bytes: int
    ttl_s: int
    entry_id: int
    data_crc: int

    def holds(self, data: bytes | memoryview) -> bool:
        """Whether the data has the header's size and checksum."""
        return len(data) == self.size_bytes and crc32(data) == self.data_crc


class StoredEntry(NamedTuple):
    """An entry read back from a stream, both checksums verified."""

    entry_id: int
    offset: int
    version: bytes
    ttl_s: int
    data: bytes

    @property
    def data_offset(self) -> int:
        """Where the data begins in the stream."""
        return self.offset + HEADER_BYTES

    @property
    def end_offset(self) -> int:
        """Where the next entry begins in the stream."""
        return self.offset + HEADER_BYTES + len(self.data)


def pack_header(
    version: bytes, ttl_s: int, entry_id: int, data: bytes | bytearray | memoryview
) -> bytes:
    """Returns the header of `data`; raises InvalidField if a field does not fit."""
    # struct pads or cuts a version of another length and raises no error.
    if len(version) != 8 or not version[0]:
        raise InvalidField(f"an entry's version is eight bytes, the first not zero: {version!r}")
    try:
        rest = _pack_rest(version, len(data), ttl_s, entry_id, crc32(data))
    except struct.error:
        raise InvalidField(
            f"an entry holds at most {SIZE_BYTES_MAX} bytes for at most {TTL_S_MAX} s, "
            f"not {len(data)} bytes for {ttl_s} s"
        ) from None
    return _pack_crc(crc32(rest)) + rest


def join(version: bytes, entry_id: int, head: bytes, body: bytes) -> bytes:
    """Returns an entry without a time to live; its data is `head + body`. Checks no limit."""
    data = head + body
    rest = _pack_rest(version, len(data), 0, entry_id, crc32(data))
    return _pack_crc(crc32(rest)) + rest + data


def pack(version: bytes, ttl_s: int, entry_id: int, data: bytes) -> bytes:
    """Returns the header and the data of an entry."""
    return pack_header(version, ttl_s, entry_id, data) + data


def unpack_header(head: bytes) -> Header | None:
    """Returns the header in the first 32 bytes, or None if its checksum does not match."""
    if len(head) < HEADER_BYTES or crc32(head[4:HEADER_BYTES]) != _unpack_crc(head)[0]:
        return None
    return Header._make(_unpack_rest(head, 4))


def unpack(packed: bytes) -> StoredEntry:
    """Returns the packed entry, with offset 0; raises CorruptEntry if a checksum does not match."""
    header = unpack_header(packed)
    if header is None:
        raise CorruptEntry("the entry's header does not match its checksum")
    data = packed[HEADER_BYTES:]
    if len(data) != header.size_bytes:
        raise CorruptEntry(
            f"the entry's header gives {header.size_bytes} bytes, its data has {len(data)}"
        )
    if crc32(data) != header.data_crc:
        raise CorruptEntry("the entry's data does not match its checksum")
    return StoredEntry(header.entry_id, 0, header.version, header.ttl_s, data)
