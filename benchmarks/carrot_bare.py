"""The limit of the Carrot broker: a server of its protocol on uvloop without a queue.

It reads the same requests and gives answers of the same bytes; its messages are in a deque. It has
no claims, limits, waiting reads or journal. It only reads from sockets and writes to them, so no
broker in Python on this event loop is faster.
"""

import asyncio
import signal
import struct
import sys
from collections import deque
from functools import partial
from typing import cast

import uvloop

from penstock.wire.carrot.session import GET, HEAD, HEAD_BYTES, PUT

_ID = b"0" * 36
_ROW = struct.Struct("<III")


class BareBroker(asyncio.Protocol):
    """One connection; all share the messages."""

    def __init__(self, messages: deque[bytes]) -> None:
        self._messages = messages
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        at, end, out = 0, len(data), []
        while end - at >= HEAD_BYTES:
            opcode, queue_bytes, _, number, size = HEAD.unpack_from(data, at)
            start = at + HEAD_BYTES + queue_bytes
            if start + size > end:
                break
            at = start + size
            out.append(self._answer(opcode, number, data[start:at]))
        self._rest = data[at:]
        if out:
            self._transport.write(b"".join(out) if len(out) > 1 else out[0])

    def _answer(self, opcode: int, number: int, body: bytes) -> bytes:
        if opcode == PUT:
            self._messages.append(body)
            return HEAD.pack(0, 0, 0, number, len(_ID)) + _ID
        if opcode == GET:
            message = self._messages.popleft()
            row = _ROW.pack(1, len(message), 1)
            return HEAD.pack(0, 0, 1, number, len(row) + len(message)) + row + message
        return HEAD.pack(0, 0, 0, number, 0)


async def main(port: int) -> None:
    """Serves until SIGTERM."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    await loop.create_server(partial(BareBroker, deque()), "127.0.0.1", port)
    await ended.wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
