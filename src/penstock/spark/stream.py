"""The bytes of a journal as the pipeline reads them: from its files or their archive, read only.

A path is a store (its journal is in `journal/`), or a directory of segment files: an archive, or a
journal by itself. Reading ends at the durable watermark. It can begin anywhere: `align` finds an
entry near an offset, and verifies it by following its chain of headers out of a window that is
larger than a message's body can be, since a body may contain the bytes of entries.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.journal.codec import VERSION
from penstock.journal.entry import HEADER_BYTES
from penstock.journal.reader import JournalReader
from penstock.journal.store import journal_path, store_of

WINDOW_BYTES: Final = 1 << 20
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
        own = path if self.store is None else journal_path(self.store)
        # A directory of segment files is its own archive: all of it is read.
        self._reader = JournalReader(own, archive=path if self.store is None else archive)
        self.identity = self._reader.identity
        self.end = self._find_end()
        first = min(self._reader.first_offset, self.end.offset)
        self.first = Point(first, self._reader.first_id)

    def _find_end(self) -> Point:
        reader = self._reader
        held_end = reader.held_end
        if reader.durable_offset <= held_end:
            return Point(reader.durable_offset, reader.next_id)
        # An archive ends where a file does, which is seldom where an entry does.
        oldest = reader.file_numbers[0] * reader.payload_bytes
        back = WINDOW_BYTES
        while True:
            start = max(oldest, held_end - back)
            point = align(self.scan, start, Point(held_end, 0))
            if point.entry:
                return whole_until(self.scan, point, held_end)
            if start == oldest:
                return Point(oldest, 0)
            back *= 4

    def scan(self, offset: int, size_bytes: int) -> bytes:
        """Bytes of the stream, zeroes where a file is missing or short.

        Raises JournalError if they were dropped since the stream was opened.
        """
        return self._reader.read(offset, size_bytes)

    def close(self) -> None:
        """Closes the files."""
        self._reader.close()


def chained(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Every position in these bytes where an entry of events may begin, and the header there.

    They are found by their version, all at once. A body may hold the same bytes: the caller must
    follow the chain, or check it.
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
    """Whether the chain from here reaches the window's end, or the end of the stream."""
    while (follower := int(nexts[at])) < size:
        if follower not in index:
            # The rest of the window may be shorter than the next header.
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
