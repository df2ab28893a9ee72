"""Reads a journal beside its writer: entries and events up to the durable watermark.

It takes no lock and changes nothing. With an archive directory, even an empty one, reading begins
at the oldest file in either directory: an entry that begins in an archived file may end in one that
is not archived yet.

Entries that fail a checksum are skipped and listed in `damage`; those behind them are still read.
To follow the writer, a program reads to the end, calls `refresh`, and reads on from `position`.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple, Self

import msgspec

from penstock.core.events import AnyEvent
from penstock.errors import CorruptEntry, InvalidField, JournalError, StoreUnusable
from penstock.journal import codec
from penstock.journal.disk import OsStorage, Storage
from penstock.journal.entry import StoredEntry
from penstock.journal.header_page import Slot
from penstock.journal.loss import Loss
from penstock.journal.recovery import Examined, examine, newest_slot
from penstock.journal.scan import Limit, Quarantined, find_first, valid_end, walk
from penstock.journal.stream_files import StreamFiles, name_of, numbers_in


class JournaledEvent(NamedTuple):
    """An event with the id and the offset of its entry, and the place of its content.

    `shard` is the shard whose event it is, and `term` the term of the owner that wrote it.
    """

    entry_id: int
    offset: int
    event: AnyEvent
    place: int
    shard: int = 0
    term: int = 0


class JournalReader:
    """The entries of a stream, and of its archive if one is given."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        archive: str | os.PathLike[str] | None = None,
        storage: Storage | None = None,
        known_end: int = 0,
    ) -> None:
        """Raises StoreUnusable if there is no stream, or the archive is another stream's.

        `known_end` is an offset that the stream is known to have reached, from a snapshot.
        """
        self._known_end = known_end
        self._storage = storage or OsStorage()
        self._archive_path = None if archive is None else os.fspath(archive)
        self._archive: StreamFiles | None = None
        self._noted: dict[tuple[int, str], Quarantined] = {}
        with contextlib.ExitStack() as undo:
            self._journal, examined = _open(self._storage, os.fspath(directory))
            undo.callback(self.close)
            self._slot = examined.slot
            self._note(*examined.damage)
            self._find_archive()
            self._first = self._find_first()
            self.position, self._position_id = self._first
            undo.pop_all()

    def _find_archive(self) -> None:
        """Opens the archive once it has files: the writer makes it when it first drops one."""
        path = self._archive_path
        if self._archive is None and path is not None and _holds_files(self._storage, path):
            files, examined = _open(self._storage, path)
            if examined.identity != self.identity:
                files.close()
                raise StoreUnusable(f"{path}: is the archive of another journal")
            self._archive = files
            self._note(*examined.damage)

    @property
    def path(self) -> str:
        """The journal's directory."""
        return self._journal.directory.path

    @property
    def identity(self) -> bytes:
        """Sixteen random bytes that tell this stream from all others."""
        return self._journal.identity

    @property
    def payload_bytes(self) -> int:
        """How much of the stream one file holds."""
        return self._journal.payload_bytes

    @property
    def file_bytes(self) -> int:
        """The size of each segment file."""
        return self._journal.file_bytes

    @property
    def first_offset(self) -> int:
        """Where the oldest entry begins that can still be read."""
        return self._first[0]

    @property
    def first_id(self) -> int:
        """The id of the entry at `first_offset`, 0 if not known."""
        return self._first[1]

    @property
    def durable_offset(self) -> int:
        """The watermark: where reading ends."""
        return self._slot.durable_offset

    @property
    def next_id(self) -> int:
        """The id of the entry that begins, or will begin, at the watermark."""
        return self._slot.next_id

    def written_end(self) -> tuple[int, int]:
        """Where the whole entries end that the writer has written, and the id that follows.

        Those behind the watermark are not durable yet, and a power cut may remove them.
        """
        slot = self._slot
        return valid_end(self._scan, slot.durable_offset, slot.next_id, self.held_end)

    @property
    def held_end(self) -> int:
        """Where the newest file ends: an archive alone ends before the watermark."""
        return self._journal.allocated_end

    @property
    def file_numbers(self) -> list[int]:
        """The numbers of the files that exist, archived or not, each once."""
        held = set(numbers_in(self._journal.directory))
        if self._archive is not None:
            held |= set(numbers_in(self._archive.directory))
        return sorted(held)

    def loss(self) -> Loss | None:
        """What the journal must have and has not; None if nothing is missing."""
        loss: Loss | None = None
        for _ in range(2):
            # Twice: a writer may have made or removed spare files while this was found out.
            examined = examine(self._journal.directory)
            loss = None if examined is None else examined.loss(self._known_end)
            if not loss:
                return None
        return loss

    @property
    def damage(self) -> list[Quarantined]:
        """The damage that opening and reading found, in stream order."""
        return sorted(self._noted.values())

    def writer_offset(self) -> int:
        """The watermark as the writer has it now; any thread may ask, and reading goes on."""
        return self._newest_slot().durable_offset

    def _newest_slot(self) -> Slot:
        known = self._slot
        from_number = known.durable_offset // self.payload_bytes
        slot = newest_slot(self._journal.directory, from_number, self.identity)
        return slot if slot is not None and slot.serial > known.serial else known

    def refresh(self) -> int:
        """Reads how far the writer has come; returns the new watermark."""
        self._slot = self._newest_slot()
        for files in (self._journal, self._archive):
            if files is not None and (numbers := numbers_in(files.directory)):
                files.first, files.last = numbers[0], numbers[-1]
                files.pinned_from = numbers[-1] + 1
        return self.durable_offset

    def entries(self, start_offset: int | None = None) -> Iterator[StoredEntry]:
        """The entries from `start_offset`, which may be within an entry, to the watermark.

        Without it: from `position`, where the last reading ended. Raises JournalError if the
        writer drops a file meanwhile that has no archive to go to.
        """
        if start_offset is not None:
            self._seek(start_offset)
        limit = self._limit()
        start = self.position, self._position_id
        for entry in walk(self._scan, *start, limit, self._note):
            self.position, self._position_id = entry.end_offset, entry.entry_id + 1
            yield entry
        if limit.next_id is not None:
            self.position, self._position_id = limit.offset, limit.next_id

    def events(
        self, start_offset: int | None = None, bodies: bool = True
    ) -> Iterator[JournaledEvent]:
        """The events of those entries, in order; an entry of an unknown format is damage."""
        for entry in self.entries(start_offset):
            yield from self.decoded(entry, bodies)

    def decoded(self, entry: StoredEntry, bodies: bool = True) -> list[JournaledEvent]:
        """The events of one entry; none if it is damaged or of a format unknown here."""
        decoded = self.plain(entry, bodies)
        if not decoded:
            return []
        shard, term = codec.read_owner(entry.data)
        return [
            JournaledEvent(entry.entry_id, entry.offset, event, place, shard, term)
            for event, place in decoded
        ]

    def plain(self, entry: StoredEntry, bodies: bool = True) -> list[tuple[AnyEvent, int]]:
        """The same, each event with its place alone."""
        why = f"entry is of version {entry.version!r}, which is unknown here"
        if entry.version == codec.VERSION:
            try:
                return list(codec.decode(entry.data, entry.data_offset, bodies))
            except (CorruptEntry, msgspec.DecodeError, ValueError) as error:
                why = f"data cannot be read as events: {error}"
        self._note(Quarantined(entry.offset, entry.end_offset - entry.offset, why))
        return []

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Bytes of the stream as they are, zeroes where a file is missing; nothing is verified."""
        return self._scan(offset, size_bytes).ljust(size_bytes, b"\0")

    def _seek(self, offset: int) -> None:
        durable = self._slot.durable_offset
        if not self._first[0] <= offset <= durable:
            raise InvalidField(
                f"offset: {self.path} holds {self._first[0]} to {durable}, not {offset}"
            )
        if offset == self._first[0]:
            self.position, self._position_id = self._first
        elif offset == durable:
            self.position, self._position_id = durable, self._slot.next_id
        else:
            self.position, self._position_id = find_first(self._scan, offset, self._limit())

    def _find_first(self) -> tuple[int, int]:
        slot = self._slot
        oldest = self._journal.first
        if self._archive is not None:
            oldest = min(oldest, self._archive.first)
        if self._archive_path is None or oldest * self.payload_bytes >= slot.first_offset:
            return slot.first_offset, slot.first_id
        if oldest == 0:
            return 0, 1
        return find_first(self._scan, oldest * self.payload_bytes, self._limit())

    def _limit(self) -> Limit:
        """Where reading ends: an archive alone has no more than its files hold."""
        if self.held_end < self._slot.durable_offset:
            return Limit(self.held_end, None)
        return Limit(self._slot.durable_offset, self._slot.next_id)

    def _note(self, *damage: Quarantined) -> None:
        for found in damage:
            self._noted[found.offset, found.why] = found

    def _scan(self, offset: int, size_bytes: int) -> bytes:
        size_bytes = min(size_bytes, self._journal.allocated_end - offset)
        found = []
        while size_bytes > 0:
            number, within = divmod(offset, self.payload_bytes)
            size = min(size_bytes, self.payload_bytes - within)
            found.append(self._scan_file(number, offset, size))
            offset += size
            size_bytes -= size
        return b"".join(found)

    def _scan_file(self, number: int, offset: int, size: int) -> bytes:
        """Bytes of one file: the writer's own while it exists, else the archived one."""
        if number >= self._journal.first or self._archive_path is None:
            try:
                return self._journal.scan(offset, size)
            except JournalError:
                if not self._was_dropped(number):
                    return bytes(size)
                # If there is an archive, the file was put there before it was dropped.
                if self._archive_path is None:
                    raise JournalError(
                        f"{self.path}: {name_of(number)} was dropped before it was read; "
                        "a registered reader or an archive keeps files"
                    ) from None
        self._find_archive()
        if self._archive is None:
            return bytes(size)
        archived = numbers_in(self._archive.directory)
        self._archive.first, self._archive.last = archived[0], archived[-1]
        return self._archive.scan(offset, size).ljust(size, b"\0")

    def _was_dropped(self, number: int) -> bool:
        """Whether the writer let the stream begin behind this file; else the file is missing."""
        slot = newest_slot(self._journal.directory, 0, self.identity)
        return slot is not None and slot.first_offset >= (number + 1) * self.payload_bytes

    def close(self) -> None:
        """Closes the files."""
        self._journal.close()
        if self._archive is not None:
            self._archive.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _holds_files(storage: Storage, path: str) -> bool:
    """Whether the directory exists and has segment files: an archive may have none yet."""
    try:
        directory = storage.open(path, writable=False)
    except OSError:
        return False
    found = bool(numbers_in(directory))
    directory.close()
    return found


def _open(storage: Storage, path: str) -> tuple[StreamFiles, Examined]:
    try:
        directory = storage.open(path, writable=False)
    except OSError as error:
        raise StoreUnusable(f"{path}: cannot be read: {error.strerror}") from error
    try:
        examined = examine(directory)
        if examined is None:
            raise StoreUnusable(f"{path}: holds no segment files")
        files = StreamFiles(
            directory, examined.identity, examined.file_bytes, examined.numbers, writable=False
        )
    except OSError as error:
        directory.close()
        raise StoreUnusable(f"{path}: cannot be read: {error.strerror}") from error
    except BaseException:
        directory.close()
        raise
    return files, examined
