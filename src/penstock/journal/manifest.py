"""The list of a stream's files: the ones that must exist.

    offset  size  field (one page of 4,096 bytes in the file `manifest`; other bytes are zero)
         0     8  magic "PENSTMAN"
         8     4  format, 1
        12     4  size of this page, 4096
        16     8  size of each segment file
        24    16  identity of the stream
        40     4  crc32 of the 40 bytes before it
       512    64  slot 0
      1024    64  slot 1

    a slot
         0     4  crc32 of the 60 bytes that follow it
         4     4  zero
         8     8  serial: the greater of two valid slots is the newer
        16     8  number of the first file
        24     8  number of the last file
        32    32  zero

A file is listed, durably, after it was made and before a byte is appended to it, and is removed
from the list before it is unlinked. So a listed file that does not exist was removed by something
else than Penstock.
A directory without a manifest was written by an older version, and its next writer makes one; or
the manifest was removed. Every watermark says whether there was a manifest when it was written,
which tells the two cases apart. A damaged manifest is made again if the entries prove that no file
is missing (`recovery`).
`docs/formats/segment.md` is the format.
"""

import struct
import threading
from typing import Final, Literal, NamedTuple

from isal.isal_zlib import crc32

from penstock.errors import StoreUnusable
from penstock.journal.disk import Directory

NAME: Final = "manifest"
MAGIC: Final = b"PENSTMAN"
FORMAT: Final = 1
PAGE_BYTES: Final = 4096
_SLOT_OFFSETS: Final = (512, 1024)
_SLOT_BYTES: Final = 64

_HEADER: Final = struct.Struct("<8sIIQ16s")
_SLOT: Final = struct.Struct("<4xQQQ32x")
_CRC: Final = struct.Struct("<I")


class FileList(NamedTuple):
    """The newest valid slot; `place` is its place in the page, 0 or 1."""

    serial: int
    first: int
    last: int
    place: int


def read_manifest(directory: Directory, identity: bytes | None = None) -> FileList | None:
    """The files that must exist; None if there is no list, or no valid one.

    Raises StoreUnusable if the list is another stream's, or of a later format.
    """
    page = _read_page(directory)
    if page is None or not _is_ours(page):
        return None
    fields = page[: _HEADER.size]
    _, format_, _, _, listed_identity = _HEADER.unpack(fields)
    where = f"{directory.path}: {NAME}"
    if format_ != FORMAT:
        raise StoreUnusable(f"{where} has format {format_}; this version reads {FORMAT}")
    if identity not in (None, listed_identity):
        raise StoreUnusable(f"{where} belongs to another stream than the segment files")
    slots = [slot for place in (0, 1) if (slot := _unpack_slot(page, place)) is not None]
    return max(slots, default=None)


def condition_of(directory: Directory) -> Literal["absent", "whole", "torn", "damaged"]:
    """Whether the manifest can be relied on.

    A `torn` one has a slot that fails its checksum, as a power cut may leave it: that slot may
    have listed more files than the other. A `damaged` one lists none.
    """
    page = _read_page(directory)
    if page is None:
        return "absent"
    if not _is_ours(page) or read_manifest(directory) is None:
        return "damaged"
    packed = [page[at : at + _SLOT_BYTES] for at in _SLOT_OFFSETS]
    are_known = [
        _unpack_slot(page, place) is not None or not any(packed[place]) for place in (0, 1)
    ]
    return "whole" if all(are_known) else "torn"


def _read_page(directory: Directory) -> bytes | None:
    try:
        file = directory.open(NAME, writable=False)
    except FileNotFoundError:
        return None
    page = file.read(0, PAGE_BYTES)
    file.close()
    return page


def _is_ours(page: bytes) -> bool:
    """Whether the page is complete and its header matches its checksum."""
    fields = page[: _HEADER.size]
    is_whole = len(page) == PAGE_BYTES and _CRC.unpack_from(page, _HEADER.size)[0] == crc32(fields)
    return is_whole and fields.startswith(MAGIC)


def _unpack_slot(page: bytes, place: int) -> FileList | None:
    at = _SLOT_OFFSETS[place]
    packed = page[at : at + _SLOT_BYTES]
    if _CRC.unpack_from(packed)[0] != crc32(packed[4:]):
        return None
    serial, first, last = _SLOT.unpack(packed[4:])
    return FileList(serial, first, last, place)


def _pack_slot(listed: FileList) -> bytes:
    fields = _SLOT.pack(listed.serial, listed.first, listed.last)
    return _CRC.pack(crc32(fields)) + fields


class Manifest:
    """The list as the stream's one writer keeps it."""

    def __init__(
        self, directory: Directory, identity: bytes, file_bytes: int, listed: FileList | None
    ) -> None:
        self._directory = directory
        self._identity = identity
        self._file_bytes = file_bytes
        self._listed = listed
        # After a failed sync the system may return a slot that never reached the disk, so a slot
        # of an earlier process is written again before the next one.
        self._is_durable = False
        self._writing = threading.Lock()

    @property
    def is_kept(self) -> bool:
        """Whether there is a list."""
        return self._listed is not None

    def write(self, first: int, last: int) -> None:
        """Lists the files from `first` to `last`, durably. Raises OSError if it cannot.

        The slot that is written is never the newest durable one: if this one is torn, that one
        still counts.
        """
        with self._writing:
            listed = self._listed
            if listed is None:
                listed = FileList(1, first, last, 0)
                self._directory.create(NAME, PAGE_BYTES, self._pack_page(listed)).close()
            else:
                if not self._is_durable:
                    self._write_slot(listed)
                if (listed.first, listed.last) != (first, last):
                    listed = FileList(listed.serial + 1, first, last, 1 - listed.place)
                    self._write_slot(listed)
            self._listed = listed
            self._is_durable = True

    def _write_slot(self, listed: FileList) -> None:
        at = _SLOT_OFFSETS[listed.place]
        file = self._directory.open(NAME, writable=True)
        try:
            file.map()[at : at + _SLOT_BYTES] = _pack_slot(listed)
            file.sync()
        finally:
            file.close()

    def _pack_page(self, listed: FileList) -> bytes:
        fields = _HEADER.pack(MAGIC, FORMAT, PAGE_BYTES, self._file_bytes, self._identity)
        header = fields + _CRC.pack(crc32(fields))
        return header.ljust(_SLOT_OFFSETS[0], b"\0") + _pack_slot(listed)
