"""Frames over a Unix socket: for processes of the same user on the same machine."""

import asyncio
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

from penstock.errors import PenstockError, ProtocolError
from penstock.server.frames.connection import FrameConnection
from penstock.server.frames.server import FrameServer

_CREDENTIALS: Final = struct.Struct("3i")


async def listen_unix(server: FrameServer, path: Path) -> asyncio.Server:
    """Lets processes of the same user in at a socket that only they can reach.

    The caller sees to it that the directory is 0700 and that no other server uses the path.
    """
    link = _bind_unix(path)
    try:
        return await asyncio.get_running_loop().create_unix_server(
            lambda: FrameConnection(server, refuse=_stranger), sock=link, backlog=1_024
        )
    except BaseException:
        link.close()
        raise


def _bind_unix(path: Path) -> socket.socket:
    # One that a crash left behind refuses every connection, and the new one, too.
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


def _stranger(transport: asyncio.BaseTransport) -> PenstockError | None:
    """Why the process at the other end of a Unix socket is refused, if it is."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None  # there the 0700 directory stands alone
    link = transport.get_extra_info("socket")
    found = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(found)
    if uid == os.geteuid():
        return None
    return ProtocolError(f"this store belongs to user {os.geteuid()}; user {uid} may not use it")
