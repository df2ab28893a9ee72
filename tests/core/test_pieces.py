"""The messages of a large queue in pieces: the same as one dict, whatever is done to it."""

import random
from itertools import islice

import pytest

from penstock.core import pieces
from penstock.core.delivery import Delivery
from penstock.core.discards import Discards
from penstock.core.due import Alarm
from penstock.core.events import Pushed
from penstock.core.pieces import NumberPieces, divided, newest_of
from penstock.core.queue import QueueState
from penstock.service import QueueSettings


def delivery(number: int) -> Delivery:
    return Delivery(1, number, number, Pushed(0, 1, number, b"", size_bytes=0), 0)


@pytest.mark.parametrize("seed", range(20))
def test_pieces_hold_what_one_dict_holds_in_the_same_order(monkeypatch, seed):
    monkeypatch.setattr(pieces, "PIECE_MAX", 4)
    rng = random.Random(seed)
    expected: dict[int, Delivery] = {}
    found = NumberPieces[Delivery]({})
    for number in rng.sample(range(1_000), 200):
        expected[number] = found[number] = delivery(number)
        if rng.random() < 0.6:
            taken = rng.choice(list(expected))
            if rng.random() < 0.5:
                del expected[taken], found[taken]
            else:
                assert found.pop(taken) is expected.pop(taken)
            assert taken not in found
            assert found.get(taken) is None
        if expected and rng.random() < 0.2:
            again = rng.choice(list(expected))
            expected[again] = found[again] = delivery(again)
        assert len(found) == len(expected)
        assert list(found) == list(expected)
        assert list(found.values()) == list(expected.values())
        assert list(islice(found.values(), 3, 9)) == list(islice(expected.values(), 3, 9))
        assert all(found[each] is expected[each] for each in expected)
    with pytest.raises(KeyError):
        found[1_000]
    with pytest.raises(KeyError):
        del found[1_000]


def test_no_piece_becomes_larger_than_the_limit_and_empty_ones_are_left_out(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_MAX", 4)
    found = NumberPieces[Delivery]({})
    for number in range(20):
        found[number] = delivery(number)
    assert [len(piece) for piece in found.parts()] == [4] * 5
    for number in range(4, 12):
        del found[number]
    assert [list(piece) for piece in found.parts()] == [
        [0, 1, 2, 3],
        [12, 13, 14, 15],
        [16, 17, 18, 19],
    ]
    for number in list(found):
        del found[number]
    assert not found
    found[1] = delivery(1)
    assert list(found) == [1]


def test_a_dict_that_is_too_large_becomes_the_first_piece_and_grows_no_more(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_MAX", 4)
    small = {number: delivery(number) for number in range(4)}
    assert divided(small) is small
    assert newest_of(small) is small
    large = {number: delivery(number) for number in range(5)}
    found = divided(large)
    assert isinstance(found, NumberPieces)
    assert divided(found) is found
    newest_of(found)[7] = delivery(7)
    assert [list(piece) for piece in found.parts()] == [[0, 1, 2, 3, 4], [7]]


def test_a_queue_that_was_purged_begins_with_one_dict_and_its_pieces_are_discarded(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_MAX", 4)
    monkeypatch.setattr("penstock.core.queue.PIECE_MAX", 4)
    alarm = Alarm()
    discards = Discards(alarm)
    discards.is_deferred = True
    queue = QueueState(1, "q", QueueSettings(), 0, alarm, discards)
    for number in range(1, 12):
        queue.pushed(Pushed(0, 1, number, b"x", size_bytes=1))
    held = queue.deliveries
    assert isinstance(held, NumberPieces)
    queue.purged()
    assert queue.deliveries == {}
    assert type(queue.deliveries) is dict
    while discards:
        discards.trim(3)
    assert len(held) == 0
