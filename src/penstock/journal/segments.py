"""One append-only stream of bytes, cut into fixed-size files that are preallocated and mapped.
Long, because the rules below hold only together.

    stream   0            P            2P           3P
             |  file 0    |  file 1    |  file 2    |  file 3, the spare …
             e1 e2 e3 e4──┼─e4─────────┼──e4 e5     (zeroes)

Each file is a page that says what it is (see `header_page`) and P bytes of the stream. An entry may
span files; a file may hold many entries. The rules that make it safe:

- A byte is durable when the sync after it has returned. Only then is a watermark written that
  includes it: whenever that reaches the disk, it is true.
- A file is written to its last block before it is used: no append can find the disk full half-way,
  and every mapped page has its block.
- After a failed sync nothing more is written or synced through this object.
- Before the first append after opening, every byte behind the end is zero, durably: bytes that an
  earlier process left there can never be taken for entries.

One thread at a time may append, and one may sync or drop, at the same time. Any thread may
read. `JournalReader` reads a stream beside its writer. `docs/formats/segment.md` is the format.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Iterator, Sequence
from typing import NoReturn, Self

from penstock.errors import (
    InvalidField,
    JournalError,
    PenstockError,
    StoreFull,
    StoreInUse,
    StoreUnusable,
)
from penstock.forked import start_over_when_forked
from penstock.journal.disk import Directory, Map, OsStorage, Storage
from penstock.journal.entry import (
    HEADER_BYTES,
    StoredEntry,
    join,
    pack_header,
    unpack_header,
)
from penstock.journal.header_page import (
    PAGE_BYTES,
    SLOT_BYTES,
    SLOT_OFFSETS,
    Slot,
    check_file_size,
    pack_slot,
)
from penstock.journal.recovery import Examined, examine, repair
from penstock.journal.scan import Limit, Quarantined, walk
from penstock.journal.stream_files import StreamFiles, name_of, numbers_in
from penstock.journal.watermark import Watermark

FILE_BYTES = 16 * 1024 * 1024

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
# Below this size one copy is cheaper than a second assignment into the map.
_JOIN_BYTES_MAX = 64 * 1024


class Segments:
    """An open stream. Made by `open`, closed by `close` or at the end of a `with` block."""

    def __init__(self, files: StreamFiles, slot: Slot, slot_place: tuple[int, int]) -> None:
        self._files = files
        self._payload_bytes = files.payload_bytes
        self._tip = (slot.durable_offset, slot.next_id)
        self._durable = self._tip
        self._first = (slot.first_offset, slot.first_id)
        self._durable_first = slot.first_offset
        self._watermark = Watermark(files, slot, slot_place)
        self._quarantined: dict[tuple[int, str], Quarantined] = {}
        self._syncing = threading.RLock()
        self._preparing = threading.Lock()
        self._preparer: threading.Thread | None = None
        self._background = False
        self._failure = ""
        # The missing or damaged files, and their offsets, whose loss was accepted at opening.
        self.accepted_loss = ""
        self._reserve_bytes = 0
        self._ahead_bytes = 0
        self._failed_to_grow = False
        # The last file, for `append`: its map, the stream offset of the map's first byte, its
        # number, and the offset up to which an append needs no further check.
        self._map: Map
        self._map_base = 0
        self._tail = -1
        self._fast_end = -1

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        file_bytes: int = FILE_BYTES,
        storage: Storage | None = None,
        reserve_bytes: int | None = None,
        background: bool = True,
        accept_loss: bool = False,
        known_end: int = 0,
        identity: bytes | None = None,
        begin: tuple[int, int] = (0, 1),
    ) -> "Segments":
        """Opens the stream in `directory` for writing; makes it if there is none, or recovers it.

        `file_bytes` counts for a new stream only: an existing one keeps its size.
        `reserve_bytes` is the room that only appends with `reserved=True` may use up, half a file
        unless given. `background` makes spare files in a thread; without it they are made where
        they are needed. With `accept_loss` a stream opens that misses files, or synced bytes of
        them: what they held is lost. `known_end` is an offset that the stream has reached,
        according to a snapshot.
        `identity` and `begin`, the offset and the id of the first entry, are for a new stream only.

        Raises StoreUnusable, having touched nothing, if the directory cannot be used, and
        StoreInUse if another writer has it.
        """
        check_file_size(file_bytes)
        path = os.fspath(directory)
        with contextlib.ExitStack() as undo:
            try:
                opened = (storage or OsStorage()).open(path, writable=True)
                undo.callback(opened.close)
                examined = examine(opened)
                if examined is None:
                    segments = cls._create(opened, file_bytes, identity, begin)
                else:
                    loss = examined.loss(known_end)
                    if loss and not accept_loss:
                        raise StoreUnusable(
                            f"{path}: {loss.summary()}; put them back, or open it "
                            "with accept_loss (--accept-loss of penstock check and serve) to go on "
                            "without what they held"
                        )
                    segments = cls._recover(opened, examined, loss.replaced)
                    segments.accepted_loss = loss.describe()
                segments._reserve_bytes = segments._payload_bytes // 2
                if reserve_bytes is not None:
                    segments._reserve_bytes = reserve_bytes
                segments._background = background
                segments._enter_tail()
            except OSError as error:
                raise _unusable(path, error) from error
            undo.pop_all()
        start_over_when_forked(segments)
        return segments

    @classmethod
    def _create(
        cls, directory: Directory, file_bytes: int, identity: bytes | None, begin: tuple[int, int]
    ) -> "Segments":
        files = StreamFiles(directory, identity or os.urandom(16), file_bytes, [], writable=True)
        files.first = begin[0] // files.payload_bytes
        files.last = files.first - 1
        files.create_next()
        segments = cls(files, Slot(0, files.identity, *begin, *begin), (-1, 0))
        if files.first:
            # Only a slot says where the stream begins, if it does not begin with file 0.
            segments._write_watermark()
            segments.sync_watermark()
        return segments

    @classmethod
    def _recover(cls, directory: Directory, examined: Examined, missing: list[int]) -> "Segments":
        files = StreamFiles(
            directory,
            examined.identity,
            examined.file_bytes,
            examined.numbers,
            writable=True,
            listed=examined.listed,
        )
        segments = cls(files, examined.slot, examined.slot_place)
        segments._note(*examined.damage)
        segments._tip = segments._durable = repair(files, examined, missing)
        if segments.first_offset > segments.end_offset:
            # `advance` went past entries that were never durable, and are lost.
            segments._first = segments._tip
        files.pinned_from = segments.end_offset // files.payload_bytes - 1
        segments._write_watermark()
        segments.sync_watermark()
        return segments

    @property
    def path(self) -> str:
        """The directory."""
        return self._files.directory.path

    @property
    def identity(self) -> bytes:
        """Sixteen random bytes that tell this stream from all others."""
        return self._files.identity

    @property
    def file_bytes(self) -> int:
        """The size of each file."""
        return self._files.file_bytes

    @property
    def payload_bytes(self) -> int:
        """How much of the stream one file holds."""
        return self._payload_bytes

    @property
    def first_offset(self) -> int:
        """Where the stream begins: entries before it were dropped."""
        return self._first[0]

    @property
    def first_id(self) -> int:
        """The id of the entry at `first_offset`, 0 if not known."""
        return self._first[1]

    @property
    def durable_first_offset(self) -> int:
        """The first offset that survives a power cut: `advance` is durable up to it."""
        return self._durable_first

    @property
    def end_offset(self) -> int:
        """Where the next entry will begin."""
        return self._tip[0]

    @property
    def next_id(self) -> int:
        """The id that the next entry will have."""
        return self._tip[1]

    @property
    def durable_offset(self) -> int:
        """The watermark: every byte before it survives a power cut."""
        return self._durable[0]

    @property
    def durable_next_id(self) -> int:
        """The id of the first entry that is not yet durable."""
        return self._durable[1]

    @property
    def first_file_is_free(self) -> bool:
        """Whether the oldest file ends before the stream begins: `drop_before` can unlink it."""
        number = min(self._first[0] // self._payload_bytes, self._files.last)
        return self._files.first < number

    @property
    def quarantined(self) -> list[Quarantined]:
        """The damage that opening and reading found below the watermark, in stream order."""
        return sorted(self._quarantined.values())

    @property
    def free_bytes(self) -> int:
        """The room for appends in the files that exist, the reserve included."""
        return self._files.allocated_end - self._tip[0]

    def can_grow(self, size_bytes: int) -> bool:
        """Whether files for this much more can be made, as far as can be known beforehand."""
        if self._failed_to_grow:
            return False
        return self._files.directory.free_bytes() >= 2 * (size_bytes + self._files.file_bytes)

    @property
    def ahead_bytes(self) -> int:
        """How much room the background thread makes ahead; the appending thread may set it."""
        return self._ahead_bytes

    @ahead_bytes.setter
    def ahead_bytes(self, ahead_bytes: int) -> None:
        self._ahead_bytes = ahead_bytes
        if self._files.allocated_end < self._wanted_end():
            self._prepare_soon()

    @property
    def reserve_bytes(self) -> int:
        """The room kept back for appends with `reserved=True`; the appending thread may set it."""
        return self._reserve_bytes

    @reserve_bytes.setter
    def reserve_bytes(self, reserve_bytes: int) -> None:
        self._reserve_bytes = reserve_bytes
        self._fast_end = -1

    def append(
        self,
        parts: Sequence[bytes | memoryview],
        *,
        version: bytes,
        ttl_s: int = 0,
        reserved: bool = False,
    ) -> tuple[int, int]:
        """Writes one entry whose data is the parts joined; returns its id and its data's offset.

        It is durable after the next `sync`. Raises StoreFull, and writes nothing, if there is no
        room for it beside the reserve; InvalidField; JournalError if an earlier sync failed.
        """
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        return self._append_checked(data, version, ttl_s, reserved)

    def append_data(
        self, head: bytes, body: bytes, version: bytes, reserved: bool
    ) -> tuple[int, int]:
        """The fast path of `append`, for an entry of two parts without a time to live.

        The version is not checked.
        """
        start, entry_id = self._tip
        size = len(head) + len(body)
        end = start + HEADER_BYTES + size
        if end > self._fast_end or size > _JOIN_BYTES_MAX:
            return self._append_checked(head + body, version, 0, reserved)
        base = self._map_base
        self._map[start - base : end - base] = join(version, entry_id, head, body)
        # One assignment, after the bytes are there: a sync in another thread sees both or neither.
        self._tip = (end, entry_id + 1)
        return entry_id, start + HEADER_BYTES

    def _append_checked(
        self, data: bytes | memoryview, version: bytes, ttl_s: int, reserved: bool
    ) -> tuple[int, int]:
        """Appends with all checks: the entry may need room, cross a file's end, or be refused."""
        start, entry_id = self._tip
        header = pack_header(version, ttl_s, entry_id, data)
        end = start + HEADER_BYTES + len(data)
        self._make_room(end, reserved)
        self._files.write(start, header)
        self._files.write(start + HEADER_BYTES, data)
        self._tip = (end, entry_id + 1)
        self._enter_tail()
        return entry_id, start + HEADER_BYTES

    def unload(self) -> None:
        """Unmaps the pages of the last appends from this process; the system's cache keeps them."""
        self._files.get(self._tail).unload()

    def _enter_tail(self) -> None:
        """Lets `append` write to the file in which the stream now ends."""
        files = self._files
        tail = min(self._tip[0] // self._payload_bytes, files.last)
        if tail != self._tail:
            for number in range(self._tail if self._tail >= 0 else tail, tail):
                files.get(number).seal()
            self._map = files.get(tail).map()
            self._map_base = tail * self._payload_bytes - PAGE_BYTES
            self._tail = tail
        tail_end = (tail + 1) * self._payload_bytes
        self._fast_end = min(tail_end, files.allocated_end - self._reserve_bytes)
        if self._failure:
            # A sync may have failed since this append began.
            self._fast_end = -1
        elif files.allocated_end < self._wanted_end():
            self._prepare_soon()

    def _wanted_end(self) -> int:
        """The offset to which files should exist: one spare, or more if the reserve needs it."""
        tail_end = (self._tip[0] // self._payload_bytes + 1) * self._payload_bytes
        kept_back = max(self._reserve_bytes, self._ahead_bytes)
        ahead = max(self._payload_bytes, kept_back + self._payload_bytes // 2)
        return tail_end + ahead

    def ensure_room(self, size_bytes: int, reserved: bool) -> None:
        """Makes sure that an entry of this size fits; raises StoreFull if there is no room.

        For the appending thread, whose next append with `reserved=True` is then not refused.
        """
        end = self._tip[0] + HEADER_BYTES + size_bytes
        if end > self._fast_end:
            self._make_room(end, reserved)

    def _make_room(self, end: int, reserved: bool) -> None:
        self.require_usable()
        needed = end if reserved else end + self._reserve_bytes
        if needed > self._files.allocated_end:
            self._prepare(needed)
            # Making files ends early if a sync failed meanwhile.
            self.require_usable()

    def prepare(self) -> None:
        """Makes the spare files that are wanted; off the hot path, from any thread.

        Raises StoreFull if there is no room; appends go on until the reserve is reached.
        """
        self.require_usable()
        self._prepare(self._wanted_end())

    def _prepare(self, needed_end: int) -> None:
        with self._preparing:
            while self._files.allocated_end < needed_end and not self._failure:
                try:
                    self._files.create_next()
                    self._failed_to_grow = False
                except OSError as error:
                    self._failed_to_grow = True
                    name = name_of(self._files.last + 1)
                    why = f"{self.path}: cannot make {name}: {os.strerror(error.errno or 0)}"
                    kind = StoreFull if error.errno in _NO_ROOM else JournalError
                    raise kind(why) from error

    def _prepare_soon(self) -> None:
        if not self._background:
            self._prepare_quietly()
        elif self._preparer is None or not self._preparer.is_alive():
            preparer = threading.Thread(
                target=self._prepare_quietly, name="penstock-spare", daemon=True
            )
            # If the system has no thread to give now, the next append tries again.
            with contextlib.suppress(RuntimeError):
                preparer.start()
                self._preparer = preparer

    def _prepare_quietly(self) -> None:
        # The append that needs the room tries again, and raises what is wrong.
        with contextlib.suppress(PenstockError):
            self._prepare(self._wanted_end())

    def sync(self) -> int:
        """Makes durable all that was appended before this call; returns the durable offset.

        Raises JournalError if the disk refuses; from then on every append and sync does.
        """
        with self._syncing:
            self.require_usable()
            tip = self._tip
            end = tip[0]
            newest = self._watermark.slot
            if self._first != (newest.first_offset, newest.first_id):
                self._write_watermark()
            elif end == self._durable[0]:
                return end
            written_first = self._watermark.slot.first_offset
            self._sync_files(end)
            self._durable_first = written_first
            if tip != self._durable:
                self._durable = tip
                self._write_watermark()
                self._files.pinned_from = end // self._payload_bytes - 1
            return end

    def sync_watermark(self) -> None:
        """Makes the last written watermark itself durable, which the next sync would do."""
        with self._syncing:
            self.require_usable()
            if self._watermark.is_pending:
                written_first = self._watermark.slot.first_offset
                self._sync_files(self._durable[0])
                self._durable_first = written_first

    def publish(self) -> None:
        """Writes where the stream begins and how far it is durable, without a sync.

        Readers see it and it survives the process, but not a power cut.
        """
        with self._syncing:
            self.require_usable()
            self._write_watermark()

    def _sync_files(self, end: int) -> None:
        try:
            self._watermark.sync(self._durable[0], end)
        except JournalError as error:
            self._fail(str(error), error)

    def _write_watermark(self) -> None:
        """Writes where the stream begins and how far it is durable; durable after the next sync."""
        try:
            self._watermark.write(self._durable, self._first)
        except JournalError as error:
            self._fail(str(error), error)

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Returns bytes of the stream; raises InvalidField if it does not hold them all."""
        first = self._files.first * self._payload_bytes
        if offset < first or size_bytes < 0 or offset + size_bytes > self._tip[0]:
            raise InvalidField(
                f"{self.path}: the stream holds {first} to {self._tip[0]}, "
                f"not {size_bytes} bytes at {offset}"
            )
        return self._files.read(offset, size_bytes)

    def entries(
        self, start_offset: int | None = None, end: int | None = None
    ) -> Iterator[StoredEntry]:
        """Yields the entries that begin in [start_offset, end), both at the bounds of entries.

        Without bounds: all that are durable. An entry that fails a checksum is listed in
        `quarantined` and skipped; the entries behind it are still returned.
        """
        offset, entry_id = self._first
        if start_offset is not None and start_offset != offset:
            offset, entry_id = start_offset, 0
        stop = self._durable[0] if end is None else end
        for found in walk(self._files.scan, offset, entry_id, self._limit(stop), self._note):
            if found.offset >= stop:
                return
            yield found

    def _limit(self, stop: int) -> Limit:
        limit = self._durable if stop <= self._durable[0] else self._tip
        if limit[0] > self._files.allocated_end:
            return Limit(self._files.allocated_end, None)
        return Limit(*limit)

    def _note(self, *damage: Quarantined) -> None:
        for found in damage:
            self._quarantined[found.offset, found.why] = found

    def advance(self, offset: int, entry_id: int | None = None) -> None:
        """Lets the stream begin at the entry at `offset`; durable after the next `sync`.

        `entry_id` is that entry's id, read from it if not given. Files stay until `drop_before`.
        """
        if not self._first[0] <= offset <= self._tip[0]:
            raise InvalidField(
                f"{self.path}: the stream holds {self._first[0]} to {self._tip[0]}, not {offset}"
            )
        self._first = (offset, self._id_at(offset) if entry_id is None else entry_id)

    def _id_at(self, offset: int) -> int:
        end, next_id = self._tip
        if offset == end:
            return next_id
        header = unpack_header(self._files.scan(offset, HEADER_BYTES))
        return header.entry_id if header else 0

    def drop_before(self, offset: int, *, archive: str | os.PathLike[str] | None = None) -> int:
        """Lets the stream begin at `offset` or later; returns how many files it unlinks before it.

        With `archive` they are first kept in that directory. The new beginning is durable before
        any file is unlinked. Raises JournalError, StoreFull or InvalidField, with nothing dropped.
        """
        with self._syncing:
            self.require_usable()
            before = self._first
            if offset > before[0]:
                self.advance(offset)
            offset = self._first[0]
            if offset > self._durable[0]:
                self.sync()
            number = min(offset // self._payload_bytes, self._files.last)
            dropped = [n for n in numbers_in(self._files.directory) if n < number]
            if not dropped:
                return 0
            try:
                if archive is not None:
                    # `_archive` overwrites slots: the newest durable one must be in another file.
                    self.sync_watermark()
                    self._archive(dropped, os.fspath(archive))
            except OSError as error:
                self._first = before
                kind = StoreFull if error.errno in _NO_ROOM else JournalError
                raise kind(f"{os.fspath(archive or '')}: cannot archive: {error}") from error
            # Twice, for both slots: after a torn write the older slot counts, and the stream must
            # not begin in a file that is unlinked.
            for _ in range(2):
                self._write_watermark()
                self.sync_watermark()
            self._files.first = number
            try:
                self._files.write_list()
                self._files.remove(dropped)
            except OSError as error:
                raise JournalError(f"{self.path}: cannot drop a file: {error}") from error
            return len(dropped)

    def _archive(self, numbers: list[int], to: str) -> None:
        """Keeps files in `to`, each with the current watermark in its first slot."""
        at = SLOT_OFFSETS[0]
        for number in numbers:
            file = self._files.get(number)
            file.map()[at : at + SLOT_BYTES] = pack_slot(self._watermark.slot)
            file.sync()
            self._files.directory.archive(name_of(number), to)

    def close(self) -> None:
        """Syncs and closes the files. After a failed sync only closes them."""
        try:
            if not self._failure:
                self.sync()
                self.sync_watermark()
        finally:
            self._failure = self._failure or "it was closed"
            self._fast_end = -1
            if self._preparer is not None:
                self._preparer.join()
            self._files.close()

    def start_over(self) -> None:
        """In the child of a fork: refuses all writes, because the parent is the stream's writer."""
        self._failure = "it was opened by the process that forked this one; open it here again"
        self._fast_end = -1
        self._syncing = threading.RLock()
        self._preparing = threading.Lock()
        # This copy of the descriptor would keep the lock after the parent has released it.
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def require_usable(self) -> None:
        """Raises JournalError if the stream can no longer be written."""
        if self._failure:
            raise JournalError(f"{self.path}: {self._failure}")

    def _fail(self, why: str, error: JournalError) -> NoReturn:
        """Stops for good: after a failed sync the system may have discarded the bytes."""
        self._failure = why
        self._fast_end = -1
        raise JournalError(f"{self.path}: {why}") from error


def _unusable(path: str, error: OSError) -> PenstockError:
    if isinstance(error, BlockingIOError):
        return StoreInUse(f"{path}: {error.strerror}")
    if os.path.islink(path):
        return StoreUnusable(f"{path}: is a symbolic link")
    if os.path.lexists(path) and not os.path.isdir(path):
        return StoreUnusable(f"{path}: is not a directory")
    return StoreUnusable(f"{path}: cannot be used: {error.strerror or error}")
