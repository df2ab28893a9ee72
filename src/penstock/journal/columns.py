"""The columns of a snapshot: deliveries packed field by field, small and fast to read.

Most messages of a queue are equal in most fields. A field with one value for all messages is stored
once, one with few changes as runs of equal values, and any other as an integer for each message.
`docs/formats/snapshot.md` is the format.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain, groupby, islice, repeat
from operator import attrgetter
from typing import Any, Final

import msgspec

from penstock.core.delivery import (
    PLACE_SIZE_MASK,
    Arrivals,
    Delivery,
    Departure,
    Move,
    not_plain,
)
from penstock.journal.place import pack_place, position_of

# In the order of `Delivery`'s fields: `unpack_columns` passes them by position.
_FIELDS_AFTER_CONTENT: Final = tuple(
    attrgetter(name)
    for name in (
        "pushed_at_ms",
        "state",
        "epoch",
        "due_at_ms",
        "priority",
        "group",
        "expires_at_ms",
        "first_claimed_at_ms",
        "move",
    )
)
_MOVE_FIELDS: Final = len(Move.__struct_fields__)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Any]).decode


def pack_columns(deliveries: Sequence[Delivery]) -> bytes:
    """Packs deliveries whose content is in a journal."""
    if not deliveries:
        return _encode([0])
    numbers = [each.number for each in deliveries]
    ranks = [each.rank for each in deliveries]
    places = [_place_of(each) for each in deliveries]
    columns = [
        _pack([each.queue for each in deliveries]),
        _pack_numbers(numbers),
        None if ranks == numbers else _pack_numbers(ranks),
        _pack_numbers(list(map(position_of, places))),
        _pack([place & PLACE_SIZE_MASK for place in places]),
        *(_pack(list(map(field, deliveries))) for field in _FIELDS_AFTER_CONTENT),
    ]
    return _encode([len(deliveries), *columns])


def unpack_columns(data: bytes) -> Arrivals | list[Delivery]:
    """The deliveries that `pack_columns` packed. Raises ValueError for other data."""
    count, *columns = _decode(data)
    if not count:
        return []
    queues, packed_numbers, packed_ranks, offsets, packed_sizes, *others, moves = columns
    numbers = _numbers(packed_numbers)
    ranks = numbers if packed_ranks is None else _numbers(packed_ranks)
    sizes = list(islice(_unpack(packed_sizes), count))
    places = map(pack_place, _numbers(offsets), sizes)
    deliveries = list(
        map(
            Delivery,
            _unpack(queues),
            numbers,
            ranks,
            places,
            *map(_unpack, others),
            _unpack(_moves(moves)),
        )
    )
    if len(deliveries) != count:
        raise ValueError(f"a slice has {len(deliveries)} messages of {count}")
    # If all messages share every value, the first stands for all: all are plain or none is.
    is_uniform = all(len(column) == 1 for column in (queues, *others[1:], moves))
    if is_uniform and ranks == sorted(numbers) and not not_plain(deliveries[:1]):
        return Arrivals(deliveries[0].queue, numbers, deliveries, sum(sizes))
    return deliveries


def _place_of(delivery: Delivery) -> int:
    assert isinstance(delivery.content, int), "a message whose content is in no journal"
    return delivery.content


def _pack(values: list[Any]) -> Any:
    """One value for all, runs of equal values, or an integer for each: the smallest form."""
    if values.count(values[0]) == len(values):
        return [values[0]]
    runs = [(value, len(list(same))) for value, same in groupby(values)]
    if type(values[0]) is int and 2 * len(runs) > len(values):
        return _pack_numbers(values)
    return [[value for value, _ in runs], [length for _, length in runs]]


def _pack_numbers(values: list[int]) -> bytes:
    return little(array("Q", values)).tobytes()


def _unpack(column: Any) -> Iterable[Any]:
    if isinstance(column, bytes):
        return _numbers(column)
    if len(column) == 1:
        return repeat(column[0])
    # One object for a whole run, to save memory.
    return chain.from_iterable(map(repeat, *column))


def _numbers(column: bytes) -> list[int]:
    return words(column).tolist()


def words(data: bytes) -> "array[int]":
    """Little-endian integers of eight bytes each."""
    numbers = array("Q")
    numbers.frombytes(data)
    return little(numbers)


def _moves(column: list[Any]) -> list[Any]:
    """The column of moves, each of which was packed as a list."""
    if len(column) == 1:
        return [_move(column[0])]
    values, lengths = column
    return [[_move(value) for value in values], lengths]


def _move(value: list[Any] | None) -> Move | None:
    if value is None:
        return None
    return Move(*value) if len(value) == _MOVE_FIELDS else Departure(*value)


def little(numbers: "array[int]") -> "array[int]":
    """Swaps the bytes of integers, in place, if this machine is big-endian."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
