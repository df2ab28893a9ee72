"""A first-in, first-out queue of byte strings in a directory: push, pop, peek, size, capacity.

It uses Penstock's segment files and nothing else of it. Each item is one entry, version
`PQUEUE01`, whose data is

    offset  size  field
         0     8  when it was pushed, in milliseconds since 1970, little-endian
         8     …  the item

A pop moves the beginning of the stream behind the item, so nothing is rewritten or compacted; files
that end before the beginning are unlinked.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal, Self

from penstock.errors import EngineClosed, InvalidField, QueueFull, StoreUnusable
from penstock.journal.disk import Storage
from penstock.journal.entry import HEADER_BYTES, TTL_S_MAX, StoredEntry
from penstock.journal.scan import Quarantined
from penstock.journal.segments import Segments
from penstock.service import check_number

VERSION = b"PQUEUE01"
FILE_SIZE = 4 * 1024 * 1024
MAX_SIZE = 1024 * 1024 * 1024

_STAMP_BYTES = 8
_OVERHEAD_BYTES = HEADER_BYTES + _STAMP_BYTES


class PersistedQueue:
    """A FIFO queue of bytes that survives crashes and power cuts.

        with PersistedQueue("spool") as queue:
            queue.push(b"first")
            queue.push(b"gone in a minute", ttl=60)
            queue.peek()            # b"first", still there
            queue.pop()             # b"first", gone for good
            for item in queue:      # reads all items, removes none
                ...

    `path`         a directory; made if missing, then readable by its owner only.
    `file_size`    bytes of each file, a multiple of 4096; a queue that exists keeps its own.
    `max_size`     how many bytes the items may take, 40 a piece included; then push raises
                   QueueFull. The directory itself takes up to two files more.
    `default_ttl`  seconds an item lives unless push has a `ttl`; None or 0 is for ever.
    `durability`   "sync": when push returns the item survives a power cut, and when pop returns
                   its item never comes back. "os": both hold if the process dies, and the system
                   writes the disk later; much faster, but a power cut loses the latest changes.
    `clock`        gives the time in seconds since 1970, for time to live.
    `accept_loss`  opens a queue that misses files, without the items they held; otherwise
                   StoreUnusable names them.

    One process at a time has a queue open; its threads may share it. `SharedQueue` is for several
    processes. Threads that push or pop at
    the same moment share one sync.

    pop is at most once: a crash between its return and your use of the item loses it. Where that
    matters, peek, do the work, then pop.

    Raises StoreUnusable if the directory cannot be used (the sentence says why), StoreInUse if
    another process has it, StoreFull if the disk is full (pop still works, and push works again
    when there is room), and JournalError after the disk failed a sync: then close the queue and
    open it again. An item that is damaged on the disk is skipped and listed in `quarantined`; those
    behind it are not affected.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        file_size: int = FILE_SIZE,
        max_size: int = MAX_SIZE,
        default_ttl: float | None = None,
        *,
        durability: Literal["sync", "os"] = "sync",
        clock: Callable[[], float] = time.time,
        storage: Storage | None = None,
        accept_loss: bool = False,
    ) -> None:
        check_number("max_size", max_size, _OVERHEAD_BYTES, 2**63 - 1)
        if durability not in ("sync", "os"):
            raise InvalidField(f"durability is 'sync' or 'os', not {durability!r}")
        if storage is None and os.path.exists(os.path.join(path, "store")):
            raise StoreUnusable(f"{path}: is a store; SharedQueue or penstock.connect opens it")
        self._default_ttl_s = _whole_seconds("default_ttl", default_ttl or 0)
        self._max_bytes = max_size
        self._syncs = durability == "sync"
        self._clock = clock
        self._closed = False
        # `_lock` guards the queue's order; `_commit` is held during a sync. A thread appends under
        # the first, releases it, and waits for the disk under the second.
        self._lock = threading.RLock()
        self._commit = threading.Lock()
        # Pops write no entries, so no room is kept back for them. On a simulated disk everything is
        # done in one thread, so that a seed replays it.
        self._segments = Segments.open(
            path,
            file_bytes=file_size,
            storage=storage,
            reserve_bytes=0,
            background=storage is None,
            accept_loss=accept_loss,
        )
        self._unread: Iterator[StoredEntry] = iter(())
        self._unread_end = self._segments.first_offset
        self._front: StoredEntry | None = None
        self._peeked = (-1, -1, -1)

    def push(self, data: bytes | bytearray | memoryview, ttl: float | None = None) -> None:
        """Adds an item at the end; it lives `ttl` seconds (None: the default; 0: for ever).

        Raises QueueFull, StoreFull or InvalidField, and adds nothing.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            raise InvalidField(f"an item is bytes, not {type(data).__name__}")
        ttl_s = self._default_ttl_s if ttl is None else _whole_seconds("ttl", ttl)
        item = bytes(data)
        with self._lock:
            self._require_open()
            self._require_room(_OVERHEAD_BYTES + len(item))
            stamp = self._now_ms().to_bytes(_STAMP_BYTES, "little")
            self._segments.append([stamp, item], version=VERSION, ttl_s=ttl_s)
            end = self._segments.end_offset
        if self._syncs:
            with self._commit:
                if self._segments.durable_offset < end:
                    self._segments.sync()

    def pop(self) -> bytes | None:
        """Removes the oldest item that has not expired and returns it; None if there is none."""
        with self._lock:
            self._require_open()
            entry = self._find_front()
            if entry is None:
                return None
            self._pass(entry)
            first = self._segments.first_offset
        with self._commit:
            if not self._syncs:
                self._segments.publish()
            elif self._segments.durable_first_offset < first:
                self._segments.sync()
            if self._segments.first_file_is_free and not self._closed:
                self._segments.drop_before(first)
        return entry.data[_STAMP_BYTES:]

    def peek(self, n: int = 0) -> bytes | None:
        """Returns an item without removing it: the oldest, or the one `n` places behind it.

        None if there are fewer. Calling it with 0, 1, 2 … goes through the queue, each step as
        fast as the first; so does `for item in queue`.
        """
        check_place(n)
        with self._lock:
            self._require_open()
            entry = self._find_front()
            if n == 0 or entry is None:
                return entry.data[_STAMP_BYTES:] if entry else None
            front, place, offset = self._peeked
            if front != entry.offset or place > n:
                place, offset = 1, entry.end_offset
            found = self._find_live(offset)
            while found is not None and place < n:
                found = self._find_live(found.end_offset)
                place += 1
            if found is None:
                return None
            self._peeked = (entry.offset, n, found.offset)
            return found.data[_STAMP_BYTES:]

    def __iter__(self) -> Iterator[bytes]:
        """Yields the items from the oldest on, removing none; items pushed meanwhile come, too."""
        offset = 0
        while True:
            with self._lock:
                self._require_open()
                entry = self._find_live(max(offset, self._segments.first_offset))
            if entry is None:
                return
            offset = entry.end_offset
            yield entry.data[_STAMP_BYTES:]

    def size(self) -> int:
        """Returns how many items there are.

        Expired items count until those before them are gone: with one time to live for all, never.
        """
        with self._lock:
            self._require_open()
            self._find_front()
            return self._segments.next_id - self._segments.first_id

    def size_bytes(self) -> int:
        """Returns how much of `max_size` is used."""
        return self._segments.end_offset - self._segments.first_offset

    def capacity(self, data_bytes: int = 0) -> int:
        """Returns how many items of `data_bytes` each fit into `max_size`.

        Without an argument: the most items that could ever be held, each of them empty.
        """
        return self._max_bytes // (_OVERHEAD_BYTES + check_data_bytes(data_bytes))

    def __len__(self) -> int:
        return self.size()

    def __bool__(self) -> bool:
        """An open queue is true even when it is empty: test `len` or `peek` for items."""
        return True

    @property
    def quarantined(self) -> list[Quarantined]:
        """The damaged ranges found so far, which were skipped."""
        return self._segments.quarantined

    def close(self) -> None:
        """Writes everything and closes the directory; closing twice is fine."""
        with self._lock, self._commit:
            if not self._closed:
                self._closed = True
                self._segments.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise EngineClosed(f"{self._segments.path}: the queue is closed")

    def _require_room(self, size_bytes: int) -> None:
        if self.size_bytes() + size_bytes > self._max_bytes:
            self._find_front()  # Expired items at the front make room.
        held_bytes = self.size_bytes()
        if held_bytes + size_bytes > self._max_bytes:
            raise QueueFull(
                f"{self._segments.path}: holds {held_bytes} of {self._max_bytes} bytes, "
                f"no room for {size_bytes} more"
            )

    def _now_ms(self) -> int:
        return max(0, int(self._clock() * 1000))

    def _is_live(self, entry: StoredEntry) -> bool:
        if not entry.ttl_s:
            return True
        pushed_at_ms = int.from_bytes(entry.data[:_STAMP_BYTES], "little")
        return self._now_ms() < pushed_at_ms + entry.ttl_s * 1000

    def _find_front(self) -> StoredEntry | None:
        """Returns the oldest item that has not expired; removes those before it."""
        while True:
            if self._front is None:
                self._front = next(self._unread, None)
            if self._front is None:
                if not self._read_on():
                    return None
            elif self._is_live(self._front):
                if self._segments.first_offset < self._front.offset:
                    self._segments.advance(self._front.offset, self._front.entry_id)
                return self._front
            else:
                self._pass(self._front)

    def _read_on(self) -> bool:
        """Begins to read the items pushed since the last call; False if there are none."""
        start, end = self._unread_end, self._segments.end_offset
        if start == end:
            # There was nothing else, or only damaged items.
            self._segments.advance(end, self._segments.next_id)
            return False
        self._unread = self._segments.entries(start, end)
        self._unread_end = end
        return True

    def _find_live(self, offset: int) -> StoredEntry | None:
        found = self._segments.entries(offset, self._segments.end_offset)
        return next(filter(self._is_live, found), None)

    def _pass(self, entry: StoredEntry) -> None:
        """Lets the queue begin behind this item."""
        self._segments.advance(entry.end_offset, entry.entry_id + 1)
        self._front = None


def check_place(n: object) -> int:
    """Returns the place that `peek` was given. Raises InvalidField."""
    return check_number("n", n, 0, 2**63 - 1)


def check_data_bytes(data_bytes: object) -> int:
    """Returns the size that `capacity` was given. Raises InvalidField."""
    return check_number("data_bytes", data_bytes, 0, 2**63 - 1)


def _whole_seconds(name: str, ttl: object) -> int:
    if isinstance(ttl, bool) or not isinstance(ttl, int | float):
        raise InvalidField(f"{name}: expected a number of seconds, got {type(ttl).__name__}")
    if not 0 <= ttl <= TTL_S_MAX:
        raise InvalidField(f"{name}: 0 to {TTL_S_MAX} seconds, not {ttl}")
    return math.ceil(ttl)
