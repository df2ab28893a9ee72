"""Reading requests from bytes: the fast path for plain requests gives the result of the parser."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server import request as request_module
from penstock.server.request import HEADERS_MAX, Request, RequestReader, Unacceptable

BODY = b'{"QueueName": "jobs"}'
PLAIN = (
    b"POST / HTTP/1.1\r\nHost: localhost:9324\r\nContent-Length: 21\r\n"
    b"X-Amz-Target: AmazonSQS.CreateQueue\r\nUser-Agent: any/1.0\r\n\r\n" + BODY
)
NAMES = [b"Host", b"host", b"Content-Length", b"X-Amz-Target", b"Connection", b"Cookie", b"Upgrade"]
NAMES += [
    b"Transfer-Encoding",
    b"Expect",
    b"Content-Encoding",
    b"Proxy-Connection",
    b"X-Any",
    b"X Y",
]
VALUES = [
    b"",
    b"localhost",
    b"0",
    b"3",
    b"03",
    b"+3",
    b"3 ",
    b" 3",
    b"3\t",
    b"close",
    b"Keep-Alive",
]
VALUES += [
    b"chunked",
    b"100-continue",
    b"websocket",
    b"a\nb",
    b"a\rb",
    b"a\0b",
    b"\xe9",
    b"\x7f",
    b": x",
]


class Recorder(RequestReader):
    """Keeps the requests that were read."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []

    def receive(self, request: Request) -> None:
        self.requests.append(request)

    def expects_continue(self) -> None:
        pass

    def take(self, data: bytes) -> None:
        """Reads as a connection does."""
        request = self.feed(data)
        if request is not None:
            self.receive(request)


class Observed(Recorder):
    """Also counts the calls of the parser."""

    parsed = 0

    def parse(self, data: bytes | memoryview) -> None:
        self.parsed += 1
        super().parse(data)


def read(reader: Recorder, pieces: list[bytes], by_parser: bool) -> list[Any]:
    """The requests in these bytes, and the refusal that ends them, if any."""
    found: list[Any] = reader.requests
    try:
        for piece in pieces:
            if by_parser:
                reader.parse(piece)
            else:
                reader.take(piece)
    except Unacceptable as error:
        return [*found, (error.status, str(error))]
    return [*found, reader.in_message, reader.completed]


def both(*pieces: bytes) -> tuple[list[Any], list[Any], Observed]:
    """The same bytes read with and without the fast path, after the header names are known."""
    warm = Recorder()
    for name in NAMES:
        if b" " not in name:
            try:
                warm.parse(b"POST / HTTP/1.1\r\nHost: x\r\n%s: x\r\n\r\n" % name)
            except Unacceptable:
                warm = Recorder()
    observed = Observed()
    return read(observed, [*pieces], False), read(Recorder(), [*pieces], True), observed


def test_a_plain_request_is_read_without_the_parser() -> None:
    Recorder().parse(PLAIN)
    reader = Observed()
    reader.take(PLAIN)
    reader.take(PLAIN)
    assert reader.parsed == 0
    assert reader.completed == 2
    assert [each.body for each in reader.requests] == [BODY, BODY]
    assert reader.requests[0].headers["x-amz-target"] == "AmazonSQS.CreateQueue"
    assert reader.requests[0].keep_alive


def test_lines_of_headers_are_kept_within_a_limit_and_never_signatures(monkeypatch) -> None:
    monkeypatch.setattr(request_module, "_LINES_MAX", 8)
    Recorder().parse(b"POST / HTTP/1.1\r\nHost: x\r\nAuthorization: x\r\nX-Any: x\r\n\r\n")
    for number in range(100):
        lines = b"Authorization: secret-%d\r\nX-Any: %d\r\nContent-Length: 0" % (number, number)
        mine, parsers, reader = both(b"POST / HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n" % lines)
        assert mine == parsers
        assert reader.parsed == 0
        assert len(request_module._LINES) <= 8
        assert not any("secret" in line for line in request_module._LINES)


def test_invented_names_of_headers_do_not_keep_later_names_from_being_learned() -> None:
    for number in range(2 * request_module._LOWERED_MAX // HEADERS_MAX + 1):
        invented = b"".join(b"X-%d-%d: x\r\n" % (number, each) for each in range(HEADERS_MAX - 1))
        Recorder().parse(b"POST / HTTP/1.1\r\nHost: x\r\n%s\r\n" % invented)
    late = PLAIN.replace(b"User-Agent", b"X-Of-A-Late-Client")
    Recorder().parse(late)
    reader = Observed()
    reader.take(late)
    assert reader.parsed == 0
    assert reader.requests[0].headers["x-of-a-late-client"] == "any/1.0"
    assert len(request_module._LOWERED) <= request_module._LOWERED_MAX
    assert len(request_module._PLAIN_NAMES) <= request_module._LOWERED_MAX


@pytest.mark.parametrize("at", range(1, len(PLAIN)))
def test_a_request_in_two_pieces_is_read_once_it_is_complete(at: int) -> None:
    mine, parsers, reader = both(PLAIN[:at], PLAIN[at:])
    assert mine == parsers
    assert len(reader.requests) == 1


def test_a_head_without_its_empty_line_is_not_read_as_a_request() -> None:
    """Without the empty line, the head may continue."""
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0"
    mine, parsers, _ = both(head)
    assert mine == parsers == [True, 0]
    mine, parsers, _ = both(head, b"1\r\n\r\nabc")
    assert mine == parsers


def test_headers_are_counted_in_a_plain_request_too() -> None:
    many = b"".join(b"X-%d: 1\r\n" % number for number in range(HEADERS_MAX))
    request = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n%s\r\n" % many
    for number in range(HEADERS_MAX):
        Recorder().parse(b"POST / HTTP/1.1\r\nHost: x\r\nX-%d: 1\r\n\r\n" % number)
    mine, parsers, _ = both(request)
    assert mine == parsers
    assert mine[-1][0] == 431


@given(
    first=st.sampled_from([b"POST / HTTP/1.1", b"POST / HTTP/1.0", b"GET / HTTP/1.1", b"POST /"]),
    headers=st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES)), max_size=5),
    colon=st.sampled_from([b": ", b":", b":  ", b" : ", b":\t"]),
    end=st.sampled_from([b"\r\n", b"\n", b"\r"]),
    is_valid=st.booleans(),
    tail=st.sampled_from([b"", b"abc", b"abcd", b"abcPOST / HTTP/1.1\r\n"]),
)
def test_a_plain_request_is_read_as_by_the_parser(
    first: bytes,
    headers: list[tuple[bytes, bytes]],
    colon: bytes,
    end: bytes,
    is_valid: bool,
    tail: bytes,
) -> None:
    if is_valid:
        headers = [(b"Host", b"localhost"), (b"Content-Length", b"3"), *headers]
    lines = [first, *(name + colon + value for name, value in headers), b"", b""]
    mine, parsers, _ = both(end.join(lines) + tail)
    assert mine == parsers


@given(at=st.integers(0, len(PLAIN) - len(BODY) - 1), byte=st.binary(min_size=0, max_size=2))
def test_a_request_with_a_changed_byte_is_read_as_by_the_parser(at: int, byte: bytes) -> None:
    mine, parsers, _ = both(PLAIN[:at] + byte + PLAIN[at + 1 :])
    assert mine == parsers
