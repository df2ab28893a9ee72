"""Redis servers for the tests of this directory."""

import pytest

from tests.backends.redis.servers import RedisServer


@pytest.fixture(scope="session")
def shared_redis():
    """One server for all tests that neither stop nor fill it."""
    server = RedisServer()
    yield server
    server.close()


@pytest.fixture
def own_redis():
    """A server that the test may stop, stall and flush; it syncs a write before the answer."""
    server = RedisServer("--appendonly", "yes", "--appendfsync", "always")
    yield server
    server.close()
