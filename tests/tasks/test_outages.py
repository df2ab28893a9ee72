"""A store that cannot be reached while a worker runs: what the worker prints."""

import pytest

from tests.backends.redis.servers import RedisServer
from tests.tasks.conftest import DURABLE, until

pytestmark = pytest.mark.service("redis-server")
SOURCE = """
    @app.task(queue="a")
    def first(name: str) -> None:
        note(name)

    @app.task(queue="b", rate="100/s")
    def second(name: str) -> None:
        note(name)

    app.schedule("pulse", 1, first.prepare("scheduled"))
"""


@pytest.fixture
def server():
    server = RedisServer(*DURABLE)
    yield server
    server.close()


def test_an_outage_of_the_store_is_reported_once_and_so_is_its_end(make_shop, server):
    # The timeout is how long a command tries to connect before it fails.
    shop = make_shop(f"{server.url}?timeout=2", SOURCE)
    shop.start()
    module = shop.app()
    module.first.push("before")
    until(lambda: shop.noted("before"))
    server.kill()
    until(lambda: "trying again until the store answers" in shop.output.read_text())
    before = shop.noted("scheduled")
    server.start()
    until(lambda: "the store answers again" in shop.output.read_text())
    until(lambda: shop.noted("scheduled") > before)
    module.app.close()
    module.first.push("after")
    until(lambda: shop.noted("after"))
    module.app.close()
    entries = [line for line in shop.output.read_text().splitlines() if "WARNING" in line]
    assert len(entries) == 2
    assert f"{server.url}: " in entries[0]
