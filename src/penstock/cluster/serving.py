"""A shard that this node owns: the engine, its journal on the log, and the subject it answers on.

Three tasks run beside it: one appends what the engine has done to the log, one takes snapshots, and
one carries dead letters to other shards. When the log refuses, because another owner has come, the
state is discarded at once and everybody who waits is told to ask elsewhere.
"""

import asyncio
import itertools
import math
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from penstock.backends.engine.engine import Engine
from penstock.backends.engine.loop import EngineReply, LoopEngine
from penstock.backends.engine.upkeep import Upkeep
from penstock.backends.loop import Pending
from penstock.cluster import calls
from penstock.cluster.archive import PART_BYTES, ShardArchive
from penstock.cluster.between import Carrier, carry_departures
from penstock.cluster.jetstream import JetStream
from penstock.cluster.journal import ReplicatedJournal
from penstock.cluster.log import LogSteps, Pause
from penstock.cluster.owner import append_steps
from penstock.cluster.replica import ShardReplica
from penstock.cluster.snapshots import keep_snapshot
from penstock.cluster.spread import NotPlaced, SpreadChanged, SpreadGuard, knows_push
from penstock.errors import (
    Fenced,
    InvalidField,
    JournalError,
    NotOwner,
    PenstockError,
    UnavailableError,
)
from penstock.service import Command, ConfigureQueue, CreateQueue, DeleteQueue, Pull, Push, Release

_SNAPSHOT_LOOK_S: Final = 1.0
_ARCHIVE_S: Final = 0.5
# How long after a takeover the leader of the stream follows: first of all the shard should answer.
_PREFER_S: Final = 3.0
# How long after an append standbys are told that there is something to read.
_HINT_S: Final = 0.1
_OF_SETTINGS: Final = (CreateQueue, ConfigureQueue, DeleteQueue)
# Who asked: the subject to which the reply goes, and the token of the command.
Caller = tuple[str, int]
# How long the reply to a release waits for the dead letter to arrive.
_HELD_BACK_S: Final = 1.0
# For how long a proof of ownership is good: so old may an answer be that changed nothing.
_CONFIRMED_S: Final = 0.1
_FLUSH_S: Final = 10.0
_FLUSHED_MS: Final = 2
_UNSUBSCRIBE_S: Final = 1.0


class AnswerSender(Protocol):
    """Brings answers to those who asked: `calls.Sender` does."""

    def send(self, subject: str, token: int, data: bytes) -> None:
        """Sends an answer, soon."""
        ...


class ShardAnswers:
    """What the owner of a shard answers, and when.

    It starts no task and does no I/O: `loop` is asked for the time and for callbacks, and may be
    that of a simulation.
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
        # In a later turn: first the next extent is sent.
        journal.advanced = partial(loop.call_soon, self.service.answer_durable)
        self._sender = sender
        self._loop = loop
        self._lost = lost
        self._assembly = calls.Assembly()
        # What was submitted and is not answered, by who asked.
        self._pending: dict[Caller, Pending] = {}
        # When the extent was asked for that last proved that this is the owner; those that are on
        # their way, with the number of each; and the answers, each with the number it needs.
        self._proofs = itertools.count(1)
        self._confirmed_s = -math.inf
        self._confirming: deque[tuple[float, int]] = deque()
        self._unconfirmed: deque[tuple[int, Caller, list[bytes]]] = deque()
        # Answers that show what is not kept yet.
        self._unkept: dict[Caller, list[bytes]] = {}
        # Replies that wait until what departed has arrived: since when, where to, and what.
        self._held_back: deque[tuple[float, Caller, list[bytes]]] = deque()
        self._ended = False
        self._keep_alive = loop.call_later(calls.KEEP_ALIVE_S, self._announce)
        self.service.on_failure(self.fail)

    # Requests.

    def take(self, caller: Caller, data: bytes) -> None:
        """An item of a request has come (`calls`)."""
        kind, rest = data[:1], data[1:]
        if kind == calls.COMMAND_PART:
            self._assembly.add(caller, rest)
        elif kind == calls.END_WAIT:
            self._end_wait(caller, calls.REPLY_WHOLE + calls.NO_CLAIMS)
        elif kind == calls.CANCEL:
            pending = self._pending.pop(caller, None)
            if pending is not None:
                pending.cancel()
        elif self.is_closing:
            self._sender.send(*caller, calls.NOT_OWNER)
        else:
            self._submit(caller, self._assembly.whole(caller, rest), kind == calls.LOOK)

    def _submit(self, caller: Caller, frame: bytes, looks: bool) -> None:
        try:
            command, version = calls.read_command(frame)
            self.guard.check(command, version, self.service.now_ms())
            result = self._look(command) if looks else self.service.submit(command)
        except SpreadChanged:
            self._send_confirmed(caller, [calls.SPREAD_OTHERWISE])
        except NotPlaced:
            self._send_kept(caller, [calls.NOT_PLACED_HERE])
        except JournalError:
            # It was refused before anything of it was appended.
            self._sender.send(*caller, calls.NOT_OWNER)
        except PenstockError as error:
            self._send_confirmed(caller, [calls.write_error(error)])
        except Exception as fault:
            self.fail(JournalError(f"shard {self.shard}: {type(fault).__name__}: {fault}"))
            self._sender.send(*caller, calls.LOST)
        else:
            if isinstance(result, Pending):
                self._pending[caller] = result
                result.then(partial(self._answer_later, caller, command))
            elif type(command) is Pull:
                self._send_confirmed(caller, calls.write_reply(command, result))
            else:
                self._send_kept(caller, calls.write_reply(command, result))
            if isinstance(command, _OF_SETTINGS):
                self._note_settings(command.queue)
        if self.engine.shard.departed.deliveries:
            self.has_departures.set()

    def _look(self, command: Any) -> Any:
        """Does a pull whose attempt is known here; others only wait for a message, or not at all.

        A push is answered if its dedup id is known here. Raises RequestError or NotPlaced.
        """
        if type(command) not in (Pull, Push):
            raise InvalidField(f"command: {type(command).__name__} cannot only look")
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
        """A queue may be spread otherwise from here on: pulls that wait here must ask again."""
        was_spread = name in self.guard.names
        self.guard.configured(name)
        if was_spread or name in self.guard.names:
            for caller, pending in list(self._pending.items()):
                if isinstance(pending, EngineReply) and pending.waits_on(name):
                    self._end_wait(caller, calls.SPREAD_OTHERWISE)

    def _end_wait(self, caller: Caller, answer: bytes) -> None:
        """Answers a pull that waits; what has been served is answered, or will be, as it is."""
        pending = self._pending.get(caller)
        if pending is not None and pending.waits:
            del self._pending[caller]
            pending.cancel()
            self._send_confirmed(caller, [answer])

    def _send_kept(self, caller: Caller, parts: list[bytes]) -> None:
        """Sends an answer that shows the state, once everything that led to it is kept.

        Whoever acts on it in another shard must not see it undone by a crash: a group that is
        empty because of a delete which is not kept, a note which the next owner does not know.
        """
        sequence = self.journal.last_sequence
        if sequence <= self.journal.durable_sequence:
            self._send_confirmed(caller, parts)
        else:
            self._unkept[caller] = parts
            self.journal.notify(sequence, partial(self._kept, caller))

    def _kept(self, caller: Caller) -> None:
        """All that an answer shows is kept, or the journal failed.

        That is no proof of ownership: it may have been kept before another owner came, and the
        answer made after that.
        """
        parts = self._unkept.pop(caller)
        if self.journal.failure is None:
            self._send_confirmed(caller, parts)
        else:
            self._sender.send(*caller, calls.NOT_OWNER)

    def _send_confirmed(self, caller: Caller, parts: list[bytes]) -> None:
        """Sends an answer that changed nothing, once it is sure that this is still the owner.

        What is appended to the log is refused there if another owner has come. What only looks at
        the state would not be: so an empty extent is appended if the last one is too long ago.
        """
        now_s = self._loop.time()
        if now_s - self._confirmed_s < _CONFIRMED_S:
            for part in parts:
                self._sender.send(*caller, part)
            return
        if self._confirming and now_s - self._confirming[-1][0] < _CONFIRMED_S:
            self._unconfirmed.append((self._confirming[-1][1], caller, parts))
            return
        try:
            self.journal.confirm(self._confirm)
        except JournalError:
            self._sender.send(*caller, calls.NOT_OWNER)
            return
        number = next(self._proofs)
        self._confirming.append((now_s, number))
        self._unconfirmed.append((number, caller, parts))

    def _confirm(self) -> None:
        """The log took the next extent that was to prove the ownership, or refused it."""
        began_s, number = self._confirming.popleft()
        if self.journal.failure is not None:
            self._refuse_unconfirmed()
            return
        self._confirmed_s = began_s
        # Not the answers behind these: they were made too long after this extent was asked for.
        while self._unconfirmed and self._unconfirmed[0][0] <= number:
            _, caller, parts = self._unconfirmed.popleft()
            for part in parts:
                self._sender.send(*caller, part)

    def _refuse_unconfirmed(self) -> None:
        while self._unconfirmed:
            self._sender.send(*self._unconfirmed.popleft()[1], calls.NOT_OWNER)

    def _answer(self, caller: Caller, command: Command[Any], result: Any) -> None:
        parts = calls.write_reply(command, result)
        if type(command) is Pull and not result:
            # A wait that ended with nothing: no entry proves that this is still the owner.
            self._send_confirmed(caller, parts)
            return
        if type(command) is Release and self.engine.shard.departed.deliveries:
            # It may have made a dead letter: whoever looks for it next should find it there.
            self._held_back.append((self._loop.time(), caller, parts))
            return
        for part in parts:
            self._sender.send(*caller, part)

    def answer_held_back(self) -> None:
        """Sends the replies that waited for departures, if those have arrived or take too long."""
        now_s = self._loop.time()
        while self._held_back and (
            not self.engine.shard.departed.deliveries
            or now_s - self._held_back[0][0] > _HELD_BACK_S
        ):
            _, caller, parts = self._held_back.popleft()
            for part in parts:
                self._sender.send(*caller, part)

    def _answer_later(
        self, caller: Caller, command: Command[Any], result: Any, error: Exception | None
    ) -> None:
        self._pending.pop(caller, None)
        if error is None:
            self._answer(caller, command, result)
        elif isinstance(error, JournalError | UnavailableError) or not isinstance(
            error, PenstockError
        ):
            self._sender.send(*caller, calls.LOST)
        else:
            self._send_confirmed(caller, [calls.write_error(error)])

    def _announce(self) -> None:
        """Tells everybody who has waited for a while that this owner is still at it."""
        self.answer_held_back()
        unconfirmed = (caller for _, caller, _ in self._unconfirmed)
        for caller in (*self._pending, *self._unkept, *unconfirmed):
            self._sender.send(*caller, calls.AT_IT)
        self._keep_alive = self._loop.call_later(calls.KEEP_ALIVE_S, self._announce)
        if self.engine.shard.departed.deliveries:
            self.has_departures.set()

    # Ending.

    def fail(self, error: PenstockError) -> None:
        """The state may be ahead of the log, or another owner has come: nothing more is served."""
        if self._ended:
            return
        self._ended = True
        self.is_closing = True
        self.journal.fail(error if isinstance(error, JournalError) else JournalError(str(error)))
        self.service.fail(error)
        self._lost(error)

    @property
    def _has_work(self) -> bool:
        waiting = self._pending or self._held_back or self._unconfirmed or self._unkept
        return bool(self.journal.has_unsent or waiting)

    def hand_over(self) -> LogSteps[None]:
        """Answers what was accepted, and nothing else: the next owner can take over.

        Raises NotOwner if the shard was lost meanwhile.
        """
        self.is_closing = True
        for caller, pending in list(self._pending.items()):
            if pending.waits:
                # A waiting pull asks the next owner.
                del self._pending[caller]
                pending.cancel()
                self._sender.send(*caller, calls.NOT_OWNER)
        give_up = self._loop.time() + _FLUSH_S
        while self._has_work and self._loop.time() < give_up:
            if self.journal.failure is not None:
                raise NotOwner(f"shard {self.shard}: was lost while it was handed over")
            yield Pause(_FLUSHED_MS)

    def stop(self) -> None:
        """Takes nothing more."""
        self._ended = self.is_closing = True
        self._keep_alive.cancel()

    def leave_unanswered(self) -> None:
        """Tells all who still wait that they have to ask the next owner."""
        self._refuse_unconfirmed()
        for caller in (*self._pending, *(caller for _, caller, _ in self._held_back)):
            self._sender.send(*caller, calls.LOST)


class OwnedShard:
    """One shard in the hands of its owner, on an event loop."""

    def __init__(
        self,
        replicated: JetStream,
        client: Client,
        name: str,
        replica: ShardReplica,
        journal: ReplicatedJournal,
        engine: Engine,
        guard: SpreadGuard,
        archive: ShardArchive | None,
        lost: Callable[["OwnedShard", PenstockError], None],
    ) -> None:
        """`lost` is called once if the shard can no longer be served from here."""
        self.shard = journal.shard
        self.term = journal.term
        self.journal = journal
        self.engine = engine
        self._archive = archive
        # Why the last attempt to archive failed; empty if it did not.
        self.archive_error = ""
        self.directory = replica.directory
        # How often slots were missing while this shard was read, as a standby and to take it over.
        self.gaps = replica.gaps
        self._replicated = replicated
        self._client = client
        self._name = name
        self._sender = calls.Sender(client)
        self._upkeep = Upkeep(engine, journal, replica.directory, None)
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        journal.wake = self._woken.set
        self.guard = guard
        self._answers = ShardAnswers(
            journal, engine, guard, self._sender, self._loop, partial(lost, self)
        )
        self.service = self._answers.service
        self._tasks: list[asyncio.Task[None]] = []
        self._subscription: Subscription | None = None
        self._hint: asyncio.TimerHandle | None = None
        # When the stream's leader is to be moved to the server that this node is connected to.
        self._prefer_at_s = self._loop.time() + _PREFER_S

    async def start(self, carrier: Carrier) -> None:
        """Begins to serve."""
        carrying = carry_departures(self._answers, carrier)
        for work in (self._append(), self._take_snapshots(), carrying):
            self._tasks.append(self._loop.create_task(work))
        if self._archive is not None:
            self._tasks.append(self._loop.create_task(self._keep_archive(self._archive)))
        self._subscription = await self._client.subscribe(
            f"{self._name}.serve.{self.shard}.{self.term}", cb=self._take
        )
        # NATS handles both in this order, on every server: whoever hears of it can ask.
        await self._client.publish(f"{self._name}.owned.{self.shard}", str(self.term).encode())

    async def _take(self, message: Msg) -> None:
        back = message.reply.rpartition(".")[0] + calls.REPLIES
        async for token, data in calls.in_slices(message.data):
            self._answers.take((back, token), data)

    # Tasks.

    async def _append(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            try:
                await self._replicated.run(append_steps(self.journal))
            except Exception as error:
                if not isinstance(error, JournalError):
                    error = JournalError(f"shard {self.shard}: {type(error).__name__} {error}")
                self._answers.fail(error)
                return
            if self.engine.shard.departed.deliveries:
                self._answers.has_departures.set()
            if self._loop.time() > self._prefer_at_s:
                # Between two appends: one that is under way while the leader changes is lost, and
                # repeated only after a while.
                self._prefer_at_s = math.inf
                await self._replicated.prefer_here(self.shard)
            if self._hint is None:
                self._hint = self._loop.call_later(_HINT_S, self._send_hint)

    def _send_hint(self) -> None:
        self._hint = None
        self._sender.send(f"{self._name}.grown.{self.shard}", 0, b"")

    async def _take_snapshots(self) -> None:
        while True:
            await asyncio.sleep(_SNAPSHOT_LOOK_S)
            if self._upkeep.is_due:
                # One that fails is tried again when the journal has grown further.
                with suppress(PenstockError, OSError):
                    await self.take_snapshot()

    async def take_snapshot(self) -> bool:
        """Takes a snapshot now. Raises PenstockError."""
        name = secrets.token_hex(8)
        steps = keep_snapshot(self.journal, self._upkeep, self.directory, name)
        return await self._replicated.run(steps)

    @property
    def unarchived_bytes(self) -> int:
        """How much of the stream is in the log and not in the archive; 0 without an archive."""
        return max(0, self.journal.durable_position - self.journal.archived_position)

    async def _keep_archive(self, archive: ShardArchive) -> None:
        """Writes to the archive what is in the log, in threads, as it comes."""
        journal = self.journal
        position = -1
        while True:
            try:
                if position < 0:
                    first = journal.first_position
                    begin = (first, journal.sequence_at(first), journal.durable_position)
                    position = await asyncio.to_thread(archive.open, *begin)
                while data := journal.durable_entries(position, PART_BYTES):
                    position = await asyncio.to_thread(archive.write, data)
                    journal.archived_position = position
                journal.archived_position = position
                self.archive_error = ""
            except (PenstockError, OSError) as error:
                # Nothing is purged meanwhile. Another process may have the files open still.
                self.archive_error = str(error)
            await asyncio.sleep(_ARCHIVE_S)

    # Ending.

    def replaced_by(self, term: int) -> None:
        """The register names an owner of a higher term: this one has been replaced."""
        self._answers.fail(
            Fenced(f"shard {self.shard}: term {self.term} was replaced by term {term}")
        )

    async def hand_over(self) -> None:
        """Answers what was accepted, and nothing else: the next owner can take over."""
        await self._replicated.run(self._answers.hand_over())
        await self._sender.drain()

    async def close(self) -> None:
        """Ends the tasks and discards the state."""
        self._answers.stop()
        if self._hint is not None:
            self._hint.cancel()
        await end_tasks(self._tasks)
        if self._archive is not None:
            with suppress(PenstockError):
                await asyncio.to_thread(self._archive.close)
        if self._subscription is not None:
            # What was received and not looked at yet is answered: its router must not wait.
            with suppress(Exception):
                async with asyncio.timeout(_UNSUBSCRIBE_S):
                    await self._subscription.drain()  # type: ignore[no-untyped-call]
        self.journal.fail(NotOwner(f"shard {self.shard}: its owner has stopped"))
        with suppress(PenstockError):
            await self.service.close()
        self._answers.leave_unanswered()
        await self._sender.drain()


async def end_tasks(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancels tasks until they have ended: a library may take one cancellation for a timeout."""
    own = asyncio.current_task()
    left = [task for task in tasks if task is not own and not task.done()]
    while left:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=0.1)
        left = [task for task in left if not task.done()]
