"""`penstock pipeline forget`: remove the content of single messages from the lake."""

import re
from argparse import ArgumentParser, Namespace
from typing import Final

from penstock.cli.lake.options import add_lake
from penstock.cli.session import Session, UsageError

_MESSAGE_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{2}0-9000-[0-9a-f]{12}")
_NOT_ALL: Final = 1


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the action."""
    parser.description = (
        "Replaces the bodies and attributes of these messages by nothing, in every file of the "
        "lake, and removes the files that held them. What happened to the messages stays. The "
        "journal and its archive are not changed."
    )
    add_lake(parser)
    parser.add_argument("message_ids", metavar="MESSAGE_ID", nargs="+")


def run(session: Session, arguments: Namespace) -> int:
    """Runs the action. Raises UsageError, LakeUnusable or LakeBusy."""
    from penstock.spark.forgetting import forget_content
    from penstock.spark.lake import Lake

    for message_id in arguments.message_ids:
        if not _MESSAGE_ID.fullmatch(message_id):
            raise UsageError(f"forget: {message_id!r} is not a message id of a lake")
    lake = Lake.open(arguments.lake, other_owner=arguments.insecure_other_owner)
    found = forget_content(lake, arguments.message_ids)
    for message_id, rows in found.items():
        done = f"forgotten in {rows} rows" if rows else "is not in the lake, or was dropped"
        session.print_result(
            arguments, {"message_id": message_id, "rows": rows}, f"{message_id}: {done}"
        )
    return 0 if all(found.values()) else _NOT_ALL
