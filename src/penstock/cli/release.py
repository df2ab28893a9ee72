"""`penstock release QUEUE RECEIPT`: end a claim; the message returns at once or after a delay."""

from argparse import ArgumentParser, Namespace

from penstock.cli.session import Session
from penstock.cli.values import read_duration
from penstock.public import ClaimRef


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("queue", metavar="QUEUE")
    parser.add_argument("receipt", metavar="RECEIPT", help="of the claim, as pull printed it")
    parser.add_argument(
        "--delay",
        type=read_duration,
        default=0,
        metavar="DURATION",
        help="hide the message for this time (default: 0)",
    )


def run(session: Session, arguments: Namespace) -> int:
    """Releases the claim."""
    claim = ClaimRef(arguments.queue, arguments.receipt)
    session.queues(arguments).release(claim, delay=arguments.delay)
    session.print_result(arguments, {"queue": arguments.queue, "released": True}, "released")
    return 0
