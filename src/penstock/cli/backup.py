"""`penstock backup DIR`: copies a store into a new directory while other processes use it.

Every push that was answered before is in the copy. It is verified, as by `penstock check`, before
it gets its name: a directory of this name is a complete backup.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from penstock.cli.inspect import DAMAGED
from penstock.cli.session import Session
from penstock.cli.values import show_size
from penstock.journal.backup import MadeCopy, back_up, check_destination
from penstock.output import print_text, report


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("directory", metavar="DIR", help="a new directory")


def run(session: Session, arguments: Namespace) -> int:
    """Takes the backup and prints what is in it; returns 6 if the store is damaged."""
    to = check_destination(arguments.directory, "DIR")
    arguments.path = None
    made = back_up(Path(session.path(arguments)), to)
    return show_copy(session, arguments, made, "backup")


def show_copy(session: Session, arguments: Namespace, made: MadeCopy, what: str) -> int:
    """Prints what a backup or a restored store has; returns 6 if it is damaged."""
    for text in made.damage:
        report(f"DAMAGED  {text}")
    sound = [each.text for each in made.findings if not each.is_damage]
    if arguments.json:
        session.print_json(
            {
                what: str(made.path),
                "size_bytes": made.size_bytes,
                "sound": not made.damage,
                "damaged": made.damage,
                "found": sound,
            }
        )
    else:
        state = next((text for text in sound if text.startswith("state: ")), "state: unknown")
        print_text(f"{what} {made.path}: {show_size(made.size_bytes)}")
        print_text(state)
        print_text("verified: sound" if not made.damage else f"{len(made.damage)} damaged")
    return DAMAGED if made.damage else 0
