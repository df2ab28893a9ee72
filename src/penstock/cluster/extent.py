"""Extents: the content of the slots of a shard's replicated log, and the rules of their order.

A shard's journal is one stream of entries, as in segment files (`journal.entry`). An extent is a
part of that stream. It has the format of an entry, whose data begins with the fields

    shard (4) · flags (4) · term (8) · position (8) · the part of the stream

and whose id is the sequence of the first journal entry in that part. `position` is where the part
begins in the stream. An entry that is too large for one extent continues in the next one.

The first extent of an owner opens its term; it holds the owner's name and no part of the stream.
Terms never decrease. An extent whose term is lower than an earlier one was written by an owner that
did not know yet that it was replaced. It is void, and every reader skips it.
"""

import struct
from typing import Final, NamedTuple

import msgspec

from penstock.errors import CorruptEntry
from penstock.journal.entry import HEADER_BYTES, StoredEntry, pack, unpack, unpack_header

VERSION: Final = b"PEXTEN01"
_FIELDS: Final = struct.Struct("<IIQQ")
_OPENS_TERM: Final = 1
_GOES_ON: Final = 2
OVERHEAD_BYTES: Final = HEADER_BYTES + _FIELDS.size


class Extent(NamedTuple):
    """The content of one slot."""

    shard: int
    term: int
    position: int
    sequence: int
    data: bytes
    opens_term: bool = False
    goes_on: bool = False


def pack_extent(extent: Extent) -> bytes:
    """The bytes of an extent."""
    flags = _OPENS_TERM * extent.opens_term | _GOES_ON * extent.goes_on
    fields = _FIELDS.pack(extent.shard, flags, extent.term, extent.position)
    return pack(VERSION, 0, extent.sequence, fields + extent.data)


def unpack_extent(packed: bytes) -> Extent:
    """The extent of these bytes. Raises CorruptEntry."""
    entry = unpack(packed)
    if entry.version != VERSION or len(entry.data) < _FIELDS.size:
        raise CorruptEntry(f"an extent is of the format {entry.version!r}, not {VERSION!r}")
    shard, flags, term, position = _FIELDS.unpack_from(entry.data)
    return Extent(
        shard,
        term,
        position,
        entry.entry_id,
        entry.data[_FIELDS.size :],
        bool(flags & _OPENS_TERM),
        bool(flags & _GOES_ON),
    )


class ChainPoint(msgspec.Struct, frozen=True, array_like=True):
    """A point at which reading a shard's log may begin: a slot, and what its extent must have."""

    slot: int = 1
    position: int = 0
    sequence: int = 1
    term: int = 0


class BrokenChain(Exception):
    """The slots that were read are not consecutive, or one of them is damaged."""


class ExtentChain:
    """Reads a shard's slots in order, and checks that none is missing.

    `slot`, `position`, `sequence` and `term` are those expected of the next extent.
    """

    def __init__(self, shard: int, start: ChainPoint) -> None:
        self.shard = shard
        self.slot = start.slot
        self.position = start.position
        self.sequence = start.sequence
        self.term = start.term
        # The beginning of an entry that continues in a later extent.
        self._begun = b""

    @property
    def point(self) -> ChainPoint | None:
        """A point at which reading may begin; None in the middle of an entry."""
        if self._begun:
            return None
        return ChainPoint(self.slot, self.position, self.sequence, self.term)

    def read(self, slot: int, packed: bytes) -> tuple[bytes, list[StoredEntry]]:
        """Reads the next slot: the bytes of the entries that it completes, and these entries.

        Raises BrokenChain, and then changes nothing.
        """
        if slot != self.slot:
            raise BrokenChain(f"shard {self.shard}: slot {slot} was read in place of {self.slot}")
        try:
            extent = unpack_extent(packed)
            taken = self._entries_of(extent)
        except CorruptEntry as error:
            raise BrokenChain(f"shard {self.shard}, slot {slot}: {error}") from error
        self.slot += 1
        return taken

    def _entries_of(self, extent: Extent) -> tuple[bytes, list[StoredEntry]]:
        if extent.shard != self.shard:
            raise CorruptEntry(f"it is an extent of shard {extent.shard}")
        if extent.term < self.term:
            return b"", []
        if extent.opens_term:
            # No later owner continues an entry that the one before has begun.
            self.term = extent.term
            self._begun = b""
            return b"", []
        if extent.term > self.term and self.term:
            raise CorruptEntry(f"term {extent.term} was not opened; the last is {self.term}")
        if extent.position != self.position + len(self._begun):
            raise CorruptEntry(
                f"it begins at {extent.position} of the stream, not at "
                f"{self.position + len(self._begun)}"
            )
        data = self._begun + extent.data
        if extent.goes_on:
            self._begun = data
            return b"", []
        entries = split_entries(data, self.position, self.sequence)
        self._begun = b""
        self.term = extent.term
        self.position += len(data)
        self.sequence += len(entries)
        return data, entries


def split_entries(data: bytes, position: int, sequence: int) -> list[StoredEntry]:
    """The entries in a part of a stream. Raises CorruptEntry."""
    entries: list[StoredEntry] = []
    at = 0
    while at < len(data):
        header = unpack_header(data[at : at + HEADER_BYTES])
        if header is None:
            raise CorruptEntry(f"the entry at {position + at} has a damaged header")
        content = data[at + HEADER_BYTES : at + HEADER_BYTES + header.size_bytes]
        if header.entry_id != sequence + len(entries) or not header.holds(content):
            raise CorruptEntry(f"the entry at {position + at} is damaged or out of order")
        entries.append(
            StoredEntry(header.entry_id, position + at, header.version, header.ttl_s, content)
        )
        at += HEADER_BYTES + header.size_bytes
    return entries
