"""What the owner of a shard answers to each command, and when.

A command that changed something is answered once its entry is durable in the replicated log. A
command that changed nothing is answered once a recent extent proves that this node is still the
owner, and once all that its answer shows is durable. Commands for many messages are executed in
parts, with other commands in between.
"""

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from penstock.backends.engine.engine import Engine
from penstock.backends.engine.loop import EngineReply, LoopEngine
from penstock.backends.loop import Pending
from penstock.cluster.journal import ReplicatedJournal
from penstock.cluster.log import LogFull, LogSteps, Pause, Unanswered
from penstock.cluster.membership import SILENT_S
from penstock.cluster.spread_rules import NotPlaced, SpreadChanged, SpreadGuard, knows_push
from penstock.errors import (
    InvalidField,
    JournalError,
    NotOwner,
    PenstockError,
    StoreFull,
    UnavailableError,
)
from penstock.output import logger
from penstock.service import (
    Command,
    ConfigureQueue,
    CreateQueue,
    DeleteQueue,
    History,
    Peek,
    Pull,
    Push,
    Release,
    Stats,
)
from penstock.wire import shard_protocol as protocol
from penstock.wire.frames.frames import FRAME_BYTES_MAX
from penstock.wire.frames.split_batches import HistoryAnswer, bounded

_SETTINGS_COMMANDS: Final = (CreateQueue, ConfigureQueue, DeleteQueue)
# The sender of a command: the subject for its reply, and the command's token.
Caller = tuple[str, int]
# How long the reply to a release waits until its dead letter has arrived.
_HELD_BACK_S: Final = 1.0
# For how long a proof of ownership is valid for answers that changed nothing.
_CONFIRMED_S: Final = 0.1
# After this time in which the log has kept no extent, commands are not accepted, and those that
# wait are answered: the result is unknown. Less than `retry.COMMAND_TIMEOUT_S`, and longer than
# NATS needs to elect a leader. A log that says that it is full will not have room so soon.
STALLED_S: Final = 15.0
FULL_S: Final = 2.0
# For how long it is enough for stats that the register had no later owner; it is read each second.
# An owner that is stopped is replaced after SILENT_S: when it is resumed, this is over.
_SEEN_S: Final = SILENT_S - 0.2
_FLUSH_S: Final = 10.0
_FLUSHED_MS: Final = 2
_logger: Final = logger("penstock.cluster")


class AnswerSender(Protocol):
    """Sends answers; `sender.Sender` implements it."""

    def send(self, subject: str, token: int, data: bytes) -> None:
        """Sends an answer in a later turn of the event loop."""
        ...


class ShardServer:
    """Executes the commands that an owner receives, and decides when each is answered.

    It starts no task and does no I/O: it uses `loop` for the time and for callbacks only, which may
    be that of a simulation.
    """

    def __init__(
        self,
        journal: ReplicatedJournal,
        engine: Engine,
        guard: SpreadGuard,
        sender: AnswerSender,
        loop: asyncio.AbstractEventLoop,
        lost: Callable[[PenstockError], None],
    ) -> None:
        """`lost` is called once if the shard can no longer be served from here."""
        self.shard = journal.shard
        self.journal = journal
        self.engine = engine
        self.guard = guard
        self.service = LoopEngine(engine, loop)
        self.has_departures = asyncio.Event()
        self.is_closing = False
        journal.advanced = self._advanced
        self._sender = sender
        self._loop = loop
        self._lost = lost
        self._assembly = protocol.Assembly()
        # Commands that are submitted and not answered.
        self._pending: dict[Caller, Pending] = {}
        # Proofs of ownership are extents, numbered here: when the last one that is durable was
        # requested, those in flight, and the answers that wait for one with this number.
        self._proofs = itertools.count(1)
        self._confirmed_s = -math.inf
        # When the register of the shard was last read and had no later owner.
        self.seen_as_owner_s = -math.inf
        self._confirming: deque[tuple[float, int]] = deque()
        self._unconfirmed: deque[tuple[int, Caller, list[bytes]]] = deque()
        # Answers that show changes which are not durable yet.
        self._not_durable: dict[Caller, tuple[list[bytes], bool]] = {}
        # Whose commands are executed in several steps. Until all are, commands that change settings
        # wait: all steps must be executed under the spread that was checked.
        self._running: set[Caller] = set()
        self._delayed: list[tuple[Caller, bytes]] = []
        # Replies that wait until dead letters have arrived, each with the time since it waits.
        self._held_back: deque[tuple[float, Caller, list[bytes]]] = deque()
        # The slot of the last extent that was kept when the one in flight was seen first, and the
        # time; and why nothing is kept, once that has lasted too long.
        self._in_flight: tuple[int, float] | None = None
        self.stall: Unanswered | None = None
        self._ended = False
        self._keep_alive = loop.call_later(protocol.KEEP_ALIVE_S, self._announce)
        self.service.on_failure(self.fail)

    # Requests.

    def receive(self, caller: Caller, data: bytes) -> None:
        """Handles one item of a request (`shard_protocol`)."""
        kind, rest = data[:1], data[1:]
        if kind == protocol.COMMAND_PART:
            self._assembly.add(caller, rest)
        elif kind == protocol.END_WAIT:
            self._end_wait(caller, protocol.REPLY_WHOLE + protocol.NO_CLAIMS)
        elif kind == protocol.CANCEL:
            pending = self._pending.pop(caller, None)
            if pending is not None:
                pending.cancel()
        elif self.is_closing:
            self._sender.send(*caller, protocol.NOT_OWNER)
        elif self.stall is not None:
            self._sender.send(*caller, self._refusal_of_stall(self.stall))
        else:
            self._submit(caller, self._assembly.whole(caller, rest), kind == protocol.WATCH)

    def _submit(self, caller: Caller, frame: bytes, watch_only: bool) -> None:
        try:
            self._submit_checked(caller, frame, watch_only)
        except JournalError:
            # It was refused before anything was appended.
            self._sender.send(*caller, protocol.NOT_OWNER)
        except (PenstockError, SpreadChanged, NotPlaced) as error:
            self._refuse(caller, error)
        except Exception as fault:
            self.fail(JournalError(f"shard {self.shard}: {type(fault).__name__}: {fault}"))
            self._sender.send(*caller, protocol.LOST)
        if self.engine.shard.departed.deliveries:
            self.has_departures.set()

    def _submit_checked(self, caller: Caller, frame: bytes, watch_only: bool) -> None:
        steps = protocol.long_answer_to(frame, self._check)
        if steps is not None:
            # What changed something is durable when it is answered.
            send = self._send if protocol.changes_messages(frame) else self._send_durable
            pending = self.service.run(steps)
            assert isinstance(pending, Pending), "a step ends before the command"
            self._answer_by_frame(caller, pending, send)
            return
        command: Any
        command, version = protocol.read_command(frame)
        changes_settings = isinstance(command, _SETTINGS_COMMANDS)
        if changes_settings and self._running:
            self._delayed.append((caller, frame))
            return
        self._check(command, version)
        # Stats that another shard acts on are confirmed.
        is_confirmed = watch_only or type(command) is not Stats
        if watch_only and type(command) is not Stats:
            result = self._watch(command)
        elif type(command) is History:
            answer = HistoryAnswer(0, FRAME_BYTES_MAX)
            pending = self.service.history(command, answer)
            self._answer_by_frame(caller, pending, self._send_durable)
            return
        else:
            if isinstance(command, Pull | Peek):
                command = bounded(command, FRAME_BYTES_MAX)
            result = self.service.submit(command)
        if isinstance(result, Pending):
            self._note_pending(caller, result)
            result.then(partial(self._answer_later, caller, command))
        elif type(command) is Pull:
            self._send_confirmed(caller, protocol.write_reply(command, result))
        else:
            self._send_durable(caller, protocol.write_reply(command, result), is_confirmed)
        if changes_settings:
            self._note_settings(command.queue)

    def _check(self, command: Command[Any], version: int) -> None:
        self.guard.check(command, version, self.service.now_ms())

    def _note_pending(self, caller: Caller, pending: Pending) -> None:
        self._pending[caller] = pending
        if pending.runs:
            self._running.add(caller)
            pending.ran = partial(self._end_run, caller)

    def _end_run(self, caller: Caller) -> None:
        """All steps of a command are executed: those that waited for it are, when none is left."""
        self._running.discard(caller)
        if self._delayed and not self._running:
            # Not within a command.
            self._loop.call_soon(self._submit_delayed)

    def _submit_delayed(self) -> None:
        if self._running:
            return
        delayed, self._delayed = self._delayed, []
        for caller, frame in delayed:
            if self.is_closing:
                self._sender.send(*caller, protocol.NOT_OWNER)
            else:
                self._submit(caller, frame, watch_only=False)

    def _answer_by_frame(
        self, caller: Caller, pending: Pending, send: Callable[[Caller, list[bytes]], None]
    ) -> None:
        """Sends the frame of the answer that a Pending replies with."""
        self._note_pending(caller, pending)
        pending.then(partial(self._send_frame, caller, send))

    def _send_frame(
        self,
        caller: Caller,
        send: Callable[[Caller, list[bytes]], None],
        frame: bytes,
        error: Exception | None,
    ) -> None:
        self._pending.pop(caller, None)
        if error is None:
            send(caller, protocol.write_reply_frame(frame))
        else:
            self._refuse_later(caller, error)

    def _refuse(self, caller: Caller, error: Exception) -> None:
        """Sends the answer to a command that was refused and changed nothing."""
        if isinstance(error, NotPlaced):
            self._send_durable(caller, [protocol.NOT_PLACED])
            return
        if isinstance(error, SpreadChanged):
            answer = protocol.SPREAD_CHANGED
        else:
            assert isinstance(error, PenstockError)
            answer = protocol.write_error(error)
        self._send_confirmed(caller, [answer])

    def _watch(self, command: Any) -> Any:
        """Executes a pull whose attempt id is known; any other only waits, and claims nothing.

        A push is executed if its dedup id is known. Raises RequestError or NotPlaced.
        """
        if type(command) not in (Pull, Push):
            raise InvalidField(f"command: {type(command).__name__} cannot be watched for")
        queue = self.engine.shard.queue(command.queue)
        if type(command) is Push:
            if not knows_push(queue, command, self.service.now_ms()):
                raise NotPlaced
            return self.service.submit(command)
        attempt_id = command.attempt_id
        if attempt_id is not None and queue.attempt(attempt_id, self.service.now_ms()) is not None:
            return self.service.submit(command)
        return self.service.watch(command) if command.wait_ms else []

    def _note_settings(self, name: str) -> None:
        """Notes that a queue's settings may have changed; if it is spread, its pulls ask again."""
        was_spread = name in self.guard.names
        self.guard.configured(name)
        if was_spread or name in self.guard.names:
            for caller, pending in list(self._pending.items()):
                if isinstance(pending, EngineReply) and pending.waits_on(name):
                    self._end_wait(caller, protocol.SPREAD_CHANGED)

    def _end_wait(self, caller: Caller, answer: bytes) -> None:
        """Answers a pull that still waits; one that has claims already is not changed."""
        pending = self._pending.get(caller)
        if pending is not None and pending.waits:
            del self._pending[caller]
            pending.cancel()
            self._send_confirmed(caller, [answer])

    def _send_durable(self, caller: Caller, parts: list[bytes], is_confirmed: bool = True) -> None:
        """Sends an answer that shows the state, once everything that led to this state is durable.

        A router acts on it in other shards, so a crash must not undo it: a group that is empty
        because of a delete, or a note in a queue's settings. Nobody acts on the stats of a caller:
        instead of a proof of ownership, which may be an append, it is enough that the node has seen
        lately that there is no later owner.
        """
        sequence = self.journal.last_sequence
        if sequence > self.journal.durable_sequence:
            self._not_durable[caller] = (parts, is_confirmed)
            self.journal.notify(sequence, partial(self._became_durable, caller))
        else:
            self._send_known(caller, parts, is_confirmed)

    def _became_durable(self, caller: Caller) -> None:
        """Handles the end of the wait: all that an answer shows is durable, or the journal failed.

        It proves no ownership: another owner may have come after that, and before the answer was
        made.
        """
        waiting = self._not_durable.pop(caller, None)
        if waiting is None:
            # It was answered: the log has kept nothing for too long.
            return
        if self.journal.failure is None:
            self._send_known(caller, *waiting)
        else:
            self._sender.send(*caller, protocol.NOT_OWNER)

    def _send(self, caller: Caller, parts: list[bytes]) -> None:
        for part in parts:
            self._sender.send(*caller, part)

    def _send_known(self, caller: Caller, parts: list[bytes], is_confirmed: bool) -> None:
        """Sends an answer of which everything is durable."""
        if is_confirmed or self._loop.time() - self.seen_as_owner_s > _SEEN_S:
            self._send_confirmed(caller, parts)
            return
        self._send(caller, parts)

    def _send_confirmed(self, caller: Caller, parts: list[bytes]) -> None:
        """Sends the answer to a command that changed nothing, once ownership is confirmed.

        The log refuses the changes of an owner that was replaced, but not its reads. So if the
        last confirmed extent is older than `_CONFIRMED_S`, an empty one is appended first.
        """
        now_s = self._loop.time()
        if now_s - self._confirmed_s < _CONFIRMED_S:
            self._send(caller, parts)
            return
        if self._confirming and now_s - self._confirming[-1][0] < _CONFIRMED_S:
            self._unconfirmed.append((self._confirming[-1][1], caller, parts))
            return
        try:
            self.journal.confirm(self._confirm)
        except JournalError:
            self._sender.send(*caller, protocol.NOT_OWNER)
            return
        number = next(self._proofs)
        self._confirming.append((now_s, number))
        self._unconfirmed.append((number, caller, parts))

    def _confirm(self) -> None:
        """Handles the end of an extent that proves the ownership: it is durable, or has failed."""
        began_s, number = self._confirming.popleft()
        if self.journal.failure is not None:
            self._refuse_unconfirmed()
            return
        self._confirmed_s = began_s
        # Later answers need a later proof: they were made too long after this one was requested.
        while self._unconfirmed and self._unconfirmed[0][0] <= number:
            _, caller, parts = self._unconfirmed.popleft()
            self._send(caller, parts)

    def _refuse_unconfirmed(self) -> None:
        while self._unconfirmed:
            self._sender.send(*self._unconfirmed.popleft()[1], protocol.NOT_OWNER)

    def _answer(self, caller: Caller, command: Command[Any], result: Any) -> None:
        parts = protocol.write_reply(command, result)
        if type(command) is Pull and not result:
            # The wait ended without claims: no entry of its own proves the ownership.
            self._send_confirmed(caller, parts)
            return
        if type(command) is Release and self.engine.shard.departed.deliveries:
            # It may have made a dead letter, which the caller should find in its queue next.
            self._held_back.append((self._loop.time(), caller, parts))
            return
        self._send(caller, parts)

    def answer_held_back(self) -> None:
        """Sends the replies that wait for dead letters, if these have arrived or take too long."""
        now_s = self._loop.time()
        while self._held_back and (
            not self.engine.shard.departed.deliveries
            or now_s - self._held_back[0][0] > _HELD_BACK_S
        ):
            _, caller, parts = self._held_back.popleft()
            self._send(caller, parts)

    def _answer_later(
        self, caller: Caller, command: Command[Any], result: Any, error: Exception | None
    ) -> None:
        self._pending.pop(caller, None)
        if error is None:
            self._answer(caller, command, result)
        else:
            self._refuse_later(caller, error)

    def _refuse_later(self, caller: Caller, error: Exception) -> None:
        is_refusal = isinstance(error, PenstockError | SpreadChanged)
        if is_refusal and not isinstance(error, JournalError | UnavailableError):
            self._refuse(caller, error)
        else:
            self._sender.send(*caller, protocol.LOST)

    def _announce(self) -> None:
        """Sends a keep-alive for every command that is not answered yet."""
        self._check_progress()
        self.answer_held_back()
        delayed = (caller for caller, _ in self._delayed)
        unconfirmed = (caller for _, caller, _ in self._unconfirmed)
        waiting = (*self._pending, *self._not_durable, *delayed, *unconfirmed)
        for caller in waiting:
            self._sender.send(*caller, protocol.IN_PROGRESS)
        self._keep_alive = self._loop.call_later(protocol.KEEP_ALIVE_S, self._announce)
        if self.engine.shard.departed.deliveries:
            self.has_departures.set()

    # A log that keeps nothing.

    def _check_progress(self) -> None:
        """Notes whether the log keeps extents; if not, answers what has waited for too long."""
        journal, now_s = self.journal, self._loop.time()
        if self._ended or not journal.has_unsent:
            self._in_flight = None
        elif self._in_flight is None or self._in_flight[0] != journal.slot:
            self._in_flight = (journal.slot, now_s)
        elif journal.delay is not None:
            limit_s = FULL_S if isinstance(journal.delay, LogFull) else STALLED_S
            if self.stall is None and now_s - self._in_flight[1] >= limit_s:
                _logger.error("shard %d: nothing can be appended: %s", self.shard, journal.delay)
                self.stall = journal.delay
            if self.stall is not None:
                self._answer_stalled(self.stall)

    def _advanced(self) -> None:
        """An extent was kept."""
        if self.stall is not None:
            _logger.warning("shard %d: the replicated log keeps extents again", self.shard)
            self.stall = None
        # In a later turn of the event loop, so that the next extent is sent before the answers.
        self._loop.call_soon(self.service.answer_durable)

    def _refusal_of_stall(self, stall: Unanswered) -> bytes:
        """The answer to a command that comes while the log keeps nothing: it is not executed."""
        if isinstance(stall, LogFull):
            return protocol.write_error(
                StoreFull(
                    f"shard {self.shard}: the replicated log has no room ({stall}); give NATS "
                    "more room, and the shard continues by itself"
                )
            )
        return protocol.NOT_OWNER + f"the replicated log keeps nothing: {stall}".encode()

    def _answer_stalled(self, stall: Unanswered) -> None:
        """Ends the waits for the log: whether these commands will be kept is unknown.

        Pulls that wait for a message wait on.
        """
        unknown = protocol.LOST + f"the replicated log keeps nothing: {stall}".encode()
        ending = [caller for caller, each in self._pending.items() if not each.waits]
        for caller in ending:
            self._pending.pop(caller).cancel()
        ending += [caller for _, caller, _ in self._held_back]
        self._held_back.clear()
        for caller in ending:
            self._sender.send(*caller, unknown)
        unchanged = [*self._not_durable, *(caller for _, caller, _ in self._unconfirmed)]
        unchanged += [caller for caller, _ in self._delayed]
        self._not_durable.clear()
        self._unconfirmed.clear()
        self._delayed.clear()
        for caller in unchanged:
            self._sender.send(*caller, self._refusal_of_stall(stall))

    # Ending.

    def fail(self, error: PenstockError) -> None:
        """Stops serving: there is another owner, or the state may be ahead of the log."""
        if self._ended:
            return
        self._ended = True
        self.is_closing = True
        self.journal.fail(error if isinstance(error, JournalError) else JournalError(str(error)))
        self.service.fail(error)
        self._lost(error)

    @property
    def _has_work(self) -> bool:
        answers = self._not_durable or self._held_back or self._unconfirmed
        return bool(self.journal.has_unsent or self._pending or answers)

    def hand_over(self) -> LogSteps[None]:
        """Accepts no more commands, and waits until the accepted ones are answered.

        Raises NotOwner if the shard was lost meanwhile.
        """
        self.is_closing = True
        for caller, pending in list(self._pending.items()):
            if pending.waits:
                # The router sends a waiting pull to the next owner.
                del self._pending[caller]
                pending.cancel()
                self._sender.send(*caller, protocol.NOT_OWNER)
        give_up = self._loop.time() + _FLUSH_S
        while self._has_work and self._loop.time() < give_up:
            if self.journal.failure is not None:
                raise NotOwner(f"shard {self.shard}: was lost while it was handed over")
            yield Pause(_FLUSHED_MS)

    def stop(self) -> None:
        """Accepts no more commands, and sends no more keep-alives."""
        self._ended = self.is_closing = True
        self._keep_alive.cancel()

    def leave_unanswered(self) -> None:
        """Answers all remaining commands with NOT_OWNER or LOST."""
        self._refuse_unconfirmed()
        held_back = (caller for _, caller, _ in self._held_back)
        for caller in (*self._pending, *held_back):
            self._sender.send(*caller, protocol.LOST)
        for caller, _ in self._delayed:
            self._sender.send(*caller, protocol.NOT_OWNER)
