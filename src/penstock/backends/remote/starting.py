"""The endpoint of the process that holds a data directory; starts a daemon if there is none.

A client that finds no listener locks PATH, looks again, and starts a daemon. Of several clients
that start at the same time, one starts the daemon and the others find it. The daemon is a separate
process; through a pipe it reports to the client that it is ready, or an error in one sentence.
"""

import fcntl
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.backends.remote.blocking import Remote
from penstock.backends.remote.daemon import (
    AUTO_DAEMON,
    POLL_S,
    check_owner,
    connect_socket,
    running_pid,
    socket_path,
)
from penstock.errors import BackendLost, StoreUnusable, UnavailableError
from penstock.files import make_directories, open_directory
from penstock.wire.frames.frames import error_from

if TYPE_CHECKING:
    import ssl

IDLE_S: Final = 60
READY: Final = b"ready"
# A start replays the journal after the last snapshot, which may take some time.
START_S_MAX: Final = 300.0
_RECONNECT_S_MIN: Final = 10.0


class DaemonEndpoint:
    """The process that holds a store; a daemon is started if there is none."""

    def __init__(
        self,
        store: str | os.PathLike[str],
        *,
        options: Mapping[str, str] | None = None,
        flags: Mapping[str, str] | None = None,
        starts: bool = True,
    ) -> None:
        """`options` must equal those of the running store; `flags` are used only to start one."""
        self.store = os.path.abspath(store)
        self.shown = f"file:{self.store}"
        self.options: Mapping[str, str] = dict(options or {})
        self.token: str | None = None
        self.tls: ssl.SSLContext | None = None
        self.server_name: str | None = None
        # A daemon that is stopping closes each connection; another one is started soon.
        self.reconnect_s_min = _RECONNECT_S_MIN if starts else 0.0
        self._flags: Mapping[str, str] = dict(flags or {})
        self._starts = starts

    def open(self, connect_s: float) -> socket.socket:
        """A connected socket; starts a daemon if there is none.

        Raises StoreUnusable, or the error of a daemon that cannot start.
        """
        deadline_s = time.monotonic() + START_S_MAX
        check_owner(self.store, other_owner="insecure_other_owner" in self._flags)
        while True:
            link = connect_socket(self.store)
            if link is not None:
                return link
            if not self._starts:
                raise BackendLost(f"{self.shown}: its daemon does not listen")
            with only_starter(self.store, deadline_s):
                link = connect_socket(self.store)
                if link is not None:
                    return link
                self._start(deadline_s)
            if time.monotonic() > deadline_s:
                raise BackendLost(f"{self.shown}: its daemon ends each time after it was started")

    def _start(self, deadline_s: float) -> None:
        words = [sys.executable, "-P", "-m", "penstock.server.daemon", self.store]
        for name, value in {**self.options, **self._flags}.items():
            words += [f"--{name.replace('_', '-')}", *([value] if value else [])]
        from_daemon, to_starter = os.pipe()
        try:
            try:
                process = subprocess.Popen(
                    [*words, "--ready-fd", str(to_starter)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    pass_fds=(to_starter,),
                    start_new_session=True,
                    cwd="/",
                )
            except OSError as error:
                raise UnavailableError(
                    f"{self.shown}: its daemon cannot be started: {error.strerror}"
                ) from None
            finally:
                os.close(to_starter)
            report = _read_all(from_daemon, deadline_s)
            # This process only forks the daemon, and ends.
            errors = process.communicate()[1].decode(errors="replace").strip()
        finally:
            os.close(from_daemon)
        if report == READY:
            return
        if report is None:
            raise UnavailableError(f"{self.shown}: its daemon is still starting; try again later")
        with suppress(msgspec.DecodeError):
            raise error_from(msgspec.msgpack.decode(report, type=list[str]))
        last = errors.splitlines()[-1] if errors else "it printed no error"
        raise UnavailableError(f"{self.shown}: its daemon did not start: {last}")


@contextmanager
def only_starter(store: str, deadline_s: float) -> Iterator[None]:
    """Holds the lock on the directory that a process needs to become the holder of the store.

    Creates the directory if it is missing, and nothing else. Raises StoreUnusable, or
    UnavailableError if another process has the lock until the deadline.
    """
    try:
        make_directories(store)
        fd = open_directory(store)
    except NotADirectoryError:
        file = os.path.abspath(store)
        while not os.path.exists(file):
            file = os.path.dirname(file)
        raise StoreUnusable(f"{file}: is a file; a store is a directory") from None
    except OSError as error:
        raise StoreUnusable(f"{store}: cannot be used: {error.strerror}") from None
    try:
        while not _lock(fd):
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"file:{store}: another process is still starting on it")
            time.sleep(POLL_S)
        yield
    finally:
        os.close(fd)


def is_held(store: str | os.PathLike[str], deadline_s: float) -> bool:
    """Whether a process holds the store and listens; waits for one that starts or ends.

    Raises UnavailableError at the deadline.
    """
    while True:
        link = connect_socket(store)
        if link is not None:
            link.close()
            return True
        pid = running_pid(store)
        if pid is None:
            return False
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"file:{store}: process {pid} holds it and does not listen")
        time.sleep(POLL_S)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_all(fd: int, deadline_s: float) -> bytes | None:
    """Reads a pipe until its other end is closed; None if that is after the deadline."""
    received = b""
    while True:
        left_s = deadline_s - time.monotonic()
        ready, _, _ = select.select([fd], [], [], max(0.0, left_s))
        if not ready:
            return None
        data = os.read(fd, 65_536)
        if not data:
            return received
        received += data


def daemon_status(
    store: str | os.PathLike[str], timeout_s: float = 5.0, *, other_owner: bool = False
) -> dict[str, Any] | None:
    """The figures of the process that holds a store; None if there is none. It starts none.

    Raises BackendLost if it does not answer.
    """
    if running_pid(store) is None:
        return None
    flags = {"insecure_other_owner": ""} if other_owner else {}
    endpoint = DaemonEndpoint(store, starts=False, flags=flags)
    remote = Remote(endpoint, timeout_s=timeout_s, reconnect_s=0)
    try:
        options = remote.server_options
        status = {**remote.status(), "socket": str(socket_path(endpoint.store))}
        status["holder"] = options.get("holder", AUTO_DAEMON)
        if "endpoint" in options:
            status["endpoint"] = options["endpoint"]
        return status
    finally:
        remote.close()
