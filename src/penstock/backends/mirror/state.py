"""What a mirror remembers: how far it has come, and what it holds on the other side.

    PATH/mirrors/NAME.json    the state, replaced whole
    PATH/mirrors/NAME.lock    locked by the process that mirrors

`position` is the offset in the primary's journal up to which everything was done on the mirror. It
is saved about once a second, so after a kill some steps are repeated; and after each purge, removal
and move, because these may not be repeated once later pushes were done. `is_clean` says that the
mirror stopped in order: then nothing is repeated. The reader of the same name keeps the journal's
files from `position` on.
"""

import fcntl
import os
import time
from pathlib import Path
from typing import Final

import msgspec

from penstock.errors import InvalidField, StoreInUse, StoreUnusable
from penstock.journal import readers
from penstock.journal.storage import open_regular
from penstock.journal.store import write_once

# Receipts are saved so that a claim can be ended by the next process; while the mirror runs, more
# than these are not worth it.
HELD_SAVED_MAX: Final = 1_000


class MirrorState(msgspec.Struct):
    """The state of a mirror.

    `queues` are the primary's queues by number. `held` has, by message number, the queue and the
    receipt of a claim on the mirror. `missing` are messages that the primary has deleted and that
    could not be found on the mirror, by queue; `unmoved` are such that the primary has moved to
    another queue: which one, and their rank there. `fifo` has the names of the mirror's FIFO
    queues. `done_events` are the first events of the entry at `position`, if these were done, too.
    `is_complete` is false until the messages that were there at the start have been copied.
    """

    journal: str
    position: int
    is_complete: bool = False
    is_clean: bool = False
    queues: dict[int, str] = {}
    held: dict[int, tuple[str, str]] = {}
    missing: dict[str, list[int]] = {}
    unmoved: dict[str, dict[int, tuple[str, int]]] = {}
    fifo: dict[str, None] = {}
    done_events: int = 0


class MirrorFile:
    """The state of one mirror on disk, locked for this process."""

    def __init__(self, store: Path, name: str) -> None:
        """Raises InvalidField for the name, StoreInUse if another process mirrors under it."""
        readers.check_reader_name(name)
        self.store = store
        self.name = name
        self._directory = store / "mirrors"
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._lock = os.open(self._directory / f"{name}.lock", flags, 0o600)
        except OSError as error:
            raise StoreUnusable(f"{self._directory}: cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise StoreInUse(
                f"{store}: another process mirrors it as {name!r} already; stop that, or give this "
                "mirror another --name"
            ) from None

    def read(self, journal: str) -> MirrorState | None:
        """The state, None if there is none yet. Raises StoreUnusable if it is not to be used."""
        state = read_state(self.store, self.name)
        if state is not None and state.journal != journal:
            raise StoreUnusable(
                f"{self._directory}: {self.name}.json is of another journal; remove it, and what "
                "it left on the mirror, to begin anew"
            )
        return state

    def save(self, state: MirrorState, *, is_clean: bool = False, is_floor: bool = True) -> None:
        """Writes the state durably, and then, with `is_floor`, lets the journal before it go."""
        saved = msgspec.structs.replace(state, is_clean=is_clean)
        path = self._directory / f"{self.name}.json"
        try:
            write_once(path, msgspec.json.encode(saved))
        except OSError as error:
            raise StoreUnusable(f"{path}: cannot be written: {error.strerror}") from error
        if is_floor:
            readers.register(self.store, self.name, state.position, wall_clock_ms())

    def close(self) -> None:
        """Lets another process mirror under this name."""
        os.close(self._lock)


def read_state(store: Path, name: str) -> MirrorState | None:
    """The state of a mirror as it was last saved; None if there is none. Raises StoreUnusable."""
    path = store / "mirrors" / f"{name}.json"
    try:
        with open_regular(path) as file:
            return msgspec.json.decode(file.read(), type=MirrorState)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise StoreUnusable(f"{path}: cannot be read as a mirror's state: {error}") from None


def wall_clock_ms() -> int:
    """Milliseconds since 1970, by the machine's clock."""
    return time.time_ns() // 1_000_000


def check_primary(text: str) -> None:
    """Refuses a primary that has no journal to follow. Raises InvalidField."""
    if not text.startswith("file:"):
        raise InvalidField(
            f"primary: {text!r} has no journal that can be followed; a mirror needs file:PATH"
        )
