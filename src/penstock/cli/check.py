"""`penstock check PATH`: verifies a whole store; the exit status is 0 if it has no damage.

It can run while another process writes, and changes nothing. With `--accept-loss` it also opens a
store whose journal misses files, or synced bytes of them. What they held is lost, and is reported
as damage.
"""

import logging
from argparse import ArgumentParser, Namespace
from pathlib import Path

from penstock.cli.inspect import DAMAGED
from penstock.cli.session import Session
from penstock.journal.store import open_reader
from penstock.journal.verify import Finding, verify
from penstock.output import logger, print_text


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        help="a store, a journal or an archive (default: the store of --url)",
    )
    parser.add_argument("--archive", metavar="DIR", help="verify the files archived there, too")
    parser.add_argument(
        "--accept-loss",
        action="store_true",
        help="open a store with missing journal files once, so that it opens without their content",
    )
    parser.add_argument(
        "--insecure-other-owner",
        action="store_true",
        help="with --accept-loss: open a store of another user (root can)",
    )


def run(session: Session, arguments: Namespace) -> int:
    """Prints the findings; returns 6 if anything is damaged."""
    path = session.path(arguments)
    findings: list[Finding] = []
    if arguments.accept_loss:
        findings += _accept_loss(Path(path), other_owner=arguments.insecure_other_owner)
    findings += verify(path, arguments.archive)
    damaged = [each.text for each in findings if each.is_damage]
    if arguments.json:
        sound = [each.text for each in findings if not each.is_damage]
        session.print_json({"sound": not damaged, "damaged": damaged, "found": sound})
    else:
        for each in findings:
            print_text(("DAMAGED  " if each.is_damage else "ok       ") + each.text)
        print_text("sound" if not damaged else f"{len(damaged)} damaged")
    return DAMAGED if damaged else 0


def _accept_loss(store: Path, *, other_owner: bool) -> list[Finding]:
    """Opens the store once without what it misses, and reports in which files that was."""
    with open_reader(store) as reader:
        loss = reader.loss()
    if loss is None:
        return [Finding(False, "loss: no file is missing, so there is no loss to accept")]
    # Imported here: the other uses of this command need no engine.
    from penstock.backends.engine.store import open_engine

    # The loss is printed below; opening would also log a warning about it.
    journal = logger("penstock.journal")
    level = journal.level
    journal.setLevel(logging.ERROR)
    try:
        open_engine(store, accept_loss=True, other_owner=other_owner).close()
    finally:
        journal.setLevel(level)
    names = ", ".join(loss.names)
    return [Finding(True, f"loss: accepted for {names}; the store opens without their content")]
