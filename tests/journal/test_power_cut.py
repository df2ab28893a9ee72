"""Row 2 of the scorecard: in every state that a power cut can leave, nothing answered is lost."""

import contextlib
import itertools
import random

import pytest

from penstock.errors import JournalError
from penstock.journal.reader import JournalReader
from penstock.journal.segments import Segments
from tests.conftest import FULL
from tests.journal.disk import Disk, PowerCut

VERSION = b"TESTDATA"
SMALL_FILE = 8192


def open_on(disk, file_bytes=SMALL_FILE):
    return Segments.open(disk.path, storage=disk, file_bytes=file_bytes, background=False)


class Writer:
    """A writer that appends, syncs and drops, and keeps a list of what was answered."""

    def __init__(self, disk, file_bytes=SMALL_FILE):
        self.disk = disk
        self.written: list[bytes] = []
        self.openings = 0
        self.answered = 0
        self.drop_floor = 0
        self.drop_asked = 0
        self.segments = open_on(disk, file_bytes)

    def append(self, size):
        data = random.Random(f"{self.openings} {len(self.written)}").randbytes(size)
        self.written.append(data)
        entry_id, _ = self.segments.append([data], version=VERSION)
        assert entry_id == len(self.written)

    def sync(self):
        count = len(self.written)
        self.segments.sync()
        self.answered = count
        self.drop_floor = self.drop_asked

    def drop_half(self):
        found = list(self.segments.entries())
        if found:
            entry = found[len(found) // 2]
            self.drop_asked = entry.entry_id - 1
            if self.segments.drop_before(entry.offset):
                self.drop_floor = self.drop_asked

    def settle(self):
        self.segments.sync_watermark()

    def accept(self, disk):
        """Open the stream, compare it with what was answered, and continue with it."""
        self.disk = disk
        self.openings += 1
        self.segments = open_on(disk)
        found = list(self.segments.entries())
        first = self.segments.first_id
        assert not self.segments.quarantined
        assert self.segments.durable_offset == self.segments.end_offset
        assert self.drop_floor <= first - 1 <= self.drop_asked
        ids = [entry.entry_id for entry in found]
        assert ids == list(range(first, self.segments.next_id))
        assert self.segments.next_id - 1 >= self.answered, "an answered entry is lost"
        for entry in found:
            assert entry.data == self.written[entry.entry_id - 1]
        del self.written[self.segments.next_id - 1 :]
        self.answered = len(self.written)
        self.drop_floor = self.drop_asked = first - 1


OPERATIONS = {
    "small": lambda writer: writer.append(100),
    "spanning": lambda writer: writer.append(5000),
    "sync": lambda writer: writer.sync(),
    "drop": lambda writer: writer.drop_half(),
}


def run_until_cut(script, steps):
    """Run the script and cut the power after this many steps; None if it ended before."""
    writer = Writer(Disk())
    writer.disk.steps_left = steps
    try:
        for name in script:
            OPERATIONS[name](writer)
    except PowerCut:
        return writer
    return None if steps else writer


def copy_of(writer, disk):
    copy = Writer.__new__(Writer)
    copy.__dict__.update(writer.__dict__, written=list(writer.written), disk=disk)
    return copy


@pytest.mark.parametrize("length", [1, 2, 3])
def test_every_outcome_of_a_cut_within_three_operations_keeps_what_was_answered(length):
    outcomes = 0
    for script in itertools.product(OPERATIONS, repeat=length):
        for steps in itertools.count():
            writer = run_until_cut(script, steps)
            if writer is None:
                break
            for disk in writer.disk.outcomes():
                outcomes += 1
                copy_of(writer, disk).accept(disk)
    assert outcomes > 10**length


@pytest.mark.parametrize("seed", range(10_000 if FULL else 300))
def test_random_operations_with_many_power_cuts_lose_nothing_that_was_answered(seed):
    rng = random.Random(seed)
    disk = Disk(sector_bytes=rng.choice([512, 4096]), tearing=rng.random() < 0.3)
    writer = Writer(disk, file_bytes=rng.choice([8192, 12288, 65536]))
    for _ in range(4):
        writer.disk.steps_left = rng.randrange(60) if rng.random() < 0.7 else None
        try:
            for _ in range(rng.randrange(25)):
                kind = rng.random()
                if kind < 0.55:
                    writer.append(rng.choice([0, 1, 40, 300, 479, 480, 481, 4064, 9000]))
                elif kind < 0.85:
                    writer.sync()
                elif kind < 0.93:
                    writer.settle()
                else:
                    writer.drop_half()
        except PowerCut:
            pass
        writer.disk.steps_left = None
        if rng.random() < 0.3:
            # Only the process ended: what it wrote is still in the system's memory.
            writer.accept(writer.disk)
        left = writer.disk.after_cut(rng)
        left.steps_left = rng.randrange(30)
        # The power may be cut again, in the middle of the recovery.
        with contextlib.suppress(PowerCut):
            open_on(left)
        left.steps_left = None
        writer.accept(left.after_cut(rng))


@pytest.mark.parametrize("seed", range(100))
def test_a_failed_sync_and_then_a_cut_lose_nothing_that_was_answered(seed):
    rng = random.Random(seed)
    writer = Writer(Disk(sector_bytes=rng.choice([512, 4096])))
    for _ in range(3):
        writer.disk.failing_syncs = {writer.disk.syncs + 1 + rng.randrange(12)}
        with contextlib.suppress(JournalError):
            while True:
                writer.append(rng.choice([10, 700, 6000]))
                writer.sync()
        for call in (writer.sync, lambda: writer.append(1)):
            with pytest.raises(JournalError):
                call()
        del writer.written[-1:]
        if rng.random() < 0.5:
            # A new process first reads pages that are marked clean and were never written.
            writer.accept(writer.disk)
        writer.accept(writer.disk.after_cut(rng))


def test_recovery_writes_again_pages_that_a_failed_sync_marked_clean():
    disk = Disk()
    segments = open_on(disk)
    segments.append([b"unanswered"], version=VERSION)
    disk.failing_syncs = {disk.syncs + 1}
    with pytest.raises(JournalError):
        segments.sync()
    reopened = open_on(disk)
    assert [entry.data for entry in reopened.entries()] == [b"unanswered"]
    # It was read and so counts as answered: no outcome of a cut may lose it now.
    for left in disk.outcomes():
        assert [entry.data for entry in open_on(left).entries()] == [b"unanswered"]


def test_the_watermark_on_disk_is_never_beyond_what_is_durable():
    rng = random.Random(7)
    disk = Disk(sector_bytes=512)
    writer = Writer(disk)
    durable = 0
    for _ in range(60):
        writer.append(rng.choice([20, 900, 5000]))
        if rng.random() < 0.5:
            writer.sync()
            durable = writer.segments.durable_offset
        left = disk.after_cut(rng)
        if writer.segments.durable_offset:
            reader = JournalReader(left.path, storage=left)
            assert reader.durable_offset <= durable


def test_the_watermark_is_at_most_one_sync_behind():
    disk = Disk(sector_bytes=512)
    segments = open_on(disk)
    previous = 0
    for size in [10, 5000, 4064, 10, 9000, 100]:
        segments.append([bytes(size)], version=VERSION)
        before = segments.durable_offset
        segments.sync()
        for left in itertools.islice(disk.outcomes(), 64):
            reader = JournalReader(left.path, storage=left)
            assert reader.durable_offset >= previous
        previous = segments.durable_offset if size == 9000 else before
        if size == 9000:
            segments.sync_watermark()


def test_a_torn_slot_leaves_the_slot_before_it_valid():
    disk = Disk(sector_bytes=512, tearing=True)
    segments = open_on(disk)
    for count in range(1, 9):
        segments.append([bytes(10)], version=VERSION)
        segments.sync()
        segments.advance(segments.end_offset)
        segments.sync()
        for left in disk.outcomes():
            assert open_on(left).first_id == count + 1


def test_bytes_of_an_earlier_process_are_never_read_as_entries():
    disk = Disk(sector_bytes=512)
    segments = open_on(disk)
    # Each entry fills one sector, so that the third alone can be lost and the fourth kept.
    for number in range(4):
        segments.append([bytes([number]) * 480], version=VERSION)
    torn = disk.names_now["000000000000.seg"]
    torn.cache[4096 + 1024 : 4096 + 1536] = bytes(512)
    reopened = open_on(disk)
    assert reopened.next_id == 3
    reopened.append([b"n" * 480], version=VERSION)
    reopened.sync()
    found = [entry.data[:1] for entry in open_on(disk).entries()]
    assert found == [b"\0", b"\1", b"n"]


def test_a_slot_in_the_last_file_of_a_full_disk_is_synced_too():
    disk = Disk(sector_bytes=512, room_bytes=SMALL_FILE + 4096)
    segments = Segments.open(
        disk.path, storage=disk, file_bytes=SMALL_FILE, background=False, reserve_bytes=0
    )
    # The entry fills the only file; the next file, which would state this, cannot be created yet.
    segments.append([bytes(4064)], version=VERSION)
    segments.sync()
    disk.room_bytes = 10 * SMALL_FILE
    segments.append([b"next"], version=VERSION)
    segments.sync()
    for left in disk.outcomes():
        assert JournalReader(left.path, storage=left).durable_offset >= 4096
