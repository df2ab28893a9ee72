"""`penstock shell`: run commands from stdin in one process, one for each line, with shell quoting.

At a terminal it prompts, and continues after an error. From a file or a pipe it stops at the first
error, names its line, and ends with that error's exit status.
"""

import os
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

from penstock.cli import print_error, run_command, status_of
from penstock.cli.parser import make_parser
from penstock.cli.session import Session, UsageError
from penstock.errors import PenstockError
from penstock.output import flush, print_text

_EXIT_COMMANDS = (["exit"], ["quit"])


def add_arguments(parser: ArgumentParser) -> None:
    """Adds nothing: the shared options name the store of all its commands."""


def run(session: Session, arguments: Namespace) -> int:
    """Runs every line; the status is that of the last one, or of the error that stopped it."""
    if session.in_shell:
        raise UsageError("this is a shell already")
    if sys.stdin is None:
        raise UsageError("stdin is closed")
    session.in_shell, session.shell_url = True, arguments.url
    at_terminal = sys.stdin.isatty()
    status = 0
    for number, line in enumerate(_lines(at_terminal), 1):
        try:
            words = _words(line)
            if words in _EXIT_COMMANDS:
                break
            if words:
                status = _run_words(session, words, arguments.json)
        except (PenstockError, UsageError) as error:
            print_error(error, "" if at_terminal else f"line {number}: ")
            status = status_of(error)
            if not at_terminal:
                break
    return status


def _run_words(session: Session, words: list[str], in_json: bool) -> int:
    if words == ["help"]:
        make_parser().print_help()
        return 0
    status = run_command(session, ["--json", *words] if in_json else words)
    flush()
    return status


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise UsageError(f"cannot split the line into words: {error}") from None


def _lines(at_terminal: bool) -> Iterator[str]:
    if not at_terminal:
        yield from map(os.fsdecode, sys.stdin.buffer)
        return
    import readline  # noqa: F401  (gives input() line editing and a history)

    while True:
        try:
            yield input("penstock> ")
        except EOFError:
            print_text("")
            return
