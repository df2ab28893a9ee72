"""The storage seam: the operations that segments need of a disk, and the real disk.

A simulated disk that loses power, fills up or fails an fsync implements the same methods in tests.

- `Storage` opens a directory. `Directory` makes, opens, removes and archives files by name.
- `File` is a preallocated file with a memory map. Writing into the map is not durable until `sync`.
- All methods raise OSError and nothing else; the caller turns it into a PenstockError.
"""

import contextlib
import errno
import fcntl
import mmap
import os
from typing import Protocol

from penstock.files import (
    check_named,
    make_directories,
    make_directory_in,
    open_directory,
    open_in,
)

_BLOCK_BYTES = 4096
_CHUNK_BYTES = 128 * 1024
_ZEROES = bytes(_CHUNK_BYTES)
_sync_data = getattr(os, "fdatasync", os.fsync)


class Map(Protocol):
    """A file's bytes, read and written as slices; `mmap.mmap` is one."""

    def __getitem__(self, key: slice, /) -> bytes: ...

    def __setitem__(self, key: slice, value: bytes | bytearray | memoryview, /) -> None: ...


class File(Protocol):
    """One file of fixed size."""

    size_bytes: int

    def map(self) -> Map:
        """Returns the file's bytes, mapped at the first call."""

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Returns bytes read without the map, so that a bad sector is an OSError, not a signal."""

    def zero(self, start: int, end: int) -> None:
        """Overwrites with zeroes; not durable until `sync`."""

    def sync(self) -> None:
        """Makes all that was written, through the map or not, durable."""

    def seal(self) -> None:
        """Marks the file as one that is only read from now on."""

    def unload(self) -> None:
        """Takes the pages out of this process's memory; they stay in the system's cache."""

    def close(self) -> None:
        """Closes the file."""


class Directory(Protocol):
    """The directory that holds a stream's files."""

    path: str

    def names(self) -> list[str]:
        """Returns the names of all files."""

    def create(self, name: str, size_bytes: int, head: bytes) -> File:
        """Makes a file that begins with `head` and is zero after it, written to its last block.

        It is durable, name included, when this returns; if this raises there is no such file.
        """

    def open(self, name: str, *, writable: bool) -> File:
        """Opens a file that exists."""

    def extend(self, name: str, size_bytes: int) -> None:
        """Extends a truncated file with zeroes to its full size."""

    def remove(self, name: str) -> None:
        """Unlinks a file; durable after `sync`."""

    def archive(self, name: str, to: str) -> None:
        """Keeps a file under the same name in the directory `to`, durably."""

    def free_bytes(self) -> int:
        """The free bytes that the file system reports for new files."""

    def sync(self) -> None:
        """Makes the names durable."""

    def close(self) -> None:
        """Closes the directory, which releases its lock."""


class Storage(Protocol):
    """Opens directories."""

    def open(self, path: str, *, writable: bool) -> Directory:
        """Opens a directory; for a writer makes it if it is missing, and locks it.

        Raises BlockingIOError if another writer has locked it.
        """


class OsFile:
    """A file of the operating system."""

    def __init__(self, fd: int, writable: bool) -> None:
        self._fd = fd
        self._writable = writable
        self._map: mmap.mmap | None = None
        self._sealed = not writable
        if writable:
            self._advise_random()
        self.size_bytes = os.fstat(fd).st_size

    def map(self) -> mmap.mmap:
        if self._map is None:
            access = mmap.PROT_READ | (mmap.PROT_WRITE if self._writable else 0)
            self._map = mmap.mmap(self._fd, self.size_bytes, mmap.MAP_SHARED, access)
            if not self._sealed and hasattr(mmap, "MADV_RANDOM"):
                self._map.madvise(mmap.MADV_RANDOM)
        return self._map

    def _advise_random(self) -> None:
        # Read-ahead would bring in large folios, and storing one byte into a mapped large folio
        # makes the next sync write all of it: a megabyte for each small entry.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, offset: int, size_bytes: int) -> bytes:
        return os.pread(self._fd, size_bytes, offset)

    def zero(self, start: int, end: int) -> None:
        # Block by block: a whole block is written without reading it first, and folios stay small.
        while start < end:
            size = min(_BLOCK_BYTES - start % _BLOCK_BYTES, end - start)
            os.pwrite(self._fd, _ZEROES[:size], start)
            start += size

    def sync(self) -> None:
        _sync_data(self._fd)

    def seal(self) -> None:
        self._sealed = True
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_NORMAL)
        if self._map is not None and hasattr(mmap, "MADV_NORMAL"):
            self._map.madvise(mmap.MADV_NORMAL)
        self.unload()

    def unload(self) -> None:
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            if self._map is not None:
                self._map.close()

    def __del__(self) -> None:
        # A reader may still use a file that was removed from the cache of open files. Closing it
        # with the last reference keeps its descriptor from being reused while it is read.
        self.close()


class OsDirectory:
    """A directory of the operating system; all names are resolved from its descriptor."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd

    def names(self) -> list[str]:
        return sorted(os.listdir(self._fd))

    def create(self, name: str, size_bytes: int, head: bytes) -> OsFile:
        _refuse_if_full(self._fd, size_bytes)
        draft = name + ".new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=self._fd)
        named = draft
        file: OsFile | None = None
        fd = open_in(self._fd, draft, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            _allocate(fd, 0, size_bytes)
            file = OsFile(fd, writable=True)
            _fill(file, head)
            os.fsync(fd)
            file.unload()
            os.rename(draft, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            named = name
            self.sync()
        except BaseException:
            if file is None:
                os.close(fd)
            else:
                file.close()
            with contextlib.suppress(OSError):
                os.unlink(named, dir_fd=self._fd)
            raise
        return file

    def open(self, name: str, *, writable: bool) -> OsFile:
        return OsFile(open_in(self._fd, name, os.O_RDWR if writable else os.O_RDONLY), writable)

    def extend(self, name: str, size_bytes: int) -> None:
        fd = open_in(self._fd, name, os.O_RDWR)
        try:
            size_now = os.fstat(fd).st_size
            if size_now < size_bytes:
                _allocate(fd, size_now, size_bytes - size_now)
                file = OsFile(os.dup(fd), writable=True)
                file.zero(size_now, size_bytes)
                file.close()
                os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self, name: str) -> None:
        os.unlink(name, dir_fd=self._fd)

    def archive(self, name: str, to: str) -> None:
        make_directories(to)
        # With `other_owner` both may belong to another user, but to the same one.
        check_named(to, other_owner=os.stat(to).st_uid == os.fstat(self._fd).st_uid)
        to_fd = open_directory(to)
        try:
            try:
                os.link(name, name, src_dir_fd=self._fd, dst_dir_fd=to_fd)
            except FileExistsError:
                self._refuse_if_other(name, to_fd)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                    raise
                self._copy(name, to_fd)
            os.fsync(to_fd)
        finally:
            os.close(to_fd)

    def free_bytes(self) -> int:
        found = os.fstatvfs(self._fd)
        return found.f_bavail * found.f_frsize

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()

    def _refuse_if_other(self, name: str, to_fd: int) -> None:
        """Accepts a copy left by an interrupted archive; raises FileExistsError otherwise."""
        ours = self.open(name, writable=False)
        theirs = OsFile(open_in(to_fd, name), writable=False)
        same = ours.size_bytes == theirs.size_bytes
        # The first 60 bytes identify the file and its stream; the slots behind them may differ.
        if not same or ours.read(0, 60) != theirs.read(0, 60):
            raise FileExistsError(errno.EEXIST, "the archive holds another file of that name")

    def _copy(self, name: str, to_fd: int) -> None:
        ours = self.open(name, writable=False)
        draft = name + ".new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=to_fd)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(open_in(to_fd, draft, flags), "wb") as copy:
            for offset in range(0, ours.size_bytes, _CHUNK_BYTES):
                copy.write(ours.read(offset, _CHUNK_BYTES))
            copy.flush()
            os.fsync(copy.fileno())
        os.rename(draft, name, src_dir_fd=to_fd, dst_dir_fd=to_fd)


class OsStorage:
    """The real disk."""

    def open(self, path: str, *, writable: bool) -> OsDirectory:
        if not writable:
            # Whose it is does not matter to a reader, but it must be the directory of this name.
            return OsDirectory(path, open_directory(path, follow=False))
        outer, name = os.path.split(os.path.abspath(path))
        make_directories(outer)
        make_directory_in(outer, name)
        fd = open_in(outer, name, os.O_DIRECTORY)
        try:
            # The directory itself is locked: no lock file can be left behind, and a directory
            # that is not a store is not changed.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = _lock_owner(fd)
            os.close(fd)
            raise BlockingIOError(errno.EWOULDBLOCK, f"in use by {owner}") from error
        except OSError:
            os.close(fd)
            raise
        return OsDirectory(path, fd)


def _refuse_if_full(fd: int, size_bytes: int) -> None:
    """Raises ENOSPC early: a fallocate that fails may first take all the free space."""
    room = os.fstatvfs(fd)
    if room.f_blocks and room.f_bavail * room.f_frsize < size_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _allocate(fd: int, offset: int, size_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, offset, size_bytes)
    else:
        os.ftruncate(fd, offset + size_bytes)


def _fill(file: OsFile, head: bytes) -> None:
    """Writes every block of a new file, so that a later sync has no extent to convert.

    It writes through the map and not with pwrite: each of some four thousand system calls would
    release the interpreter's lock and wait to get it back from a busy thread. It syncs in parts, so
    that a sync of the stream never waits for the whole file.
    """
    image = file.map()
    for start in range(0, file.size_bytes, _CHUNK_BYTES):
        size = min(_CHUNK_BYTES, file.size_bytes - start)
        image[start : start + size] = _ZEROES[:size]
        if start == 0:
            image[: len(head)] = head
        if start % (8 * _CHUNK_BYTES) == 0:
            file.sync()


def _lock_owner(fd: int) -> str:
    """Names the process that has locked the directory, if /proc/locks shows it."""
    about = os.fstat(fd)
    device = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
    with contextlib.suppress(OSError), open("/proc/locks", encoding="ascii") as locks:
        for line in locks:
            words = line.split()
            if "FLOCK" in words and device in words:
                return f"process {words[words.index(device) - 1]}"
    return "another process"
