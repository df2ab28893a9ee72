"""The command line: `penstock COMMAND …`, one module of this package for each command.

Results go to stdout. An error is one line on stderr, and the exit status depends on its kind:
`penstock --help` lists the statuses.
"""

import io
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Final

from penstock.cli.mistakes import similar_queues
from penstock.cli.parser import command_named, make_parser
from penstock.cli.session import Session, UsageError
from penstock.errors import (
    AddressInUse,
    JournalError,
    PenstockError,
    ProtocolError,
    QueueNotFound,
    RequestError,
    StoreInUse,
    UnavailableError,
)
from penstock.output import report

USAGE: Final = 2
INTERRUPTED: Final = 130
READER_GONE: Final = 141
# Of a store with more queues, those of the first names are compared with a wrong one.
_NAMES_MAX: Final = 10_000
_STATUS_OF: Final[tuple[tuple[type[Exception], int], ...]] = (
    (UsageError, USAGE),
    (RequestError, 3),
    (AddressInUse, 7),
    (StoreInUse, 8),
    (UnavailableError, 4),
    (ProtocolError, 5),
    (JournalError, 6),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status; prints an error as one line."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal's encoding lacks must not raise: a claimed message
        # would then not be printed.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with Session() as session:
            status = run_command(session, sys.argv[1:] if argv is None else argv)
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return READER_GONE
    except OSError as error:
        why = error.strerror or str(error)
        print_error(UsageError(why if error.filename is None else f"{error.filename}: {why}"))
        _discard_stdout()
        return USAGE
    except (PenstockError, UsageError) as error:
        print_error(error)
        return status_of(error)
    return status


def run_command(session: Session, words: Sequence[str]) -> int:
    """Runs one command within a session. Raises UsageError and the errors of the store."""
    try:
        arguments = make_parser().parse_args(words)
    except SystemExit:
        return 0  # argparse has printed the help or the version
    try:
        return command_named(arguments.command).run(session, arguments)
    except QueueNotFound as error:
        raise _with_similar(session, arguments, error) from None


def _with_similar(session: Session, arguments: Namespace, error: QueueNotFound) -> QueueNotFound:
    """The error, with the names of queues that may have been meant."""
    given = [getattr(arguments, name, None) or [] for name in ("queue", "to")]
    asked = [name for each in given for name in ([each] if isinstance(each, str) else each)]
    try:
        with session.looking(arguments) as queues:
            names = queues.list(limit=_NAMES_MAX)
    except (RequestError, UnavailableError, UsageError):
        return error  # the store can name no queue now; what was wrong is known
    similar = similar_queues(asked, names)
    return type(error)(f"{error}{similar}") if similar else error


def status_of(error: Exception) -> int:
    """The exit status for an error."""
    return next((status for kind, status in _STATUS_OF if isinstance(error, kind)), USAGE)


def print_error(error: Exception, place: str = "") -> None:
    """Prints an error as one line on stderr."""
    report(place + " ".join(str(error).split()))


def _discard_stdout() -> None:
    """Points stdout at /dev/null, so that the flush at the interpreter's exit cannot fail."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
