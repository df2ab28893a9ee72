"""TLS on plain TCP transports: handshakes in turns, and unsent answers that can be counted.

The TLS of asyncio and uvloop has two properties that let a client hold up a server or fill its
memory. All handshakes whose data has arrived are made in one turn of the event loop, and each takes
half a millisecond: five hundred at one instant delayed everyone by 269 ms. And a TLS transport
passes all it is given to the TCP transport below it and does not count what waits there: of an
answer of megabytes that its client does not read, `get_write_buffer_size` is 0.

Here each step of a handshake waits in the run queue of the event loop. What is written is encrypted
ENCRYPTED_BYTES at a time, while the TCP transport has nothing unsent; the rest is kept and counted.

The protocol of a connection, which counts it among the connections of its server, knows nothing of
it before the handshake is complete. So `Handshakes` limits how many are incomplete.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, cast

from penstock.backends.scheduler import run_queue
from penstock.errors import InvalidField
from penstock.files import check_named

# The size of a TLS record.
ENCRYPTED_BYTES: Final = 16 * 1024
HANDSHAKE_S_MAX: Final = 10
# Handshakes of one listener that may be incomplete at the same time; each holds about 40 KiB.
HANDSHAKES_MAX: Final = 2_000
# A client that the server has waited for longer than this makes room for a new one.
PATIENCE_S: Final = 1.0
_READ_BYTES: Final = 256 * 1024

ProtocolFactory = Callable[[], asyncio.Protocol]


class ServerTls:
    """The certificate of a server's listeners, which can be replaced while they serve."""

    def __init__(self, cert: str, key: str) -> None:
        """Raises InvalidField."""
        self.context = _context(cert, key)

    def reload(self, cert: str, key: str) -> None:
        """Uses this certificate for handshakes that begin later. Raises InvalidField, unchanged."""
        # A new context: one that has loaded a key of another type would go on to offer the old one.
        self.context = _context(cert, key)


def _context(cert: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A client could ask for one handshake after another.
    context.options |= ssl.OP_NO_RENEGOTIATION
    try:
        check_named(cert)
        check_named(key)
        context.load_cert_chain(cert, key)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidField(f"tls: cannot use {cert!r} with {key!r}: {reason}") from None
    return context


def over_tls(factory: ProtocolFactory, tls: ServerTls | None) -> ProtocolFactory:
    """The factory for a listener without TLS of its own; the same one if there is no TLS."""
    if tls is None:
        return factory
    handshakes = Handshakes(asyncio.get_running_loop())
    return lambda: TlsProtocol(factory(), tls.context, handshakes)


class Handshakes:
    """The incomplete handshakes of one listener: their number and the order of their steps.

    If there are too many, the oldest is aborted whose client was waited for longer than PATIENCE_S;
    if there is none, the new connection is. So clients that send nothing do not keep others out for
    longer than that. And of a crowd of honest clients, those that came first are served: to abort
    the oldest in any case would abort each just before its step is made.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._run_queue = run_queue(loop)
        # The oldest first.
        self._incomplete: dict[TlsProtocol, None] = {}

    def begin(self, connection: "TlsProtocol") -> None:
        """Adds a new connection, or aborts it."""
        if len(self._incomplete) >= HANDSHAKES_MAX:
            now_s = self.loop.time()
            slow = (each for each in self._incomplete if each.waited_s(now_s) > PATIENCE_S)
            aborted = next(slow, connection)
            aborted.abort()
            if aborted is connection:
                return
            self.end(aborted)
        self._incomplete[connection] = None

    def plan(self, step: Callable[[], None]) -> None:
        """Makes a step of a handshake in a later turn of the event loop."""
        self._run_queue.add(Handshakes, step)

    def end(self, connection: "TlsProtocol") -> None:
        """Removes a connection whose handshake is complete, or that has ended."""
        self._incomplete.pop(connection, None)


class TlsProtocol(asyncio.Protocol):
    """Stands between a TCP transport and the protocol of a connection."""

    def __init__(
        self, protocol: asyncio.Protocol, tls: ssl.SSLContext, handshakes: Handshakes
    ) -> None:
        self._protocol = protocol
        self._handshakes = handshakes
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = tls.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._tcp: asyncio.Transport = None  # type: ignore[assignment]
        self._transport: TlsTransport = None  # type: ignore[assignment]
        self._deadline: asyncio.TimerHandle = None  # type: ignore[assignment]
        # Since when the server waits for the client, None while a step is to be made; and how long
        # it waited before.
        self._asked_at_s: float | None = None
        self._waited_s = 0.0
        # Whether the handshake is complete.
        self._is_open = False
        self._has_ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._tcp = cast(asyncio.Transport, transport)
        # The least unsent byte blocks it, and it is unblocked when there is none.
        self._tcp.set_write_buffer_limits(high=1, low=0)
        self._transport = TlsTransport(self, self._tcp, self._protocol)
        loop = self._handshakes.loop
        self._deadline = loop.call_later(HANDSHAKE_S_MAX, self._tcp.abort)
        self._asked_at_s = loop.time()
        self._handshakes.begin(self)

    def waited_s(self, now_s: float) -> float:
        """How long the server has waited for this client, without the time in its own line."""
        waits_s = 0.0 if self._asked_at_s is None else now_s - self._asked_at_s
        return self._waited_s + waits_s

    def abort(self) -> None:
        """Closes the connection at once."""
        self._tcp.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._deadline.cancel()
        self._handshakes.end(self)
        self._transport.clear()
        if self._is_open:
            self._protocol.connection_lost(error)

    # Reading.

    def data_received(self, data: bytes) -> None:
        self._incoming.write(data)
        if self._is_open:
            self.read()
        else:
            # Until then nothing more is read; the first request may have come with this already.
            self._tcp.pause_reading()
            self._waited_s = self.waited_s(self._handshakes.loop.time())
            self._asked_at_s = None
            self._handshakes.plan(self._shake_hands)

    def _shake_hands(self) -> None:
        """Makes the next step of the handshake."""
        if self._tcp.is_closing():
            return
        self._tcp.resume_reading()
        self._asked_at_s = self._handshakes.loop.time()
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self.flush()
        except ssl.SSLError:
            # With the alert that says why; a client that does not read it meets the deadline.
            self.flush()
            self._tcp.close()
        else:
            self._deadline.cancel()
            self._handshakes.end(self)
            self._is_open = True
            self.flush()
            self._protocol.connection_made(self._transport)
            self.read()

    def read(self) -> None:
        """Passes on what has arrived, while the protocol reads."""
        while self._transport.is_reading() and not self._has_ended:
            try:
                data = self._tls.read(_READ_BYTES)
            except ssl.SSLWantReadError:
                break
            except ssl.SSLError:
                self._transport.abort()
                return
            if data:
                self._pass_on(data)
            else:
                self._end()
        self.flush()

    def _pass_on(self, data: bytes) -> None:
        try:
            self._protocol.data_received(data)
        except BaseException:
            # The event loop does this only for what it calls itself.
            self._transport.abort()
            raise

    def eof_received(self) -> bool:
        if not self._is_open:
            return False
        self._end()
        # The transport closes the connection when everything is sent.
        return True

    def _end(self) -> None:
        """The client sends nothing more. A connection with TLS is never half open."""
        if not self._has_ended:
            self._has_ended = True
            self._protocol.eof_received()
            self._transport.close()

    # Writing.

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypts and sends."""
        self._tls.write(data)
        self.flush()

    def flush(self) -> None:
        """Sends what TLS has made."""
        if self._outgoing.pending:
            self._tcp.write(self._outgoing.read())

    def close(self) -> None:
        """Closes the connection, once what was encrypted is sent."""
        # It waits for no answer: the client's data is not read any more.
        with suppress(ssl.SSLError):
            self._tls.unwrap()
        self.flush()
        self._tcp.close()

    def pause_writing(self) -> None:
        self._transport.block()

    def resume_writing(self) -> None:
        self._transport.unblock()

    def get_extra_info(self, name: str, default: Any) -> Any:
        """As of a TLS transport of asyncio."""
        if name == "ssl_object":
            return self._tls
        return (
            self._tls.context if name == "sslcontext" else self._tcp.get_extra_info(name, default)
        )


class TlsTransport(asyncio.Transport):
    """The transport of a connection's protocol: keeps what is written until it can be sent."""

    def __init__(
        self, below: TlsProtocol, tcp: asyncio.Transport, protocol: asyncio.Protocol
    ) -> None:
        super().__init__()
        self._below = below
        self._tcp = tcp
        self._protocol = protocol
        self._is_reading = True
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        # Whether the TCP transport has something unsent, and whether the protocol is paused.
        self._is_blocked = False
        self._is_paused = False
        self._closing = False
        self.set_write_buffer_limits()

    # Writing.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or not data:
            return
        if self._unsent or self._is_blocked or len(data) > ENCRYPTED_BYTES:
            self._unsent.append(memoryview(data))
            self._unsent_bytes += len(data)
            self._pump()
        else:
            self._below.send(data)
        if not self._is_paused and self.get_write_buffer_size() > self._high_bytes:
            self._is_paused = True
            self._protocol.pause_writing()

    def _pump(self) -> None:
        """Sends pieces until the TCP transport has something unsent."""
        unsent = self._unsent
        while unsent and not self._is_blocked:
            piece = unsent[0][:ENCRYPTED_BYTES]
            if len(piece) == len(unsent[0]):
                unsent.popleft()
            else:
                unsent[0] = unsent[0][ENCRYPTED_BYTES:]
            self._unsent_bytes -= len(piece)
            self._below.send(piece)
        if self._closing and not unsent:
            self._below.close()

    def block(self) -> None:
        """The TCP transport has something unsent."""
        self._is_blocked = True

    def unblock(self) -> None:
        """The TCP transport has nothing unsent any more."""
        self._is_blocked = False
        self._pump()
        if self._is_paused and self.get_write_buffer_size() <= self._low_bytes:
            self._is_paused = False
            self._protocol.resume_writing()

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes + self._tcp.get_write_buffer_size()

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
        self._tcp.abort()

    def is_closing(self) -> bool:
        return self._closing or self._tcp.is_closing()

    # Reading.

    def pause_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._tcp.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_reading and not self.is_closing():
            self._is_reading = True
            self._tcp.resume_reading()
            # What arrived before is not announced again.
            asyncio.get_running_loop().call_soon(self._below.read)

    def is_reading(self) -> bool:
        return self._is_reading and not self.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._below.get_extra_info(name, default)
