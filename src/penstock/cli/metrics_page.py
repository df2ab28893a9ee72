"""A page of figures for Prometheus, served by a command that has no event loop of its own.

Anyone on this machine can connect, so there are limits: one request of 16 KiB per connection, ten
seconds to send it and ten to read the answer, and 32 connections. The oldest connection is closed
when there are more, so that silent ones cannot keep Prometheus out. A Host that is not a name of
this machine is refused, because a web page could have it by DNS rebinding. Nothing is printed about
requests, and an error in answering one is printed as a line without a traceback.
"""

import socket
import threading
import time
from socketserver import BaseRequestHandler, TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final

from penstock.output import report

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

HOST: Final = "127.0.0.1"
CONNECTIONS_MAX: Final = 32
_TIMEOUT_S: Final = 10.0
_HEAD_BYTES_MAX: Final = 16 * 1024
_HOSTS: Final = frozenset({b"localhost", HOST.encode(), b"[::1]"})


class MetricsPage:
    """Serves the figures of a registry on a port of this machine until it is closed.

    Raises OSError if the port cannot be listened on.
    """

    def __init__(self, port: int, registry: "CollectorRegistry") -> None:
        self._server = _PageServer((HOST, port), registry)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening, and ends all connections."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _PageServer(ThreadingMixIn, TCPServer):
    """One thread for each connection, and at most `CONNECTIONS_MAX` connections."""

    allow_reuse_address = True
    daemon_threads = True
    # Not waiting for the threads: one with a silent client ends only after its timeout.
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], registry: "CollectorRegistry") -> None:
        self._registry = registry
        self._open: dict[socket.socket, None] = {}
        self._opening = threading.Lock()
        super().__init__(address, BaseRequestHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for a connection; ends the oldest one if there are too many."""
        with self._opening:
            oldest = next(iter(self._open)) if len(self._open) >= CONNECTIONS_MAX else None
            if oldest is not None:
                del self._open[oldest]
            self._open[request] = None
        if oldest is not None:
            _end(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection."""
        with self._opening:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Closes the listening socket, and ends the connections."""
        super().server_close()
        with self._opening:
            remaining, self._open = self._open, {}
        for connection in remaining:
            _end(connection)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answers one request; one that breaks off or takes too long is not reported."""
        try:
            answer = self._answer(_read_head(request))
            request.settimeout(_TIMEOUT_S)
            request.sendall(answer)
        except OSError:
            return
        except Exception as error:
            report(f"metrics: {type(error).__name__} in answering")

    def _answer(self, head: bytes) -> bytes:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        if len(head) > _HEAD_BYTES_MAX:
            return _response("431 Request Header Fields Too Large")
        first, *headers = head.split(b"\r\n")
        method, _, target = first.partition(b" ")
        path, _, version = target.partition(b" ")
        if not version.startswith(b"HTTP/1."):
            return _response("400 Bad Request")
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed")
        if not all(map(_is_own_host, headers)):
            return _response("403 Forbidden", b"Host is not a name of this machine\n")
        if path.partition(b"?")[0] not in (b"/", b"/metrics"):
            return _response("404 Not Found", b"the figures are at /metrics\n")
        page = generate_latest(self._registry)
        return _response("200 OK", page, CONTENT_TYPE_LATEST, with_body=method == b"GET")


def _read_head(connection: socket.socket) -> bytes:
    """The request up to its empty line, or slightly more than the limit. Raises OSError."""
    until_s = time.monotonic() + _TIMEOUT_S
    head = b""
    while b"\r\n\r\n" not in head and len(head) <= _HEAD_BYTES_MAX:
        connection.settimeout(max(0.001, until_s - time.monotonic()))
        piece = connection.recv(4_096)
        if not piece:
            break
        head += piece
    return head.partition(b"\r\n\r\n")[0]


def _is_own_host(header: bytes) -> bool:
    """Whether a header is not Host, or a Host with a name of this machine."""
    name, _, value = header.partition(b":")
    if name.strip().lower() != b"host":
        return True
    host, colon, port = value.strip().lower().rpartition(b":")
    return (host if colon and port.isdigit() else value.strip().lower()) in _HOSTS


def _response(
    status: str, body: bytes = b"", kind: str = "text/plain", *, with_body: bool = True
) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")


def _end(connection: socket.socket) -> None:
    """Ends a connection for the thread that waits for it, which then closes it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        # It was closed already.
        return
