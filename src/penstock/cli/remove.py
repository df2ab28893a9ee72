"""`penstock remove QUEUE`: delete a queue with all its messages."""

from argparse import ArgumentParser, Namespace

from penstock.cli.session import Session
from penstock.errors import QueueNotFound


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
    try:
        session.queues(arguments).remove(queue, force=arguments.force)
    except QueueNotFound:
        raise QueueNotFound(f"queue: there is no queue {queue!r}") from None
    session.print_result(arguments, {"queue": queue, "removed": True}, f"removed {queue}")
    return 0
