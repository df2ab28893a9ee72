"""Frames over a Unix socket: for processes of the same user on the same machine."""

import asyncio
import os
import socket
from contextlib import suppress
from pathlib import Path

from penstock.backends.remote.daemon import peer_credentials
from penstock.errors import PenstockError, ProtocolError
from penstock.server.frames.connection import FrameConnection
from penstock.server.frames.server import FrameServer


async def listen_unix(server: FrameServer, path: Path) -> asyncio.Server:
    """Listens on a Unix socket, for processes of the same user.

    The caller makes sure that the directory is 0700 and that no other server uses the path.
    """
    link = _bind_unix(path)
    try:
        return await asyncio.get_running_loop().create_unix_server(
            lambda: FrameConnection(server, refuse=_check_peer), sock=link, backlog=1_024
        )
    except BaseException:
        link.close()
        raise


def _bind_unix(path: Path) -> socket.socket:
    # A socket that a crash left behind would make bind fail.
    with suppress(FileNotFoundError):
        path.unlink()
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.bind(str(path))
        path.chmod(0o600)
        link.setblocking(False)
    except BaseException:
        link.close()
        raise
    return link


def _check_peer(transport: asyncio.BaseTransport) -> PenstockError | None:
    """The error for a process of another user at the other end of a Unix socket, or None."""
    peer = peer_credentials(transport.get_extra_info("socket"))
    # If the system does not report the peer's user, only the 0700 directory protects the socket.
    if peer is None or peer[1] == os.geteuid():
        return None
    uid = peer[1]
    return ProtocolError(f"this store belongs to user {os.geteuid()}; user {uid} may not use it")
