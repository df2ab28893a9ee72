"""Places: the journal's part of an integer that the core keeps."""

import pytest

from penstock.core.delivery import PLACE_SIZE_MASK, Delivery, size_bytes
from penstock.journal.place import pack_place, position_of


@pytest.mark.parametrize("position", [0, 1, 2**31, 2**40 + 3])
@pytest.mark.parametrize("size", [0, 1, 64 * 1024 * 1024, PLACE_SIZE_MASK])
def test_the_core_reads_the_size_of_a_place_and_the_journal_its_position(position, size):
    place = pack_place(position, size)
    assert size_bytes(Delivery(1, 1, 1, place, 0)) == size
    assert position_of(place) == position
