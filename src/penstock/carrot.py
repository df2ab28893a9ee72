"""A client of a Carrot broker: `penstock serve --carrot 11311`, or any other that speaks Carrot.

    with penstock.carrot.connect("127.0.0.1", 11311) as broker:
        broker.add("orders")
        broker.put("orders", b"hello")
        with broker.get("orders", wait=20) as message:
            print(message.body)

`connect` opens one connection for any number of requests (the extension), a `CarrotClient`, which
may be used by one thread at a time. `SingleClient` uses the original protocol: it opens a
connection for each request. Everything here blocks.
"""

import socket
import ssl
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from penstock.client import to_bytes, to_list
from penstock.errors import (
    BackendLost,
    BatchRefused,
    InvalidField,
    PenstockError,
    ProtocolError,
)
from penstock.public import Seconds, to_ms
from penstock.service import BATCH_ITEMS_MAX
from penstock.wire.carrot.reasons import EMPTY, error_of, read_reason
from penstock.wire.carrot.session import (
    EXTEND,
    GET,
    HEAD,
    HEAD_BYTES,
    PUT,
    PUT_MANY,
    REQUEST_MAX,
    SESSION_ACK,
    SESSION_ADD,
    SESSION_NACK,
    SESSION_REMOVE,
    WAIT_BY_QUEUE,
    SessionAnswer,
    encode_add,
    encode_messages,
    encode_session_request,
    encode_tags,
    read_given,
    read_session_answer,
)
from penstock.wire.carrot.single import (
    ACK,
    ADD,
    ERROR,
    NACK,
    READ,
    REMOVE,
    SUCCESS,
    WRITE,
    SingleAnswer,
    SingleRequest,
    encode_request,
    encode_token,
    read_answer,
    read_message,
)

TIMEOUT_S: Final = 30.0
_CHUNK_BYTES: Final = 256 * 1024


class CarrotMessage:
    """A message that was read: acknowledge it with `ack`, or release it with `nack`.

    As a context manager it is acknowledged at the end of the block, and released if the block
    raises.
    """

    __slots__ = ("_client", "body", "is_answered", "receives", "tag")

    def __init__(self, client: "CarrotClient", tag: int, receives: int, body: bytes) -> None:
        self._client = client
        self.tag = tag
        # How often it was read, this time included.
        self.receives = receives
        self.body = body
        self.is_answered = False

    def ack(self) -> None:
        """Deletes it. Raises StaleReceipt if its time has run out."""
        self._client.ack([self])

    def nack(self) -> None:
        """Puts it back at the front of its queue."""
        self._client.nack([self])

    def extend(self, duration: Seconds) -> None:
        """Sets its deadline to `duration` seconds from now; raises StaleReceipt if it has ended."""
        self._client.extend([self], duration)

    def __enter__(self) -> "CarrotMessage":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self.is_answered:
            return
        if kind is None:
            self.ack()
        else:
            with suppress(PenstockError):
                self.nack()


class CarrotClient:
    """One connection to a broker. Closing it releases messages that are not acknowledged."""

    def __init__(self, link: socket.socket, token: str | None, timeout_s: float) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._first = b"" if token is None else encode_token(token)
        self._received = bytearray()
        self._number = 0

    # Messages.

    def put(self, queue: str, body: bytes | str) -> str:
        """Writes a message of any size and returns its id. Raises QueueFull and other errors."""
        return self._ask(PUT, queue, _message(body)).body.decode()

    def put_many(self, queue: str, bodies: Iterable[bytes | str]) -> None:
        """Writes several messages. Raises BatchRefused if some were refused."""
        messages = [_message(body) for body in to_list("bodies", bodies)]
        if messages:
            self._ask(PUT_MANY, queue, encode_messages(messages), len(messages))

    def get(self, queue: str, wait: Seconds | None = 0) -> CarrotMessage | None:
        """Reads a message, after a wait of at most `wait` seconds; None if there is none.

        With None the wait is the queue's own setting.
        """
        return next(iter(self.get_many(queue, 1, wait)), None)

    def get_many(
        self,
        queue: str,
        limit: int,
        wait: Seconds | None = 0,
        ack: Iterable[CarrotMessage] = (),
    ) -> list[CarrotMessage]:
        """Acknowledges messages and reads up to `limit` others, in one request.

        An answer has at most 2,000 messages and 8 MiB, whatever the limit: read again for more.
        """
        wait_ms = WAIT_BY_QUEUE if wait is None else to_ms("wait", wait)
        _check_whole("limit", limit, 1, BATCH_ITEMS_MAX)
        acked = list(ack)
        body = encode_tags([each.tag for each in acked], wait_ms)
        extra_s = self._timeout_s if wait is None else wait_ms / 1_000
        answer = self._ask(GET, queue, body, limit, extra_s)
        for each in acked:
            each.is_answered = True
        given = read_given(answer.items, answer.body)
        return [CarrotMessage(self, *row) for row in given]

    def ack(self, messages: Iterable[CarrotMessage]) -> None:
        """Deletes messages. Raises StaleReceipt, or BatchRefused if only some were deleted."""
        self._answer(SESSION_ACK, messages)

    def nack(self, messages: Iterable[CarrotMessage]) -> None:
        """Puts messages back at the front of their queues."""
        self._answer(SESSION_NACK, messages)

    def extend(self, messages: Iterable[CarrotMessage], duration: Seconds) -> None:
        """Sets the deadline of messages to `duration` seconds from now."""
        self._answer(EXTEND, messages, to_ms("duration", duration))

    def _answer(
        self, opcode: int, messages: Iterable[CarrotMessage], first: int | None = None
    ) -> None:
        settled = list(messages)
        if settled:
            tags = encode_tags([each.tag for each in settled], first)
            self._ask(opcode, "", tags, len(settled))
            for each in settled:
                each.is_answered = opcode != EXTEND

    # Queues.

    def add(self, queue: str, *, visibility_timeout: Seconds = 0, max_messages: int = 0) -> None:
        """Makes a queue. One that exists is left as it is; with settings, it must have them.

        Without `visibility_timeout` it is the broker's default, without `max_messages` no limit.
        """
        body = b""
        if visibility_timeout or max_messages:
            _check_whole("max_messages", max_messages, 0, REQUEST_MAX)
            body = encode_add(to_ms("visibility_timeout", visibility_timeout), max_messages)
        self._ask(SESSION_ADD, queue, body)

    def remove(self, queue: str) -> None:
        """Removes a queue with its messages; reads that wait on it end with QueueDeleted."""
        self._ask(SESSION_REMOVE, queue)

    # The connection.

    def _ask(
        self, opcode: int, queue: str, body: bytes = b"", count: int = 0, extra_s: float = 0
    ) -> SessionAnswer:
        if self._link.fileno() < 0:
            raise BackendLost("this connection was closed; connect again")
        number = self._number = self._number % REQUEST_MAX + 1
        request = encode_session_request(opcode, number, queue, body, count)
        try:
            self._link.settimeout(self._timeout_s + extra_s)
            self._link.sendall(self._first + request)
            self._first = b""
            answer = self._receive()
        except BaseException as error:
            # A late answer would be taken for that of the next request.
            self.close()
            if isinstance(error, OSError):
                raise _lost(error) from None
            raise
        if answer.number not in (number, 0):
            self.close()
            raise ProtocolError(f"the broker answered request {answer.number}, not {number}")
        if answer.status == SUCCESS:
            return answer
        if not answer.number:
            self.close()
        raise _refusal(answer)

    def _receive(self) -> SessionAnswer:
        received = self._received
        while True:
            answer = None
            if len(received) > 1 and received[0] == ERROR and received[1]:
                # A broker that refuses the connection answers as in the original protocol.
                refused = read_answer(received)
                if refused is not None:
                    raise error_of(refused.text.encode())
            else:
                answer = read_session_answer(received)
            if answer is not None:
                break
            chunk = self._link.recv(_CHUNK_BYTES)
            if not chunk:
                raise BackendLost("the broker closed the connection")
            received += chunk
        del received[: HEAD_BYTES + HEAD.unpack_from(received)[4]]
        return answer

    def close(self) -> None:
        """Closes the connection; messages that were not acknowledged are released."""
        self._link.close()

    def __enter__(self) -> "CarrotClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _message(body: object) -> bytes:
    """The bytes of a message; text is encoded. Raises InvalidField."""
    data = to_bytes(body)
    if not isinstance(data, bytes):
        raise InvalidField(f"body: expected bytes or text, got {type(body).__name__}")
    return data


def _check_whole(field: str, value: object, low: int, high: int) -> None:
    """Raises InvalidField unless the value is a whole number within these limits."""
    if type(value) is not int or not low <= value <= high:
        raise InvalidField(f"{field}: expected a whole number from {low} to {high}, got {value!r}")


def _refusal(answer: SessionAnswer) -> PenstockError:
    """The error for an ERROR; of several items, BatchRefused if only some were refused."""
    if not answer.items:
        return error_of(answer.body)
    statuses, reason = answer.body[: answer.items], answer.body[answer.items :]
    first = error_of(reason)
    if SUCCESS not in statuses:
        return first
    results: Sequence[Any] = [None if each == SUCCESS else first for each in statuses]
    refused = statuses.count(ERROR)
    return BatchRefused(
        f"{refused} of {len(statuses)} items were refused, the others done; the first: {first}",
        results,
    )


def connect(
    host: str,
    port: int,
    *,
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
    timeout: float = TIMEOUT_S,
) -> CarrotClient:
    """Opens a connection for any number of requests. Raises BackendLost or InvalidField."""
    return CarrotClient(_open(host, port, tls, timeout), token, timeout)


def _open(host: str, port: int, tls: ssl.SSLContext | None, timeout_s: float) -> socket.socket:
    _check_whole("port", port, 1, 65_535)
    try:
        link = socket.create_connection((host, port), timeout_s)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return link if tls is None else tls.wrap_socket(link, server_hostname=host)
    except OSError as error:
        raise BackendLost(
            f"{host}:{port}: no broker can be reached: {error.strerror or error}"
        ) from None


def _lost(error: OSError) -> BackendLost:
    return BackendLost(f"the connection to the broker broke: {error.strerror or error}")


class SingleClient:
    """The original protocol: a connection for each request. Safe for many threads."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        timeout: float = TIMEOUT_S,
    ) -> None:
        self._where = (host, port, tls, timeout)
        self._first = b"" if token is None else encode_token(token)

    def write(self, queue: str, message: bytes | str) -> str:
        """Writes a message of at most 255 bytes and returns its id."""
        return self._ask(SingleRequest(WRITE, queue, _message(message)))

    def add_queue(self, queue: str) -> None:
        """Makes a queue; one that exists is left as it is."""
        self._ask(SingleRequest(ADD, queue))

    def remove_queue(self, queue: str) -> None:
        """Removes a queue with its messages."""
        self._ask(SingleRequest(REMOVE, queue))

    @contextmanager
    def read(self, queue: str) -> Iterator[bytes | None]:
        """Reads a message and holds it during the block; None if there is none.

        It is acknowledged at the end of the block, and released if the block raises.
        """
        with _open(*self._where) as link:
            request = self._first + encode_request(SingleRequest(READ, queue))
            message = _exchange(link, request, read_message)
            if not isinstance(message, bytes):
                if message.status == ERROR and read_reason(message.text.encode())[0] == EMPTY:
                    yield None
                    return
                raise error_of(message.text.encode())
            try:
                yield message
            except BaseException:
                with suppress(OSError):
                    link.sendall(bytes((NACK,)))
                raise
            _check(_exchange(link, bytes((ACK,)), read_answer))

    def _ask(self, request: SingleRequest) -> str:
        with _open(*self._where) as link:
            return _check(_exchange(link, self._first + encode_request(request), read_answer))


def _exchange(link: socket.socket, request: bytes, read: Callable[[bytearray], Any]) -> Any:
    """Sends a request and reads until its answer is complete."""
    received = bytearray()
    try:
        link.sendall(request)
        while (answer := read(received)) is None:
            chunk = link.recv(_CHUNK_BYTES)
            if not chunk:
                raise BackendLost("the broker closed the connection")
            received += chunk
    except OSError as error:
        raise _lost(error) from None
    return answer


def _check(answer: SingleAnswer) -> str:
    if answer.status != SUCCESS:
        raise error_of(answer.text.encode())
    return answer.text
