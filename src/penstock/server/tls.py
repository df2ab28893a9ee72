"""Transports over TLS that show how much of what was written is unsent.

A TLS transport of asyncio or uvloop passes all it is given to the TCP transport below it, and does
not count what waits there: of an answer of megabytes that its client does not read,
`get_write_buffer_size` is 0. So no limit would hold for it. A `PacedTransport` keeps what was
written, and passes on PIECE_BYTES at a time while the TLS transport has nothing unsent. What it
cannot see is then less than 100 KiB a connection: the TCP transport's limit and one piece.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any, Final, cast

# The size of a TLS record.
PIECE_BYTES: Final = 16 * 1024
HANDSHAKE_S_MAX: Final = 10

ProtocolFactory = Callable[[], asyncio.Protocol]


def paced(factory: ProtocolFactory, tls: ssl.SSLContext | None) -> ProtocolFactory:
    """The factory for a listener: with TLS, its protocols get paced transports."""
    return factory if tls is None else lambda: PacedProtocol(factory())


class PacedProtocol(asyncio.Protocol):
    """Stands between a TLS transport and the protocol of a connection."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self._protocol = protocol
        self._transport: PacedTransport = None  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        below = cast(asyncio.Transport, transport)
        self._transport = PacedTransport(below, self._protocol)
        # The least unsent byte blocks it, and it is unblocked when there is none.
        below.set_write_buffer_limits(high=1, low=0)
        self._protocol.connection_made(self._transport)

    def data_received(self, data: bytes) -> None:
        self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport.clear()
        self._protocol.connection_lost(error)

    def pause_writing(self) -> None:
        self._transport.block()

    def resume_writing(self) -> None:
        self._transport.unblock()


class PacedTransport(asyncio.Transport):
    """A transport for one protocol; `below` is the TLS transport."""

    def __init__(self, below: asyncio.Transport, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._below = below
        self._protocol = protocol
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        # Whether the TLS transport has something unsent, and whether the protocol is paused.
        self._is_blocked = False
        self._is_paused = False
        self._closing = False
        self.set_write_buffer_limits()

    # Writing.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or not data:
            return
        if self._unsent or self._is_blocked or len(data) > PIECE_BYTES:
            self._unsent.append(memoryview(data))
            self._unsent_bytes += len(data)
            self._pump()
        else:
            self._below.write(data)
        if not self._is_paused and self.get_write_buffer_size() > self._high_bytes:
            self._is_paused = True
            self._protocol.pause_writing()

    def _pump(self) -> None:
        """Passes on pieces until the TLS transport has something unsent."""
        unsent = self._unsent
        while unsent and not self._is_blocked:
            piece = unsent[0][:PIECE_BYTES]
            if len(piece) == len(unsent[0]):
                unsent.popleft()
            else:
                unsent[0] = unsent[0][PIECE_BYTES:]
            self._unsent_bytes -= len(piece)
            self._below.write(piece)
        if self._closing and not unsent:
            self._below.close()

    def block(self) -> None:
        """The TLS transport has something unsent."""
        self._is_blocked = True

    def unblock(self) -> None:
        """The TLS transport has nothing unsent any more."""
        self._is_blocked = False
        self._pump()
        if self._is_paused and self.get_write_buffer_size() <= self._low_bytes:
            self._is_paused = False
            self._protocol.resume_writing()

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes + self._below.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high_bytes = 65_536 if high is None else high
        self._low_bytes = self._high_bytes // 4 if low is None else low

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low_bytes, self._high_bytes

    def can_write_eof(self) -> bool:
        return False

    # Ending.

    def clear(self) -> None:
        """Drops what is unsent: the connection has ended."""
        self._closing = True
        self._unsent.clear()
        self._unsent_bytes = 0

    def close(self) -> None:
        """Closes the connection once everything is sent."""
        if not self._closing:
            self._closing = True
            self._pump()

    def abort(self) -> None:
        """Closes the connection at once."""
        self.clear()
        self._below.abort()

    def is_closing(self) -> bool:
        return self._closing or self._below.is_closing()

    # What the TLS transport does.

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._below.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._below.pause_reading()

    def resume_reading(self) -> None:
        self._below.resume_reading()

    def is_reading(self) -> bool:
        return self._below.is_reading()
