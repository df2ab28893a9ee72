"""The process that holds a data directory: its socket, its process number, and how to stop it.

    PATH/daemon/           0700, made by the process that holds the store
    PATH/daemon/pid        its process number; locked by it while it runs
    PATH/daemon/socket     where it listens, 0600
    PATH/daemon/elsewhere  the path of the socket, if PATH is too long for a socket's address
    PATH/daemon/output     the stderr of a daemon
    PATH/daemon/port       the TCP port of a daemon that has one
    PATH/daemon/http       the port of a daemon's /health and /metrics, if it has one

It is a daemon or a `penstock serve`; both answer on the socket in the same way. `starting` starts a
daemon where there is none; `server.holder` has the other side of these files.
"""

import fcntl
import hashlib
import os
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from penstock.errors import StoreUnusable, UnavailableError
from penstock.files import ALLOWED_BY, OtherOwner, check_named, open_in, read_in

# How the process that holds a store was started; `holder` in the options of its WELCOME.
AUTO_DAEMON: Final = "daemon"
DAEMON_RUN: Final = "daemon run"
SERVE: Final = "serve"

POLL_S: Final = 0.01
_PID_S_MAX: Final = 5.0
# The longest path of a socket, with its closing zero: 108 bytes on Linux, 104 on macOS.
_SOCKET_BYTES_MAX: Final = 108 if sys.platform == "linux" else 104
_CREDENTIALS: Final = struct.Struct("3i")


def daemon_directory(store: str | os.PathLike[str]) -> Path:
    """The directory with the files of the process that holds a store."""
    return Path(store) / "daemon"


def socket_path(store: str | os.PathLike[str]) -> Path:
    """Where the process that holds a store listens, or would."""
    directory = daemon_directory(store)
    path = directory / "socket"
    if len(os.fsencode(path)) < _SOCKET_BYTES_MAX:
        return path
    return _runtime_directory() / hashlib.sha256(os.fsencode(path)).hexdigest()[:24]


def _runtime_directory() -> Path:
    chosen = os.environ.get("XDG_RUNTIME_DIR")
    if chosen and len(os.fsencode(chosen)) < _SOCKET_BYTES_MAX - 50:
        return Path(chosen) / "penstock"
    return Path(tempfile.gettempdir()) / f"penstock-{os.geteuid()}"


def running_pid(store: str | os.PathLike[str]) -> int | None:
    """The number of the process that holds the store, also while it starts or ends; or None."""
    deadline_s = time.monotonic() + _PID_S_MAX
    while (pid := _locked_pid(store)) is not None:
        # A process that has taken the lock and not written its number yet shows an old number.
        if pid and _is_alive(pid):
            return pid
        if time.monotonic() > deadline_s:
            raise UnavailableError(
                f"{daemon_directory(store) / 'pid'}: is locked, but names no living process"
            )
        time.sleep(POLL_S)
    return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it exists, and belongs to another user
    return True


def _locked_pid(store: str | os.PathLike[str]) -> int | None:
    """The number in the locked file, 0 if there is none yet; None if the file is not locked."""
    try:
        file = os.fdopen(open_in(store, "daemon/pid"), "rb")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreUnusable(f"{store}: cannot be read: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            content = file.read(32).strip()
            return int(content) if content.isdigit() else 0
    return None


def connect_socket(store: str | os.PathLike[str]) -> socket.socket | None:
    """A socket to the process that holds a store, if it listens. Raises StoreUnusable."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _reachable_socket(store) as place:
            link.connect(str(place))
        _check_peer(link, store)
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError, ConnectionResetError):
        link.close()
        return None
    except OSError as error:
        link.close()
        reason = error.strerror or str(error)
        raise StoreUnusable(f"{store}: its daemon cannot be reached: {reason}") from None
    except BaseException:
        link.close()
        raise
    return link


@contextmanager
def _reachable_socket(store: str | os.PathLike[str]) -> Iterator[Path]:
    """A path by which the socket can be reached, whatever path the store was opened by."""
    directory = open_in(store, "daemon", os.O_DIRECTORY)
    try:
        elsewhere = b""
        with suppress(FileNotFoundError):
            elsewhere = read_in(directory, "elsewhere").strip()
        place = daemon_directory(store) / "socket"
        fits = len(os.fsencode(place)) < _SOCKET_BYTES_MAX
        if elsewhere:
            yield Path(os.fsdecode(elsewhere))
        elif fits or sys.platform != "linux" or not place.exists():
            yield socket_path(store)
        else:
            # The holder opened the store by a shorter path than this one.
            yield Path(f"/proc/self/fd/{directory}/socket")
    finally:
        os.close(directory)


def check_owner(store: str | os.PathLike[str], *, other_owner: bool = False) -> None:
    """Refuses the directory of another user, who may lead to another socket. Raises StoreUnusable.

    `journal.store.check_owners` is for those who open the store themselves.
    """
    try:
        check_named(store, other_owner=other_owner)
    except OtherOwner as error:
        raise StoreUnusable(f"{store}: {error.strerror}{ALLOWED_BY}") from None
    except OSError as error:
        raise StoreUnusable(f"{store}: cannot be used: {error.strerror}") from None


def peer_credentials(link: socket.socket) -> tuple[int, int] | None:
    """Process number and user at the other end of a Unix socket; None if the system has neither."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    packed = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    return pid, uid


def _check_peer(link: socket.socket, store: str | os.PathLike[str]) -> None:
    """Refuses a listener of another user, who may have put a socket of its own there."""
    peer = peer_credentials(link)
    if peer is not None and peer[1] != os.geteuid():
        raise StoreUnusable(f"{store}: its daemon belongs to user {peer[1]}, not to this one")


def stop_daemon(store: str | os.PathLike[str], timeout_s: float = 30.0) -> int | None:
    """Stops the process that holds the store, and waits for its end; its number, or None.

    It answers the requests that it has read, sends GOODBYE to its clients and closes the journal.
    Raises UnavailableError if it has not ended after `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    first = locked = _locked_pid(store)
    stopped: int | None = None
    while locked is not None and (stopped is None or locked == first):
        if stopped is None and (listener := _listening_pid(store, locked)):
            first, stopped = locked, listener
            with suppress(ProcessLookupError):
                os.kill(listener, signal.SIGTERM)
        if time.monotonic() > deadline_s:
            raise UnavailableError(
                f"file:{store}: its daemon, process {stopped or locked}, has not ended within "
                f"{timeout_s:g} s"
            )
        time.sleep(POLL_S)
        locked = _locked_pid(store)
    return stopped or first


def _listening_pid(store: str | os.PathLike[str], written: int) -> int | None:
    """The number of the process that listens for the store; None if none does yet.

    The number that it has `written` is that of its own container, where it may mean another process
    than here. Raises UnavailableError if it has no number here.
    """
    link = connect_socket(store)
    if link is None:
        return None
    with link:
        peer = peer_credentials(link)
    pid = written if peer is None else peer[0]
    if not pid and peer is not None:
        raise UnavailableError(
            f"file:{store}: its daemon runs in another container; stop it from there"
        )
    return pid
