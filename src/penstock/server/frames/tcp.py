"""The frame server on TCP: every user of this host may connect; other addresses need token and TLS.

A host name counts as loopback only if all its addresses are loopback addresses. On any other
address, plain TCP or a missing token needs the flag --insecure-open-to-the-network, for networks
that are protected by other means.
"""

import asyncio
import errno
import socket
from collections.abc import Callable
from ipaddress import ip_address
from typing import Final, NamedTuple

from penstock.errors import AddressInUse, InvalidField
from penstock.files import read_secret
from penstock.server.frames.connection import FrameConnection
from penstock.server.frames.server import FrameServer
from penstock.server.tls import ServerTls, over_tls

PORT: Final = 7420
_TOKEN_CHARS_MIN: Final = 16


class TcpAddress(NamedTuple):
    """A host and a port; port 0 lets the system choose one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_address(text: str) -> TcpAddress:
    """An address from `HOST:PORT`, `[V6]:PORT` or `HOST`. Raises InvalidField."""
    host, port = text, str(PORT)
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or rest[:1] not in ("", ":"):
            raise InvalidField(f"address: {text[:100]!r} is not of the form [HOST]:PORT")
        port = rest[1:] or port
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port[:6]) > 65_535:
        raise InvalidField(f"address: {text[:100]!r} is not of the form HOST:PORT")
    return TcpAddress(host, int(port))


def is_loopback(host: str) -> bool:
    """Whether all addresses of the host are loopback. Raises InvalidField if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a host name"
        raise InvalidField(f"address: the host {host[:100]!r} cannot be found: {reason}") from None
    return all(ip_address(entry[4][0]).is_loopback for entry in found)


def check_exposure(
    address: TcpAddress,
    *,
    has_token: bool,
    has_tls: bool,
    insecure: bool = False,
    override: str = "--insecure-open-to-the-network",
) -> None:
    """Refuses an address other than loopback without token and TLS. Raises InvalidField.

    `override` is the flag by which the user allows it.
    """
    if insecure or (has_token and has_tls) or is_loopback(address.host):
        return
    missing = " and ".join(
        flag
        for flag, given in (("--token-file", has_token), ("--tls-cert with --tls-key", has_tls))
        if not given
    )
    raise InvalidField(
        f"address: {address} can be reached from other machines: give {missing}, listen on "
        f"127.0.0.1, or pass {override}"
    )


def read_token(path: str) -> str:
    """The token in a file, without the white space around it. Raises InvalidField."""
    try:
        token = read_secret(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InvalidField(f"token file: cannot read {path!r}: {reason}") from None
    if len(token) < _TOKEN_CHARS_MIN:
        raise InvalidField(
            f"token file: {path!r} holds {len(token)} characters; at least {_TOKEN_CHARS_MIN}"
        )
    return token


async def listen_tcp(
    server: FrameServer,
    address: TcpAddress,
    *,
    token: str | None = None,
    tls: ServerTls | None = None,
    insecure: bool = False,
) -> asyncio.Server:
    """Listens on a TCP address.

    Raises InvalidField if `check_exposure` does, AddressInUse if it is taken.
    """
    check_exposure(address, has_token=token is not None, has_tls=tls is not None, insecure=insecure)
    return await open_listener(lambda: _TcpConnection(server, token=token), address, tls)


async def open_listener(
    connect: Callable[[], asyncio.Protocol], address: TcpAddress, tls: ServerTls | None
) -> asyncio.Server:
    """Listens on an address with a protocol for each connection.

    Raises AddressInUse, or InvalidField if it cannot be listened on.
    """
    try:
        return await asyncio.get_running_loop().create_server(
            over_tls(connect, tls),
            address.host,
            address.port,
            backlog=1_024,
        )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"address: another program listens on {address}; stop it, or choose another port"
            ) from None
        reason = error.strerror or str(error)
        raise InvalidField(f"address: cannot listen on {address}: {reason}") from None
    except UnicodeError:
        raise InvalidField(f"address: {address.host[:100]!r} is not a host's name") from None


class _TcpConnection(FrameConnection):
    __slots__ = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        prepare_tcp(transport)
        super().connection_made(transport)


def prepare_tcp(transport: asyncio.BaseTransport) -> None:
    """Turns off Nagle's delay, and turns on TCP keep-alive, which ends dead connections."""
    link = transport.get_extra_info("socket")
    if link is None:
        return
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
