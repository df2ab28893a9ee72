"""A TCP proxy that cuts a connection at the n-th request of a client, or holds that request.

    proxy = FaultProxy(("127.0.0.1", 6379), resp_request)
    queues = penstock.connect(f"redis://127.0.0.1:{proxy.port}")
    fault = proxy.arm(3, "after", cut=True)      # the third request from now on
    queues.pull_many("orders", 100)
    proxy.disarm()

A fault before a request: the server never gets it, or gets it late. A fault after it: the server
executes it, and its answer is lost or late. Requests are counted over all connections, so the n-th
is the same one in each run of the same commands. A function for each protocol finds the end of a
request.
"""

import asyncio
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Literal

Moment = Literal["before", "after"]
# The size of the request at the beginning of the bytes; 0 if its end is not there.
Split = Callable[[bytes], int]
_READ_BYTES: Final = 262_144
# How long the answer to a request is awaited: some protocols have requests without one.
_ANSWER_S: Final = 0.1
_AMQP_HEADER: Final = struct.Struct(">BHI")
_AMQP_METHOD: Final = 1
_AMQP_PUBLISH: Final = struct.pack(">HH", 60, 40)
_FRAME_SIZE: Final = struct.Struct("<I")


def resp_request(data: bytes) -> int:
    """A command for Redis: an array of texts."""
    end = data.find(b"\r\n")
    if end < 0:
        return 0
    at = end + 2
    for _ in range(int(data[1:end])):
        end = data.find(b"\r\n", at)
        if end < 0:
            return 0
        at = end + 2 + int(data[at + 1 : end]) + 2
    return at if at <= len(data) else 0


def http_request(data: bytes) -> int:
    """A request of HTTP/1.1, whose body has a Content-Length."""
    head, separator, _ = data.partition(b"\r\n\r\n")
    if not separator:
        return 0
    size = len(head) + 4
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            size += int(value)
    return size if size <= len(data) else 0


def penstock_request(data: bytes) -> int:
    """A frame of Penstock's own wire; the first one with the prelude before it."""
    at = 8 if data.startswith(b"\x89PNSTK") else 0
    if len(data) < at + 10:
        return 0
    size = at + 10 + _FRAME_SIZE.unpack_from(data, at)[0]
    return int(size) if size <= len(data) else 0


def amqp_request(data: bytes) -> int:
    """A frame of AMQP 0-9-1; a publish with its header and its body."""
    if data.startswith(b"AMQP"):
        return 8 if len(data) >= 8 else 0
    end = _amqp_frame(data, 0)
    if not end or data[0] != _AMQP_METHOD or data[7:11] != _AMQP_PUBLISH:
        return end
    header, end = end, _amqp_frame(data, end)
    if not end:
        return 0
    (left,) = struct.unpack_from(">Q", data, header + 11)
    while left > 0:
        start, end = end, _amqp_frame(data, end)
        if not end:
            return 0
        left -= end - start - 8
    return end


def _amqp_frame(data: bytes, at: int) -> int:
    if len(data) < at + 7:
        return 0
    end = at + 8 + int(_AMQP_HEADER.unpack_from(data, at)[2])
    return end if end <= len(data) else 0


def nats_request(data: bytes) -> int:
    """A command of a NATS client: a line, and what it says that follows."""
    end = data.find(b"\r\n")
    if end < 0:
        return 0
    words = data[:end].split()
    if words and words[0].upper() in (b"PUB", b"HPUB"):
        end += 2 + int(words[-1])
    return end + 2 if end + 2 <= len(data) else 0


class ProxyFault:
    """What happens to one request; `is_met` once it has happened.

    A request that is held, or its answer, goes on after `release`; then `is_over` is set, once the
    server has answered the request.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        number: int,
        moment: Moment,
        cut: bool,
        met: Callable[[], None] | None,
    ) -> None:
        self.moment = moment
        self.cut = cut
        self.is_met = False
        self.is_over = threading.Event()
        self._loop = loop
        self._left = number
        self._met = met
        self._released = asyncio.Event()

    def counts_down(self) -> bool:
        """Whether this request is the n-th."""
        self._left -= 1
        return self._left == 0

    async def hold(self) -> None:
        """Notes that the request was met; returns when it may go on."""
        self.is_met = True
        if self._met is not None:
            self._met()
        if not self.cut:
            await self._released.wait()

    def release(self) -> None:
        """Lets what is held go on."""
        self._loop.call_soon_threadsafe(self._released.set)


class FaultProxy:
    """A proxy at a port of its own, in a thread of its own."""

    def __init__(self, server: tuple[str, int], split: Split) -> None:
        self._server = server
        self._split = split
        self._fault: ProxyFault | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._is_ending = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="fault-proxy", daemon=True
        )
        self._thread.start()
        listening = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._accept, "127.0.0.1", 0), self._loop
        )
        self._listener = listening.result()
        self.port: int = self._listener.sockets[0].getsockname()[1]

    def arm(
        self,
        number: int,
        moment: Moment,
        *,
        cut: bool = False,
        met: Callable[[], None] | None = None,
    ) -> ProxyFault:
        """Prepares a fault for the n-th request from now on, which is cut or held.

        `met` is called in the thread of the proxy when that request arrives, or is answered.
        """
        self._fault = ProxyFault(self._loop, number, moment, cut, met)
        return self._fault

    def disarm(self) -> None:
        """Lets everything pass from now on, what is held too."""
        fault, self._fault = self._fault, None
        if fault is not None:
            fault.release()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        try:
            if not self._is_ending:
                server_reader, server_writer = await asyncio.open_connection(*self._server)
                pair = _Pair(reader, writer, server_reader, server_writer)
                await pair.run(self._split, lambda: self._fault)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            await _until_closed(writer)

    def close(self) -> None:
        """Ends every connection and the thread."""
        self.disarm()
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._is_ending = True
        for listening in self._listener.sockets:
            self._loop.remove_reader(listening.fileno())
        for task in self._connections:
            task.cancel()
        # What was accepted last becomes a task of `_accept` in a later turn, and asyncio forgets
        # it open if the listener is closed before.
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)
        self._listener.close()


async def _until_closed(writer: asyncio.StreamWriter) -> None:
    """Waits for a transport's end: one that its loop does not see leaves an open socket."""
    with suppress(OSError):
        try:
            async with asyncio.timeout(_ANSWER_S):
                await writer.wait_closed()
        except TimeoutError:
            writer.transport.abort()
            await writer.wait_closed()


class _Pair:
    """The connection of a client, and the one to the server that belongs to it."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        server_writer: asyncio.StreamWriter,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._server_reader = server_reader
        self._server_writer = server_writer
        self._answered = asyncio.Event()
        self._may_answer = asyncio.Event()
        self._may_answer.set()

    async def run(self, split: Split, fault: Callable[[], ProxyFault | None]) -> None:
        """Passes bytes both ways until either side ends."""
        both = {
            asyncio.create_task(self._pass_requests(split, fault)),
            asyncio.create_task(self._pass_answers()),
        }
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            # What was written to the server still reaches it, if it reads.
            self._server_writer.close()
            self._writer.transport.abort()
            await _until_closed(self._server_writer)

    async def _pass_requests(self, split: Split, fault: Callable[[], ProxyFault | None]) -> None:
        unread = b""
        while data := await self._reader.read(_READ_BYTES):
            unread += data
            while size := split(unread):
                request, unread = unread[:size], unread[size:]
                armed = fault()
                if armed is None or not armed.counts_down():
                    self._server_writer.write(request)
                    continue
                await self._meet(armed, request)
                if armed.cut:
                    return

    async def _meet(self, fault: ProxyFault, request: bytes) -> None:
        if fault.moment == "before":
            await fault.hold()
            if not fault.cut:
                await self._ask(request)
        else:
            self._may_answer.clear()
            await self._ask(request)
            await fault.hold()
            if not fault.cut:
                self._may_answer.set()
        fault.is_over.set()

    async def _ask(self, request: bytes) -> None:
        """Sends a request and waits for its answer, which some requests do not have."""
        self._answered.clear()
        self._server_writer.write(request)
        with suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                await self._answered.wait()

    async def _pass_answers(self) -> None:
        while data := await self._server_reader.read(_READ_BYTES):
            self._answered.set()
            await self._may_answer.wait()
            self._writer.write(data)
