"""The scorecard finds its tests by their docstrings, and prints their results."""

import pytest

from tools.score import ROWS, Card, main, merged, modules_naming, rows_named

pytest_plugins = ["pytester"]

MODULE = '''
"""Rows 3 and 4 of the scorecard: an example."""


def test_passes(record_property):
    record_property("figure", "0 lost of 12")


def test_fails():
    """Row 5: a row of its own."""
    assert 1 == 2
'''
OTHER = """
def test_that_belongs_to_no_row():
    raise AssertionError
"""


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("Row 13: 1,000 idle ones.", [13]),
        ("Rows 5 and 6 of the scorecard: a failed sync.", [5, 6]),
        ("Of row 6: clients beyond the limit.", [6]),
        ("Rows 1, 2 and 3.", [1, 2, 3]),
        ("A row of 12 messages.\n\nRow 4 is not in the first line.", []),
        ("Tomorrow 3 tests run.", []),
        (None, []),
    ],
)
def test_a_docstring_names_its_rows_in_its_first_line(text, rows):
    assert rows_named(text) == rows


def test_only_the_tests_of_the_card_are_run_and_each_row_gets_its_verdict(pytester):
    pytester.makepyfile(test_some=MODULE, test_other=OTHER)
    card = Card([3, 4, 5, 7])
    pytester.inline_run(plugins=[card]).assertoutcome(passed=1, failed=1)
    assert [card.verdict(row) for row in (3, 4, 5, 7)] == [
        "passed",
        "passed",
        "FAILED (1)",
        "no test",
    ]
    assert card.figures == {3: ["0 lost of 12"], 4: ["0 lost of 12"], 5: [], 7: []}
    lines = card.text().splitlines()
    assert len(lines) == 7
    assert ROWS[3] in lines[1]
    assert lines[5:] == ["3   0 lost of 12", "4   0 lost of 12"]


def test_the_verdict_says_how_many_tests_were_skipped():
    card = Card([3, 4, 5, 6])
    card.passed |= {3: 7, 5: 2}
    card.skipped |= {3: 1, 4: 2, 5: 1}
    card.failed[5] = 1
    verdicts = ["passed (1 skipped)", "2 skipped", "FAILED (1)", "no test"]
    assert [card.verdict(row) for row in (3, 4, 5, 6)] == verdicts


def test_every_row_of_the_card_is_named_by_a_test():
    assert [row for row in ROWS if not modules_naming(frozenset({row}))] == []


def test_figures_of_one_kind_are_one_line_with_the_largest_of_each_number():
    figures = ["2 ms, -8.0 MiB", "19 ms, 0.3 MiB", "p99 1.06 × alone", "3 ms, 1,000.5 MiB"]
    assert merged(figures) == ["at most 19 ms, 1,000.5 MiB in 3 tests", "p99 1.06 × alone"]
    assert merged([]) == []


RATES = '''
"""Row 17: an example."""

import pytest


@pytest.mark.parametrize("rate", ["0.97", "0.91", "1.02"])
def test_rate(rate, record_property):
    record_property("rate", f"{rate} × the rate without 10 others")
    record_property("figure", f"{rate} ms")
'''


def test_of_a_rate_the_smallest_is_printed(pytester):
    pytester.makepyfile(test_rates=RATES)
    card = Card([17])
    pytester.inline_run(plugins=[card]).assertoutcome(passed=3)
    assert card.text().splitlines()[-2:] == [
        "17  at most 1.02 ms in 3 tests",
        "17  at least 0.91 × the rate without 10 others in 3 tests",
    ]
    assert merged(["1 of 3", "2 of 2"], min) == ["at least 1 of 2 in 2 tests"]
    assert merged(["0.9 × alone"], min) == ["0.9 × alone"]


def test_a_row_that_is_not_on_the_card_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["99"])
    assert ended.value.code == 2
    assert "there is no row '99'" in capsys.readouterr().err


def test_without_arguments_the_whole_card_is_run(monkeypatch, capsys):
    def main_of_pytest(words, plugins):
        (card,) = plugins
        assert sorted(card.passed) == sorted(ROWS)
        return pytest.ExitCode.OK

    monkeypatch.setattr(pytest, "main", main_of_pytest)
    assert main([]) == 0
    assert capsys.readouterr().out.count("no test") == len(ROWS)
