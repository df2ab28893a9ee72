"""`penstock configure QUEUE [settings]`: change the given settings; with none, show all."""

from argparse import ArgumentParser, Namespace

from penstock.cli.create import print_info
from penstock.cli.queue_settings import SETTINGS, add_setting_flags, given_settings
from penstock.cli.session import Session

_UNSETTABLE = {setting.flag: setting.name for setting in SETTINGS if setting.optional}


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("queue", metavar="QUEUE")
    add_setting_flags(parser)
    parser.add_argument(
        "--unset",
        action="append",
        default=[],
        choices=list(_UNSETTABLE),
        metavar="SETTING",
        help=f"remove a limit: {', '.join(_UNSETTABLE)} (repeatable)",
    )


def run(session: Session, arguments: Namespace) -> int:
    """Changes the given settings and prints all of them."""
    settings = given_settings(arguments)
    settings |= {_UNSETTABLE[flag]: None for flag in arguments.unset}
    if settings:
        info = session.queues(arguments).configure(arguments.queue, **settings)
    else:
        with session.looking(arguments) as queues:
            info = queues.describe(arguments.queue)
    print_info(session, arguments, info)
    return 0
