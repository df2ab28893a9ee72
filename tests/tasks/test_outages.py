"""A store that cannot be reached while a worker runs: what the worker prints."""

import asyncio
import logging

import pytest

from penstock.backends import open_async_service
from penstock.errors import QueueNotFound
from penstock.service import DescribeQueues, Stats
from penstock.tasks.worker import outages
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


@pytest.mark.parametrize(("reminder_s", "count"), [(60, 1), (0, 6)])
def test_all_commands_that_fail_in_an_outage_share_one_report_and_its_reminders(
    server, monkeypatch, caplog, reminder_s, count
):
    monkeypatch.setattr(outages, "REMINDER_S", reminder_s)

    async def fail_and_recover():
        service = outages.OutageReporter(await open_async_service(f"{server.url}?timeout=1"))
        server.kill()
        for _ in range(2):
            commands = [service.execute(Stats("orders")) for _ in range(3)]
            errors = await asyncio.gather(*commands, return_exceptions=True)
            assert {type(error).__name__ for error in errors} == {"BackendLost"}
        server.start()
        for _ in range(2):
            with pytest.raises(QueueNotFound):
                await service.execute(Stats("orders"))
            await service.execute(DescribeQueues())
        await service.close()

    with caplog.at_level(logging.WARNING, "penstock.tasks"):
        asyncio.run(fail_and_recover())
    texts = [entry.getMessage() for entry in caplog.records]
    assert [text.endswith("trying again until the store answers") for text in texts] == [
        *([True] * count),
        False,
    ]
    assert texts[-1].startswith("the store answers again, after ")


def test_a_worker_whose_store_is_down_at_its_start_waits_and_says_so(make_shop, server):
    server.kill()
    shop = make_shop(f"{server.url}?timeout=2", SOURCE)
    shop.start()
    until(lambda: "waiting until the store answers" in shop.printed())
    server.start()
    module = shop.app()
    module.first.push("later")
    until(lambda: shop.noted("later"))
    module.app.close()
    lines = [each for each in shop.printed().splitlines() if "does not answer yet" not in each]
    first, second = lines[:2]
    assert first.startswith(f"penstock worker: {server.url}: ")
    assert "shop:app on" in second


def test_a_worker_says_at_once_that_its_store_is_down_however_long_its_client_tries(
    make_shop, server
):
    server.kill()
    shop = make_shop(f"{server.url}?timeout=120", SOURCE)
    shop.start()
    until(lambda: f"{server.url}?timeout=120: does not answer yet; waiting" in shop.printed())
    server.start()
    until(lambda: "shop:app on" in shop.printed())
    assert len(shop.printed().splitlines()) == 2


def test_a_worker_that_ends_by_itself_does_not_wait_for_its_store(make_shop, server):
    server.kill()
    shop = make_shop(f"{server.url}?timeout=2", SOURCE)
    code, _, err = shop.run("worker", "shop:app", "--burst")
    assert (code, err.count("\n")) == (4, 1)
    assert f"penstock: {server.url}: " in err
