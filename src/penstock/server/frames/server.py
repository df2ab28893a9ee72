"""The frame server: many connections, one queue service, one thread.

    bytes → FrameDecoder → LoopService.submit → the reply's frame, at once or when it is durable

A request whose reply can be shown at once is answered within the call that brought its bytes, and
all answers of that call are sent with one write. Any other is a `Pending` of the service: it waits
for the disk, or for a message, and its callback sends the answer.

`server.stream` has what connections of any protocol have in common. `FrameServer` does not know
where a connection came from; `ipc` and `tcp` accept them.
"""

import itertools
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.backends.loop import LoopService, Pending
from penstock.errors import PenstockError, ProtocolError, UnavailableError
from penstock.server.faults import Faults
from penstock.server.frames.counts import CommandCounts
from penstock.server.stream import Limits as Limits
from penstock.server.stream import StreamServer, bodies_bytes, ignore_reply
from penstock.service import (
    Claim,
    History,
    Peek,
    Pull,
)
from penstock.wire.frames.bodies import DECODE, command_fault, encode_claims, encode_reply
from penstock.wire.frames.bulk import encode_bulk_reply
from penstock.wire.frames.frames import (
    BATCH,
    BULK_PUSH,
    CANCEL,
    DESCRIBE_QUEUES,
    HISTORY,
    KIND_OF,
    PEEK,
    PULL,
    REDRIVE,
    STATUS,
    Body,
    Frame,
    Welcome,
    client_limits,
    encode_error,
    encode_welcome,
)
from penstock.wire.frames.split_batches import (
    HistoryAnswer,
    bounded,
    long_answer,
    with_faults,
)

if TYPE_CHECKING:
    from penstock.server.frames.connection import FrameConnection

R = TypeVar("R")
_decoder_of: Final = DECODE.get
# Commands whose replies `encode_reply` makes into frames as they are.
_PLAIN: Final = frozenset(KIND_OF.values()) - {PULL, BATCH, HISTORY, DESCRIBE_QUEUES}
# Kinds whose decoding or whose answer may be long.
_LONG: Final = frozenset({BATCH, BULK_PUSH, DESCRIBE_QUEUES})
# Kinds of which no later request of a connection is executed before all their steps are.
_ORDERED: Final = frozenset({PULL, PEEK, REDRIVE})


class FrameServer(StreamServer):
    """Takes the requests of every connection, submits them to one service, and sends the answers.

    When it stops, requests without an answer before the goodbye were not executed: the client may
    send them to another server.
    """

    def __init__(
        self,
        service: LoopService,
        *,
        limits: Limits | None = None,
        software: str = "penstock",
        options: Mapping[str, str] | None = None,
        failed: Callable[[PenstockError], None] | None = None,
        faults: Faults | None = None,
        counts: CommandCounts | None = None,
    ) -> None:
        super().__init__(service, limits, failed, faults)
        self._submit = service.submit
        self._frame_bytes_max = self.limits.frame_bytes_max
        # These functions also get the connection and the request's number.
        self._submit_by_kind: dict[int, Callable[[FrameConnection, int, Any], Any]] = {
            PULL: self._pull,
            PEEK: self._peek,
            HISTORY: self._history,
        }
        self._counts = counts or CommandCounts()
        # Of connections; no two of them have one number.
        self.next_number = itertools.count(1).__next__
        self._answered = self._counts.ok
        self.welcome = encode_welcome(
            Welcome(
                software,
                self.limits.frame_bytes_max,
                self.limits.waits_max,
                {**(options or {}), "commands": str(max(KIND_OF.values()))},
            )
        )
        self.client_limits = client_limits(self.limits.frame_bytes_max)

    # Requests.

    def execute(self, connection: "FrameConnection", frame: Frame) -> None:
        """Executes the request in one frame of an accepted client."""
        kind, request, body = frame
        if not request:
            reason = "a request needs a number of 1 or more"
            self._refuse(connection, kind, 0, ProtocolError(reason))
            return
        decode = _decoder_of(kind)
        if decode is None:
            self._take_other(connection, kind, request, body)
            return
        command: Any = None
        try:
            steps = None
            if kind in _LONG:
                steps = long_answer(kind, request, body, self._frame_bytes_max)
            if steps is not None:
                reply: Any = self.service.run(steps)
            else:
                command = decode(body)
                submit_long = self._submit_by_kind.get(kind)
                if submit_long is None:
                    submit = self._submit
                    reply = submit(command)
                else:
                    reply = submit_long(connection, request, command)
        except PenstockError as error:
            self._refuse(connection, kind, request, error)
            return
        except Exception as fault:
            if command is not None:
                self.give_up(fault)
            else:
                self._refuse(connection, kind, request, command_fault(kind, fault))
            return
        if not isinstance(reply, Pending):
            if kind in _PLAIN:
                # The same as `_answer`, with fewer calls.
                self._answered[kind] += 1
                connection.send(encode_reply(request, reply))
            elif kind == PULL:
                self._send_claims(connection, request, reply)
            else:
                self._answer(connection, kind, request, command, reply)
        else:
            if reply.runs and kind in _ORDERED:
                self._hold(connection, kind, request, reply)
            if reply.waits:
                self._wait(connection, request, reply)
            else:
                self._defer(connection, kind, request, command, reply)

    def _take_other(
        self, connection: "FrameConnection", kind: int, request: int, body: Body
    ) -> None:
        if kind == CANCEL:
            pull = connection.waits.pop(request, None)
            if pull is not None:
                pull.cancel()
                self._answered[CANCEL] += 1
                connection.send(encode_reply(request, []))
        elif kind == STATUS:
            self._answered[STATUS] += 1
            connection.send(encode_reply(request, self.status()))

    # Commands that may be long.

    def _pull(self, connection: "FrameConnection", request: int, command: Pull) -> Any:
        if command.holder is None:
            # Pulls that wait are served in turns by their holder.
            command = Pull(
                command.queue,
                command.limit,
                command.visibility_ms,
                command.wait_ms,
                command.attempt_id,
                connection.holder,
                command.bytes_max,
                command.renew,
            )
        within: Any = bounded(command, self._frame_bytes_max)
        submit = self._submit
        return submit(within)

    def _peek(self, connection: "FrameConnection", request: int, command: Peek) -> Any:
        return self._submit(bounded(command, self._frame_bytes_max))

    def _history(self, connection: "FrameConnection", request: int, command: History) -> Any:
        return self.service.history(command, HistoryAnswer(request, self._frame_bytes_max))

    def _hold(
        self, connection: "FrameConnection", kind: int, request: int, pending: Pending
    ) -> None:
        """Lets later requests of the connection wait until all steps of this one are executed."""
        connection.hold_requests()
        pending.ran = partial(self._resume, connection, kind, request, pending)

    def _resume(
        self, connection: "FrameConnection", kind: int, request: int, pending: Pending
    ) -> None:
        if kind == PULL and pending.claims:
            connection.count_pulled(request, bodies_bytes(pending.claims))
        connection.resume_requests()

    def _refuse(
        self, connection: "FrameConnection", kind: int, request: int, error: PenstockError
    ) -> None:
        self._counts.refuse(kind, error)
        connection.send(encode_error(request, error))
        if isinstance(error, ProtocolError):
            connection.end()

    # Answers.

    def _answer(
        self, connection: "FrameConnection", kind: int, request: int, command: Any, reply: Any
    ) -> None:
        """Sends a reply, to anything but a pull, that is durable."""
        self._answered[kind] += 1
        if type(reply) is bytes:
            # The frame of an answer that was made in parts.
            connection.send(reply)
        elif kind == BULK_PUSH:
            connection.send(encode_bulk_reply(request, reply))
        else:
            if kind == BATCH:
                reply = with_faults(command, reply)
            connection.send(encode_reply(request, reply))

    def _send_claims(
        self, connection: "FrameConnection", request: int, claims: list[Claim]
    ) -> None:
        if connection.pulled_bytes:
            connection.uncount_pulled(request)
        answer = encode_claims(request, claims)
        if len(answer) <= self._frame_bytes_max:
            self._answered[PULL] += 1
        else:
            # The first message is returned whatever its size, so its row may be too large.
            self.service.abandon(claims)
            error = UnavailableError(
                f"the claims take {len(answer)} bytes and a frame at most "
                f"{self._frame_bytes_max}; pull fewer at a time"
            )
            self._counts.refuse(PULL, error)
            answer = encode_error(request, error)
        connection.send(answer)

    def _defer(
        self,
        connection: "FrameConnection",
        kind: int,
        request: int,
        command: Any,
        pending: Pending,
    ) -> None:
        """Answers later: the reply is not durable yet, or comes from another service."""
        size = 0
        answer = None
        if kind == PULL:
            connection.claiming[request] = pending
            if pending.is_known:
                size = bodies_bytes(pending.claims)
        elif pending.is_known:
            if kind == PEEK:
                size = bodies_bytes(pending.reply)
            elif kind in _PLAIN:
                # Encoded while the disk syncs.
                answer = encode_reply(request, pending.reply)
        connection.count_deferred(1, size)
        pending.then(partial(self._answer_later, connection, kind, request, command, size, answer))

    def _answer_later(
        self,
        connection: "FrameConnection",
        kind: int,
        request: int,
        command: Any,
        size: int,
        answer: bytes | None,
        reply: Any,
        error: Exception | None,
    ) -> None:
        connection.count_deferred(-1, -size)
        if kind == PULL:
            connection.claiming.pop(request, None)
        if not connection.is_gone:
            if error is not None:
                self._refuse_later(connection, kind, request, error)
            elif answer is not None:
                self._answered[kind] += 1
                connection.send(answer)
            elif kind == PULL:
                self._send_claims(connection, request, reply)
            else:
                self._answer(connection, kind, request, command, reply)
        self.flush_deferred()

    def _refuse_later(
        self, connection: "FrameConnection", kind: int, request: int, error: Exception
    ) -> None:
        # When the service fails, every client is sent the reason (`fail`), and the connection ends.
        if self.broken is None:
            self._refuse(connection, kind, request, self.shown_error(error))

    # Waiting for a message.

    def _wait(self, connection: "FrameConnection", request: int, pending: Pending) -> None:
        if request in connection.waits:
            pending.then(ignore_reply)
            pending.cancel()
            error = ProtocolError(f"the client used request {request} again while it waits")
            self._refuse(connection, PULL, 0, error)
        elif len(connection.waits) >= self.limits.waits_max:
            pending.then(ignore_reply)
            pending.cancel()
            reason = f"{self.limits.waits_max} pulls wait on this connection; open another one"
            self._refuse(connection, PULL, request, UnavailableError(reason))
        else:
            connection.waits[request] = pending
            pending.then(partial(self._answer_wait, connection, request))

    def _answer_wait(
        self,
        connection: "FrameConnection",
        request: int,
        reply: Any,
        error: Exception | None,
    ) -> None:
        connection.waits.pop(request, None)
        if error is None:
            self._send_claims(connection, request, reply)
        elif not self.stopping:
            self._refuse_later(connection, PULL, request, error)
        self.plan_flush()

    # About the server.

    def status(self) -> dict[str, Any]:
        """The answer to a STATUS frame."""
        error = self.service.upkeep_error
        return {
            "pid": os.getpid(),
            "up_s": round(self.loop.time() - self.started_s, 3),
            "connections": len(self.connections),
            "connections_seen": self.connections_seen,
            "requests_seen": self.requests_seen,
            "waiting_pulls": sum(len(each.waits) for each in self.connections),
            "answers_waiting_for_disk": self.deferred,
            "housekeeping_error": None if error is None else f"{type(error).__name__}: {error}",
        }
