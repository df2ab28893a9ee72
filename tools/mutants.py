"""Mutants: small deliberate breakages of the package, each of which a row of the scorecard finds.

`make score MUTANTS=1` applies each to a copy of the tree and runs tests of the row that is to find
it; `MUTANTS="core journal"` takes those areas only. A mutant that no test finds survives: then the
row promises more than it tests. Before that the same tests are run on an unchanged copy, where all
must pass, because a test that fails anyway finds nothing.

`tools/mutants/AREA.toml` has the mutants of an area. Each has a name, what it breaks (`what`), a
file, the text that is replaced (`old`, which must be there exactly once) and its replacement
(`new`), the row, and the tests of that row that are run (`tests`).
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Final

import msgspec

from tools.score import ROWS

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = ROOT / "tools" / "mutants"
# What tests need of the tree, beside the package.
_COPIED: Final = ("src", "tests", "tools", "benchmarks", "docs", "examples")
_FILES: Final = ("pyproject.toml", "Makefile", "README.md", "CHANGELOG.md")
_LEFT_OUT: Final = shutil.ignore_patterns("__pycache__", "node_modules", "*.pyc")
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+::\S+)", re.MULTILINE)


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One breakage, and the tests that find it."""

    name: str
    what: str
    file: str
    old: str
    new: str
    row: int
    tests: list[str]

    def broken(self, text: str) -> str:
        """The file's text with the breakage. Raises ValueError unless `old` is there once."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: {self.file} has its old text {count} times, not once")
        return text.replace(self.old, self.new)


class Trial(msgspec.Struct, frozen=True):
    """What the tests of a mutant's row said of it."""

    mutant: Mutant
    found_by: str | None
    took_s: float
    # The end of the output, if no test ran to its end and failed.
    output: str = ""

    def __str__(self) -> str:
        by = f"row {self.mutant.row}, {self.found_by}" if self.found_by else "SURVIVED"
        return f"{self.mutant.name:<44} {self.took_s:>6.1f} s  {by}"


def areas() -> list[str]:
    """The names of all areas."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def mutants_of(area: str) -> list[Mutant]:
    """The mutants of an area. Raises msgspec.ValidationError if one is incomplete."""
    read = tomllib.loads((FOLDER / f"{area}.toml").read_text())
    return msgspec.convert(read["mutant"], list[Mutant])


def copy_tree(to: Path) -> None:
    """Copies what tests need."""
    for name in _COPIED:
        shutil.copytree(ROOT / name, to / name, symlinks=True, ignore=_LEFT_OUT)
    for name in _FILES:
        shutil.copy(ROOT / name, to / name)


def run_tests(tree: Path, rows: Iterable[int], tests: Sequence[str]) -> tuple[int, str]:
    """Runs those of the tests that belong to the rows on a tree; returns the status and output."""
    environment = os.environ | {
        # Before the directory of the installed package, also in processes that tests start.
        "PYTHONPATH": str(tree / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        # The same examples each time, none made smaller.
        "CI": "true",
        "PENSTOCK_PROFILE": "mutants",
    }
    words = [*map(str, rows), "--first", "--tests", *tests]
    ended = subprocess.run(
        [sys.executable, "-m", "tools.score", *words],
        cwd=tree,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout


def try_mutant(mutant: Mutant) -> Trial:
    """Breaks a copy of the tree, and looks for a test of the row that fails."""
    begun = monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-mutant-") as name:
        tree = Path(name)
        copy_tree(tree)
        path = tree / mutant.file
        path.write_text(mutant.broken(path.read_text()))
        status, output = run_tests(tree, [mutant.row], mutant.tests)
    found = _FAILED.search(output) if status else None
    took_s = monotonic() - begun
    if found is None:
        return Trial(mutant, None, took_s, output[-2_000:])
    return Trial(mutant, found[1], took_s)


def check_unbroken(mutants: Sequence[Mutant]) -> str:
    """Runs the tests of all these mutants on an unchanged copy; returns what failed, or nothing."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with tempfile.TemporaryDirectory(prefix="penstock-mutant-") as name:
        copy_tree(Path(name))
        status, output = run_tests(Path(name), sorted({each.row for each in mutants}), tests)
    return output if status else ""


def try_all(mutants: Sequence[Mutant], at_once: int) -> int:
    """Tries mutants, some at once, and prints what became of each; returns how many survived."""
    survived = 0
    with ThreadPoolExecutor(at_once) as pool:
        for trial in pool.map(try_mutant, mutants):
            print(trial, flush=True)
            if trial.found_by is None:
                survived += 1
                print(trial.output, flush=True)
    return survived


def main(arguments: Sequence[str] | None = None) -> int:
    """Tries the mutants of some areas; the exit status is 1 if one survives."""
    parser = argparse.ArgumentParser(prog="mutants", description="Tries mutants of the package.")
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"of {', '.join(areas())}")
    parser.add_argument("--only", metavar="NAME", help="one mutant")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1, metavar="N")
    options = parser.parse_args(arguments)
    wanted = options.areas or areas()
    if unknown := sorted(set(wanted).difference(areas())):
        parser.error(f"there is no area {unknown[0]!r}; there are {', '.join(areas())}")
    chosen = [each for area in wanted for each in mutants_of(area)]
    if options.only:
        chosen = [each for each in chosen if each.name == options.only]
        if not chosen:
            parser.error(f"there is no mutant {options.only!r} in {', '.join(wanted)}")
    if output := check_unbroken(chosen):
        print(output)
        print("mutants: these tests fail without any breakage, so nothing can be said")
        return 1
    survived = try_all(chosen, options.at_once)
    by_row = sorted({each.row for each in chosen})
    print(
        f"mutants: {len(chosen) - survived} of {len(chosen)} found, by rows "
        f"{', '.join(map(str, by_row))}"
    )
    for row in by_row:
        count = sum(each.row == row for each in chosen)
        print(f"{row:>3}  {ROWS[row]}: {count}")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
