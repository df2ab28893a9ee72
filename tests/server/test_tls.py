"""TLS under attack: handshakes at one instant or without an end, answers that are not read."""

import asyncio
import random
import select
import socket
import ssl
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import uvloop

from penstock.backends import scheduler
from penstock.server import tls as server_tls_module
from penstock.server.process import allow_many_files
from penstock.server.tls import (
    ENCRYPTED_BYTES,
    HANDSHAKE_S_MAX,
    HANDSHAKES_MAX,
    ServerTls,
    over_tls,
)
from penstock.service import CreateQueue, Peek, Push
from penstock.wire.frames.bodies import encode_command
from penstock.wire.frames.frames import Hello, encode_hello
from tests.measure import IN_SCORE, memory_bytes
from tests.server.carrot.test_serve import carrot_port
from tests.server.conftest import TIMEOUT_S, DaemonProcess, limit_times, until
from tests.server.frames.test_ipc import FrameWire
from tests.server.probe import probing
from tests.server.sqs.conftest import serve as serve_sqs
from tests.server.sqs.test_attacks import LONGEST_MS_MAX, ROUNDS

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
    some = [1, 100, ENCRYPTED_BYTES, ENCRYPTED_BYTES + 1, 300_000]
    sizes = [rng.choice(some) for _ in range(200)]
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
        tls = ServerTls(*certificate)
        loop = asyncio.get_running_loop()
        factory = over_tls(lambda: sender, tls)
        listener = await loop.create_server(factory, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        await asyncio.wait_for(asyncio.to_thread(read, port), TIMEOUT_S)
        listener.close()

    run(main())
    assert sender.paused > 0
    assert received == sender.sent
    assert len(received) == sum(sizes)


def test_an_answer_over_tls_that_is_not_read_is_counted_and_ends_its_connection(serve, certificate):
    """Row 13."""
    server = serve(tls=ServerTls(*certificate))
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


def client_hello():
    """The first bytes of a client."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


async def listen(factory, tls):
    """A listener and its port."""
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(over_tls(factory, tls), "127.0.0.1", 0)
    return listener, listener.sockets[0].getsockname()[1]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_handshakes_that_come_together_are_begun_in_many_turns_of_the_event_loop(
    run, certificate, monkeypatch
):
    # Each takes longer than this, so that a turn of the run queue begins one.
    monkeypatch.setattr(scheduler, "TURN_S", 0.0)

    async def main():
        loop = asyncio.get_running_loop()
        turn = 0
        begun_in: list[int] = []

        def count_turns():
            nonlocal turn
            turn += 1
            loop.call_soon(count_turns)

        tls = ServerTls(*certificate)
        tls.context.sni_callback = lambda *_: begun_in.append(turn)
        listener, port = await listen(asyncio.Protocol, tls)
        wires = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        count_turns()
        hello = client_hello()
        # The sockets of all of them are readable in the same turn.
        for _, writer in wires:
            writer.write(hello)
        for reader, _ in wires:
            assert await reader.read(1)
        for _, writer in wires:
            writer.transport.abort()
        listener.close()
        return begun_in

    begun_in = run(main())
    assert len(set(begun_in)) == len(begun_in) == 20


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("sent", ["nothing", "half a hello", "no hello", "no TLS"])
def test_a_connection_without_a_handshake_is_closed(run, sent, certificate, monkeypatch):
    """Row 20: at once if it is none, else after a time."""
    is_waiting = sent in ("nothing", "half a hello")
    monkeypatch.setattr(server_tls_module, "HANDSHAKE_S_MAX", 0.1 if is_waiting else 600)
    hello = client_hello()
    data = {
        "nothing": b"",
        "half a hello": hello[: len(hello) // 2],
        # Records without a message of a client.
        "no hello": hello[:3] + b"\x40\x00" + bytes(70_000),
        "no TLS": b"GET / HTTP/1.1\r\n\r\n",
    }[sent]

    async def main():
        made: list[asyncio.Protocol] = []

        def factory():
            made.append(asyncio.Protocol())
            return made[-1]

        listener, port = await listen(factory, ServerTls(*certificate))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        with suppress(ConnectionError):
            # An alert, or nothing.
            assert len(await asyncio.wait_for(reader.read(), TIMEOUT_S)) < 100
        writer.close()
        listener.close()
        assert len(made) == 1

    run(main())


class Greeter(asyncio.Protocol):
    """Greets each client."""

    def connection_made(self, transport):
        transport.write(b"welcome")


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
# The time of uvloop has milliseconds: 0 would be too long.
@pytest.mark.parametrize("patience_s", [-1, 600])
def test_a_handshake_too_many_ends_the_oldest_that_waits_for_its_client_or_itself(
    run, patience_s, certificate, monkeypatch
):
    """Row 20: the oldest if its client had its time, else the new one; others are completed."""
    monkeypatch.setattr(server_tls_module, "HANDSHAKES_MAX", 3)
    monkeypatch.setattr(server_tls_module, "PATIENCE_S", patience_s)
    context = ssl.create_default_context(cafile=certificate[0])

    async def main():
        listener, port = await listen(Greeter, ServerTls(*certificate))

        def connect(**options):
            return asyncio.open_connection("127.0.0.1", port, **options)

        def connect_by_tls():
            return connect(ssl=context, server_hostname="localhost")

        # Complete handshakes do not count.
        greeted = [await connect_by_tls() for _ in range(4)]
        for reader, _ in greeted:
            assert await reader.readexactly(7) == b"welcome"
        silent = [await connect() for _ in range(3)]
        if patience_s > 0:
            with pytest.raises(ConnectionError):
                await connect_by_tls()
        else:
            for reader, writer in silent[:2]:
                greeted.append(await connect_by_tls())
                assert await greeted[-1][0].readexactly(7) == b"welcome"
                with suppress(ConnectionError):
                    assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b""
                # The place of the oldest is free again; the next one takes it and goes on.
                silent.append(await connect())
                writer.close()
            del silent[:2]
        for _, writer in silent:
            writer.write(client_hello())
        for reader, _ in silent:
            # The handshakes that are left are continued.
            assert await asyncio.wait_for(reader.read(1), TIMEOUT_S)
        for _, writer in silent + greeted:
            writer.transport.abort()
        listener.close()

    run(main())


class SlowReader(asyncio.Protocol):
    """Stops reading after every piece, for a turn of the event loop."""

    def __init__(self):
        self.received = bytearray()
        self.ended = asyncio.Event()
        self.transport: Any = None

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        assert self.transport.is_reading()
        self.received += data
        self.transport.pause_reading()
        asyncio.get_running_loop().call_soon(self.transport.resume_reading)

    def connection_lost(self, error):
        self.ended.set()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_all_that_is_sent_arrives_though_reading_is_paused(run, version, certificate):
    sent = random.Random(3).randbytes(1_000_000)

    def send(port):
        context = ssl.create_default_context(cafile=certificate[0])
        context.minimum_version = context.maximum_version = version
        with (
            socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as link,
        ):
            link.sendall(sent)
            # Both sides say that they have ended.
            link.unwrap()

    async def main():
        server = SlowReader()
        listener, port = await listen(lambda: server, ServerTls(*certificate))
        await asyncio.wait_for(asyncio.to_thread(send, port), TIMEOUT_S)
        await asyncio.wait_for(server.ended.wait(), TIMEOUT_S)
        listener.close()
        assert server.received == sent

    run(main())


# Connections beyond the limit.
BEYOND = 100
# Connections at one instant.
CROWD = 1_000 if IN_SCORE else 100
CROWDS = {
    "nothing": lambda hello: [],
    "half a hello": lambda hello: [hello[: len(hello) // 2]],
    "single bytes": lambda hello: [hello[at : at + 1] for at in range(20)],
    "no TLS": lambda hello: [b"x" * 1_000],
    "hellos": lambda hello: [hello],
}


@pytest.fixture(scope="module", autouse=True)
def many_files():
    allow_many_files()


@pytest.fixture(scope="module")
def over_tls_daemon(tmp_path_factory, certificate):
    store = tmp_path_factory.mktemp("tls") / "store"
    words = ["--listen", "127.0.0.1:0", "--tls-cert", certificate[0], "--tls-key", certificate[1]]
    daemon = DaemonProcess(store, *words, "--http", "0")
    yield daemon
    daemon.process.terminate()
    daemon.process.wait(TIMEOUT_S)
    assert daemon.process.stderr is not None
    daemon.process.stderr.close()


@pytest.fixture(scope="module")
def serve_sqsr(certificate):
    """An SQS endpoint and a Carrot broker."""
    words = ["--tls-cert", certificate[0], "--tls-key", certificate[1], "--carrot", "0"]
    with serve_sqs("--store", "memory:", *words) as started:
        yield started


@pytest.mark.parametrize("protocol", ["frames", "carrot", "sqs"])
def test_silent_connections_have_a_limit_and_do_not_keep_others_out(
    over_tls_daemon, serve_sqsr, protocol, certificate, record_property
):
    """Row 20: connections whose handshakes are incomplete are not among those of a server."""
    server = over_tls_daemon if protocol == "frames" else serve_sqsr
    port = carrot_port(server) if protocol == "carrot" else server.port
    context = ssl.create_default_context(cafile=certificate[0])
    before_bytes = memory_bytes(server.process.pid)
    closed = select.poll()
    with ExitStack() as stack:
        for _ in range(HANDSHAKES_MAX + BEYOND):
            wire = stack.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT_S))
            closed.register(wire, select.POLLIN)
        # Long before the first of them has had its time for a handshake.
        until(lambda: len(closed.poll(0)) >= BEYOND, HANDSHAKE_S_MAX / 2)
        held_bytes = memory_bytes(server.process.pid) - before_bytes

        def is_served():
            with (
                socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as plain,
                suppress(ConnectionError, ssl.SSLEOFError),
                context.wrap_socket(plain, server_hostname="localhost"),
            ):
                return True

        until(is_served)
    kib = held_bytes / HANDSHAKES_MAX / 1024
    record_property(
        "figure", f"{kib:.0f} KiB a connection, {HANDSHAKES_MAX} silent TLS connections"
    )
    assert held_bytes <= HANDSHAKES_MAX * MIB // 8


@pytest.mark.parametrize("case", CROWDS)
def test_many_connections_that_begin_tls_do_not_delay_others(
    over_tls_daemon, case, record_property
):
    """Row 20: the connections are open before, so the event loop finds all of it at once."""
    pid = over_tls_daemon.process.pid
    port = int((over_tls_daemon.store / "daemon" / "http").read_text())
    pieces = CROWDS[case](client_hello())
    longest_ms = grown_bytes = float("inf")
    for _ in range(ROUNDS):
        with ExitStack() as stack:
            before_bytes = memory_bytes(pid)
            address = ("127.0.0.1", over_tls_daemon.port)
            wires = [
                stack.enter_context(socket.create_connection(address, TIMEOUT_S))
                for _ in range(CROWD)
            ]
            with probing(port, pid) as seen:
                for piece in pieces:
                    for wire in wires:
                        with suppress(ConnectionError):
                            wire.sendall(piece)
                if case == "hellos":
                    for wire in wires:
                        assert wire.recv(1)
        longest_ms = min(longest_ms, seen.longest_ms)
        grown_bytes = min(grown_bytes, seen.peak_bytes - before_bytes)
        if longest_ms <= LONGEST_MS_MAX and grown_bytes <= CROWD * MIB:
            break
    figure = f"probe {longest_ms:.0f} ms, {grown_bytes / CROWD / 1024:.0f} KiB a connection"
    record_property("figure", f"{figure}, {CROWD} TLS connections")
    assert longest_ms <= LONGEST_MS_MAX
    assert grown_bytes <= CROWD * MIB
