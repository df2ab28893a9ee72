"""One connection of the Carrot broker, from its first byte to its end.

    START ─ TOKEN ─→ START
      │  WRITE, READ, ADD, REMOVE: a single request, whose answer is the last
      ├────────────→ TAKEN ─ a message was found ─→ SENT ─ ACK, NACK, timeout, hang-up ─→ ended
      │                └──── any other answer ──────────────────────────────────────────→ ended
      │  PUT … REMOVE of the extension
      └────────────→ SESSION: any number of requests ─ hang-up ─────────────────────────→ ended

However a connection ends, claims that the client has not acknowledged are released, and their
messages return to the front of their queues.
"""

import asyncio
from functools import partial
from hmac import compare_digest
from typing import Any, Final

from penstock.backends.scheduler import STEP_BYTES
from penstock.errors import MessageTooLarge, Overloaded, PenstockError, ProtocolError
from penstock.server.carrot.server import CarrotServer, HeldClaim, make_create, make_push
from penstock.server.carrot.sessions import execute_request
from penstock.server.frames.tcp import TcpAddress, open_listener, prepare_tcp
from penstock.server.stream import StreamConnection
from penstock.server.tls import ServerTls
from penstock.service import Claim, Command, Delete, DeleteQueue, Pull, Release
from penstock.wire.carrot.reasons import DENIED, EMPTY, REMOVED, STOPPING, TIMEOUT
from penstock.wire.carrot.session import (
    REQUEST_LIMITS,
    SessionDecoder,
    SessionRequest,
    encode_session_answer,
)
from penstock.wire.carrot.single import (
    ACK,
    ADD,
    ERROR,
    MESSAGE_BYTES_MAX,
    NACK,
    READ,
    SUCCESS,
    TOKEN,
    WRITE,
    SingleRequest,
    encode_answer,
    encode_message,
    read_request,
    read_token,
)

# The tag of the claim of a single read.
_SINGLE: Final = 0


class CarrotConnection(StreamConnection):
    """One client of the broker."""

    __slots__ = (
        "_buffer",
        "_is_admitted",
        "_last_key",
        "_session",
        "_single",
        "_timer",
        "_verdict",
        "held",
        "holder",
        "last_tag",
        "server",
    )

    def __init__(self, server: CarrotServer) -> None:
        super().__init__(server, execute_request)
        # The claims whose messages were sent, by tag.
        self.held: dict[int, HeldClaim] = {}
        self.last_tag = 0
        # Who claims messages, for their history; the reads of each connection wait in turns.
        self.holder = "carrot"
        self.server = server
        self._buffer = bytearray()
        self._is_admitted = False
        self._single: SingleRequest | None = None
        self._verdict: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._session: SessionDecoder | None = None
        self._last_key = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        prepare_tcp(transport)
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        if peer:
            self.holder = f"carrot ({peer[0]}:{peer[1]})"
        error = self.server.enter(self)
        if error is not None:
            self.transport.write(encode_answer(ERROR, self.server.reason(error)))
            self.end()

    def next_key(self) -> int:
        """A new key for a pending answer."""
        self._last_key += 1
        return self._last_key

    # Bytes.

    def data_received(self, data: bytes) -> None:
        if self.ending or self.ignores_requests:
            return
        session = self._session
        if session is not None:
            requests = session.feed(data)
            if requests:
                self.accept(requests, len(data))
            if session.error is not None or session.frame_bytes or self.reserved_bytes:
                self._check_session(session)
        elif self._single is None:
            self._buffer += data
            try:
                self._take_start()
            except ProtocolError as error:
                self._end_single(ERROR, self.server.reason(error))
        elif self._verdict is None and self._single.opcode == READ:
            self._take_verdict(data[0])
        self.server.flush()

    def _take_start(self) -> None:
        """Takes the token, and the first request when it is complete."""
        buffer = self._buffer
        if not self._is_admitted:
            if buffer[0] == TOKEN:
                found = read_token(buffer)
                if found is None:
                    return
                token, end = found
                del buffer[:end]
            else:
                token = b""
            wanted = self.server.token
            if wanted is not None and not compare_digest(token, wanted):
                reason = "the broker requires a token, and the client's is missing or wrong"
                self.server.tell_refused_token("carrot", self.transport)
                self._end_single(ERROR, self.server.refusal(DENIED, reason))
                return
            self._is_admitted = True
        if not buffer:
            return
        if buffer[0] in REQUEST_LIMITS:
            self._session = SessionDecoder()
            data, self._buffer = bytes(buffer), bytearray()
            self.accept(self._session.feed(data), len(data))
            self._check_session(self._session)
            return
        self._single = read_request(buffer)
        if self._single is not None:
            rest = buffer[len(self._single.queue) + 2 :]
            self._buffer = bytearray()
            self.server.requests_seen += 1
            self.server.requests[self._single.opcode] += 1
            if self._single.opcode == READ and rest:
                self._verdict = rest[0]
            self._begin_single(self._single)

    # A single request.

    def _begin_single(self, request: SingleRequest) -> None:
        opcode, queue, message = request
        command: Command[Any]
        if opcode == WRITE:
            name, group = self.server.name_of(queue.encode("latin-1"))
            command = make_push(name, group, message)
        elif opcode == READ:
            command = Pull(queue, holder=self.holder)
        elif opcode == ADD:
            command = make_create(queue, {})
        else:
            command = DeleteQueue(queue)
        self.server.execute(self, command, self._finish_single, self._refuse_single)

    def _finish_single(self, reply: Any) -> None:
        assert self._single is not None
        opcode, queue, _ = self._single
        if opcode == READ:
            self._send_message(reply)
            return
        text = reply.id.encode() if opcode == WRITE else b""
        self._end_single(SUCCESS, text)
        if opcode not in (WRITE, ADD):
            self.server.cancel_reads(queue)

    def _refuse_single(self, error: PenstockError) -> None:
        self._end_single(ERROR, self.server.reason(error))

    def _send_message(self, claims: list[Claim]) -> None:
        server = self.server
        if not claims:
            self._end_single(ERROR, server.refusal(EMPTY, "the queue has no message to read"))
            return
        (claim,) = claims
        if len(claim.body) > MESSAGE_BYTES_MAX:
            server.service.abandon(claims)
            error = MessageTooLarge(
                f"the next message has {len(claim.body)} bytes; a READ gives at most "
                f"{MESSAGE_BYTES_MAX}: use GET"
            )
            self._end_single(ERROR, server.reason(error))
            return
        self.held[_SINGLE] = HeldClaim(claim.queue, claim.proof, claim.deadline_ms)
        server.await_verdict(self, claim.queue)
        self.send(encode_message(claim.body))
        if self._verdict is not None:
            self._take_verdict(self._verdict)
        else:
            self._set_timer(claim.deadline_ms)

    def _set_timer(self, deadline_ms: int) -> None:
        left_ms = deadline_ms - self.server.service.now_ms()
        self._timer = self.server.loop.call_later(max(0, left_ms) / 1_000, self._check_timer)

    def _check_timer(self) -> None:
        held = self.held.get(_SINGLE)
        if held is None or self.ending:
            return
        if self.server.service.now_ms() < held.deadline_ms:
            self._set_timer(held.deadline_ms)
            return
        reason = "no acknowledgement came in time; the message is at the front of its queue again"
        self._end_single(ERROR, self.server.refusal(TIMEOUT, reason))
        self.server.flush()

    def cancel_read(self) -> None:
        """Ends a single read whose queue was removed before the verdict on its message."""
        reason = "the queue was removed before the message was acknowledged"
        self._end_single(ERROR, self.server.refusal(REMOVED, reason))
        self.server.plan_flush()

    def _take_verdict(self, verdict: int) -> None:
        """Deletes or releases the message; an early verdict is kept until the message is sent."""
        self._verdict = verdict
        held = self.held.get(_SINGLE)
        if held is None:
            return
        if verdict not in (ACK, NACK):
            error = ProtocolError(f"{verdict:#04x} is neither ACK nor NACK; it counts as NACK")
            self._end_single(ERROR, self.server.reason(error))
            return
        del self.held[_SINGLE]
        self.server.forget_verdict(self, held.queue)
        command: Command[Any] = (Delete if verdict == ACK else Release)(held.queue, held.proof)
        text = b"" if verdict == ACK else b"the message is at the front of its queue again"
        server = self.server
        server.execute(
            self,
            command,
            lambda _: self._end_single(SUCCESS, text),
            lambda error: self._end_single(ERROR, server.settle_reason(error)),
        )

    def _end_single(self, status: int, text: bytes) -> None:
        """Sends the last answer of a single request, and closes the connection."""
        if not self.ending:
            self.send(encode_answer(status, text))
            self.end()

    # A session.

    def _check_session(self, session: SessionDecoder) -> None:
        """Ends the session after bytes that are no request, or if there is no room for one."""
        if session.error is not None:
            self.end_requests()
        if session.frame_bytes or self.reserved_bytes:
            self._check_room(session.frame_bytes)

    def line_of(self, request: SessionRequest) -> tuple[str, int, bool, bool]:
        opcode, count, _, _, body = request
        return "carrot", opcode, len(body) > STEP_BYTES, count > 1

    def end_requests(self) -> None:
        error = None if self._session is None else self._session.error
        if error is not None and not (self._backlog or self._is_held):
            self._refuse_session(error)

    def _check_room(self, frame_bytes: int) -> None:
        if not self.reserve(frame_bytes) and not self.ending:
            reason = (
                f"no memory for a request of {frame_bytes} bytes while others are received; "
                "try again"
            )
            self._refuse_session(Overloaded(reason))

    def _refuse_session(self, error: PenstockError) -> None:
        """Ends the session with an answer about the connection, which has number 0."""
        if not self.ending:
            self.send(encode_session_answer(ERROR, 0, self.server.reason(error)))
            self.end()

    def refuse(self, number: int, error: PenstockError) -> None:
        """Queues an ERROR as the answer to a request of a session."""
        self.send(encode_session_answer(ERROR, number, self.server.reason(error)))

    # The end.

    def eof_received(self) -> bool:
        """A client that sends no more may still read the answer to its single request."""
        if self._session is None and self._single is None and not self.ending:
            self._refuse_start("the request was not whole when the client stopped sending")
        can_be_half_open = self.transport.get_extra_info("sslcontext") is None
        request = self._single
        is_answered_yet = request is not None and (
            request.opcode != READ or self._verdict is not None
        )
        return can_be_half_open and is_answered_yet and not self.ending

    def _refuse_start(self, reason: str) -> None:
        """Ends a connection whose first request is not whole; an answer only if it has begun."""
        if not self._buffer:
            self.abort()
            return
        self._end_single(ERROR, self.server.reason(ProtocolError(reason)))
        self.server.flush()

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        held, self.held = self.held, {}
        if self._single is not None and _SINGLE in held:
            self.server.forget_verdict(self, held[_SINGLE].queue)
        super().connection_lost(error)
        if held:
            self.server.release(list(held.values()))

    def send_failure(self, error: PenstockError) -> None:
        self._send_last(self.server.reason(error))

    def send_goodbye(self, reason: str) -> None:
        if not self.ending:
            self._send_last(self.server.refusal(STOPPING, reason))

    def _send_last(self, reason: bytes) -> None:
        if self._session is None:
            self.send(encode_answer(ERROR, reason))
        else:
            self.send(encode_session_answer(ERROR, 0, reason))

    def check_progress(self, now_s: float) -> None:
        """Closes the connection if its first request is overdue, or answers are not read."""
        session = self._session
        if session is not None:
            # A large message on a slow network makes progress if a mebibyte arrives in this time.
            seen = (session.requests_seen, session.missing_bytes >> 20)
            self.check_standstill(now_s, session.is_amid_frame, seen)
        elif self._single is not None:
            self.check_standstill(now_s, False, (0, 0))
        elif now_s - self.since_s > self.server.limits.hello_s_max:
            limit_s = self.server.limits.hello_s_max
            self._refuse_start(f"no whole request came within {limit_s:g} s of connecting")


async def listen_carrot(
    server: CarrotServer, address: TcpAddress, tls: ServerTls | None = None
) -> asyncio.Server:
    """Listens for the broker's clients. Raises AddressInUse or InvalidField."""
    return await open_listener(partial(CarrotConnection, server), address, tls)
