"""`penstock delete QUEUE RECEIPT`: delete a claimed message."""

from argparse import ArgumentParser, Namespace

from penstock.cli.session import Session
from penstock.public import ClaimRef


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("queue", metavar="QUEUE")
    parser.add_argument("receipt", metavar="RECEIPT", help="of the claim, as pull printed it")


def run(session: Session, arguments: Namespace) -> int:
    """Deletes the message; returns 1 if it no longer existed."""
    deleted = session.queues(arguments).delete(ClaimRef(arguments.queue, arguments.receipt))
    result = {"queue": arguments.queue, "deleted": deleted}
    session.print_result(arguments, result, "deleted" if deleted else "gone already")
    return 0 if deleted else 1
