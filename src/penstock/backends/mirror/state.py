"""The saved state of a mirror: its position in the journal, and its claims on the mirror.

    PATH/mirrors/NAME.json    the state, replaced whole
    PATH/mirrors/NAME.lock    locked by the process that mirrors

`position` is the offset in the primary's journal up to which all events were mirrored. It is saved
about once a second, so after a kill some events are repeated. It is also saved after each purge,
removal and move, because these must not be repeated after later pushes. `is_clean` says that the
mirror was stopped normally; then nothing is repeated. The reader of the same name keeps the
journal's files from `position` on.
"""

import fcntl
import os
import time
from pathlib import Path
from typing import Final

import msgspec

from penstock.errors import InvalidField, StoreInUse, StoreUnusable
from penstock.files import check_named, make_directory_in, open_in, read_in, write_in
from penstock.journal import reader_positions
from penstock.journal.store import store_of
from penstock.url import BackendUrl, without_password

# Receipts are saved so that the next process can end the claims. With more claims than this they
# are saved only at a normal stop, because each save would be slow.
HELD_SAVED_MAX: Final = 1_000
# A normal stop saves a few hundred bytes for each of 120,000 claims.
_STATE_BYTES_MAX: Final = 256 * 1024 * 1024


class MirrorState(msgspec.Struct):
    """The state of a mirror.

    `queues` are the primary's queues by number. `held` has, by message number, the queue and the
    receipt of a claim on the mirror. `missing` has, by queue, messages that the primary deleted and
    that were not found on the mirror. `unmoved` has messages that the primary moved and that were
    not found: to which queue, and their rank there. `fifo` has the names of the mirror's FIFO
    queues. `done_events` is how many events of the entry at `position` were mirrored already.
    `is_complete` is false until the first copy is finished. `target` is the service that has the
    copy (`target_of`), empty in files of older versions.
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
    target: str = ""


class MirrorFile:
    """The state of one mirror on disk, locked for this process."""

    def __init__(self, store: Path, name: str) -> None:
        """Raises InvalidField for the name, StoreInUse if another process mirrors under it."""
        reader_positions.check_reader_name(name)
        self.store = store
        self.name = name
        self._directory = store / "mirrors"
        try:
            make_directory_in(store, "mirrors")
            self._lock = open_in(store, f"mirrors/{name}.lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise StoreUnusable(f"{self._directory}: cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise StoreInUse(
                f"{store}: another process mirrors it as {name!r} already; stop that process, or "
                "give this mirror another --name"
            ) from None

    def read(self, journal: str, target: str = "", *, has_moved: bool = False) -> MirrorState:
        """The saved state, or a new one.

        Raises StoreUnusable if it belongs to another journal, InvalidField if to another target:
        that one does not have the messages from before `position`. With `has_moved`, the target is
        the same service at another address.
        """
        state = read_state(self.store, self.name) or MirrorState(journal, 0)
        if state.journal != journal:
            raise StoreUnusable(
                f"{self._directory}: {self.name}.json belongs to another journal; to start again, "
                "remove it, and its queues on the mirror"
            )
        _check_target(self.name, state, target, has_moved)
        state.target = target or state.target
        return state

    def save(self, state: MirrorState, *, is_clean: bool = False, is_floor: bool = True) -> None:
        """Writes the state durably; with `is_floor`, the journal before it may then be dropped."""
        saved = msgspec.structs.replace(state, is_clean=is_clean)
        path = self._directory / f"{self.name}.json"
        try:
            write_in(self.store, f"mirrors/{path.name}", msgspec.json.encode(saved))
        except OSError as error:
            raise StoreUnusable(f"{path}: cannot be written: {error.strerror}") from error
        if is_floor:
            reader_positions.register(self.store, self.name, state.position, wall_clock_ms())

    def close(self) -> None:
        """Unlocks the name for other processes."""
        os.close(self._lock)


def read_state(store: Path, name: str) -> MirrorState | None:
    """The state that a mirror saved last; None if there is none. Raises StoreUnusable."""
    path = store / "mirrors" / f"{name}.json"
    try:
        content = read_in(store, f"mirrors/{name}.json", _STATE_BYTES_MAX)
        return msgspec.json.decode(content, type=MirrorState)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise StoreUnusable(
            f"{path}: cannot be read as a mirror's state: {error}; to start again, remove it, and "
            "the mirror's queues"
        ) from None


def require_store(path: str) -> Path:
    """The store of this user at a path. Raises StoreUnusable if there is none."""
    try:
        check_named(path)
    except OSError as error:
        raise StoreUnusable(f"{path}: {error.strerror}") from None
    store = store_of(path)
    if store is None:
        raise StoreUnusable(f"{path}: is not a Penstock store")
    return store


def check_start(path: str, name: str, target: str, *, has_moved: bool) -> None:
    """Checks what can be checked before the target is opened, which may create it.

    Raises StoreUnusable or InvalidField.
    """
    reader_positions.check_reader_name(name)
    state = read_state(require_store(path), name)
    if state is not None:
        _check_target(name, state, target, has_moved)


def _check_target(name: str, state: MirrorState, target: str, has_moved: bool) -> None:
    if target and state.target not in ("", target) and not has_moved:
        raise InvalidField(
            f"mirror: {name!r} mirrors to {state.target}, and {target} does not have its earlier "
            "messages; give another --name to mirror there, too, or pass --moved if it is the "
            "same service at another address"
        )


def target_of(mirror: BackendUrl) -> str:
    """The mirror's URL without user, password and options."""
    if mirror.scheme == "file":
        return f"file:{os.path.abspath(mirror.path)}"
    return without_password(f"{mirror.scheme}:{mirror.rest}").replace("…@", "").rstrip("/")


def wall_clock_ms() -> int:
    """Milliseconds since 1970, by the machine's clock."""
    return time.time_ns() // 1_000_000


def check_primary(text: str) -> None:
    """Checks that the primary is a store with a journal. Raises InvalidField."""
    if not text.startswith("file:"):
        raise InvalidField(
            f"primary: {without_password(text)!r} has no journal that can be followed; a mirror "
            "needs file:PATH"
        )
