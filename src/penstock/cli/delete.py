"""`penstock delete QUEUE RECEIPT`: end a claimed message for good."""

from argparse import ArgumentParser, Namespace

from penstock.cli.session import Session


def add_arguments(parser: ArgumentParser) -> None:
    """Says what the command takes."""
    parser.add_argument("queue", metavar="QUEUE")
    parser.add_argument("receipt", metavar="RECEIPT")


def run(session: Session, arguments: Namespace) -> int:
    """Deletes the message; 1 if it was gone already."""
    deleted = session.queues(arguments).delete(arguments.queue, receipt=arguments.receipt)
    result = {"queue": arguments.queue, "deleted": deleted}
    session.tell(arguments, result, "deleted" if deleted else "gone already")
    return 0 if deleted else 1
