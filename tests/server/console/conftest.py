"""A server with a console in this process, on a store that the test reaches as a client."""

import asyncio
import http.client
import json
import threading

import pytest
import uvloop

import penstock
from penstock.server.run import start
from penstock.settings import ServerSettings
from tests.browser import Browser
from tests.server.sqs.test_pages import FLAGS

TIMEOUT_S = 60


class ConsoleServer:
    """`penstock serve` in a thread; `queues` is a client of its store."""

    def __init__(self, path, **settings):
        self._settings = settings
        self._url = f"file:{path}?durability=os"
        self._path = path
        self._port = settings.pop("port", 0)
        self.start()

    def start(self):
        settings = ServerSettings(store=self._url, port=self._port, **self._settings)
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._run(settings)))
        self._thread.start()
        assert self._started.wait(TIMEOUT_S)
        self._port = self.running.port
        self.queues = penstock.connect(f"file:{self._path}")

    async def _run(self, settings):
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self.running = await start(settings)
        self._started.set()
        await self._ended.wait()
        await self.running.stop()

    def stop(self):
        self.queues.close()
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    @property
    def url(self):
        return self.running.url

    def ask(self, path, method="GET", body=None, **headers):
        """The status, the headers and the body of a response."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        try:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, given)
            reply = connection.getresponse()
            return reply.status, dict(reply.getheaders()), reply.read()
        finally:
            connection.close()

    def read(self, name, **headers):
        """What the page reads."""
        status, _, body = self.ask(f"/console/api/{name}", **headers)
        return status, json.loads(body)

    def change(self, name, given, **headers):
        """What the page changes."""
        headers = {"x-penstock-console": "1", "content-type": "application/json", **headers}
        status, got, body = self.ask(f"/console/api/{name}", "POST", json.dumps(given), **headers)
        return status, got, json.loads(body)


@pytest.fixture
def start_console(tmp_path):
    """Starts servers with these settings, and stops them."""
    started: list[ConsoleServer] = []

    def begin(**settings):
        server = ConsoleServer(tmp_path / f"store{len(started)}", **settings)
        started.append(server)
        return server

    yield begin
    for server in started:
        server.stop()


@pytest.fixture
def console(start_console):
    return start_console()


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """One Chromium for all tests of the console: see `group_of` in tests/conftest.py."""
    with Browser(tmp_path_factory.mktemp("profile"), flags=FLAGS) as found:
        yield found


@pytest.fixture
def page(browser, console):
    """The browser, which may write nothing to its own console."""
    browser.visit("about:blank")
    browser.complaints()
    yield browser
    assert browser.complaints() == []
