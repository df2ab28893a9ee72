"""Command lines that mean nothing: which word is wrong, and what to write instead."""

import shlex

import pytest

from penstock.cli import USAGE
from penstock.cli.mistakes import find_mistake
from penstock.cli.parser import COMMANDS

BEFORE = "only --url and --json may stand before the command"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "--store file:s create orders",
            f"--store: {BEFORE}; write it behind create if it is an option of create, and --url "
            "URL to name a store (see penstock --help)",
        ),
        (
            "--wait=5 pull orders",
            f"--wait: {BEFORE}; write it behind pull if it is an option of pull, and --url URL to "
            "name a store (see penstock --help)",
        ),
        ("--jsn list", f"--jsn: {BEFORE}; did you mean --json? (see penstock --help)"),
        ("-v", f"-v: {BEFORE}, and no command follows (see penstock --help)"),
        ("creat orders", "creat is not a command; did you mean create? (see penstock --help)"),
        ("frobnicate", "frobnicate is not a command (see penstock --help)"),
        (
            "help push",
            "help is not a command: write penstock --help, or penstock COMMAND --help "
            "(see penstock --help)",
        ),
        (
            "orders push hello",
            "orders is not a command: the command comes first, as in penstock push orders "
            "(see penstock --help)",
        ),
        (
            "file:s create orders",
            "file:s is not a command: to name a store, write penstock --url file:s COMMAND "
            "(see penstock --help)",
        ),
        (
            "--url memory: push orders x --dely 5",
            "unknown option --dely; did you mean --delay? (see penstock push --help)",
        ),
        (
            "push orders hello world --url memory:",
            "world is one word too many; put a text of several words in quotes "
            "(see penstock push --help)",
        ),
        ("list --zz", "unknown option --zz (see penstock list --help)"),
        ("daemon status --dri x", "unknown option --dri (see penstock daemon status --help)"),
        ("'' create", "'' is not a command: the command comes first, as in penstock create ''"),
    ],
)
def test_a_mistake_is_named_with_what_to_write_instead(run_main, line, said):
    done = run_main(*shlex.split(line))
    assert done.status == USAGE
    assert done.out == ""
    assert done.err.startswith(f"penstock: {said}")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["--url", "memory:", "create", "orders"],
        ["--url=memory:", "--json", "list"],
        ["--json", "list", "--unknown"],
        ["--url", "--json"],
        ["--version"],
        ["-h", "nonsense"],
        ["--url"],
    ],
)
def test_what_argparse_says_well_enough_is_left_to_it(line):
    assert find_mistake(line, COMMANDS) is None


@pytest.mark.parametrize("word", ["\x1b[31m", "x" * 5_000, "new\nline"])
def test_a_word_that_cannot_be_shown_as_it_is_is_quoted_and_cut(word):
    said = find_mistake([word], COMMANDS)
    assert said is not None
    assert said.isprintable()
    assert len(said) < 200
