"""Apps on a store in memory whose clock advances by itself, and real workers on real stores."""

import os
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from penstock import ManualClock, connect
from penstock.backends.remote.daemon import stop_daemon
from penstock.tasks import TaskApp
from tests.backends.redis import servers
from tests.backends.redis.servers import RedisServer
from tests.server.conftest import DaemonProcess

TIMEOUT_S = 60.0
until = partial(servers.until, timeout_s=TIMEOUT_S)
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
EXECUTABLE = Path(sys.executable).with_name("penstock")


@pytest.fixture
def clock():
    return ManualClock(auto_advance=True)


@pytest.fixture
def app(clock):
    app = TaskApp("memory:", clock=clock)
    yield app
    app.close()


@pytest.fixture(scope="session")
def redis_server():
    server = RedisServer(*DURABLE)
    yield server
    server.close()


@pytest.fixture(
    params=[
        "file",
        "penstock",
        pytest.param("redis", marks=pytest.mark.service("redis-server")),
    ]
)
def store_url(request, quick_path):
    """The URL of a store that several processes share."""
    path = quick_path / "store"
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        server.ask("FLUSHALL")
        yield server.url
        return
    if request.param == "penstock":
        daemon = DaemonProcess(path, "--durability", "os", "--listen", "127.0.0.1:0")
        yield f"penstock://127.0.0.1:{daemon.port}"
        daemon.stop()
        return
    yield f"file:{path}?durability=os"
    stop_daemon(str(path), 30.0)


@pytest.fixture
def file_url(quick_path):
    path = quick_path / "store"
    yield f"file:{path}?durability=os"
    stop_daemon(str(path), 30.0)


class Shop:
    """A module with an app in a directory of its own, and the workers that run it."""

    def __init__(self, directory, url):
        self.directory = directory
        self.url = url
        self.output = directory / "worker.out"
        self.seen = directory / "seen"
        self.seen.mkdir(exist_ok=True)
        self.workers = []

    def write(self, source, name="shop"):
        head = f"""
            import asyncio, os, pathlib, sys, time
            from penstock.tasks import *

            app = TaskApp({self.url!r})
            SEEN = pathlib.Path({str(self.seen)!r})

            def note(name):
                fd = os.open(SEEN / str(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.write(fd, b"x")
                os.close(fd)
        """
        text = textwrap.dedent(head) + textwrap.dedent(source)
        (self.directory / f"{name}.py").write_text(text)

    def noted(self, name):
        """How often a task has called `note` with this name."""
        path = self.seen / str(name)
        return len(path.read_bytes()) if path.exists() else 0

    def names(self):
        return {path.name for path in self.seen.iterdir()}

    def environment(self):
        return {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}

    def start(self, *options, target="shop:app"):
        with self.output.open("ab") as out:
            worker = subprocess.Popen(
                [EXECUTABLE, "worker", target, *options],
                cwd=self.directory,
                env=self.environment(),
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.workers.append(worker)
        return worker

    def run(self, *words):
        """Runs the command line in the directory of the module; its status, output and errors."""
        done = subprocess.run(
            [EXECUTABLE, *words],
            cwd=self.directory,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def printed(self):
        return self.output.read_text()

    def app(self, name="shop"):
        """Imports the module, as a program that pushes tasks does."""
        import importlib

        sys.path.insert(0, str(self.directory))
        try:
            sys.modules.pop(name, None)
            importlib.invalidate_caches()
            return importlib.import_module(name)
        finally:
            sys.path.remove(str(self.directory))
            sys.modules.pop(name, None)

    def processes(self, worker):
        """The worker processes of a supervisor."""
        children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def close(self):
        for worker in self.workers:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


@pytest.fixture
def make_shop(tmp_path):
    shops = []

    def make(url, source):
        shop = Shop(tmp_path, url)
        shop.write(source)
        shops.append(shop)
        return shop

    yield make
    for shop in shops:
        shop.close()


@pytest.fixture
def queues_at():
    opened = []

    def open_queues(url):
        queues = connect(url)
        opened.append(queues)
        return queues

    yield open_queues
    for queues in opened:
        queues.close()
