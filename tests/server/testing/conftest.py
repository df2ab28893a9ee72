"""Servers with the control interface, in this process, each in a thread."""

import asyncio
import json
import threading
from base64 import b64encode
from http.client import HTTPConnection
from typing import Any

import pytest
import uvloop

from penstock.server.run import start
from penstock.settings import ServerSettings
from tests.server.sqs.conftest import TIMEOUT_S, client_options, client_session


class ControlledServer:
    """A server for tests in a thread, its control interface, and clients of SQS."""

    def __init__(self, **settings):
        given: dict[str, Any] = {"store": "memory:", "port": 0, "clock": "manual", **settings}
        self._settings = ServerSettings(**given)
        self._started = threading.Event()
        self._clients = []
        self._thread = threading.Thread(target=lambda: uvloop.run(self._run()))
        self._thread.start()
        assert self._started.wait(TIMEOUT_S)

    async def _run(self):
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self.running = await start(self._settings)
        self.url = self.running.url
        self._started.set()
        await self._ended.wait()
        await self.running.stop()

    def ask(self, page, body=None, *, key=None, **headers):
        """The status and the JSON of an answer of the control interface."""
        connection = HTTPConnection("127.0.0.1", self.running.port, timeout=TIMEOUT_S)
        if key is not None:
            headers["Authorization"] = f"Basic {b64encode(key.encode()).decode()}"
        sent = None
        if body is not None:
            headers = {"Content-Type": "application/json"} | headers
            sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        try:
            connection.request(method, f"/_penstock/{page}", sent, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def advance(self, step, **more):
        status, found = self.ask("clock", {"advance": step, **more})
        assert status == 200, found
        return found

    def client(self, account="any", **options):
        given = client_options(self.url, {"aws_access_key_id": account, **options})
        client = client_session(None).create_client("sqs", **given)
        self._clients.append(client)
        return client

    def close(self):
        for client in self._clients:
            client.close()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(TIMEOUT_S)


@pytest.fixture
def serve_controlled():
    """Starts servers; they are stopped when the test ends."""
    servers = []

    def begin(**settings):
        servers.append(ControlledServer(**settings))
        return servers[-1]

    yield begin
    for each in servers:
        each.close()


@pytest.fixture
def controlled(serve_controlled):
    return serve_controlled()
