"""A shard that this node owns: the engine, its journal on the log, and the subject it answers on.

Three tasks run beside it: one appends what the engine has done to the log, one takes snapshots, and
one carries dead letters to other shards. When the log refuses, because another owner has come, the
state is discarded at once and everybody who waits is told to ask elsewhere.
"""

import asyncio
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
from penstock.backends.engine.loop import LoopEngine
from penstock.backends.engine.upkeep import Upkeep
from penstock.backends.loop import Pending
from penstock.cluster import calls
from penstock.cluster.jetstream import JetStream
from penstock.cluster.journal import ReplicatedJournal
from penstock.cluster.owner import append_steps
from penstock.cluster.replica import ShardReplica
from penstock.cluster.snapshots import keep_snapshot
from penstock.errors import Fenced, JournalError, NotOwner, PenstockError, UnavailableError
from penstock.service import Command, Push, Release

_SNAPSHOT_LOOK_S: Final = 1.0
# How long after a takeover the leader of the stream follows: first of all the shard should answer.
_PREFER_S: Final = 3.0
# How long after an append standbys are told that there is something to read.
_HINT_S: Final = 0.1
# Who asked: the subject to which the reply goes, and the token of the command.
Caller = tuple[str, int]
# How many departures are carried at once, and how long a refused one is left alone.
_CARRIED_MAX: Final = 100
_CARRY_AGAIN_S: Final = 1.0
# How long the reply to a release waits for the dead letter to arrive.
_HELD_BACK_S: Final = 1.0
# For how long a proof of ownership is good: so old may an answer be that changed nothing.
_CONFIRMED_S: Final = 0.1
_FLUSH_S: Final = 10.0
_UNSUBSCRIBE_S: Final = 1.0


class Carrier(Protocol):
    """Brings a message to another shard: `router.Router` does."""

    async def push_to(self, shard: int, push: Push, source: str | None) -> None:
        """Returns once the message is durable there. Raises PenstockError."""
        ...


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
        lost: Callable[["OwnedShard", PenstockError], None],
    ) -> None:
        """`lost` is called once if the shard can no longer be served from here."""
        self.shard = journal.shard
        self.term = journal.term
        self.journal = journal
        self.engine = engine
        self.service = LoopEngine(engine)
        self.directory = replica.directory
        self._replicated = replicated
        self._client = client
        self._name = name
        self._sender = calls.Sender(client)
        self._upkeep = Upkeep(engine, journal, replica.directory, None)
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        journal.wake = self._woken.set
        # In a later turn: first the next extent is sent.
        journal.advanced = partial(self._loop.call_soon, self.service.answer_durable)
        self._assembly = calls.Assembly()
        # What was submitted and is not answered, by who asked.
        self._pending: dict[Caller, Pending] = {}
        # When the entry was appended that last proved that this is the owner; when those were that
        # are on their way; and the answers that wait for them.
        self._confirmed_s = self._loop.time()
        self._confirming: deque[float] = deque()
        self._unconfirmed: deque[tuple[Caller, list[bytes]]] = deque()
        # Replies that wait until what departed has arrived: since when, where to, and what.
        self._held_back: deque[tuple[float, Caller, list[bytes]]] = deque()
        self._closing = False
        self._ended = False
        self._tasks: list[asyncio.Task[None]] = []
        self._subscription: Subscription | None = None
        self._keep_alive: asyncio.TimerHandle | None = None
        self._hint: asyncio.TimerHandle | None = None
        # When the stream's leader is to be moved to the server that this node is connected to.
        self._prefer_at_s = self._loop.time() + _PREFER_S
        self._has_departures = asyncio.Event()
        self.service.on_failure(self._fail)

    async def start(self, carrier: Carrier) -> None:
        """Begins to serve."""
        for work in (self._append(), self._take_snapshots(), self._carry(carrier)):
            self._tasks.append(self._loop.create_task(work))
        self._keep_alive = self._loop.call_later(calls.KEEP_ALIVE_S, self._announce)
        self._subscription = await self._client.subscribe(
            f"{self._name}.serve.{self.shard}.{self.term}", cb=self._take
        )
        # NATS handles both in this order, on every server: whoever hears of it can ask.
        await self._client.publish(f"{self._name}.owned.{self.shard}", str(self.term).encode())

    # Requests.

    async def _take(self, message: Msg) -> None:
        back = message.reply.rpartition(".")[0] + calls.REPLIES
        async for token, data in calls.in_slices(message.data):
            self._take_item((back, token), data)

    def _take_item(self, caller: Caller, data: bytes) -> None:
        kind, rest = data[:1], data[1:]
        if kind == calls.COMMAND_PART:
            self._assembly.add(caller, rest)
        elif kind == calls.CANCEL:
            pending = self._pending.pop(caller, None)
            if pending is not None:
                pending.cancel()
        elif self._closing:
            self._sender.send(*caller, calls.NOT_OWNER)
        else:
            self._submit(caller, self._assembly.whole(caller, rest))

    def _submit(self, caller: Caller, frame: bytes) -> None:
        try:
            command = calls.read_command(frame)
            result = self.service.submit(command)
        except JournalError:
            # It was refused before anything of it was appended.
            self._sender.send(*caller, calls.NOT_OWNER)
        except PenstockError as error:
            self._send_confirmed(caller, [calls.write_error(error)])
        except Exception as fault:
            self._fail(JournalError(f"shard {self.shard}: {type(fault).__name__}: {fault}"))
            self._sender.send(*caller, calls.LOST)
        else:
            if isinstance(result, Pending):
                self._pending[caller] = result
                result.then(partial(self._answer_later, caller, command))
            else:
                self._send_confirmed(caller, calls.write_reply(command, result))
        if self.engine.shard.departed.deliveries:
            self._has_departures.set()

    def _send_confirmed(self, caller: Caller, parts: list[bytes]) -> None:
        """Sends an answer that changed nothing, once it is sure that this is still the owner.

        What is appended to the log is refused there if another owner has come. What only looks at
        the state would not be: so an empty entry is appended if the last one is too long ago.
        """
        now_s = self._loop.time()
        if now_s - self._confirmed_s < _CONFIRMED_S:
            for part in parts:
                self._sender.send(*caller, part)
            return
        self._unconfirmed.append((caller, parts))
        if not self._confirming or now_s - self._confirming[-1] >= _CONFIRMED_S:
            try:
                sequence, _ = self.journal.append(())
            except JournalError:
                self._refuse_unconfirmed()
                return
            self._confirming.append(now_s)
            self.journal.notify(sequence, partial(self._confirm, sequence))

    def _confirm(self, sequence: int) -> None:
        """The log took an entry that was appended after these answers were made, or refused it."""
        began_s = self._confirming.popleft()
        if sequence > self.journal.durable_sequence:
            self._refuse_unconfirmed()
            return
        self._confirmed_s = began_s
        while self._unconfirmed:
            caller, parts = self._unconfirmed.popleft()
            for part in parts:
                self._sender.send(*caller, part)

    def _refuse_unconfirmed(self) -> None:
        while self._unconfirmed:
            self._sender.send(*self._unconfirmed.popleft()[0], calls.NOT_OWNER)

    def _answer(self, caller: Caller, command: Command[Any], result: Any) -> None:
        parts = calls.write_reply(command, result)
        if type(command) is Release and self.engine.shard.departed.deliveries:
            # It may have made a dead letter: whoever looks for it next should find it there.
            self._held_back.append((self._loop.time(), caller, parts))
            return
        for part in parts:
            self._sender.send(*caller, part)

    def _answer_held_back(self) -> None:
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
            self._sender.send(*caller, calls.write_error(error))

    def _announce(self) -> None:
        """Tells everybody who has waited for a while that this owner is still at it."""
        self._answer_held_back()
        for caller in (*self._pending, *(caller for caller, _ in self._unconfirmed)):
            self._sender.send(*caller, calls.AT_IT)
        self._keep_alive = self._loop.call_later(calls.KEEP_ALIVE_S, self._announce)
        if self.engine.shard.departed.deliveries:
            self._has_departures.set()

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
                self._fail(error)
                return
            if self.engine.shard.departed.deliveries:
                self._has_departures.set()
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

    async def _carry(self, carrier: Carrier) -> None:
        """Brings what departed to the other shards, and ends it here once it is durable there."""
        while True:
            await self._has_departures.wait()
            self._has_departures.clear()
            try:
                owed = self.engine.departures(_CARRIED_MAX)
                await self._until_durable(self.engine.answer_sequence)
                for each, push in owed:
                    queue = self.engine.shard.queues.get(each.source)
                    source = None if queue is None else queue.name
                    await carrier.push_to(each.to_shard, push, source)
                    self.engine.arrived(each.delivery.number, each.delivery.epoch)
                self._answer_held_back()
            except PenstockError:
                # The other shard moves, or refuses it: it stays owed.
                await asyncio.sleep(_CARRY_AGAIN_S)
            if self.engine.shard.departed.deliveries:
                self._has_departures.set()

    async def _until_durable(self, sequence: int) -> None:
        done = asyncio.Event()
        self.journal.notify(sequence, done.set)
        await done.wait()
        self.journal.wait(sequence)

    # Ending.

    def replaced_by(self, term: int) -> None:
        """The register names an owner of a higher term: this one has been replaced."""
        self._fail(Fenced(f"shard {self.shard}: term {self.term} was replaced by term {term}"))

    def _fail(self, error: PenstockError) -> None:
        """The state may be ahead of the log, or another owner has come: nothing more is served."""
        if self._ended:
            return
        self._ended = True
        self._closing = True
        self.journal.fail(error if isinstance(error, JournalError) else JournalError(str(error)))
        self.service.fail(error)
        self._lost(self, error)

    @property
    def _has_work(self) -> bool:
        waiting = self._pending or self._held_back or self._unconfirmed
        return bool(self.journal.has_unsent or waiting)

    async def hand_over(self) -> None:
        """Answers what was accepted, and nothing else: the next owner can take over."""
        self._closing = True
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
            await asyncio.sleep(0.002)
        await self._sender.drain()

    async def close(self) -> None:
        """Ends the tasks and discards the state."""
        self._ended = self._closing = True
        for timer in (self._keep_alive, self._hint):
            if timer is not None:
                timer.cancel()
        await end_tasks(self._tasks)
        if self._subscription is not None:
            # What was received and not looked at yet is answered: its router must not wait.
            with suppress(Exception):
                async with asyncio.timeout(_UNSUBSCRIBE_S):
                    await self._subscription.drain()  # type: ignore[no-untyped-call]
        self.journal.fail(NotOwner(f"shard {self.shard}: its owner has stopped"))
        with suppress(PenstockError):
            await self.service.close()
        self._refuse_unconfirmed()
        for caller in (*self._pending, *(caller for _, caller, _ in self._held_back)):
            self._sender.send(*caller, calls.LOST)
        await self._sender.drain()


async def end_tasks(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancels tasks until they have ended: a library may take one cancellation for a timeout."""
    own = asyncio.current_task()
    left = {task for task in tasks if task is not own and not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.1)
