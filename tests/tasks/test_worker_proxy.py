"""Row 26: the connection of a worker to Redis is cut at each of its requests."""

import asyncio
from collections import Counter
from itertools import count

import pytest

from penstock.backends import open_async_service
from penstock.service import Stats
from penstock.tasks import TaskApp
from penstock.tasks.control import failed_tasks
from penstock.tasks.worker.options import WorkerOptions
from penstock.tasks.worker.process import WorkerProcess
from penstock.testing.proxy import FaultProxy, resp_request
from tests.conftest import FULL
from tests.tasks.conftest import TIMEOUT_S

pytestmark = pytest.mark.service("redis-server")
REQUESTS_MAX = None if FULL else 5


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_worker_that_loses_its_connection_at_any_request_ends_every_task(redis_server, moment):
    tried = 0
    for number in count(1):
        if REQUESTS_MAX is not None and number > REQUESTS_MAX:
            break
        if not is_cut_at(redis_server, moment, number):
            break
        tried += 1
    assert tried


def is_cut_at(redis_server, moment, number):
    """Runs a worker until its queue is empty; whether it had an n-th request, which was cut."""
    app = TaskApp(f"{redis_server.url}?prefix={moment}{number}")
    runs: Counter[int] = Counter()

    @app.task(result_ttl=600, retries=1, backoff=0)
    def work(n: int) -> int:
        runs[n] += 1
        if n == 0 or (n == 1 and runs[n] == 1):
            raise ValueError("broken")
        return n

    pushed = [work.push(n) for n in range(6)]
    proxy = FaultProxy(("127.0.0.1", redis_server.port), resp_request)
    try:
        fault = asyncio.run(asyncio.wait_for(run_worker(app, proxy, moment, number), TIMEOUT_S))
    finally:
        proxy.close()
    # Its messages are deleted and its results are there: a burst may end before the claims of a
    # request whose answer was lost have run out, so another worker does what is left.
    app.run_until_empty()
    assert app.service.execute(Stats("tasks")).messages == 0
    assert [each.get(0) for each in pushed[1:]] == [1, 2, 3, 4, 5]
    assert set(runs) == set(range(6))
    (failed,) = app.run_steps(failed_tasks(["tasks"]))
    assert failed.id == pushed[0].id
    app.close()
    return fault.is_met


async def run_worker(app, proxy, moment, number):
    url = app.url.replace(app.url.partition("?")[0], f"redis://127.0.0.1:{proxy.port}")
    service = await open_async_service(url + "&timeout=5")
    process = WorkerProcess(app, service, WorkerOptions("app", visibility_ms=1_000, burst=True))
    fault = proxy.arm(number, moment, cut=True)
    await process.run()
    await service.close()
    return fault
