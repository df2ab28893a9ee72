"""Random lives of a store: what is recovered equals an exact replay of every event, always."""

import pytest

from tests.backends.engine.life import Life, small_slices
from tests.conftest import FULL


@pytest.mark.parametrize("seed", range(400 if FULL else 16))
def test_recovery_after_random_operations_gives_the_state_of_an_exact_replay(
    quick_path, monkeypatch, seed
):
    small_slices(monkeypatch)
    life = Life(quick_path, seed, departs=seed % 2 == 1)
    life.run(rounds=8)
    assert life.did["push"] > 30
    assert life.did["kill"] >= 1
