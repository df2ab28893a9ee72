"""Snapshots of a shard in the replicated log: chunks first, then a manifest, then the purge.

The manifest of a shard is a register. It lists the two newest snapshots, and the point from which
the log is needed for either of them. A snapshot is used only once it is listed. Slots are purged
only up to that point, and only after the manifest was written. So a crash may leave chunks that are
not listed, or slots that are not needed, but never a snapshot without its slots.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from penstock.backends.engine.upkeep import Upkeep
from penstock.cluster.extent import ChainPoint
from penstock.cluster.journal import ReplicatedJournal
from penstock.cluster.log import (
    CHUNK_BYTES_MAX,
    RETRY_MS,
    DropChunks,
    LogSteps,
    Mismatch,
    Pause,
    PurgeSlots,
    PutChunk,
    ReadChunk,
    ReadRegister,
    Register,
    Swap,
    Unanswered,
    until_answered,
)
from penstock.errors import StoreUnusable
from penstock.journal.snapshot import (
    KEPT,
    Taken,
    offset_of,
    read_snapshot,
    snapshot_path,
    snapshot_paths,
)

# After this many reads without an expected chunk, the snapshot is treated as incomplete.
_CHUNK_TRIES: Final = 50
_DURABLE_MS: Final = 5


class KeptSnapshot(msgspec.Struct, frozen=True):
    """One snapshot: the name of its chunks, their number and checksum, and its position."""

    name: str
    chunks: int
    sha256: str
    position: int


class SnapshotManifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The snapshots of a shard, newest first, and where reading the log begins for them.

    `archived` is the revision of the archive's register with which the shard's archive was begun,
    0 if it has none (`archive`): an owner that does not archive it must purge nothing then.
    """

    start: ChainPoint
    snapshots: list[KeptSnapshot]
    archived: int = 0


_decode_manifest = msgspec.json.Decoder(SnapshotManifest).decode
NO_SNAPSHOTS: Final = SnapshotManifest(ChainPoint(), [])


def manifest_key(shard: int) -> str:
    """The key of the shard's manifest."""
    return f"snapshots.{shard}"


def read_manifest(shard: int) -> LogSteps[tuple[SnapshotManifest, int]]:
    """The manifest of a shard and its revision; both may lag (rule 11 of `log`)."""
    found: Register | None = yield from until_answered(ReadRegister(manifest_key(shard)))
    if found is None:
        return NO_SNAPSHOTS, 0
    return _decode_manifest(found.value), found.revision


def load_snapshot(shard: int, directory: Path) -> LogSteps[tuple[ChainPoint, Taken | None]]:
    """Where reading the log begins, and the newest complete snapshot, or None if there is none.

    Raises StoreUnusable if snapshots are listed and none of them is complete.
    """
    last_revision = -1
    while True:
        manifest, revision = yield from read_manifest(shard)
        for kept in manifest.snapshots:
            path = snapshot_path(directory, kept.position)
            if (yield from _fetch(shard, kept, path)):
                taken = read_snapshot(path)
                if taken is not None:
                    return manifest.start, taken
        if not manifest.snapshots:
            return manifest.start, None
        if revision == last_revision:
            raise StoreUnusable(f"shard {shard}: all its snapshots in the log are incomplete")
        # The manifest may lag, and its chunks may be dropped since: read it again.
        last_revision = revision
        yield Pause(RETRY_MS)


def _fetch(shard: int, kept: KeptSnapshot, path: Path) -> LogSteps[bool]:
    """Writes a snapshot's chunks to a file; false if one is missing or damaged."""
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for index in range(kept.chunks):
            data: bytes | None = None
            for _ in range(_CHUNK_TRIES):
                data = yield from until_answered(ReadChunk(shard, kept.name, index))
                if data is not None:
                    break
                yield Pause(RETRY_MS)
            if data is None:
                return False
            digest.update(data)
            file.write(data)
    return digest.hexdigest() == kept.sha256


def keep_snapshot(
    journal: ReplicatedJournal, upkeep: Upkeep, directory: Path, name: str
) -> LogSteps[bool]:
    """Takes a snapshot of the shard, stores it in the log and purges older slots.

    `name` is new for each call. Returns false if a newer snapshot is listed already, by a later
    owner. Raises the error of an engine or journal that has failed.
    """
    for _ in upkeep.pass_steps():
        yield Pause(0)
    path = snapshot_paths(directory)[0]
    # All entries up to here must be durable before the snapshot is listed and slots are purged.
    wanted = journal.last_sequence
    kept = yield from put_chunks(journal.shard, name, path)
    while journal.durable_sequence < wanted:
        journal.check_usable()
        yield Pause(_DURABLE_MS)
    listed = yield from list_snapshot(journal, kept)
    if listed is None:
        yield from until_answered(DropChunks(journal.shard, name))
        return False
    manifest, dropped = listed
    yield from until_answered(PurgeSlots(journal.shard, manifest.start.slot))
    journal.forget_marks_before(manifest.start.slot)
    for old in dropped:
        yield from until_answered(DropChunks(journal.shard, old.name))
    return True


def note_archive(shard: int, revision: int) -> LogSteps[ChainPoint]:
    """Writes to the manifest that the shard is archived; where its log begins at this instant.

    `revision` is that of the archive's register. From then on no owner purges what is not in the
    archive: every purge follows a swap of the manifest, and this swap comes before it.
    """
    while True:
        manifest, seen = yield from read_manifest(shard)
        if manifest.archived < revision:
            noted = msgspec.structs.replace(manifest, archived=revision)
            try:
                yield Swap(manifest_key(shard), msgspec.json.encode(noted), seen)
            except (Mismatch, Unanswered):
                yield Pause(RETRY_MS)
                continue
        return manifest.start


def put_chunks(shard: int, name: str, path: Path) -> LogSteps[KeptSnapshot]:
    """Stores a snapshot's file, which readers find once it is listed. Raises OSError."""
    digest = hashlib.sha256()
    count = 0
    with open(path, "rb") as file:
        while data := file.read(CHUNK_BYTES_MAX):
            digest.update(data)
            yield from until_answered(PutChunk(shard, name, count, data))
            count += 1
    return KeptSnapshot(name, count, digest.hexdigest(), offset_of(path))


def list_snapshot(
    journal: ReplicatedJournal, kept: KeptSnapshot
) -> LogSteps[tuple[SnapshotManifest, Sequence[KeptSnapshot]] | None]:
    """Puts the snapshot first in the manifest; the manifest, and the snapshots it dropped.

    None if a snapshot of a later position is listed.
    """
    shard = journal.shard
    dropped: Sequence[KeptSnapshot] = ()
    while True:
        manifest, revision = yield from read_manifest(shard)
        if kept in manifest.snapshots:
            # An earlier attempt was carried out, although it was refused or not answered.
            return manifest, dropped
        if any(each.position >= kept.position for each in manifest.snapshots):
            return None
        snapshots = [kept, *manifest.snapshots]
        snapshots, dropped = snapshots[:KEPT], snapshots[KEPT:]
        oldest = min(each.position for each in snapshots)
        start = journal.mark_before(min(oldest, journal.first_position))
        may_purge = journal.may_purge(manifest.archived)
        if start is None or start.slot < manifest.start.slot or not may_purge:
            start = manifest.start
        listed = SnapshotManifest(start, snapshots, manifest.archived)
        value = msgspec.json.encode(listed)
        try:
            yield Swap(manifest_key(shard), value, revision)
        except (Mismatch, Unanswered):
            yield Pause(RETRY_MS)
            continue
        return listed, dropped
