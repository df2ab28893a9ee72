"""Where a server is, and how to get a socket to it."""

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
    """Where a server is, and how to get a socket to it."""

    shown: str
    token: str | None
    tls: "ssl.SSLContext | None"
    server_name: str | None
    # What the server's store must be running with, as far as the caller has said.
    options: Mapping[str, str]
    # A server that closes each connection at once is tried again for at least this long.
    patience_s_min: float

    def open(self, patience_s: float) -> socket.socket:
        """A connected socket. Raises BackendLost, or why the server cannot be started."""
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
        self.patience_s_min = 0.0
        self._address = (host, port)

    def open(self, patience_s: float) -> socket.socket:
        """A connected socket; tries again until the patience is over. Raises BackendLost."""
        deadline_s = time.monotonic() + patience_s
        pause_s = _PAUSE_S
        while True:
            try:
                link = socket.create_connection(
                    self._address, timeout=max(patience_s, _CONNECT_S_MIN)
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
