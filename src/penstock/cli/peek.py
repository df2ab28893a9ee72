"""`penstock peek QUEUE`: show messages without claiming them."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from penstock.cli.session import Session
from penstock.cli.show import message_as_json, message_as_text
from penstock.cli.values import read_count
from penstock.service import Message


def add_limit(parser: ArgumentParser, verb: str) -> None:
    """Adds the option for the largest number of messages."""
    parser.add_argument(
        "-n",
        dest="limit",
        type=read_count,
        default=1,
        metavar="N",
        help=f"{verb} at most N messages (default: 1)",
    )


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("queue", metavar="QUEUE")
    add_limit(parser, "show")
    parser.add_argument(
        "--state",
        choices=["visible", "delayed", "in-flight"],
        default="visible",
        help="which messages (default: visible)",
    )


def run(session: Session, arguments: Namespace) -> int:
    """Prints the messages; 1 if there was none."""
    state = arguments.state.replace("-", "_")
    messages = session.queues(arguments).peek(arguments.queue, arguments.limit, state=state)
    print_messages(session, arguments, messages)
    return 0 if messages else 1


def print_messages(session: Session, arguments: Namespace, messages: Sequence[Message]) -> None:
    """Prints messages or claims, an empty line between them."""
    for number, message in enumerate(messages):
        if arguments.json:
            session.print_json(message_as_json(message))
        else:
            print(("\n" if number else "") + message_as_text(message))
