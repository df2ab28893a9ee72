"""The fixtures of pytest_penstock, as a project that has them uses them."""

import os
import re
import subprocess
import sys
import textwrap
from typing import Any

import boto3
import pytest

import penstock
from penstock.tasks import TaskApp
from penstock.testing import (
    advance,
    assert_delivered_once,
    await_message,
    expect_none,
    wait_until_empty,
)

HOURS_12 = "43200"


@pytest.fixture
def orders(penstock_sqs):
    attributes = {"VisibilityTimeout": HOURS_12}
    return penstock_sqs.create_queue(QueueName="orders", Attributes=attributes)["QueueUrl"]


def test_a_message_comes_back_when_the_clock_was_advanced(penstock_sqs, orders, penstock_clock):
    penstock_sqs.send_message(QueueUrl=orders, MessageBody="a")
    assert penstock_sqs.receive_message(QueueUrl=orders)["Messages"]
    before = penstock_clock.now
    penstock_clock.advance(hours=12)
    assert (penstock_clock.now - before).total_seconds() == 12 * 3_600
    assert penstock_sqs.receive_message(QueueUrl=orders)["Messages"]


@pytest.mark.parametrize("number", [1, 2])
def test_each_test_has_an_account_without_the_queues_of_others(penstock_sqs, number):
    assert penstock_sqs.list_queues().get("QueueUrls") is None
    penstock_sqs.create_queue(QueueName="left-behind")


def test_clients_that_the_code_under_test_makes_reach_the_account(
    penstock_endpoint, penstock_server
):
    sqs = boto3.client("sqs")
    url = sqs.create_queue(QueueName="orders")["QueueUrl"]
    assert url == f"{penstock_endpoint}/{penstock_server.account}/orders"
    sqs.close()


def test_the_environment_is_what_it_was_before(request, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mine")
    monkeypatch.setenv("AWS_PROFILE", "work")
    before = dict(os.environ)
    account = request.getfixturevalue("penstock_server")
    from penstock.testing.places import in_environment

    with in_environment(account):
        assert os.environ["AWS_ACCESS_KEY_ID"] == account.account
        assert "AWS_PROFILE" not in os.environ
    assert dict(os.environ) == before


def test_queues_in_this_process_follow_the_same_clock(penstock_queues, penstock_clock):
    penstock_queues.create("orders", visibility_timeout=43_200)
    penstock_queues.push("orders", "a")
    assert penstock_queues.pull("orders").body == b"a"
    assert penstock_queues.pull("orders") is None
    penstock_clock.advance(hours=12)
    assert penstock_queues.pull("orders").body == b"a"


def test_tasks_run_until_none_is_left_and_retries_take_no_time(penstock_tasks, penstock_clock):
    ran = []

    @penstock_tasks.app.task(retries=3, backoff=3_600)
    def charge(order):
        ran.append((order, penstock_clock.now))
        if len(ran) < 3:
            raise ValueError("not yet")

    charge.push(7)
    assert penstock_tasks.run() == 3
    assert (ran[2][1] - ran[0][1]).total_seconds() > 60


def test_an_app_of_the_code_under_test_uses_the_store_of_the_test_for_its_time(request):
    app = TaskApp("redis://127.0.0.1:1/0")
    ran = []

    @app.task
    def note(text):
        ran.append(text)

    tasks = request.getfixturevalue("penstock_tasks")
    tasks.use(app)
    note.push("a")
    assert (tasks.run(), ran) == (1, ["a"])
    tasks.close()
    with pytest.raises(penstock.errors.BackendLost):
        note.push("b")


@pytest.mark.parametrize("place", ["penstock_server", "penstock_queues"])
def test_messages_are_awaited_expected_and_counted_in_both_places(request, place):
    request.getfixturevalue(place)
    queues = Orders(request, place)
    with pytest.raises(AssertionError, match="there is no queue orders"):
        await_message("orders", timeout=0)
    queues.create()
    expect_none("orders")
    queues.push('{"id": 7}')
    with pytest.raises(AssertionError, match="1 messages were pushed to orders"):
        expect_none("orders", {"id": 7})
    expect_none("orders", {"id": 8})
    assert await_message("orders", lambda message: b"7" in message.body).body == b'{"id": 7}'
    with pytest.raises(AssertionError, match="no message that matches 'x' was pushed to orders"):
        await_message("orders", "x", timeout=0)
    with pytest.raises(AssertionError, match="Never delivered"):
        assert_delivered_once("orders")
    receipt = queues.pull()
    assert_delivered_once("orders", {"id": 7})
    with pytest.raises(AssertionError, match="orders is not empty"):
        wait_until_empty("orders", timeout=0)
    queues.delete(receipt)
    wait_until_empty("orders")
    assert await_message("orders", {"id": 7}, until="deleted").is_deleted
    queues.push("b")
    queues.pull()
    advance(hours=12)
    queues.pull()
    with pytest.raises(AssertionError, match="1 of 2 messages of orders were not delivered once"):
        assert_delivered_once("orders")


class Orders:
    """The queue orders, over the SQS API or in this process."""

    def __init__(self, request, place):
        self._sqs: Any = None
        self._queues: Any = None
        if place == "penstock_server":
            self._sqs = request.getfixturevalue("penstock_sqs")
        else:
            self._queues = request.getfixturevalue(place)

    def create(self):
        if self._sqs is None:
            self._queues.create("orders")
        else:
            self._url = self._sqs.create_queue(QueueName="orders")["QueueUrl"]

    def push(self, body):
        if self._sqs is None:
            self._queues.push("orders", body)
        else:
            self._sqs.send_message(QueueUrl=self._url, MessageBody=body)

    def pull(self):
        if self._sqs is None:
            return self._queues.pull("orders")
        return self._sqs.receive_message(QueueUrl=self._url)["Messages"][0]["ReceiptHandle"]

    def delete(self, receipt):
        if self._sqs is None:
            self._queues.delete(receipt)
        else:
            self._sqs.delete_message(QueueUrl=self._url, ReceiptHandle=receipt)


@pytest.mark.penstock(clock="auto")
def test_a_test_that_is_marked_has_a_clock_that_moves_when_somebody_waits(penstock_sqs, orders):
    penstock_sqs.send_message(QueueUrl=orders, MessageBody="later", DelaySeconds=15)
    found = penstock_sqs.receive_message(QueueUrl=orders, WaitTimeSeconds=20)
    assert found["Messages"][0]["Body"] == "later"


@pytest.mark.penstock("auto")
def test_the_mark_takes_the_clock_without_its_name(penstock_queues):
    assert penstock_queues.movable.mode == "auto"


def test_a_clock_without_any_queues_says_which_fixtures_there_are(penstock_clock):
    with pytest.raises(RuntimeError, match="penstock_server"):
        penstock_clock.advance(hours=1)


def test_an_assertion_outside_of_every_place_says_how_to_enter_one():
    with pytest.raises(RuntimeError, match=r"penstock\.testing\.server"):
        await_message("orders")


FAILING = """
    def test_it(penstock_sqs, penstock_clock):
        url = penstock_sqs.create_queue(QueueName="orders")["QueueUrl"]
        penstock_sqs.send_message(QueueUrl=url, MessageBody="hello")
        penstock_sqs.receive_message(QueueUrl=url)
        penstock_clock.advance(seconds=31)
        assert penstock_sqs.receive_message(QueueUrl=url).get("Messages") is None
"""
SHARED = """
    import os
    import pytest

    @pytest.mark.parametrize("number", range(6))
    def test_it(penstock_sqs, penstock_server, number):
        assert penstock_sqs.list_queues().get("QueueUrls") is None
        penstock_sqs.create_queue(QueueName="orders")
        worker = os.environ["PYTEST_XDIST_WORKER"]
        print(f"<{worker} {penstock_server.url} {penstock_server.account}>")
"""


def run_pytest(path, text, *arguments):
    """The output of a run of pytest in a project of its own that has the plugin."""
    (path / "test_it.py").write_text(textwrap.dedent(text))
    (path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "pytest_penstock", *arguments]
    done = subprocess.run(
        command, cwd=path, capture_output=True, text=True, timeout=100, check=False
    )
    return done.stdout + done.stderr


def test_the_report_of_a_failed_test_tells_what_happened_to_each_message(tmp_path):
    output = run_pytest(tmp_path, FAILING)
    assert "1 failed" in output
    assert "Penstock: what happened to each message" in output
    assert re.search(r"'hello' \(\S+\): Pushed to orders at .*its claim ran out at", output)


def test_the_processes_of_a_parallel_run_share_a_server_and_no_account(tmp_path):
    output = run_pytest(tmp_path, SHARED, "-n", "2", "-rP")
    assert "6 passed" in output
    found = re.findall(r"<(gw\d) (\S+) (\d{12})>", output)
    assert len({worker for worker, _, _ in found}) == 2
    assert len({url for _, url, _ in found}) == 1
    assert len({account for _, _, account in found}) == 6


def test_a_run_that_does_not_use_the_fixtures_does_not_import_penstock(tmp_path):
    text = """
        import sys

        def test_it():
            assert "pytest_penstock" in sys.modules
            assert "penstock" not in sys.modules
            assert "boto3" not in sys.modules
    """
    assert "1 passed" in run_pytest(tmp_path, text)
