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
from contextlib import ExitStack, suppress
from operator import attrgetter
from pathlib import Path
from typing import Final

from penstock.backends.engine.engine import Engine
from penstock.backends.engine.upkeep import Upkeep
from penstock.clock import Clock, SystemClock
from penstock.core.events import AnyEvent, QueueCreated
from penstock.core.receipts import KEY_BYTES
from penstock.core.replay import apply_arrivals_if_new, apply_if_new
from penstock.core.shard import ShardState
from penstock.errors import StoreUnusable
from penstock.journal.codec import EVENT_BYTES, decode, plain_arrivals
from penstock.journal.entry import StoredEntry
from penstock.journal.file import Durability, FileJournal, check_interval
from penstock.journal.segments import FILE_BYTES, Segments
from penstock.journal.snapshot import Taken, offset_of, read_snapshot, snapshot_paths
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
    background: bool = True,
) -> Engine:
    """Opens the store at `path`, for this process alone; makes it if there is none.

    Without `background` the journal's spare files are made where they are needed, by no thread.
    Raises StoreUnusable, in one sentence that says what and where, having touched nothing; or
    InvalidField.
    """
    check_interval(interval_ms)
    store = Path(path)
    with ExitStack() as undo:
        _claim_directory(store, undo)
        if storage is None:
            _check_parts(store)
        segments = Segments.open(
            store / "journal", file_bytes=file_bytes, storage=storage, background=background
        )
        undo.callback(segments.close)
        key = _read_key(store)
        journal = FileJournal(segments, durability, interval_ms)
        undo.callback(journal.close)
        shard, last_ms = _recover(store, journal)
        engine = Engine(
            journal,
            clock or SystemClock(not_before_ms=last_ms),
            shard=shard,
            identity=segments.identity,
            key=key,
        )
        engine.upkeep = Upkeep(engine, journal, store, None if archive is None else Path(archive))
        undo.pop_all()
    return engine


def check_format(store: Path) -> bool:
    """Whether this is a store of ours; false if there is nothing yet. Raises StoreUnusable."""
    try:
        if not store.exists():
            return False
        if not store.is_dir():
            raise StoreUnusable(f"{store}: is a file; a store is a directory")
        marker = store / "store"
        if marker.exists():
            found = marker.read_bytes()
            if found != FORMAT:
                raise StoreUnusable(
                    f"{store}: is a store of another format ({found[:60]!r}); this version of "
                    f"Penstock reads {FORMAT.decode().strip()!r}"
                )
            return True
        if any(_counts(each.name) for each in store.iterdir()):
            raise StoreUnusable(f"{store}: is not empty and not a Penstock store")
    except OSError as error:
        raise StoreUnusable(f"{store}: cannot be used: {error.strerror}") from error
    return False


def _counts(name: str) -> bool:
    """Whether a file of this name makes a directory somebody's: not what a kill left half made."""
    return name != "lost+found" and not name.startswith(".store.")


def _claim_directory(store: Path, undo: ExitStack) -> None:
    """Makes sure that the directory is a store of ours, or makes it one; `undo` unmakes it."""
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
        undo.callback(_unclaim, store)
    except OSError as error:
        raise StoreUnusable(f"{store}: cannot be used: {error.strerror}") from error


def _check_parts(store: Path) -> None:
    """Refuses a store that cannot be whole, before anything is touched."""
    key = store / "key"
    journal = store / "journal"
    try:
        if key.exists() and key.stat().st_size != KEY_BYTES:
            raise StoreUnusable(
                f"{key}: holds {key.stat().st_size} bytes where a key has {KEY_BYTES}"
            )
        has_files = journal.is_dir() and any(journal.glob("*.seg"))
        if snapshot_paths(store) and not has_files:
            raise StoreUnusable(f"{journal}: is missing or empty, though there are snapshots of it")
    except OSError as error:
        raise StoreUnusable(f"{store}: cannot be used: {error.strerror}") from error


def _unclaim(store: Path) -> None:
    """Takes back a new store that could not be opened, unless somebody else has begun to use it."""
    _remove_if_empty(store / "journal")
    if not (store / "journal").exists():
        with suppress(OSError):
            (store / "store").unlink()


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):
        directory.rmdir()


def _read_key(store: Path) -> bytes:
    path = store / "key"
    try:
        if not path.exists():
            write_once(path, secrets.token_bytes(KEY_BYTES))
        return path.read_bytes()
    except OSError as error:
        raise StoreUnusable(f"{path}: cannot be read: {error.strerror}") from error


def write_once(path: Path, data: bytes) -> None:
    """Writes a file whole and durably, or not at all."""
    made = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(made, flags, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(made, path)
        _sync_directory(path.parent)
    except OSError:
        with suppress(OSError):
            made.unlink()
        raise


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _recover(store: Path, journal: FileJournal) -> tuple[ShardState, int]:
    """The state the store was in, and the last instant it knows of. Raises StoreUnusable."""
    segments = journal.segments
    taken = _newest_snapshot(store, segments.first_offset, segments.end_offset)
    start = None if taken is None else taken.outline.offset
    recovery = Recovery(taken)
    for entry in journal.replayed(start):
        recovery.apply_entry(entry)
    # What was damaged may have given numbers to messages: nobody else may get them.
    lost = sum(found.size_bytes // EVENT_BYTES + 1 for found in segments.quarantined)
    return recovery.finish(lost), recovery.last_ms


def _newest_snapshot(store: Path, first_offset: int, end_offset: int) -> Taken | None:
    """The newest whole snapshot, None if all is still in the journal. Raises StoreUnusable."""
    for path in snapshot_paths(store):
        if offset_of(path) > end_offset:
            # It was made durable after the journal was: what it begins at has been there.
            raise StoreUnusable(
                f"{path}: the journal ends at {end_offset}, before this snapshot begins; "
                "some of its files are missing or damaged"
            )
        taken = read_snapshot(path)
        if taken is not None and first_offset <= taken.outline.offset <= end_offset:
            return taken
    if first_offset:
        raise StoreUnusable(
            f"{store}: no snapshot is whole, and the journal before {first_offset} was dropped; "
            "put a copy of a snapshot back"
        )
    return None


class Recovery:
    """A snapshot, or nothing, on its way to being the present state, event by event."""

    def __init__(self, taken: Taken | None) -> None:
        self.shard = ShardState() if taken is None else taken.shard
        self.last_ms = 0 if taken is None else taken.outline.at_ms
        self._early = {} if taken is None else taken.early
        self._is_ordered = taken is None or (taken.is_ordered and not taken.early)

    def apply_entry(self, entry: StoredEntry) -> None:
        """Takes up the events of the next entry."""
        arrivals = plain_arrivals(entry.data, entry.data_offset)
        if arrivals is not None and apply_arrivals_if_new(self.shard, arrivals):
            self.last_ms = max(self.last_ms, arrivals.deliveries[-1].pushed_at_ms)
            return
        for event, place in decode(entry.data, entry.data_offset, bodies=False):
            self.apply_if_new(event, place)

    def apply_if_new(self, event: AnyEvent, place: int) -> None:
        """Takes up the next event; `place` is where its content stands, if it has any."""
        if event.at_ms > self.last_ms:
            self.last_ms = event.at_ms
        apply_if_new(self.shard, event, place or None)
        if self._early and isinstance(event, QueueCreated) and event.queue in self._early:
            self.shard.queues[event.queue].restored(self._early.pop(event.queue))

    def finish(self, numbers_lost: int = 0) -> ShardState:
        """The state, with each message in its place."""
        self.shard.next_number += numbers_lost
        if not self._is_ordered:
            snapshot = self.shard.snapshot()
            for kept in snapshot.queues:
                kept.deliveries.sort(key=attrgetter("rank"))
            self.shard = ShardState.restore(snapshot)
        return self.shard
