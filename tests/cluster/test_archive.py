"""The archive: the segment files that successive owners of a shard write."""

import asyncio
from pathlib import Path

import pytest

from penstock.cluster.archive import ShardArchive, shard_directory
from penstock.cluster.journal import NO_ARCHIVE
from penstock.cluster.open import open_node
from penstock.core.events import Pushed, QueueCreated
from penstock.errors import CorruptEntry, JournalError, StoreFull, StoreInUse, StoreUnusable
from penstock.journal import codec
from penstock.journal.entry import join
from penstock.journal.reader import JournalReader
from penstock.journal.store import journals_in
from penstock.service import QueueSettings
from tests.journal.disk import Disk

IDENTITY = b"cluster"
SMALL = 8 * 1024


def entries(first, count, term=1):
    """This many entries of a stream, as a list of bytes."""
    packed = []
    for sequence in range(first, first + count):
        event = (
            QueueCreated(sequence, 1, "q", QueueSettings()) if sequence == 1 else pushed(sequence)
        )
        block, _ = codec.encode([event], 3, term)
        packed.append(join(codec.VERSION, sequence, block, b""))
    return packed


def pushed(number):
    return Pushed(number, 1, number, b"x" * 500, None, 0, None, None, 0, 0, None, 500)


def read_back(directory):
    with JournalReader(directory, archive=directory) as reader:
        found = [(each.entry_id, each.shard, each.term) for each in reader.events()]
        assert not reader.damage
    return found


def test_an_owner_continues_where_the_one_before_it_ended(tmp_path):
    stream = entries(1, 40, term=1) + entries(41, 40, term=2)
    whole = b"".join(stream)
    first = ShardArchive(tmp_path, IDENTITY, SMALL)
    assert first.open(0, 1, len(whole)) == 0
    reached = first.write(b"".join(stream[:40]))
    assert reached == len(b"".join(stream[:40]))
    second = ShardArchive(tmp_path, IDENTITY, SMALL)
    with pytest.raises(StoreInUse):
        # One writer at a time.
        second.open(0, 1, len(whole))
    first.close()
    assert second.open(reached, 41, len(whole)) == reached
    assert second.write(whole[reached:]) == len(whole)
    second.close()
    assert read_back(tmp_path) == [(n, 3, 1 if n <= 40 else 2) for n in range(1, 81)]
    assert len(list(tmp_path.glob("*.seg"))) > 5


def test_an_archive_that_is_started_late_begins_with_the_oldest_available_entry(tmp_path):
    stream = entries(1, 60)
    late = len(b"".join(stream[:30]))
    archive = ShardArchive(tmp_path, IDENTITY, SMALL)
    assert archive.open(late, 31, late) == late
    archive.close()
    archive = ShardArchive(tmp_path, IDENTITY, SMALL)
    assert archive.open(late, 31, len(b"".join(stream))) == late
    archive.write(b"".join(stream[30:]))
    archive.close()
    assert [each[0] for each in read_back(tmp_path)] == list(range(31, 61))


def test_an_archive_that_does_not_fit_the_stream_is_refused_and_left_alone(tmp_path):
    stream = entries(1, 20)
    whole = b"".join(stream)
    archive = ShardArchive(tmp_path, IDENTITY, SMALL)
    archive.open(0, 1, len(whole))
    archive.write(b"".join(stream[:10]))
    with pytest.raises(CorruptEntry):
        archive.write(b"".join(stream[15:]))
    archive.close()
    before = read_back(tmp_path)
    assert len(before) == 10
    ten = len(b"".join(stream[:10]))
    for other, first, end in (
        (b"another", 0, len(whole)),
        (IDENTITY, ten + 1, len(whole)),
        (IDENTITY, 0, ten - 1),
    ):
        with pytest.raises(StoreUnusable, match="empty directory"):
            ShardArchive(tmp_path, other, SMALL).open(first, 1, end)
    assert read_back(tmp_path) == before


def test_an_archive_continues_where_its_files_end_after_the_disk_was_full(tmp_path, monkeypatch):
    """A part of what was to be written is in the files already."""
    monkeypatch.chdir(tmp_path)
    disk = Disk(room_bytes=4 * SMALL)
    archive = ShardArchive(Path(disk.path), IDENTITY, SMALL, disk)
    stream = entries(1, 80)
    whole = b"".join(stream)
    assert archive.open(0, 1, len(whole)) == 0
    with pytest.raises(StoreFull):
        archive.write(whole)
    disk.room_bytes = 1 << 40
    reached = archive.open(0, 1, len(whole))
    assert 0 < reached < len(whole)
    assert archive.write(whole[reached:]) == len(whole)
    archive.close()
    with JournalReader(disk.path, storage=disk) as reader:
        assert [each.entry_id for each in reader.entries()] == [*range(1, 81)]


def test_an_archive_recovers_from_a_failed_sync(tmp_path, monkeypatch):
    """After a failed sync, the files are opened again, and only what is durable counts."""
    monkeypatch.chdir(tmp_path)
    disk = Disk()
    archive = ShardArchive(Path(disk.path), IDENTITY, SMALL, disk)
    stream = entries(1, 20)
    whole = b"".join(stream)
    assert archive.open(0, 1, len(whole)) == 0
    ten = archive.write(b"".join(stream[:10]))
    disk.failing_syncs = {disk.syncs + 1}
    with pytest.raises(JournalError):
        archive.write(b"".join(stream[10:15]))
    reached = archive.open(0, 1, len(whole))
    assert ten <= reached <= len(whole)
    assert archive.write(whole[reached:]) == len(whole)
    archive.close()


def test_every_shard_of_a_cluster_is_archived_by_its_owner(on_cluster, tmp_path):
    archive = tmp_path / "archive"

    async def work(cluster):
        cluster.archive = str(archive)
        await cluster.add("a", "b")
        await cluster.until_owned("a", "b")
        queues = await cluster.connect()
        names = [f"q{number}" for number in range(8)]
        for name in names:
            await queues.create(name)
            await queues.push(name, name.encode())
        await cluster.crash("a")
        await cluster.until_owned("b")
        ids = {}
        for name in names:
            claim = await queues.pull(name)
            ids[claim.id] = name
            await queues.delete(claim)
        await cluster.until(lambda: not any(o.unarchived_bytes for o in cluster.owned_shards()))
        # What is not archived is not purged; what is may be.
        for owned in cluster.owned_shards():
            assert await owned.take_snapshot()
            assert owned.journal.first_position <= owned.journal.archived_position
        assert len(journals_in(archive)) == 4
        kinds: dict[str, list[int]] = {}
        for shard, path in enumerate(journals_in(archive)):
            assert path == str(shard_directory(archive, shard))
            with JournalReader(path, archive=path) as reader:
                for each in reader.events():
                    assert each.shard == shard
                    kinds.setdefault(type(each.event).__name__, []).append(each.term)
        assert len(kinds["Pushed"]) == len(kinds["Deleted"]) == 8

    on_cluster(work)


def test_a_node_without_an_archive_purges_nothing_of_a_cluster_that_has_one(on_cluster, tmp_path):
    async def work(cluster):
        cluster.archive = str(tmp_path / "archive")
        await cluster.add("a")
        await cluster.until_owned("a")
        await cluster.end("a")
        cluster.archive = None
        await cluster.add("b")
        await cluster.until_owned("b")
        (owned,) = cluster.owned_shards()
        assert owned.journal.archived_position == owned.journal.first_position
        await cluster.end("b")
        node = await open_node(
            cluster.address, node="c", directory=cluster.path / "c", archive="none"
        )
        cluster.nodes["c"] = node
        await cluster.until_owned("c")
        (owned,) = cluster.owned_shards()
        await cluster.until(lambda: owned.journal.archived_position == NO_ARCHIVE)
        await cluster.end("c")

    on_cluster(work, shards=1)


def test_a_full_or_missing_archive_stops_purges_and_is_reported(on_cluster, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")

    async def work(cluster):
        cluster.archive = str(blocked)
        await cluster.add("a")
        await cluster.until_owned("a")
        queues = await cluster.connect()
        await queues.create("q")
        await queues.push("q", b"x")
        (owned,) = cluster.owned_shards()
        await cluster.until(lambda: owned.archive_error)
        assert owned.unarchived_bytes > 0
        assert "file" in cluster.nodes["a"].node.status()["owned"]["0"]["archive_error"]
        await owned.take_snapshot()
        assert owned.journal.first_position == 0
        # Once the path can be a directory, the archive is written.
        await asyncio.to_thread(blocked.unlink)
        await cluster.until(lambda: not owned.archive_error and not owned.unarchived_bytes)

    on_cluster(work, shards=1)
