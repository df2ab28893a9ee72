"""A store's directory: its files, how it is recognised, and how it is read.

    PATH/store         marks the directory as a Penstock store, with its format
    PATH/key           the key that signs this store's receipts; readable by its owner only
    PATH/journal/      the segment files
    PATH/snapshot-…    the two newest snapshots, named by the journal offset they begin at
    PATH/readers/      how far each named reader of the journal has read

The engine opens a store for writing; the command line and the pipeline read it beside the engine.
"""

import os
import secrets
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from penstock.core.receipts import KEY_BYTES
from penstock.errors import StoreUnusable
from penstock.files import (
    ALLOWED_BY,
    OtherOwner,
    check_named,
    make_directories,
    read_in,
    remove_in,
    write_in,
)
from penstock.journal.reader import JournalReader
from penstock.journal.snapshot import offset_of, snapshot_paths

FORMAT: Final = b"penstock store, format 1\n"
# The file that a backup has in place of `store`.
BACKUP: Final = "backup"


def journal_path(store: Path) -> Path:
    """Where the store's segment files are."""
    return store / "journal"


def store_of(path: str | os.PathLike[str]) -> Path | None:
    """The store at this path; None if there is none, as in a directory of segment files.

    Raises StoreUnusable if it is a store of another format, or cannot be read.
    """
    store = Path(path)
    try:
        found = read_in(store, "store")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreUnusable(f"{store}: cannot be used: {error.strerror}") from error
    if found != FORMAT:
        raise StoreUnusable(
            f"{store}: is a store of another format ({found[:60]!r}); this version of "
            f"Penstock reads {FORMAT.decode().strip()!r}"
        )
    return store


def check_owners(store: Path, *, other_owner: bool) -> None:
    """Refuses a directory or a store of another user, unless told to use it. Raises StoreUnusable.

    A directory of root is accepted: the mount points of containers belong to root.
    """
    try:
        check_named(store, other_owner=other_owner)
        with suppress(FileNotFoundError, NotADirectoryError):
            read_in(store, "store")
    except OtherOwner as error:
        raise StoreUnusable(f"{store}: {error.strerror}{ALLOWED_BY}") from None
    except OSError as error:
        raise StoreUnusable(f"{store}: cannot be used: {error.strerror}") from None


def check_format(store: Path) -> bool:
    """Whether this is a Penstock store; False if the path is empty. Raises StoreUnusable."""
    try:
        if not store.exists():
            return False
        if not store.is_dir():
            raise StoreUnusable(f"{store}: is a file; a store is a directory")
        if store_of(store) is not None:
            return True
        if is_backup(store):
            raise StoreUnusable(
                f"{store}: is a backup; make a store of it with: penstock restore {store} PATH"
            )
        if any(_is_foreign(each.name) for each in store.iterdir()):
            raise StoreUnusable(f"{store}: is not empty, and is not a Penstock store")
    except OSError as error:
        raise StoreUnusable(f"{store}: cannot be used: {error.strerror}") from error
    return False


def is_backup(path: Path) -> bool:
    """Whether this is a complete backup of a store (`backup`)."""
    return (path / BACKUP).is_file() and journal_path(path).is_dir()


def _is_foreign(name: str) -> bool:
    """Whether a file of this name means that other programs use a directory without a store.

    A file that Penstock had not finished, and the `lost+found` of a file system, do not.
    """
    return name != "lost+found" and not name.startswith(".store.")


def open_reader(
    path: str | os.PathLike[str], archive: str | os.PathLike[str] | None = None
) -> JournalReader:
    """The journal of a store or a backup, or the stream in a directory of segments.

    Raises StoreUnusable.
    """
    found = Path(path)
    if not found.exists():
        raise StoreUnusable(f"{found}: does not exist")
    if found.is_dir() and not (found / "store").exists() and any(found.glob("*.seg")):
        return JournalReader(found, archive=archive or found)
    if not is_backup(found) and not check_format(found):
        raise StoreUnusable(f"{found}: is not a Penstock store")
    return JournalReader(journal_path(found), archive=archive, known_end=snapshot_end(found))


def journals_in(path: str | os.PathLike[str]) -> list[str]:
    """The journals at a path: one for each shard of a cluster's archive, otherwise the path."""
    shards = [each for each in Path(path).glob("shard-*") if any(each.glob("*.seg"))]
    return sorted(map(str, shards)) or [os.fspath(path)]


def prepare_directory(store: Path, undo: ExitStack, *, other_owner: bool = False) -> None:
    """Makes the directory a Penstock store, if it is not one yet; `undo` reverts that.

    Raises StoreUnusable, also for a store of another user, unless `other_owner` allows that.
    """
    check_owners(store, other_owner=other_owner)
    if check_format(store):
        return
    try:
        for directory in make_directories(store):
            undo.callback(_remove_if_empty, Path(directory))
        check_owners(store, other_owner=other_owner)
        for draft in store.glob(".store.*"):
            remove_in(store, draft.name)
        write_in(store, "store", FORMAT)
        undo.callback(_undo_new_store, store)
    except OSError as error:
        raise StoreUnusable(f"{store}: cannot be used: {error.strerror}") from error


def check_parts(store: Path) -> None:
    """Refuses a store without its journal, before anything is changed. Raises StoreUnusable."""
    journal = journal_path(store)
    try:
        key = read_key(store)
        if not (journal.is_dir() and any(journal.glob("*.seg"))):
            if snapshot_paths(store):
                raise StoreUnusable(
                    f"{journal}: is missing or empty, though there are snapshots of it"
                )
            # The key is written after the first file of the journal was made.
            if key is not None:
                raise StoreUnusable(f"{journal}: is missing or empty, though the store was in use")
    except OSError as error:
        raise StoreUnusable(f"{store}: cannot be used: {error.strerror}") from error


def snapshot_end(store: Path) -> int:
    """An offset that the journal has reached, from the newest snapshot's name; 0 without one."""
    return max(map(offset_of, snapshot_paths(store)), default=0)


def read_key(store: Path) -> bytes | None:
    """The store's key; None if there is none yet. Raises StoreUnusable if it is not valid."""
    path = store / "key"
    try:
        key = read_in(store, "key")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreUnusable(f"{path}: cannot be read: {error.strerror}") from error
    if len(key) != KEY_BYTES:
        raise StoreUnusable(f"{path}: holds {len(key)} bytes where a key has {KEY_BYTES}")
    return key


def make_key(store: Path) -> bytes:
    """Makes the store's key, durably. Raises StoreUnusable."""
    path = store / "key"
    key = secrets.token_bytes(KEY_BYTES)
    try:
        write_in(store, path.name, key)
    except OSError as error:
        raise StoreUnusable(f"{path}: cannot be written: {error.strerror}") from error
    return key


def _undo_new_store(store: Path) -> None:
    """Removes a new store that could not be opened, unless another process uses it by now."""
    _remove_if_empty(journal_path(store))
    if not journal_path(store).exists():
        with suppress(OSError):
            remove_in(store, "store")


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):
        directory.rmdir()
