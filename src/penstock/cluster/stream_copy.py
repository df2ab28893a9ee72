"""A local copy of a shard's stream, from which the bodies of messages are read.

It is a cache: everything in it is in the replicated log. So nothing is synced, and the files that a
crash leaves are removed when the directory is used again. `FileCopy` keeps the bodies out of
memory; `MemoryCopy` is for simulations and tests.
"""

import os
from bisect import bisect_right
from pathlib import Path
from typing import Final, Protocol

from penstock.errors import CorruptEntry, JournalError

FILE_BYTES: Final = 64 * 1024 * 1024


class StreamCopy(Protocol):
    """A section of a stream of bytes: data is added at its end and dropped at its beginning."""

    first_position: int
    end_position: int

    def append(self, data: bytes) -> None:
        """Adds bytes at the end. Raises JournalError."""
        ...

    def read(self, position: int, size_bytes: int) -> bytes:
        """Bytes of the stream. Raises CorruptEntry if the copy does not have them, JournalError."""
        ...

    def drop_before(self, position: int) -> None:
        """Drops what is before this position."""
        ...

    def close(self) -> None:
        """Removes the copy."""
        ...


class MemoryCopy:
    """The copy in memory."""

    def __init__(self, first_position: int = 0) -> None:
        self.first_position = self.end_position = first_position
        self._starts: list[int] = []
        self._parts: list[bytes] = []

    def append(self, data: bytes) -> None:
        self._starts.append(self.end_position)
        self._parts.append(data)
        self.end_position += len(data)

    def read(self, position: int, size_bytes: int) -> bytes:
        index = bisect_right(self._starts, position) - 1
        if index < 0 or position + size_bytes > self.end_position:
            raise _missing(position)
        begin = position - self._starts[index]
        found = self._parts[index][begin : begin + size_bytes]
        while len(found) < size_bytes:
            index += 1
            found += self._parts[index][: size_bytes - len(found)]
        return found

    def drop_before(self, position: int) -> None:
        count = max(0, bisect_right(self._starts, position) - 1)
        del self._starts[:count]
        del self._parts[:count]
        self.first_position = max(self.first_position, position)

    def close(self) -> None:
        self._starts.clear()
        self._parts.clear()


class FileCopy:
    """The copy in files of one size, named by their order in the stream."""

    def __init__(self, directory: Path, first_position: int = 0) -> None:
        """Creates the directory, and removes earlier files from it. Raises JournalError."""
        self.first_position = self.end_position = first_position
        self._directory = directory
        self._files: dict[int, int] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            for left in directory.glob("part-*"):
                left.unlink()
        except OSError as error:
            raise _unusable(directory, error) from error

    def append(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                index, at = divmod(self.end_position, FILE_BYTES)
                size = min(len(view), FILE_BYTES - at)
                written = os.pwrite(self._file(index), view[:size], at)
                self.end_position += written
                view = view[written:]
        except OSError as error:
            raise _unusable(self._directory, error) from error

    def read(self, position: int, size_bytes: int) -> bytes:
        if position < self.first_position or position + size_bytes > self.end_position:
            raise _missing(position)
        found = b""
        try:
            while len(found) < size_bytes:
                index, at = divmod(position + len(found), FILE_BYTES)
                size = min(size_bytes - len(found), FILE_BYTES - at)
                part = os.pread(self._file(index), size, at)
                if not part:
                    raise _missing(position)
                found += part
        except OSError as error:
            raise _unusable(self._directory, error) from error
        return found

    def _file(self, index: int) -> int:
        descriptor = self._files.get(index)
        if descriptor is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self._directory / f"part-{index:012x}", flags, 0o600)
            self._files[index] = descriptor
        return descriptor

    def drop_before(self, position: int) -> None:
        self.first_position = max(self.first_position, position)
        for index in [each for each in self._files if each < position // FILE_BYTES]:
            self._remove(index)

    def close(self) -> None:
        for index in list(self._files):
            self._remove(index)

    def _remove(self, index: int) -> None:
        os.close(self._files.pop(index))
        (self._directory / f"part-{index:012x}").unlink(missing_ok=True)


def _missing(position: int) -> CorruptEntry:
    return CorruptEntry(f"the local copy of the stream has nothing at {position}")


def _unusable(directory: Path, error: OSError) -> JournalError:
    return JournalError(f"{directory}: the local copy cannot be used: {error.strerror}")
