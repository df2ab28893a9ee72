"""Durations, sizes, counts and pairs are parsed as documented."""

from argparse import ArgumentTypeError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli import values


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30),
        ("1.5", 1.5),
        ("30s", 30),
        ("250ms", 0.25),
        ("5m", 300),
        ("2h", 7_200),
        ("4d", 345_600),
        ("0.5h", 1_800),
        ("-5", -5),
    ],
)
def test_a_duration_is_a_number_with_or_without_its_unit(text, seconds):
    assert values.read_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("256", 256), ("256B", 256), ("64KiB", 65_536), ("1MiB", 1_048_576), ("2GiB", 2**31)],
)
def test_a_size_is_a_number_with_or_without_its_unit(text, size_bytes):
    assert values.read_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "x", "5y", "1e3", "nan", "inf", "1 s", "٣", "9" * 400, "5M"])
@pytest.mark.parametrize("read", [values.read_duration, values.read_size, values.read_count])
def test_anything_else_is_refused_in_a_short_line(read, text):
    with pytest.raises(ArgumentTypeError) as refused:
        read(text)
    assert len(str(refused.value)) < 120


def test_a_pair_is_split_at_its_first_equals_sign():
    assert values.read_pair("query=a=b") == ("query", "a=b")
    assert values.read_pair("empty=") == ("empty", "")


@pytest.mark.parametrize("text", ["", "name", "=value"])
def test_a_pair_needs_a_name_and_an_equals_sign(text):
    with pytest.raises(ArgumentTypeError, match="NAME=VALUE"):
        values.read_pair(text)


@given(st.integers(0, 366 * 86_400_000))
def test_a_duration_that_is_shown_can_be_typed_again(ms):
    assert round(values.read_duration(values.show_duration(ms)) * 1_000) == ms


@pytest.mark.parametrize(
    ("ms", "shown"),
    [(0, "0s"), (1_500, "1.5s"), (90_000, "90s"), (300_000, "5m"), (345_600_000, "4d")],
)
def test_a_duration_is_shown_in_the_largest_unit_that_says_it_exactly(ms, shown):
    assert values.show_duration(ms) == shown


@pytest.mark.parametrize(
    ("ms", "shown"),
    [(-5, "0.0s"), (3_200, "3.2s"), (250_000, "4m 10s"), (8_100_000, "2h 15m"), (9**9, "4d 11h")],
)
def test_an_age_is_shown_in_its_two_largest_units(ms, shown):
    assert values.show_age(ms) == shown


@pytest.mark.parametrize(
    ("size_bytes", "shown"), [(0, "0 B"), (256, "256 B"), (1_536, "1.5 KiB"), (2**31, "2.0 GiB")]
)
def test_a_size_is_shown_in_a_unit_near_it(size_bytes, shown):
    assert values.show_size(size_bytes) == shown


def test_a_queue_that_cannot_be_removed_need_not_be_created_first(capsys):
    from penstock.cli import main

    assert main(["remove", "nope", "--url", "memory:"]) == 3
    assert capsys.readouterr().err == "penstock: queue: there is no queue 'nope'\n"
