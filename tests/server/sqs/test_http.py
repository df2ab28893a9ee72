"""The HTTP server with arbitrary input: limits, smuggling, order of requests, pipelining."""

import asyncio
import json
import re
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from hashlib import md5

import pytest

from penstock.backends.engine.loop import LoopEngine
from penstock.server import http
from penstock.server.sqs import messages
from penstock.service import CreateQueue, Peek, Push
from tests.measure import SLACK
from tests.server.conftest import send_one_peek, until, without_event_lines
from tests.server.sqs.asking import make
from tests.server.sqs.conftest import Local

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 60)


def exchange(server, *pieces):
    """Everything that the server sends until it closes the connection."""
    with connect(server) as wire:
        for piece in pieces:
            wire.sendall(piece)
        received = b""
        while piece := wire.recv(65_536):
            received += piece
        return received


def post(body, *headers, target="AmazonSQS.ListQueues", close=True):
    lines = [
        "POST / HTTP/1.1",
        "Host: localhost",
        f"X-Amz-Target: {target}",
        f"Content-Length: {len(body)}",
        *(["Connection: close"] if close else []),
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


CHUNKED = b"Transfer-Encoding: chunked\r\n"


def chunked(rest):
    head = b"POST / HTTP/1.1\r\nHost: x\r\nX-Amz-Target: AmazonSQS.ListQueues\r\n" + CHUNKED
    return head + b"Connection: close\r\n\r\n" + rest


SMUGGLING = {
    "length and chunks": b"Content-Length: 3\r\n" + CHUNKED,
    "chunks and length": CHUNKED + b"Content-Length: 3\r\n",
    "two lengths": b"Content-Length: 3\r\nContent-Length: 3\r\n",
    "two different lengths": b"Content-Length: 3\r\nContent-Length: 4\r\n",
    "a list of lengths": b"Content-Length: 3, 3\r\n",
    "a signed length": b"Content-Length: +3\r\n",
    "a negative length": b"Content-Length: -3\r\n",
    "a hexadecimal length": b"Content-Length: 0x3\r\n",
    "a length that is too large": b"Content-Length: 99999999999999999999999\r\n",
    "a length of many zeros": b"Content-Length: " + b"0" * 5_000 + b"3\r\n",
    "an empty length": b"Content-Length: \r\n",
    "an unknown encoding": b"Transfer-Encoding: xchunked\r\n",
    "identity": b"Transfer-Encoding: identity\r\n",
    "gzip and chunks": b"Transfer-Encoding: gzip, chunked\r\n",
    "chunks twice": CHUNKED + CHUNKED,
    "chunks with a space": b"Transfer-Encoding : chunked\r\n",
    "a folded encoding": b"Transfer-Encoding:\r\n chunked\r\n",
    "a bare line feed": b"A: b\nContent-Length: 3\r\n",
    "a bare return": b"A: b\rContent-Length: 3\r\n",
    "a folded header": b"A: b\r\n c\r\n",
    "a NUL": b"A: \x00\r\n",
    "a nameless header": b": b\r\n",
    "a header with a space": b"A b: c\r\n",
    "two hosts": b"Host: y\r\n",
    "two targets": b"X-Amz-Target: a\r\nX-Amz-Target: b\r\n",
    "an upgrade": b"Connection: Upgrade\r\nUpgrade: h2c\r\n",
}


@pytest.mark.parametrize("case", SMUGGLING)
def test_an_ambiguous_request_is_refused_and_its_connection_closed(plain, case):
    """Row 20."""
    began_s = time.monotonic()
    follow = b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    received = exchange(
        plain, b"POST / HTTP/1.1\r\nHost: x\r\n" + SMUGGLING[case] + b"\r\n" + follow
    )
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"HTTP/1.1") == 1
    # The connection was not left open until the time limit of a head.
    assert time.monotonic() - began_s < 10


STATUSES = {
    "compressed": (post(b"x", "Content-Encoding: gzip"), 415),
    "deflated": (post(b"x", "Content-Encoding: deflate"), 415),
    "too long": (
        post(b"", f"Content-Length: {http.BODY_BYTES_MAX + 1}").replace(
            b"\r\nContent-Length: 0", b""
        ),
        413,
    ),
    "unknown expectation": (post(b"x", "Expect: other"), 417),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "not http": (b"\x16\x03\x01\x02\x00\x01\x00", 400),
    "http 2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "http 0.9": (b"GET /\r\n\r\n", 400),
    "absolute": (b"GET http://evil/ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "connect": (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "connect to a path": (b"CONNECT / HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\n\r\n", 400),
    "large trailer": (chunked(b"0\r\nX: " + b"a" * 17_000 + b"\r\n\r\n"), 431),
    "endless trailer": (chunked(b"0\r\nX: " + b"a" * 40_000), 431),
    "large trailers": (chunked(b"0\r\n" + (b"X: " + b"a" * 900 + b"\r\n") * 20 + b"\r\n"), 431),
    "many trailers": (chunked(b"0\r\n" + b"X: a\r\n" * 101 + b"\r\n"), 431),
    "a long chunk size": (chunked(b"0" * 40_000), 431),
    "large head": (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 17_000 + b"\r\n\r\n", 431),
    "long url": (b"GET /" + b"a" * 17_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
    "endless header": (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 17_000, 431),
    "many headers": (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 101 + b"\r\n", 431),
}


@pytest.mark.parametrize("case", STATUSES)
def test_a_request_over_a_limit_is_refused_and_its_connection_closed(plain, case):
    """Row 20."""
    sent, status = STATUSES[case]
    received = exchange(plain, sent)
    assert received.startswith(f"HTTP/1.1 {status} ".encode())
    assert received.count(b"HTTP/1.1") == 1


BOMBS = {
    "deep arrays": b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"x":' * 100_000 + b"1" + b"}" * 100_000,
    "unclosed": b"[" * 1_000_000,
    "a huge number": b'{"MaxResults":' + b"9" * 100_000 + b"}",
    "a huge exponent": b'{"MaxResults":1e400}',
    "a fraction": b'{"MaxResults":1.5}',
    "a text for a number": b'{"MaxResults":"1"}',
    "a lone surrogate": b'{"QueueNamePrefix":"\\ud800"}',
    "not utf-8": b'{"QueueNamePrefix":"\xff\xfe"}',
    "an array": b"[]",
    "control characters": b"\x00\x01",
    "xml": b'<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]><x>&b;</x>',
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_json_bomb_is_refused_at_once(plain, bomb):
    """Row 20."""
    began_s = time.process_time()
    received = exchange(plain, post(BOMBS[bomb]))
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"com.amazon.coral.service#SerializationException" in received
    assert time.process_time() - began_s < SLACK


FORM_HEAD = (
    b"POST / HTTP/1.1\r\nHost: x\r\nX-Amz-Date: none\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n"
)
FORMS = {
    "xml entities": b'<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><x>&a;</x>',
    "no action": b"QueueName=x",
    "unknown action": b"Action=Unknown",
    "many fields": b"Action=ListQueues" + b"&a=b" * 6_000,
    "deep names": b"Action=ListQueues&" + b".".join([b"a"] * 5_000) + b"=1",
    "not utf-8": b"Action=CreateQueue&QueueName=%ff",
    "no number": b"Action=ListQueues&MaxResults=x",
    "a huge number": b"Action=ListQueues&MaxResults=" + b"9" * 5_000,
    "lists without end": b"Action=CreateQueue&QueueName=a b&Attribute.999999999999.Name=x",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_bad_form_is_refused_at_once(plain, form):
    """Row 20."""
    began_s = time.process_time()
    received = exchange(plain, FORM_HEAD % len(FORMS[form]) + FORMS[form])
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"<ErrorResponse" in received
    assert time.process_time() - began_s < SLACK


def test_a_body_that_is_not_utf_8_is_refused_with_the_reason(plain):
    assert b'"message":"the request is not UTF-8"' in exchange(plain, post(BOMBS["not utf-8"]))
    form = FORMS["not utf-8"]
    received = exchange(plain, FORM_HEAD % len(form) + form)
    assert b"<Message>The form cannot be read: it is not UTF-8</Message>" in received


def test_pipelined_requests_are_answered_in_order_even_after_a_long_poll(plain):
    client = plain.client()
    url = make(client, "pipeline")

    def ask(target, **parameters):
        return post(json.dumps(parameters).encode(), target=f"AmazonSQS.{target}", close=False)

    first = ask("ReceiveMessage", QueueUrl=url, WaitTimeSeconds=20)
    second = ask("GetQueueUrl", QueueName="pipeline")
    last = ask("GetQueueUrl", QueueName="none").replace(
        b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1
    )
    with connect(plain) as wire:
        wire.sendall(first + second * 40 + last)
        client.send_message(QueueUrl=url, MessageBody="woken")
        received = b""
        while piece := wire.recv(65_536):
            received += piece
    assert (
        received.index(b"woken")
        < received.index(b"QueueUrl")
        < received.index(b"QueueDoesNotExist")
    )
    assert received.count(b"HTTP/1.1 200 OK") == 41
    assert received.count(b"HTTP/1.1 400 ") == 1


def test_a_request_that_is_arriving_is_not_confused_with_one_that_is_answered(plain):
    client = plain.client()
    url = make(client, "answered")

    def ask(target, **parameters):
        return post(json.dumps(parameters).encode(), target=f"AmazonSQS.{target}", close=False)

    first = ask("ReceiveMessage", QueueUrl=url, WaitTimeSeconds=20)
    second = ask("GetQueueUrl", QueueName="answered")
    third = ask("CreateQueue", QueueName="arriving")
    with connect(plain) as wire:
        # The rest of the third request comes when the second has been answered.
        wire.sendall(first + second + third[:-1])
        until(lambda: plain.running.engine.has_waiters)
        client.send_message(QueueUrl=url, MessageBody="woken")
        received = b""
        while received.count(b"HTTP/1.1 200 OK") < 2 or not received.endswith(b"}"):
            received += wire.recv(65_536)
        wire.sendall(third[-1:])
        assert b"/arriving" in wire.recv(65_536)


def test_a_request_may_come_byte_by_byte_and_in_chunks(plain):
    with connect(plain) as wire:
        for byte in post(b"{}"):
            wire.send(bytes([byte]))
        assert wire.recv(65_536).startswith(b"HTTP/1.1 200 OK")
    received = exchange(plain, chunked(b"1\r\n{\r\n1\r\n}\r\n0\r\nX: a\r\nY: b\r\n\r\n"))
    assert received.startswith(b"HTTP/1.1 200 OK")


def test_a_body_in_many_chunks_is_joined(plain):
    url = make(plain.client(), "pieces")
    content = "".join(chr(97 + number % 26) for number in range(100_000))
    body = json.dumps({"QueueUrl": url, "MessageBody": content}).encode()
    pieces = [body[at : at + 3] for at in range(0, len(body), 3)]
    sent = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    received = exchange(plain, chunked(sent).replace(b"ListQueues", b"SendMessage"))
    assert received.startswith(b"HTTP/1.1 200 OK")
    assert md5(content.encode()).hexdigest().encode() in received


def test_requests_before_one_that_cannot_be_read_are_answered(plain):
    received = exchange(plain, GET * 1_000 + b"no request\r\n\r\n")
    assert received.count(b"HTTP/1.1 200 OK") == 1_000
    assert received.count(b"HTTP/1.1 400 ") == 1
    assert received.rindex(b"HTTP/1.1 400 ") > received.rindex(b"HTTP/1.1 200 OK")


def test_every_request_of_a_long_pipeline_is_answered_in_order(plain):
    for number in range(7):
        make(plain.client(), f"order-{number}")
    asked = [number % 7 for number in range(3_000)]
    sent = [
        post(b'{"QueueName":"order-%d"}' % number, target="AmazonSQS.GetQueueUrl", close=False)
        for number in asked
    ]
    sent[-1] = post(b'{"QueueName":"order-%d"}' % asked[-1], target="AmazonSQS.GetQueueUrl")
    with connect(plain) as wire, ThreadPoolExecutor(1) as pool:
        sending = pool.submit(wire.sendall, b"".join(sent))
        received = b""
        while piece := wire.recv(65_536):
            received += piece
        sending.result(60)
    assert [int(number) for number in re.findall(rb"order-(\d)", received)] == asked


@pytest.fixture
def unread(query_data, monkeypatch):
    """A server with ten messages of 1 MB, and a request for all of them."""
    monkeypatch.setattr(http, "SWEEP_S", 0.02)
    # More than the socket buffers of both ends hold.
    monkeypatch.setattr(messages, "RECEIVE_BYTES_MAX", 16_000_000)
    server = Local(query_data)
    client = server.client()
    url = make(client, "unread", VisibilityTimeout="0")
    for _ in range(10):
        client.send_message(QueueUrl=url, MessageBody="x" * 1_000_000)
    yield (
        server,
        post(
            json.dumps({"QueueUrl": url, "MaxNumberOfMessages": 10}).encode(),
            target="AmazonSQS.ReceiveMessage",
            close=False,
        ),
    )
    server.close()


def connections(server):
    return server.call(lambda: len(server.running._http.connections))


def held_bytes(server):
    return server.call(lambda: server.running._http.held.total_bytes)


def shorten_write_deadlines(server, monkeypatch):
    """From now on a client has 50 ms to read a part of an answer that is unsent already."""
    monkeypatch.setattr(http, "WRITE_TIMEOUT_S", 0.05)

    def shorten():
        for each in server.running._http.watched:
            if each.write_deadline_s is not None:
                each.write_deadline_s = asyncio.get_running_loop().time() + 0.05

    server.call(shorten)


def test_an_answer_that_is_not_read_ends_its_connection(unread, monkeypatch):
    """Row 13."""
    server, receive = unread
    before = connections(server)
    with connect(server) as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        wire.sendall(receive)
        until(lambda: held_bytes(server) > 1_000_000)
        shorten_write_deadlines(server, monkeypatch)
        until(lambda: connections(server) == before)
        assert held_bytes(server) == 0


def test_an_answer_over_tls_that_is_not_read_ends_its_connection(
    query_data,
    monkeypatch,
    certificate,
):
    """Row 13."""
    monkeypatch.setattr(http, "SWEEP_S", 0.02)
    monkeypatch.setattr(messages, "RECEIVE_BYTES_MAX", 16_000_000)
    cert, key = certificate
    server = Local(query_data, tls_cert=cert, tls_key=key)
    try:
        server.execute(CreateQueue("unread"))
        for _ in range(10):
            server.execute(Push("unread", b"x" * 1_000_000))
        body = json.dumps({"QueueUrl": "unread", "MaxNumberOfMessages": 10}).encode()
        receive = post(body, target="AmazonSQS.ReceiveMessage", close=False)
        tls = ssl.create_default_context(cafile=cert)
        with socket.create_connection(("127.0.0.1", server.running.port), 60) as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            with tls.wrap_socket(plain, server_hostname="localhost") as wire:
                wire.sendall(receive)
                until(lambda: held_bytes(server) > 500_000)
                shorten_write_deadlines(server, monkeypatch)
                until(lambda: not connections(server))
        assert held_bytes(server) == 0
    finally:
        server.close()


def test_a_last_answer_that_is_not_read_ends_its_connection(unread, monkeypatch):
    """Row 13."""
    server, receive = unread
    before = connections(server)
    with connect(server) as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        wire.sendall(receive.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
        until(lambda: held_bytes(server) > 1_000_000)
        shorten_write_deadlines(server, monkeypatch)
        until(lambda: connections(server) == before)


def test_a_client_that_reads_slowly_gets_its_whole_answer(unread):
    """Row 13: a client must read some bytes in time, not the whole answer."""
    server, receive = unread
    with connect(server) as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        wire.sendall(receive)
        received = wire.recv(4_096)
        (length,) = map(int, re.findall(rb"Content-Length: (\d+)", received))
        taken = len(received.partition(b"\r\n\r\n")[2])
        while taken < length:
            taken += len(wire.recv(65_536))
    assert taken == length


def test_over_the_limit_of_all_connections_the_one_that_holds_the_most_is_ended(
    query_data, monkeypatch, record_property
):
    """Rows 13 and 20: unsent answers and incomplete bodies count together."""
    monkeypatch.setattr(http, "HELD_BYTES_MAX", 2_000_000)
    server = Local(query_data)
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5000000\r\n\r\n"
    try:
        with ExitStack() as stack:
            wires = [stack.enter_context(connect(server)) for _ in range(4)]
            sizes = [1_000_000, 300_000, 600_000, 400_000]
            for wire, size in zip(wires, sizes, strict=True):
                wire.sendall(head + b"x" * size)
            while not server.call(lambda: server.running._http.held.aborted):
                pass
            with suppress(ConnectionError):
                assert wires[0].recv(1) == b""
            while held_bytes(server) < sum(sizes[1:]):
                pass
            assert server.call(lambda: server.running._http.held.aborted) == 1
            record_property("figure", f"{held_bytes(server):,} of 2,000,000 B held")
            assert held_bytes(server) == sum(sizes[1:])
        while held_bytes(server):
            pass
    finally:
        server.close()


def test_a_fault_is_answered_counted_and_printed_in_one_line(query_data, capfd):
    """Row 19: whatever a request causes, no traceback is printed."""
    server = Local(query_data)

    def fail(*_):
        raise ZeroDivisionError("a secret")

    try:
        server.call(setattr, server.running._http, "route", fail)
        for _ in range(3):
            received = exchange(server, GET)
            assert received.startswith(b"HTTP/1.1 500 ")
            assert b"Connection: close" in received
        assert server.call(lambda: server.running._http.faults.total) == 3
    finally:
        server.close()
    shown = without_event_lines(capfd.readouterr().err)
    assert re.fullmatch(
        r"penstock: fault in answering a request: ZeroDivisionError at \S+test_http.py:\d+\n", shown
    )


def test_a_fault_in_a_callback_of_the_event_loop_is_counted_and_printed_in_one_line(
    query_data, capfd
):
    """Row 19."""
    server = Local(query_data)
    try:
        server.call(lambda: asyncio.get_running_loop().call_soon(lambda _: 1 / 0, "a secret"))
        assert server.call(lambda: server.running._http.faults.total) == 1
    finally:
        server.close()
    shown = capfd.readouterr().err
    assert re.fullmatch(r"penstock: fault in .+: ZeroDivisionError at \S+test_http.py:\d+\n", shown)
    assert "secret" not in shown


def test_the_metrics_count_faults(plain):
    received = exchange(plain, b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert b"\npenstock_faults_total 0.0\n" in received


def test_the_metrics_count_a_fault_of_the_frame_server(query_data, tmp_path):
    """Row 19."""
    server = Local(query_data, store="file", path=tmp_path)
    try:
        service = server.running.service
        assert isinstance(service, LoopEngine)
        handlers = service.engine._handlers
        # A reply of a type that cannot be encoded in a frame.
        server.call(handlers.__setitem__, Peek, lambda command, now_ms: object())
        send_one_peek(tmp_path / "store")
        answer = exchange(server, b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b"\npenstock_faults_total 1.0\n" in answer
    finally:
        server.close()


def test_a_client_that_expects_100_continue_receives_it(plain):
    with connect(plain) as wire:
        head, _, body = post(b"{}", "Expect: 100-continue").partition(b"\r\n\r\n")
        wire.sendall(head + b"\r\n\r\n")
        assert wire.recv(65_536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        wire.sendall(body)
        assert wire.recv(65_536).startswith(b"HTTP/1.1 200 OK")


def test_a_long_poll_of_a_disconnected_client_takes_no_message(plain):
    client = plain.client()
    url = make(client, "gone")
    body = json.dumps({"QueueUrl": url, "WaitTimeSeconds": 20}).encode()
    wire = connect(plain)
    wire.sendall(post(body, target="AmazonSQS.ReceiveMessage", close=False))
    while not plain.call(lambda: plain.running.engine.has_waiters):
        pass
    wire.close()
    while plain.call(lambda: plain.running.engine.has_waiters):
        pass
    client.send_message(QueueUrl=url, MessageBody="kept")
    (message,) = client.receive_message(QueueUrl=url)["Messages"]
    assert message["Body"] == "kept"


def test_a_request_that_stays_incomplete_is_refused_in_time(query_data, monkeypatch):
    monkeypatch.setattr(http, "HEAD_TIMEOUT_S", 0.05)
    monkeypatch.setattr(http, "BODY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(http, "SWEEP_S", 0.02)
    server = Local(query_data)
    try:
        for half in (b"GET / HT", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc"):
            assert exchange(server, half).startswith(b"HTTP/1.1 408 ")
        with connect(server) as idle:
            idle.sendall(GET)
            assert idle.recv(65_536).startswith(b"HTTP/1.1 200 OK")
            assert exchange(server, b"GET / HT").startswith(b"HTTP/1.1 408 ")
            # This connection has no incomplete request, so it stays open.
            idle.sendall(GET)
            assert idle.recv(65_536).startswith(b"HTTP/1.1 200 OK")
    finally:
        server.close()


def has_time(server):
    """Whether every request that is incomplete has half a minute."""
    deadlines_s = [each.read_deadline_s for each in server.running._http.watched]
    return min(filter(None, deadlines_s)) > asyncio.get_running_loop().time() + 30


def test_a_request_that_waits_for_others_does_not_time_out(query_data, monkeypatch):
    monkeypatch.setattr(http, "HEAD_TIMEOUT_S", 0.4)
    monkeypatch.setattr(http, "SWEEP_S", 0.02)
    server = Local(query_data)
    try:
        client = server.client()
        url = make(client, "late")
        poll = json.dumps({"QueueUrl": url, "WaitTimeSeconds": 20}).encode()
        with connect(server) as wire:
            sent = post(poll, target="AmazonSQS.ReceiveMessage", close=False)
            wire.sendall(sent + GET * http.WAITING_REQUESTS_MAX + GET[:9])
            until_s = time.monotonic() + 1
            while time.monotonic() < until_s:
                assert connections(server) >= 1
            # What is sent below may take longer to be sent.
            monkeypatch.setattr(http, "HEAD_TIMEOUT_S", 60.0)
            until(lambda: server.call(lambda: has_time(server)))
            client.send_message(QueueUrl=url, MessageBody="woken")
            wire.sendall(GET[9:])
            received = b""
            while received.count(b"HTTP/1.1 200 OK") < http.WAITING_REQUESTS_MAX + 2:
                received += wire.recv(65_536)
            assert b"HTTP/1.1 4" not in received
    finally:
        server.close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Host: localhost:9324", 200),
        ("Host: 127.0.0.1", 200),
        ("Host: [::1]:9324", 200),
        ("Host: penstock:9324", 200),
        ("Host: sqs.localhost", 200),
        ("Host: host.docker.internal:9324", 200),
        ("Host: evil.example", 403),
        ("Host: 127.0.0.1.evil.example", 403),
        ("Host: localhost\r\nOrigin: http://evil.example", 403),
        ("Host: localhost\r\nOrigin: null", 403),
        ("Host: localhost\r\nSec-Fetch-Site: cross-site", 403),
        ("Host: localhost\r\nSec-Fetch-Site: same-site", 403),
        ("Host: localhost\r\nSec-Fetch-Site: none", 200),
        ("Host: 0.0.0.0:9324", 403),
        ("Host: [::]:9324", 403),
        ("Host: [::ffff:0.0.0.0]", 403),
        ("Host: a b", 404),
        ("Host: a/b", 404),
    ],
)
def test_a_web_page_cannot_use_a_server_without_keys(plain, headers, status):
    """Row 24: not by a name of its own that leads to this machine, either (DNS rebinding)."""
    for path in ("/?Action=ListQueues", "/metrics"):
        received = exchange(
            plain, f"GET {path} HTTP/1.1\r\n{headers}\r\nConnection: close\r\n\r\n".encode()
        )
        expected = 403 if status == 404 and path == "/metrics" else status
        assert received.startswith(f"HTTP/1.1 {expected} ".encode())


BARE = "Action=CreateQueue&QueueName=bare"
PRESIGNED = (
    "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Date=20260101T000000Z&X-Amz-Expires=60"
    "&X-Amz-Credential=any%2F20260101%2Fus-east-1%2Fsqs%2Faws4_request&X-Amz-SignedHeaders=host"
    f"&X-Amz-Signature={'0' * 64}"
)
HOSTS = ["localhost", "127.0.0.1:9324", "[::1]", "penstock", "shop.test", "box.local", "a.internal"]


def asked_by(method, query, body="", headers=""):
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    return f"{method} /?{query} HTTP/1.1\r\n{length}{headers}Connection: close\r\n\r\n{body}"


PAGES_REQUESTS = {
    "a GET": asked_by("GET", BARE),
    "a presigned GET": asked_by("GET", f"{BARE}&{PRESIGNED}", headers="Sec-Fetch-Site: none\r\n"),
    "a form": asked_by("POST", "", BARE, "Content-Type: application/x-www-form-urlencoded\r\n"),
    "a form of text": asked_by("POST", "", BARE, "Content-Type: text/plain\r\n"),
    "a form without a type": asked_by("POST", "", BARE),
    "a form and a query": asked_by("POST", "QueueName=bare", "Action=CreateQueue"),
    "a query and an empty form": asked_by("POST", BARE),
    "an encoded action": asked_by("GET", BARE.replace("Action", "%41ction").replace("=C", "=%43")),
    "two actions": asked_by("GET", f"{BARE}&Action=ListQueues"),
    "a large form": asked_by("POST", "", f"Action=ListQueues&x={'x' * 100_000}&{BARE}"),
}


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("case", PAGES_REQUESTS)
def test_a_request_that_a_web_page_could_have_sent_changes_nothing(plain, case, host):
    """Row 24: in some browsers such a GET has neither Origin nor Sec-Fetch-Site."""
    line, _, rest = PAGES_REQUESTS[case].partition("\r\n")
    received = exchange(plain, f"{line}\r\nHost: {host}\r\n{rest}".encode())
    assert received.startswith(b"HTTP/1.1 403 ")
    assert b"needs a header that a web page cannot send" in received
    assert b"may only look" in received
    assert "bare" not in plain.call(lambda: [*plain.running.engine.shard.names])


LOOPBACK = [
    "localhost:9324",
    "LOCALHOST",
    "a.localhost:1",
    "127.0.0.1:9324",
    "127.8.8.8",
    "[::1]:9324",
]


@pytest.mark.parametrize("host", LOOPBACK)
def test_a_presigned_request_for_loopback_that_no_browser_sent_may_change_queues(plain, host):
    """Row 24: to these hosts every browser sends Sec-Fetch-Site, whatever asks for the request."""
    name = re.sub(r"\W", "-", host)
    asked = f"Action=CreateQueue&QueueName={name}&{PRESIGNED}"
    for sent in (
        "Sec-Fetch-Site: none",
        "Sec-Fetch-Site: cross-site",
        "Sec-Fetch-Mode: no-cors",
        "Sec-Purpose: prefetch",
        "Origin: http://evil.example",
    ):
        headers = f"Host: {host}\r\n{sent}\r\n"
        received = exchange(plain, asked_by("GET", asked, headers=headers).encode())
        assert received.startswith(b"HTTP/1.1 403 ")
    assert name not in plain.call(lambda: [*plain.running.engine.shard.names])
    received = exchange(plain, asked_by("GET", asked, headers=f"Host: {host}\r\n").encode())
    assert received.startswith(b"HTTP/1.1 200 ")
    assert name in plain.call(lambda: [*plain.running.engine.shard.names])


@pytest.mark.parametrize("host", [*HOSTS[3:], "127.0.0.1.shop.test", "localhost.internal"])
def test_a_presigned_request_for_another_name_of_this_machine_changes_nothing(plain, host):
    """Row 24: Chromium sends no header with a page's requests to such a name."""
    asked = asked_by("GET", f"{BARE}&{PRESIGNED}", headers=f"Host: {host}\r\n")
    received = exchange(plain, asked.encode())
    assert received.startswith(b"HTTP/1.1 403 ")
    assert b"a server with keys takes every presigned request" in received
    assert "bare" not in plain.call(lambda: [*plain.running.engine.shard.names])


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "header", ["Authorization: x", "X-Amz-Date: x", "X-Amz-Target: AmazonSQS.ListQueues"]
)
def test_a_request_with_a_header_that_no_web_page_can_send_may_change_queues(plain, method, header):
    name = re.sub(r"\W", "-", f"{method}-{header}")
    query, body = ("", f"Action=CreateQueue&QueueName={name}")[:: -1 if method == "GET" else 1]
    if "Target" in header and method == "POST":
        body = "{}"
    received = exchange(plain, asked_by(method, query, body, f"Host: x\r\n{header}\r\n").encode())
    assert received.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("action", ["ListQueues", "GetQueueUrl&QueueName=looked-at"])
def test_a_request_that_a_web_page_could_have_sent_may_read(plain, action):
    make(plain.client(), "looked-at")
    for sent in (
        asked_by("GET", f"Action={action}", headers="Host: x\r\n"),
        asked_by("POST", "", f"Action={action}", "Host: x\r\n"),
    ):
        received = exchange(plain, sent.encode())
        assert received.startswith(b"HTTP/1.1 200 ")
        assert b"/000000000000/looked-at" in received


@pytest.mark.parametrize(
    ("version", "asked", "expected"),
    [
        (b"1.0", b"Connection: Keep-Alive\r\n", b"\r\nConnection: keep-alive\r\n"),
        (b"1.0", b"", b"\r\nConnection: close\r\n"),
        (b"1.1", b"Connection: close\r\n", b"\r\nConnection: close\r\n"),
        (b"1.1", b"Connection: keep-alive\r\n", None),
        (b"1.1", b"", None),
    ],
)
def test_the_connection_header_says_whether_the_connection_stays_open(
    plain, version, asked, expected
):
    """A client of HTTP/1.0 opens a new connection unless the answer says keep-alive."""
    ask = b"GET /health HTTP/" + version + b"\r\nHost: x\r\n" + asked + b"\r\n"
    with connect(plain) as wire:
        stays = expected is None or b"keep-alive" in expected
        for _ in range(2 if stays else 1):
            wire.sendall(ask)
            head, _, body = wire.recv(65_536).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert f"Content-Length: {len(body)}".encode() in head
            assert expected is None or expected in head + b"\r\n"
            assert expected is not None or b"\nConnection:" not in head
        if not stays:
            assert wire.recv(1) == b""
