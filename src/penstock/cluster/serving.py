"""A shard that this node owns: its engine, its journal on the log, and the subject it serves.

Tasks append the journal to the log, take snapshots, write the archive, and push dead letters to
other shards. If the log refuses an append because there is a new owner, the state is discarded at
once, and all waiting commands are answered with NOT_OWNER or LOST.
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
from penstock.cluster.jetstream import JetStream
from penstock.cluster.journal import ReplicatedJournal
from penstock.cluster.log import LogSteps, Pause
from penstock.cluster.owner import append_steps
from penstock.cluster.replica import ShardReplica
from penstock.cluster.snapshots import keep_snapshot
from penstock.cluster.spread import NotPlaced, SpreadChanged, SpreadGuard
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
# How long after a takeover the stream's leader is moved: before that, the shard should answer.
_LEADER_MOVE_S: Final = 3.0
# How long after an append standbys are notified to read the log.
_HINT_S: Final = 0.1
_SETTINGS_COMMANDS: Final = (CreateQueue, ConfigureQueue, DeleteQueue)
# The sender of a command: the subject for its reply, and the command's token.
Caller = tuple[str, int]
# How many dead letters are pushed at once, and the pause after one was refused.
_DEPARTURES_MAX: Final = 100
_DEPARTURE_RETRY_S: Final = 1.0
# How long the reply to a release waits until its dead letter has arrived.
_HELD_BACK_S: Final = 1.0
# For how long a proof of ownership is valid for answers that changed nothing.
_CONFIRMED_S: Final = 0.1
_FLUSH_S: Final = 10.0
_FLUSHED_MS: Final = 2
_UNSUBSCRIBE_S: Final = 1.0


class OtherShards(Protocol):
    """What an owner needs of other shards; `router.Router` implements it."""

    async def push_dead_letter(self, push: Push, source: str | None) -> None:
        """Pushes a dead letter to its queue; returns once it is durable. Raises PenstockError."""
        ...

    async def finish_spread_change(self, queue: str) -> None:
        """Finishes a change of a queue's spread. Raises PenstockError."""
        ...

    async def remove_stale_copy(self, queue: str, shard: int) -> None:
        """Deletes a queue in a shard that is not in its spread. Raises PenstockError."""
        ...


class AnswerSender(Protocol):
    """Sends answers; `calls.Sender` implements it."""

    def send(self, subject: str, token: int, data: bytes) -> None:
        """Sends an answer in a later turn of the event loop."""
        ...


class ShardAnswers:
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
        # In a later turn of the event loop, so that the next extent is sent before the answers.
        journal.advanced = partial(loop.call_soon, self.service.answer_durable)
        self._sender = sender
        self._loop = loop
        self._lost = lost
        self._assembly = calls.Assembly()
        # Commands that are submitted and not answered.
        self._pending: dict[Caller, Pending] = {}
        # Proofs of ownership are extents, numbered here: when the last one that is durable was
        # requested, those in flight, and the answers that wait for one with this number.
        self._proofs = itertools.count(1)
        self._confirmed_s = -math.inf
        self._confirming: deque[tuple[float, int]] = deque()
        self._unconfirmed: deque[tuple[int, Caller, list[bytes]]] = deque()
        # Replies that wait until dead letters have arrived, each with the time since it waits.
        self._held_back: deque[tuple[float, Caller, list[bytes]]] = deque()
        self._ended = False
        self._keep_alive = loop.call_later(calls.KEEP_ALIVE_S, self._announce)
        self.service.on_failure(self.fail)

    # Requests.

    def take(self, caller: Caller, data: bytes) -> None:
        """Handles one item of a request (`calls`)."""
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
            self._submit(caller, self._assembly.whole(caller, rest), kind == calls.WATCH)

    def _submit(self, caller: Caller, frame: bytes, watch_only: bool) -> None:
        try:
            command, version = calls.read_command(frame)
            self.guard.check(command, version, self.service.now_ms())
            result = self._watch(command) if watch_only else self.service.submit(command)
        except SpreadChanged:
            self._send_confirmed(caller, [calls.SPREAD_CHANGED])
        except NotPlaced:
            self._send_confirmed(caller, [calls.NOT_PLACED])
        except JournalError:
            # It was refused before anything was appended.
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
            else:
                self._send_confirmed(caller, calls.write_reply(command, result))
            if isinstance(command, _SETTINGS_COMMANDS):
                self._note_settings(command.queue)
        if self.engine.shard.departed.deliveries:
            self.has_departures.set()

    def _watch(self, command: Any) -> Any:
        """Executes a pull whose attempt id is known; any other only waits, and claims nothing.

        Raises RequestError.
        """
        if type(command) is not Pull:
            raise InvalidField(f"command: {type(command).__name__} cannot be watched for")
        queue = self.engine.shard.queue(command.queue)
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
                    self._end_wait(caller, calls.SPREAD_CHANGED)

    def _end_wait(self, caller: Caller, answer: bytes) -> None:
        """Answers a pull that still waits; one that has claims already is not changed."""
        pending = self._pending.get(caller)
        if pending is not None and pending.waits:
            del self._pending[caller]
            pending.cancel()
            self._send_confirmed(caller, [answer])

    def _send_confirmed(self, caller: Caller, parts: list[bytes]) -> None:
        """Sends the answer to a command that changed nothing, once ownership is confirmed.

        The log refuses the changes of an owner that was replaced, but not its reads. So if the
        last confirmed extent is older than `_CONFIRMED_S`, an empty one is appended first.
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
        """Handles the end of an extent that proves the ownership: it is durable, or has failed."""
        began_s, number = self._confirming.popleft()
        if self.journal.failure is not None:
            self._refuse_unconfirmed()
            return
        self._confirmed_s = began_s
        # Later answers need a later proof: they were made too long after this one was requested.
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
            # The wait ended without claims: no entry of its own proves the ownership.
            self._send_confirmed(caller, parts)
            return
        if type(command) is Release and self.engine.shard.departed.deliveries:
            # It may have made a dead letter, which the caller should find in its queue next.
            self._held_back.append((self._loop.time(), caller, parts))
            return
        for part in parts:
            self._sender.send(*caller, part)

    def answer_held_back(self) -> None:
        """Sends the replies that wait for dead letters, if these have arrived or take too long."""
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
        """Sends a keep-alive for every command that is not answered yet."""
        self.answer_held_back()
        for caller in (*self._pending, *(caller for _, caller, _ in self._unconfirmed)):
            self._sender.send(*caller, calls.AT_IT)
        self._keep_alive = self._loop.call_later(calls.KEEP_ALIVE_S, self._announce)
        if self.engine.shard.departed.deliveries:
            self.has_departures.set()

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
        waiting = self._pending or self._held_back or self._unconfirmed
        return bool(self.journal.has_unsent or waiting)

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
                self._sender.send(*caller, calls.NOT_OWNER)
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
        for caller in (*self._pending, *(caller for _, caller, _ in self._held_back)):
            self._sender.send(*caller, calls.LOST)


class OwnedShard:
    """One shard that this node owns: its tasks and its subscription."""

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
        # The error of the last attempt to archive; empty if it succeeded.
        self.archive_error = ""
        self.directory = replica.directory
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
        # When to move the stream's leader to the server that this node is connected to.
        self._move_leader_at_s = self._loop.time() + _LEADER_MOVE_S

    async def start(self, others: OtherShards) -> None:
        """Starts the tasks, subscribes, and announces this owner."""
        for work in (self._append(), self._take_snapshots(), self._deliver_departures(others)):
            self._tasks.append(self._loop.create_task(work))
        if self._archive is not None:
            self._tasks.append(self._loop.create_task(self._keep_archive(self._archive)))
        self._subscription = await self._client.subscribe(
            f"{self._name}.serve.{self.shard}.{self.term}", cb=self._take
        )
        # NATS keeps this order on every server: who gets the announcement can reach the owner.
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
            if self._loop.time() > self._move_leader_at_s:
                # Between two appends: one in flight while the leader changes would be lost, and
                # repeated only after a timeout.
                self._move_leader_at_s = math.inf
                await self._replicated.move_leader_here(self.shard)
            if self._hint is None:
                self._hint = self._loop.call_later(_HINT_S, self._send_hint)

    def _send_hint(self) -> None:
        self._hint = None
        self._sender.send(f"{self._name}.grown.{self.shard}", 0, b"")

    async def _take_snapshots(self) -> None:
        while True:
            await asyncio.sleep(_SNAPSHOT_LOOK_S)
            if self._upkeep.is_due:
                # A snapshot that fails is tried again when the journal has grown further.
                with suppress(PenstockError, OSError):
                    await self.take_snapshot()

    async def take_snapshot(self) -> bool:
        """Takes a snapshot now. Raises PenstockError."""
        name = secrets.token_hex(8)
        steps = keep_snapshot(self.journal, self._upkeep, self.directory, name)
        return await self._replicated.run(steps)

    @property
    def unarchived_bytes(self) -> int:
        """How many bytes are in the log and not in the archive; 0 without an archive."""
        return max(0, self.journal.durable_position - self.journal.archived_position)

    async def _keep_archive(self, archive: ShardArchive) -> None:
        """Copies what is durable in the log to the archive, in threads."""
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
                # Nothing is purged meanwhile. Another process may still have the files open.
                self.archive_error = str(error)
            await asyncio.sleep(_ARCHIVE_S)

    async def _deliver_departures(self, others: OtherShards) -> None:
        """Pushes dead letters to their shards, and removes each here once it is durable there."""
        while True:
            await self._answers.has_departures.wait()
            self._answers.has_departures.clear()
            try:
                departures = self.engine.departures(_DEPARTURES_MAX)
                await self._until_durable(self.engine.answer_sequence)
                for each, push in departures:
                    queue = self.engine.shard.queues.get(each.source)
                    source = None if queue is None else queue.name
                    await others.push_dead_letter(push, source)
                    self.engine.arrived(each.delivery.number, each.delivery.epoch)
                self._answers.answer_held_back()
            except PenstockError:
                # The other shard moves, or refuses it: it stays in the outbox.
                await asyncio.sleep(_DEPARTURE_RETRY_S)
            if self.engine.shard.departed.deliveries:
                self._answers.has_departures.set()

    async def _until_durable(self, sequence: int) -> None:
        done = asyncio.Event()
        self.journal.notify(sequence, done.set)
        await done.wait()
        self.journal.wait(sequence)

    # Ending.

    def replaced_by(self, term: int) -> None:
        """Stops serving, because the register has an owner of a higher term."""
        self._answers.fail(
            Fenced(f"shard {self.shard}: term {self.term} was replaced by term {term}")
        )

    async def hand_over(self) -> None:
        """Accepts no more commands and answers the accepted ones. Raises NotOwner."""
        await self._replicated.run(self._answers.hand_over())
        await self._sender.drain()

    async def close(self) -> None:
        """Ends the tasks and the subscription, and discards the state."""
        self._answers.stop()
        if self._hint is not None:
            self._hint.cancel()
        await end_tasks(self._tasks)
        if self._archive is not None:
            with suppress(PenstockError):
                await asyncio.to_thread(self._archive.close)
        if self._subscription is not None:
            # Commands that were received and not handled yet are answered, so that no router waits.
            with suppress(Exception):
                async with asyncio.timeout(_UNSUBSCRIBE_S):
                    await self._subscription.drain()  # type: ignore[no-untyped-call]
        self.journal.fail(NotOwner(f"shard {self.shard}: its owner has stopped"))
        with suppress(PenstockError):
            await self.service.close()
        self._answers.leave_unanswered()
        await self._sender.drain()


async def end_tasks(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancels tasks until they have ended: nats-py may take one cancellation for a timeout."""
    own = asyncio.current_task()
    left = {task for task in tasks if task is not own and not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.1)
