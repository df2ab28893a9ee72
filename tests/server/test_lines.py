"""A server's lines on stderr: each start, stop, refused and slow request, and no secrets."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
from botocore.exceptions import ClientError

from penstock.server.lines import LINES_PER_S, ServerLines
from tests.server.conftest import until
from tests.server.sqs.conftest import PENSTOCK, ServeProcess, clean_environment

KEY, SECRET = "AKIAEXAMPLE", "a-secret-of-some-length"
INSTANT = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


class Served:
    """A server whose lines are read as they come."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [PENSTOCK, "serve", "--port", "0", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(),
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        assert self.process.stderr is not None
        self.lines += iter(self.process.stderr.readline, "")

    def line(self, event, number=0):
        """The line of an event that came, waiting for it."""

        def found():
            # In both forms: the event of a line of text follows its instant.
            matching = [each for each in self.lines if re.search(rf'(Z |": ")({event})[" ]', each)]
            return matching[number] if len(matching) > number else None

        return until(found)

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return "".join(self.lines)


@contextmanager
def served(*arguments):
    server = Served(*arguments)
    try:
        url = re.search(r"http://[\d.:]+", server.line("started"))
        assert url is not None
        found = ServeProcess(server.process, url[0], "")
        try:
            yield server, found
        finally:
            found.close()
    finally:
        server.stop()


def fields_of(line):
    """The fields of a line of text."""
    words = re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)', line)
    return {name: json.loads(text) if text[0] == '"' else text for name, text in words}


def test_a_start_and_a_stop_are_a_line_each(tmp_path):
    with served("--data", str(tmp_path / "data")) as (server, found):
        started = server.line("started")
        assert re.match(rf"penstock: {INSTANT} started version=", started)
        fields = fields_of(started)
        assert fields["url"] == found.url
        assert fields["store"] == f"file:{tmp_path}/data"
        assert fields["pid"] == str(found.process.pid)
        assert server.stop().count("\n") == 3
        assert fields_of(server.line("stopping"))["reason"] == "signal"
        assert fields_of(server.line("stopped")) == {"pid": str(found.process.pid)}


def test_json_lines_have_the_same_fields_and_stdout_has_none():
    with served("--store", "memory:", "--log-format", "json") as (server, found):
        with pytest.raises(ClientError):
            found.client().get_queue_url(QueueName="absent")
        line = json.loads(server.line("request-refused"))
        text = server.stop()
    lines = [json.loads(each) for each in text.splitlines()]
    assert [each["event"] for each in lines] == [
        "started",
        "request-refused",
        "stopping",
        "stopped",
    ]
    assert all(re.fullmatch(INSTANT, each["at"]) for each in lines)
    assert (line["status"], line["action"], line["code"]) == (
        400,
        "GetQueueUrl",
        "QueueDoesNotExist",
    )
    assert (line["method"], line["path"]) == ("POST", "/")
    assert line["peer"].startswith("127.0.0.1:")
    assert line["agent"].startswith("Boto3/")


def test_warnings_of_the_journal_are_json_lines_too(tmp_path):
    path = tmp_path / "data"
    with served("--data", str(path)) as (_, found):
        sqs = found.client()
        url = sqs.create_queue(QueueName="orders")["QueueUrl"]
        sqs.send_message(QueueUrl=url, MessageBody="x" * 1_000)
    (file,) = (path / "journal").glob("*0.seg")
    content = bytearray(file.read_bytes())
    content[4_096 + 700] ^= 1
    file.write_bytes(content)
    with served("--data", str(path), "--log-format", "json") as (server, _):
        message = json.loads(server.line("message"))
    assert message["who"] == "penstock.journal"
    assert "the journal is damaged" in message["text"]


def test_a_refused_signature_has_a_line_of_its_own():
    with served("--store", "memory:", "--key", f"{KEY}:{SECRET}") as (server, found):
        wrong = {"aws_access_key_id": KEY, "aws_secret_access_key": "another-secret-of-it"}
        with pytest.raises(ClientError):
            found.client(**wrong).list_queues()
        fields = fields_of(server.line("signature-refused"))
        text = server.stop()
    assert (fields["status"], fields["code"]) == ("403", "InvalidSignatureException")
    assert "request-refused" not in text


def test_no_line_has_a_body_a_receipt_or_a_key():
    with served(
        *("--store", "memory:", "--key", f"{KEY}:{SECRET}", "--slow-request", "0.000001")
    ) as (server, found):
        sqs = found.client(aws_access_key_id=KEY, aws_secret_access_key=SECRET)
        url = sqs.create_queue(QueueName="orders")["QueueUrl"]
        sqs.send_message(QueueUrl=url, MessageBody="confidential")
        receipt = sqs.receive_message(QueueUrl=url)["Messages"][0]["ReceiptHandle"]
        with pytest.raises(ClientError):
            sqs.change_message_visibility(
                QueueUrl=url, ReceiptHandle=receipt + "x", VisibilityTimeout=99_999
            )
        with pytest.raises(ClientError):
            sqs.delete_message(QueueUrl=url, ReceiptHandle="made-up-receipt")
        query = "Action=SendMessage&MessageBody=confidential"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{found.url}/?{query}")
        refused.value.close()
        server.line("request-refused", 1)
        text = server.stop()
    assert text.count("request-slow") >= 3
    for secret in ("confidential", receipt, "made-up", KEY, SECRET):
        assert secret not in text


def test_slow_requests_of_every_account_of_a_server_for_tests_have_lines():
    with served("--clock", "manual", "--slow-request", "0.000001") as (server, found):
        found.client(aws_access_key_id="111122223333").create_queue(QueueName="orders")
        assert fields_of(server.line("request-slow"))["action"] == "CreateQueue"


def test_a_slow_request_has_a_line_and_a_long_poll_is_not_slow():
    with served("--store", "memory:", "--slow-request", "0.5") as (server, found):
        sqs = found.client()
        url = sqs.create_queue(QueueName="orders")["QueueUrl"]
        assert "Messages" not in sqs.receive_message(QueueUrl=url, WaitTimeSeconds=1)
        assert "request-slow" not in server.stop()


def test_what_a_client_sends_cannot_forge_a_line_or_a_field():
    hostile = "x\x1b[2J event=stopped\u2028status=200" + "a" * 5_000
    with served("--store", "memory:") as (server, found):
        with socket.create_connection(("127.0.0.1", found.port)) as link:
            agent = hostile.encode()
            link.sendall(
                b"GET /a%0Ab HTTP/1.1\r\nHost: localhost\r\nUser-Agent: " + agent + b"\r\n\r\n"
            )
            link.recv(65_536)
        line = server.line("request-refused")
        text = server.stop()
    assert len(line) < 800
    assert line.isprintable() or line[:-1].isprintable()
    assert text.count("\n") == 4
    assert fields_of(line)["status"] == "400" or fields_of(line)["status"] == "403"


def test_bytes_that_are_no_request_have_a_line():
    with served("--store", "memory:") as (server, found):
        with socket.create_connection(("127.0.0.1", found.port)) as link:
            link.sendall(b"GARBAGE\r\n\r\n")
            assert link.recv(65_536).startswith(b"HTTP/1.1 400")
        assert fields_of(server.line("request-refused"))["status"] == "400"


def test_a_flood_of_refusals_is_counted_and_not_written(capsys):
    now = [100.0]
    lines = ServerLines(lambda: now[0])
    for _ in range(1_000):
        lines.tell("request-refused", status=400)
    lines.tell("request-slow", ms=1)
    now[0] += 1
    lines.tell("request-refused", status=400)
    text = capsys.readouterr().err
    assert text.count("request-refused") == LINES_PER_S + 1
    assert text.count("request-slow") == 1
    assert text.splitlines()[-1].endswith(f"status=400 left_out={1_000 - LINES_PER_S}")


def test_a_reader_of_the_lines_that_is_stuck_does_not_stop_the_server(monkeypatch):
    read_fd, write_fd = os.pipe()
    with os.fdopen(write_fd, "w") as stuck, os.fdopen(read_fd):
        monkeypatch.setattr(sys, "stderr", stuck)
        now = [0.0]
        lines = ServerLines(lambda: now[0])
        for second in range(1_000):
            now[0] = float(second)
            lines.tell("request-refused", reason="a" * 150)
        # It returned: what the pipe had no room for was left out.
        assert lines._left_out["request-refused"] > 100
        os.set_blocking(read_fd, False)
        while len(os.read(read_fd, 65_536)) == 65_536:
            pass


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--log-format", "xml"), "log_format: 'xml' is none of text, json"),
        (("--slow-request", "0"), "slow_request: expected more than 0"),
        (("--slow-request", "x"), "'x' is not a duration"),
    ],
)
def test_a_wrong_setting_of_the_lines_is_one_error(arguments, complaint):
    done = subprocess.run(
        [PENSTOCK, "serve", "--store", "memory:", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=clean_environment(),
    )
    assert done.returncode in (2, 3)
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1
