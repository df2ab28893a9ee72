"""The places of a test without pytest's fixtures: for unittest, and for anybody."""

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
import unittest
from contextlib import closing
from datetime import timedelta

import boto3
import pytest

from penstock.errors import InvalidField
from penstock.testing import advance, assert_delivered_once, await_message, in_process, server
from penstock.testing.places import TestAccount, next_account, own_url
from penstock.testing.serving import shared_url


class ChargesInUnittest(unittest.TestCase):
    """A test case as users of unittest write it."""

    def test_a_message_comes_back_after_its_timeout(self):
        self.enterContext(server())
        sqs = boto3.client("sqs")
        self.addCleanup(sqs.close)
        url = sqs.create_queue(QueueName="orders")["QueueUrl"]
        sqs.send_message(QueueUrl=url, MessageBody="a")
        sqs.receive_message(QueueUrl=url)
        assert_delivered_once("orders")
        advance(seconds=31)
        sqs.receive_message(QueueUrl=url)
        assert await_message("orders").deliveries == 2


def test_what_is_asserted_is_about_the_place_that_was_entered_last():
    with in_process() as outer:
        outer.create("orders")
        with in_process() as inner:
            inner.create("orders")
            inner.push("orders", "inner")
            assert await_message("orders").body == b"inner"
            outer.push("orders", "outer")
            assert await_message("orders", at=outer).body == b"outer"
        assert await_message("orders").body == b"outer"


def test_a_message_of_another_thread_is_awaited():
    with in_process() as queues:
        queues.create("orders")
        go = threading.Event()

        def push():
            go.wait()
            queues.push("orders", "a")

        thread = threading.Thread(target=push)
        thread.start()
        threading.Timer(0.05, go.set).start()
        assert await_message("orders", timeout=60).body == b"a"
        thread.join()


def test_processes_that_share_a_directory_start_one_server(tmp_path):
    started = []

    def start(run_pid):
        listener = socket.create_server(("127.0.0.1", 0))
        started.append((run_pid, listener))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    first = shared_url(tmp_path, 7, start)
    assert shared_url(tmp_path, 7, start) == first
    ((run_pid, listener),) = started
    assert run_pid == 7
    # It was killed: its address leads nowhere.
    listener.close()
    second = shared_url(tmp_path, 7, start)
    assert shared_url(tmp_path, 7, start) == second
    assert len(started) == 2
    started[1][1].close()


def test_the_server_ends_with_the_process_that_it_was_started_for():
    program = """
        from penstock.testing.serving import start_server
        import os
        print(start_server(os.getpid()))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    port = int(done.stdout.strip().rsplit(":", 1)[1])
    until_closed(port)


def until_closed(port):
    give_up_s = time.monotonic() + 60
    while time.monotonic() < give_up_s:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except OSError:
            return
        threading.Event().wait(0.05)
    pytest.fail("the server is still there")


def test_one_process_has_one_server_and_each_account_another_number():
    assert own_url() == own_url()
    assert next_account() != next_account()
    assert "AWS_ENDPOINT_URL" not in os.environ


def test_a_function_that_would_need_more_messages_than_are_shown_says_so():
    with server() as account:
        sqs = boto3.client("sqs")
        url = sqs.create_queue(QueueName="orders")["QueueUrl"]
        entries = [{"Id": str(number), "MessageBody": "a"} for number in range(10)]
        for _ in range(101):
            sqs.send_message_batch(QueueUrl=url, Entries=entries)
        sqs.close()
        with pytest.raises(InvalidField, match="only the first 1000 messages"):
            account.find("orders", lambda message: message.body == b"b", "pushed", 1, 60)


def test_a_request_that_may_have_been_done_is_not_sent_again(monkeypatch):
    monkeypatch.setattr("penstock.testing.places._ANSWER_S_MAX", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        account = TestAccount(f"http://127.0.0.1:{listener.getsockname()[1]}", "111122223333")
        with pytest.raises(TimeoutError):
            account.advance(timedelta(hours=1))
        listener.setblocking(False)
        connection, _ = listener.accept()
        connection.close()
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_request_on_a_connection_that_the_server_has_closed_is_sent_again():
    answer = b'{"broken": []}'
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65_536)
                    connection.sendall(head + answer)

        thread = threading.Thread(target=serve)
        thread.start()
        account = TestAccount(f"http://127.0.0.1:{listener.getsockname()[1]}", "111122223333")
        with closing(account._connection):
            assert account.broken() == []
            assert account.broken() == []
        thread.join()
