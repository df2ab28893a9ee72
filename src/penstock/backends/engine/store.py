"""Opens a data directory as an engine: the newest whole snapshot, and the journal from there on.

`journal.store` describes the directory.
"""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from penstock.backends.engine.engine import Engine
from penstock.backends.engine.upkeep import Upkeep
from penstock.clock import Clock, SystemClock
from penstock.core.shard import ShardState
from penstock.errors import StoreInUse
from penstock.journal.codec import EVENT_BYTES
from penstock.journal.disk import Storage
from penstock.journal.file_journal import Durability, FileJournal, check_interval
from penstock.journal.restore import Recovery, newest_snapshot
from penstock.journal.scan import Quarantined
from penstock.journal.segments import FILE_BYTES, Segments
from penstock.journal.store import (
    check_owners,
    check_parts,
    journal_path,
    make_key,
    prepare_directory,
    read_key,
    snapshot_end,
)
from penstock.output import logger

_LOSSES_SHOWN_MAX: Final = 20


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
    accept_loss: bool = False,
    other_owner: bool = False,
) -> Engine:
    """Opens the store at `path`, for this process alone; makes it if there is none.

    Without `background` nothing is done ahead: spare files of the journal are made when they are
    needed, and it is synced only for those who wait for it.
    With `accept_loss` a store opens although files of its journal, or synced bytes of them, are
    missing: their content is lost. Warnings of the logger `penstock.journal` say what it was, and
    report damage that was found.
    Raises StoreUnusable before anything is changed, also for another user's store unless
    `other_owner` allows it, StoreInUse if another process has it, or InvalidField.
    """
    check_interval(interval_ms)
    store = Path(path)
    with ExitStack() as undo:
        prepare_directory(store, undo, other_owner=other_owner)
        if archive is not None:
            check_owners(Path(archive), other_owner=other_owner)
        if storage is None:
            check_parts(store)
        try:
            segments = Segments.open(
                journal_path(store),
                file_bytes=file_bytes,
                storage=storage,
                background=background,
                accept_loss=accept_loss,
                known_end=snapshot_end(store),
            )
        except StoreInUse as error:
            raise StoreInUse(
                f"{error}; end that process, or use file:{store} without embedded=1 in both"
            ) from error
        undo.callback(segments.close)
        key = read_key(store) or make_key(store)
        journal = FileJournal(segments, durability, interval_ms, background=background)
        undo.callback(journal.close)
        shard, last_ms = _recover(store, journal)
        shard.number = journal.shard
        engine = Engine(
            journal,
            clock or SystemClock(not_before_ms=last_ms),
            shard=shard,
            identity=segments.identity,
            key=key,
        )
        engine.upkeep = Upkeep(engine, journal, store, None if archive is None else Path(archive))
        if segments.accepted_loss:
            _report_loss(store, segments.accepted_loss)
        elif segments.quarantined:
            _report_damage(store, segments.quarantined)
        undo.pop_all()
    return engine


def _report_loss(store: Path, files: str) -> None:
    """Warns of the files whose loss was accepted, and of what was in them."""
    # Imported here: few stores ever lose a file.

    from penstock.journal.verify import verify

    warn = logger("penstock.journal").warning
    warn("%s: the loss of files was accepted: %s", store, files)
    lost = [each.text for each in verify(str(store)) if each.is_damage]
    for text in lost[:_LOSSES_SHOWN_MAX]:
        warn("%s: %s", store, text)
    if len(lost) > _LOSSES_SHOWN_MAX:
        more = len(lost) - _LOSSES_SHOWN_MAX
        warn("%s: and %d more; penstock check %s lists them", store, more, store)


def _report_damage(store: Path, damage: list[Quarantined]) -> None:
    """Warns of the damage that opening found in the journal, in one line."""

    first = damage[0]
    found = f"{first.why}, {first.size_bytes} bytes at {first.offset}"
    if len(damage) > 1:
        found += f", and {len(damage) - 1} more"
    logger("penstock.journal").warning(
        "%s: the journal is damaged: %s; penstock check %s says what is lost", store, found, store
    )


def _recover(store: Path, journal: FileJournal) -> tuple[ShardState, int]:
    """The state of the store, and the time of its last event. Raises StoreUnusable."""
    segments = journal.segments
    taken = newest_snapshot(store, segments.first_offset, segments.end_offset)
    start = None if taken is None else taken.outline.offset
    recovery = Recovery(taken)
    for entry in journal.replayed(start):
        recovery.apply_entry(entry)
    # Damaged entries may have used message numbers, which must not be used again. Damage without
    # bytes of the stream, as of a header page, has none: it is repaired, and to skip numbers for
    # it would make the state differ from the one that the journal leads to.
    damaged = [found.size_bytes for found in segments.quarantined if found.size_bytes]
    lost = sum(size_bytes // EVENT_BYTES + 1 for size_bytes in damaged)
    return recovery.finish(lost), recovery.last_ms
