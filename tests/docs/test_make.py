"""CI or a test here runs every target of the Makefile and every command of CONTRIBUTING.md.

What takes long is run in its smallest form (docs/decisions/218).
They run in a copy of the tree, whose environment links to that of this test, so that no target
writes into the real tree. The tests are in one group with those of the documents, because
`make serve` listens at the same port.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240
pytestmark = [
    pytest.mark.timeout(480),
    pytest.mark.skipif(not (ROOT / ".ci").is_dir(), reason="the source archive has no CI"),
]
# What runs each target: CI, by `make test` and what that needs, or a test of this module.
BY_CI = {"test", "static", "services", "env"}
BY_A_TEST = {
    "help": "test_help_lists_every_target_with_a_description",
    "serve": "test_serve_starts_a_server_and_prints_commands_to_try",
    "check": "test_check_runs_what_ci_runs_before_the_tests",
    "fix": "test_fix_formats_and_corrects",
    "bench": "test_bench_prints_a_table",
    "parity": "test_parity_writes_its_pages_again",
    "score": "test_score_prints_the_scorecard",
    "docs": "test_docs_builds_the_site",
    "package": "test_package_builds_archives_and_tries_the_wheel",
    "sim": "test_sim_runs_seeds_and_repeats_one",
    "clean": "test_clean_removes_caches_and_build_output",
}


def targets_of_make():
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.fixture
def copy(tmp_path):
    """A copy of the files that git tracks, with an environment that make considers up to date."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    tree = tmp_path / "tree"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    (tree / ".venv").mkdir()
    for part in Path(sys.prefix).iterdir():
        if part.name not in (".installed", ".serving"):
            (tree / ".venv" / part.name).symlink_to(part)
    os.utime(tree / "pyproject.toml", (1, 1))
    os.utime(tree / "tools" / "environment.sh", (1, 1))
    (tree / ".venv" / ".installed").touch()
    return tree


def outer_environment():
    """The environment without the variables of a make that runs this test.

    `make test` runs it, and exports the variables of its command line, as in
    `make test PYTHON=python3.13`.
    """
    makefile = (ROOT / "Makefile").read_text()
    variables = set(re.findall(r"^([A-Z]+)\s*\?=", makefile, re.MULTILINE))
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MAKE", "MFLAGS")) and name not in variables
    }


def make(tree, *arguments, **environment):
    done = subprocess.run(
        ["make", *arguments],
        cwd=tree,
        env={**outer_environment(), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_target_is_run_by_ci_or_by_a_test():
    assert targets_of_make() == BY_CI | set(BY_A_TEST)
    missing = [name for name in BY_A_TEST.values() if name not in globals()]
    assert missing == []


def test_ci_runs_the_test_command_of_the_readme():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert lines[-1] == "make test"
    assert re.search(r"^make test\b", (ROOT / "README.md").read_text(), re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^test: static services\b", makefile, re.MULTILINE)
    assert re.search(r"^static: env$", makefile, re.MULTILINE)


def test_every_command_of_contributing_is_a_target_or_is_run_here(copy):
    text = (ROOT / "CONTRIBUTING.md").read_text()
    commands = re.findall(r"`((?:make|\.venv/bin/)[^`]*)`", text)
    targets = {command.split()[1] for command in commands if command.startswith("make ")}
    assert {"test", "check", "fix", "bench", "score", "serve"} <= targets <= targets_of_make()
    others = [command for command in commands if not command.startswith("make")]
    assert others == [".venv/bin/pre-commit install"]
    subprocess.run(["git", "init", "-q"], cwd=copy, check=True)
    subprocess.run(others[0].split(), cwd=copy, check=True, capture_output=True)
    assert (copy / ".git" / "hooks" / "pre-commit").is_file()


def test_help_lists_every_target_with_a_description(copy):
    lines = make(copy).splitlines()
    assert {line.split()[1] for line in lines} == targets_of_make() - {"help", "static"}
    assert all(len(line.split()) > 3 for line in lines)


def test_check_runs_what_ci_runs_before_the_tests(copy):
    assert make(copy, "-n", "check") == make(copy, "-n", "static")
    assert make(copy, "-n", "test").startswith(make(copy, "-n", "static"))


def test_fix_formats_and_corrects(copy):
    bad = copy / "tools" / "bad.py"
    bad.write_text("import os\nx = {  'a':1 }\n")
    make(copy, "fix")
    assert bad.read_text() == 'x = {"a": 1}\n'


def test_bench_prints_a_table(copy):
    out = make(copy, "bench", "ARGS=--quick")
    assert "lifecycles a second" in out
    assert '"bench": "memory"' in out


def test_score_prints_the_scorecard(copy):
    out = make(copy, "score", "ROWS=21", PENSTOCK_SERVICES=os.devnull)
    assert re.search(r"^21 +queue names +passed", out, re.MULTILINE)


def test_parity_writes_its_pages_again(copy):
    page = copy / "docs/reference/parity.md"
    page.unlink()
    make(copy, "parity", "ARGS=--pages")
    assert page.read_bytes() == (ROOT / "docs/reference/parity.md").read_bytes()


def test_docs_builds_the_site(copy):
    assert make(copy, "docs").endswith("the site is in build/site\n")
    assert (copy / "build" / "site" / "index.html").is_file()


def test_package_builds_archives_and_tries_the_wheel(copy):
    """The wheel is installed with the core dependencies only, and its server answers."""
    out = make(copy, "package")
    assert out.count("PASSED") == 2
    assert re.search(r"^dist/penstock-[\d.]+-py3-none-any\.whl: [\d,]+ KiB$", out, re.MULTILINE)
    for name in ("import", "penstock --help", "penstock serve answers", "idle memory"):
        assert re.search(rf"^{name}: [\d.]+ (s|MiB)", out, re.MULTILINE)
    assert (copy / "sbom.cdx.json").read_bytes() == (ROOT / "sbom.cdx.json").read_bytes()


def test_score_shows_that_a_row_finds_a_mutant(copy):
    # Of each area but one nothing is left, and of that one a mutant that is found in seconds.
    for path in (copy / "tools" / "mutants").glob("*.toml"):
        path.unlink() if path.stem != "journal" else None
    mutants = copy / "tools" / "mutants" / "journal.toml"
    first = mutants.read_text().partition("[[mutant]]")[2].partition("[[mutant]]")[0]
    mutants.write_text(f"[[mutant]]{first}")
    out = make(copy, "score", "MUTANTS=1", PENSTOCK_SERVICES=os.devnull)
    assert re.search(r"^header-is-not-verified .* row 4, tests/journal/test_damage", out, re.M)
    assert "mutants: 1 of 1 found, by rows 4" in out


def test_sim_runs_seeds_and_repeats_one(copy):
    out = make(copy, "sim")
    assert re.search(r"^seeds \d+ to \d+$", out, re.MULTILINE)
    assert "200 seeds in " in out
    again = make(copy, "sim", "SEED=7")
    assert "seed 7: no rule broken" in again
    assert again == make(copy, "sim", "SEED=7", PYTHONHASHSEED="5")


def test_clean_removes_caches_and_build_output(copy):
    for name in (".mypy_cache", ".ruff_cache", "build", "src/penstock/__pycache__"):
        (copy / name).mkdir()
        (copy / name / "x").touch()
    make(copy, "clean")
    left = {path.name for path in copy.rglob("*")}
    assert not left & {".mypy_cache", ".ruff_cache", "build", "__pycache__"}
    assert (copy / ".venv" / "bin").is_symlink()


def test_serve_starts_a_server_and_prints_commands_to_try(copy):
    environment = {k: v for k, v in outer_environment().items() if not k.startswith("PENSTOCK_")}
    server = subprocess.Popen(
        ["make", "serve"],
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert server.stdout is not None
    try:
        lines: list[str] = []
        deadline_s = time.monotonic() + TIMEOUT_S
        while not lines or "Ctrl-C" not in lines[-1]:
            assert time.monotonic() < deadline_s
            lines.append(server.stdout.readline())
            assert lines[-1], f"the server ended: {''.join(lines)}"
        assert "penstock: Amazon SQS at http://127.0.0.1:9324\n" in lines
        assert any(line.startswith("  docs ") for line in lines)
        assert (copy / "penstock-data" / "store").is_file()
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(TIMEOUT_S)
        server.stdout.close()


def test_the_small_environment_has_four_packages():
    """Whoever adds one makes everybody's `pip install penstock` larger, and says so here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[<>=\[]", each)[0] for each in project["dependencies"]]
    assert names == ["httptools", "isal", "msgspec", "uvloop"]
    script = (ROOT / "tools" / "environment.sh").read_text()
    assert "serving) wanted='.' ;;" in script


def test_serve_creates_the_small_environment_if_there_is_none(copy):
    (copy / ".venv" / ".installed").unlink()
    assert "environment.sh .venv serving" in make(copy, "-n", "serve")
    assert "environment.sh .venv development" in make(copy, "-n", "test")
    (copy / ".venv" / ".serving").touch()
    assert "environment.sh" not in make(copy, "-n", "serve")
    assert "environment.sh .venv development" in make(copy, "-n", "test")
    named = make(copy, "-n", "test", "PYTHON=python3.13")
    assert "environment.sh .venv-python3.13 development" in named
