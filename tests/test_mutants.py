"""Each mutant applies to the code as it is, and a mutant that nothing finds is reported."""

import ast

import msgspec
import pytest

from tools import mutants
from tools.mutants import Mutant, Trial, areas, main, mutants_of, try_mutant
from tools.score import ROWS, rows_named

ALL = [each for area in areas() for each in mutants_of(area)]
QUICK = Mutant(
    name="early",
    what="a dedup id is remembered for a second less than the window",
    file="src/penstock/core/window.py",
    old="entry[0] + self._window_ms <= now_ms:\n            return None",
    new="entry[0] + self._window_ms - 1_000 <= now_ms:\n            return None",
    row=9,
    tests=["tests/core/test_departures.py"],
)


def test_there_are_sixty_mutants_and_each_has_a_name_of_its_own():
    assert len(ALL) >= 60
    assert len({each.name for each in ALL}) == len(ALL)
    assert areas() == [
        *("adapters", "cluster", "core", "endpoint", "engine", "journal", "pipeline", "tasks")
    ]


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_the_code_as_it_is_and_names_tests_of_its_row(mutant):
    broken = mutant.broken((mutants.ROOT / mutant.file).read_text())
    if mutant.file.endswith(".py"):
        ast.parse(broken)
    assert mutant.row in ROWS
    for test in mutant.tests:
        path = mutants.ROOT / test.partition("::")[0]
        lines = path.read_text().splitlines()
        assert any(mutant.row in rows_named(line) for line in lines), test


def test_a_mutant_whose_text_is_not_there_once_is_refused():
    with pytest.raises(ValueError, match=r"early: .*window.py has its old text 0 times, not once"):
        QUICK.broken("nothing")


def test_a_breakage_is_found_by_its_row_and_a_harmless_change_by_none():
    found = try_mutant(QUICK)
    assert str(found.found_by).startswith("tests/core/test_departures.py::test_")
    harmless = Mutant(
        name="harmless",
        what="nothing",
        file=QUICK.file,
        old="now_ms:\n            return None",
        new="now_ms:\n            return  None",
        row=9,
        tests=QUICK.tests,
    )
    survived = try_mutant(harmless)
    assert survived.found_by is None
    assert "SURVIVED" in str(survived)
    assert "passed" in survived.output


def test_the_command_fails_if_a_mutant_survives(monkeypatch, capsys):
    late = msgspec.structs.replace(QUICK, name="late")
    outcomes = {
        "early": Trial(QUICK, "a test", 1.0),
        "late": Trial(late, None, 1.0, "4 passed"),
    }
    monkeypatch.setattr(mutants, "check_unbroken", lambda chosen: "")
    monkeypatch.setattr(mutants, "try_mutant", lambda mutant: outcomes[mutant.name])
    for chosen, status in (([QUICK], 0), ([QUICK, late], 1)):
        monkeypatch.setattr(mutants, "mutants_of", lambda area, chosen=chosen: chosen)
        assert main(["core"]) == status
    assert "late" in (out := capsys.readouterr().out)
    assert "SURVIVED" in out
    assert "mutants: 1 of 2 found, by rows 9" in out
