"""Deliveries as columns: how a snapshot keeps many messages small, and takes them up again fast.

Most messages of a queue are alike in most fields, so a field that all share is kept once, one that
seldom changes as runs, and only the rest as a number for each. `docs/formats/snapshot.md` is the
format.
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
    pack_place,
    position_of,
)

# In the order of `Delivery`'s own fields, which are given by position when they are read back.
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
    """Deliveries whose content is in a journal, as they are at this instant."""
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
    """The deliveries that `pack_columns` packed. Raises ValueError if it did not pack this."""
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
    # If all share a value, it is one that a plain message has, or none of them is plain.
    alike = all(len(column) == 1 for column in (queues, *others[1:], moves))
    if alike and ranks == sorted(numbers) and not not_plain(deliveries[:1]):
        return Arrivals(deliveries[0].queue, numbers, deliveries, sum(sizes))
    return deliveries


def _place_of(delivery: Delivery) -> int:
    assert isinstance(delivery.content, int), "a message whose content is in no journal"
    return delivery.content


def _pack(values: list[Any]) -> Any:
    """One value for all, runs of equal values, or a number for each: whatever is smallest."""
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
    # The same object for a whole run: a million messages need not have a million equal dates.
    return chain.from_iterable(map(repeat, *column))


def _numbers(column: bytes) -> list[int]:
    return words(column).tolist()


def words(data: bytes) -> "array[int]":
    """Little-endian integers of eight bytes each."""
    numbers = array("Q")
    numbers.frombytes(data)
    return little(numbers)


def _moves(column: list[Any]) -> list[Any]:
    """The column of moves, which were packed as plain lists."""
    if len(column) == 1:
        return [_move(column[0])]
    values, lengths = column
    return [[_move(value) for value in values], lengths]


def _move(value: list[Any] | None) -> Move | None:
    if value is None:
        return None
    return Move(*value) if len(value) == _MOVE_FIELDS else Departure(*value)


def little(numbers: "array[int]") -> "array[int]":
    """Integers as they stand in a file, or taken from there."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
