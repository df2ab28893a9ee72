"""`penstock pause QUEUE`: pulls get nothing from a queue until `penstock resume`; pushes go on."""

from argparse import ArgumentParser, Namespace

from penstock.cli.session import Session


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("queue", metavar="QUEUE")


def run(session: Session, arguments: Namespace) -> int:
    """Pauses the queue."""
    queue = arguments.queue
    session.queues(arguments).pause(queue)
    text = f"paused {queue}: pulls get nothing until: penstock resume {queue}"
    session.print_result(arguments, {"queue": queue, "paused": True}, text)
    return 0
