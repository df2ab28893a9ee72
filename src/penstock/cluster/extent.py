"""Extents: what stands in the slots of a shard's replicated log, and how they follow on each other.

A shard's journal is one stream of entries, as it is in segment files (`journal.entry`), and an
extent is a part of that stream. It is an entry itself, whose data begins with the fields

    shard (4) · flags (4) · term (8) · position (8) · the part of the stream

and whose id is the sequence of the journal's first entry in that part. `position` is where in the
stream the part begins. An entry that is too large for one extent goes on in the next one.

The first extent of an owner opens its term; it has no part of the stream but the owner's name.
Terms never fall: an extent whose term is lower than one before it was written by an owner that
had been replaced without knowing it. It is void, and every reader passes over it.
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
    """A point at which reading a shard's log may begin: the slot, and what it must hold."""

    slot: int = 1
    position: int = 0
    sequence: int = 1
    term: int = 0


class BrokenChain(Exception):
    """The slots that were read do not follow on each other: some are missing, or damaged."""


class ExtentChain:
    """Reads a shard's slots one after another, and checks that none is missing.

    `slot`, `position`, `sequence` and `term` are those of the next extent: what `point` tells.
    """

    def __init__(self, shard: int, start: ChainPoint) -> None:
        self.shard = shard
        self.slot = start.slot
        self.position = start.position
        self.sequence = start.sequence
        self.term = start.term
        # The beginning of an entry that goes on in a later extent.
        self._begun = b""

    @property
    def point(self) -> ChainPoint | None:
        """Where reading could begin again; None in the middle of an entry."""
        if self._begun:
            return None
        return ChainPoint(self.slot, self.position, self.sequence, self.term)

    def take(self, slot: int, packed: bytes) -> tuple[bytes, list[StoredEntry]]:
        """The entries that the next slot completes, as bytes of the stream and one by one.

        Raises BrokenChain, with nothing taken.
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
            # What the owner before had begun is not continued by anyone.
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
    """The entries that stand in this part of a stream. Raises CorruptEntry."""
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
