"""One connection of the frame server: it decodes frames, sends answers, and enforces limits."""

import asyncio
from collections.abc import Callable
from hmac import compare_digest
from typing import cast

from penstock.backends.loop import Pending
from penstock.errors import Overloaded, PenstockError, ProtocolError
from penstock.server.frames.server import FrameServer
from penstock.wire.frames.frames import (
    HELLO,
    SMALL_BYTES,
    STRANGER_LIMITS,
    Frame,
    FrameDecoder,
    decode_hello,
    encode_error,
    refusal,
)


class FrameConnection(asyncio.Protocol):
    """One client: its requests are taken by the server, its answers sent in one write a turn."""

    def __init__(
        self,
        server: FrameServer,
        *,
        token: str | None = None,
        refuse: Callable[[asyncio.BaseTransport], PenstockError | None] | None = None,
    ) -> None:
        # By request: pulls that wait for a message, and pulls whose claims are not durable yet.
        self.waits: dict[int, Pending] = {}
        self.claiming: dict[int, Pending] = {}
        # Requests whose answers come later, pulls that wait for a message aside.
        self.deferred = 0
        self.is_gone = False
        # Set when the server stops: what arrives now is not done, which the goodbye says.
        self.is_deaf = False
        self._server = server
        self._token = token
        # Gives the reason why the peer is refused, or None.
        self._refuse = refuse
        self._decoder = FrameDecoder("client", STRANGER_LIMITS)
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._is_welcome = False
        self._ending = False
        self._out: list[bytes] = []
        self._unfinished_bytes = 0
        self._reading_paused = False
        self._writing_paused = False
        self._since_s = 0.0
        # What the last sweep saw, and when it first saw that.
        self._standstill: tuple[int, int] | None = None
        self._standstill_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._server.limits.unsent_bytes_max)
        self._since_s = asyncio.get_running_loop().time()
        error = self._server.enter(self)
        if error is None and self._refuse is not None:
            error = self._refuse(transport)
        if error is not None:
            self._transport.write(refusal(b"", error))
            self.end()

    def data_received(self, data: bytes) -> None:
        if self._ending or self.is_deaf:
            return
        server = self._server
        decoder = self._decoder
        frames = decoder.feed(data)
        if not self._is_welcome:
            if frames:
                frames = self._greet(frames[0])
            elif decoder.error is not None:
                self._out.append(refusal(data, decoder.error))
                self.end()
        server.requests_seen += len(frames)
        for frame in frames:
            server.take(self, frame)
        if decoder.error is not None and not self._ending:
            self.send(encode_error(0, decoder.error))
            self.end()
        if decoder.frame_bytes > SMALL_BYTES or self._unfinished_bytes:
            self._reserve(decoder.frame_bytes)
        if self.deferred > server.limits.deferred_max:
            self._pause_reading()
        server.flush()

    def _reserve(self, frame_bytes: int) -> None:
        """Counts the incomplete frame against the limit of all connections together."""
        server = self._server
        wanted = frame_bytes if frame_bytes > SMALL_BYTES else 0
        server.unfinished_bytes += wanted - self._unfinished_bytes
        self._unfinished_bytes = wanted
        if server.unfinished_bytes > server.limits.unfinished_bytes_max and not self._ending:
            reason = f"no room for a frame of {wanted} bytes: others are being received; try again"
            self.send(encode_error(0, Overloaded(reason)))
            self.end()

    def _greet(self, frame: Frame) -> list[Frame]:
        """Admits or refuses the client; returns the frames that came along with its hello."""
        kind, _, body = frame
        try:
            token = decode_hello(body).token if kind == HELLO else None
        except ProtocolError as error:
            self._out.append(refusal(b"", error))
            self.end()
            return []
        wanted = self._token
        if wanted is not None and not compare_digest((token or "").encode(), wanted.encode()):
            reason = "the server wants a token, and the client's was missing or wrong"
            self._out.append(refusal(b"", ProtocolError(reason)))
            self.end()
            return []
        self._is_welcome = True
        self._decoder.admit(self._server.client_limits)
        self.send(self._server.welcome)
        return self._decoder.feed(b"")

    def send(self, frame: bytes) -> None:
        """Queues a frame for the next flush."""
        if not self._out:
            self._server.dirty.append(self)
        self._out.append(frame)

    def flush(self) -> None:
        """Writes all queued frames to the transport at once."""
        out = self._out
        if not out or self.is_gone:
            return
        self._out = []
        self._transport.write(out[0] if len(out) == 1 else b"".join(out))
        if self._ending:
            self._transport.close()
        elif self._reading_paused and not self._writing_paused and not self._is_behind():
            self._reading_paused = False
            self._transport.resume_reading()

    def _is_behind(self) -> bool:
        return self.deferred > self._server.limits.deferred_max // 2

    def end(self) -> None:
        """Closes the connection once everything has been sent."""
        self._ending = True
        if self.is_gone:
            return
        self._pause_reading()
        if self._out:
            self._server.dirty.append(self)
        else:
            self._transport.close()

    def abort(self) -> None:
        """Closes the connection at once."""
        self._ending = True
        self._transport.abort()

    def _pause_reading(self) -> None:
        if not self._reading_paused and not self._transport.is_closing():
            self._reading_paused = True
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._writing_paused = True
        self._pause_reading()

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._reading_paused and not self._ending and not self._is_behind():
            self._reading_paused = False
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.is_gone = True
        self._ending = True
        self._out = []
        self._reserve(0)
        self._server.leave(self)

    def check_progress(self, now_s: float) -> None:
        """Closes the connection if its hello or a frame is overdue, or answers are not read."""
        limits = self._server.limits
        if not self._is_welcome:
            if now_s - self._since_s > limits.hello_s_max:
                self.abort()
            return
        if not (self._decoder.is_amid_frame or self._writing_paused):
            self._standstill = None
            return
        # A large frame on a slow line goes on moving; a mebibyte in the time given is enough.
        seen = (self._decoder.frames_seen, self._decoder.missing_bytes >> 20)
        if self._writing_paused:
            seen = (-1, self._transport.get_write_buffer_size())
        if seen != self._standstill:
            self._standstill, self._standstill_s = seen, now_s
        elif now_s - self._standstill_s > limits.stall_s_max:
            self.abort()
