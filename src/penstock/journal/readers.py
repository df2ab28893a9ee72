"""Named readers of a journal: how far each has read, so that upkeep drops nothing unread.

Each reader is a small file in the store's `readers` directory. It holds the reader's floor: the
offset in the stream before which it needs nothing. Readers are other processes; each replaces its
own file atomically, and upkeep reads all of the files before it drops anything.
"""

import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from penstock.errors import InvalidField, StoreUnusable
from penstock.journal.storage import read_small_file

_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,79}", re.ASCII)


class Reader(msgspec.Struct, frozen=True):
    """A reader's name, its floor, and when the floor was last moved."""

    name: str
    floor_offset: int
    moved_at_ms: int


def check_reader_name(name: str) -> None:
    """Refuses a name that could be another file. Raises InvalidField."""
    if not _NAME.fullmatch(name):
        raise InvalidField(f"reader: {name!r} is not a name of 1 to 80 of A-Z a-z 0-9 _ - .")


def register(store: Path, name: str, floor_offset: int, now_ms: int) -> Reader:
    """Registers the reader, or moves its floor. Raises InvalidField or StoreUnusable."""
    check_reader_name(name)
    directory = store / "readers"
    reader = Reader(name, floor_offset, now_ms)
    draft = ""
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=directory, prefix=".new-")
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(reader))
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, directory / f"{name}.json")
        # The name must be durable, too: if a power cut removed it, unread events could be dropped.
        for each in (directory, store):
            _sync_directory(each)
    except OSError as error:
        with suppress(OSError):
            os.unlink(draft)
        raise StoreUnusable(f"{directory}: cannot keep a reader: {error.strerror}") from error
    return reader


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def registered(store: Path) -> list[Reader]:
    """Every registered reader, sorted by name. Raises StoreUnusable if one cannot be read."""
    readers = []
    for path in sorted((store / "readers").glob("[!.]*.json")):
        try:
            readers.append(msgspec.json.decode(read_small_file(path), type=Reader))
        except FileNotFoundError:
            continue
        except (OSError, msgspec.DecodeError) as error:
            raise StoreUnusable(f"{path}: cannot be read as a reader: {error}") from error
    return readers


def forget(store: Path, name: str) -> bool:
    """Removes a reader; returns False if there is none of this name."""
    if not _NAME.fullmatch(name):
        return False
    path = store / "readers" / f"{name}.json"
    existed = path.exists()
    path.unlink(missing_ok=True)
    return existed
