"""The command line's grammar: its commands, and the options that all of them share.

A command is one module of this package with two functions, `add_arguments(parser)` and
`run(session, arguments) -> exit status`, and one line in `COMMANDS`. Its module is imported only
when the command is used, so a slow import does not delay the other commands.
"""

import sys
from argparse import (
    SUPPRESS,
    Action,
    ArgumentError,
    ArgumentParser,
    Namespace,
    RawDescriptionHelpFormatter,
    _SubParsersAction,
)
from collections.abc import Sequence
from importlib import import_module
from itertools import takewhile
from typing import Any, Final, NoReturn, Protocol, cast

from penstock import __version__
from penstock.cli.mistakes import describe_choice, describe_surplus, find_mistake
from penstock.cli.session import Session, UsageError
from penstock.settings import URL_VARIABLE

COMMANDS: Final = {
    "serve": "run an Amazon SQS endpoint on this machine",
    "demo": "run a server under load, kill it, and see that nothing is lost",
    "create": "create a queue",
    "configure": "change a queue's settings, or show them",
    "pause": "pause the delivery of a queue: pulls get nothing",
    "resume": "resume the delivery of a queue",
    "remove": "delete a queue with all its messages",
    "list": "list the names of the queues",
    "push": "add a message, or those of a file",
    "pull": "claim messages",
    "extend": "hold a claim for longer",
    "release": "end a claim: the message becomes visible again",
    "delete": "delete a claimed message",
    "peek": "show messages without claiming them",
    "export": "print every message as a line of JSON, without claiming any",
    "stats": "show the depth of queues",
    "top": "show every queue live in this terminal",
    "tail": "show what happens in a queue, as it happens",
    "purge": "remove every message of a queue",
    "redrive": "move dead letters back to their source queues",
    "why": "say what happened to a message, and who held it",
    "history": "show the events of a message",
    "daemon": "show, stop or run the process that serves a data directory",
    "cluster": "start a cluster on this machine; show one, move its shards",
    "inspect": "show the events of a store's journal",
    "check": "verify all of a store",
    "backup": "copy a store while it is used",
    "restore": "make a store of a backup",
    "readers": "show the readers of a store's journal, or remove one",
    "mirror": "repeat every change to a store's queues in another service",
    "capture": "write what happened in a queue to a file, for a test",
    "lambda": "invoke a function with the messages of a queue, as AWS Lambda does",
    "worker": "run the tasks of an app",
    "tasks": "list, retry, cancel and inspect the tasks of an app",
    "pipeline": "derive tables from journals with Spark; audit, report and replay",
    "completion": "print the script by which a shell completes these commands",
    "shell": "run commands from stdin in one process, one for each line",
}

# How argparse says that an argument is missing.
_MISSING: Final = ("the following arguments are required", "is required")
# Names that no module can have.
_MODULES: Final = {"lambda": "event_source"}

EXIT_CODES: Final = """\
exit status:
  0  done
  1  nothing found: no message to pull or peek at, or it was deleted already;
     an audit that found something wrong
  2  usage: wrong arguments, or a file that cannot be read or written
  3  the request is wrong (RequestError): no such queue, a limit, a stale receipt
  4  the store cannot answer now (UnavailableError): try again later
  5  the peer does not speak Penstock's protocol (ProtocolError)
  6  the store cannot be trusted or opened (JournalError)
  7  the address to listen on is taken (AddressInUse): choose another port
  8  another process holds the data directory (StoreInUse): use it there
  130 interrupted, 141 the program that read the output has ended

durations: 30, 1.5, 30s, 5m, 2h, 4d      sizes: 256, 64KiB, 1MiB
memory: lives only as long as the process; use it with penstock shell --url memory:
"""


class CliCommand(Protocol):
    """The functions of a command's module."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Adds the arguments of the command."""
        ...

    def run(self, session: Session, arguments: Namespace) -> int:
        """Runs the command and returns the exit status."""
        ...


def command_named(name: str) -> CliCommand:
    """The module of a command."""
    return cast(CliCommand, import_module(f"penstock.cli.{_MODULES.get(name, name)}"))


class _Formatter(RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def add_argument(self, action: Action) -> None:
        super().add_argument(action)
        if isinstance(action, _SubParsersAction):
            # argparse does not count that commands are indented: the longest would be wrapped.
            self._action_max_length += self._indent_increment


class Parser(ArgumentParser):
    """A parser that raises UsageError and imports its command's module on first use."""

    def __init__(self, *, command: str | None = None, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **options)
        self._unloaded_command = command
        self._actions_of_command: _SubParsersAction[Any] | None = None
        self._words: Sequence[str] = ()

    def load(self) -> None:
        """Imports the module of the command and adds its arguments, once."""
        if self._unloaded_command is not None:
            command, self._unloaded_command = command_named(self._unloaded_command), None
            command.add_arguments(self)
            _add_shared_options(self, SUPPRESS)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        self.load()
        self._words = () if args is None else args
        found, surplus = super().parse_known_args(args, namespace)
        if surplus:
            self.error(describe_surplus(surplus, self.format_help()))
        return found, surplus

    def _check_value(self, action: Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise ArgumentError(action, describe_choice(str(value), map(str, action.choices)))

    def add_subparsers(self, **options: Any) -> "_SubParsersAction[Any]":
        self._actions_of_command = super().add_subparsers(**options)
        return self._actions_of_command

    def error(self, message: str) -> NoReturn:
        if self._actions_of_command is not None and message.endswith(": ACTION"):
            message = f"the action is missing: {', '.join(self._actions_of_command.choices)}"
        elif message.endswith(_MISSING) or message.startswith(_MISSING):
            # Most likely it is there, and misspelt.
            known = self._option_string_actions
            unknown = [
                each
                for each in takewhile("--".__ne__, self._words)
                if each.startswith("--") and each.partition("=")[0] not in known
            ]
            if unknown:
                message = describe_surplus(unknown, self.format_help())
        raise UsageError(f"{message} (see {self.prog} --help)")


def _add_shared_options(parser: ArgumentParser, default: Any) -> None:
    # They may be given before the command or after it; SUPPRESS keeps the later parser from
    # overwriting what the earlier one found.
    parser.add_argument(
        "--url",
        default=default,
        metavar="URL",
        help=f"the store, such as memory: (default: ${URL_VARIABLE})",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        default=default or False,
        help="print one JSON object a line for each result",
    )


class _CommandLine(Parser):
    """The parser of the whole line; it looks at the words before the command first."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        mistake = find_mistake(sys.argv[1:] if args is None else args, COMMANDS)
        if mistake is not None:
            self.error(mistake)
        return super().parse_known_args(args, namespace)


def make_parser() -> ArgumentParser:
    """The parser of `penstock`, with every command in it."""
    parser = _CommandLine(
        prog="penstock",
        description="Push, pull and manage messages in any store that Penstock can reach.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    _add_shared_options(parser, None)
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, title="commands", parser_class=Parser
    )
    for name, summary in COMMANDS.items():
        add_action(commands, name, summary, command=name)
    return parser


def add_action(
    actions: "_SubParsersAction[Any]", name: str, summary: str, **options: Any
) -> ArgumentParser:
    """Adds a command, or an action of a command, such as `daemon status`."""
    description = f"{summary[0].upper()}{summary[1:]}."
    added: ArgumentParser = actions.add_parser(
        name, help=summary, description=description, **options
    )
    if "command" not in options:
        # A command gets them with its own arguments, when it is used.
        _add_shared_options(added, SUPPRESS)
    return added
