"""The bytes of a journal as the pipeline reads them: from its files or their archive, read only.

A path is a store (its journal is in `journal/`), or a directory of segment files: an archive, or a
journal by itself. Reading ends at the durable watermark. It can begin anywhere: `align` finds an
entry near an offset, and proves that it is one by following its chain of headers out of a window
larger than what could be imitated inside a message's body.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from penstock.errors import JournalError, StoreUnusable
from penstock.journal.codec import VERSION
from penstock.journal.entry import HEADER_BYTES
from penstock.journal.fileheader import PAGE_BYTES
from penstock.journal.files import name_of, numbers_in
from penstock.journal.recovery import Examined, examine, newest_slot
from penstock.journal.storage import Directory, File, OsStorage

STORE_FORMAT: Final = b"penstock store, format 1\n"
WINDOW_BYTES: Final = 1 << 20
_OPEN_FILES_MAX: Final = 32
Scan = Callable[[int, int], bytes]

HEADER: Final = np.dtype(
    [
        ("crc", "<u4"),
        ("version", "<u8"),
        ("size", "<u4"),
        ("ttl_s", "<u4"),
        ("id", "<i8"),
        ("data_crc", "<u4"),
    ]
)
_VERSION: Final = int.from_bytes(VERSION, "little")


@dataclass(frozen=True)
class Point:
    """A place between two entries: its offset, and the id of the entry that begins there.

    An id of 0 says that it is not known, as at the end of an archive.
    """

    offset: int
    entry: int


class Stream:
    """The journal at a path, as far as it was durable when it was opened."""

    def __init__(self, path: str, archive: str | None = None) -> None:
        """Raises StoreUnusable, in one sentence, if this is not a journal that can be read here."""
        self.path = path
        self.store = store_of(path)
        own = path if self.store is None else str(self.store / "journal")
        self._directories = [_open(own)]
        found = self._examined(0)
        if found is None:
            raise StoreUnusable(f"{path}: holds no segment files")
        examined = [found]
        if archive is not None:
            self._directories.append(_open(archive))
            archived = self._examined(1)
            if archived is not None and archived.identity != found.identity:
                raise StoreUnusable(f"{archive}: is the archive of another journal")
            examined += [archived] if archived is not None else []
        self.identity = found.identity
        self._payload_bytes = found.file_bytes - PAGE_BYTES
        self._slot = max((each.slot for each in examined), key=lambda slot: slot.serial)
        self._numbers = sorted({number for each in examined for number in each.numbers})
        self._files: dict[int, File] = {}
        self.end = self._find_end()
        self.first = self._find_first(all_files=archive is not None or self.store is None)

    def _examined(self, index: int) -> Examined | None:
        return examine(self._directories[index])

    def _find_end(self) -> Point:
        allocated = (self._numbers[-1] + 1) * self._payload_bytes
        slot = self._slot
        if slot.durable_offset <= allocated:
            return Point(slot.durable_offset, slot.next_id)
        # An archive ends where a file does, which is seldom where an entry does.
        oldest = self._numbers[0] * self._payload_bytes
        back = WINDOW_BYTES
        while True:
            start = max(oldest, allocated - back)
            point = align(self.scan, start, Point(allocated, 0))
            if point.entry:
                return whole_until(self.scan, point, allocated)
            if start == oldest:
                return Point(oldest, 0)
            back *= 4

    def _find_first(self, all_files: bool) -> Point:
        slot = self._slot
        oldest = self._numbers[0] * self._payload_bytes
        if not all_files or oldest >= slot.first_offset:
            return Point(min(slot.first_offset, self.end.offset), slot.first_id)
        if oldest == 0:
            return Point(0, 1)
        return align(self.scan, oldest, self.end)

    def scan(self, offset: int, size_bytes: int) -> bytes:
        """Bytes of the stream, zeroes where a file is missing or short.

        Raises JournalError if they were dropped since the stream was opened.
        """
        found = []
        while size_bytes > 0:
            number, within = divmod(offset, self._payload_bytes)
            size = min(size_bytes, self._payload_bytes - within)
            file = self._file(number)
            piece = b"" if file is None else file.read(PAGE_BYTES + within, size)
            found.append(piece.ljust(size, b"\0"))
            offset += size
            size_bytes -= size
        return found[0] if len(found) == 1 else b"".join(found)

    def _file(self, number: int) -> File | None:
        file = self._files.get(number)
        if file is not None:
            return file
        if len(self._files) >= _OPEN_FILES_MAX:
            self._files.pop(next(iter(self._files))).close()
        for directory in self._directories:
            try:
                file = directory.open(name_of(number), writable=False)
            except FileNotFoundError:
                continue
            self._files[number] = file
            return file
        # Missing, or dropped because nobody had registered as its reader?
        slot = newest_slot(self._directories[0], 0, self.identity)
        if slot is not None and slot.first_offset >= (number + 1) * self._payload_bytes:
            raise JournalError(
                f"{self.path}: {name_of(number)} was dropped before it was read; "
                "a registered reader or an archive keeps files"
            )
        return None

    def close(self) -> None:
        """Lets go of the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        for directory in self._directories:
            directory.close()


def store_of(path: str) -> Path | None:
    """The store at this path, None if it is a directory of segment files. Raises StoreUnusable."""
    store = Path(path)
    marker = store / "store"
    try:
        if not marker.exists():
            return None
        found = marker.read_bytes()
    except OSError as error:
        raise StoreUnusable(f"{path}: cannot be read: {error.strerror}") from error
    if found != STORE_FORMAT:
        raise StoreUnusable(
            f"{path}: is a store of another format ({found[:60]!r}); this version of Penstock "
            f"reads {STORE_FORMAT.decode().strip()!r}"
        )
    return store


def _open(path: str) -> Directory:
    try:
        directory = OsStorage().open(path, writable=False)
        numbers_in(directory)
    except OSError as error:
        why = error.strerror or os.strerror(error.errno or 0)
        raise StoreUnusable(f"{path}: cannot be read as a journal: {why}") from error
    return directory


def chained(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Every place in these bytes where an entry of events may begin, and the header there.

    They are found by their version, all at once. A body may hold the same bytes: who uses the
    result follows the chain, or checks it.
    """
    if len(data) < HEADER_BYTES:
        return np.empty(0, np.int64), np.empty(0, HEADER)
    raw = np.frombuffer(data, np.uint8)
    starts = np.flatnonzero(raw[4 : len(data) - HEADER_BYTES + 5] == VERSION[0])
    versions = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))
    starts = starts[versions[starts + 4] == _VERSION]
    headers = np.ndarray((len(data) - HEADER_BYTES + 1,), HEADER, data, strides=(1,))[starts]
    return starts, headers


def align(scan: Scan, offset: int, end: Point) -> Point:
    """An entry that begins at or after `offset`, proven by its chain; `end` if there is none."""
    window = WINDOW_BYTES
    while True:
        size = min(window, end.offset - offset)
        starts, headers = chained(scan(offset, size))
        nexts = starts + HEADER_BYTES + headers["size"].astype(np.int64)
        index = {int(start): at for at, start in enumerate(starts)}
        whole = offset + size == end.offset
        found = [
            at
            for at in _chain_heads(starts, nexts, headers["id"], index)
            if _leaves(at, nexts, headers["id"], index, size, end.entry if whole else 0)
        ]
        if len(found) == 1 or (whole and found):
            at = found[0]
            return Point(offset + int(starts[at]), int(headers["id"][at]))
        if whole:
            return end
        window *= 4


def _chain_heads(
    starts: np.ndarray, nexts: np.ndarray, ids: np.ndarray, index: dict[int, int]
) -> list[int]:
    """Candidates that no other candidate leads to."""
    led_to = {
        index[follower]
        for at, follower in enumerate(nexts.tolist())
        if follower in index and ids[index[follower]] == ids[at] + 1
    }
    return [at for at in range(len(starts)) if at not in led_to]


def _leaves(
    at: int, nexts: np.ndarray, ids: np.ndarray, index: dict[int, int], size: int, end_entry: int
) -> bool:
    """Whether the chain from here goes on to the window's edge, or to the end of the stream."""
    while (follower := int(nexts[at])) < size:
        if follower not in index:
            # The rest of the window may be too short for the header that stands there.
            return not end_entry and size - follower < HEADER_BYTES
        if ids[index[follower]] != ids[at] + 1:
            return False
        at = index[follower]
    return not end_entry or (follower == size and int(ids[at]) + 1 == end_entry)


def whole_until(scan: Scan, point: Point, limit: int) -> Point:
    """Where the last entry ends that lies wholly between `point` and `limit`."""
    data = scan(point.offset, limit - point.offset)
    starts, headers = chained(data)
    index = {int(start): at for at, start in enumerate(starts)}
    offset, entry = 0, point.entry
    while offset in index and headers["id"][index[offset]] == entry:
        following = offset + HEADER_BYTES + int(headers["size"][index[offset]])
        if following > len(data):
            break
        offset, entry = following, entry + 1
    return Point(point.offset + offset, entry)
