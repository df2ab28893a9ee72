"""The files of one stream: from a stream offset to a file and a place in it, and back.

File n holds the stream's bytes from n x P to (n + 1) x P, where P is the file's size less its
header page. Files are opened when first needed; only so many are kept open, except those not yet
wholly durable, which stay open until they are.
"""

import contextlib
import errno
import re
import threading
from collections.abc import Iterator

from penstock.errors import JournalError, UnavailableError
from penstock.journal.fileheader import FORMAT, PAGE_BYTES, FileHeader, pack_page
from penstock.journal.manifest import FileList, Manifest
from penstock.journal.storage import Directory, File

_NAME = re.compile(r"(\d{12})\.seg")
_DRAFT = re.compile(r"\d{12}\.seg\.new")
_OPEN_FILES_MAX = 64


def name_of(number: int) -> str:
    """Return the name of the file with this number."""
    return f"{number:012d}.seg"


def numbers_in(directory: Directory) -> list[int]:
    """Return the numbers of the segment files in the directory, lowest first."""
    return sorted(int(match[1]) for match in map(_NAME.fullmatch, directory.names()) if match)


def drafts_in(directory: Directory) -> list[str]:
    """Return the names of files whose making was interrupted."""
    return [name for name in directory.names() if _DRAFT.fullmatch(name)]


class Files:
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

    def pieces(self, offset: int, size_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield (file number, place in the file, size) for a stretch of the stream."""
        while size_bytes > 0:
            number, within = divmod(offset, self.payload_bytes)
            size = min(size_bytes, self.payload_bytes - within)
            yield number, PAGE_BYTES + within, size
            offset += size
            size_bytes -= size

    def get(self, number: int) -> File:
        """Return an open file; raise FileNotFoundError if it is not there."""
        return self._open.get(number) or self._open_file(number)

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Return bytes through the maps."""
        number, within = divmod(offset, self.payload_bytes)
        if within + size_bytes > self.payload_bytes:
            return b"".join(
                self._read_piece(number, at, size)
                for number, at, size in self.pieces(offset, size_bytes)
            )
        return self._read_piece(number, PAGE_BYTES + within, size_bytes)

    def scan(self, offset: int, size_bytes: int) -> bytes:
        """Return bytes without the maps, zeroes where a file is missing, short or unreadable."""
        size_bytes = min(size_bytes, self.allocated_end - offset)
        return b"".join(
            self._scan_piece(number, at, size)
            for number, at, size in self.pieces(offset, size_bytes)
        )

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write into the maps; not durable."""
        done = 0
        for number, at, size in self.pieces(offset, len(data)):
            self.get(number).map()[at : at + size] = data[done : done + size]
            done += size

    def create_next(self) -> None:
        """Make the next file and list it, durably; raise OSError if it cannot be."""
        number = self.last + 1
        # Room for this one among the open files: two descriptors each, one of them the map's.
        self._let_go(_OPEN_FILES_MAX - 1)
        file = self.create(number)
        try:
            self._manifest.write(self.first, number)
        except OSError:
            # Not listed, so nothing may be appended to it; the next attempt makes it again.
            file.close()
            with contextlib.suppress(OSError):
                self.directory.remove(name_of(number))
            raise
        self._open[number] = file
        self.last = number

    def create(self, number: int) -> File:
        """Make a file that holds nothing yet, durably; raise OSError if it cannot be."""
        header = FileHeader(
            FORMAT, number, number * self.payload_bytes, self.file_bytes, self.identity
        )
        return self.directory.create(name_of(number), self.file_bytes, pack_page(header))

    def write_list(self) -> None:
        """List the files from `first` to `last`, durably: before any other is unlinked."""
        self._manifest.write(self.first, self.last)

    def remove(self, numbers: list[int]) -> None:
        """Unlink files, durably. The caller has moved `first` or `last` and listed it before."""
        for number in numbers:
            self.directory.remove(name_of(number))
            # Not closed: a reader may be in it. The last to let go of it closes it.
            self._open.pop(number, None)
        self.directory.sync()

    def close(self) -> None:
        """Let go of everything, the lock included."""
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
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise UnavailableError(
                    f"{self.directory.path}: cannot open {name_of(number)}: {error.strerror}"
                ) from error
            raise JournalError(
                f"{self.directory.path}: {name_of(number)} was dropped or cannot be read"
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
        """Read block by block around a bad sector: the entries beside it are still good."""
        found = bytearray()
        while size > 0:
            block = min(PAGE_BYTES - at % PAGE_BYTES, size)
            try:
                found += file.read(at, block).ljust(block, b"\0")
            except OSError:
                found += bytes(block)
            at += block
            size -= block
        return bytes(found)

    def _open_file(self, number: int) -> File:
        with self._opening:
            if number in self._open:
                return self._open[number]
            try:
                file = self.directory.open(name_of(number), writable=self._writable)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                self._let_go(0)
                file = self._open_again(number)
            self._let_go(_OPEN_FILES_MAX - 1)
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

    def _let_go(self, keep: int) -> None:
        """Forget open files, the longest open first, until `keep` are left that may be."""
        # `list` is one step: another thread may add a file meanwhile.
        free = [number for number in list(self._open) if number < self.pinned_from]
        for number in free[: max(0, len(free) - keep)]:
            self._open.pop(number, None)
