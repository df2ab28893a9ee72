"""`penstock extend QUEUE RECEIPT DURATION`: set a claim's deadline to DURATION from now."""

from argparse import ArgumentParser, Namespace

from penstock.cli.session import Session
from penstock.cli.values import read_duration, show_duration
from penstock.public import ClaimRef


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("queue", metavar="QUEUE")
    parser.add_argument("receipt", metavar="RECEIPT", help="of the claim, as pull printed it")
    parser.add_argument("duration", metavar="DURATION", type=read_duration)


def run(session: Session, arguments: Namespace) -> int:
    """Extends the claim."""
    claim = ClaimRef(arguments.queue, arguments.receipt)
    deadline_ms = session.queues(arguments).extend(claim, arguments.duration)
    result = {"queue": arguments.queue, "deadline_ms": deadline_ms}
    session.print_result(
        arguments, result, f"held for {show_duration(round(arguments.duration * 1_000))}"
    )
    return 0
