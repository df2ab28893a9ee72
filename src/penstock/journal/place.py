"""A message's place in a journal, as the one integer by which the core refers to the message.

    position << 32 | the message's size in bytes

Each journal chooses what a position is: a byte offset of segment files, or a number of its own. The
core reads the size, by its mask, and nothing else.
"""

from typing import Final

from penstock.core.delivery import PLACE_SIZE_MASK

_SIZE_BITS: Final = PLACE_SIZE_MASK.bit_length()


def pack_place(position: int, size_bytes: int) -> int:
    """The place of a message of this size at this position."""
    return position << _SIZE_BITS | size_bytes


def position_of(place: int) -> int:
    """The position in a place, for the journal that packed it."""
    return place >> _SIZE_BITS
