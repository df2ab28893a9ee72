"""How a process becomes the holder of a store: a daemon, `penstock daemon run`, `penstock serve`.

1. Check that PATH is missing, empty or a store, and belongs to this user. Nothing has been written
   so far, so a directory that is refused stays unchanged.
2. Lock `daemon/pid`, if it exists. A process that is ending is waited for; `serve` stops a daemon
   that a client started, and replaces it; any other holder is an error that names it.
3. Open the store, which creates it if it is new.
4. Make `daemon/` and its files, and listen on the socket.

All of this happens under the lock on PATH that starters take (`starting.only_starter`), so that
only one process at a time does these steps. The files are opened relative to a descriptor of
`daemon/` and never through a link. docs/how-to/daemon.md describes the directory.
"""

import fcntl
import os
import stat
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from penstock.backends.engine.engine import Engine
from penstock.backends.remote.daemon import (
    AUTO_DAEMON,
    DAEMON_RUN,
    POLL_S,
    SERVE,
    daemon_directory,
    running_pid,
    socket_path,
    stop_daemon,
)
from penstock.backends.remote.starting import START_S_MAX, daemon_status, only_starter
from penstock.errors import BackendLost, StoreInUse, StoreUnusable, UnavailableError
from penstock.files import make_directory_in, open_in, remove_in, write_in
from penstock.journal.store import check_format, check_owners

# How long the process before this one may take to end.
_ENDING_S_MAX: Final = 60.0


class StoreHolder:
    """A store held by this process: the locks, the directory `daemon/` and the socket's path."""

    def __init__(self, store: str | os.PathLike[str], kind: str, *, other_owner: bool) -> None:
        """`kind` is AUTO_DAEMON, DAEMON_RUN or SERVE; nothing is opened yet."""
        self.store = Path(store).absolute()
        self.kind = kind
        self.socket = socket_path(self.store)
        self._directory = daemon_directory(self.store)
        self._other_owner = other_owner
        self._directory_fd: int | None = None
        self._pid_fd: int | None = None
        self._start_lock = ExitStack()

    def take(self, open_engine: Callable[[], Engine]) -> Engine:
        """Opens the store, once this process holds its lock.

        Raises StoreInUse, StoreUnusable, or what opening raises; nothing is held then.
        """
        try:
            return self._take(open_engine)
        except BaseException:
            self.release()
            raise

    def _take(self, open_engine: Callable[[], Engine]) -> Engine:
        is_store = self._check_store()
        if self.kind != AUTO_DAEMON:
            # The starter of a daemon has this lock until the daemon is ready.
            deadline_s = time.monotonic() + START_S_MAX
            self._start_lock.enter_context(only_starter(str(self.store), deadline_s))
            is_store = self._check_store()
        if is_store and os.path.lexists(self._directory):
            self._directory_fd = self._open_directory(self._directory)
            self._wait_for_lock()
        engine = open_engine()
        try:
            self._make_files()
        except BaseException:
            engine.close()
            raise
        return engine

    def started(self) -> None:
        """This process listens: releases the lock of starters, which then find it."""
        self._start_lock.close()

    def release(self) -> None:
        """Releases the locks; the store must have been closed."""
        self._start_lock.close()
        for fd in (self._pid_fd, self._directory_fd):
            if fd is not None:
                os.close(fd)
        self._pid_fd = self._directory_fd = None

    # Whose store it is.

    def _check_store(self) -> bool:
        """Whether it is a store; False if it does not exist yet. Raises StoreUnusable."""
        check_owners(self.store, other_owner=self._other_owner)
        return check_format(self.store)

    def _open_directory(self, directory: Path) -> int:
        """A descriptor of a directory that only this user can enter. Raises StoreUnusable."""
        fd = None
        try:
            fd = open_in(directory.parent, directory.name, os.O_DIRECTORY)
            if stat.S_IMODE(os.fstat(fd).st_mode) != 0o700:
                os.fchmod(fd, 0o700)
        except OSError as error:
            if fd is not None:
                os.close(fd)
            raise StoreUnusable(f"{directory}: cannot be used: {error.strerror}") from None
        return fd

    # Who holds it.

    def _wait_for_lock(self) -> None:
        """Takes the lock. Raises StoreInUse if another process holds the store and keeps it."""
        deadline_s = time.monotonic() + _ENDING_S_MAX
        while not self._lock_pid():
            self._check_holder(deadline_s)
            if time.monotonic() > deadline_s:
                raise UnavailableError(
                    f"{self.store}: process {running_pid(self.store)} holds it, and has neither "
                    f"answered nor ended within {_ENDING_S_MAX:g} s"
                )
            time.sleep(POLL_S)

    def _check_holder(self, deadline_s: float) -> None:
        """Stops a daemon that this process may replace. Raises StoreInUse for any other holder."""
        try:
            status = daemon_status(self.store, other_owner=self._other_owner)
        except BackendLost:
            return  # the holder does not listen: it is starting or ending
        if status is None:
            return
        if self.kind == SERVE and status["holder"] == AUTO_DAEMON:
            stop_daemon(self.store, max(1.0, deadline_s - time.monotonic()))
            return
        raise StoreInUse(f"{self.store}: {_shown_holder(status)}; {_how_to_reach(self.store)}")

    def _lock_pid(self) -> bool:
        path = self._directory / "pid"
        try:
            fd = open_in(self._opened_directory, "pid", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise StoreUnusable(f"{path}: cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except BaseException:
            os.close(fd)
            raise
        # At once: other processes read the number of the lock's holder from this file.
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        self._pid_fd = fd
        return True

    # The files of this process.

    def _make_files(self) -> None:
        """Makes the missing files of `daemon/`, after the store was opened."""
        if self._directory_fd is None:
            _make_directory(self._directory)
            self._directory_fd = self._open_directory(self._directory)
        if self._pid_fd is None and not self._lock_pid():
            raise StoreInUse(
                f"{self.store}: process {running_pid(self.store)} holds it; "
                f"{_how_to_reach(self.store)}"
            )
        for name in ("elsewhere", "port", "http"):
            self._remove_file(name)
        if self.socket.parent != self._directory:
            _make_directory(self.socket.parent)
            os.close(self._open_directory(self.socket.parent))
            self.write_file("elsewhere", f"{self.socket}\n")

    def write_file(self, name: str, text: str) -> None:
        """Replaces a file of `daemon/` atomically: a reader finds the old or the new text."""
        try:
            write_in(self._opened_directory, name, text.encode(), durable=False)
        except OSError as error:
            path = self._directory / name
            raise StoreUnusable(f"{path}: cannot be made: {error.strerror}") from None

    def redirect_output(self) -> None:
        """Redirects the output of this process to `daemon/output`."""
        self._remove_file("output")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            fd = open_in(self._opened_directory, "output", flags)
        except OSError as error:
            path = self._directory / "output"
            raise StoreUnusable(f"{path}: cannot be made: {error.strerror}") from None
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)

    def _remove_file(self, name: str) -> None:
        remove_in(self._opened_directory, name)

    @property
    def _opened_directory(self) -> int:
        assert self._directory_fd is not None
        return self._directory_fd


def _make_directory(directory: Path) -> None:
    try:
        make_directory_in(directory.parent, directory.name)
    except OSError as error:
        raise StoreUnusable(f"{directory}: cannot be made: {error.strerror}") from None


def _shown_holder(status: dict[str, Any]) -> str:
    """Which process holds a store, for people."""
    command = {SERVE: "penstock serve", DAEMON_RUN: "penstock daemon run"}.get(status["holder"])
    at = f" at {status['endpoint']}" if "endpoint" in status else ""
    return f"process {status['pid']} ({command or 'a daemon'}{at}) holds it already"


def _how_to_reach(store: Path) -> str:
    return f"use it there or as file:{store}, or end it with: penstock daemon stop {store}"
