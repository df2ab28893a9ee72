"""The files of one stream, read and written by stream offset.

File n holds the stream's bytes from n x P to (n + 1) x P, where P is the file's size less its
header page. A file is opened when it is first used. The number of open files is limited; files that
are not wholly durable yet do not count and stay open.
"""

import contextlib
import errno
import re
import threading
from collections.abc import Iterator

from penstock.errors import JournalError, UnavailableError
from penstock.journal.disk import Directory, File
from penstock.journal.header_page import FORMAT, PAGE_BYTES, FileHeader, pack_page
from penstock.journal.manifest import FileList, Manifest

_NAME = re.compile(r"(\d{12})\.seg")
_DRAFT = re.compile(r"\d{12}\.seg\.new")
_OPEN_FILES_MAX = 64
# Errors that a later attempt may not meet: the system lacks descriptors or memory now.
_TRANSIENT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR})


def name_of(number: int) -> str:
    """Returns the name of the file with this number."""
    return f"{number:012d}.seg"


def numbers_in(directory: Directory) -> list[int]:
    """Returns the numbers of the segment files in the directory, lowest first."""
    return sorted(int(match[1]) for match in map(_NAME.fullmatch, directory.names()) if match)


def drafts_in(directory: Directory) -> list[str]:
    """Returns the names of files whose creation was interrupted."""
    return [name for name in directory.names() if _DRAFT.fullmatch(name)]


class StreamFiles:
    """The open directory of a stream, read and written by stream offset."""

    def __init__(
        self,
        directory: Directory,
        identity: bytes,
        file_bytes: int,
        numbers: list[int],
        *,
        writable: bool,
        listed: FileList | None = None,
    ) -> None:
        self.directory = directory
        self.identity = identity
        self.file_bytes = file_bytes
        self.payload_bytes = file_bytes - PAGE_BYTES
        self.first = numbers[0] if numbers else 0
        self.last = numbers[-1] if numbers else -1
        self.pinned_from = 0 if writable else self.last + 1
        self._writable = writable
        self._manifest = Manifest(directory, identity, file_bytes, listed)
        self._open: dict[int, File] = {}
        self._opening = threading.Lock()

    @property
    def allocated_end(self) -> int:
        """The stream offset at which the last file ends."""
        return (self.last + 1) * self.payload_bytes

    @property
    def is_listed(self) -> bool:
        """Whether the manifest lists the files, durably."""
        return self._manifest.is_kept

    def pieces(self, offset: int, size_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Yields (file number, place in the file, size) for a range of the stream."""
        while size_bytes > 0:
            number, within = divmod(offset, self.payload_bytes)
            size = min(size_bytes, self.payload_bytes - within)
            yield number, PAGE_BYTES + within, size
            offset += size
            size_bytes -= size

    def get(self, number: int) -> File:
        """Returns an open file; raises FileNotFoundError if it does not exist."""
        return self._open.get(number) or self._open_file(number)

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Returns bytes through the maps.

        Raises UnavailableError if the system lacks descriptors or memory to open a file now, and
        JournalError if a file is missing or cannot be read.
        """
        number, within = divmod(offset, self.payload_bytes)
        if within + size_bytes > self.payload_bytes:
            return b"".join(
                self._read_piece(number, at, size)
                for number, at, size in self.pieces(offset, size_bytes)
            )
        return self._read_piece(number, PAGE_BYTES + within, size_bytes)

    def scan(self, offset: int, size_bytes: int) -> bytes:
        """Returns bytes without the maps, zeroes where a file is missing, short or unreadable."""
        size_bytes = min(size_bytes, self.allocated_end - offset)
        return b"".join(
            self._scan_piece(number, at, size)
            for number, at, size in self.pieces(offset, size_bytes)
        )

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Writes into the maps; not durable."""
        done = 0
        for number, at, size in self.pieces(offset, len(data)):
            self.get(number).map()[at : at + size] = data[done : done + size]
            done += size

    def create_next(self) -> None:
        """Creates the next file and lists it in the manifest, durably; raises OSError."""
        number = self.last + 1
        # Make room among the open files: each has two descriptors, one of them the map's.
        self._close_some(_OPEN_FILES_MAX - 1)
        file = self.create(number)
        try:
            self._manifest.write(self.first, number)
        except OSError:
            # Not listed, so nothing may be appended to it; the next attempt creates it again.
            file.close()
            with contextlib.suppress(OSError):
                self.directory.remove(name_of(number))
            raise
        self._open[number] = file
        self.last = number

    def create(self, number: int) -> File:
        """Creates a file with a header and no entries, durably; raises OSError."""
        header = FileHeader(
            FORMAT, number, number * self.payload_bytes, self.file_bytes, self.identity
        )
        return self.directory.create(name_of(number), self.file_bytes, pack_page(header))

    def write_list(self) -> None:
        """Lists the files from `first` to `last`, durably; call it before others are unlinked."""
        self._manifest.write(self.first, self.last)

    def remove(self, numbers: list[int]) -> None:
        """Unlinks files, durably; move `first` or `last` and call `write_list` before."""
        for number in numbers:
            self.directory.remove(name_of(number))
            # Not closed: a reader may be using it. It is closed with the last reference.
            self._open.pop(number, None)
        self.directory.sync()

    def close(self) -> None:
        """Closes the files and the directory, which releases its lock."""
        for file in self._open.values():
            file.close()
        self._open.clear()
        self.directory.close()

    def _read_piece(self, number: int, at: int, size: int) -> bytes:
        try:
            file = self.get(number)
            if file.size_bytes >= at + size:
                return file.map()[at : at + size]
            return self._scan_piece(number, at, size)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in _TRANSIENT:
                raise UnavailableError(
                    f"{self.directory.path}: cannot read {name_of(number)} now: {error.strerror}"
                ) from error
            raise JournalError(
                f"{self.directory.path}: {name_of(number)} is missing or cannot be read"
            ) from error

    def _scan_piece(self, number: int, at: int, size: int) -> bytes:
        try:
            file = self.get(number)
        except FileNotFoundError:
            if not self._writable:
                self.first = next(iter(numbers_in(self.directory)), number + 1)
            if number < self.first:
                raise JournalError(
                    f"{self.directory.path}: {name_of(number)} was dropped while it was read"
                ) from None
            return bytes(size)
        try:
            return file.read(at, size).ljust(size, b"\0")
        except OSError:
            return self._scan_blocks(file, at, size)

    def _scan_blocks(self, file: File, at: int, size: int) -> bytes:
        """Reads block by block, zeroes for a bad sector: the entries around it are readable."""
        data = bytearray()
        while size > 0:
            block = min(PAGE_BYTES - at % PAGE_BYTES, size)
            try:
                data += file.read(at, block).ljust(block, b"\0")
            except OSError:
                data += bytes(block)
            at += block
            size -= block
        return bytes(data)

    def _open_file(self, number: int) -> File:
        with self._opening:
            if number in self._open:
                return self._open[number]
            try:
                file = self.directory.open(name_of(number), writable=self._writable)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                self._close_some(0)
                file = self._open_again(number)
            self._close_some(_OPEN_FILES_MAX - 1)
            if number < self.pinned_from:
                file.seal()
            self._open[number] = file
            return file

    def _open_again(self, number: int) -> File:
        try:
            return self.directory.open(name_of(number), writable=self._writable)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise UnavailableError(
                f"{self.directory.path}: cannot open {name_of(number)}: {error.strerror}"
            ) from error

    def _close_some(self, keep: int) -> None:
        """Drops cached files, the oldest first, until `keep` of those not pinned are left."""
        # `list` copies atomically: another thread may add a file during the loop.
        free = [number for number in list(self._open) if number < self.pinned_from]
        for number in free[: max(0, len(free) - keep)]:
            self._open.pop(number, None)
