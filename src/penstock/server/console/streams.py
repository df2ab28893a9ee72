"""Changes of queues, pushed to open pages as server-sent events.

What changed is encoded once for all pages that show the same, however many they are. A page that
does not read fast enough misses events, and is told to ask for everything again.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from penstock.server.console.status import QueueStatus, Status
from penstock.server.console.views import changes
from penstock.server.http import HttpConnection, first_lines

STREAMS_MAX: Final = 1_000
# A sign of life for a page that shows queues in which nothing happens.
_SILENT_TICKS_MAX: Final = 5
_BEHIND: Final = b"event: behind\ndata: {}\n\n"
_HEAD: Final = (
    b"Content-Type: text/event-stream\r\nCache-Control: no-store\r\n"
    b"X-Content-Type-Options: nosniff\r\n\r\n: open\n\n"
)
_encode: Final = msgspec.json.Encoder().encode


class _Stream:
    """One open page: the queue it shows, or "" for all of them."""

    __slots__ = ("connection", "is_behind", "queue")

    def __init__(self, connection: HttpConnection, queue: str) -> None:
        self.connection = connection
        self.queue = queue
        self.is_behind = False


class Streams:
    """The open pages of one console."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._streams: set[_Stream] = set()
        self._leave: Callable[[], None] | None = None
        self._silent_ticks = 0

    def open(self, connection: HttpConnection, queue: str) -> bool:
        """Sends changes on this connection from now on; False if there are too many pages."""
        if len(self._streams) >= STREAMS_MAX:
            return False
        stream = _Stream(connection, queue)
        connection.on_gone = lambda: self._close(stream)
        connection.begin_stream(first_lines(200, asyncio.get_running_loop().time()) + _HEAD)
        self._streams.add(stream)
        if self._leave is None:
            self._leave = self._status.watch(self._send)
        return True

    def _close(self, stream: _Stream) -> None:
        self._streams.discard(stream)
        if not self._streams and self._leave is not None:
            self._leave()
            self._leave = None

    def _send(self) -> None:
        """Sends what changed when the queues were last read."""
        status = self._status
        changed = {each.info.queue: each for each in status.changed()}
        is_silent = not (changed or status.gone or status.error)
        self._silent_ticks = self._silent_ticks + 1 if is_silent else 0
        if self._silent_ticks % _SILENT_TICKS_MAX and is_silent:
            return
        events: dict[str, bytes] = {}
        for stream in list(self._streams):
            queue = stream.queue
            if queue not in events:
                events[queue] = self._event(queue, changed)
            if stream.is_behind:
                stream.is_behind = not stream.connection.send_part(_BEHIND)
            elif events[queue]:
                stream.is_behind = not stream.connection.send_part(events[queue])

    def _event(self, queue: str, changed: dict[str, QueueStatus]) -> bytes:
        event = changes(self._status, changed, queue)
        return b"data: " + _encode(event) + b"\n\n"

    def close(self) -> None:
        """Ends all streams; the pages connect again when the server is back."""
        for stream in list(self._streams):
            stream.connection.close()
