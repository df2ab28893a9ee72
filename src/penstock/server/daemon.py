"""The daemon of a data directory: a process that serves it to every other on this host.

It is started by the first client that finds none (see `backends.daemon`), lives on when that one
ends, and ends itself when nobody has been connected for a while, or at SIGTERM. In both cases it
answers what it has taken, says goodbye to whoever is there, and closes the journal. Whatever else
happens to it, the journal is what counts, and the next daemon opens that.
"""

import argparse
import asyncio
import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.backends.engine.engine import Engine
from penstock.backends.remote.daemon import (
    IDLE_S,
    READY,
    daemon_directory,
    own_directory,
    running_pid,
    socket_path,
)
from penstock.errors import (
    AddressInUse,
    JournalError,
    PenstockError,
    RequestError,
    StoreUnusable,
    UnavailableError,
)
from penstock.server.frames.ipc import listen_unix
from penstock.server.frames.server import FrameServer
from penstock.server.frames.tcp import (
    TcpAddress,
    check_exposure,
    listen_tcp,
    read_address,
    read_token,
    server_tls,
)
from penstock.server.process import allow_many_files, look_seldom_for_cycles
from penstock.wire.frames.frames import error_words

# How long the daemon before this one may take to finish.
_BEFORE_S_MAX: Final = 60.0
_POLL_S: Final = 0.01
_STATUS_OF: Final[tuple[tuple[type[Exception], int], ...]] = (
    (RequestError, 3),
    (AddressInUse, 7),
    (UnavailableError, 4),
    (JournalError, 6),
)

OpenEngine = Callable[[argparse.Namespace], Engine]


def make_parser() -> argparse.ArgumentParser:
    """What the daemon can be told."""
    parser = argparse.ArgumentParser(
        prog="python -m penstock.server.daemon",
        description="Serve a data directory to every process on this host.",
        allow_abbrev=False,
    )
    add_arguments(parser)
    parser.add_argument("--ready-fd", type=int, help="where to tell the starter; detaches, too")
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What a daemon takes, however it is started."""
    parser.add_argument("path", metavar="PATH", help="the data directory")
    parser.add_argument(
        "--idle",
        type=int,
        default=IDLE_S,
        metavar="SECONDS",
        help="end after so long without a connection; 0 for never (default: %(default)s)",
    )
    parser.add_argument("--durability", default="sync", help="sync (default), interval or os")
    parser.add_argument("--interval-ms", type=int, default=50, help="of interval (default: 50)")
    parser.add_argument("--archive", metavar="DIRECTORY", help="keep files there that are done")
    parser.add_argument("--listen", metavar="HOST:PORT", help="serve penstock://HOST:PORT, too")
    parser.add_argument("--token-file", metavar="FILE", help="what TCP clients must know")
    parser.add_argument("--tls-cert", metavar="FILE", help="the certificate for TCP")
    parser.add_argument("--tls-key", metavar="FILE", help="its key")
    parser.add_argument(
        "--insecure-open-to-the-network",
        action="store_true",
        help="listen beyond this host without a token or without TLS",
    )


def open_store(arguments: argparse.Namespace) -> Engine:
    """The engine of a data directory. Raises InvalidField or StoreUnusable."""
    from penstock.backends.engine.store import open_engine
    from penstock.journal.file import check_durability

    return open_engine(
        arguments.path,
        durability=check_durability(arguments.durability),
        interval_ms=arguments.interval_ms,
        archive=arguments.archive,
    )


class Starter:
    """Whoever started the daemon, and waits to hear how that went."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def tell_ready(self) -> None:
        """The daemon answers now."""
        self._tell(READY)

    def tell_failure(self, error: PenstockError) -> None:
        """The daemon will not start, and this is why."""
        if self._fd is None:
            sys.stderr.write(f"penstock: {' '.join(str(error).split())}\n")
        else:
            self._tell(msgspec.msgpack.encode(error_words(error)))

    def _tell(self, said: bytes) -> None:
        if self._fd is not None:
            # A starter that has gone meanwhile changes nothing.
            with suppress(OSError):
                os.write(self._fd, said)
            with suppress(OSError):
                os.close(self._fd)
            self._fd = None


def main(argv: Sequence[str] | None = None, open_engine: OpenEngine = open_store) -> int:
    """Runs a daemon to its end and returns its exit status."""
    arguments = make_parser().parse_args(argv)
    if arguments.ready_fd is not None:
        _detach()
    return run_daemon(arguments, Starter(arguments.ready_fd), open_engine)


def run_daemon(
    arguments: argparse.Namespace, starter: Starter, open_engine: OpenEngine = open_store
) -> int:
    """Opens the store, serves it until it is time to stop, and returns the exit status."""
    os.umask(0o077)
    arguments.path = os.path.abspath(arguments.path)
    try:
        own = _Place(Path(arguments.path))
        entrance = _read_entrance(arguments)
        with own:
            own.wait_for_the_one_before()
            engine = open_engine(arguments)
            try:
                own.settle(detached=arguments.ready_fd is not None)
            except BaseException:
                engine.close()
                raise
            failure = _runner()(_serve(engine, arguments, entrance, own, starter))
        if failure is not None:
            raise failure
    except PenstockError as error:
        starter.tell_failure(error)
        return next((status for kind, status in _STATUS_OF if isinstance(error, kind)), 1)
    except Exception as error:
        # The starter waits for a word, and what is written now may have nowhere to go.
        starter.tell_failure(UnavailableError(f"{arguments.path}: its daemon failed: {error}"))
        raise
    return 0


def _detach() -> None:
    """Leaves the starter's process tree and terminal; the process it waits for ends here."""
    if os.fork():
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.close(nothing)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _runner() -> Callable[[Any], Any]:
    try:
        run: Callable[[Any], Any] = import_module("uvloop").run
    except (ImportError, AttributeError):
        return asyncio.run
    return run


class _Place:
    """The daemon's own files within the store: the lock that says it lives, and its socket."""

    def __init__(self, store: Path) -> None:
        self.socket = socket_path(store)
        self._store = store
        self._directory = daemon_directory(store)
        self._pid_fd: int | None = None

    def wait_for_the_one_before(self) -> None:
        """Lets a daemon that is finishing finish. Raises UnavailableError."""
        if not self._directory.is_dir():
            return
        deadline_s = time.monotonic() + _BEFORE_S_MAX
        while not self._lock_pid():
            if time.monotonic() > deadline_s:
                pid = running_pid(self._store)
                raise UnavailableError(f"{self._store}: process {pid} serves it already")
            time.sleep(_POLL_S)

    def settle(self, *, detached: bool) -> None:
        """Makes what the daemon needs, now that the store is known to be one and ours."""
        own_directory(self._directory)
        if self._pid_fd is None and not self._lock_pid():
            raise UnavailableError(f"{self._store}: somebody else serves it already")
        pointer = self._directory / "elsewhere"
        with suppress(FileNotFoundError):
            pointer.unlink()
        if self.socket.parent != self._directory:
            own_directory(self.socket.parent)
            pointer.write_text(f"{self.socket}\n")
        if detached:
            self._keep_output()

    def _lock_pid(self) -> bool:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(self._directory / "pid", flags, 0o600)
        except OSError as error:
            raise StoreUnusable(f"{self._directory}: cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        # At once: whoever sees the lock takes this for the number of the process that holds it.
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        self._pid_fd = fd
        return True

    def _keep_output(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._directory / "output", flags, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)

    def __enter__(self) -> "_Place":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pid_fd is not None:
            os.close(self._pid_fd)


class _Entrance:
    """Where else than at its own socket the daemon lets clients in, and whom."""

    def __init__(self, address: TcpAddress, token: str | None, tls: Any, insecure: bool) -> None:
        self.address = address
        self.token = token
        self.tls = tls
        self.insecure = insecure


def _read_entrance(arguments: argparse.Namespace) -> _Entrance | None:
    """Reads everything about TCP before anything is opened. Raises InvalidField."""
    if arguments.listen is None:
        return None
    address = read_address(arguments.listen)
    token = None if arguments.token_file is None else read_token(arguments.token_file)
    tls = None
    if arguments.tls_cert is not None:
        tls = server_tls(arguments.tls_cert, arguments.tls_key or arguments.tls_cert)
    insecure = arguments.insecure_open_to_the_network
    check_exposure(address, has_token=token is not None, has_tls=tls is not None, insecure=insecure)
    return _Entrance(address, token, tls, insecure)


async def _serve(
    engine: Engine,
    arguments: argparse.Namespace,
    entrance: _Entrance | None,
    own: _Place,
    starter: Starter,
) -> PenstockError | None:
    """Serves until it is time to stop; gives what the engine failed of, if it did."""
    allow_many_files()
    loop = asyncio.get_running_loop()
    stopping: asyncio.Future[str] = loop.create_future()
    failures: list[PenstockError] = []

    def stop(reason: str) -> None:
        if not stopping.done():
            stopping.set_result(reason)

    def fail(error: PenstockError) -> None:
        failures.append(error)
        stop(str(error))

    options = {"durability": arguments.durability, "interval_ms": str(arguments.interval_ms)}
    options["archive"] = arguments.archive or ""
    desk = FrameServer(engine, options=options, failed=fail)
    servers: list[asyncio.Server] = []
    reason = "the daemon could not start"
    try:
        if entrance is not None:
            servers.append(
                await listen_tcp(
                    desk,
                    entrance.address,
                    token=entrance.token,
                    tls=entrance.tls,
                    insecure=entrance.insecure,
                )
            )
            port = servers[0].sockets[0].getsockname()[1]
            (daemon_directory(arguments.path) / "port").write_text(f"{port}\n")
        # Last: whoever can connect here finds everything else in place.
        servers.append(await listen_unix(desk, own.socket))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, "the daemon was told to stop")
        look_seldom_for_cycles()
        starter.tell_ready()
        reason = await _until_stopped(desk, stopping, arguments.idle)
    finally:
        for server in servers:
            server.close()
        with suppress(OSError):
            own.socket.unlink()
        await desk.stop(reason)
    return failures[0] if failures else None


async def _until_stopped(desk: FrameServer, stopping: "asyncio.Future[str]", idle_s: int) -> str:
    loop = asyncio.get_running_loop()
    while True:
        left_s: float | None = None
        if idle_s:
            left_s = idle_s
            if not desk.connections:
                left_s = desk.idle_since_s + idle_s - loop.time()
                if left_s <= 0:
                    return "nobody used the daemon"
        done, _ = await asyncio.wait([stopping], timeout=left_s)
        if done:
            return stopping.result()


if __name__ == "__main__":
    sys.exit(main())
