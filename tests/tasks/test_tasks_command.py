"""`penstock tasks …` on a store that other processes use."""

import json

import pytest

import penstock
from tests.tasks.conftest import TIMEOUT_S, until

SOURCE = """
    @app.task(retries=0, queue="mail", result_ttl=600, timeout=30, rate="100/s")
    def send(address: str) -> str:
        if not (SEEN / "repaired").exists():
            raise ConnectionError(f"no way to {address}\\x1b[31m")
        return "sent"

    @app.task(priority=5, unique=True)
    def other() -> None: ...

    app.schedule("nightly", "0 3 * * *", other, timezone="Europe/Berlin")
"""


@pytest.fixture
def shop(make_shop, file_url):
    return make_shop(file_url, SOURCE)


def results(out):
    return [json.loads(line) for line in out.splitlines()]


def test_failed_tasks_are_listed_inspected_and_retried(shop):
    module = shop.app()
    pushed = [module.send.push(name) for name in ("anna", "ben")]
    assert shop.run("tasks", "failed", "shop:app")[0] == 1
    code, out, _ = shop.run("tasks", "inspect", "shop:app", pushed[0].id)
    assert code == 0
    assert "state      waiting" in out
    assert '{"address":"anna"}' in out
    shop.start()
    until(lambda: all(each.peek() for each in pushed))
    code, out, _ = shop.run("tasks", "failed", "shop:app")
    assert code == 0
    assert "ConnectionError: no way to anna" in out
    assert "\x1b" not in out
    code, out, _ = shop.run("tasks", "failed", "shop:app", "--json", "--queue", "mail")
    assert {each["id"] for each in results(out)} == {each.id for each in pushed}
    assert "raise ConnectionError" in results(out)[0]["traceback"]
    code, out, _ = shop.run("tasks", "inspect", "shop:app", pushed[0].id)
    assert "state      failed" in out
    assert "raise ConnectionError" in out

    (shop.seen / "repaired").touch()
    code, out, err = shop.run("tasks", "retry", "shop:app", pushed[0].id, "unknown")
    assert code == 2
    assert f"retried {pushed[0].id}" in out
    assert "no failed task has the id unknown" in err
    until(lambda: pushed[0].peek().state == "done")
    code, out, _ = shop.run("tasks", "inspect", "shop:app", pushed[0].id, "--json")
    assert (results(out)[0]["state"], results(out)[0]["result"]) == ("done", "sent")
    code, out, _ = shop.run("tasks", "retry", "shop:app", "--all", "--json")
    assert results(out) == [{"id": pushed[1].id, "retried": True}]
    until(lambda: pushed[1].peek().state == "done")
    assert pushed[1].get(TIMEOUT_S) == "sent"
    assert shop.run("tasks", "retry", "shop:app", "--all")[0] == 1
    assert shop.run("tasks", "inspect", "shop:app", "unknown")[0] == 1
    module.app.close()


def test_list_shows_tasks_queues_and_schedules(shop):
    module = shop.app()
    module.send.push("anna")
    module.send.push_in(60, "ben")
    code, out, _ = shop.run("tasks", "list", "shop:app")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert ["mail", "1", "1", "0", "0"] in lines
    assert "send   mail   retries 0, timeout 30s, result_ttl 10m, rate 100/1s" in out
    assert "other  tasks  retries 3, priority 5, unique" in out
    assert "nightly   other  0 3 * * * Europe/Berlin  20" in out
    shown = results(shop.run("tasks", "list", "shop:app", "--json")[1])
    assert [each["queue"] for each in shown if "waiting" in each] == ["mail", "tasks"]
    assert shown[-1]["schedule"] == "nightly"
    module.app.close()


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (["failed", "nowhere:app"], 3, "there is no module 'nowhere'"),
        (["retry", "shop:app"], 2, "give the ids of failed tasks, or --all for all of them"),
        (["cancel", "shop:app", ""], 3, "id: expected 1 to 128 printable characters"),
        (
            ["list", "shop:app", "--url", "memory:"],
            3,
            "url: 'memory:' is a store within one process",
        ),
        (["jump", "shop:app"], 2, "jump is none of list, failed, retry, cancel, inspect"),
        (["inspect", "shop:app", "unknown"], 1, "has the id unknown, and no result is kept for it"),
        (["retry", "shop:app", "unknown"], 2, "no failed task has the id unknown"),
        (["failed", "shop:app"], 1, "has failed for the last time"),
        (["failed", "shop:app", "--queue", "no queue!"], 3, "'no queue!' is not a queue name"),
    ],
)
def test_wrong_arguments_are_an_error_of_one_line(shop, words, code, complaint):
    # A command that looks at tasks makes no store.
    penstock.connect(shop.url).close()
    ended, out, err = shop.run("tasks", *words)
    assert (ended, out, len(err.splitlines())) == (code, "", 1)
    assert complaint in err
