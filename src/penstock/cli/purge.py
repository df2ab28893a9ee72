"""`penstock purge QUEUE`: remove every message of a queue, those in flight included."""

from argparse import ArgumentParser, Namespace

from penstock.cli.session import Session


def add_arguments(parser: ArgumentParser) -> None:
    """Says what the command takes."""
    parser.add_argument("queue", metavar="QUEUE")


def run(session: Session, arguments: Namespace) -> int:
    """Purges the queue and says how many messages went."""
    count = session.queues(arguments).purge(arguments.queue)
    session.tell(arguments, {"queue": arguments.queue, "purged": count}, f"purged {count:,}")
    return 0
