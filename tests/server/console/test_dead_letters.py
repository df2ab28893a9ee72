"""Dead letters in groups, and tasks: what the console reads and does, and a page of them."""

import json

import pytest

from penstock.tasks import TaskApp
from tests.server.console.pages import EVIL, click, fill, show, until


def letters(console, *pushes):
    """Makes dead letters of orders: each is pushed, pulled once and released."""
    console.queues.create("orders", dead_letter="orders-dead", max_receives=1)
    ids = [console.queues.push("orders", body, attributes=given).id for body, given in pushes]
    for claim in console.queues.pull_many("orders", len(pushes)):
        console.queues.release(claim)
    return ids


PUSHES = [
    (json.dumps({"order": 1, "error": "SMTP 550"}).encode(), {}),
    (json.dumps({"order": 2, "error": "SMTP 550"}).encode(), {}),
    (json.dumps({"order": 3}).encode(), {"Error": "no such user"}),
    (b"plain", {}),
    (b"\xff\xfe", {}),
]


def test_dead_letters_are_grouped_by_source_error_and_shape(console):
    ids = letters(console, *PUSHES)
    status, shown = console.read("dead-letters?queue=orders-dead")
    assert (status, shown["read"], shown["is_done"]) == (200, 5, True)
    found = {
        (each["source"], each["error"], each["shape"]): each["ids"] for each in shown["groups"]
    }
    assert found == {
        ("orders", "SMTP 550", "{error, order}"): ids[:2],
        ("orders", "no such user", "{order}"): ids[2:3],
        ("orders", "", "text"): ids[3:4],
        ("orders", "", "binary"): ids[4:],
    }
    assert console.queues.stats("orders-dead").counts.pulled == 0


def test_a_server_that_masks_groups_by_source_only(start_console):
    server = start_console(mask_messages=True)
    letters(server, *PUSHES)
    (group,) = server.read("dead-letters?queue=orders-dead")[1]["groups"]
    assert (group["source"], group["error"], len(group["ids"])) == ("orders", "", 5)


@pytest.mark.service("chromium")
@pytest.mark.service("chromium-driver")
def test_a_group_is_opened_and_redriven_in_the_browser(console, browser):
    letters(console, *PUSHES, (EVIL.encode(), {"error": EVIL}))
    browser.visit("about:blank")
    browser.visit(f"{console.url}/console#/dead")
    until(browser, "document.querySelectorAll('.groups details').length === 5")
    assert browser.texts(".side b") == ["6"]
    browser.run("document.querySelector('.groups summary').click()")
    until(browser, "document.querySelectorAll('.inside tbody tr').length === 2")
    browser.run("document.querySelector('.groups input').click()")
    until(browser, "document.querySelector('.acts span').textContent === '2 selected'")
    browser.run("document.querySelector('.acts .primary').click()")
    until(browser, "document.querySelector('.side b').textContent === '4'")
    assert console.queues.stats("orders").visible == 2
    assert EVIL in browser.texts(".groups .error")
    assert browser.run("return document.title") != "run"


@pytest.mark.service("chromium")
@pytest.mark.service("chromium-driver")
def test_what_a_filter_leaves_is_deleted_and_a_letter_is_edited_and_sent_again(page, console):
    letters(console, *PUSHES)
    show(page, console, "#/dead")
    until(page, "document.querySelectorAll('.groups details').length === 4")
    fill(page, ".bench input[type=search]", "smtp")
    page.run("document.querySelector('.pick-all input').click()")
    until(page, "document.querySelector('.acts span').textContent === '2 selected'")
    page.run("document.querySelector('.acts .danger').click()")
    until(page, "document.querySelector('dialog[open]')")
    page.run("document.querySelector('dialog[open] .danger').click()")
    until(page, "document.querySelector('.side b').textContent === '3'")
    fill(page, ".bench input[type=search]", "no such user")
    page.run("document.querySelector('.groups summary').click()")
    until(page, "document.querySelector('.c-do button')")
    click(page, "Edit and send")
    fill(page, "dialog textarea", '{"order": 4}')
    page.run("document.querySelector('dialog form').requestSubmit()")
    until(page, "document.querySelector('.toast')?.textContent === 'The message is sent.'")
    (sent,) = console.queues.peek("orders")
    assert (sent.body, sent.attributes) == (b'{"order": 4}', {"Error": "no such user"})
    assert console.queues.stats("orders-dead").counts.pulled <= 2


@pytest.fixture
def send(console):
    """A task of an app with a schedule, on the store of the console."""
    app = TaskApp(f"file:{console._path}", name="shop", retries=0)

    @app.task()
    def send(address: str) -> None:
        raise ConnectionError(f"SMTP 550: {address}")

    app.schedule("nightly", 3_600, send.prepare("a@example.com"))
    yield send
    app.close()


def fail_one(console):
    """A task that failed for the last time, as a worker leaves it."""
    failed = json.dumps(
        {
            "task": "send",
            "args": {"address": "x"},
            "id": "the-failed-one",
            "failures": 1,
            "failure": {"error": "ConnectionError: 550", "traceback": "Traceback …", "at_ms": 5},
        }
    )
    console.queues.create("shop.failed")
    console.queues.push("shop.failed", failed.encode())


def test_tasks_are_counted_retried_and_cancelled(console, send):
    send.push("waits@example.com")
    fail_one(console)
    notes = {".fired": "3600000", ".next": "7200000", ".when": "every 3600 s", ".task": "send"}
    console.queues.create("shop.schedule.nightly", annotations=notes)
    console.queues.create("plain")
    console.queues.push("plain", b"not a task")
    status, shown = console.read("tasks")
    assert (status, shown["queues"]) == (200, ["shop"])
    (function,) = shown["functions"]
    assert (function["task"], function["waiting"], function["failed"]) == ("send", 1, 1)
    (failure,) = shown["failures"]
    assert (failure["id"], failure["error"]) == ("the-failed-one", "ConnectionError: 550")
    assert failure["traceback"] == "Traceback …"
    (schedule,) = shown["schedules"]
    assert (schedule["name"], schedule["next_ms"], schedule["task"]) == (
        "nightly",
        7_200_000,
        "send",
    )
    given = {"queue": "shop", "ids": ["the-failed-one"]}
    assert console.change("retry-tasks", given)[2] == {"count": 1}
    assert console.queues.stats("shop").visible == 2
    assert console.change("cancel-task", {"id": "the-failed-one"})[0] == 200
    assert [each.body for each in console.queues.peek("shop.cancelled")] == [b"the-failed-one"]
    assert console.change("cancel-task", {"id": 5})[0] == 400


@pytest.mark.service("chromium")
@pytest.mark.service("chromium-driver")
def test_a_failed_task_is_read_and_retried_and_a_waiting_one_cancelled(page, console, send):
    send.push("waits@example.com")
    fail_one(console)
    show(page, console, "#/tasks")
    until(page, "document.querySelector('.failures summary')")
    page.press("j", "j", "Enter")
    assert page.texts(".failures .body") == ["Traceback …"]
    click(page, "Retry")
    until(page, "!document.querySelector('.failures summary')")
    assert console.queues.stats("shop").visible == 2
    click(page, "Cancel")
    until(
        page,
        "[...document.querySelectorAll('.toast')].some((each) => "
        "each.textContent.startsWith('Cancelled'))",
    )
    assert len(console.queues.peek("shop.cancelled")) == 1


def test_a_server_that_is_no_node_has_no_cluster(console):
    assert console.read("cluster")[0] == 404
    assert console.read("session")[1]["has_cluster"] is False
