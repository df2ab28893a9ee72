"""`penstock peek QUEUE`: show messages without claiming them."""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from penstock.cli.histories import read_history
from penstock.cli.session import Session
from penstock.cli.show import NOTHING_TOLD, Told, message_as_json, message_as_text
from penstock.cli.values import read_count
from penstock.client import Queues
from penstock.errors import CorruptEntry, MessageNotFound, UnsupportedOperation
from penstock.life import dead_letter_move, life
from penstock.output import print_text
from penstock.service import Message


def add_limit(parser: ArgumentParser, verb: str) -> None:
    """Adds the option for the largest number of messages."""
    parser.add_argument(
        "-n",
        "--limit",
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
    with session.looking(arguments) as queues:
        messages = queues.peek(arguments.queue, arguments.limit, state=state)
        more = [told_of(queues, each, state) for each in messages]
    print_messages(session, arguments, messages, more)
    return 0 if messages else 1


def told_of(queues: Queues, message: Message, state: str) -> Told:
    """What only the history of a message says: when its delay ends, why it is a dead letter."""
    told = NOTHING_TOLD
    if state != "delayed" and message.source is None:
        return told
    try:
        events = read_history(queues, message.id)
    except (UnsupportedOperation, MessageNotFound, CorruptEntry):
        # A store without histories, or whose journal has dropped or damaged this one.
        return told
    now_ms = time.time_ns() // 1_000_000
    episodes = life(events, now_ms).episodes
    if episodes and episodes[-1].state == "delayed":
        told = told._replace(visible_at_ms=episodes[-1].deadline_ms)
    return told._replace(move=dead_letter_move(events, message.queue, now_ms))


def print_messages(
    session: Session,
    arguments: Namespace,
    messages: Sequence[Message],
    more: Sequence[Told] | None = None,
) -> None:
    """Prints messages or claims, an empty line between them."""
    for number, message in enumerate(messages):
        told = NOTHING_TOLD if more is None else more[number]
        if arguments.json:
            session.print_json(message_as_json(message) | told.as_json())
        else:
            if number:
                print_text("")
            print_text(message_as_text(message, told))
