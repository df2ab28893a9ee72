"""The HTTP server against whatever may come over a socket: limits, smuggling, order, haste."""

import json
import socket
import time

import pytest

from penstock.server import http
from tests.server.sqs.asking import make
from tests.server.sqs.conftest import Local

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 10)


def exchange(server, *pieces):
    """Everything the server says until it closes the connection."""
    with connect(server) as wire:
        for piece in pieces:
            wire.sendall(piece)
        said = b""
        while piece := wire.recv(65_536):
            said += piece
        return said


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
SMUGGLING = {
    "length and chunks": b"Content-Length: 3\r\n" + CHUNKED,
    "chunks and length": CHUNKED + b"Content-Length: 3\r\n",
    "two lengths": b"Content-Length: 3\r\nContent-Length: 3\r\n",
    "two different lengths": b"Content-Length: 3\r\nContent-Length: 4\r\n",
    "a list of lengths": b"Content-Length: 3, 3\r\n",
    "a signed length": b"Content-Length: +3\r\n",
    "a negative length": b"Content-Length: -3\r\n",
    "a hexadecimal length": b"Content-Length: 0x3\r\n",
    "a length beyond all": b"Content-Length: 99999999999999999999999\r\n",
    "an empty length": b"Content-Length: \r\n",
    "an odd encoding": b"Transfer-Encoding: xchunked\r\n",
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


@pytest.mark.parametrize("trick", SMUGGLING)
def test_what_could_be_read_in_two_ways_is_refused_and_closed(plain, trick):
    """Row 20."""
    began_s = time.monotonic()
    follow = b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    said = exchange(plain, b"POST / HTTP/1.1\r\nHost: x\r\n" + SMUGGLING[trick] + b"\r\n" + follow)
    assert said.startswith(b"HTTP/1.1 400 ")
    assert said.count(b"HTTP/1.1") == 1
    # It was not left open until nothing more came.
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
    "odd expectation": (post(b"x", "Expect: tea"), 417),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "not http": (b"\x16\x03\x01\x02\x00\x01\x00", 400),
    "http 2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "http 0.9": (b"GET /\r\n\r\n", 400),
    "absolute": (b"GET http://evil/ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "connect": (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "large head": (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 17_000 + b"\r\n\r\n", 431),
    "long url": (b"GET /" + b"a" * 17_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
    "endless header": (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 17_000, 431),
    "many headers": (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 101 + b"\r\n", 431),
}


@pytest.mark.parametrize("case", STATUSES)
def test_what_is_over_a_limit_is_refused_and_closed(plain, case):
    """Row 20."""
    sent, status = STATUSES[case]
    said = exchange(plain, sent)
    assert said.startswith(f"HTTP/1.1 {status} ".encode())
    assert said.count(b"HTTP/1.1") == 1


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
    "nothing sensible": b"\x00\x01",
    "xml": b'<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]><x>&b;</x>',
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_json_bomb_is_refused_at_once(plain, bomb):
    """Row 20."""
    began_s = time.process_time()
    said = exchange(plain, post(BOMBS[bomb]))
    assert said.startswith(b"HTTP/1.1 400 ")
    assert b"com.amazon.coral.service#SerializationException" in said
    assert time.process_time() - began_s < 1


FORM_HEAD = (
    b"POST / HTTP/1.1\r\nHost: x\r\nX-Amz-Date: none\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n"
)
FORMS = {
    "xml entities": b'<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><x>&a;</x>',
    "no action": b"QueueName=x",
    "unknown action": b"Action=Explode",
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
    said = exchange(plain, FORM_HEAD % len(FORMS[form]) + FORMS[form])
    assert said.startswith(b"HTTP/1.1 400 ")
    assert b"<ErrorResponse" in said
    assert time.process_time() - began_s < 1


def test_what_is_not_utf_8_is_told_so(plain):
    assert b'"message":"the request is not UTF-8"' in exchange(plain, post(BOMBS["not utf-8"]))
    form = FORMS["not utf-8"]
    said = exchange(plain, FORM_HEAD % len(form) + form)
    assert b"<Message>The form cannot be read: it is not UTF-8</Message>" in said


def test_pipelined_requests_are_answered_in_order_even_behind_a_long_poll(plain):
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
        said = b""
        while piece := wire.recv(65_536):
            said += piece
    assert said.index(b"woken") < said.index(b"QueueUrl") < said.index(b"QueueDoesNotExist")
    assert said.count(b"HTTP/1.1 200 OK") == 41
    assert said.count(b"HTTP/1.1 400 ") == 1


def test_a_request_may_come_byte_by_byte_and_in_chunks(plain):
    with connect(plain) as wire:
        for byte in post(b"{}"):
            wire.send(bytes([byte]))
        assert wire.recv(65_536).startswith(b"HTTP/1.1 200 OK")
    chunked = b"POST / HTTP/1.1\r\nHost: x\r\nX-Amz-Target: AmazonSQS.ListQueues\r\n" + CHUNKED
    said = exchange(plain, chunked + b"Connection: close\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 200 OK")


def test_a_client_that_expects_to_be_told_to_continue_is_told(plain):
    with connect(plain) as wire:
        head, _, body = post(b"{}", "Expect: 100-continue").partition(b"\r\n\r\n")
        wire.sendall(head + b"\r\n\r\n")
        assert wire.recv(65_536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        wire.sendall(body)
        assert wire.recv(65_536).startswith(b"HTTP/1.1 200 OK")


def test_a_long_poll_of_a_client_that_went_away_takes_no_message(plain):
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


def test_half_a_request_is_given_up_in_time(query_data, monkeypatch):
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
            # Nothing is half here, so nothing is late: the connection stays.
            idle.sendall(GET)
            assert idle.recv(65_536).startswith(b"HTTP/1.1 200 OK")
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
        ("Host: a b", 404),
        ("Host: a/b", 404),
    ],
)
def test_a_web_page_cannot_use_a_server_without_keys(plain, headers, status):
    for path in ("/?Action=ListQueues", "/metrics"):
        said = exchange(
            plain, f"GET {path} HTTP/1.1\r\n{headers}\r\nConnection: close\r\n\r\n".encode()
        )
        expected = 403 if status == 404 and path == "/metrics" else status
        assert said.startswith(f"HTTP/1.1 {expected} ".encode())


@pytest.mark.parametrize(
    ("version", "asked", "told"),
    [
        (b"1.0", b"Connection: Keep-Alive\r\n", b"\r\nConnection: keep-alive\r\n"),
        (b"1.0", b"", b"\r\nConnection: close\r\n"),
        (b"1.1", b"Connection: close\r\n", b"\r\nConnection: close\r\n"),
        (b"1.1", b"Connection: keep-alive\r\n", None),
        (b"1.1", b"", None),
    ],
)
def test_a_client_is_told_what_becomes_of_its_connection(plain, version, asked, told):
    """Clients of HTTP/1.0 close a connection that is not said to stay, and open another."""
    ask = b"GET /health HTTP/" + version + b"\r\nHost: x\r\n" + asked + b"\r\n"
    with connect(plain) as wire:
        stays = told is None or b"keep-alive" in told
        for _ in range(2 if stays else 1):
            wire.sendall(ask)
            head, _, body = wire.recv(65_536).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert f"Content-Length: {len(body)}".encode() in head
            assert told is None or told in head + b"\r\n"
            assert told is not None or b"\nConnection:" not in head
        if not stays:
            assert wire.recv(1) == b""
