"""`penstock remove QUEUE`: delete a queue with all its messages."""

from argparse import ArgumentParser, Namespace

from penstock.cli.session import Session


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("queue", metavar="QUEUE")
    parser.add_argument(
        "--force",
        action="store_true",
        help="even if it is the dead-letter queue of others",
    )


def run(session: Session, arguments: Namespace) -> int:
    """Removes the queue."""
    queue = arguments.queue
    session.queues(arguments).remove(queue, force=arguments.force)
    session.print_result(arguments, {"queue": queue, "removed": True}, f"removed {queue}")
    return 0
