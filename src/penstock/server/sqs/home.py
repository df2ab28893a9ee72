"""The home of a store: the account and region whose queues have bare names in it.

They are kept in the file `sqs` of the store's directory, written once by the first server on it.
With other ones the same names would mean other queues: one region would be given another's.
"""

from pathlib import Path

import msgspec

from penstock.errors import InvalidField, StoreUnusable
from penstock.journal.store import write_once
from penstock.url import read_url
from penstock.wire.sqs.address import Owner


class HomeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file holds, as JSON."""

    account: str
    region: str


def keep_home(url: str, home: Owner) -> None:
    """Keeps the home of the store at this URL, whose lock is held, if none is kept yet.

    Raises InvalidField if the store has another one, StoreUnusable if that cannot be read or kept.
    A store in memory has no past to differ from.
    """
    where = read_url(url)
    if where.scheme != "file":
        return
    path = Path(where.path) / "sqs"
    try:
        if not path.exists():
            write_once(path, msgspec.json.encode(HomeFile(*home)) + b"\n")
            return
        kept = msgspec.json.decode(path.read_bytes(), type=HomeFile)
    except (OSError, msgspec.DecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StoreUnusable(f"{path}: cannot be used: {reason}") from error
    for name in HomeFile.__struct_fields__:
        if getattr(kept, name) != getattr(home, name):
            raise InvalidField(
                f"{name}: {where.path} keeps the queues of {name} {getattr(kept, name)} under "
                f"bare names, and {getattr(home, name)} was asked for; serve it with --{name} "
                f"{getattr(kept, name)}, or use another directory"
            )
