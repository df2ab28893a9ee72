"""A shard's stream kept as segment files, for whoever reads it long after it was purged.

    DIR/shard-0003/   the segment files of shard 3, as `penstock pipeline` and `inspect` read them

The entries stand there at the same positions and with the same ids as in the replicated log, so
whoever owns the shard writes the same bytes: an owner goes on where the files end, and what an
owner before it had written, but not synced, is written again. The directory has one writer at a
time, by the lock of its segment files; an owner that was replaced loses it when it notices.

Nothing is purged from the replicated log, nor dropped from the owner's local copy, before it is
durable here (`ReplicatedJournal.archived_position`). All nodes must see one and the same directory.
"""

import threading
from pathlib import Path
from typing import Final

from penstock.cluster.extent import split_entries
from penstock.errors import StoreUnusable
from penstock.journal.segments import Segments

FILE_BYTES: Final = 4 * 1024 * 1024
# How much of the stream is written at a time.
PART_BYTES: Final = 4 * 1024 * 1024


def shard_directory(archive: Path, shard: int) -> Path:
    """Where the segment files of a shard are."""
    return archive / f"shard-{shard:04d}"


class ShardArchive:
    """The segment files of one shard; to be used from one thread at a time."""

    def __init__(self, directory: Path, identity: bytes, file_bytes: int = FILE_BYTES) -> None:
        """`identity` is what the ids of the shard's messages begin with."""
        self.directory = directory
        self._identity = identity.ljust(16, b"\0")
        self._file_bytes = file_bytes
        self._segments: Segments | None = None
        self._using = threading.Lock()
        self._is_closed = False

    def open(self, first_position: int, first_sequence: int, end_position: int) -> int:
        """Opens the files; up to which position of the stream they are written.

        A new archive begins at `first_position`, which is the oldest that can still be had.
        Raises StoreUnusable, also while another process has them open.
        """
        with self._using:
            if self._is_closed:
                raise StoreUnusable(f"{self.directory}: was closed")
            if self._segments is None:
                self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._segments = Segments.open(
                    self.directory,
                    file_bytes=self._file_bytes,
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
                    f"ends at {reached} of the shard's stream, of which {first_position} to "
                    f"{end_position} can still be had"
                )
            if why:
                self._segments.close()
                self._segments = None
                raise StoreUnusable(f"{self.directory}: {why}; give the nodes an empty directory")
            return reached

    def write(self, data: bytes) -> int:
        """Adds whole entries of the stream, durably; up to where it is written then.

        Raises StoreFull, JournalError, or CorruptEntry if they do not follow.
        """
        with self._using:
            segments = self._segments
            if segments is None:
                raise StoreUnusable(f"{self.directory}: was closed")
            for entry in split_entries(data, segments.end_offset, segments.next_id):
                segments.append(
                    [entry.data], version=entry.version, ttl_s=entry.ttl_s, reserved=True
                )
            segments.sync()
            return segments.durable_offset

    def close(self) -> None:
        """Ends the writing, for another process to go on; what is under way is finished."""
        with self._using:
            self._is_closed = True
            segments, self._segments = self._segments, None
            if segments is not None:
                segments.close()
