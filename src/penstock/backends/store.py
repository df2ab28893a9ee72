"""A data directory as an engine: what lies in it, and how it is opened again.

    PATH/store         says that this is a Penstock store, and of which format
    PATH/key           what makes this store's receipts unforgeable; for its owner's eyes only
    PATH/journal/      the segment files
    PATH/snapshot-…    the two newest snapshots, named by the point in the journal they begin at
    PATH/readers/      how far each named reader of the journal has come

Opening takes the newest whole snapshot and replays the journal from where it begins.
"""

import os
import secrets
from pathlib import Path
from typing import Final

from penstock.backends.engine import Engine
from penstock.backends.upkeep import Upkeep
from penstock.clock import Clock, SystemClock
from penstock.core.receipts import KEY_BYTES
from penstock.core.replay import heed
from penstock.core.shard import ShardState
from penstock.errors import StoreUnusable
from penstock.journal.file import Durability, FileJournal
from penstock.journal.segments import FILE_BYTES, Segments
from penstock.journal.snapshot import read_snapshot, snapshot_paths
from penstock.journal.storage import Storage

FORMAT: Final = b"penstock store, format 1\n"


def open_engine(
    path: str | os.PathLike[str],
    *,
    durability: Durability = "sync",
    interval_ms: int = 50,
    clock: Clock | None = None,
    archive: str | os.PathLike[str] | None = None,
    file_bytes: int = FILE_BYTES,
    storage: Storage | None = None,
) -> Engine:
    """Opens the store at `path`, for this process alone; makes it if there is none.

    Raises StoreUnusable, in one sentence that says what and where, having touched nothing.
    """
    store = Path(path)
    _claim_directory(store)
    segments = Segments.open(store / "journal", file_bytes=file_bytes, storage=storage)
    try:
        key = _read_key(store)
        journal = FileJournal(segments, durability, interval_ms)
        shard, last_ms = _recover(store, journal)
        engine = Engine(
            journal,
            clock or SystemClock(not_before_ms=last_ms),
            shard=shard,
            identity=segments.identity,
            key=key,
        )
        engine.upkeep = Upkeep(engine, journal, store, None if archive is None else Path(archive))
        return engine
    except BaseException:
        segments.close()
        raise


def _claim_directory(store: Path) -> None:
    """Makes sure that the directory is a store of ours, or empty and about to be one."""
    marker = store / "store"
    try:
        if store.exists() and not store.is_dir():
            raise StoreUnusable(f"{store}: is a file; a store is a directory")
        if marker.exists():
            found = marker.read_bytes()
            if found != FORMAT:
                raise StoreUnusable(
                    f"{store}: is a store of another format ({found[:60]!r}); this version of "
                    f"Penstock reads {FORMAT.decode().strip()!r}"
                )
            return
        if store.exists() and any(each.name != "lost+found" for each in store.iterdir()):
            raise StoreUnusable(f"{store}: is not empty and not a Penstock store")
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_once(marker, FORMAT)
    except OSError as error:
        raise StoreUnusable(f"{store}: cannot be used: {error.strerror}") from error


def _read_key(store: Path) -> bytes:
    path = store / "key"
    try:
        if not path.exists():
            _write_once(path, secrets.token_bytes(KEY_BYTES))
        key = path.read_bytes()
    except OSError as error:
        raise StoreUnusable(f"{path}: cannot be read: {error.strerror}") from error
    if len(key) != KEY_BYTES:
        raise StoreUnusable(f"{path}: holds {len(key)} bytes where a key has {KEY_BYTES}")
    return key


def _write_once(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all."""
    made = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(made, flags, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(made, path)


def _recover(store: Path, journal: FileJournal) -> tuple[ShardState, int]:
    """The state the store was in, and the last instant it knows of."""
    shard = ShardState()
    start: int | None = None
    last_ms = 0
    segments = journal.segments
    for path in snapshot_paths(store):
        found = read_snapshot(path)
        # One that begins outside the stream belongs to another life of this directory.
        if found is not None and segments.first_offset <= found[0].offset <= segments.end_offset:
            start, last_ms, shard = found[0].offset, found[0].at_ms, found[1]
            break
    for event, place in journal.replayed(start):
        if event.at_ms > last_ms:
            last_ms = event.at_ms
        heed(shard, event, place or None)
    return shard, last_ms
