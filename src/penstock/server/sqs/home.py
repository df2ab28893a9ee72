"""The home of a store: the account and region whose queues have bare names in it.

With another home the same names would mean other queues: one region would get the queues of
another. It is stored in two places, and a server with another home does not start:

    the file `sqs`    of a data directory, written once by the first server that holds it
    the note `.home`  of each queue with a bare name that an endpoint creates, whatever the service

A queue that was created in another way has no note, and belongs to the home of the server.
`sqs://` has no notes: its queues have an account and a region of their own.
"""

from pathlib import Path

import msgspec

from penstock.backends.loop import Steps
from penstock.errors import InvalidField, StoreUnusable
from penstock.files import read_in, write_in
from penstock.server.sqs.lookup import HOME_NOTE, QueueLookup
from penstock.service import QueueInfo
from penstock.url import read_url
from penstock.wire.sqs.address import Owner


class HomeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file, as JSON; a note has the same."""

    account: str
    region: str


def store_home(url: str, home: Owner, *, is_held: bool) -> None:
    """Checks the home of the data directory that this URL opens, if it opens one.

    If there is no home yet, it is written by the process that holds the store. Raises InvalidField
    if the store has another home, StoreUnusable if the file cannot be read or written.
    """
    directory = read_url(url).directory
    if directory is None:
        return
    path = Path(directory) / "sqs"
    try:
        kept = _read_home(directory)
        if kept is None and is_held:
            write_in(directory, "sqs", msgspec.json.encode(HomeFile(*home)) + b"\n")
    except (OSError, msgspec.DecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StoreUnusable(f"{path}: cannot be used: {reason}") from error
    if kept is not None:
        _check(kept, home, directory)


def _read_home(directory: str) -> HomeFile | None:
    """The home in the file; None if there is no file. Raises OSError or DecodeError."""
    try:
        return msgspec.json.decode(read_in(directory, "sqs"), type=HomeFile)
    except FileNotFoundError:
        return None


def check_notes(lookup: QueueLookup, home: Owner) -> Steps[None]:
    """Raises InvalidField if a queue with a bare name was created for another home."""
    if not lookup.home_note:
        return
    wanted = HomeFile(*home)
    others = yield from lookup.select(lambda queue: _home_of(queue) not in (None, wanted))
    for queue in others:
        _check(_home_of(queue) or wanted, home, "the store")


def _check(kept: HomeFile, home: Owner, where: str) -> None:
    for name in HomeFile.__struct_fields__:
        if getattr(kept, name) != getattr(home, name):
            raise InvalidField(
                f"{name}: {where} was created for {name} {getattr(kept, name)}, and cannot be "
                f"served as {getattr(home, name)}; serve it with --{name} "
                f"{getattr(kept, name)}, or use another store"
            )


def _home_of(queue: QueueInfo) -> HomeFile | None:
    """The home that a queue was created for, if its note says one."""
    try:
        return msgspec.json.decode(queue.settings.annotations[HOME_NOTE], type=HomeFile)
    except (KeyError, msgspec.DecodeError):
        return None
