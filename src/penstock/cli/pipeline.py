"""`penstock pipeline ACTION`: the events of journals as tables in a lake, and reports on them.

An action is one module of `cli.lake` that is a `CliCommand`, and one line in `ACTIONS`.
"""

from argparse import ArgumentParser, Namespace
from importlib import import_module
from typing import Final, cast

from penstock.cli.parser import CliCommand, add_action
from penstock.cli.session import Session
from penstock.spark.session import require_packages

ACTIONS: Final = {
    "run": "read journals into the lake and make its tables",
    "status": "show how far the lake is behind the journals",
    "audit": "check the events of every message; status 1 if some are wrong",
    "report": "write an HTML page about the tables of the lake",
    "sql": "run any Spark SQL over the lake's tables, with all rights of your user",
    "shell": "run SQL queries over the lake's tables, one after another",
    "replay": "send messages of the lake to a queue, each of them once",
    "warm": "keep a Spark session, so that other commands on a lake start at once",
    "forget": "remove the content of single messages from the lake",
    "compact": "join small files, remove unused ones",
}


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, summary in ACTIONS.items():
        action = add_action(actions, name, summary)
        _action(name).add_arguments(action)


def run(session: Session, arguments: Namespace) -> int:
    """Runs the action. Raises UsageError and the errors of the lake and the journals."""
    if arguments.action not in ("audit", "replay"):
        session.refuse_option(
            arguments, "url", "the pipeline reads files: give --journal PATH or --lake PATH"
        )
    require_packages()
    return _action(arguments.action).run(session, arguments)


def _action(name: str) -> CliCommand:
    return cast(CliCommand, import_module(f"penstock.cli.lake.{name}"))
