"""Servers for the SQS tests: as a process, the way a user starts one, and in this process.

The modules in `EVERY_STORE` run against each kind of store: in memory, in a directory, in a
directory that another process holds (through its socket), over TCP, and in Redis. All others run in
memory (docs/decisions/218). For a server in this process, each kind of store uses the clock of the
test.
"""

import asyncio
import functools
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import boto3
import botocore.session
import pytest
import uvloop
from botocore.config import Config

from penstock.backends.engine.engine import Engine
from penstock.backends.loop import result_of
from penstock.backends.remote.daemon import socket_path
from penstock.clock import ManualClock
from penstock.journal import MemoryJournal
from penstock.server.run import start
from penstock.settings import ServerSettings
from penstock.testing.sqs.query import write_query_model
from tests.backends.redis.servers import RedisServer
from tests.server.conftest import DaemonProcess, ServerInThread, end_daemon, without_event_lines

STORES = (
    "memory",
    "file",
    "daemon",
    "penstock",
    pytest.param("redis", marks=pytest.mark.service("redis-server")),
)
EVERY_STORE = frozenset(
    {
        "test_boto3",
        "test_dead_letters",
        "test_fifo",
        "test_fifo_order",
        "test_messages",
        "test_published",
        "test_query",
        "test_queues",
        "test_receipts",
        "test_waits",
        "test_error_texts",
    }
)
PENSTOCK = Path(sys.executable).with_name("penstock")
STARTED = re.compile(rb"Amazon SQS at (\S+)")
# Longer than anything takes on a busy machine.
TIMEOUT_S = 60


def pytest_generate_tests(metafunc):
    if "store" in metafunc.fixturenames:
        module = metafunc.module.__name__.rpartition(".")[2]
        stores: tuple[Any, ...] = STORES if module in EVERY_STORE else STORES[:1]
        metafunc.parametrize("store", stores, scope="session", indirect=True)


@pytest.fixture(scope="session")
def store(request):
    """The kind of store behind the endpoint."""
    return request.param


def client_options(url, given):
    """The options of an SDK's client that never repeats a request."""
    return {
        "endpoint_url": url,
        "region_name": "us-east-1",
        "aws_access_key_id": "any",
        "aws_secret_access_key": "any",
        "config": Config(retries={"max_attempts": 0}, read_timeout=60),
        **given,
    }


class ServeProcess:
    """A running `penstock serve`."""

    def __init__(self, process, url, output):
        self.process = process
        self.url = url
        self.output = output
        self._clients = []

    @property
    def port(self):
        return int(self.url.rsplit(":", 1)[1])

    def client(self, **options):
        client = boto3.client("sqs", **client_options(self.url, options))
        self._clients.append(client)
        return client

    def close(self):
        for client in self._clients:
            client.close()

    def stop(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        return self.process.wait(TIMEOUT_S)


@contextmanager
def serve(*arguments, environment=None, before=()):
    """Starts a server on a free port, and ends it; `before` is a command to run it under."""
    process = subprocess.Popen(
        [*before, PENSTOCK, "serve", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**clean_environment(), **(environment or {})},
    )
    try:
        output, url = read_until_started(process)
        server = ServeProcess(process, url, output)
        try:
            yield server
        finally:
            server.close()
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=TIMEOUT_S)


def clean_environment():
    return {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}


def read_until_started(process):
    """What the server prints when it starts, and its URL; fails if it does not start."""
    output = b""
    until_s = time.monotonic() + TIMEOUT_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while b"Ctrl-C\n" not in output:
            if not selector.select(max(0, until_s - time.monotonic())):
                break
            piece = os.read(process.stdout.fileno(), 65_536)
            if not piece:
                break
            output += piece
    started = STARTED.search(output)
    if started is None:
        pytest.fail(f"the server did not start: {output.decode()}")
    return without_event_lines(output.decode()), started[1].decode()


@pytest.fixture(scope="session")
def redis_url(store):
    """A Redis server for all tests; None if the store is another."""
    if store != "redis":
        yield None
        return
    server = RedisServer()
    yield server.url
    server.close()


@pytest.fixture(scope="session")
def server(store, redis_url, tmp_path_factory):
    """One server for all tests that can share it; a daemon is a process of its own."""
    path = tmp_path_factory.mktemp("sqs") / "store"
    with ExitStack() as stack:
        url = {
            "memory": "memory:",
            "file": f"file:{path}",
            "daemon": f"file:{path}?daemon=1",
            "redis": redis_url,
        }.get(store)
        if store == "daemon":
            stack.callback(end_daemon, path)
        if url is None:
            daemon = DaemonProcess(path, "--listen", "127.0.0.1:0")
            stack.callback(daemon.stop)
            url = f"penstock://127.0.0.1:{daemon.port}"
        yield stack.enter_context(serve("--store", url))


@pytest.fixture(scope="session")
def sqs(server):
    client = server.client()
    yield client
    client.close()


@pytest.fixture
def queue_name(request):
    """A name no other test uses."""
    plain = re.sub(r"[^A-Za-z0-9]", "-", request.node.name)[:60]
    return f"{plain}-{time.monotonic_ns() % 10**9}"


@pytest.fixture
def queue(sqs, queue_name):
    """A fresh standard queue's URL."""
    return sqs.create_queue(QueueName=queue_name)["QueueUrl"]


@pytest.fixture
def fifo(sqs, queue_name):
    """A fresh FIFO queue's URL."""
    attributes = {"FifoQueue": "true"}
    return sqs.create_queue(QueueName=f"{queue_name}.fifo", Attributes=attributes)["QueueUrl"]


@pytest.fixture(scope="session")
def query_data(tmp_path_factory):
    """A directory where botocore finds the older model."""
    path = tmp_path_factory.mktemp("data")
    write_query_model(path)
    return path


@functools.cache
def client_session(data):
    """A botocore session, which reads a model only once; it looks in this directory first."""
    session = botocore.session.Session()
    if data is not None:
        session.get_component("data_loader").search_paths.insert(0, str(data))
    return session


class Local:
    """A server in this process, in a thread of its own, on the manual clock of the test.

    The frame server of a store that another process would hold runs in a thread, on the same clock.
    """

    def __init__(self, query_data, store="memory", path=None, url="memory:", **settings):
        self.clock = ManualClock()
        self._frames = None
        if store == "file":
            url = f"file:{path / 'store'}"
        elif store == "daemon":
            socket = socket_path(path / "store")
            socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._frames = ServerInThread(socket.parent, socket=socket, engine=self._engine())
            url = f"file:{path / 'store'}?daemon=1"
        elif store == "penstock":
            (path / "server").mkdir(mode=0o700)
            self._frames = ServerInThread(path / "server", engine=self._engine())
            url = f"penstock://127.0.0.1:{self._frames.port}"
        self.settings = ServerSettings(store=url, port=0, **settings)
        self._query_data = query_data
        self._started = threading.Event()
        self._clients = []
        self._thread = threading.Thread(target=lambda: uvloop.run(self._run()))
        self._thread.start()
        assert self._started.wait(TIMEOUT_S)

    async def _run(self):
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self.running = await start(self.settings, self.clock)
        # For tests that inspect the engine of a store in memory.
        running: Any = self.running
        running.engine = getattr(self.running.service, "engine", None)
        self.url = self.running.url
        self._started.set()
        await self._ended.wait()
        await self.running.stop()

    def _engine(self):
        return Engine(MemoryJournal(), self.clock)

    def execute(self, command):
        """Runs a command on the server's store, without the endpoint."""

        async def run():
            return await result_of(self.running.service.submit(command))

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(TIMEOUT_S)

    def call(self, function, *arguments):
        """Calls a function in the server's thread."""

        async def run():
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(TIMEOUT_S)

    def client(self, protocol="json", **options):
        session = client_session(self._query_data if protocol == "query" else None)
        client = session.create_client("sqs", **client_options(self.url, options))
        self._clients.append(client)
        return client

    def close(self):
        for client in self._clients:
            client.close()
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(TIMEOUT_S)
        if self._frames is not None:
            self._frames.stop()


@pytest.fixture
def local(query_data, store, redis_url, quick_path):
    # Each test has its own prefix in Redis, as it has its own directory.
    url = "memory:" if redis_url is None else f"{redis_url}?prefix={quick_path.name}"
    server = Local(query_data, store, quick_path, url=url, aws_limits=True)
    yield server
    server.close()


@pytest.fixture(params=["json", "query"])
def either(request, local):
    """A client of the local server, over each of the two protocols."""
    return local.client(request.param)


@pytest.fixture(scope="module")
def plain(query_data, store, redis_url, tmp_path_factory):
    """A local server that the tests of one module share."""
    path = tmp_path_factory.mktemp("plain")
    url = "memory:" if redis_url is None else f"{redis_url}?prefix={path.name}"
    server = Local(query_data, store, path, url=url, aws_limits=True)
    yield server
    server.close()
