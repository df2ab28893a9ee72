"""Addresses of servers: each one opens a connected socket."""

import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Protocol

from penstock.errors import BackendLost

if TYPE_CHECKING:
    import ssl

_CONNECT_S_MIN: Final = 10.0
_PAUSE_S: Final = 0.02
_PAUSE_S_MAX: Final = 1.0


class ServerEndpoint(Protocol):
    """The address of a server, which opens a connected socket."""

    shown: str
    token: str | None
    tls: "ssl.SSLContext | None"
    server_name: str | None
    # The options that the server's store must run with; those the caller did not name are absent.
    options: Mapping[str, str]
    # If the server closes each connection at once, connecting is repeated for at least this long.
    reconnect_s_min: float

    def open(self, connect_s: float) -> socket.socket:
        """A connected socket. Raises BackendLost, or the error of a server that cannot start."""
        ...


class TcpEndpoint:
    """A server at a host and port."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str | None = None,
        tls: "ssl.SSLContext | None" = None,
    ) -> None:
        self.shown = f"penstock://{host}:{port}"
        self.token = token
        self.tls = tls
        self.server_name = host if tls is not None else None
        self.options: Mapping[str, str] = {}
        self.reconnect_s_min = 0.0
        self._address = (host, port)

    def open(self, connect_s: float) -> socket.socket:
        """A connected socket; tries again for `connect_s`. Raises BackendLost."""
        deadline_s = time.monotonic() + connect_s
        pause_s = _PAUSE_S
        while True:
            try:
                link = socket.create_connection(
                    self._address, timeout=max(connect_s, _CONNECT_S_MIN)
                )
            except (OSError, UnicodeError) as error:
                if time.monotonic() + pause_s > deadline_s:
                    reason = getattr(error, "strerror", None) or str(error)
                    raise BackendLost(f"{self.shown}: cannot be reached: {reason}") from None
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S_MAX)
            else:
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return link
