"""Servers for tests: one in a thread, on a manual clock, and real daemons as processes."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from penstock.backends.engine.engine import Engine
from penstock.backends.engine.loop import LoopEngine
from penstock.backends.remote.daemon import connect_socket, running_pid, stop_daemon
from penstock.clock import ManualClock
from penstock.journal import MemoryJournal
from penstock.server.frames.ipc import listen_unix
from penstock.server.frames.server import FrameServer, Limits
from penstock.server.frames.tcp import TcpAddress, listen_tcp
from penstock.service import Peek
from penstock.wire.frames.bodies import encode_command
from penstock.wire.frames.frames import Hello, encode_hello
from tests.conftest import IN_CI

TIMEOUT_S = 60.0
# A line of a server about one event, as text.
_EVENT_LINE = re.compile(r"^penstock: \d{4}-\d\d-\d\dT[\d:.]+Z [a-z-]+.*\n", re.MULTILINE)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """The paths of a certificate for this machine and of its key."""
    if shutil.which("openssl") is None:
        (pytest.fail if IN_CI else pytest.skip)("openssl is not installed")
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    words += ["-subj", "/CN=localhost"]
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    subprocess.run(
        ["openssl", *words, "-addext", names, "-keyout", key, "-out", cert],
        check=True,
        capture_output=True,
    )
    return str(cert), str(key)


def without_event_lines(text):
    """What a server printed besides the lines about starts, stops and requests."""
    return _EVENT_LINE.sub("", text)


def until(holds, timeout_s=TIMEOUT_S):
    """Wait until `holds` returns a true value, and return it; fail after `timeout_s`."""
    give_up = time.monotonic() + timeout_s
    while not (found := holds()):
        assert time.monotonic() < give_up, f"not true after {timeout_s} s"
        threading.Event().wait(0.005)
    return found


def call_in(loop, function):
    """Run a function in the event loop of another thread and return its result."""

    async def run():
        return function()

    return asyncio.run_coroutine_threadsafe(run(), loop).result(TIMEOUT_S)


def limit_times(call, server, **times):
    """Gives a server shorter limits of time from now on; `call` runs a function in its event loop.

    A test first brings its connections into the state that it is about, however long that takes.
    """

    def change():
        server.limits = server.limits._replace(**times)
        server._sweep_timer.cancel()
        server._sweep_s = min(times.values()) / 4
        server._sweep()

    call(change)


@contextmanager
def in_each_turn(server, act):
    """Calls a function in each turn of a server's event loop: between the parts of its requests."""
    ended: list[bool] = []

    def turn():
        act()
        if not ended:
            server.loop.call_soon(turn)

    server.call(turn)
    try:
        yield
    finally:
        server.call(lambda: ended.append(True))


class UnixEndpoint:
    """The address of a socket at a path, for a client that starts no daemon."""

    def __init__(self, path):
        self.shown = f"unix:{path}"
        self.token = self.tls = self.server_name = None
        self.options = {}
        self.reconnect_s_min = 0.0
        self._path = path

    def open(self, connect_s):
        import socket

        from penstock.errors import BackendLost

        give_up = time.monotonic() + connect_s
        while True:
            link = socket.socket(socket.AF_UNIX)
            try:
                link.connect(str(self._path))
            except OSError as error:
                link.close()
                if time.monotonic() >= give_up:
                    raise BackendLost(f"{self.shown}: {error.strerror}") from None
                threading.Event().wait(0.005)
            else:
                return link


class ServerInThread:
    """A frame server with an engine and an event loop of its own, in a thread."""

    def __init__(
        self,
        directory,
        *,
        clock=None,
        limits=None,
        engine=None,
        token=None,
        tls=None,
        socket=None,
    ):
        self.path = socket or Path(directory) / "socket"
        self.endpoint = UnixEndpoint(self.path)
        self.engine = engine or Engine(MemoryJournal(100_000), clock or ManualClock())
        self.failures = []
        self._limits = limits or Limits()
        self._token = token
        self._tls = tls
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._up.wait(TIMEOUT_S)

    async def _main(self):
        self.loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        service = LoopEngine(self.engine)
        self.frames = FrameServer(service, limits=self._limits, failed=self.failures.append)
        servers = [
            await listen_unix(self.frames, self.path),
            await listen_tcp(
                self.frames, TcpAddress("127.0.0.1", 0), token=self._token, tls=self._tls
            ),
        ]
        self.port = servers[1].sockets[0].getsockname()[1]
        self._up.set()
        await self._stopping.wait()
        for server in servers:
            server.close()
        await self.frames.stop("the test is over")
        await service.close()

    def call(self, function):
        """Run a function in the server's event loop and return its result."""
        return call_in(self.loop, function)

    def cut(self):
        """Break every connection, as a crash would."""

        def abort_all():
            for each in list(self.frames.connections):
                each.abort()

        self.call(abort_all)

    def stop(self):
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(TIMEOUT_S)
            assert not self._thread.is_alive()


@pytest.fixture
def serve(tmp_path):
    """Start servers; they are stopped when the test ends."""
    servers: list[ServerInThread] = []

    def start(**options):
        directory = tmp_path / f"server{len(servers)}"
        directory.mkdir(mode=0o700)
        servers.append(ServerInThread(directory, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def wait_for_listener(store):
    """Wait until the process that holds a store accepts connections.

    Its socket's file exists a little earlier.
    """

    def is_listening():
        link = connect_socket(store)
        if link is not None:
            link.close()
        return link is not None

    until(is_listening)


def send_one_peek(store):
    """Send a peek to a store's socket once, without the retries of a client, and read to the end.

    Call it if the server ends the connection instead of answering.
    """
    link = connect_socket(store)
    assert link is not None
    with link:
        link.settimeout(TIMEOUT_S)
        link.sendall(encode_hello(Hello("test")) + encode_command(1, Peek("orders")))
        while link.recv(65_536):
            pass


def end_daemon(store):
    """Stop a store's daemon; kill it if it does not stop."""
    with suppress(Exception):
        stop_daemon(store, 10)
    pid = running_pid(store)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        until(lambda: running_pid(store) is None)


@pytest.fixture
def store(tmp_path):
    """A data directory whose daemon, if the test starts one, is ended."""
    path = tmp_path / "store"
    yield path
    end_daemon(path)


class DaemonProcess:
    """A daemon in the foreground, with the options that the test gives it."""

    def __init__(self, store, *words):
        self.store = Path(store)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.server.daemon", str(store), "--idle", "0", *words],
            stderr=subprocess.PIPE,
            text=True,
        )
        until(lambda: self.process.poll() is not None or self._listens())
        assert self.process.poll() is None, self.process.communicate()[1]

    def _listens(self):
        link = connect_socket(self.store)
        if link is None:
            return False
        link.close()
        return True

    @property
    def port(self):
        return int((self.store / "daemon" / "port").read_text())

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.communicate(timeout=TIMEOUT_S)[1]
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.communicate()[1]
