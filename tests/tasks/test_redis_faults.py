"""Row 12: Redis is stalled and killed while tasks are pushed and run: none is lost or stuck."""

import threading
import time

import pytest

from penstock import PenstockError
from penstock.service import Stats
from tests.backends.redis.servers import RedisServer
from tests.conftest import FULL
from tests.tasks.conftest import DURABLE, until

pytestmark = [pytest.mark.service("redis-server"), pytest.mark.timeout(600 if FULL else 300)]
TASKS = 5_000 if FULL else 600
FAULTS = 20 if FULL else 3
STEP = TASKS // FAULTS

SOURCE = """
    @app.task
    def work(number: int) -> None:
        note(number)
"""


@pytest.fixture
def server():
    server = RedisServer(*DURABLE)
    yield server
    server.close()


def stall(server):
    with server.stalled():
        time.sleep(1.5)


def restart(server):
    server.kill()
    server.start()


@pytest.mark.parametrize("fault", [stall, restart])
def test_every_task_runs_although_redis_fails_under_load(make_shop, server, fault):
    shop = make_shop(f"{server.url}?timeout=5", SOURCE)
    shop.start("--visibility-timeout", "2s", "--processes", "2")
    module = shop.app()
    pushed: set[str] = set()

    def push(number):
        """A push that was answered counts; one whose answer was lost is tried again."""
        while True:
            try:
                module.work.push(number)
            except PenstockError:
                continue
            pushed.add(str(number))
            return

    number = during = 0
    for _ in range(FAULTS):
        failing = threading.Thread(target=fault, args=(server,))
        half, end = number + STEP // 2, number + STEP
        # Pushes go on before, during and after the fault.
        while number < end or failing.is_alive():
            if number == half:
                failing.start()
            during += failing.is_alive()
            push(number)
            number += 1
    assert len(pushed) == number
    assert during >= FAULTS
    until(lambda: pushed <= shop.names(), timeout_s=200)

    def is_empty():
        try:
            return module.app.service.execute(Stats("tasks")).messages == 0
        except PenstockError:
            return False

    until(is_empty)
    module.app.close()
