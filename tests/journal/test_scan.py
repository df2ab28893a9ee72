"""Finding the next entry after damage: bytes within a body that look like entries are ignored."""

import random

import pytest

from penstock.journal.entry import pack
from penstock.journal.scan import Limit, find_first, valid_end, walk

VERSION = b"TESTDATA"


class DamagedStream:
    """Entries in one string of bytes, some of which a test then damages."""

    def __init__(self, bodies, first_id=1):
        self.image = bytearray()
        self.first_id = first_id
        self.offsets = []
        for number, body in enumerate(bodies, start=first_id):
            self.offsets.append(len(self.image))
            self.image += pack(VERSION, 0, number, body)
        self.limit = Limit(len(self.image), first_id + len(bodies))
        self.quarantined = []

    def read(self, offset, size):
        return bytes(self.image[offset : offset + size])

    def damage_header(self, index):
        self.image[self.offsets[index] + 5] ^= 0x40

    def walk(self):
        note = self.quarantined.append
        return [e.entry_id for e in walk(self.read, 0, self.first_id, self.limit, note)]


@pytest.mark.parametrize("first_id", [1, 2**32 - 3, 2**63])
def test_a_damaged_header_loses_only_its_entry(first_id):
    rng = random.Random(first_id)
    bodies = [rng.randbytes(rng.choice([0, 1, 31, 32, 33, 500])) for _ in range(20)]
    for index in range(20):
        stream = DamagedStream(bodies, first_id)
        stream.damage_header(index)
        lost = first_id + index
        assert stream.walk() == [n for n in range(first_id, first_id + 20) if n != lost]
        assert [found[:2] for found in stream.quarantined] == [
            (stream.offsets[index], 32 + len(bodies[index]))
        ]


def test_a_good_entry_between_two_damaged_headers_is_kept():
    stream = DamagedStream([bytes(50)] * 10)
    for index in (2, 4, 5, 7):
        stream.damage_header(index)
    assert stream.walk() == [1, 2, 4, 7, 9, 10]


def test_entries_within_the_body_of_a_damaged_entry_are_ignored():
    inside = b"".join(pack(VERSION, 0, number, b"forged") for number in (2, 3, 4))
    for body in (inside, b"x" + inside, inside + b"x", pack(VERSION, 0, 3, b"forged")):
        stream = DamagedStream([b"a", body, b"c", b"d", b"e"], first_id=1)
        stream.damage_header(1)
        assert stream.walk() == [1, 3, 4, 5]
        assert len(stream.quarantined) == 1


def test_a_damaged_last_entry_ends_the_walk():
    stream = DamagedStream([b"a", pack(VERSION, 0, 3, b"forged")])
    stream.damage_header(1)
    assert stream.walk() == [1]


def test_large_bodies_of_zeroes_or_of_headers_are_skipped():
    headers = b"".join(pack(VERSION, 0, number, b"") for number in range(100, 3000))
    stream = DamagedStream([bytes(1 << 20), headers, b"next", b"last"])
    stream.damage_header(0)
    stream.damage_header(1)
    assert stream.walk() == [3, 4]


def test_a_header_further_away_than_one_window_is_found():
    stream = DamagedStream([b"a", random.Random(1).randbytes(2_500_000), b"c"])
    stream.damage_header(1)
    assert stream.walk() == [1, 3]


def test_the_first_entry_is_found_from_the_middle_of_another():
    stream = DamagedStream([bytes(100)] * 5, first_id=40)
    assert find_first(stream.read, 0, stream.limit) == (0, 40)
    assert find_first(stream.read, 7, stream.limit) == (stream.offsets[1], 41)
    assert find_first(stream.read, stream.offsets[4] + 1, stream.limit) == stream.limit


def test_a_tail_ends_before_an_entry_whose_id_does_not_follow():
    stream = DamagedStream([b"a", b"b"])
    stale = pack(VERSION, 0, 9, b"of an earlier process")
    image = bytes(stream.image) + stale

    def read(offset, size):
        return image[offset : offset + size]

    assert valid_end(read, 0, 1, len(image)) == (len(stream.image), 3)


def test_a_walk_whose_limit_is_within_an_entry_ends_before_that_entry():
    stream = DamagedStream([b"a", bytes(100), b"c"])
    stream.limit = Limit(stream.offsets[1] + 60, None)
    assert stream.walk() == [1]
    assert stream.quarantined == []
