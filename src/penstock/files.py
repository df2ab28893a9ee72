"""Opens files that another user of this machine may have prepared, and refuses those.

Penstock opens no path in another way; `tools/tidy.py` checks that, and tools/opened_files.txt has
the exceptions. There are two kinds of paths:

- What a person names: a store, a lake, the directory of a cluster, a configuration. `check_named`
  refuses one that belongs to another user. It may be a link of this user or of root.
- What is in such a directory, as `daemon/pid`: `open_in` follows no link on the way, opens regular
  files and directories only, and refuses what belongs to somebody else than this user, root or the
  owner of the directory that was named. What may be made there must not have a second name either:
  writing through a hard link would change a file elsewhere.

New files and directories are for this user only, unless a mode is given. All of these raise OSError
with a reason for people in `strerror`, and have changed nothing then.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, Final

Path = str | os.PathLike[str]

_ROOT: Final = 0
# Said where a person may allow a store of another user.
ALLOWED_BY: Final = ", or say --insecure-other-owner (in a URL: other_owner=1)"
# A file with one path, or one JSON object of a few fields, is far smaller.
SMALL_BYTES_MAX: Final = 4096
# A directory that may only be searched can be opened by this.
_SEARCH: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY
# What a shell makes of <(COMMAND): a pipe that this process was given.
_OWN_DESCRIPTORS: Final = ("/dev/fd/", "/proc/self/fd/", "/dev/stdin")
_SECRET_BYTES_MAX: Final = 64 * 1024
_KINDS: Final = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFSOCK: "a socket",
}


class OtherOwner(PermissionError):
    """The path belongs to another user."""


def check_named(path: Path, *, other_owner: bool = False) -> None:
    """Refuses a path that belongs to another user; it may also be missing.

    Root is accepted: root can change everything anyway, and mount points often belong to root.
    With `other_owner` every owner is.
    """
    for look in (os.lstat, os.stat):
        try:
            uid = look(path).st_uid
        except (FileNotFoundError, NotADirectoryError):
            return
        if not other_owner:
            _check_owner(uid, {os.geteuid(), _ROOT}, "")


def open_named(path: Path, *, other_owner: bool = False) -> BinaryIO:
    """Opens a regular file that a person named, to read it."""
    if os.fsdecode(path).startswith(_OWN_DESCRIPTORS):
        return open(path, "rb")
    check_named(path, other_owner=other_owner)
    # Before opening: to open a device can act on it, and to open a FIFO blocks.
    _check_kind(_name(path), os.stat(path), os.O_RDONLY)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        about = os.fstat(fd)
        _check_kind(_name(path), about, os.O_RDONLY)
        if not other_owner:
            _check_owner(about.st_uid, {os.geteuid(), _ROOT}, "")
    except BaseException:
        os.close(fd)
        raise
    return os.fdopen(fd, "rb")


def read_named(path: Path, size_max: int, *, other_owner: bool = False) -> bytes:
    """The content of a regular file that a person named."""
    with open_named(path, other_owner=other_owner) as file:
        return _read(file, size_max, path)


def read_secret(path: Path) -> str:
    """The text in a file that a person named, without the white space around it.

    Raises ValueError, too, if it is not UTF-8.
    """
    return read_named(path, _SECRET_BYTES_MAX).decode().strip()


def open_in(directory: Path | int, name: str, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Opens a file in a directory that was named, or with O_DIRECTORY another directory.

    `name` may have slashes. `directory` may be a descriptor.
    """
    if isinstance(directory, int):
        opened = os.dup(directory)
    else:
        opened = os.open(directory, _SEARCH | os.O_CLOEXEC)
    try:
        owners = {os.geteuid(), _ROOT, os.fstat(opened).st_uid}
        *between, last = name.split("/")
        for each in between:
            outer = opened
            opened = _open_at(outer, each, _SEARCH, 0, owners)
            os.close(outer)
        return _open_at(opened, last, flags, mode, owners)
    finally:
        os.close(opened)


def read_in(directory: Path | int, name: str, size_max: int = SMALL_BYTES_MAX) -> bytes:
    """The content of a file in a directory that was named."""
    with os.fdopen(open_in(directory, name), "rb") as file:
        return _read(file, size_max, name)


def write_in(
    directory: Path | int, name: str, data: bytes, *, mode: int = 0o600, durable: bool = True
) -> None:
    """Writes a file completely, or not at all; what had the name before is replaced."""
    *between, last = name.split("/")
    draft = f".{last}.{os.getpid()}"
    with _opened_in(directory, "/".join(between)) as fd:
        with suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=fd)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with os.fdopen(open_in(fd, draft, flags, mode), "wb") as file:
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(draft, last, src_dir_fd=fd, dst_dir_fd=fd)
            if durable:
                os.fsync(fd)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft, dir_fd=fd)
            raise


def make_directory_in(directory: Path | int, name: str, mode: int = 0o700) -> None:
    """Makes a directory in one that was named; one that is there must be as `open_in` wants it."""
    *between, last = name.split("/")
    with _opened_in(directory, "/".join(between)) as fd:
        try:
            os.mkdir(last, mode, dir_fd=fd)
        except FileExistsError:
            os.close(open_in(fd, last, os.O_RDONLY | os.O_DIRECTORY))
        else:
            os.fsync(fd)


def make_directories(path: Path, mode: int = 0o700) -> list[str]:
    """Makes a directory that a person named and its missing parents, durably; returns those made.

    One that is there is not looked at: `check_named` does that.
    """
    missing = os.path.abspath(path)
    wanted = []
    while not os.path.lexists(missing):
        wanted.append(missing)
        missing = os.path.dirname(missing)
    made: list[str] = []
    try:
        for each in reversed(wanted):
            with suppress(FileExistsError):
                os.mkdir(each, mode)
                made.append(each)
                sync_directory(os.path.dirname(each))
    except BaseException:
        for each in reversed(made):
            with suppress(OSError):
                os.rmdir(each)
        raise
    return made


def remove_in(directory: Path | int, name: str) -> bool:
    """Removes a file, or a link itself, in a directory that was named; False if there is none."""
    *between, last = name.split("/")
    try:
        with _opened_in(directory, "/".join(between)) as fd:
            os.unlink(last, dir_fd=fd)
    except FileNotFoundError:
        return False
    return True


def open_directory(path: Path, *, follow: bool = True) -> int:
    """Opens a directory that was named, or that only is read; not through a link, if told so."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    return os.open(path, flags if follow else flags | os.O_NOFOLLOW)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    fd = open_directory(path)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _opened_in(directory: Path | int, between: str) -> Iterator[int]:
    if between:
        fd = open_in(directory, between, os.O_RDONLY | os.O_DIRECTORY)
    else:
        fd = os.dup(directory) if isinstance(directory, int) else open_directory(directory)
    try:
        yield fd
    finally:
        os.close(fd)


def _open_at(directory: int, name: str, flags: int, mode: int, owners: set[int]) -> int:
    if not flags & os.O_EXCL:
        with suppress(FileNotFoundError):
            # Before opening: to open a device can act on it, and to open a FIFO blocks.
            _check(name, os.stat(name, dir_fd=directory, follow_symlinks=False), flags, owners)
    # Truncated only after it was checked.
    opening = (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    fd = os.open(name, opening, mode, dir_fd=directory)
    try:
        _check(name, os.fstat(fd), flags, owners)
        if flags & os.O_TRUNC:
            os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(name: str, about: os.stat_result, flags: int, owners: set[int]) -> None:
    _check_kind(name, about, flags)
    _check_owner(about.st_uid, owners, f"{name} ")
    if flags & os.O_CREAT and about.st_nlink > 1:
        raise OSError(errno.EMLINK, f"{name} has another name as well (a hard link); remove it")


def _check_kind(name: str, about: os.stat_result, flags: int) -> None:
    found = stat.S_IFMT(about.st_mode)
    wanted = stat.S_IFDIR if flags & os.O_DIRECTORY else stat.S_IFREG
    if found != wanted:
        kind = _KINDS.get(found, "a device")
        what = "a directory" if wanted == stat.S_IFDIR else "a regular file"
        # Not NotADirectoryError for a link, which for some callers means that nothing is there.
        number = errno.ENOTDIR if found == stat.S_IFREG else errno.EINVAL
        raise OSError(number, f"{name} is {kind}, not {what}")


def _check_owner(uid: int, owners: set[int], subject: str) -> None:
    if uid not in owners:
        raise OtherOwner(
            errno.EPERM,
            f"{subject}belongs to user {uid}, and this process runs as user {os.geteuid()}; "
            f"run it as user {uid}",
        )


def _read(file: BinaryIO, size_max: int, path: Path) -> bytes:
    content = file.read(size_max + 1)
    if len(content) > size_max:
        raise OSError(errno.EFBIG, f"{_name(path)} is larger than {size_max} bytes")
    return content


def _name(path: Path) -> str:
    return os.fsdecode(os.path.basename(path))
