"""The command line: `penstock COMMAND …`, one module of this package for each command.

Results go to stdout. An error is one line on stderr, and the exit status depends on its kind:
`penstock --help` lists the statuses.
"""

import io
import os
import sys
from collections.abc import Sequence
from typing import Final

from penstock.cli.parser import command_named, make_parser
from penstock.cli.session import Session, UsageError
from penstock.errors import (
    AddressInUse,
    JournalError,
    PenstockError,
    ProtocolError,
    RequestError,
    StoreInUse,
    UnavailableError,
)

USAGE: Final = 2
INTERRUPTED: Final = 130
READER_GONE: Final = 141
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
    return command_named(arguments.command).run(session, arguments)


def status_of(error: Exception) -> int:
    """The exit status for an error."""
    return next((status for kind, status in _STATUS_OF if isinstance(error, kind)), USAGE)


def print_error(error: Exception, place: str = "") -> None:
    """Prints an error as one line on stderr."""
    print(f"penstock: {place}{' '.join(str(error).split())}", file=sys.stderr)


def _discard_stdout() -> None:
    """Points stdout at /dev/null, so that the flush at the interpreter's exit cannot fail."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
