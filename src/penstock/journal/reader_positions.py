"""Named readers of a journal: how far each has read, so that upkeep drops nothing unread.

Each reader is a small file in the store's `readers` directory. It holds the reader's floor: the
offset in the stream before which it needs nothing. Readers are other processes; each replaces its
own file atomically, and upkeep reads all of the files before it drops anything.
"""

import re
from pathlib import Path
from typing import Final

import msgspec

from penstock.errors import InvalidField, StoreUnusable
from penstock.files import make_directory_in, read_in, remove_in, sync_directory, write_in
from penstock.service import DAY_MS

ABANDONED_MS: Final = 2 * DAY_MS
ABANDONED_BYTES: Final = 16 * 1024 * 1024
_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,79}", re.ASCII)


class Reader(msgspec.Struct, frozen=True):
    """A reader's name, its floor, and when the floor was last moved."""

    name: str
    floor_offset: int
    moved_at_ms: int

    def behind_bytes(self, durable_offset: int) -> int:
        """How much it has not read: the part of the journal that is kept for it."""
        return max(0, durable_offset - self.floor_offset)

    def is_abandoned(self, durable_offset: int, now_ms: int) -> bool:
        """Whether it keeps much of the journal, and nobody seems to read with it any more.

        One that has moved within ABANDONED_MS is alive, as is one that has read almost everything:
        a pipeline may run once a day, and a queue may be idle for months.
        """
        is_still = now_ms - self.moved_at_ms >= ABANDONED_MS
        return is_still and self.behind_bytes(durable_offset) >= ABANDONED_BYTES


def check_reader_name(name: str) -> None:
    """Refuses a name that could be another file. Raises InvalidField."""
    if not _NAME.fullmatch(name):
        raise InvalidField(f"reader: {name!r} is not a name of 1 to 80 of A-Z a-z 0-9 _ - .")


def register(store: Path, name: str, floor_offset: int, now_ms: int) -> Reader:
    """Registers the reader, or moves its floor. Raises InvalidField or StoreUnusable."""
    check_reader_name(name)
    directory = store / "readers"
    reader = Reader(name, floor_offset, now_ms)
    try:
        make_directory_in(store, "readers")
        # The name must be durable, too: if a power cut removed it, unread events could be dropped.
        write_in(store, f"readers/{name}.json", msgspec.json.encode(reader))
        sync_directory(store)
    except OSError as error:
        raise StoreUnusable(f"{directory}: cannot keep a reader: {error.strerror}") from error
    return reader


def registered(store: Path) -> list[Reader]:
    """Every registered reader, sorted by name. Raises StoreUnusable if one cannot be read."""
    readers = []
    for path in sorted((store / "readers").glob("[!.]*.json")):
        try:
            content = read_in(store, f"readers/{path.name}")
            readers.append(msgspec.json.decode(content, type=Reader))
        except FileNotFoundError:
            continue
        except (OSError, msgspec.DecodeError, RecursionError) as error:
            raise StoreUnusable(f"{path}: cannot be read as a reader: {error}") from error
    return readers


def forget(store: Path, name: str) -> bool:
    """Removes a reader; False if there is none of this name. Raises StoreUnusable."""
    if not _NAME.fullmatch(name):
        return False
    try:
        return remove_in(store, f"readers/{name}.json")
    except OSError as error:
        raise StoreUnusable(f"{store / 'readers'}: cannot be used: {error.strerror}") from error
