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
        ("push orders --form x", "unknown option --form; did you mean --from?", "push "),
        (
            "pipeline run --jurnal x --lake y",
            "unknown option --jurnal; did you mean --journal?",
            "pipeline run ",
        ),
        ("push orders hello world", f"world is one word too many; {QUOTES}", "push "),
        ("list --zz", "unknown option --zz", "list "),
        ("daemon", "the action is missing: status, stop, run", "daemon "),
        (
            "daemon statsu",
            "argument ACTION: statsu is none of status, stop, run; did you mean status?",
            "daemon ",
        ),
        (
            "peek q --state delaid",
            (
                "argument --state: delaid is none of visible, delayed, in-flight; "
                "did you mean delayed?"
            ),
            "peek ",
        ),
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


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("push oders hello", "orders"),
        ("stats mial orders", "mail"),
        ("peek order", "orders"),
        ("redrive orders-ded", "orders-dead"),
        ("remove Orders", "orders"),
    ],
)
def test_a_queue_that_does_not_exist_is_compared_with_those_that_do(shell, line, meant):
    done = shell(f"create orders --dead-letter orders-dead --max-receives 2\ncreate mail\n{line}")
    assert done.err.endswith(f"; did you mean {meant}?\n")
    assert done.status == 3


def test_a_queue_that_is_like_no_other_has_no_hint(shell):
    assert "did you mean" not in shell("create orders\npeek frobnicate").err
