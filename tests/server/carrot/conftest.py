"""Carrot brokers to test against: in a thread, on a manual clock, with raw sockets to them."""

import asyncio
import socket
import threading

import pytest

from penstock import carrot
from penstock.backends.engine.engine import Engine
from penstock.backends.engine.loop import LoopEngine
from penstock.clock import ManualClock
from penstock.journal import MemoryJournal
from penstock.server.carrot.connection import listen_carrot
from penstock.server.carrot.server import CarrotServer
from penstock.server.frames.tcp import TcpAddress
from penstock.service import Stats
from tests.server.conftest import TIMEOUT_S, call_in


class BrokerInThread:
    """A broker on an engine of its own, in an event loop of its own."""

    def __init__(self, *, clock=None, limits=None, engine=None, token=None, tls=None):
        self.engine = engine or Engine(MemoryJournal(), clock or ManualClock())
        self.failures = []
        self.token = token
        self._options = {"limits": limits, "token": token}
        self._tls = tls
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._up.wait(TIMEOUT_S)

    async def _main(self):
        self.loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        service = LoopEngine(self.engine)
        self.server = CarrotServer(service, failed=self.failures.append, **self._options)
        listener = await listen_carrot(self.server, TcpAddress("127.0.0.1", 0), self._tls)
        self.port = listener.sockets[0].getsockname()[1]
        self._up.set()
        await self._stopping.wait()
        listener.close()
        await self.server.stop("the test is over")
        await service.close()

    def call(self, function):
        """Run a function in the broker's event loop and return its result."""
        return call_in(self.loop, function)

    def submit(self, command):
        """Executes a command on the engine, in one step."""
        return self.call(lambda: self.engine.submit(command))

    def stats(self, queue):
        return self.submit(Stats(queue))

    def link(self):
        """A raw connection."""
        link = socket.create_connection(("127.0.0.1", self.port), TIMEOUT_S)
        link.settimeout(TIMEOUT_S)
        return link

    def ask(self, request, closes=True):
        """Send bytes on a connection of their own, and read to the end of the answer."""
        with self.link() as link:
            link.sendall(request)
            return read_all(link)

    def connect(self, **options):
        """A client with a connection."""
        return carrot.connect("127.0.0.1", self.port, token=self.token, **options)

    def single(self):
        """A client of the original protocol."""
        return carrot.SingleClient("127.0.0.1", self.port, token=self.token)

    def stop(self):
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(TIMEOUT_S)
            assert not self._thread.is_alive()


def read_all(link):
    """Everything until the broker closes the connection."""
    found = b""
    while chunk := link.recv(65_536):
        found += chunk
    return found


def read_exactly(link, size):
    """So many bytes."""
    found = b""
    while len(found) < size:
        chunk = link.recv(size - len(found))
        assert chunk, f"the broker closed after {found!r}"
        found += chunk
    return found


@pytest.fixture
def start_broker():
    """Start brokers; they are stopped when the test ends."""
    brokers: list[BrokerInThread] = []

    def start(**options):
        brokers.append(BrokerInThread(**options))
        return brokers[-1]

    yield start
    for broker in brokers:
        broker.stop()


@pytest.fixture
def broker(start_broker):
    """A broker with the queue `orders`."""
    started = start_broker()
    assert started.ask(b"\xf0orders\0") == b"\0\0"
    return started
