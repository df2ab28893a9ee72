"""One connection of the frame server: decodes frames, and checks the client's hello."""

import asyncio
from collections.abc import Callable
from hmac import compare_digest

from penstock.backends.remote.daemon import peer_credentials
from penstock.backends.scheduler import STEP_BYTES
from penstock.errors import Overloaded, PenstockError, ProtocolError
from penstock.server.frames.server import FrameServer
from penstock.server.stream import StreamConnection
from penstock.wire.frames.frames import (
    HELLO,
    HELLO_LIMITS,
    PULL,
    SMALL_BYTES,
    Frame,
    FrameDecoder,
    decode_hello,
    encode_error,
    encode_goodbye,
    refusal,
)
from penstock.wire.frames.split_batches import pulls_one


class FrameConnection(StreamConnection):
    """One client of the frame server."""

    __slots__ = (
        "_decoder",
        "_is_welcome",
        "_refuse",
        "_server",
        "_token",
        "holder",
        "pulled_bytes",
    )

    def __init__(
        self,
        server: FrameServer,
        *,
        token: str | None = None,
        refuse: Callable[[asyncio.BaseTransport], PenstockError | None] | None = None,
    ) -> None:
        super().__init__(server, server.execute)
        self._server = server
        self._token = token
        # Returns the error if the peer must be refused, or None.
        self._refuse = refuse
        self._decoder = FrameDecoder("client", HELLO_LIMITS)
        self._is_welcome = False
        # Names this connection in claims whose pull names nobody.
        self.holder = "penstock"
        # By request: the size of the messages that a pull in parts has claimed.
        self.pulled_bytes: dict[int, int] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.holder = f"penstock ({_peer_of(transport)}, {self._server.next_number()})"
        error = self._server.enter(self)
        if error is None and self._refuse is not None:
            error = self._refuse(transport)
        if error is not None:
            self.transport.write(refusal(b"", error))
            self.end()

    def data_received(self, data: bytes) -> None:
        if self.ending or self.ignores_requests:
            return
        server = self._server
        decoder = self._decoder
        frames = decoder.feed(data)
        if not self._is_welcome:
            if frames:
                frames = self._take_hello(frames[0])
            elif decoder.error is not None:
                self._out.append(refusal(data, decoder.error))
                self.end()
        server.requests_seen += len(frames)
        if frames:
            self.accept(frames, len(data))
        if decoder.error is not None:
            self.end_requests()
        if decoder.frame_bytes > SMALL_BYTES or self.reserved_bytes:
            self._reserve(decoder.frame_bytes)
        server.flush()

    def line_of(self, request: Frame) -> tuple[str, int, bool, bool]:
        kind, _, body = request
        is_of_many = kind == PULL and not pulls_one(body)
        return "frames", kind, len(body) > STEP_BYTES, is_of_many

    def count_pulled(self, request: int, size_bytes: int) -> None:
        """Counts the messages of a pull in parts until it is answered."""
        self.pulled_bytes[request] = self.pulled_bytes.get(request, 0) + size_bytes
        self.count_deferred(0, size_bytes)

    def uncount_pulled(self, request: int) -> None:
        """Ends what `count_pulled` has begun."""
        self.count_deferred(0, -self.pulled_bytes.pop(request, 0))

    def end_requests(self) -> None:
        error = self._decoder.error
        if error is not None and not (self._backlog or self._is_held or self.ending):
            self.send(encode_error(0, error))
            self.end()

    def _reserve(self, frame_bytes: int) -> None:
        """Refuses the frame if the incomplete frames of all connections take too much memory."""
        if not self.reserve(frame_bytes) and not self.ending:
            reason = (
                f"no memory for a frame of {frame_bytes} bytes while others are received; try again"
            )
            self.send(encode_error(0, Overloaded(reason)))
            self.end()

    def _take_hello(self, frame: Frame) -> list[Frame]:
        """Accepts or refuses the client; returns the frames that arrived with its hello."""
        kind, _, body = frame
        try:
            token = decode_hello(body).token if kind == HELLO else None
        except ProtocolError as error:
            self._out.append(refusal(b"", error))
            self.end()
            return []
        wanted = self._token
        if wanted is not None and not compare_digest((token or "").encode(), wanted.encode()):
            reason = "the server requires a token, and the client's is missing or wrong"
            self._server.tell_refused_token("frames", self.transport)
            self._out.append(refusal(b"", ProtocolError(reason)))
            self.end()
            return []
        self._is_welcome = True
        self._decoder.admit(self._server.client_limits)
        self.send(self._server.welcome)
        return self._decoder.feed(b"")

    def send_failure(self, error: PenstockError) -> None:
        self.send(encode_error(0, error))

    def send_goodbye(self, reason: str) -> None:
        self.send(encode_goodbye(reason))

    def check_progress(self, now_s: float) -> None:
        """Closes the connection if its hello or a frame is overdue, or answers are not read."""
        if not self._is_welcome:
            if now_s - self.since_s > self._server.limits.hello_s_max:
                self.abort()
            return
        decoder = self._decoder
        # A large frame on a slow network makes progress if a mebibyte arrives in this time.
        seen = (decoder.frames_seen, decoder.missing_bytes >> 20)
        self.check_standstill(now_s, decoder.is_amid_frame, seen)


def _peer_of(transport: asyncio.BaseTransport) -> str:
    """The other end: its address and port, or its process if it is on a Unix socket."""
    address = transport.get_extra_info("peername")
    if address:
        return f"{address[0]}:{address[1]}"
    peer = peer_credentials(transport.get_extra_info("socket"))
    return "a Unix socket" if peer is None else f"process {peer[0]}"
