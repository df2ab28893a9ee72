"""`penstock create QUEUE [settings]`: create a queue, or check that it has these settings."""

from argparse import ArgumentParser, Namespace

import msgspec

from penstock.cli.queue_settings import add_setting_flags, given_settings, settings_rows
from penstock.cli.session import Session
from penstock.cli.show import labelled
from penstock.public import QueueDescription


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("queue", metavar="QUEUE")
    add_setting_flags(parser)


def run(session: Session, arguments: Namespace) -> int:
    """Creates the queue and prints its settings."""
    info = session.queues(arguments, makes=True).create(
        arguments.queue, **given_settings(arguments)
    )
    print_info(session, arguments, info)
    return 0


def print_info(session: Session, arguments: Namespace, info: QueueDescription) -> None:
    """Prints a queue's settings."""
    rows = [("queue", info.queue), *settings_rows(info)]
    rows += [("also created", f"{name}, the dead-letter queue") for name in info.also_created]
    session.print_result(arguments, msgspec.to_builtins(info), labelled(rows))
