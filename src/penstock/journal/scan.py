"""Walk the entries of a stream, and find the next entry after damage.

Every byte below the durable watermark was written completely, so a checksum that fails there means
corruption: that entry is reported and the walk continues behind it. A damaged header has lost the
size of its data, so the next entry is searched for. A body may contain bytes that look like an
entry, so a candidate counts only if its chain of headers fits the ids and the bytes that remain.

Above the watermark the first entry that does not match its checksum is a torn tail: the stream ends
before it.

Nothing here touches a file: callers pass `read(offset, size)`, which returns fewer bytes only at
the end of the stream.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from isal.isal_zlib import crc32

from penstock.journal.entry import HEADER_BYTES, Header, StoredEntry, unpack_header

Read = Callable[[int, int], bytes]

_WINDOW_BYTES_MIN = 4096
_WINDOW_BYTES_MAX = 1 << 20


class Quarantined(NamedTuple):
    """A damaged range of the stream; readers skip it."""

    offset: int
    size_bytes: int
    why: str


class Limit(NamedTuple):
    """Where a walk ends. `next_id` is the id of the entry that begins there.

    `next_id` is None if the stream may end within an entry: the last entry of an archive can end in
    a file that is not archived yet.
    """

    offset: int
    next_id: int | None


class _Window:
    """A read-ahead buffer that grows while it is read in sequence."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._bytes = b""
        self._offset = 0
        self._size = _WINDOW_BYTES_MIN

    def read(self, offset: int, size: int) -> bytes:
        at = offset - self._offset
        if at < 0 or at + size > len(self._bytes):
            if size > _WINDOW_BYTES_MAX:
                return self._read(offset, size)
            self._bytes = self._read(offset, max(size, self._size))
            self._offset = offset
            self._size = min(self._size * 4, _WINDOW_BYTES_MAX)
            at = 0
        return self._bytes[at : at + size]


def walk(
    read: Read,
    offset: int,
    entry_id: int,
    limit: Limit,
    quarantine: Callable[[Quarantined], None],
) -> Iterator[StoredEntry]:
    """Yields the entries from `offset`, where `entry_id` begins (0: not known), to `limit`."""
    window = _Window(read)
    while offset < limit.offset:
        header = unpack_header(window.read(offset, HEADER_BYTES))
        if header is None or not _plausible(header, entry_id, limit):
            found_offset, entry_id = _resynchronise(window, offset, entry_id, limit)
            why = "header does not match its checksum" if header is None else "header out of place"
            quarantine(Quarantined(offset, found_offset - offset, why))
            offset = found_offset
            continue
        end = offset + HEADER_BYTES + header.size_bytes
        if end > limit.offset:
            if limit.next_id is None:
                return
            quarantine(Quarantined(offset, limit.offset - offset, "entry exceeds the stream"))
            return
        data = window.read(offset + HEADER_BYTES, header.size_bytes)
        if crc32(data) == header.data_crc:
            yield StoredEntry(header.entry_id, offset, header.version, header.ttl_s, data)
        else:
            quarantine(Quarantined(offset, end - offset, "data does not match its checksum"))
        offset = end
        entry_id = header.entry_id + 1


def valid_end(read: Read, offset: int, entry_id: int, end_offset: int) -> tuple[int, int]:
    """Returns where the unbroken run of entries from `offset` ends, and the id that follows it."""
    window = _Window(read)
    while offset + HEADER_BYTES <= end_offset:
        header = unpack_header(window.read(offset, HEADER_BYTES))
        if header is None or header.entry_id != entry_id:
            break
        end = offset + HEADER_BYTES + header.size_bytes
        if end > end_offset:
            break
        if crc32(window.read(offset + HEADER_BYTES, header.size_bytes)) != header.data_crc:
            break
        offset = end
        entry_id += 1
    return offset, entry_id


def crossing_end(read: Read, offset: int, entry_id: int, goal: int) -> int | None:
    """Returns where the entry ends with which the unbroken run from `offset` reaches `goal`.

    None if the run ends before: then nothing behind `goal` was ever durable, because a sync
    includes all that was appended before. The data of that one entry is not verified.
    """
    end, next_id = valid_end(read, offset, entry_id, goal)
    if goal - end < HEADER_BYTES:
        return goal
    header = unpack_header(read(end, HEADER_BYTES))
    if header is None or header.entry_id != next_id:
        return None
    end += HEADER_BYTES + header.size_bytes
    return end if end > goal else None


def find_first(read: Read, offset: int, limit: Limit) -> tuple[int, int]:
    """Returns the first entry at or after `offset`, which may be within an entry."""
    return _resynchronise(_Window(read), offset - 1, 0, limit)


def _plausible(header: Header, entry_id: int, limit: Limit) -> bool:
    if entry_id:
        return header.entry_id == entry_id
    return header.entry_id > 0 and (limit.next_id is None or header.entry_id < limit.next_id)


def _resynchronise(window: _Window, offset: int, entry_id: int, limit: Limit) -> tuple[int, int]:
    """Returns the next entry after the damaged one at `offset`, or the limit if there is none.

    A chain of entries is kept only if it fits the chain behind it: the ids between the two are the
    ones that are missing, and the bytes between them have room for that many entries. Bytes in a
    body that look like an entry fail this: the real entries behind them have lower ids.
    """
    chains: list[tuple[int, int, int, int]] = []
    at = offset + 1
    while at < limit.offset:
        found = _candidate(window, at, entry_id, limit)
        if found is None:
            break
        start, start_id = found
        at, next_id = _follow(window, start, start_id, limit)
        chains.append((start, start_id, at, next_id))
    goal_offset = limit.offset
    goal_id = limit.next_id
    for start, start_id, end, next_id in reversed(chains):
        if goal_id is not None:
            missing = goal_id - next_id
            room_bytes = goal_offset - end
            if missing < 0 or (missing == 0) != (room_bytes == 0):
                continue
            if room_bytes < missing * HEADER_BYTES:
                continue
        goal_offset, goal_id = start, start_id
    return goal_offset, goal_id or 0


def _follow(window: _Window, offset: int, entry_id: int, limit: Limit) -> tuple[int, int]:
    """Returns where the chain of headers from `offset` breaks, and the id expected there."""
    while offset < limit.offset:
        header = unpack_header(window.read(offset, HEADER_BYTES))
        if header is None or header.entry_id != entry_id:
            break
        end = offset + HEADER_BYTES + header.size_bytes
        if end > limit.offset:
            break
        offset = end
        entry_id += 1
    return offset, entry_id


def _candidate(window: _Window, offset: int, entry_id: int, limit: Limit) -> tuple[int, int] | None:
    """Returns the next offset at which both checksums match and the id may follow `entry_id`."""
    lowest = entry_id + 1
    highest = lowest + (limit.offset - offset) // HEADER_BYTES
    if limit.next_id is not None and (not entry_id or highest >= limit.next_id):
        highest = limit.next_id - 1
    elif not entry_id:
        highest = 2**64 - 1
    pattern = _header_pattern(lowest, highest)
    while offset + HEADER_BYTES <= limit.offset:
        size = min(_WINDOW_BYTES_MAX, limit.offset - offset)
        chunk = window.read(offset, size)
        for match in pattern.finditer(chunk):
            at = match.start()
            header = unpack_header(chunk[at : at + HEADER_BYTES])
            if header is None or not lowest <= header.entry_id <= highest:
                continue
            start = offset + at
            if start + HEADER_BYTES + header.size_bytes > limit.offset:
                continue
            data = window.read(start + HEADER_BYTES, header.size_bytes)
            if crc32(data) == header.data_crc:
                return start, header.entry_id
        if len(chunk) < size or size < _WINDOW_BYTES_MAX:
            break
        # The last bytes may be the first part of a header: search them again with the next ones.
        offset += size - HEADER_BYTES + 1
    return None


def _header_pattern(lowest_id: int, highest_id: int) -> re.Pattern[bytes]:
    """Returns a pattern that every header with such an id matches.

    To compute a checksum at every byte would be too slow. A version never begins with zero, so
    zeroed ranges do not match; the high half of the id is in the pattern if it has few values.
    """
    halves = range(lowest_id >> 32, (highest_id >> 32) + 1)
    if len(halves) > 4:
        return re.compile(rb"(?s)(?=.{4}[^\0].{27})")
    high_bytes = b"|".join(re.escape(half.to_bytes(4, "little")) for half in halves)
    return re.compile(rb"(?s)(?=.{4}[^\0].{19}(?:" + high_bytes + rb").{4})")
