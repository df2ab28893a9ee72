"""`penstock list [PREFIX]`: the names of the queues, in alphabetical order, one for each line."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

from penstock.cli.session import Session
from penstock.client import Queues


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="only these")


def run(session: Session, arguments: Namespace) -> int:
    """Prints the names."""
    with session.looking(arguments) as queues:
        for name in every_name(queues, arguments.prefix):
            session.print_result(arguments, {"queue": name}, name)
    return 0


def every_name(queues: Queues, prefix: str = "") -> Iterator[str]:
    """Yields the names of all queues; reads one page at a time."""
    names = queues.list(prefix)
    while names:
        yield from names
        names = queues.list(prefix, after=names[-1])
