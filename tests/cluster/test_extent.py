"""The bytes of extents, and the checks while a chain of them is read."""

from pathlib import Path

import pytest

from penstock.cluster.extent import (
    BrokenChain,
    ChainPoint,
    Extent,
    ExtentChain,
    pack_extent,
    unpack_extent,
)
from penstock.core.events import Deleted, Pushed
from penstock.journal import codec
from penstock.journal.entry import join

GOLDEN = Path(__file__).parents[1] / "golden" / "extents" / "extents-1.txt"


def entry(sequence, *events):
    return join(codec.VERSION, sequence, codec.encode(events, 3, 12)[0], b"")


PUSHED = Pushed(1_700_000_000_000, 1, 7, b"hello", size_bytes=5)
DATA = entry(41, PUSHED) + entry(42, Deleted(1_700_000_000_001, 1, 7, 1))
EXTENTS = [
    Extent(3, 12, 0, 0, b"node-a", opens_term=True),
    Extent(3, 12, 4096, 41, DATA),
    Extent(3, 12, 4096 + len(DATA), 43, DATA[:40], goes_on=True),
]


def test_extents_are_read_and_written_as_in_the_golden_file():
    golden = [bytes.fromhex(line) for line in GOLDEN.read_text().splitlines()]
    assert [unpack_extent(packed) for packed in golden] == EXTENTS
    assert [pack_extent(extent) for extent in EXTENTS] == golden


def opened(term=12):
    chain = ExtentChain(3, ChainPoint(9, 4096, 41, 0))
    chain.read(9, pack_extent(Extent(3, term, 0, 0, b"n", opens_term=True)))
    return chain


def test_the_entries_of_an_extent_are_taken_in_order():
    chain = opened()
    data, entries = chain.read(10, pack_extent(EXTENTS[1]))
    assert data == DATA
    assert [each.entry_id for each in entries] == [41, 42]
    assert entries[0].offset == 4096
    assert chain.point == ChainPoint(11, 4096 + len(DATA), 43, 12)


WRONG = {
    "another slot": (11, EXTENTS[1]),
    "another shard": (10, EXTENTS[1]._replace(shard=4)),
    "a term that nobody opened": (10, EXTENTS[1]._replace(term=13)),
    "a position further on": (10, EXTENTS[1]._replace(position=5000)),
    "entries out of order": (10, EXTENTS[1]._replace(data=entry(42, PUSHED))),
    "half an entry": (10, EXTENTS[1]._replace(data=DATA[:-1])),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_extent_that_does_not_continue_the_chain_is_refused_and_changes_nothing(what):
    slot, extent = WRONG[what]
    chain = opened()
    before = chain.point
    with pytest.raises(BrokenChain):
        chain.read(slot, pack_extent(extent))
    assert chain.point == before
    assert chain.read(10, pack_extent(EXTENTS[1]))[0] == DATA


def test_every_flipped_bit_of_an_extent_is_found():
    packed = pack_extent(EXTENTS[1])
    for at in range(len(packed)):
        for bit in range(8):
            damaged = packed[:at] + bytes([packed[at] ^ 1 << bit]) + packed[at + 1 :]
            with pytest.raises(BrokenChain):
                opened().read(10, damaged)


def test_an_extent_of_a_lower_term_is_skipped():
    chain = opened(term=20)
    assert chain.read(10, pack_extent(EXTENTS[1])) == (b"", [])
    assert chain.point == ChainPoint(11, 4096, 41, 20)


def test_an_entry_continues_after_void_extents_and_is_dropped_when_its_term_ends():
    chain = opened()
    first = Extent(3, 12, 4096, 41, DATA[:50], goes_on=True)
    rest = Extent(3, 12, 4146, 41, DATA[50:])
    void = Extent(3, 11, 0, 0, b"late", opens_term=True)
    for slot, extent in enumerate((first, void), 10):
        assert chain.read(slot, pack_extent(extent)) == (b"", [])
    assert chain.point is None
    assert chain.read(12, pack_extent(rest))[0] == DATA
    chain = opened()
    chain.read(10, pack_extent(first))
    chain.read(11, pack_extent(Extent(3, 13, 0, 0, b"next", opens_term=True)))
    assert chain.point == ChainPoint(12, 4096, 41, 13)
