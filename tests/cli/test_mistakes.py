"""Command lines that mean nothing: which word is wrong, and what to write instead."""

import shlex

import pytest

from penstock.cli import USAGE
from penstock.cli.mistakes import find_mistake
from penstock.cli.parser import COMMANDS

BEFORE = "only --url and --json may stand before the command"
BEHIND = "write it behind {0} if it is an option of {0}, and --url URL to name a store"
QUOTES = "put a text of several words in quotes"


@pytest.mark.parametrize(
    ("line", "said", "where"),
    [
        ("", "the command is missing", ""),
        ("--store file:s create q", f"--store: {BEFORE}; {BEHIND.format('create')}", ""),
        ("--wait=5 pull orders", f"--wait: {BEFORE}; {BEHIND.format('pull')}", ""),
        ("--jsn list", f"--jsn: {BEFORE}; did you mean --json?", ""),
        ("-v", f"-v: {BEFORE}, and no command follows", ""),
        ("creat orders", "creat is not a command; did you mean create?", ""),
        ("frobnicate", "frobnicate is not a command", ""),
        ("help", "help is not a command: write penstock --help, or penstock COMMAND --help", ""),
        (
            "orders push hello",
            "orders is not a command: the command comes first, as in penstock push orders",
            "",
        ),
        (
            "file:s create orders",
            "file:s is not a command: to name a store, write penstock --url file:s COMMAND",
            "",
        ),
        ("'' create", "'' is not a command: the command comes first, as in penstock create ''", ""),
        ("push orders x --dely 5", "unknown option --dely; did you mean --delay?", "push "),
        ("push orders hello world", f"world is one word too many; {QUOTES}", "push "),
        ("list --zz", "unknown option --zz", "list "),
        ("daemon", "the action is missing: status, stop, run", "daemon "),
        ("daemon status --nowhere x", "unknown option --nowhere", "daemon status "),
    ],
)
def test_a_mistake_is_named_with_what_to_write_instead(run_main, line, said, where):
    done = run_main(*shlex.split(line))
    assert done.err == f"penstock: {said} (see penstock {where}--help)\n"
    assert (done.status, done.out) == (USAGE, "")


@pytest.mark.parametrize(
    "line",
    [
        ["--url", "memory:", "create", "orders"],
        ["--url=memory:", "--json", "list"],
        ["--json", "list", "--unknown"],
        ["--url", "--json"],
        ["--version"],
        ["-h", "nonsense"],
        ["--url"],
    ],
)
def test_errors_that_argparse_explains_are_left_to_it(line):
    assert find_mistake(line, COMMANDS) is None


@pytest.mark.parametrize("word", ["\x1b[31m", "x" * 5_000, "new\nline"])
def test_a_word_that_cannot_be_shown_as_it_is_is_quoted_and_cut(word):
    said = find_mistake([word], COMMANDS)
    assert said is not None
    assert said.isprintable()
    assert len(said) < 200
