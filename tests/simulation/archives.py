"""The archives of a simulated cluster: the real segment files, in the directory of the run.

All nodes use one directory, which may be full for a while; a node that was stopped leaves what it
has written, and its lock ends with it. The rules are checked with what a reader finds in the files,
which is what was synced:

- whatever is purged from a shard's log is in its archive, if the archive was begun
- the archive has the entries of the log, byte for byte, without a gap
- once all faults have ended, the archive has everything, if the shard's owner archives it
"""

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.cluster.archive import ShardArchive, shard_directory
from penstock.cluster.placement import shard_identity
from penstock.journal.disk import OsStorage
from penstock.journal.entry import StoredEntry
from penstock.journal.reader import JournalReader

if TYPE_CHECKING:
    from tests.simulation.cluster import SimulatedCluster

# Of few entries, so that a part of the stream may fill several files.
FILE_BYTES: Final = 8 * 1024


class ArchiveDisk(OsStorage):
    """The disk of all archives of a run."""

    def __init__(self) -> None:
        self.is_full = False

    def open(self, path: str, *, writable: bool) -> Any:
        """Opens a directory, whose files cannot be created while the disk is full."""
        directory = super().open(path, writable=writable)
        create = directory.create

        def create_unless_full(name: str, size_bytes: int, head: bytes) -> Any:
            if self.is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return create(name, size_bytes, head)

        vars(directory)["create"] = create_unless_full
        return directory


class SimulatedArchive(ShardArchive):
    """The archive of a shard, written by a simulated process."""

    def crash(self) -> None:
        """Ends as the process does: nothing is synced, and the lock is released."""
        self._is_closed = True
        segments, self._segments = self._segments, None
        if segments is not None:
            segments.start_over()


class ClusterArchives:
    """The archives of all shards, and their rules."""

    def __init__(self, cluster: "SimulatedCluster", directory: Path) -> None:
        self.disk = ArchiveDisk()
        self._cluster = cluster
        self._directory = directory

    def make(self, shard: int) -> SimulatedArchive:
        """The archive of a shard, for its owner."""
        identity = shard_identity(self._cluster.settings.identity, shard)
        path = shard_directory(self._directory, shard)
        return SimulatedArchive(path, identity, FILE_BYTES, self.disk)

    def entries(self, shard: int) -> list[StoredEntry]:
        """What a reader finds in a shard's archive."""
        path = shard_directory(self._directory, shard)
        if not path.is_dir() or not any(path.glob("*.seg")):
            return []
        with JournalReader(path) as reader:
            return [*reader.entries()]

    def check_purge(self, shard: int, before: int) -> None:
        """Checks a purge of the slots before this one, of a shard whose archive was begun."""
        truth = self._cluster.truths[shard]
        position = truth.position_of(before)
        needed = [entry for entry in truth.entries if entry.offset < position]
        self.check_entries(shard)
        archived = self.entries(shard)
        if needed and (not archived or archived[-1].entry_id < needed[-1].entry_id):
            reached = archived[-1].entry_id if archived else 0
            self._cluster.schedule.violate(
                f"shard {shard}: slots before {before} are purged, which have the entries up to "
                f"{needed[-1].entry_id}, and the archive ends with {reached}"
            )

    def check_entries(self, shard: int) -> None:
        """Checks that the archive has the entries of the log, without a gap."""
        archived = self.entries(shard)
        first = archived[0].entry_id - 1 if archived else 0
        if archived != self._cluster.truths[shard].entries[first : first + len(archived)]:
            self._cluster.schedule.violate(f"shard {shard}: its archive differs from its log")
        if first and self._cluster.profile.archive == "all":
            self._cluster.schedule.violate(f"shard {shard}: its archive begins after {first}")

    def is_complete(self, shard: int) -> bool:
        """Whether the archive has all entries of the log."""
        archived, entries = self.entries(shard), self._cluster.truths[shard].entries
        last = archived[-1].entry_id if archived else 0
        return last == (entries[-1].entry_id if entries else 0)
