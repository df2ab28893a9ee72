"""`penstock configure QUEUE [settings]`: change the settings named; with none, show them all."""

from argparse import ArgumentParser, Namespace

from penstock.cli.create import tell_info
from penstock.cli.queue_settings import SETTINGS, add_setting_flags, given_settings
from penstock.cli.session import Session

_UNSETTABLE = {setting.flag: setting.name for setting in SETTINGS if setting.optional}


def add_arguments(parser: ArgumentParser) -> None:
    """Says what the command takes."""
    parser.add_argument("queue", metavar="QUEUE")
    add_setting_flags(parser)
    parser.add_argument(
        "--unset",
        action="append",
        default=[],
        choices=list(_UNSETTABLE),
        metavar="SETTING",
        help=f"lift a limit: {', '.join(_UNSETTABLE)} (repeatable)",
    )


def run(session: Session, arguments: Namespace) -> int:
    """Changes the settings and shows them all."""
    settings = given_settings(arguments)
    settings |= {_UNSETTABLE[flag]: None for flag in arguments.unset}
    info = session.queues(arguments).configure(arguments.queue, **settings)
    tell_info(session, arguments, info)
    return 0
