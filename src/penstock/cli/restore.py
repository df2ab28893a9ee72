"""`penstock restore BACKUP PATH`: makes a store of a backup, in a directory that is new or empty.

Claims that were held when the backup began stay until they run out, but no receipt that was given
out before is accepted, and the messages have new ids: docs/formats/backup.md says why.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from penstock.cli.backup import show_copy
from penstock.cli.session import Session
from penstock.journal.backup import check_destination, restore


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("backup", metavar="BACKUP", help="a directory that penstock backup made")
    parser.add_argument("path", metavar="PATH", nargs="?", help="the store to make (or --url)")
    parser.add_argument(
        "--accept-loss",
        action="store_true",
        help="restore a damaged backup without what is damaged in it",
    )


def run(session: Session, arguments: Namespace) -> int:
    """Restores the store and prints what is in it; returns 6 if it is damaged."""
    to = check_destination(session.path(arguments, must_exist=False), "PATH")
    made = restore(Path(arguments.backup), to, accept_loss=arguments.accept_loss)
    return show_copy(session, arguments, made, "store")
