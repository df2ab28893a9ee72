"""`penstock why ID`: what happened to a message, in sentences."""

import time
from argparse import ArgumentParser, Namespace

import msgspec

from penstock.cli.histories import read_history
from penstock.cli.session import Session
from penstock.cli.show import joined
from penstock.life import life


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("id", metavar="ID", help="the id that the push printed")


def run(session: Session, arguments: Namespace) -> int:
    """Prints the sentences; with --json, the episodes of its life, too."""
    with session.looking(arguments) as queues:
        events = read_history(queues, arguments.id)
    told = life(events, time.time_ns() // 1_000_000)
    text = joined(told.sentences)
    session.print_result(arguments, {"id": arguments.id, **msgspec.structs.asdict(told)}, text)
    return 0
