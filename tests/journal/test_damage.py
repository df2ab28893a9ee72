"""Rows 3 and 4 of the scorecard: a torn tail is cut without an error, damage costs one entry."""

import random

import pytest

from penstock.journal.header_page import PAGE_BYTES, SLOT_OFFSETS
from penstock.journal.reader import JournalReader
from penstock.journal.segments import Segments
from tests.conftest import FULL
from tests.journal.disk import Disk

VERSION = b"TESTDATA"
FILE_BYTES = 8192
PAYLOAD_BYTES = FILE_BYTES - PAGE_BYTES


def open_on(disk, **options):
    return Segments.open(
        disk.path, storage=disk, file_bytes=FILE_BYTES, background=False, **options
    )


def open_as(disk, writable):
    return open_on(disk) if writable else JournalReader(disk.path, storage=disk)


def damage_of(stream):
    return stream.quarantined if isinstance(stream, Segments) else stream.damage


class Damaged:
    """A stream on a disk, of which each test gets copies with changed bytes."""

    def __init__(self, bodies, *, settled):
        self.disk = Disk()
        self.bodies = bodies
        segments = open_on(self.disk)
        self.offsets = [segments.append([b], version=VERSION)[1] - 32 for b in bodies[:-1]]
        segments.sync()
        segments.sync_watermark()
        self.offsets.append(segments.append([bodies[-1]], version=VERSION)[1] - 32)
        self.end_offset = segments.end_offset
        if settled:
            segments.close()
        self.images = {name: bytes(i.cache) for name, i in self.disk.names_now.items()}

    def fresh(self):
        """Return a new disk with the files as the writer left them."""
        disk = Disk()
        for name, image in self.images.items():
            file = disk.create(name, 0, b"")
            file._inode.cache[:] = file._inode.stable[:] = image
        return disk

    def place(self, disk, offset):
        number, within = divmod(offset, PAYLOAD_BYTES)
        return disk.names_now[f"{number:012d}.seg"], PAGE_BYTES + within

    def flip(self, offset, bit):
        disk = self.fresh()
        inode, at = self.place(disk, offset)
        inode.cache[at] ^= 1 << bit
        return disk

    def truncate(self, offset):
        disk = self.fresh()
        inode, at = self.place(disk, offset)
        del inode.cache[at:], inode.stable[at:]
        return disk

    def zero_from(self, offset):
        disk = self.fresh()
        while offset < self.end_offset:
            inode, at = self.place(disk, offset)
            size = min(len(inode.cache) - at, self.end_offset - offset)
            inode.cache[at : at + size] = bytes(size)
            offset += size
        return disk

    def garble(self, offset):
        return self.flip(offset, 3)


def check_all_but(disk, damaged, index):
    """Assert that exactly this entry is found to be damaged and is lost."""
    for writable in (False, True):
        segments = open_as(disk, writable)
        found = list(segments.entries())
        expected = [(n + 1, body) for n, body in enumerate(damaged.bodies) if n != index]
        assert [(entry.entry_id, entry.data) for entry in found] == expected
        (quarantined,) = damage_of(segments)
        size = 32 + len(damaged.bodies[index])
        assert quarantined[:2] == (damaged.offsets[index], size)
    entry_id, _ = open_on(disk).append([b"later"], version=VERSION)
    assert entry_id == len(damaged.bodies) + 1


BODIES = [random.Random(n).randbytes(n * 13 % 400 + 100) for n in range(24)]
PLACES = {"head": 0, "middle": 12, "tail": 23}


@pytest.mark.parametrize("place", PLACES)
def test_a_flipped_bit_in_the_header_of_an_entry_costs_only_that_entry(place):
    damaged = Damaged(BODIES, settled=True)
    index = PLACES[place]
    for bit in range(32 * 8):
        disk = damaged.flip(damaged.offsets[index] + bit // 8, bit % 8)
        check_all_but(disk, damaged, index)


@pytest.mark.parametrize("place", PLACES)
def test_a_flipped_bit_in_the_payload_of_an_entry_costs_only_that_entry(place):
    index = PLACES[place]
    bodies = list(BODIES)
    bodies[index] = random.Random(place).randbytes(5000)
    damaged = Damaged(bodies, settled=True)
    for bit in random.Random(place).sample(range(5000 * 8), 1000):
        disk = damaged.flip(damaged.offsets[index] + 32 + bit // 8, bit % 8)
        check_all_but(disk, damaged, index)


@pytest.mark.parametrize("size", [10, 300, 4500])
@pytest.mark.parametrize("kind", ["truncate", "zero_from", "garble"])
def test_a_tail_damaged_at_any_byte_is_cut_without_an_error(kind, size):
    bodies = [b"kept", random.Random(size).randbytes(size).replace(b"\0", b"1")]
    damaged = Damaged(bodies, settled=False)
    start = damaged.offsets[-1]
    whole = set()
    for offset in range(start, damaged.end_offset):
        disk = getattr(damaged, kind)(offset)
        if disk.names_now.keys() == damaged.images.keys() and all(
            bytes(disk.names_now[name].cache).ljust(FILE_BYTES, b"\0") == image
            for name, image in damaged.images.items()
        ):
            # The removed bytes were zeroes, so nothing has changed.
            whole.add(offset)
            continue
        segments = open_on(disk)
        assert [entry.data for entry in segments.entries()] == [b"kept"]
        assert segments.quarantined == []
        assert (segments.end_offset, segments.next_id) == (start, 2)
        segments.append([b"later"], version=VERSION)
        segments.sync()
        assert [entry.data for entry in open_on(disk).entries()] == [b"kept", b"later"]
    assert len(whole) < 8


@pytest.mark.parametrize("bit", range(0, 60 * 8, 7))
def test_a_flipped_bit_in_a_file_header_is_repaired_and_loses_nothing(bit):
    damaged = Damaged(BODIES, settled=True)
    for number in (0, 1):
        disk = damaged.fresh()
        disk.names_now[f"{number:012d}.seg"].cache[bit // 8] ^= 1 << bit % 8
        for writable, reports in [(False, 1), (True, 1), (False, 0)]:
            segments = open_as(disk, writable)
            assert [entry.data for entry in segments.entries()] == BODIES
            assert len(damage_of(segments)) == reports


@pytest.mark.parametrize("settled", [False, True])
def test_a_flipped_bit_in_a_slot_loses_nothing(settled):
    damaged = Damaged(BODIES, settled=settled)
    for name in damaged.images:
        for slot_offset in SLOT_OFFSETS:
            for bit in range(0, 64 * 8, 5):
                disk = damaged.fresh()
                disk.names_now[name].cache[slot_offset + bit // 8] ^= 1 << bit % 8
                segments = open_on(disk)
                assert [entry.data for entry in segments.entries()] == BODIES


def test_files_whose_headers_are_damaged_are_identified_by_their_slots():
    damaged = Damaged([b"a", b"b"], settled=True)
    disk = damaged.fresh()
    names = [name for name in disk.names_now if name.endswith(".seg")]
    for name in names:
        disk.names_now[name].cache[:60] = bytes(60)
    segments = open_on(disk)
    assert [entry.data for entry in segments.entries()] == [b"a", b"b"]
    assert len(segments.quarantined) == len(names)


@pytest.mark.parametrize("seed", range(6_000 if FULL else 60))
def test_a_stream_with_random_damage_opens_and_gives_no_wrong_bytes(seed):
    """Rows 3, 4 and 19: segments with any bytes changed."""
    rng = random.Random(seed)
    damaged = Damaged(BODIES, settled=True)
    disk = damaged.fresh()
    for _ in range(rng.randrange(1, 6)):
        offset = rng.randrange(damaged.end_offset)
        inode, at = damaged.place(disk, offset)
        size = min(rng.choice([1, 40, 600]), len(inode.cache) - at)
        inode.cache[at : at + size] = rng.randbytes(size)
    segments = open_on(disk)
    found = {entry.entry_id: entry.data for entry in segments.entries()}
    assert all(BODIES[number - 1] == data for number, data in found.items())
    hit = sum(found_.size_bytes for found_ in segments.quarantined)
    kept = sum(32 + len(data) for data in found.values())
    assert hit + kept == damaged.end_offset


@pytest.mark.parametrize("place", [0, 1])
def test_a_damaged_slot_does_not_lead_to_a_file_that_was_dropped(place):
    """Row 4: both slots must say where the stream begins before the files before that are gone."""
    disk = Disk()
    segments = open_on(disk)
    for number in range(12):
        segments.append([bytes([number]) * 1_000], version=VERSION)
    segments.sync()
    assert segments.drop_before(segments.end_offset) > 0
    names = sorted(name for name in disk.names_now if name.endswith(".seg"))
    at = SLOT_OFFSETS[place]
    for name in names:
        cache = disk.names_now[name].cache
        if any(cache[at : at + 8]):
            cache[at] ^= 1
    reopened = open_on(disk)
    assert reopened.first_offset == segments.first_offset
    assert reopened.append([b"next"], version=VERSION)[0] == 13
