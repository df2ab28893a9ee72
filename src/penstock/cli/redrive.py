"""`penstock redrive QUEUE`: move dead letters back to their source queues, or to another one."""

from argparse import ArgumentParser, Namespace

from penstock.cli.session import Session
from penstock.cli.values import read_count


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("queue", metavar="QUEUE", help="the dead-letter queue")
    parser.add_argument(
        "--to", metavar="QUEUE", help="move them to this queue (default: their source queues)"
    )
    parser.add_argument("--limit", type=read_count, metavar="N", help="move at most N messages")


def run(session: Session, arguments: Namespace) -> int:
    """Moves the messages and prints how many."""
    queue = arguments.queue
    count = session.queues(arguments).redrive(queue, to=arguments.to, limit=arguments.limit)
    session.print_result(arguments, {"queue": queue, "moved": count}, f"moved {count:,}")
    return 0
