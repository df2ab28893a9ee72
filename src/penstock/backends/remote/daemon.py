"""The daemon of a data directory: how to find it, start it and stop it.

    PATH/daemon/           0700, made by the daemon
    PATH/daemon/pid        the daemon's process number; locked by it for as long as it lives
    PATH/daemon/socket     where it listens, 0600
    PATH/daemon/elsewhere  holds the path of the socket, if PATH is too long for one
    PATH/daemon/output     what it writes when something is wrong with itself

Whoever finds no daemon takes a lock on PATH itself, looks again, and starts one: of any number of
starters one starts it and the others find it. The daemon is a process of its own; it tells its
starter through a pipe that it is ready, or in one sentence why it is not.
"""

import fcntl
import hashlib
import os
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.errors import BackendLost, StoreUnusable, UnavailableError
from penstock.wire.frames.frames import error_from

if TYPE_CHECKING:
    import ssl

IDLE_S: Final = 60
READY: Final = b"ready"
# A start replays what the last snapshot does not hold, which may take a while.
_START_S_MAX: Final = 300.0
_POLL_S: Final = 0.01
_PID_S_MAX: Final = 5.0
# What fits into a socket's address, its closing zero included: 108 on Linux, 104 on a Mac.
_SOCKET_BYTES_MAX: Final = 108 if sys.platform == "linux" else 104
_CREDENTIALS: Final = struct.Struct("3i")


def daemon_directory(store: str | os.PathLike[str]) -> Path:
    """Where a store's daemon keeps its own files."""
    return Path(store) / "daemon"


def socket_path(store: str | os.PathLike[str]) -> Path:
    """Where the daemon of a store listens, or would."""
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


def own_directory(directory: Path) -> None:
    """Makes a directory that only this user can enter, or makes sure it is one.

    Raises StoreUnusable.
    """
    try:
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise StoreUnusable(f"{directory}: is not a directory of this user's own")
        if stat.S_IMODE(found.st_mode) != 0o700:
            directory.chmod(0o700)
    except OSError as error:
        raise StoreUnusable(f"{directory}: cannot be used: {error.strerror}") from None


def running_pid(store: str | os.PathLike[str]) -> int | None:
    """The process number of the store's daemon, if one lives, be it that it starts or ends."""
    deadline_s = time.monotonic() + _PID_S_MAX
    while (pid := _locked_pid(store)) is not None:
        # Between taking the lock and writing its number a daemon shows that of the one before.
        if pid and _is_alive(pid):
            return pid
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"{store}: its daemon does not say which process it is")
        time.sleep(_POLL_S)
    return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, and so there
    return True


def _locked_pid(store: str | os.PathLike[str]) -> int | None:
    """What the locked file says, 0 if that is nothing yet; None if nobody locks it."""
    try:
        fd = os.open(daemon_directory(store) / "pid", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreUnusable(f"{store}: cannot be looked into: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        said = os.read(fd, 32).strip()
        return int(said) if said.isdigit() else 0
    finally:
        os.close(fd)
    return None


def connect_socket(store: str | os.PathLike[str]) -> socket.socket | None:
    """A socket to the daemon of a store, if one listens. Raises StoreUnusable."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _reachable_socket(store) as place:
            link.connect(str(place))
        _check_owner(link, store)
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError, ConnectionResetError):
        link.close()
        return None
    except OSError as error:
        link.close()
        said = error.strerror or str(error)
        raise StoreUnusable(f"{store}: its daemon cannot be reached: {said}") from None
    except BaseException:
        link.close()
        raise
    return link


@contextmanager
def _reachable_socket(store: str | os.PathLike[str]) -> Iterator[Path]:
    """By which path the daemon's socket can be reached, whatever path it was started by."""
    directory = daemon_directory(store)
    pointer = directory / "elsewhere"
    if pointer.exists():
        yield Path(pointer.read_text().strip())
        return
    place = directory / "socket"
    fits = len(os.fsencode(place)) < _SOCKET_BYTES_MAX
    if fits or sys.platform != "linux" or not place.exists():
        yield socket_path(store)
        return
    # It was started by a shorter path than this one.
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/self/fd/{fd}/socket")
    finally:
        os.close(fd)


def _peer(link: socket.socket) -> tuple[int, int] | None:
    """Process number and user of whoever listens at the other end, where the system tells."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    found = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid


def _check_owner(link: socket.socket, store: str | os.PathLike[str]) -> None:
    """Makes sure that the daemon is our own: anybody may have put a socket there."""
    peer = _peer(link)
    if peer is not None and peer[1] != os.geteuid():
        raise StoreUnusable(f"{store}: its daemon belongs to user {peer[1]}, not to this one")


class DaemonEndpoint:
    """The daemon of a store, started when it is needed and not there."""

    def __init__(
        self,
        store: str | os.PathLike[str],
        *,
        options: Mapping[str, str] | None = None,
        idle_s: int = IDLE_S,
        starts: bool = True,
    ) -> None:
        self.store = os.path.abspath(store)
        self.shown = f"file:{self.store}"
        self.options: Mapping[str, str] = dict(options or {})
        self.token: str | None = None
        self.tls: ssl.SSLContext | None = None
        self.server_name: str | None = None
        # A daemon that is stopping hangs up; the next one is there soon.
        self.patience_s_min = 10.0 if starts else 0.0
        self._idle_s = idle_s
        self._starts = starts

    def open(self, patience_s: float) -> socket.socket:
        """A socket to the daemon, which is started if need be.

        Raises StoreUnusable or what else keeps it from starting.
        """
        deadline_s = time.monotonic() + _START_S_MAX
        while True:
            link = connect_socket(self.store)
            if link is not None:
                return link
            if not self._starts:
                raise BackendLost(f"{self.shown}: its daemon does not listen")
            with self._as_the_only_starter(deadline_s):
                link = connect_socket(self.store)
                if link is not None:
                    return link
                self._start(deadline_s)
            if time.monotonic() > deadline_s:
                raise BackendLost(f"{self.shown}: its daemon starts and ends again and again")

    @contextmanager
    def _as_the_only_starter(self, deadline_s: float) -> Iterator[None]:
        """Holds the lock on the directory; nothing is left behind by it."""
        try:
            with suppress(FileExistsError):
                os.makedirs(self.store, 0o700)
            fd = os.open(self.store, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except NotADirectoryError:
            raise StoreUnusable(f"{self.store}: is a file; a store is a directory") from None
        except OSError as error:
            raise StoreUnusable(f"{self.store}: cannot be used: {error.strerror}") from None
        try:
            while not _lock(fd):
                if time.monotonic() > deadline_s:
                    raise UnavailableError(f"{self.shown}: somebody is still starting its daemon")
                time.sleep(_POLL_S)
            yield
        finally:
            os.close(fd)

    def _start(self, deadline_s: float) -> None:
        words = [sys.executable, "-P", "-m", "penstock.server.daemon", self.store]
        words += ["--idle", str(self._idle_s)]
        for name, value in self.options.items():
            words += [f"--{name.replace('_', '-')}", value]
        told, tell = os.pipe()
        try:
            try:
                process = subprocess.Popen(
                    [*words, "--ready-fd", str(tell)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    pass_fds=(tell,),
                    start_new_session=True,
                    cwd="/",
                )
            except OSError as error:
                raise UnavailableError(
                    f"{self.shown}: its daemon cannot be started: {error.strerror}"
                ) from None
            finally:
                os.close(tell)
            said = _read_all(told, deadline_s)
            # The process we started only lets the daemon go, and ends.
            complaint = process.communicate()[1].decode(errors="replace").strip()
        finally:
            os.close(told)
        if said == READY:
            return
        if said is None:
            raise UnavailableError(f"{self.shown}: its daemon is still starting; try again later")
        with suppress(msgspec.DecodeError):
            raise error_from(msgspec.msgpack.decode(said, type=list[str]))
        last = complaint.splitlines()[-1] if complaint else "it said nothing"
        raise UnavailableError(f"{self.shown}: its daemon did not start: {last}")


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_all(fd: int, deadline_s: float) -> bytes | None:
    """What comes through a pipe until its other end is closed; None if that takes too long."""
    said = b""
    while True:
        left_s = deadline_s - time.monotonic()
        ready, _, _ = select.select([fd], [], [], max(0.0, left_s))
        if not ready:
            return None
        data = os.read(fd, 65_536)
        if not data:
            return said
        said += data


def stop_daemon(store: str | os.PathLike[str], patience_s: float = 30.0) -> int | None:
    """Has the daemon finish and end; gives its process number, None if there was none.

    Raises UnavailableError if it has not ended when the patience is over.
    """
    deadline_s = time.monotonic() + patience_s
    first = locked = _locked_pid(store)
    told: int | None = None
    while locked is not None and (told is None or locked == first):
        if told is None and (listener := _listening_pid(store, locked)):
            first, told = locked, listener
            with suppress(ProcessLookupError):
                os.kill(listener, signal.SIGTERM)
        if time.monotonic() > deadline_s:
            raise UnavailableError(
                f"file:{store}: its daemon, process {told or locked}, has not ended within "
                f"{patience_s:g} s"
            )
        time.sleep(_POLL_S)
        locked = _locked_pid(store)
    return told or first


def _listening_pid(store: str | os.PathLike[str], said: int) -> int | None:
    """The process that listens for the store, by the number it has here; None if none does yet.

    It `said` a number of its own, which means another process, or none, outside its container.
    Raises UnavailableError if it has no number here.
    """
    link = connect_socket(store)
    if link is None:
        return None
    with link:
        peer = _peer(link)
    pid = said if peer is None else peer[0]
    if not pid and peer is not None:
        raise UnavailableError(
            f"file:{store}: its daemon runs in another container; stop it from there"
        )
    return pid


def daemon_status(store: str | os.PathLike[str], timeout_s: float = 5.0) -> dict[str, Any] | None:
    """What the daemon of a store says of itself, None if there is none; never starts one.

    Raises BackendLost if one lives and does not answer.
    """
    from penstock.backends.remote.blocking import Remote

    if running_pid(store) is None:
        return None
    endpoint = DaemonEndpoint(store, starts=False)
    remote = Remote(endpoint, timeout_s=timeout_s, patience_s=0)
    try:
        return {**remote.status(), "socket": str(socket_path(endpoint.store))}
    finally:
        remote.close()
