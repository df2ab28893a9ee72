"""The memory that the connections of one server hold together, and its limit.

A connection that holds little is not counted: what a server does for a small request contains no
bookkeeping. Over the limit, the connections that hold the most are aborted, largest first, until
the rest is within it.
"""

import asyncio
from typing import Final, Protocol

# A connection that holds less is not counted.
COUNTED_BYTES_MIN: Final = 16 * 1024
# What a client must read of its answers in the time that it has, if there is as much.
WRITE_PROGRESS_BYTES: Final = 16 * 1024


class MemoryHolder(Protocol):
    """A connection; only `HeldBytes.count` sets `held_bytes`."""

    held_bytes: int

    def abort(self) -> None:
        """Closes the connection at once, and counts it as one that holds nothing."""
        ...


class HeldBytes:
    """The bytes that are held by the counted connections of a server."""

    def __init__(self, loop: asyncio.AbstractEventLoop, bytes_max: int) -> None:
        self.total_bytes = 0
        # How many connections were aborted because of the limit.
        self.aborted = 0
        self._loop = loop
        self._bytes_max = bytes_max
        self._holders: set[MemoryHolder] = set()
        self._abort_is_planned = False

    def count(self, connection: MemoryHolder, held_bytes: int) -> None:
        """Sets how many bytes a connection holds now; 0 if it is not to be counted."""
        if held_bytes == connection.held_bytes:
            return
        self.total_bytes += held_bytes - connection.held_bytes
        connection.held_bytes = held_bytes
        if held_bytes:
            self._holders.add(connection)
        else:
            self._holders.discard(connection)
        if self.total_bytes > self._bytes_max and not self._abort_is_planned:
            # Not here: this may be called from within a transport or a parser.
            self._abort_is_planned = True
            self._loop.call_soon(self._abort_largest)

    def _abort_largest(self) -> None:
        self._abort_is_planned = False
        for connection in sorted(self._holders, key=lambda each: each.held_bytes, reverse=True):
            if self.total_bytes <= self._bytes_max:
                return
            self.aborted += 1
            connection.abort()
