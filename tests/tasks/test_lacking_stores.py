"""Tasks on a store that cannot do everything: Amazon SQS, here our own endpoint of it."""

import pytest

from penstock.errors import QueueNotFound
from penstock.service import Stats
from penstock.tasks import TaskError
from tests.server.sqs.conftest import serve
from tests.tasks.conftest import until

SOURCE = """
    @app.task(result_ttl=60, retries=1, backoff=0.01)
    def work(name: str) -> str:
        note(f"{name} {current().attempt}")
        if name == "bad":
            raise ValueError("no")
        return name

    app.schedule("pulse", 1, work.prepare("scheduled"))
"""


@pytest.fixture(scope="module")
def endpoint():
    with serve("--store", "memory:") as server:
        yield server


@pytest.fixture
def sqs_url(endpoint):
    return f"sqs://us-east-1?endpoint={endpoint.url}"


def messages(app, queue):
    try:
        return app.service.execute(Stats(queue)).messages
    except QueueNotFound:
        return 0


def test_tasks_run_on_a_store_without_results_and_schedules_which_the_worker_reports(
    make_shop, sqs_url
):
    shop = make_shop(sqs_url, SOURCE)
    shop.start("--visibility-timeout", "5s")
    module = shop.app()
    good = module.work.push("good")
    module.work.push("bad")
    until(lambda: {"good 1", "bad 1", "bad 2"} <= shop.names())
    # Names of Amazon SQS have no dots.
    until(lambda: messages(module.app, "tasks-failed") == 1)
    until(lambda: messages(module.app, "tasks") == 0)
    with pytest.raises(TaskError, match=r"work: this store keeps no results: .*SQS"):
        good.get(1)
    assert shop.output.read_text().count("schedules are not run: this store has no dedup ids") == 1
    assert shop.names() == {"good 1", "bad 1", "bad 2"}
    code, out, _ = shop.run("tasks", "list", "shop:app", "--json")
    assert (code, out.count('"failed":1}')) == (0, 1)
    assert shop.run("tasks", "retry", "shop:app", "--all")[0] == 0
    until(lambda: shop.noted("bad 1") == 2)
    module.app.close()


def test_limits_on_a_store_that_cannot_hold_tokens_are_refused_by_the_worker(make_shop, sqs_url):
    shop = make_shop(
        sqs_url,
        """
        @app.task(rate="5/s", concurrency=2)
        def work() -> None:
            note("ran")
        """,
    )
    code, out, err = shop.run("worker", "shop:app")
    assert (code, out) == (3, "")
    assert "task 'work': its rate or concurrency cannot be kept on this store: " in err
    assert "SQS" in err
    # The line before it may say that the store has not answered yet.
    assert err.splitlines()[-1].startswith("penstock: task 'work': ")
    assert err.count("penstock: ") == 1
    assert shop.names() == set()
