"""A backup of a store, taken beside its writer, and a store made of a backup.

    DIR/journal/       the journal's files, from its first entry to the end that it had
    DIR/snapshot-…     one snapshot, unless the journal is complete
    DIR/key            the key of the store's receipts
    DIR/sqs            the account and region of the store, if it was served
    DIR/backup         what this is (`BackupMark`); a store has the file `store` instead

Every push that was answered before the backup began is in it, whatever the durability: it ends
behind the last whole entry that the writer had written then, also if that is not synced yet. While
it is taken, a named reader keeps the files that are to be copied. Backups and stores are made in a
directory beside their place, verified as `penstock check` does, and renamed: one that has its name
is complete. `docs/formats/backup.md` has the rules for a restored store.
"""

import fcntl
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from penstock.errors import InvalidField, JournalError, StoreFull, StoreUnusable
from penstock.files import (
    check_named,
    make_directories,
    make_directory_in,
    open_directory,
    open_in,
    read_in,
    sync_directory,
    write_in,
)
from penstock.journal import reader_positions
from penstock.journal.disk import OsStorage
from penstock.journal.header_page import SLOT_BYTES, SLOT_OFFSETS, Slot, pack_slot
from penstock.journal.reader import JournalReader
from penstock.journal.snapshot import offset_of, read_snapshot, snapshot_paths
from penstock.journal.store import (
    BACKUP,
    FORMAT,
    check_format,
    is_backup,
    journal_path,
    make_key,
    open_reader,
    read_key,
)
from penstock.journal.stream_files import StreamFiles
from penstock.journal.verify import Finding, verify

_UNFINISHED: Final = ".unfinished"
_CHUNK_BYTES: Final = 1024 * 1024
_IDENTITY_BYTES: Final = 16
_ATTEMPTS_MAX: Final = 5
_READER: Final = "backup-"
# One process may take several backups at a time.
_numbers: Final = itertools.count(1)


class BackupMark(msgspec.Struct, frozen=True):
    """The file `backup`: when and of what it was taken, and which part of the stream it has."""

    taken_at_ms: int
    store: str
    identity: str
    first_offset: int
    end_offset: int
    format: int = 1


class MadeCopy(NamedTuple):
    """A backup or a restored store: what checking it found, and its size on the disk."""

    path: Path
    findings: list[Finding]
    size_bytes: int

    @property
    def damage(self) -> list[str]:
        """What is damaged in it, because it was damaged in what was copied."""
        return [each.text for each in self.findings if each.is_damage]


class _Range(NamedTuple):
    """A part of a stream: where it begins and ends, each with the id of the entry there."""

    first: tuple[int, int]
    end: tuple[int, int]


def back_up(store: Path, to: Path) -> MadeCopy:
    """Takes a backup of a store, which another process may be using, into a new directory.

    Raises StoreUnusable, StoreFull or JournalError; `to` does not exist then.
    """
    if is_backup(store) or not check_format(store):
        raise StoreUnusable(f"{store}: is not a Penstock store")
    if store.resolve() in to.resolve().parents:
        raise StoreUnusable(f"{to}: is within the store; a backup is a directory of its own")
    for attempt in range(_ATTEMPTS_MAX):
        with _draft(to, _is_new) as draft, _kept_files(store):
            try:
                taken_at_ms = _now_ms()
                copied, identity = _copy(store, draft)
            except JournalError:
                # The writer dropped a file just before the reader was registered.
                if attempt == _ATTEMPTS_MAX - 1:
                    raise
                continue
            mark = BackupMark(
                taken_at_ms,
                str(store.absolute()),
                identity.hex(),
                copied.first[0],
                copied.end[0],
            )
            write_in(draft, BACKUP, msgspec.json.encode(mark))
            return _finish(draft, to)
    raise AssertionError("unreachable")


def restore(backup: Path, to: Path, *, accept_loss: bool = False) -> MadeCopy:
    """Makes a store of a backup, in a directory that is new or empty.

    With `accept_loss` also of one that is damaged. Raises StoreUnusable or StoreFull; `to` is as
    it was then.
    """
    if not is_backup(backup):
        raise StoreUnusable(f"{backup}: is not a backup of a Penstock store")
    _is_empty(to)
    damage = [each.text for each in verify(str(backup)) if each.is_damage]
    if damage and not accept_loss:
        raise StoreUnusable(
            f"{backup}: is damaged: {'; '.join(damage[:3])}; take another backup, or restore what "
            "is left with --accept-loss"
        )
    with _draft(to, _is_empty) as draft:
        # A new identity and a new key: nothing that was given out since the backup, no receipt and
        # no id of a message, can mean something else here.
        identity = os.urandom(_IDENTITY_BYTES)
        _copy(backup, draft, identity)
        make_key(draft)
        write_in(draft, "store", FORMAT)
        return _finish(draft, to)


# The directory under its first name.


def _is_new(to: Path) -> None:
    """Raises StoreUnusable if there is something at this place."""
    if os.path.lexists(to):
        raise StoreUnusable(f"{to}: is there already; a backup is a new directory")


def _is_empty(to: Path) -> None:
    """Raises StoreUnusable if there is something at this place but an empty directory."""
    if os.path.lexists(to) and not (to.is_dir() and not to.is_symlink() and not any(to.iterdir())):
        raise StoreUnusable(
            f"{to}: is in use; a store is restored into a directory that is new or empty"
        )


@contextmanager
def _draft(to: Path, check_free: Callable[[Path], None]) -> Iterator[Path]:
    """A new directory beside `to`, removed unless it was renamed. Raises StoreUnusable, StoreFull.

    `check_free` raises StoreUnusable if `to` is not free.
    """
    check_free(to)
    draft = to.with_name(to.name + _UNFINISHED)
    try:
        fd = _locked(draft, to)
        try:
            # Until it was locked, another process may have finished its own.
            check_free(to)
            # What an interrupted backup has left.
            _clear(draft)
            yield draft
        finally:
            with suppress(OSError):
                # Once it was renamed, another process may have made one of this name.
                if _is_at(draft, fd):
                    _clear(draft)
                    draft.rmdir()
            os.close(fd)
    except OSError as error:
        raise StoreFull(f"{to}: cannot be made: {error.strerror or error}") from error


def _locked(draft: Path, to: Path) -> int:
    """Makes the directory and locks it; a descriptor of it. Raises StoreUnusable or OSError."""
    check_named(to.parent)
    make_directories(to.absolute().parent)
    make_directory_in(to.absolute().parent, draft.name)
    fd = open_directory(draft, follow=False)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another process may have given it the final name between the two.
        is_ours = _is_at(draft, fd)
    except BlockingIOError:
        is_ours = False
    if not is_ours:
        os.close(fd)
        raise StoreUnusable(f"{to}: another process is making it now")
    return fd


def _is_at(path: Path, fd: int) -> bool:
    """Whether the opened directory is the one of this name."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _clear(draft: Path) -> None:
    for each in draft.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        else:
            each.unlink()


def _finish(draft: Path, to: Path) -> MadeCopy:
    """Verifies the directory and gives it its name."""
    sync_directory(draft)
    findings = verify(str(draft))
    size_bytes = sum(each.stat().st_size for each in draft.rglob("*") if each.is_file())
    # Over an empty directory, but over nothing else.
    os.rename(draft, to)
    sync_directory(to.absolute().parent)
    return MadeCopy(to, findings, size_bytes)


# Copying.


@contextmanager
def _kept_files(store: Path) -> Iterator[None]:
    """While this lasts, the writer drops no file that the journal has now."""
    name = f"{_READER}{os.getpid()}-{_pid_namespace()}-{next(_numbers)}"
    for each in reader_positions.registered(store):
        if each.name.startswith(_READER) and _has_ended(each.name.removeprefix(_READER)):
            reader_positions.forget(store, each.name)
    try:
        with open_reader(store) as reader:
            reader_positions.register(store, name, reader.first_offset, _now_ms())
        yield
    finally:
        reader_positions.forget(store, name)


def _pid_namespace() -> int:
    """The number of the namespace in which this process has its number; 0 if there are none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _has_ended(name: str) -> bool:
    """Whether the process of a backup's reader is known to have ended.

    In another namespace, such as a container's, its number says nothing here.
    """
    pid, _, rest = name.partition("-")
    if rest.partition("-")[0] not in ("", str(_pid_namespace())):
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return True
    except PermissionError:
        return False
    return False


def _copy(source: Path, draft: Path, identity: bytes | None = None) -> tuple[_Range, bytes]:
    """Copies the key, the newest snapshot and the journal; returns the part and the identity.

    With an identity the copy is another stream, which the key does not belong to.
    """
    # The snapshot first: all that is in it is before the end of the journal that is read after it.
    snapshot_offset = _copy_snapshot(source, draft)
    with open_reader(source) as reader:
        found = _Range((reader.first_offset, reader.first_id), reader.written_end())
        has_start = found.first[0] == 0 or snapshot_offset is not None
        if not has_start or not found.first[0] <= (snapshot_offset or found.first[0]):
            raise JournalError(f"{source}: its journal moved on while it was copied; try again")
        if snapshot_offset is not None and snapshot_offset > found.end[0]:
            raise JournalError(f"{source}: a snapshot begins behind the end of the journal")
        _copy_stream(reader, journal_path(draft), identity or reader.identity, found)
        # Of a small file there is an old and a new version, and never a part of one.
        with suppress(FileNotFoundError):
            write_in(draft, "sqs", read_in(source, "sqs"))
        if identity is None:
            key = read_key(source)
            if key is not None:
                write_in(draft, "key", key)
        return found, identity or reader.identity


def _copy_snapshot(source: Path, draft: Path) -> int | None:
    """Copies the newest snapshot that is whole; returns the offset at which it begins."""
    for path in snapshot_paths(source):
        with suppress(FileNotFoundError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with (
                os.fdopen(open_in(source, path.name), "rb") as original,
                os.fdopen(open_in(draft, path.name, flags), "wb") as copy,
            ):
                shutil.copyfileobj(original, copy, _CHUNK_BYTES)
                copy.flush()
                os.fsync(copy.fileno())
            copied = draft / path.name
            if read_snapshot(copied) is not None:
                return offset_of(path)
            copied.unlink()
    return None


def _copy_stream(reader: JournalReader, to: Path, identity: bytes, part: _Range) -> None:
    """Writes a part of a stream as the files of a stream of its own, durably."""
    directory = OsStorage().open(str(to), writable=True)
    files = StreamFiles(directory, identity, reader.file_bytes, [], writable=True)
    try:
        payload_bytes = files.payload_bytes
        first, end = part.first[0], part.end[0]
        files.first = first // payload_bytes
        files.last = files.first - 1
        for number in range(files.first, max(files.first, (end - 1) // payload_bytes) + 1):
            files.create_next()
            for at in range(
                max(first, number * payload_bytes),
                min(end, (number + 1) * payload_bytes),
                _CHUNK_BYTES,
            ):
                size = min(_CHUNK_BYTES, end - at, (number + 1) * payload_bytes - at)
                files.write(at, reader.read(at, size))
            files.get(number).sync()
            files.pinned_from = number
        last = files.get(files.last)
        slot = Slot(1, identity, *part.end, *part.first, files.is_listed)
        last.map()[SLOT_OFFSETS[0] : SLOT_OFFSETS[0] + SLOT_BYTES] = pack_slot(slot)
        last.sync()
        directory.sync()
    finally:
        files.close()


def read_mark(backup: Path) -> BackupMark:
    """The file `backup` of a backup. Raises StoreUnusable."""
    try:
        with os.fdopen(open_in(backup, BACKUP), "rb") as file:
            return msgspec.json.decode(file.read(), type=BackupMark)
    except (OSError, msgspec.DecodeError) as error:
        raise StoreUnusable(f"{backup / BACKUP}: cannot be read: {error}") from error


def check_destination(to: str, what: str) -> Path:
    """A path that a person gave for something new. Raises InvalidField."""
    if not to or to.endswith(_UNFINISHED) or "\0" in to:
        raise InvalidField(f"{what}: {to!r} cannot be used; give the path of a new directory")
    return Path(os.path.abspath(to))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
