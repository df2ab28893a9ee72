"""`penstock create QUEUE [settings]`: make a queue, or find it there with these settings."""

from argparse import ArgumentParser, Namespace

import msgspec

from penstock.cli.queue_settings import add_setting_flags, given_settings, settings_rows
from penstock.cli.session import Session
from penstock.cli.show import labelled
from penstock.service import QueueInfo


def add_arguments(parser: ArgumentParser) -> None:
    """Says what the command takes."""
    parser.add_argument("queue", metavar="QUEUE")
    add_setting_flags(parser)


def run(session: Session, arguments: Namespace) -> int:
    """Makes the queue and shows its settings."""
    info = session.queues(arguments).create(arguments.queue, **given_settings(arguments))
    tell_info(session, arguments, info)
    return 0


def tell_info(session: Session, arguments: Namespace, info: QueueInfo) -> None:
    """Prints a queue's settings."""
    rows = [("queue", info.queue), *settings_rows(info)]
    rows += [("also created", f"{name}, the dead-letter queue") for name in info.also_created]
    result = {**msgspec.to_builtins(info), "also_created": info.also_created}
    session.tell(arguments, result, labelled(rows))
