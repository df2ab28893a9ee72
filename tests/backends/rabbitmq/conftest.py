"""Connections to the broker of the tests: ours, and that of any other AMQP client."""

import asyncio
import secrets

import aiormq
import pytest

import penstock


@pytest.fixture(scope="module")
def queues(rabbit):
    with penstock.connect(rabbit.url) as queues:
        yield queues


@pytest.fixture
def name():
    """A name no other test uses."""
    return f"q-{secrets.token_hex(6)}"


@pytest.fixture(scope="session")
def connect(rabbit):
    """Opens another connection, as another process would, with these options in its URL."""

    def open_queues(options=""):
        return penstock.connect(rabbit.url + options)

    return open_queues


@pytest.fixture(scope="session")
def amqp(rabbit):
    """Asks the broker as any AMQP client would."""

    async def run(request):
        connection = await aiormq.connect(rabbit.url)
        try:
            return await request(await connection.channel())
        finally:
            await connection.close()

    return lambda request: asyncio.run(run(request))
