"""A shard that this node owns: its engine, its journal on the log, and the subject it serves.

Tasks append the journal to the log, take snapshots, write the archive, and push dead letters to
other shards. If the log refuses an append because there is a new owner, the state is discarded at
once, and all waiting commands are answered with NOT_OWNER or LOST.
"""

import asyncio
import math
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, Final

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from penstock.backends.engine.engine import Engine
from penstock.backends.engine.upkeep import Upkeep
from penstock.backends.scheduler import TURN_S
from penstock.cluster.archive import ShardArchive, keep_archive
from penstock.cluster.jetstream import JetStream
from penstock.cluster.journal import ReplicatedJournal
from penstock.cluster.other_shards import OtherShards, deliver_departures
from penstock.cluster.replica import ShardReplica
from penstock.cluster.sender import Sender, in_slices
from penstock.cluster.shard_server import Caller as Caller
from penstock.cluster.shard_server import ShardServer as ShardServer
from penstock.cluster.snapshots import keep_snapshot
from penstock.cluster.spread_rules import SpreadGuard
from penstock.cluster.takeover import append_steps
from penstock.errors import Fenced, JournalError, NotOwner, PenstockError
from penstock.wire import shard_protocol as protocol

_SNAPSHOT_CHECK_S: Final = 1.0
# How long after a takeover the stream's leader is moved: before that, the shard should answer.
_LEADER_MOVE_S: Final = 3.0
# How long after an append standbys are notified to read the log.
_HINT_S: Final = 0.1
_UNSUBSCRIBE_S: Final = 1.0


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
        # How often slots were missing while this shard was read, as a standby and to take it over.
        self.gaps = replica.gaps
        self._replicated = replicated
        self._client = client
        self._name = name
        self._sender = Sender(client)
        self._upkeep = Upkeep(engine, journal, replica.directory, None)
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        journal.wake = self._woken.set
        self.guard = guard
        self._server = ShardServer(
            journal, engine, guard, self._sender, self._loop, partial(lost, self)
        )
        self.service = self._server.service
        self._tasks: list[asyncio.Task[None]] = []
        self._subscription: Subscription | None = None
        self._hint: asyncio.TimerHandle | None = None
        # When to move the stream's leader to the server that this node is connected to.
        self._move_leader_at_s = self._loop.time() + _LEADER_MOVE_S

    async def start(self, others: OtherShards, archive_revision: int) -> None:
        """Starts the tasks, subscribes, and announces this owner."""
        delivering = deliver_departures(self._server, others)
        for work in (self._append(), self._take_snapshots(), delivering):
            self._tasks.append(self._loop.create_task(work))
        if self._archive is not None:
            archiving = keep_archive(
                self._replicated,
                self.journal,
                self._archive,
                archive_revision,
                self._note_archive_error,
            )
            self._tasks.append(self._loop.create_task(archiving))
        self._subscription = await self._client.subscribe(
            f"{self._name}.serve.{self.shard}.{self.term}", cb=self._receive
        )
        # NATS keeps this order on every server: who gets the announcement can reach the owner.
        await self._client.publish(f"{self._name}.owned.{self.shard}", str(self.term).encode())

    async def _receive(self, message: Msg) -> None:
        back = message.reply.rpartition(".")[0] + protocol.REPLIES
        until_s = perf_counter() + TURN_S
        async for token, data in in_slices(message.data):
            self._server.receive((back, token), data)
            if perf_counter() > until_s:
                await asyncio.sleep(0)
                until_s = perf_counter() + TURN_S

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
                self._server.fail(error)
                return
            if self.engine.shard.departed.deliveries:
                self._server.has_departures.set()
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
            await asyncio.sleep(_SNAPSHOT_CHECK_S)
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

    @property
    def stall(self) -> str:
        """Why the replicated log keeps nothing; empty if it does."""
        return str(self._server.stall or "")

    def _note_archive_error(self, error: str) -> None:
        self.archive_error = error

    # Ending.

    def replaced_by(self, term: int) -> None:
        """Stops serving, because the register has an owner of a higher term."""
        self._server.fail(
            Fenced(f"shard {self.shard}: term {self.term} was replaced by term {term}")
        )

    def seen_as_owner(self, at_s: float) -> None:
        """Notes that the register had no owner of a higher term at this time."""
        self._server.seen_as_owner_s = at_s

    async def hand_over(self) -> None:
        """Accepts no more commands and answers the accepted ones. Raises NotOwner."""
        await self._replicated.run(self._server.hand_over())
        await self._sender.drain()

    async def close(self) -> None:
        """Ends the tasks and the subscription, and discards the state."""
        self._server.stop()
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
        self._server.leave_unanswered()
        await self._sender.drain()


async def end_tasks(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancels tasks until they have ended: nats-py may take one cancellation for a timeout."""
    own = asyncio.current_task()
    left = [task for task in tasks if task is not own and not task.done()]
    while left:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=0.1)
        left = [task for task in left if not task.done()]
