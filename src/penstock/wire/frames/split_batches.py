"""A batch or a bulk push of many items, split into parts that are decoded one by one.

One frame may have 10,000 items with 64 attributes each, which take most of a second to decode and
to execute. A server serves other requests between two parts. It decodes all of them before it
executes the first, so that a frame with a fault in it changes nothing.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from penstock.service import Batch, PushMany
from penstock.wire.frames.bodies import command_fault, decode_items, raw_items
from penstock.wire.frames.bulk import BulkFrame, bulk_count
from penstock.wire.frames.frames import BATCH, BULK_PUSH, Body

# Each of these takes about 10 ms: items with all options, items with only a body, or bytes.
PART_ITEMS_MAX: Final = 200
PLAIN_PART_ITEMS_MAX: Final = 2_500
PART_BYTES_MAX: Final = 4 * 1024 * 1024
# A body below this has too few items to be split.
_LARGE_BYTES: Final = 2_000


def parts_of(kind: int, body: Body) -> Iterator[Batch | PushMany] | None:
    """The parts of a large batch or bulk push, decoded one by one; None if it is not large.

    Raises, at once or with any part, what `decode_command` raises.
    """
    if len(body) <= _LARGE_BYTES:
        return None
    if kind == BATCH:
        return _batch_parts(body) if _has_many_items(body) else None
    if kind != BULK_PUSH or not _has_many_messages(body):
        return None
    frame = BulkFrame(body)
    items_max = PLAIN_PART_ITEMS_MAX if frame.is_plain else PART_ITEMS_MAX
    if frame.count <= items_max and frame.ends[-1] <= PART_BYTES_MAX:
        return None
    return _bulk_parts(frame, items_max)


def _has_many_items(body: Body) -> bool:
    """Whether a batch is to be split: by its size, or by the header of its array of items."""
    if len(body) > PART_BYTES_MAX:
        return True
    # The header of the command's array and its tag are a byte each. The header of an array of
    # sixteen or more has their number in two or four bytes. Anything else is short, or is refused.
    header = bytes(body[2:7])
    if header[:1] == b"\xdd":
        return int.from_bytes(header[1:5]) > PART_ITEMS_MAX
    return header[:1] == b"\xdc" and int.from_bytes(header[1:3]) > PART_ITEMS_MAX


def _has_many_messages(body: Body) -> bool:
    """Whether a bulk push may have to be split; if its head is wrong, the decoder refuses it."""
    if len(body) > PART_BYTES_MAX:
        return True
    count = bulk_count(body)
    return count is not None and count > PART_ITEMS_MAX


def pulls_one(body: Body) -> bool:
    """Whether the body of a pull asks for one message; it is not decoded, and may be wrong."""
    # The command's array and its tag have a byte each, as above. Then come the header of the
    # queue's name, which has one byte or two, the name and the limit, which is 1 if it is left out.
    if len(body) < 4:
        return False
    head = body[2]
    if 0xA0 <= head < 0xC0:
        place = 3 + (head & 0x1F)
    elif head == 0xD9:
        place = 4 + body[3]
    else:
        return False
    return len(body) <= place or body[place] == 1


def _batch_parts(body: Body) -> Iterator[Batch]:
    try:
        raws = raw_items(body)
        for start, stop in part_ranges([len(memoryview(raw)) for raw in raws], PART_ITEMS_MAX):
            yield Batch(decode_items(raws[start:stop], start))
    except Exception as fault:
        raise command_fault(BATCH, fault) from None


def _bulk_parts(frame: BulkFrame, items_max: int) -> Iterator[PushMany]:
    sizes = [end - start for start, end in pairwise(frame.ends)]
    for start, stop in part_ranges(sizes, items_max):
        yield frame.part(start, stop)


def part_ranges(sizes: Sequence[int], items_max: int) -> Iterator[tuple[int, int]]:
    """Where each part begins and ends: it has at least one item."""
    start = 0
    part_bytes = 0
    for place, size in enumerate(sizes):
        if place > start and (place - start == items_max or part_bytes + size > PART_BYTES_MAX):
            yield start, place
            start, part_bytes = place, 0
        part_bytes += size
    if sizes:
        yield start, len(sizes)
