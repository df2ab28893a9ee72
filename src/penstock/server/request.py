"""HTTP/1.1 requests from bytes, each part within its limit.

A request that can be read in two ways (two lengths, a length and chunks, bare line feeds, unknown
encodings) is `Unacceptable`, and so is one over a limit: the connection ends with its answer.

    head        HEAD_BYTES_MAX, and HEADERS_MAX headers
    body        BODY_BYTES_MAX; if it is chunked, with the sizes of the chunks and the trailers
    trailers    HEAD_BYTES_MAX, and HEADERS_MAX headers; they are checked and dropped

httptools joins the pieces of a header, so a header that does not end costs quadratic time, and is
not passed on before it is complete. Therefore the bytes fed to it are counted against the limit.

It also calls back for every header. A plain request is read without it: a request that has arrived
complete and alone, in the form in which the SDKs write it. Every other form is left to the parser,
and a test compares the results of both.
"""

from typing import Final

import httptools
import msgspec

HEAD_BYTES_MAX: Final = 16 * 1024
BODY_BYTES_MAX: Final = 8 * 1024 * 1024
HEADERS_MAX: Final = 100
_LENGTH_DIGITS_MAX: Final = 20

# Headers that most requests do not have, and that are checked one by one.
_SPECIAL_HEADERS: Final = frozenset({"upgrade", "transfer-encoding", "content-encoding", "expect"})
# If one of these came twice, it would be unclear which one counts.
_SINGLE: Final = frozenset(
    {"host", "content-type", "content-encoding", "authorization", "x-amz-target", "x-amz-date"}
)
# Names of headers in lower case, by the names that clients sent: as bytes, and as text.
_LOWERED_MAX: Final = 1_024
_LOWERED: Final[dict[bytes, str]] = {}
_PLAIN_NAMES: Final[dict[str, str]] = {}
# These decide how a request is read; in a plain one they do not occur.
_NOT_PLAIN: Final = _SPECIAL_HEADERS | {"proxy-connection"}
_as_json: Final = msgspec.json.Encoder().encode
# Lines of headers as names and values: most lines of a client are the same in all its requests.
_LINES_MAX: Final = 4_096
_LINE_CHARS_MAX: Final = 256
_LINES: Final[dict[str, tuple[str, str]]] = {}
# Of these, every line is new.
_UNIQUE: Final = frozenset({"authorization", "amz-sdk-invocation-id"})


class Request(msgspec.Struct, gc=False):
    """One request, complete.

    Header names are in lower case; the values of one that came several times are joined by commas.
    `must_say_keep_alive` is for clients of HTTP/1.0, which close a connection unless its answer
    says that it stays open.
    """

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes | bytearray = b""
    keep_alive: bool = True
    must_say_keep_alive: bool = False


class Unacceptable(Exception):
    """The request must be answered with this status, and the connection closed."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def _lower(name: bytes) -> str:
    lowered = name.decode("latin-1").lower()
    if len(name) <= 64:
        if len(_LOWERED) >= _LOWERED_MAX:
            # A client that invents names must not keep those of others from being learned.
            _LOWERED.clear()
            _PLAIN_NAMES.clear()
        _LOWERED[name] = lowered
        if lowered not in _NOT_PLAIN:
            _PLAIN_NAMES[name.decode("latin-1")] = lowered
    return lowered


def _read_plain(data: bytes) -> Request | None:
    """The request in these bytes, if they are exactly one complete request in the usual form."""
    head, end, body = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    if not end or lines.pop(0) != "POST / HTTP/1.1":
        return None
    headers: dict[str, str] = {}
    known = _LINES.get
    for line in lines:
        name, value = known(line) or _read_line(line)
        headers[name] = value
    if (
        headers.get("content-length") != str(len(body))
        or "host" not in headers
        or "" in headers
        or len(headers) != len(lines)
        or ("connection" in headers and headers["connection"].lower() != "keep-alive")
        or len(lines) > HEADERS_MAX
        or len(head) > HEAD_BYTES_MAX
        or len(body) > BODY_BYTES_MAX
    ):
        return None
    return Request("POST", "/", "", headers, body)


def _read_line(line: str) -> tuple[str, str]:
    """The name and value of a header; both are empty if the parser must read this request."""
    name, _, value = line.partition(": ")
    lowered = _PLAIN_NAMES.get(name)
    if lowered is None or not _is_visible(line) or value != value.strip(" "):
        return "", ""
    read = lowered, value
    if len(line) <= _LINE_CHARS_MAX and lowered not in _UNIQUE:
        if len(_LINES) >= _LINES_MAX:
            _LINES.clear()
        _LINES[line] = read
    return read


def _is_visible(line: str) -> bool:
    """Whether the line has only visible characters and spaces, and no quote or backslash.

    In JSON a control character takes more than one, so the text has two more only for its quotes.
    This is several times faster than `isprintable` or a translation.
    """
    return line.isascii() and len(_as_json(line)) == len(line) + 2 and "\x7f" not in line


class RequestReader:
    """Turns the bytes of one connection into requests.

    Each is given to `receive` when it is complete; `expects_continue` is called when a client waits
    for permission to send a body. A connection inherits from this class and has both methods: an
    object of its own for reading would cost each request a noticeable part of its time.
    """

    __slots__ = (
        "_body",
        "_body_bytes",
        "_fed_bytes",
        "_head_bytes",
        "_pairs",
        "_parser",
        "_request",
        "_seen_bytes",
        "_stuck_bytes",
        "_url",
        "completed",
        "in_body",
        "in_message",
    )

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        # How many requests were read; whether one has begun, and whether its head is complete.
        self.completed = 0
        self.in_message = False
        self.in_body = False
        self._url = b""
        # Names and values of the headers, as they came; once the head is complete, of trailers.
        self._pairs: list[tuple[bytes, bytes]] = []
        self._request: Request | None = None
        # A body most often comes in one piece. A second piece makes it a buffer that grows: a list
        # of small pieces would take many times their bytes.
        self._body: bytes | bytearray = b""
        self._fed_bytes = 0
        self._head_bytes = 0
        # For a body in several feeds: its bytes, chunk sizes included; the length of its content
        # after the last feed; and the bytes fed since the content last grew.
        self._body_bytes = 0
        self._seen_bytes = 0
        self._stuck_bytes = 0

    def receive(self, request: Request) -> None:
        """A request is complete."""
        raise NotImplementedError

    def expects_continue(self) -> None:
        """A client waits for permission to send a body."""
        raise NotImplementedError

    def stop_reading(self) -> None:
        """Drops everything; the parser's reference to this reader would keep it alive."""
        self._parser = None  # type: ignore[assignment]
        self._request = None
        self._body = b""
        self._pairs = []

    def feed(self, data: bytes) -> Request | None:
        """Reads the next bytes; returns the request if they are exactly one in the usual form.

        Gives all others to `receive`. Raises Unacceptable.
        """
        request = None if self.in_message else _read_plain(data)
        if request is None:
            self.parse(data)
        else:
            self.completed += 1
        return request

    def parse(self, data: bytes | memoryview) -> None:
        """Reads the next bytes with the parser. Raises Unacceptable."""
        self._fed_bytes = len(data)
        completed = self.completed
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            raise cause if isinstance(cause, Unacceptable) else error from None
        except httptools.HttpParserError as error:
            raise Unacceptable(400, str(error)) from None
        except httptools.HttpParserUpgrade:
            raise Unacceptable(400, "this server upgrades to no other protocol") from None
        if self.in_message:
            self._count_unfinished(completed)

    def _count_unfinished(self, completed: int) -> None:
        """Limits the bytes of a request that is not complete. Raises Unacceptable."""
        if not self.in_body:
            if completed == self.completed:
                self._head_bytes += self._fed_bytes
            if self._head_bytes > HEAD_BYTES_MAX:
                raise Unacceptable(431, f"the head is over {HEAD_BYTES_MAX} bytes")
            return
        if self._pairs:
            self._check_trailers()
        self._body_bytes += self._fed_bytes
        if self._body_bytes > BODY_BYTES_MAX + HEAD_BYTES_MAX:
            raise Unacceptable(
                413, f"the body is over {BODY_BYTES_MAX} bytes, chunk sizes included"
            )
        if len(self._body) != self._seen_bytes:
            self._seen_bytes = len(self._body)
            self._stuck_bytes = 0
            return
        # No content: these bytes belong to a chunk's size, its extension or a trailer.
        self._stuck_bytes += self._fed_bytes
        if self._stuck_bytes > HEAD_BYTES_MAX:
            raise Unacceptable(431, f"the trailers are over {HEAD_BYTES_MAX} bytes")

    # Called by the parser.

    def on_message_begin(self) -> None:
        self.in_message = True

    def on_url(self, url: bytes) -> None:
        self._url = self._url + url if self._url else url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._pairs.append((name, value))

    def _read_headers(self, pairs: list[tuple[bytes, bytes]]) -> dict[str, str]:
        """The headers, where a name is new or occurs several times. Raises Unacceptable."""
        headers: dict[str, str] = {}
        for name, value in pairs:
            key, text = _lower(name), value.decode("latin-1")
            if key not in headers:
                headers[key] = text
            elif key in _SINGLE:
                raise Unacceptable(400, f"the header {key} came twice")
            else:
                headers[key] += "," + text
        return headers

    def _check_trailers(self) -> None:
        """Limits trailers like a head. Nothing may depend on them. Raises Unacceptable."""
        if len(self._pairs) > HEADERS_MAX:
            raise Unacceptable(431, f"there are over {HEADERS_MAX} trailers")
        if _headers_bytes(self._pairs) > HEAD_BYTES_MAX:
            raise Unacceptable(431, f"the trailers are over {HEAD_BYTES_MAX} bytes")

    def on_headers_complete(self) -> None:
        pairs, self._pairs = self._pairs, []
        self.in_body = True
        if len(pairs) > HEADERS_MAX:
            raise Unacceptable(431, f"there are over {HEADERS_MAX} headers")
        if (
            self._head_bytes + self._fed_bytes > HEAD_BYTES_MAX
            and len(self._url) + _headers_bytes(pairs) > HEAD_BYTES_MAX
        ):
            raise Unacceptable(431, f"the head is over {HEAD_BYTES_MAX} bytes")
        headers: dict[str, str] = {}
        try:
            for name, value in pairs:
                headers[_LOWERED[name]] = value.decode("latin-1")
        except KeyError:
            headers = self._read_headers(pairs)
        else:
            if len(headers) != len(pairs):
                headers = self._read_headers(pairs)
        method = self._parser.get_method()
        if self._url == b"/" and method == b"POST":
            self._request = request = Request("POST", "/", "", headers)
        else:
            self._request = request = self._general_request(method, headers)
        if "host" not in headers and self._parser.get_http_version() != "1.0":
            raise Unacceptable(400, "a request needs a Host header")
        if not _SPECIAL_HEADERS.isdisjoint(headers):
            self._check_special(request)
        length = headers.get("content-length", "")
        if len(length) > 6:
            self._check_length(length)

    def _check_length(self, length: str) -> None:
        # The parser accepts any number of leading zeros, and int() only 4,300 digits.
        if len(length) > _LENGTH_DIGITS_MAX:
            raise Unacceptable(400, f"a Content-Length has at most {_LENGTH_DIGITS_MAX} digits")
        if int(length) > BODY_BYTES_MAX:
            raise Unacceptable(413, f"the body is over {BODY_BYTES_MAX} bytes")

    def _general_request(self, method: bytes, headers: dict[str, str]) -> Request:
        path, _, query = self._url.decode("latin-1").partition("?")
        # After CONNECT, whatever it names, the parser would read no more requests.
        if not path.startswith("/") or method == b"CONNECT":
            raise Unacceptable(400, "the request names no path of this server")
        return Request(method.decode(), path, query, headers)

    def _check_special(self, request: Request) -> None:
        headers = request.headers
        if "upgrade" in headers:
            raise Unacceptable(400, "this server upgrades to no other protocol")
        if headers.get("transfer-encoding", "chunked").lower() != "chunked":
            raise Unacceptable(400, "the only transfer encoding is chunked")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise Unacceptable(415, "compressed bodies are not supported")
        expectation = headers.get("expect")
        if expectation is not None:
            if expectation.lower() != "100-continue":
                raise Unacceptable(417, "the only expectation supported is 100-continue")
            self.expects_continue()

    def on_body(self, body: bytes) -> None:
        if not self._body:
            self._body = body
            return
        if type(self._body) is not bytearray:
            self._body = bytearray(self._body)
        self._body += body
        if len(self._body) > BODY_BYTES_MAX:
            raise Unacceptable(413, f"the body is over {BODY_BYTES_MAX} bytes")

    def on_message_complete(self) -> None:
        request = self._request
        if request is None:
            return
        if self._pairs:
            self._check_trailers()
            self._pairs = []
        request.body = self._body
        request.keep_alive = self._parser.should_keep_alive()
        if "connection" in request.headers:
            request.must_say_keep_alive = self._parser.get_http_version() == "1.0"
        self.completed += 1
        self.in_message = self.in_body = False
        self._request = None
        self._url = self._body = b""
        self._head_bytes = 0
        if self._body_bytes:
            self._body_bytes = self._seen_bytes = self._stuck_bytes = 0
        self.receive(request)


def _headers_bytes(pairs: list[tuple[bytes, bytes]]) -> int:
    """The bytes of headers, each with its colon, space and line end."""
    return sum(len(name) + len(value) + 4 for name, value in pairs)
