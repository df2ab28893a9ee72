"""`penstock pull QUEUE`: claim messages and show them, with their receipts."""

import sys
from argparse import ArgumentParser, Namespace

from penstock.cli.peek import add_limit, print_messages
from penstock.cli.session import Session
from penstock.cli.values import read_duration
from penstock.client import Queues
from penstock.service import Claim


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("queue", metavar="QUEUE")
    add_limit(parser, "claim")
    parser.add_argument(
        "--wait", type=read_duration, metavar="DURATION", help="wait up to this time for a message"
    )
    parser.add_argument(
        "--visibility-timeout",
        type=read_duration,
        metavar="DURATION",
        help="how long the claims last (default: the queue's visibility timeout)",
    )
    parser.add_argument(
        "--delete", action="store_true", help="delete them as soon as they are printed"
    )


def run(session: Session, arguments: Namespace) -> int:
    """Pulls and prints; returns 1 if there was no message."""
    queues = session.queues(arguments)
    claims = queues.pull_many(
        arguments.queue,
        arguments.limit,
        wait=arguments.wait,
        visibility_timeout=arguments.visibility_timeout,
    )
    print_messages(session, arguments, claims)
    if claims and arguments.delete:
        _delete_printed(queues, claims)
    return 0 if claims else 1


def _delete_printed(queues: Queues, claims: list[Claim]) -> None:
    if sys.stdout is not None:
        # Raises if the output cannot be written. Nothing is deleted then, and the messages
        # become visible again.
        sys.stdout.flush()
    queues.delete_many(claims)
