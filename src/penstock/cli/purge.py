"""`penstock purge QUEUE`: remove every message of a queue, those in flight included."""

from argparse import ArgumentParser, Namespace

from penstock.cli.session import Session


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("queue", metavar="QUEUE")


def run(session: Session, arguments: Namespace) -> int:
    """Purges the queue and prints how many messages were removed."""
    count = session.queues(arguments).purge(arguments.queue)
    session.print_result(
        arguments, {"queue": arguments.queue, "purged": count}, f"purged {count:,}"
    )
    return 0
