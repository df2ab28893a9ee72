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
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from penstock.core.receipts import KEY_BYTES
from penstock.errors import StoreUnusable
from penstock.journal.reader import JournalReader
from penstock.journal.snapshot import offset_of, snapshot_paths
from penstock.journal.storage import open_regular, require_regular

FORMAT: Final = b"penstock store, format 1\n"
_ROOT: Final = 0


def journal_path(store: Path) -> Path:
    """Where the store's segment files are."""
    return store / "journal"


def store_of(path: str | os.PathLike[str]) -> Path | None:
    """The store at this path; None if there is none, as in a directory of segment files.

    Raises StoreUnusable if it is a store of another format, or cannot be read.
    """
    store = Path(path)
    try:
        with open_regular(store / "store") as file:
            found = file.read(len(FORMAT) + 60)
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


def check_owners(store: Path, *, other_owner: bool) -> set[int]:
    """Refuses a directory or a store of another user, unless told to use it. Raises StoreUnusable.

    Returns the users whose files are used there. A directory of root is accepted: root can change
    everything anyway, and the mount points of containers belong to root.
    """
    marker = store / "store"
    owners = {os.geteuid()}
    try:
        directory_uid = _owner_of(store, os.stat)
        marker_uid = _owner_of(marker, os.lstat)
        if marker_uid is not None:
            require_regular(marker.name, marker.lstat())
    except OSError as error:
        raise StoreUnusable(f"{store}: cannot be used: {error.strerror}") from None
    if other_owner:
        return owners | {uid for uid in (directory_uid, marker_uid) if uid is not None}
    for path, uid, allowed in (
        (store, directory_uid, owners | {_ROOT}),
        (marker, marker_uid, owners),
    ):
        if uid is not None and uid not in allowed:
            raise StoreUnusable(
                f"{path}: belongs to user {uid}, and this process runs as user "
                f"{os.geteuid()}; run it as user {uid}, or say --insecure-other-owner "
                "(in a URL: other_owner=1)"
            )
    return owners


def _owner_of(path: Path, look: Callable[[Path], os.stat_result]) -> int | None:
    try:
        return look(path).st_uid
    except (FileNotFoundError, NotADirectoryError):
        return None


def check_format(store: Path) -> bool:
    """Whether this is a Penstock store; False if the path is empty. Raises StoreUnusable."""
    try:
        if not store.exists():
            return False
        if not store.is_dir():
            raise StoreUnusable(f"{store}: is a file; a store is a directory")
        if store_of(store) is not None:
            return True
        if any(_is_foreign(each.name) for each in store.iterdir()):
            raise StoreUnusable(f"{store}: is not empty, and is not a Penstock store")
    except OSError as error:
        raise StoreUnusable(f"{store}: cannot be used: {error.strerror}") from error
    return False


def _is_foreign(name: str) -> bool:
    """Whether a file of this name means that other programs use a directory without a store.

    A file that Penstock had not finished, and the `lost+found` of a file system, do not.
    """
    return name != "lost+found" and not name.startswith(".store.")


def open_reader(
    path: str | os.PathLike[str], archive: str | os.PathLike[str] | None = None
) -> JournalReader:
    """The journal of a store, or the stream in a directory of segments. Raises StoreUnusable."""
    found = Path(path)
    if not found.exists():
        raise StoreUnusable(f"{found}: does not exist")
    if found.is_dir() and not (found / "store").exists() and any(found.glob("*.seg")):
        return JournalReader(found, archive=archive or found)
    if not check_format(found):
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
        missing = [each for each in (store, *store.absolute().parents) if not each.exists()]
        for directory in reversed(missing):
            directory.mkdir(mode=0o700, exist_ok=True)
            undo.callback(_remove_if_empty, directory)
            _sync_directory(directory.absolute().parent)
        for draft in store.glob(".store.*"):
            draft.unlink(missing_ok=True)
        write_once(store / "store", FORMAT)
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
        with open_regular(path) as file:
            key = file.read(KEY_BYTES + 1)
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreUnusable(f"{path}: cannot be read: {error.strerror}") from error
    if size != KEY_BYTES:
        raise StoreUnusable(f"{path}: holds {size} bytes where a key has {KEY_BYTES}")
    return key


def make_key(store: Path) -> bytes:
    """Makes the store's key, durably. Raises StoreUnusable."""
    path = store / "key"
    key = secrets.token_bytes(KEY_BYTES)
    try:
        write_once(path, key)
    except OSError as error:
        raise StoreUnusable(f"{path}: cannot be written: {error.strerror}") from error
    return key


def _undo_new_store(store: Path) -> None:
    """Removes a new store that could not be opened, unless another process uses it by now."""
    _remove_if_empty(journal_path(store))
    if not journal_path(store).exists():
        with suppress(OSError):
            (store / "store").unlink()


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):
        directory.rmdir()


def write_once(path: Path, data: bytes) -> None:
    """Writes a file completely and durably, or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(draft, flags, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        _sync_directory(path.parent)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
