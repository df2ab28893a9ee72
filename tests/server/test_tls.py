"""Answers over TLS that are not read, which the event loop's own transports do not show."""

import asyncio
import random
import socket
import ssl
from typing import Any

import pytest
import uvloop

from penstock.server.frames.tcp import server_tls
from penstock.server.tls import PIECE_BYTES, paced
from penstock.service import CreateQueue, Peek, Push
from penstock.wire.frames.bodies import encode_command
from penstock.wire.frames.frames import Hello, encode_hello
from tests.server.conftest import TIMEOUT_S, limit_times, until
from tests.server.frames.test_ipc import FrameWire

MIB = 1024 * 1024


class RandomSender(asyncio.Protocol):
    """Sends as much as it is asked for, in writes of random sizes while it may write."""

    def __init__(self, sizes):
        self.paused = 0
        self.sent = bytearray()
        self.transport: Any = None
        self._sizes = iter(sizes)
        self._is_paused = False

    def connection_made(self, transport):
        self.transport = transport
        transport.set_write_buffer_limits(50_000)

    def data_received(self, data):
        self._send()

    def _send(self):
        for size in self._sizes:
            data = random.Random(size).randbytes(size)
            self.sent += data
            self.transport.write(data)
            if self._is_paused:
                return
        self.transport.close()

    def pause_writing(self):
        assert self.transport.get_write_buffer_size() > 50_000
        self.paused += 1
        self._is_paused = True

    def resume_writing(self):
        assert self.transport.get_write_buffer_size() <= 12_500
        self._is_paused = False
        self._send()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_all_that_is_written_arrives_in_order_and_the_protocol_is_paused(run, certificate):
    rng = random.Random(7)
    sizes = [rng.choice([1, 100, PIECE_BYTES, PIECE_BYTES + 1, 300_000]) for _ in range(200)]
    sender = RandomSender(sizes)
    received = bytearray()

    def read(port):
        context = ssl.create_default_context(cafile=certificate[0])
        with (
            socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as link,
        ):
            link.sendall(b"x")
            # What the sockets of both ends do not hold stays with the sender.
            until(lambda: sender.paused)
            while piece := link.recv(65_536):
                received.extend(piece)

    async def main():
        tls = server_tls(*certificate)
        loop = asyncio.get_running_loop()
        factory = paced(lambda: sender, tls)
        listener = await loop.create_server(factory, "127.0.0.1", 0, ssl=tls)
        port = listener.sockets[0].getsockname()[1]
        await asyncio.wait_for(asyncio.to_thread(read, port), TIMEOUT_S)
        listener.close()

    run(main())
    assert sender.paused > 0
    assert received == sender.sent
    assert len(received) == sum(sizes)


def test_an_answer_over_tls_that_is_not_read_is_counted_and_ends_its_connection(serve, certificate):
    """Row 13."""
    server = serve(tls=server_tls(*certificate))
    context = ssl.create_default_context(cafile=certificate[0])
    with FrameWire(server) as owner:
        owner.ask(1, CreateQueue("orders"))
        for _ in range(8):
            owner.ask(2, Push("orders", bytes(MIB - 1_000)))
        with (
            socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as link,
        ):
            link.sendall(encode_hello(Hello("test")) + encode_command(1, Peek("orders", 8)))
            until(lambda: server.frames.held.total_bytes > 2 * MIB)
            # Some of it: the rest does not leave the server's sight.
            for _ in range(20):
                assert link.recv(65_536)
            assert server.frames.held.total_bytes > 2 * MIB
            limit_times(server.call, server.frames, stall_s_max=0.4)
            until(lambda: len(server.frames.connections) == 1)
            assert server.frames.held.total_bytes == 0
