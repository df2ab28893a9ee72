"""The frame server: many connections, one engine, one thread.

    bytes → FrameDecoder → Engine.submit → the answer's frame, at once or when it is durable → bytes

A request that need not wait is answered within the call that brought its bytes, and all answers of
one turn of the event loop leave in one write. Answers that wait for the disk stand in one line and
are sent by one notification for all of them. A pull that waits is a `WaitingPull`, which the
engine wakes.

A connection that breaks takes its polls with it, and the claims of answers it never got return.
`FrameServer` does not know where a connection came from; `ipc` and `tcp` let them in.
"""

import asyncio
import os
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from penstock.backends.engine.engine import Engine
from penstock.backends.engine.waiting import Waiter
from penstock.core.due import NEVER_MS
from penstock.errors import (
    JournalError,
    PenstockError,
    ProtocolError,
    UnavailableError,
)
from penstock.service import Claim, ListQueues, Peek, Pull, Release
from penstock.wire.frames.bodies import DECODE, BadItem, command_fault, encode_claims, encode_reply
from penstock.wire.frames.bulk import encode_bulk_reply
from penstock.wire.frames.frames import (
    BATCH,
    BULK_PUSH,
    CANCEL,
    FRAME_BYTES_MAX,
    KIND_OF,
    PEEK,
    PULL,
    STATUS,
    Body,
    Frame,
    Welcome,
    client_limits,
    encode_error,
    encode_goodbye,
    encode_welcome,
)

if TYPE_CHECKING:
    from penstock.server.frames.connection import FrameConnection

# What a message may take in a reply beside its body and attributes.
_ROW_BYTES: Final = 1_024


class Limits(NamedTuple):
    """What clients may ask of the server, and how long they may take over it."""

    frame_bytes_max: int = FRAME_BYTES_MAX
    connections_max: int = 10_000
    waits_max: int = 1_024
    deferred_max: int = 4_096
    unsent_bytes_max: int = 1024 * 1024
    # What large frames that have begun may take of memory, on all connections together.
    unfinished_bytes_max: int = 512 * 1024 * 1024
    hello_s_max: float = 10.0
    # A frame that has begun, and answers nobody takes, may stand still for so long.
    stall_s_max: float = 30.0


class WaitingPull:
    """A pull that waits on behalf of a connection."""

    __slots__ = ("connection", "request", "server", "waiter")

    def __init__(self, server: "FrameServer", connection: "FrameConnection", request: int) -> None:
        self.server = server
        self.connection = connection
        self.request = request
        self.waiter: Waiter | None = None

    def wake(self) -> None:
        """Called by the engine: the wait is over, or time must be kept."""
        if self.waiter is not None and self.waiter.done:
            self.server.finish(self, self.waiter)
        else:
            self.server.must_plan = True


class _Deferred(NamedTuple):
    sequence: int
    connection: "FrameConnection"
    frame: bytes
    claims: list[Claim]


class FrameServer:
    """Takes the requests of every connection to one engine, and gives out the answers.

    `failed` is called once if the engine has to stop; whoever runs the server should end it then.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        limits: Limits | None = None,
        software: str = "penstock",
        options: Mapping[str, str] | None = None,
        failed: Callable[[PenstockError], None] | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.connections: set[FrameConnection] = set()
        self.connections_seen = 0
        self.requests_seen = 0
        self.unfinished_bytes = 0
        self.must_plan = False
        self.dirty: list[FrameConnection] = []
        self.failed = failed
        self._engine = engine
        self._journal = engine.journal
        self._loop = asyncio.get_running_loop()
        self.idle_since_s = self._loop.time()
        self._deferred: deque[_Deferred] = deque()
        self._notified = 0
        self._must_notify = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = NEVER_MS
        self._stopping = False
        self._broken: PenstockError | None = None
        self._drained = asyncio.Event()
        self._emptied = asyncio.Event()
        self.welcome = encode_welcome(
            Welcome(
                software,
                self.limits.frame_bytes_max,
                self.limits.waits_max,
                {**(options or {}), "commands": str(max(KIND_OF.values()))},
            )
        )
        self.client_limits = client_limits(self.limits.frame_bytes_max)
        self._started_s = self._loop.time()
        self._sweep_s = min(self.limits.hello_s_max, self.limits.stall_s_max) / 4
        self._unsubscribe = engine.clock.subscribe(self._time_moved)
        self._sweep_timer = self._loop.call_later(self._sweep_s, self._sweep)
        if engine.upkeep is not None:
            engine.upkeep.start(self._exclusively)

    # Requests.

    def take(self, connection: "FrameConnection", frame: Frame) -> None:
        """Does what one frame of a welcome client asks."""
        kind, request, body = frame
        decode = DECODE.get(kind)
        if decode is None:
            self._take_other(connection, kind, request, body)
            return
        command: Any = None
        try:
            command = decode(body)
            if kind == PULL:
                command = self._pull_within_frame(command)
            elif kind == PEEK:
                command = self._peek_within_frame(command)
            reply = self._engine.submit(command)
            if kind == BATCH and BadItem in map(type, command.items):
                reply = _with_faults(command.items, reply)
        except PenstockError as error:
            self._refuse(connection, request, error)
            return
        except Exception as fault:
            if command is not None:
                self._give_up(fault)
            else:
                self._refuse(connection, request, command_fault(kind, fault))
            return
        sequence = self._engine.answer_sequence
        if kind != PULL:
            encode = encode_bulk_reply if kind == BULK_PUSH else encode_reply
            answer = encode(request, reply)
            if sequence > self._journal.durable_sequence:
                self._defer(sequence, connection, answer, [])
            else:
                connection.send(answer)
        elif reply:
            self._give(connection, request, command, reply, sequence)
        else:
            self._wait(connection, request, command)

    def _take_other(
        self, connection: "FrameConnection", kind: int, request: int, body: Body
    ) -> None:
        if kind == CANCEL:
            poll = connection.polls.get(request)
            if poll is not None:
                self._forget(poll)
                connection.send(encode_reply(request, []))
        elif kind == STATUS:
            connection.send(encode_reply(request, self.status()))

    def _pull_within_frame(self, command: Pull) -> Pull:
        """Sees to it that the answer to a pull of many fits into a frame: it may give fewer.

        Whoever asks for up to so many must be content with that, and asks again.
        """
        limit = command.limit
        if type(limit) is not int or limit <= 1:
            return command
        room_bytes = max(1, self.limits.frame_bytes_max - limit * _ROW_BYTES)
        if command.bytes_max is not None:
            room_bytes = min(room_bytes, command.bytes_max)
        return msgspec.structs.replace(command, bytes_max=room_bytes)

    def _peek_within_frame(self, command: Peek) -> Peek:
        """Lowers the limit of a peek whose answer might not fit into a frame."""
        limit = command.limit
        queue = self._engine.shard.names.get(command.queue)
        if type(limit) is not int or queue is None:
            return command
        row_bytes = queue.settings.body_bytes_max + _ROW_BYTES
        room_bytes = self.limits.frame_bytes_max
        if limit * row_bytes <= room_bytes:
            return command
        stored = queue.visible + queue.delayed + queue.in_flight
        if stored and queue.stored_bytes + stored * _ROW_BYTES <= room_bytes:
            return command
        return Peek(command.queue, max(1, room_bytes // row_bytes), command.state)

    def _refuse(self, connection: "FrameConnection", request: int, error: PenstockError) -> None:
        connection.send(encode_error(request, error))
        if isinstance(error, ProtocolError):
            connection.end()
        elif isinstance(error, JournalError) and self._engine_has_stopped():
            self._fail(error)

    def _give_up(self, fault: Exception) -> None:
        """Ends everything: an engine that raised what it never should may be half-way anywhere."""
        traceback.print_exception(fault)
        self._fail(PenstockError(f"the engine failed and was stopped: {type(fault).__name__}"))

    def _engine_has_stopped(self) -> bool:
        try:
            self._engine.submit(ListQueues(limit=1))
        except JournalError:
            return True
        return False

    def _give(
        self,
        connection: "FrameConnection",
        request: int,
        command: Pull,
        claims: list[Claim],
        sequence: int,
    ) -> None:
        answer = encode_claims(request, claims)
        if len(answer) > self.limits.frame_bytes_max:
            # The limit was lowered for this, but messages pushed before their queue's settings
            # changed may be larger than these say.
            self._return(claims)
            error = UnavailableError(
                f"the claims take {len(answer)} bytes and a frame at most "
                f"{self.limits.frame_bytes_max}; pull fewer at a time"
            )
            connection.send(encode_error(request, error))
        elif sequence > self._journal.durable_sequence:
            # Who named the attempt will ask for these very claims again if the answer is lost.
            to_return = claims if command.attempt_id is None else []
            self._defer(sequence, connection, answer, to_return)
        else:
            connection.send(answer)

    # Waiting for a message.

    def _wait(self, connection: "FrameConnection", request: int, command: Pull) -> None:
        if request in connection.polls:
            error = ProtocolError(f"the client used request {request} again while it waits")
            self._refuse(connection, 0, error)
            return
        if len(connection.polls) >= self.limits.waits_max:
            said = f"{self.limits.waits_max} pulls wait on this connection; open another one"
            self._refuse(connection, request, UnavailableError(said))
            return
        poll = WaitingPull(self, connection, request)
        poll.waiter = self._engine.wait(command, poll.wake)
        if poll.waiter is None:
            connection.send(encode_reply(request, []))
            return
        connection.polls[request] = poll
        # The engine may have asked to have time kept before it had given us the waiter.
        self.must_plan = True

    def finish(self, poll: WaitingPull, waiter: Waiter) -> None:
        """Answers a pull whose wait is over."""
        connection, request = poll.connection, poll.request
        connection.polls.pop(request, None)
        if waiter.error is not None:
            if not self._stopping:
                connection.send(encode_error(request, waiter.error))
        elif waiter.claims:
            self._give(connection, request, waiter.command, waiter.claims, waiter.sequence)
        else:
            connection.send(encode_reply(request, []))

    def _forget(self, poll: WaitingPull) -> None:
        poll.connection.polls.pop(poll.request, None)
        if poll.waiter is not None:
            with suppress(PenstockError):
                self._engine.forget(poll.waiter)

    def _return(self, claims: list[Claim]) -> None:
        """Gives back what was claimed for somebody who is gone."""
        for claim in claims:
            with suppress(PenstockError):
                self._engine.submit(Release(claim.queue, claim.proof))

    def plan(self) -> None:
        """Sets the timer for the next instant at which someone who waits may be served."""
        self.must_plan = False
        wake_ms = self._engine.next_wake_ms
        if self._timer is not None:
            if self._timer_ms == wake_ms:
                return
            self._timer.cancel()
            self._timer = None
        timeout_s = self._engine.clock.timeout_s(wake_ms)
        if wake_ms < NEVER_MS and timeout_s is not None and self._engine.has_waiters:
            self._timer_ms = wake_ms
            self._timer = self._loop.call_later(timeout_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            self._engine.tick()
        except JournalError as error:
            self._fail(error)
        except Exception as fault:
            self._give_up(fault)
        self.must_plan = self._engine.has_waiters
        self.flush()

    def _time_moved(self) -> None:
        self._loop.call_soon_threadsafe(self._tick)

    # Waiting for the disk.

    def _defer(
        self, sequence: int, connection: "FrameConnection", frame: bytes, claims: list[Claim]
    ) -> None:
        self._deferred.append(_Deferred(sequence, connection, frame, claims))
        connection.deferred += 1
        if sequence > self._must_notify:
            self._must_notify = sequence

    def flush(self) -> None:
        """Sends what has gathered; to be called at the end of whatever made answers."""
        if self.must_plan:
            self.plan()
        if self._must_notify > self._notified:
            self._notified = self._must_notify
            told = partial(self._durable_from_any_thread, self._must_notify)
            self._journal.notify(self._must_notify, told)
        if self.dirty:
            dirty = self.dirty
            self.dirty = []
            for connection in dirty:
                connection.flush()

    def _durable_from_any_thread(self, sequence: int) -> None:
        # The loop may be closed already when the last entry becomes durable.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._durable, sequence)

    def _durable(self, told: int) -> None:
        durable = self._journal.durable_sequence
        deferred = self._deferred
        while deferred and deferred[0].sequence <= durable:
            _, connection, frame, claims = deferred.popleft()
            connection.deferred -= 1
            if not connection.is_gone:
                connection.send(frame)
            elif claims:
                self._return(claims)
        if told > durable:
            # We were told because it never will be durable: this says so at once.
            try:
                self._journal.wait(told)
            except JournalError as error:
                self._fail(error)
        if self._stopping and not deferred:
            self._drained.set()
        self.flush()

    def _fail(self, error: PenstockError) -> None:
        """Tells everyone who waits that the engine has stopped: nothing of it can be trusted."""
        self._broken = self._broken or error
        deferred, self._deferred = self._deferred, deque()
        for connection in list(self.connections):
            connection.send(encode_error(0, error))
            connection.end()
        for entry in deferred:
            entry.connection.deferred -= 1
        failed, self.failed = self.failed, None
        self.flush()
        if failed is not None:
            failed(error)

    def _exclusively(self, step: Callable[[], object]) -> object:
        """Runs a step of another thread in the loop, between the requests."""
        done: Future[object] = Future()

        def run() -> None:
            try:
                done.set_result(step())
            except BaseException as error:
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return done.result()

    # Connections.

    def enter(self, connection: "FrameConnection") -> PenstockError | None:
        """Notes a new connection, or says why there is no room for it."""
        if self._broken is not None:
            return self._broken
        if len(self.connections) >= self.limits.connections_max:
            return UnavailableError(f"the server has {len(self.connections)} connections already")
        self.connections.add(connection)
        self.connections_seen += 1
        return None

    def leave(self, connection: "FrameConnection") -> None:
        """Forgets a connection: its waits end, and the claims it will never see return."""
        for poll in list(connection.polls.values()):
            self._forget(poll)
        self.connections.discard(connection)
        if not self.connections:
            self.idle_since_s = self._loop.time()
            if self._stopping:
                self._emptied.set()
        self.flush()

    def status(self) -> dict[str, Any]:
        """What the server says of itself to whoever may connect."""
        upkeep = self._engine.upkeep
        error = None if upkeep is None else upkeep.last_error
        return {
            "pid": os.getpid(),
            "up_s": round(self._loop.time() - self._started_s, 3),
            "connections": len(self.connections),
            "connections_seen": self.connections_seen,
            "requests_seen": self.requests_seen,
            "waiting_pulls": sum(len(each.polls) for each in self.connections),
            "answers_waiting_for_disk": len(self._deferred),
            "housekeeping_error": None if error is None else f"{type(error).__name__}: {error}",
        }

    def _sweep(self) -> None:
        """Closes connections that stand still; one timer does for all of them."""
        now_s = self._loop.time()
        for connection in list(self.connections):
            connection.check_progress(now_s)
        self._sweep_timer = self._loop.call_later(self._sweep_s, self._sweep)

    async def stop(self, reason: str, patience_s: float = 10.0) -> None:
        """Answers what was taken, says goodbye, and closes every connection and the engine.

        What is unanswered at the goodbye was not done: the client may send it elsewhere.
        """
        self._stopping = True
        for connection in list(self.connections):
            connection.is_deaf = True
            for poll in list(connection.polls.values()):
                self._forget(poll)
        self.flush()
        if self._deferred:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), patience_s)
        for connection in list(self.connections):
            connection.send(encode_goodbye(reason))
            connection.end()
        self.flush()
        if self.connections:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), patience_s)
        for connection in list(self.connections):
            connection.abort()
        await self.close()

    async def close(self) -> None:
        """Lets go of the engine, and of its journal once that has kept everything."""
        self._stopping = True
        self._unsubscribe()
        self._sweep_timer.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._engine.upkeep is not None:
            await self._loop.run_in_executor(None, self._engine.upkeep.stop)
        self._engine.close()


def _with_faults(items: list[Any], replies: list[Any]) -> list[Any]:
    """The replies to a batch, with what the decoder said where that is what was wrong."""
    pairs = zip(items, replies, strict=True)
    return [item.error if type(item) is BadItem else reply for item, reply in pairs]
