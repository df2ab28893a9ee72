"""`penstock resume QUEUE`: pulls get messages again from a queue that was paused."""

from argparse import ArgumentParser, Namespace

from penstock.cli.session import Session


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("queue", metavar="QUEUE")


def run(session: Session, arguments: Namespace) -> int:
    """Resumes the queue; pulls that wait are served."""
    queue = arguments.queue
    session.queues(arguments).resume(queue)
    session.print_result(arguments, {"queue": queue, "paused": False}, f"resumed {queue}")
    return 0
