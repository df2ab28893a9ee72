"""A shard's stream as segment files, which remain after the replicated log was purged.

    DIR/shard-0003/   the segment files of shard 3, as `penstock pipeline` and `inspect` read them

The entries have the same positions and ids here as in the replicated log, so every owner of the
shard writes the same bytes. A new owner continues where the files end; what the owner before it
wrote without syncing is written again. The lock of the segment files allows one writer at a time.
An owner that was replaced releases it once it learns that it was replaced.

Nothing is purged from the replicated log, nor dropped from the owner's local copy, before it is
durable here (`ReplicatedJournal.archived_position`). All nodes must use the same directory.

A register says whether the cluster has an archive. Before an owner writes the first byte, it notes
in the shard's manifest that the shard is archived (`snapshots.note_archive`), so that no owner
without an archive purges it, not even one that was replaced and has not noticed it yet. Only a node
that ends the archive of the whole cluster permits that again.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from penstock.cluster.extent import split_entries
from penstock.cluster.jetstream import JetStream
from penstock.cluster.journal import NO_ARCHIVE, ReplicatedJournal
from penstock.cluster.log import LogSteps, ReadRegister, Register, until_answered
from penstock.cluster.membership import ARCHIVE_KEY, ARCHIVE_ON
from penstock.cluster.snapshots import note_archive
from penstock.errors import PenstockError, StoreUnusable
from penstock.files import check_named, make_directories
from penstock.journal.disk import Storage
from penstock.journal.segments import Segments

FILE_BYTES: Final = 4 * 1024 * 1024
# How much of the stream is written at a time.
PART_BYTES: Final = 4 * 1024 * 1024
_ARCHIVE_S: Final = 0.5


def shard_directory(archive: Path, shard: int) -> Path:
    """The directory of a shard's segment files."""
    return archive / f"shard-{shard:04d}"


class ShardArchive:
    """The segment files of one shard; used by one thread at a time."""

    def __init__(
        self,
        directory: Path,
        identity: bytes,
        file_bytes: int = FILE_BYTES,
        storage: Storage | None = None,
    ) -> None:
        """`identity` is the first part of the ids of the shard's messages."""
        self.directory = directory
        self._storage = storage
        self._identity = identity.ljust(16, b"\0")
        self._file_bytes = file_bytes
        self._segments: Segments | None = None
        self._using = threading.Lock()
        self._is_closed = False

    def _prepare(self, archive: Path) -> None:
        try:
            make_directories(archive)
            check_named(archive)
        except OSError as error:
            raise StoreUnusable(f"{archive}: cannot be used: {error.strerror}") from None

    def open(self, first_position: int, first_sequence: int, end_position: int) -> int:
        """Opens the files; returns the position of the stream at which they end.

        A new archive begins at `first_position`, the oldest position that is still available.
        Raises StoreUnusable, or StoreInUse while another process has the files open.
        """
        with self._using:
            if self._is_closed:
                raise StoreUnusable(f"{self.directory}: the archive is closed")
            if self._segments is None:
                self._prepare(self.directory.parent)
                self._segments = Segments.open(
                    self.directory,
                    file_bytes=self._file_bytes,
                    storage=self._storage,
                    reserve_bytes=0,
                    background=False,
                    identity=self._identity,
                    begin=(first_position, first_sequence),
                )
            reached = self._segments.end_offset
            why = ""
            if self._segments.identity != self._identity:
                why = "is the archive of another shard or cluster"
            elif not first_position <= reached <= end_position:
                why = (
                    f"ends at {reached} of the shard's stream, of which only {first_position} to "
                    f"{end_position} is available"
                )
            if why:
                self._segments.close()
                self._segments = None
                raise StoreUnusable(f"{self.directory}: {why}; give the nodes an empty directory")
            return reached

    def write(self, data: bytes) -> int:
        """Appends whole entries of the stream and syncs them; returns the durable position.

        Raises StoreFull, JournalError, or CorruptEntry if they do not continue the stream. After an
        error the files are closed: some of the entries may be written, and `open` says how many.
        """
        with self._using:
            segments = self._segments
            if segments is None:
                raise StoreUnusable(f"{self.directory}: the archive is closed")
            try:
                for entry in split_entries(data, segments.end_offset, segments.next_id):
                    segments.append(
                        [entry.data], version=entry.version, ttl_s=entry.ttl_s, reserved=True
                    )
                segments.sync()
            except BaseException:
                self._segments = None
                with suppress(PenstockError, OSError):
                    segments.close()
                raise
            return segments.durable_offset

    def close(self) -> None:
        """Waits for a write in progress and closes the files, so that another process may write."""
        with self._using:
            self._is_closed = True
            segments, self._segments = self._segments, None
            if segments is not None:
                segments.close()


def permit_purges(journal: ReplicatedJournal) -> LogSteps[None]:
    """Lets an owner without an archive purge its shard, unless other nodes archive the cluster.

    If the read lags, the shard's manifest still forbids to purge what is not archived.
    """
    found: Register | None = yield from until_answered(ReadRegister(ARCHIVE_KEY))
    if found is None or found.value != ARCHIVE_ON:
        journal.archive_ended = 0 if found is None else found.revision
        journal.archived_position = NO_ARCHIVE


async def keep_archive(
    replicated: JetStream,
    journal: ReplicatedJournal,
    archive: ShardArchive,
    revision: int,
    report: Callable[[str], None],
) -> None:
    """Copies what is durable in the log to the archive, in threads, until it is cancelled.

    `revision` is that of the archive's register. `report` gets the error of each attempt, or an
    empty text. The caller has set `archived_position` to the journal's first position.
    """
    position = -1
    while True:
        try:
            if position < 0:
                start = await replicated.run(note_archive(journal.shard, revision))
                first = max(start.position, journal.first_position)
                begin = (first, journal.sequence_at(first), journal.durable_position)
                position = await asyncio.to_thread(archive.open, *begin)
            while data := journal.durable_entries(position, PART_BYTES):
                position = await asyncio.to_thread(archive.write, data)
                journal.archived_position = position
            journal.archived_position = position
            report("")
        except (PenstockError, OSError) as error:
            # Nothing is purged meanwhile. Another process may still have the files open. A part of
            # the entries may be written: the next attempt continues where the files end.
            position = -1
            report(str(error))
        await asyncio.sleep(_ARCHIVE_S)
