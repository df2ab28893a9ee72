"""After random operations and kills, the recovered state equals an exact replay of every event."""

import pytest

from penstock.core import pieces, queue
from tests.backends.engine.random_store import RandomStore, small_slices
from tests.conftest import FULL


@pytest.mark.parametrize("seed", range(400 if FULL else 16))
def test_recovery_after_random_operations_gives_the_state_of_an_exact_replay(
    quick_path, monkeypatch, seed
):
    small_slices(monkeypatch)
    store = RandomStore(quick_path, seed, departs=seed % 2 == 1)
    store.run(rounds=8)
    assert store.done["push"] > 30
    assert store.done["kill"] >= 1


@pytest.mark.parametrize("seed", range(100, 200 if FULL else 104))
def test_recovery_gives_the_same_state_if_the_messages_of_a_queue_are_in_pieces(
    quick_path, monkeypatch, seed
):
    small_slices(monkeypatch)
    monkeypatch.setattr(pieces, "PIECE_MAX", 3)
    monkeypatch.setattr(queue, "PIECE_MAX", 3)
    store = RandomStore(quick_path, seed, departs=seed % 2 == 1)
    store.run(rounds=8)
    assert store.done["push"] > 30
    assert store.done["kill"] >= 1
