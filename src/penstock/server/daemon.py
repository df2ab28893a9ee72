"""The daemon of a data directory: a process that serves it to all other processes on this host.

The first client that finds no daemon starts one (`backends.remote.starting`). It outlives that
client, and stops when no client has been connected for the idle time, or at SIGTERM. It then
answers the requests that it has received, sends each client a GOODBYE, and closes the journal.
After a crash the next daemon opens the journal.
"""

import argparse
import asyncio
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from penstock.backends.engine.engine import Engine
from penstock.backends.engine.loop import LoopEngine
from penstock.backends.remote.daemon import AUTO_DAEMON, DAEMON_RUN
from penstock.backends.remote.starting import IDLE_S, READY
from penstock.errors import (
    AddressInUse,
    InvalidField,
    JournalError,
    PenstockError,
    RequestError,
    StoreInUse,
    UnavailableError,
)
from penstock.journal.segments import FILE_BYTES
from penstock.output import report
from penstock.server.faults import Faults
from penstock.server.frames.counts import CommandCounts
from penstock.server.frames.server import FrameServer
from penstock.server.frames.tcp import (
    TcpAddress,
    check_exposure,
    is_loopback,
    listen_tcp,
    read_address,
    read_token,
)
from penstock.server.holder import StoreHolder
from penstock.server.lines import ServerLines
from penstock.server.process import allow_many_files, collect_garbage_rarely, open_standard_files
from penstock.server.reader_watch import ReaderWatch
from penstock.server.store_socket import StoreSocket
from penstock.server.tls import ServerTls
from penstock.wire.frames.frames import error_words

if TYPE_CHECKING:
    from penstock.server.http import HttpServer

_PAGES_DRAIN_S: Final = 2.0

_STATUS_OF: Final[tuple[tuple[type[Exception], int], ...]] = (
    (RequestError, 3),
    (AddressInUse, 7),
    (StoreInUse, 8),
    (UnavailableError, 4),
    (JournalError, 6),
)

OpenEngine = Callable[[argparse.Namespace], Engine]


def make_parser() -> argparse.ArgumentParser:
    """The command line of a daemon."""
    parser = argparse.ArgumentParser(
        prog="python -m penstock.server.daemon",
        description="Serve a data directory to every process on this host.",
        allow_abbrev=False,
    )
    add_arguments(parser)
    parser.add_argument(
        "--ready-fd",
        type=int,
        help="a pipe to the starter: the daemon detaches, and writes there that it is ready",
    )
    return parser


def add_arguments(parser: argparse.ArgumentParser, path_nargs: str | None = None) -> None:
    """Adds the options of a daemon, for this module and for `penstock daemon run`."""
    parser.add_argument("path", metavar="PATH", nargs=path_nargs, help="the data directory")
    parser.add_argument(
        "--idle",
        type=int,
        default=IDLE_S,
        metavar="SECONDS",
        help="end after this time without a connection; 0 for never (default: %(default)s)",
    )
    parser.add_argument("--durability", default="sync", help="sync (default), interval or os")
    parser.add_argument("--interval-ms", type=int, default=50, help="of interval (default: 50)")
    parser.add_argument(
        "--archive", metavar="DIRECTORY", help="keep journal files there that are no longer needed"
    )
    parser.add_argument(
        "--file-size",
        type=int,
        default=FILE_BYTES,
        metavar="BYTES",
        help="of each file of a new store's journal, a multiple of 4096 (default: %(default)s)",
    )
    parser.add_argument(
        "--accept-loss",
        action="store_true",
        help="open a store that misses files of its journal, without what they held",
    )
    parser.add_argument("--listen", metavar="HOST:PORT", help="serve penstock://HOST:PORT, too")
    parser.add_argument(
        "--http",
        metavar="[HOST:]PORT",
        help="show /health and /metrics there (host: 127.0.0.1; port 0 for any free one)",
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help="holds the token that TCP clients must send"
    )
    parser.add_argument("--tls-cert", metavar="FILE", help="the certificate for TCP")
    parser.add_argument("--tls-key", metavar="FILE", help="its key")
    parser.add_argument(
        "--insecure-open-to-the-network",
        action="store_true",
        help="listen beyond this host without a token or without TLS",
    )
    parser.add_argument(
        "--insecure-other-owner",
        action="store_true",
        help="serve a store or directory of another user (root can); the files made in it belong "
        "to the user of this process",
    )


def open_store(arguments: argparse.Namespace) -> Engine:
    """The engine of a data directory. Raises InvalidField or StoreUnusable."""
    from penstock.backends.engine.store import open_engine
    from penstock.journal.file_journal import check_durability

    return open_engine(
        arguments.path,
        durability=check_durability(arguments.durability),
        interval_ms=arguments.interval_ms,
        archive=arguments.archive,
        file_bytes=arguments.file_size,
        accept_loss=arguments.accept_loss,
        other_owner=arguments.insecure_other_owner,
    )


class Starter:
    """The pipe to the process that started the daemon and waits until it is ready."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def report_ready(self) -> None:
        """Reports that the daemon listens."""
        self._write(READY)

    def report_failure(self, error: PenstockError) -> None:
        """Reports why the daemon did not start; without a pipe, on stderr."""
        if self._fd is None:
            report(" ".join(str(error).split()))
        else:
            self._write(msgspec.msgpack.encode(error_words(error)))

    def _write(self, report: bytes) -> None:
        if self._fd is not None:
            # The starter may have ended.
            with suppress(OSError):
                os.write(self._fd, report)
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
    """Opens the store, serves it until it is stopped, and returns the exit status."""
    open_standard_files()
    os.umask(0o077)
    kind = DAEMON_RUN if arguments.ready_fd is None else AUTO_DAEMON
    holder = StoreHolder(arguments.path, kind, other_owner=arguments.insecure_other_owner)
    try:
        listening = _read_listening(arguments)
        # Detached, there is no standard error yet: the warnings of opening go to the output file.
        opening = io.StringIO() if kind == AUTO_DAEMON else sys.stderr
        with redirect_stderr(opening):
            engine = holder.take(lambda: open_engine(arguments))
        warnings = opening.getvalue() if isinstance(opening, io.StringIO) else ""
        try:
            failure = _runner()(_serve(engine, arguments, listening, holder, starter, warnings))
        finally:
            holder.release()
        if failure is not None:
            raise failure
    except PenstockError as error:
        starter.report_failure(error)
        return next((status for kind, status in _STATUS_OF if isinstance(error, kind)), 1)
    except Exception as error:
        # The starter waits for a report, and stderr may be /dev/null.
        starter.report_failure(UnavailableError(f"{holder.store}: its daemon failed: {error}"))
        raise
    return 0


def _detach() -> None:
    """Detaches from the starter's process tree and terminal; the forking process exits."""
    if os.fork():
        os._exit(0)
    null_fd = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null_fd, fd)
    os.close(null_fd)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _runner() -> Callable[[Any], Any]:
    try:
        run: Callable[[Any], Any] = import_module("uvloop").run
    except (ImportError, AttributeError):
        return asyncio.run
    return run


class _Listening(NamedTuple):
    """Where a daemon listens besides its own socket: TCP for frames, HTTP for the pages."""

    tcp: TcpAddress | None
    token: str | None
    tls: ServerTls | None
    insecure: bool
    http: TcpAddress | None


def _read_listening(arguments: argparse.Namespace) -> _Listening:
    """Reads the options about addresses, before anything is opened. Raises InvalidField."""
    insecure = arguments.insecure_open_to_the_network
    http = None if arguments.http is None else _read_http_address(arguments.http)
    if http is not None and not insecure and not is_loopback(http.host):
        raise InvalidField(
            f"http: {http} can be reached from other machines, and the pages need no token; give "
            "only a port, or add --insecure-open-to-the-network"
        )
    if arguments.listen is None:
        return _Listening(None, None, None, insecure, http)
    address = read_address(arguments.listen)
    token = None if arguments.token_file is None else read_token(arguments.token_file)
    tls = None
    if arguments.tls_cert is not None:
        tls = ServerTls(arguments.tls_cert, arguments.tls_key or arguments.tls_cert)
    check_exposure(address, has_token=token is not None, has_tls=tls is not None, insecure=insecure)
    return _Listening(address, token, tls, insecure, http)


def _read_http_address(text: str) -> TcpAddress:
    return read_address(f"127.0.0.1:{text}" if text.isdigit() else text)


async def _serve(
    engine: Engine,
    arguments: argparse.Namespace,
    listening: _Listening,
    holder: StoreHolder,
    starter: Starter,
    warnings: str,
) -> PenstockError | None:
    """Serves until it is stopped; returns the error that stopped the engine, or None.

    `warnings` are printed once there is an output file.
    """
    allow_many_files()
    loop = asyncio.get_running_loop()
    faults = Faults()
    loop.set_exception_handler(faults.from_loop)
    stopping: asyncio.Future[str] = loop.create_future()
    failures: list[PenstockError] = []

    def stop(reason: str) -> None:
        if not stopping.done():
            stopping.set_result(reason)

    def fail(error: PenstockError) -> None:
        failures.append(error)
        stop(str(error))

    options = {
        "durability": arguments.durability,
        "interval_ms": str(arguments.interval_ms),
        "archive": arguments.archive or "",
    }
    service = LoopEngine(engine)
    counts = CommandCounts()
    socket = StoreSocket(holder, service, options, faults, fail, counts)
    reason = "the daemon could not start"
    watch = ReaderWatch.of(engine.journal, str(holder.store), ServerLines())
    http: HttpServer | None = None
    try:
        if arguments.ready_fd is not None:
            holder.redirect_output()
            for line in warnings.splitlines():
                report(line)
        http = await _listen(listening, holder, service, socket, faults, counts)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, "the daemon was stopped by a signal")
        if listening.tls is not None:
            loop.add_signal_handler(signal.SIGHUP, _reload, listening.tls, arguments)
        await socket.listen()
        collect_garbage_rarely()
        starter.report_ready()
        if watch is not None:
            watch.start()
        reason = await _until_stopped(socket.frames, stopping, arguments.idle)
    finally:
        if watch is not None:
            watch.stop()
        await socket.close(reason)
        if http is not None:
            await http.drain(_PAGES_DRAIN_S)
        await service.close()
    return failures[0] if failures else None


def _reload(tls: ServerTls, arguments: argparse.Namespace) -> None:
    """Uses the certificate as its file is now; one that is not valid is refused with a line."""
    try:
        tls.reload(arguments.tls_cert, arguments.tls_key or arguments.tls_cert)
    except InvalidField as error:
        report(f"the certificate stays as it was: {error}")
    else:
        report(f"the certificate was read again from {arguments.tls_cert}")


async def _listen(
    listening: _Listening,
    holder: StoreHolder,
    service: LoopEngine,
    socket: StoreSocket,
    faults: Faults,
    counts: CommandCounts,
) -> "HttpServer | None":
    """Listens on TCP and HTTP, as configured, and writes the ports to the daemon's directory."""
    if listening.tcp is not None:
        listener = await listen_tcp(
            socket.frames,
            listening.tcp,
            token=listening.token,
            tls=listening.tls,
            insecure=listening.insecure,
        )
        socket.add_listener(listener)
        holder.write_file("port", f"{listener.sockets[0].getsockname()[1]}\n")
    if listening.http is None:
        return None
    # Imported here: few daemons show these pages, and the import delays the start.
    from penstock.server.journal_figures import journal_figures
    from penstock.server.pages import listen_pages

    more = journal_figures(
        service.engine.journal, str(holder.store), lambda: service.engine.upkeep_failed
    )
    http, listener = await listen_pages(service, *listening.http, faults, counts, more)
    socket.add_listener(listener)
    holder.write_file("http", f"{listener.sockets[0].getsockname()[1]}\n")
    return http


async def _until_stopped(server: FrameServer, stopping: "asyncio.Future[str]", idle_s: int) -> str:
    loop = asyncio.get_running_loop()
    while True:
        left_s: float | None = None
        if idle_s:
            left_s = idle_s
            if not server.connections:
                left_s = server.idle_since_s + idle_s - loop.time()
                if left_s <= 0:
                    return "the daemon was idle"
        done, _ = await asyncio.wait([stopping], timeout=left_s)
        if done:
            return stopping.result()


if __name__ == "__main__":
    sys.exit(main())
