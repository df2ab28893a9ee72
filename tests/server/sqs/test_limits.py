"""Rows of the scorecard with their small figures: sizes, counts, names, receipts, fuzzing."""

import http.client
import json
import os
import random
import socket
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.service import ConfigureQueue
from tests.conftest import FULL
from tests.measure import SLACK, memory_bytes
from tests.server.conftest import without_event_lines
from tests.server.probe import probing
from tests.server.sqs.asking import (
    bodies,
    make,
    make_fifo,
    make_pair,
    push,
    receive,
    refused,
    send,
)
from tests.server.sqs.conftest import Local, serve

MIB = 1_048_576


class JsonWire:
    """A connection that sends any JSON, valid or not."""

    def __init__(self, url):
        host, port = url.removeprefix("http://").split(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=60)

    def ask(self, action, body, **headers):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._connection.request(
            "POST", "/", content, {"X-Amz-Target": f"AmazonSQS.{action}", **headers}
        )
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def post(self, body, **headers):
        """Sends a form."""
        self._connection.request("POST", "/", body, headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def close(self):
        self._connection.close()


@pytest.fixture
def wire(plain):
    connection = JsonWire(plain.url)
    yield connection
    connection.close()


def test_a_receive_of_several_messages_returns_at_most_two_mebibytes(plain):
    """Row 20: this limits the time that one answer takes in the event loop."""
    client = plain.client()
    url = make(client, "large")
    for number in range(5):
        client.send_message(QueueUrl=url, MessageBody=str(number) + "x" * (MIB - 1))
    firsts = []
    while messages := client.receive_message(QueueUrl=url, MaxNumberOfMessages=10).get("Messages"):
        firsts.append([message["Body"][0] for message in messages])
    assert firsts == [["0", "1"], ["2", "3"], ["4"]]


def test_large_bodies_cost_no_more_memory_than_their_size():
    """Row 14: 500 bodies of 1 MiB, one that is a byte larger, and batches of 1 MiB in all.

    With the full figures, 10,000 bodies.
    """
    with serve("--store", "memory:") as server:
        client = server.client()
        url = client.create_queue(QueueName="large")["QueueUrl"]
        body = "x" * MIB
        wire = JsonWire(server.url)
        ask = json.dumps({"QueueUrl": url, "MessageBody": body}).encode()
        before_bytes = memory_bytes(server.process.pid)
        for _ in range(10_000 if FULL else 500):
            assert wire.ask("SendMessage", ask)[0] == 200
            status, answer = wire.ask("ReceiveMessage", {"QueueUrl": url})
            assert status == 200
            receipt = json.loads(answer)["Messages"][0]["ReceiptHandle"]
            wire.ask("DeleteMessage", {"QueueUrl": url, "ReceiptHandle": receipt})
        for number in range(20):
            entries = [{"Id": str(n), "MessageBody": "x" * (MIB // 8)} for n in range(8)]
            status, _ = wire.ask("SendMessageBatch", {"QueueUrl": url, "Entries": entries})
            assert status == 200
            entries[number % 8]["MessageBody"] += "x"
            status, answer = wire.ask("SendMessageBatch", {"QueueUrl": url, "Entries": entries})
            assert status == 400
            assert b"BatchRequestTooLong" in answer
        status, answer = wire.ask("SendMessage", {"QueueUrl": url, "MessageBody": body + "x"})
        assert status == 400
        assert b"Message must be shorter than 1048576 bytes." in answer
        grown_bytes = memory_bytes(server.process.pid) - before_bytes
        wire.close()
        client.close()
    assert grown_bytes <= 20 * MIB + 64 * MIB


NAMES = ["../x", "..", ".", "/etc/passwd", "a/b", "nul\x00", "%2e%2e%2f", "ü", "a" * 81, "", "@x"]
NAMES += ["x@us-east-1.111122223333", "a\nb", "a b", "con.fifo.fifo", ".fifo", "\ud7ff", "😀"]


def test_no_queue_name_creates_files_outside_of_the_data_directory(tmp_path):
    """Row 21."""
    data = tmp_path / "inside" / "data"
    with serve("--data", str(data)) as server:
        wire = JsonWire(server.url)
        for name in NAMES:
            status, _ = wire.ask("CreateQueue", {"QueueName": name})
            assert 400 <= status < 500
            fifo = {"FifoQueue": "true"}
            assert 400 <= wire.ask("CreateQueue", {"QueueName": name, "Attributes": fifo})[0] < 500
            for url in (f"{server.url}/000000000000/{name}", name):
                status, _ = wire.ask("SendMessage", {"QueueUrl": url, "MessageBody": "x"})
                assert 400 <= status < 500
            assert 400 <= wire.ask("GetQueueUrl", {"QueueName": name})[0] < 500
        assert wire.ask("ListQueues", {}) == (200, b"{}")
        wire.close()
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]
    assert [path.name for path in data.parent.iterdir()] == ["data"]


def mutations(receipt, seed):
    """Receipts that differ a little from this one."""
    chance = random.Random(seed)
    digits = "0123456789abcdef"
    while True:
        at = chance.randrange(len(receipt))
        kind = chance.randrange(6)
        if kind == 0:
            yield receipt[:at] + chance.choice(digits) + receipt[at + 1 :]
        elif kind == 1:
            yield receipt[:at] + receipt[at + 1 :]
        elif kind == 2:
            yield receipt[:at] + chance.choice(digits) + receipt[at:]
        elif kind == 3:
            yield receipt[:at] + chance.choice("gG\x00ü +/=") + receipt[at + 1 :]
        elif kind == 4:
            yield "".join(chance.choice(digits) for _ in receipt)
        else:
            yield receipt.swapcase()


def test_no_forged_receipt_is_accepted(plain):
    """Row 22: 20,000 forged receipts in batches of ten, or a million, and one of another queue."""
    client = plain.client()
    url = make(client, "receipts")
    send(client, url)
    (message,) = receive(client, url, VisibilityTimeout=43_200)
    receipt = message["ReceiptHandle"]
    wire = JsonWire(plain.url)
    source = mutations(receipt, seed=22)
    for turn in range(100_000 if FULL else 2_000):
        forged = [next(each for each in source if each != receipt) for _ in range(10)]
        entries = [{"Id": str(n), "ReceiptHandle": each} for n, each in enumerate(forged)]
        action = "DeleteMessageBatch"
        if turn % 2:
            action = "ChangeMessageVisibilityBatch"
            entries = [{**entry, "VisibilityTimeout": 0} for entry in entries]
        status, answer = wire.ask(action, {"QueueUrl": url, "Entries": entries})
        assert status == 200
        result = json.loads(answer)
        assert "Successful" not in result
        assert {entry["Code"] for entry in result["Failed"]} == {"ReceiptHandleIsInvalid"}
    wire.close()
    other = make(client, "receipts-other")
    assert refused(client.delete_message, QueueUrl=other, ReceiptHandle=receipt)[0] == (
        "ReceiptHandleIsInvalid"
    )
    shown = client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    assert shown["ApproximateNumberOfMessagesNotVisible"] == "1"


def test_a_receipt_of_another_store_is_refused(plain, query_data):
    """Row 22: a store in memory is another one after a restart."""
    client = plain.client()
    url = make(client, "stores")
    send(client, url)
    (message,) = receive(client, url)
    other = Local(query_data)
    try:
        client_of_other = other.client()
        theirs = make(client_of_other, "stores")
        send(client_of_other, theirs)
        receive(client_of_other, theirs)
        receipt = message["ReceiptHandle"]
        code, _ = refused(client_of_other.delete_message, QueueUrl=theirs, ReceiptHandle=receipt)
        assert code == "ReceiptHandleIsInvalid"
    finally:
        other.close()


VALID = [
    (
        "SendMessage",
        b'{"QueueUrl":"URL","MessageBody":"x","MessageAttributes":{"a":{"DataType":"Number","StringValue":"1"}}}',
    ),
    (
        "SendMessageBatch",
        b'{"QueueUrl":"URL","Entries":[{"Id":"1","MessageBody":"x","DelaySeconds":1}]}',
    ),
    (
        "ReceiveMessage",
        b'{"QueueUrl":"URL","MaxNumberOfMessages":10,"AttributeNames":["All"],"WaitTimeSeconds":0}',
    ),
    ("DeleteMessage", b'{"QueueUrl":"URL","ReceiptHandle":"abcdef"}'),
    (
        "CreateQueue",
        b'{"QueueName":"fuzz","Attributes":{"RedrivePolicy":"{\\"maxReceiveCount\\":1}"},"tags":{"a":"b"}}',
    ),
    ("SetQueueAttributes", b'{"QueueUrl":"URL","Attributes":{"Policy":"{\\"Statement\\":[]}"}}'),
    (
        "AddPermission",
        b'{"QueueUrl":"URL","Label":"l","AWSAccountIds":["111122223333"],"Actions":["*"]}',
    ),
    ("StartMessageMoveTask", b'{"SourceArn":"arn:aws:sqs:us-east-1:000000000000:fuzz"}'),
    ("ListQueues", b'{"QueueNamePrefix":"f","MaxResults":5,"NextToken":"YQ=="}'),
]
TOKENS = [
    b"null",
    b"[]",
    b"{}",
    b"-1",
    b"1e9",
    b'""',
    b'"\\u0000"',
    b"true",
    b"99999999999",
    b"\xff",
    b'"x"',
]


# Replaces the punctuation of JSON by that of a form.
TO_FORM = bytes.maketrans(b',:"[]{}', b"&=.12..")
FUZZ_GROWN_BYTES_MAX = 16 * MIB
FUZZ_LONGEST_MS_MAX = 200 * SLACK


@contextmanager
def fuzzed(record_property):
    """A server process that a probe measures; it must print nothing."""
    with serve("--store", "memory:") as server:
        pid = server.process.pid
        server.client().create_queue(QueueName="fuzzed")
        before_bytes = memory_bytes(pid)
        with probing(server.port, pid) as seen:
            yield server
        grown_bytes = seen.peak_bytes - before_bytes
        record_property("figure", f"{seen.longest_ms:.0f} ms, {grown_bytes / MIB:.1f} MiB")
        assert seen.longest_ms <= FUZZ_LONGEST_MS_MAX
        assert grown_bytes <= FUZZ_GROWN_BYTES_MAX
        server.close()
        assert server.stop() == 0
        assert without_event_lines(server.process.stdout.read().decode()) == ""


def mutated(chance, text):
    """A body with pieces changed, repeated, removed and replaced."""
    body = bytearray(text)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(body))
        kind = chance.randrange(4)
        if kind == 0:
            body[at] = chance.randrange(256)
        elif kind == 1:
            del body[at : at + chance.randrange(1, 20)]
        elif kind == 2:
            body[at:at] = body[at : at + chance.randrange(1, 30)]
        else:
            colon = body.find(b":", at)
            if colon > 0:
                body[colon + 1 : colon + 2] = chance.choice(TOKENS)
        if not body:
            break
    return bytes(body)


def test_mutated_bodies_are_answered_or_refused_and_crash_nothing(record_property):
    """Row 19: bodies of every action, over JSON and as forms."""
    chance = random.Random(19)
    turns = int(os.environ.get("PENSTOCK_FUZZ", "340000" if FULL else "17000"))
    with fuzzed(record_property) as server:
        wire = JsonWire(server.url)
        for turn in range(turns):
            action, text = chance.choice(VALID)
            body = mutated(chance, text.replace(b"URL", b"fuzzed"))
            if turn % 4 == 0:
                # The same as a form: most fields are names without values, some are valid.
                body = b"Action=%s&" % action.encode() + body.translate(TO_FORM)
                status, _ = wire.post(body, **{"X-Amz-Date": "none"})
            else:
                status, _ = wire.ask(action, body)
            assert status == 200 or 400 <= status < 500, (action, body)
        assert wire.ask("ListQueues", {})[0] == 200
        wire.close()


CHUNKS = (
    b"POST / HTTP/1.1\r\nHost: localhost\r\nX-Amz-Target: AmazonSQS.ListQueues\r\n"
    b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    b"1\r\n{\r\n0001;a=b\r\n}\r\n0\r\nX-Trailer: a\r\n\r\n"
)
FORM = (
    b"POST /000000000000/fuzzed?Action=SendMessage HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/x-www-form-urlencoded\r\nX-Amz-Date: none\r\n"
    b"Content-Length: 13\r\nConnection: close\r\n\r\nMessageBody=x"
)


def test_mutated_http_requests_are_answered_or_refused_and_hang_nothing(record_property):
    """Row 19: whole HTTP requests with bytes changed, removed, repeated and sent in two pieces."""
    chance = random.Random(20)
    with fuzzed(record_property) as server:
        answered = 0
        for turn in range(120_000 if FULL else 6_000):
            sent = bytearray(CHUNKS if turn % 2 else FORM)
            for _ in range(chance.randrange(1, 5)):
                at = chance.randrange(len(sent))
                kind = chance.randrange(3)
                if kind == 0:
                    sent[at] = chance.randrange(256)
                elif kind == 1:
                    del sent[at : at + chance.randrange(1, 9)]
                else:
                    sent[at:at] = sent[at : at + chance.randrange(1, 60)]
            with socket.create_connection(("127.0.0.1", server.port), 60) as wire:
                received = b""
                try:
                    cut = chance.randrange(len(sent))
                    wire.sendall(sent[:cut])
                    wire.sendall(sent[cut:])
                    wire.shutdown(socket.SHUT_WR)
                    received = wire.recv(65_536)
                except TimeoutError:
                    pytest.fail(f"the server did not answer {bytes(sent)!r}")
                except OSError:
                    pass  # the server had answered and closed before the second piece
                assert received == b"" or received[9:10] in b"24"
                answered += bool(received)
        assert answered > 1_000


def test_a_long_poll_is_woken_by_everything_that_makes_a_message_visible(plain):
    """A push, the end of a delay, the end of a claim, and a release."""
    from concurrent.futures import ThreadPoolExecutor

    client = plain.client()
    url = make_fifo(client, "wakes.fifo", VisibilityTimeout="30")
    slow = make(client, "wakes-delayed")
    with ThreadPoolExecutor(1) as pool:

        def poll(queue):
            started = pool.submit(lambda: bodies(plain.client(), queue, WaitTimeSeconds=20))
            while not plain.call(lambda: plain.running.engine.has_waiters):
                pass
            return started

        waiting = poll(url)
        push(client, url, "pushed")
        assert waiting.result(60) == ["pushed"]
        waiting = poll(url)
        plain.clock.advance(seconds=30)
        assert waiting.result(60) == ["pushed"]
        plain.clock.advance(seconds=30)
        (message,) = receive(client, url)
        waiting = poll(url)
        held = {"QueueUrl": url, "ReceiptHandle": message["ReceiptHandle"]}
        client.change_message_visibility(**held, VisibilityTimeout=0)
        assert waiting.result(60) == ["pushed"]
        send(client, slow, "delayed", DelaySeconds=5)
        waiting = poll(slow)
        plain.clock.advance(seconds=5)
        assert waiting.result(60) == ["delayed"]
        waiting = poll(slow)
        plain.clock.advance(seconds=20)
        assert waiting.result(60) == []


def test_a_long_poll_at_the_in_flight_limit_waits_until_there_is_room(plain):
    from concurrent.futures import ThreadPoolExecutor

    client = plain.client()
    url = make(client, "crowded")
    narrow = ConfigureQueue("crowded", {"in_flight_max": 1})
    plain.call(plain.running.engine.submit, narrow)
    send(client, url, "first")
    send(client, url, "second")
    (held,) = receive(client, url, VisibilityTimeout=43_200)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: bodies(plain.client(), url, WaitTimeSeconds=20))
        while not plain.call(lambda: plain.running.engine.has_waiters):
            pass
        # A push does not end the wait: there is still no room for one more in flight.
        send(client, url, "third")
        assert plain.call(lambda: plain.running.engine.has_waiters)
        client.delete_message(QueueUrl=url, ReceiptHandle=held["ReceiptHandle"])
        assert waiting.result(60) == ["second"]


def test_a_long_poll_ends_with_nothing_when_its_queue_is_deleted(plain):
    from concurrent.futures import ThreadPoolExecutor

    client = plain.client()
    url = make(client, "deleted")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(receive, plain.client(), url, WaitTimeSeconds=20)
        while not plain.call(lambda: plain.running.engine.has_waiters):
            pass
        client.delete_queue(QueueUrl=url)
        assert waiting.result(60) == []
    refusal = refused(client.receive_message, QueueUrl=url)
    assert refusal[0] == "AWS.SimpleQueueService.NonExistentQueue"


def served(url):
    """Whether a new connection is accepted and answered."""
    connection = JsonWire(url)
    try:
        return connection.ask("ListQueues", {})[0] == 200
    except OSError:
        return False
    finally:
        connection.close()


def test_without_free_descriptors_the_server_still_serves_open_connections():
    """Row 6: clients beyond the limit wait or fail; the others are served."""
    limit = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh"]
    with serve("--store", "memory:", before=limit) as server:
        wire = JsonWire(server.url)
        assert wire.ask("CreateQueue", {"QueueName": "q"})[0] == 200
        others = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
        for _ in range(50):
            assert wire.ask("ListQueues", {})[0] == 200
        for each in others:
            each.close()
        # Until the server has closed these connections, it may refuse new ones.
        assert any(served(server.url) for _ in range(1_000))
        wire.close()
        assert server.stop() == 0


def received_bodies(answer):
    status, content = answer
    messages = json.loads(content).get("Messages", []) if status == 200 else []
    return [each["Body"] for each in messages]


def test_without_free_descriptors_nothing_is_claimed_that_cannot_be_read(tmp_path):
    """Row 6: a message is delivered, or it is not claimed: none becomes a dead letter."""
    arguments = ("--data", str(tmp_path / "data"))
    sent = [f"{number}-{'x' * 500_000}" for number in range(40)]
    with serve(*arguments) as server:
        client = server.client()
        source, _ = make_pair(client, VisibilityTimeout="0")
        for body in sent:
            send(client, source, body)
        server.stop()
    limit = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh"]
    with serve(*arguments, before=limit) as server:
        wire = JsonWire(server.url)
        assert wire.ask("ListQueues", {})[0] == 200
        others = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
        while len(os.listdir(f"/proc/{server.process.pid}/fd")) < 64:
            pass
        wanted = {"QueueUrl": "source", "MaxNumberOfMessages": 10}
        answers = [wire.ask("ReceiveMessage", wanted) for _ in range(15)]
        # Bodies that are not in memory cannot be read.
        assert any(status == 403 for status, _ in answers)
        for each in others:
            each.close()
        assert any(served(server.url) for _ in range(1_000))
        received = [body for answer in answers for body in received_bodies(answer)]
        while len(received) < len(sent):
            more = received_bodies(wire.ask("ReceiveMessage", wanted))
            assert more
            received += more
        assert sorted(received) == sorted(sent)
        wire.close()
        assert server.stop() == 0


def test_a_server_prints_no_part_of_a_message(tmp_path):
    with serve("--data", str(tmp_path / "data")) as server:
        client = server.client()
        url = client.create_queue(QueueName="q")["QueueUrl"]
        client.send_message(QueueUrl=url, MessageBody="a secret")
        client.close()
        server.stop()
        shown = server.process.stdout.read().decode()
    assert "secret" not in shown
    assert without_event_lines(shown) == ""
    assert Path(tmp_path / "data").stat().st_mode & 0o077 == 0
