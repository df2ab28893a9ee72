"""Upkeep while the engine runs: no message is lost or changed, and the disk use stays small."""

import os
import threading
from typing import Any

import pytest

from penstock.backends.engine import upkeep as upkeep_module
from penstock.backends.engine.store import open_engine
from penstock.clock import ManualClock
from penstock.core.shard import ShardSnapshot
from penstock.errors import JournalError, StoreFull
from penstock.journal import reader_positions
from penstock.journal.header_page import (
    FORMAT,
    PAGE_BYTES,
    SLOT_OFFSETS,
    FileHeader,
    Slot,
    pack_page,
    pack_slot,
)
from penstock.journal.reader import JournalReader
from penstock.journal.snapshot import Outline, SnapshotWriter, read_outline, snapshot_paths
from penstock.journal.store import FORMAT as STORE_FORMAT
from penstock.journal.stream_files import name_of
from penstock.service import CreateQueue, Delete, Pull, Purge, Push, Redrive, Stats
from tests.backends.engine.random_store import (
    exact_replay,
    first_difference,
    plain_state,
    small_slices,
)
from tests.journal.disk import Disk
from tests.server.conftest import until


class ReopenedStore:
    """A store that can be reopened, and whose passes can have commands between their steps."""

    def __init__(self, root, **options):
        self.root = root
        self.clock = ManualClock()
        self.options = {"file_bytes": 16_384, "archive": root / "archive"} | options
        self.engine = self._open()

    def _open(self):
        return open_engine(self.root / "store", clock=self.clock, **self.options)

    def __call__(self, *commands):
        replies = [self.engine.submit(command) for command in commands]
        return replies[-1]

    def bodies(self, queue, limit=100):
        return [claim.body for claim in self(Pull(queue, limit))]

    def run_pass(self, *after_outline):
        """Runs a pass, and the given commands between its outline and its first slice."""
        commands = list(after_outline)
        steps: list[Any] = []

        def exclusive(step):
            if steps:
                while commands:
                    self(commands.pop(0))
            steps.append(step)
            return step()

        self.engine.upkeep._exclusive = exclusive
        self.engine.upkeep.run_pass()
        assert not commands

    def reopen(self):
        self.engine.close()
        self.engine = self._open()
        # The recovered state must be that of a replay of every event.
        recovered = plain_state(self.engine.shard, self.engine.journal.load)
        if self.options["archive"] is not None:
            assert first_difference(recovered, plain_state(exact_replay(self.root))) is None

    def journal_bytes(self):
        # By their number: a file that is being created may be renamed before its size is read.
        files = (self.root / "store" / "journal").glob("*.seg")
        return sum(self.options["file_bytes"] for _ in files)


@pytest.fixture(autouse=True)
def _in_small_steps(monkeypatch):
    small_slices(monkeypatch)


@pytest.fixture
def store(quick_path):
    store = ReopenedStore(quick_path)
    yield store
    store.engine.close()


def test_a_message_that_moves_to_a_queue_made_during_the_pass_is_not_lost(store):
    store(CreateQueue("old"), Push("old", b"one"), Push("old", b"two"))
    store.run_pass(CreateQueue("new"), Redrive("old", "new", 1))
    store.reopen()
    assert store.bodies("new") == [b"one"]
    assert store.bodies("old") == [b"two"]


def test_a_message_that_moves_during_the_pass_keeps_its_place_in_the_order(store):
    fifo = {"fifo": True}
    store(CreateQueue("from", fifo), CreateQueue("to", fifo), Push("from", b"moved", group="g"))
    store.run_pass(
        Push("to", b"first", group="g"),
        Redrive("from", "to"),
        Push("to", b"last", group="g"),
    )
    store.reopen()
    assert store.bodies("to") == [b"first", b"moved", b"last"]


def test_a_message_moved_from_another_queue_is_kept_although_its_number_is_lower(store):
    store(CreateQueue("from"), CreateQueue("to"), Push("from", b"moved"))
    store(*(Push("to", b"%d" % number) for number in range(20)), Redrive("from", "to"))
    for _ in range(2):
        # The second time the queue was restored from a snapshot, and nothing has moved since.
        store.run_pass()
        store.reopen()
    assert store(Stats("to")).messages == 21
    assert store.bodies("to")[-1] == b"moved"


def test_messages_that_change_queues_during_the_pass_are_each_kept_once(store):
    store(CreateQueue("left"), CreateQueue("right"), CreateQueue("third"))
    for number in range(20):
        store(Push("left", b"l%d" % number), Push("right", b"r%d" % number))
    store.run_pass(Redrive("left", "third"), Redrive("right", "left"), Redrive("third", "right"))
    store.reopen()
    assert store.bodies("left") == [b"r%d" % number for number in range(20)]
    assert store.bodies("right") == [b"l%d" % number for number in range(20)]


def test_the_rank_of_a_message_that_moved_during_the_pass_is_not_used_again(store):
    store(CreateQueue("from"), CreateQueue("to"), Push("from", b"moved"))
    store.run_pass(Redrive("from", "to"))
    store.reopen()
    store(Purge("to"))
    store.reopen()
    assert store(Stats("to")).messages == 0


def test_a_queue_purged_during_the_pass_has_only_the_messages_pushed_after_it(store):
    store(CreateQueue("q"), *[Push("q", b"old")] * 3)
    store.run_pass(Purge("q"), Push("q", b"new"))
    store.reopen()
    assert store.bodies("q") == [b"new"]


def test_long_lived_messages_do_not_keep_the_files_of_deleted_ones(quick_path):
    """Row 18: the disk holds twice the live data at most."""
    store = ReopenedStore(quick_path, archive=None, file_bytes=65_536)
    store(CreateQueue("keep"), CreateQueue("go"))
    kept = []
    sizes = []
    for turn in range(60):
        kept.append(b"%d " % turn * 100)
        store(Push("keep", kept[-1]))
        for _ in range(40):
            store(Push("go", bytes(1_000)))
            for claim in store(Pull("go")):
                store(Delete("go", claim.receipt))
        store.run_pass()
        sizes.append(store.journal_bytes())
    live = sum(len(body) + upkeep_module.MESSAGE_BYTES for body in kept)
    # In addition: room that is reserved after the end, what two passes appended, and a file.
    constant = sizes[0] + 3 * 40 * 1_500 + 65_536
    assert sizes[-1] <= 2 * live + constant
    assert max(sizes[5:]) <= 2 * live + constant
    store.reopen()
    assert store.bodies("keep") == kept
    store.engine.close()


def test_nothing_that_a_named_reader_has_not_read_is_dropped(store):
    store(CreateQueue("q"))
    reader_positions.register(store.root / "store", "spark", 0, 1)
    for _ in range(4):
        store(*[Push("q", bytes(3_000))] * 20)
        store(Purge("q"))
        store.run_pass()
    assert store.engine.journal.segments.first_offset == 0
    floor = store.engine.journal.segments.end_offset
    reader_positions.register(store.root / "store", "spark", floor, 2)
    for _ in range(3):
        store.run_pass()
        store(*[Push("q", bytes(3_000))] * 20)
        store(Purge("q"))
    assert 0 < store.engine.journal.segments.first_offset <= floor
    assert reader_positions.forget(store.root / "store", "spark")
    store.run_pass()
    store.reopen()


def test_a_snapshot_that_does_not_fit_changes_nothing_and_the_next_one_does(store):
    store(CreateQueue("q"), Push("q", b"one"))
    store.run_pass()
    before = snapshot_paths(store.root / "store")
    (store.root / "store" / "snapshot.new").symlink_to("/dev/full")
    store(Push("q", b"two"))
    with pytest.raises(StoreFull, match=r"snapshot\.new: cannot be made"):
        store.run_pass()
    assert store.engine.shard.moves is None
    assert snapshot_paths(store.root / "store") == before
    (store.root / "store" / "snapshot.new").unlink()
    store.run_pass()
    assert len(snapshot_paths(store.root / "store")) == 2
    store.reopen()
    assert store.bodies("q") == [b"one", b"two"]


def test_many_large_messages_are_carried_in_several_steps(quick_path):
    store = ReopenedStore(quick_path, archive=None, file_bytes=1 << 20)
    store(CreateQueue("keep"), CreateQueue("go"))
    for number in range(40):
        store(Push("keep", b"%02d" % number * 100_000), Push("go", bytes(800_000)))
    store(Purge("go"))
    store.run_pass()
    store(Push("go", bytes(10)))
    grown = []

    def exclusive(step):
        before = store.engine.journal.segments.end_offset
        reply = step()
        grown.append(store.engine.journal.segments.end_offset - before)
        return reply

    store.engine.upkeep._exclusive = exclusive
    store.engine.upkeep.run_pass()
    assert sum(grown) > 20 * 200_000
    assert max(grown) < 1.5 * upkeep_module.CARRY_BYTES_MAX
    store.reopen()
    assert [body[:2] for body in store.bodies("keep")] == [b"%02d" % number for number in range(40)]
    store.engine.close()


def test_a_file_whose_content_cannot_be_carried_stays_and_those_before_it_are_dropped(quick_path):
    disk = Disk()
    disk.path = str(quick_path / "store" / "journal")
    store = ReopenedStore(quick_path, archive=None, storage=disk)
    store(CreateQueue("keep"), CreateQueue("go"))
    for number in range(30):
        store(*[Push("go", bytes(3_000))] * 6)
        if number >= 10:
            store(Push("keep", b"%02d" % number * 500))
    store(Purge("go"))
    store.run_pass()
    files = len(disk.names_now)
    disk.room_bytes = disk.used_bytes()
    store.engine.journal.segments.reserve_bytes = 1 << 20
    store.run_pass()
    assert store.engine.journal.segments.first_offset > 0
    assert len(disk.names_now) < files
    assert [body[:2] for body in store.bodies("keep")] == [b"%02d" % each for each in range(10, 30)]
    store.engine.close()


@pytest.mark.parametrize("reopened", [False, True])
def test_messages_that_one_command_removed_leave_the_disk_without_further_commands(
    quick_path, monkeypatch, reopened
):
    monkeypatch.setattr(upkeep_module, "GROWTH_BYTES_MIN", 100_000)
    store = ReopenedStore(quick_path, archive=None, file_bytes=65_536)
    store(CreateQueue("q"), CreateQueue("keep"), Push("keep", b"kept"))
    store(*[Push("q", bytes(20_000))] * 100)
    store.run_pass()
    large = store.journal_bytes()
    store(Purge("q"))
    if reopened:
        store.reopen()
    monkeypatch.setattr(upkeep_module, "_CHECK_S", 0.01)
    lock = threading.Lock()

    def exclusive(step):
        with lock:
            return step()

    store.engine.upkeep.start(exclusive)
    until(lambda: store.journal_bytes() <= large - 1_500_000, 90)
    store.engine.upkeep.stop()
    store.reopen()
    assert store.bodies("keep") == [b"kept"]
    assert store.bodies("q") == []
    store.engine.close()


def test_shrinking_frees_deleted_messages_although_nothing_more_is_pushed(quick_path, monkeypatch):
    monkeypatch.setattr(upkeep_module, "GROWTH_BYTES_MIN", 1_000)
    store = ReopenedStore(quick_path, archive=None)
    store(CreateQueue("q"), CreateQueue("keep"), Push("keep", b"kept"))
    store(*[Push("q", bytes(3_000))] * 40)
    end = store.engine.journal.segments.end_offset
    store(Purge("q"))
    store.engine.upkeep._shrink()
    assert store.engine.journal.segments.first_offset > end - 16_384
    store.engine.journal.segments.sync()
    with JournalReader(quick_path / "store" / "journal") as reader:
        # An entry without events would be a gap in the audit of the journal.
        assert [entry.entry_id for entry in reader.entries() if not reader.decoded(entry)] == []
    store.reopen()
    assert store.bodies("keep") == [b"kept"]
    store.engine.close()


def test_in_a_journal_of_one_file_nothing_is_carried_and_nothing_is_lost(quick_path):
    store = ReopenedStore(quick_path, archive=None, file_bytes=65_536)
    store(CreateQueue("q"), Push("q", b"one"))
    for _ in range(3):
        store.run_pass()
        store(Push("q", b"more"))
    segments = store.engine.journal.segments
    assert segments.first_offset == 0
    assert sum(1 for _ in segments.entries(end=segments.end_offset)) == 5
    store.engine.close()


def test_nothing_is_dropped_until_the_archive_can_be_used(store):
    archive = store.root / "archive"
    archive.write_bytes(b"a file where the archive should be")
    store(CreateQueue("q"))
    for _ in range(3):
        store(*[Push("q", bytes(3_000))] * 20)
        store(Purge("q"))
    store.run_pass()
    store(Push("q", b"later"))
    with pytest.raises(JournalError, match="cannot archive"):
        store.run_pass()
    assert store.engine.journal.segments.first_offset == 0
    assert store.bodies("q") == [b"later"]
    archive.unlink()
    store.run_pass()
    assert store.engine.journal.segments.first_offset > 0
    store.reopen()


def test_files_of_another_journal_in_the_archive_are_not_overwritten(store):
    archive = store.root / "archive"
    archive.mkdir()
    (archive / "000000000000.seg").write_bytes(b"another file")
    store(CreateQueue("q"))
    for _ in range(3):
        store(*[Push("q", bytes(3_000))] * 20)
        store(Purge("q"))
    store.run_pass()
    store(Push("q", b"one"))
    with pytest.raises(JournalError, match="the archive holds another file of that name"):
        store.run_pass()
    assert (archive / "000000000000.seg").read_bytes() == b"another file"
    assert store.engine.journal.segments.first_offset == 0
    assert store.bodies("q") == [b"one"]


def test_after_many_passes_a_store_has_few_files_open(quick_path):
    """Row 18."""
    store = ReopenedStore(quick_path, archive=None)
    store(CreateQueue("q"))
    counts = []
    for _ in range(30):
        store(*[Push("q", bytes(3_000))] * 20)
        store(Purge("q"))
        store.run_pass()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert store.engine.journal.segments.first_offset > 0
    # Each turn drops about five files of two descriptors each, two hundred in all if they stayed
    # open. The number of spare files depends on a thread.
    assert max(counts[10:]) <= max(counts[:10]) + 40
    store.engine.close()


def test_a_store_works_when_its_journal_is_beyond_four_gigabytes(quick_path, monkeypatch):
    small_slices(monkeypatch)
    file_bytes = 16_384
    payload_bytes = file_bytes - PAGE_BYTES
    number = (5 << 30) // payload_bytes
    offset = number * payload_bytes
    identity = bytes(range(16))
    page = bytearray(pack_page(FileHeader(FORMAT, number, offset, file_bytes, identity)))
    slot = pack_slot(Slot(1, identity, offset, 1, offset, 1))
    page[SLOT_OFFSETS[0] : SLOT_OFFSETS[0] + len(slot)] = slot
    journal = quick_path / "store" / "journal"
    journal.mkdir(parents=True)
    (journal / name_of(number)).write_bytes(bytes(page).ljust(file_bytes, b"\0"))
    (quick_path / "store" / "store").write_bytes(STORE_FORMAT)
    SnapshotWriter(quick_path / "store", Outline(offset, 0, ShardSnapshot(1, 1, []))).finish()

    store = ReopenedStore(quick_path, archive=None)
    store(CreateQueue("q", {"visibility_ms": 60_000}))
    store(*(Push("q", b"%d" % count, priority=count % 2) for count in range(40)))
    assert len(store.bodies("q", limit=3)) == 3
    for _ in range(2):
        store.run_pass()
        store.reopen()
    assert store.engine.journal.segments.end_offset > 1 << 32
    assert store(Stats("q")).messages == 40
    odd, even = range(7, 40, 2), range(0, 40, 2)
    assert store.bodies("q") == [b"%d" % count for count in (*odd, *even)]
    store.engine.close()


def test_upkeep_continues_after_an_unexpected_error_and_reports_it(quick_path, monkeypatch):
    monkeypatch.setattr(upkeep_module, "_RETRY_S", 0)
    engine: Any = open_engine(quick_path / "store")
    errors = [RuntimeError("the event loop is closed")]
    seen, passed = [], threading.Event()

    def exclusive(step):
        if errors:
            raise errors.pop()
        seen.append(engine.upkeep.last_error)
        passed.set()
        return step()

    engine.upkeep.start(exclusive)
    engine.journal.grown()
    assert passed.wait(60)
    assert str(seen[0]) == "the event loop is closed"
    engine.upkeep.stop()
    engine.close()


REGION = 100
FULL, HALF, NONE = 100, 50, 0
CUTOFFS = {
    "all regions are full": ([FULL, FULL, FULL], 0, 300, 0),
    "the first is empty": ([NONE, FULL, FULL, FULL], 0, 400, 0),
    "half of them are empty": ([NONE, NONE, FULL, FULL], 0, 400, 100),
    "all are empty": ([NONE, NONE, NONE], 0, 350, 350),
    "all are half full": ([HALF, HALF, HALF], 0, 350, 350),
    "half full ones before a full one": ([HALF, HALF, HALF, HALF, FULL], 0, 500, 200),
    "the first were dropped before": ([NONE, NONE, NONE, FULL, FULL], 230, 400, 300),
    "no region is before the limit": ([NONE, NONE], 0, 50, 0),
    "regions after the limit do not count": ([NONE, FULL, FULL, NONE, NONE], 0, 300, 0),
}


@pytest.mark.parametrize("case", CUTOFFS)
def test_the_cutoff_is_where_the_remaining_regions_have_few_deleted_messages(case):
    live, first, limit, expected = CUTOFFS[case]
    found = upkeep_module.choose_cutoff(dict(enumerate(live)), first, limit, REGION)
    assert found == expected


LIMITED_CUTOFFS = {
    "as much as is allowed": ([FULL, FULL, FULL], 0, 300, 300, 300),
    "less than is there": ([FULL, FULL, FULL], 0, 300, 200, 200),
    "never nothing": ([FULL, FULL, FULL], 0, 300, 10, 100),
    "empty regions are free": ([NONE, FULL, NONE, NONE, FULL], 0, 500, 10, 400),
    "the last region may be partial": ([FULL, FULL], 0, 150, 300, 150),
    "the first were dropped before": ([NONE, NONE, FULL, FULL, FULL], 230, 500, 200, 400),
}


@pytest.mark.parametrize("case", LIMITED_CUTOFFS)
def test_a_pass_carries_a_limited_part_of_the_content(case):
    live, first, cutoff, carried_max, expected = LIMITED_CUTOFFS[case]
    regions = dict(enumerate(live))
    found = upkeep_module.limit_cutoff(regions, first, cutoff, REGION, carried_max)
    assert found == expected


def test_content_that_was_deleted_behind_many_live_messages_is_freed_in_parts(
    quick_path, monkeypatch
):
    """Row 18: also while content is carried, which is on the disk twice until the pass ends."""
    monkeypatch.setattr(upkeep_module, "GROWTH_BYTES_MIN", 65_536)
    store = ReopenedStore(quick_path, archive=None, file_bytes=65_536)
    store(CreateQueue("keep"), CreateQueue("go"))
    kept = [b"%d " % number * 4_000 for number in range(100)]
    store(*(Push("keep", body) for body in kept))
    live = sum(len(body) + upkeep_module.MESSAGE_BYTES for body in kept)
    upkeep, sizes = store.engine.upkeep, []
    drop_before = upkeep._drop_before
    segments = store.engine.journal.segments

    def measure(cutoff):
        # Without the spare files, which a thread makes at its own time.
        sizes.append(segments.end_offset - segments.first_offset)
        drop_before(cutoff)

    monkeypatch.setattr(upkeep, "_drop_before", measure)
    passes = 0
    for _ in range(30):
        for _ in range(60):
            store(Push("go", bytes(1_000)))
            for claim in store(Pull("go")):
                store(Delete("go", claim.receipt))
        store.run_pass()
        while upkeep.is_due:
            store.run_pass()
            passes += 1
    assert passes >= 4
    assert segments.first_offset > live
    assert max(sizes) <= 2 * live
    store.reopen()
    assert store.bodies("keep") == kept
    store.engine.close()


@pytest.mark.parametrize("fifo", [False, True])
def test_dedup_ids_are_taken_in_slices_and_none_is_lost_or_doubled(quick_path, monkeypatch, fifo):
    small_slices(monkeypatch)
    monkeypatch.setattr(upkeep_module, "SLICE", 4)
    store = ReopenedStore(quick_path)
    store(CreateQueue("q", {"fifo": fifo}), CreateQueue("p", {"fifo": fifo}))
    for number in range(30):
        store(Push("q", b"x", dedup_id=f"q{number}", group="g"))
        store(Push("p", b"x", dedup_id=f"p{number}", group="g"))
    # Between the outline and the first slice: another id, and a purge, which drops those of a FIFO.
    store.run_pass(Push("q", b"x", dedup_id="later", group="g"), Purge("p"))
    outline = read_outline(snapshot_paths(quick_path / "store")[0])
    assert outline is not None
    assert [kept.dedups for kept in outline.shard.queues] == [[], []]
    before = store.engine.shard.snapshot()
    assert len(before.queues[0].dedups) == 31
    assert len(before.queues[1].dedups) == (0 if fifo else 30)
    store.reopen()
    assert store.engine.shard.snapshot() == before
    first = store(Push("q", b"x", dedup_id="q0", group="g"))
    assert first.duplicate
    store.engine.close()
