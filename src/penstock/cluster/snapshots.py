"""Snapshots of a shard in the replicated log: chunks first, then a manifest, then the purge.

The manifest of a shard is a register. It lists the two newest snapshots, and the point at which the
log must begin for either of them. A snapshot counts once it is listed. Slots are purged only up to
that point, and only after it was listed; so a crash at any point leaves chunks that nobody lists,
or slots that nobody needs, and never a snapshot without its slots.
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
    Look,
    Mismatch,
    Pause,
    PurgeSlots,
    PutChunk,
    ReadChunk,
    Register,
    Swap,
    Unanswered,
    insist,
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

# How often a chunk that should be there is asked for before the snapshot is given up.
_CHUNK_TRIES: Final = 50
_DURABLE_MS: Final = 5


class KeptSnapshot(msgspec.Struct, frozen=True):
    """One snapshot: its name among the chunks, how many there are, and where it begins."""

    name: str
    chunks: int
    sha256: str
    position: int


class SnapshotManifest(msgspec.Struct, frozen=True):
    """The snapshots of a shard, newest first, and where the log begins for them."""

    start: ChainPoint
    snapshots: list[KeptSnapshot]


_decode_manifest = msgspec.json.Decoder(SnapshotManifest).decode
NO_SNAPSHOTS: Final = SnapshotManifest(ChainPoint(), [])


def manifest_key(shard: int) -> str:
    """The key of the register that lists the shard's snapshots."""
    return f"snapshots.{shard}"


def look_at_manifest(shard: int) -> LogSteps[tuple[SnapshotManifest, int]]:
    """The manifest of a shard and its revision; both may be behind (rule 11 of `log`)."""
    found: Register | None = yield from insist(Look(manifest_key(shard)))
    if found is None:
        return NO_SNAPSHOTS, 0
    return _decode_manifest(found.value), found.revision


def load_snapshot(shard: int, directory: Path) -> LogSteps[tuple[ChainPoint, Taken | None]]:
    """The newest whole snapshot, None if none was ever taken, and where the log begins for it.

    Raises StoreUnusable.
    """
    last_revision = -1
    while True:
        manifest, revision = yield from look_at_manifest(shard)
        for kept in manifest.snapshots:
            path = snapshot_path(directory, kept.position)
            if (yield from _fetch(shard, kept, path)):
                taken = read_snapshot(path)
                if taken is not None:
                    return manifest.start, taken
        if not manifest.snapshots:
            return manifest.start, None
        if revision == last_revision:
            raise StoreUnusable(f"shard {shard}: no snapshot of it is whole in the replicated log")
        # The manifest may have been behind, and its chunks dropped for newer ones: look again.
        last_revision = revision
        yield Pause(RETRY_MS)


def _fetch(shard: int, kept: KeptSnapshot, path: Path) -> LogSteps[bool]:
    """Writes a snapshot's chunks into a file; false if they are not all there, or damaged."""
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for index in range(kept.chunks):
            data: bytes | None = None
            for _ in range(_CHUNK_TRIES):
                data = yield from insist(ReadChunk(shard, kept.name, index))
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
    """Takes a snapshot of the shard, keeps it in the log and purges what is older.

    `name` is new for each call. Returns false if a newer one is listed already, as by a later
    owner. Raises what stops the engine or its journal.
    """
    for _ in upkeep.pass_steps():
        yield Pause(0)
    path = snapshot_paths(directory)[0]
    # The snapshot, and what was carried for it, must be in the log before anything is purged.
    wanted = journal.last_sequence
    kept = yield from _put_chunks(journal.shard, name, path)
    while journal.durable_sequence < wanted:
        journal.check_usable()
        yield Pause(_DURABLE_MS)
    listed = yield from _list_snapshot(journal, kept)
    if listed is None:
        yield from insist(DropChunks(journal.shard, name))
        return False
    manifest, dropped = listed
    yield from insist(PurgeSlots(journal.shard, manifest.start.slot))
    journal.forget_marks_before(manifest.start.slot)
    for old in dropped:
        yield from insist(DropChunks(journal.shard, old.name))
    return True


def _put_chunks(shard: int, name: str, path: Path) -> LogSteps[KeptSnapshot]:
    digest = hashlib.sha256()
    count = 0
    with open(path, "rb") as file:
        while data := file.read(CHUNK_BYTES_MAX):
            digest.update(data)
            yield from insist(PutChunk(shard, name, count, data))
            count += 1
    return KeptSnapshot(name, count, digest.hexdigest(), offset_of(path))


def _list_snapshot(
    journal: ReplicatedJournal, kept: KeptSnapshot
) -> LogSteps[tuple[SnapshotManifest, Sequence[KeptSnapshot]] | None]:
    """Puts the snapshot first in the manifest: the manifest, and what is no longer in it.

    None if a snapshot of a later point is there.
    """
    shard = journal.shard
    dropped: Sequence[KeptSnapshot] = ()
    while True:
        manifest, revision = yield from look_at_manifest(shard)
        if kept in manifest.snapshots:
            # An earlier try was done, though refused or unanswered.
            return manifest, dropped
        if any(each.position >= kept.position for each in manifest.snapshots):
            return None
        snapshots = [kept, *manifest.snapshots]
        snapshots, dropped = snapshots[:KEPT], snapshots[KEPT:]
        oldest = min(each.position for each in snapshots)
        start = journal.mark_before(min(oldest, journal.first_position))
        if start is None or start.slot < manifest.start.slot:
            start = manifest.start
        value = msgspec.json.encode(SnapshotManifest(start, snapshots))
        try:
            yield Swap(manifest_key(shard), value, revision)
        except (Mismatch, Unanswered):
            yield Pause(RETRY_MS)
            continue
        return SnapshotManifest(start, snapshots), dropped
