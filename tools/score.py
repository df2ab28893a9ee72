"""The scorecard: the tests of each row of the reliability scorecard, and their results.

`make score` runs the tests that belong to a row and prints the card; `make score ROWS="13 15"` runs
those of some rows. With FULL=1 tests use their larger figures, if any (`tests.conftest.FULL`).

A test belongs to the rows that its docstring names, or else its module's: "Row 13: …", "Rows 5 and
6 of the scorecard: …". It reports what it measured by `record_property("figure", "1.2 × alone")`;
by `record_property("rate", …)` if the goal is the least value that is allowed.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import pytest

from penstock.cli.show import table

ROWS: Final = {
    1: "SIGKILL at random points under load",
    2: "power cut",
    3: "tail entry torn or garbled",
    4: "flipped bits",
    5: "EIO from fsync",
    6: "full disk, no more descriptors",
    7: "wall clock jumps",
    8: "one state machine over every backend",
    9: "seeded simulation of the cluster",
    10: "a shard owner that stops and resumes",
    11: "partitions of the cluster's log",
    12: "Redis, RabbitMQ stalled or killed",
    13: "idle and slow connections",
    14: "bodies of 1 MiB",
    15: "120,000 in flight",
    16: "backlog and restart",
    17: "poison message",
    18: "soak",
    19: "fuzz",
    20: "HTTP smuggling and bombs",
    21: "queue names",
    22: "mutated receipts",
    23: "SigV4 negatives",
    24: "console and endpoint in a browser",
    25: "code named by a message",
    26: "partial failure of a service elsewhere",
    27: "a standstill",
    28: "paths that another user prepared",
    29: "hostile text in every field",
}
# `max` or `min`.
Worst = Callable[..., str]
_NUMBER: Final = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?")
_NAMED: Final = re.compile(r"\brows? (\d+(?:(?:, | and )\d+)*)", re.IGNORECASE)


def rows_named(text: str | None) -> list[int]:
    """The rows that a docstring names."""
    found = _NAMED.search((text or "").partition("\n")[0])
    return [int(number) for number in re.findall(r"\d+", found[1])] if found else []


def modules_naming(wanted: frozenset[int]) -> list[str]:
    """The test modules that name one of these rows: collecting all modules would take long."""
    paths = sorted(Path("tests").rglob("test_*.py"))
    return [
        str(path)
        for path in paths
        if "node_modules" not in path.parts
        and any(not wanted.isdisjoint(rows_named(line)) for line in path.read_text().splitlines())
    ]


def rows_of(item: pytest.Item) -> list[int]:
    """The rows a test belongs to."""
    own = rows_named(getattr(getattr(item, "function", None), "__doc__", None))
    return own or rows_named(getattr(getattr(item, "module", None), "__doc__", None))


def merged(figures: Sequence[str], worst: Worst = max) -> list[str]:
    """Joins figures that differ only in their numbers: the worst number in each place.

    The largest number is the worst of a figure, and the smallest (`min`) of a rate.
    """
    same_words: dict[str, list[str]] = {}
    for figure in figures:
        same_words.setdefault(_NUMBER.sub("#", figure), []).append(figure)
    limit = "at most" if worst is max else "at least"
    return [
        group[0] if len(group) == 1 else f"{limit} {_worst(group, worst)} in {len(group)} tests"
        for group in same_words.values()
    ]


def _worst(figures: Sequence[str], worst: Worst) -> str:
    columns = zip(*map(_NUMBER.findall, figures), strict=True)
    numbers = iter([worst(column, key=_value) for column in columns])
    return _NUMBER.sub(lambda _: next(numbers), figures[0])


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def read_row(text: str) -> int:
    """A row's number, for argparse. Raises ArgumentTypeError.

    `choices` cannot be used: without a row argparse compares the empty list with them.
    """
    if not text.isdigit() or int(text) not in ROWS:
        raise argparse.ArgumentTypeError(f"there is no row {text!r}; there are 1 to {max(ROWS)}")
    return int(text)


class Card:
    """A pytest plugin that runs only the tests of the card and keeps their results."""

    def __init__(self, wanted: Sequence[int]) -> None:
        self.wanted = frozenset(wanted)
        self._rows: dict[str, list[int]] = {}
        self.passed = dict.fromkeys(wanted, 0)
        self.failed = dict.fromkeys(wanted, 0)
        self.skipped = dict.fromkeys(wanted, 0)
        self.took_s = dict.fromkeys(wanted, 0.0)
        self.figures: dict[int, list[str]] = {row: [] for row in wanted}
        self.rates: dict[int, list[str]] = {row: [] for row in wanted}

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        chosen: list[pytest.Item] = []
        others: list[pytest.Item] = []
        for item in items:
            rows = [row for row in rows_of(item) if row in self.wanted]
            (chosen if rows else others).append(item)
            self._rows[item.nodeid] = rows
        items[:] = chosen
        config.hook.pytest_deselected(items=others)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for row in self._rows.get(report.nodeid, []):
            self.took_s[row] += report.duration
            if report.failed:
                self.failed[row] += 1
            elif report.skipped:
                self.skipped[row] += 1
            elif report.when == "call":
                self.passed[row] += 1
            if report.when == "call":
                for name, kept in (("figure", self.figures), ("rate", self.rates)):
                    kept[row] += [
                        str(value) for key, value in report.user_properties if key == name
                    ]

    def verdict(self, row: int) -> str:
        """The result of a row, with the number of tests that failed or were skipped."""
        if self.failed[row]:
            return f"FAILED ({self.failed[row]})"
        skipped = f"{self.skipped[row]} skipped" if self.skipped[row] else ""
        if self.passed[row]:
            return f"passed ({skipped})" if skipped else "passed"
        return skipped or "no test"

    def text(self) -> str:
        """The card as text: a line for each row, then the figures, each row's worst."""
        lines = [
            (
                str(row),
                ROWS[row],
                self.verdict(row),
                str(self.passed[row] + self.failed[row]),
                f"{self.took_s[row]:.1f}",
            )
            for row in sorted(self.wanted)
        ]
        card: list[str] = [table(("#", "row", "", "tests", "s"), lines, left=3)]
        for row in sorted(self.wanted):
            figures = [*merged(self.figures[row]), *merged(self.rates[row], min)]
            card += [f"{row:<2}  {figure}" for figure in figures]
        return "\n".join(card)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the card; the exit status is 1 if a test failed."""
    parser = argparse.ArgumentParser(prog="score", description="Runs the scorecard's tests.")
    parser.add_argument("rows", nargs="*", type=read_row, metavar="ROW")
    parser.add_argument("--full", action="store_true", help="use the larger figures")
    parser.add_argument("--tests", nargs="+", metavar="TEST", help="only these tests of the rows")
    parser.add_argument("--first", action="store_true", help="stop at the first failure")
    options = parser.parse_args(arguments)
    if options.full:
        os.environ["PENSTOCK_FULL"] = "1"
    # The tests run one at a time, so that limits by time hold without slack (`tests.measure`).
    os.environ["PENSTOCK_SCORE"] = "1"
    card = Card(options.rows or list(ROWS))
    # A test with its full figures may take longer than the usual limit.
    words = ["-q", "--timeout", "3600" if options.full else "300"]
    words += ["--exitfirst"] if options.first else []
    words += options.tests or modules_naming(card.wanted)
    status = pytest.main(words, plugins=[card])
    print(card.text())
    return 1 if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else 0


if __name__ == "__main__":
    sys.exit(main())
