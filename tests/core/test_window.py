"""A window keeps ids for a limited time."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.window import Window


def test_an_id_has_its_value_until_the_window_ends():
    window: Window[int] = Window(1_000, 10)
    window.remember("a", 1, 5_000)
    assert window.find("a", 5_000) == 1
    assert window.find("a", 5_999) == 1
    assert window.find("a", 6_000) is None
    assert window.find("b", 5_000) is None


def test_an_id_remembered_again_has_the_new_value():
    window: Window[int] = Window(1_000, 10)
    window.remember("a", 1, 5_000)
    window.remember("a", 2, 6_000)
    assert window.find("a", 6_999) == 2
    assert window.entries() == [(6_000, "a", 2)]


def test_ids_whose_time_has_ended_are_dropped_when_a_new_one_is_added():
    window: Window[int] = Window(1_000, 10)
    for number in range(5):
        window.remember(f"old{number}", number, 5_000 + number)
    window.remember("new", 9, 6_002)
    assert [key for _, key, _ in window.entries()] == ["old3", "old4", "new"]


def test_find_drops_no_ids():
    """Finds are not in the journal: a replay must drop the same ids."""
    window: Window[int] = Window(1_000, 10)
    window.remember("a", 1, 5_000)
    before = window.entries()
    assert window.find("a", 1_000_000) is None
    assert window.entries() == before


def test_there_are_never_more_ids_than_the_limit():
    window: Window[int] = Window(1_000_000, 3)
    for number in range(100):
        window.remember(f"id{number}", number, 5_000 + number)
    assert [key for _, key, _ in window.entries()] == ["id97", "id98", "id99"]
    assert window.find("id96", 5_100) is None


def test_keys_of_two_parts_are_different_from_plain_ones():
    window: Window[int] = Window(1_000, 10)
    window.remember(("g", "a"), 1, 5_000)
    window.remember("a", 2, 5_000)
    assert (window.find(("g", "a"), 5_001), window.find("a", 5_001)) == (1, 2)
    assert window.find(("h", "a"), 5_001) is None


def test_a_new_window_that_is_given_the_entries_of_another_is_equal_to_it():
    window: Window[int] = Window(1_000, 10)
    for number in range(20):
        window.remember(f"id{number % 7}", number, 5_000 + 100 * number)
    again: Window[int] = Window(1_000, 10)
    for at_ms, key, value in window.entries():
        again.remember(key, value, at_ms)
    assert again.entries() == window.entries()


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), max_size=80),
    st.integers(1, 9),
)
def test_slices_of_any_size_together_are_all_entries(pushes, size):
    window: Window[int] = Window(20, 25)
    now_ms = 0
    for number, (key, wait_ms) in enumerate(pushes):
        now_ms += wait_ms
        window.remember(f"id {key}", number, now_ms)
    first, end = window.indexes()
    slices = [window.entries_between(at, min(at + size, end)) for at in range(first, end, size)]
    assert [entry for part in slices for entry in part] == window.entries()
    # Indexes count from the first entry ever, so those of dropped entries give nothing.
    window.remember("last", 1_000, now_ms + 100)
    assert window.entries_between(first, end) == []
    assert window.entries_between(end, end + 1) == [(now_ms + 100, "last", 1_000)]
