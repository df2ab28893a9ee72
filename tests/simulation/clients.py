"""Clients: they push, pull, extend, release, delete, redrive, spread and move, and keep a ledger.

A client executes one command at a time. Some have a router, which is that of the package
(`cluster.router`); the others ask any node, whose router executes the command, and ask another node
if no answer comes, by the rules of the package (`cluster.retry`). Each answer is checked
(`ledger`).
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from nats.errors import NoRespondersError

from penstock.cluster.membership import grow
from penstock.cluster.resharding import Resharding
from penstock.cluster.retry import Attempts, MayBeDone, NotDone, read_answer
from penstock.errors import BackendLost, PenstockError, RequestError, StaleReceipt
from penstock.service import (
    Command,
    CreateQueue,
    Delete,
    Extend,
    Peek,
    Pull,
    Push,
    Redrive,
    Release,
)
from penstock.wire import shard_protocol as protocol
from tests.simulation.ledger import AnsweredClaim
from tests.simulation.network import RoutingHost
from tests.simulation.nodes import endpoint_of
from tests.simulation.queues import SimulatedQueue

if TYPE_CHECKING:
    from tests.simulation.cluster import SimulatedCluster

R = TypeVar("R")
ClientWork = Coroutine[Any, Any, R]
# How long a client waits for the answer of a node before it asks another.
_NODE_S: Final = 1.5
_GROUPS: Final = 2


class SimulatedClient(RoutingHost):
    """A process that uses queues."""

    def __init__(self, cluster: "SimulatedCluster", name: str, asks_nodes: bool = False) -> None:
        super().__init__(cluster, name, 0)
        self.held: list[AnsweredClaim] = []
        self.is_working = False
        self._asks_nodes = asks_nodes
        self._count = 0
        self._old_dedups: list[tuple[str, str, str | None]] = []

    # Asking.

    async def ask(self, command: Command[R]) -> R:
        """Executes a command: by the client's own router, or by that of any node."""
        if self._asks_nodes:
            return await self._ask_nodes(command)
        return await (await self.opened_router()).execute(command)

    async def _ask_nodes(self, command: Command[R]) -> R:
        """Asks one node after another until the command is answered. Raises PenstockError."""
        (data,) = protocol.write_command(command)
        attempts = Attempts(0, command, self.loop.time())
        while True:
            kind, body = await self._ask_node(command, data)
            try:
                return attempts.outcome(read_answer(command, kind, body))
            except StaleReceipt as error:
                return attempts.outcome(error)
            except (NotDone, MayBeDone) as error:
                pause_s = attempts.pause_s(error, self.loop.time())
            await asyncio.sleep(pause_s)

    async def _ask_node(self, command: Command[Any], data: bytes) -> tuple[bytes, bytes]:
        """The kind and the body of a node's answer."""
        node = self.schedule.pick(self.cluster.nodes)
        wait_ms = command.wait_ms if type(command) is Pull and command.wait_ms else 0
        timeout_s = _NODE_S + wait_ms / 1_000
        try:
            message = await self.connection.request(endpoint_of(node.name), data, timeout_s)
        except TimeoutError:
            return protocol.LOST, b""
        except NoRespondersError:
            return protocol.NOT_OWNER, b""
        return message.data[:1], message.data[1:]

    # Working.

    def work(self) -> None:
        """Uses the queues until the cluster sets `is_ending`."""
        self.is_working = True
        self.begin(self._work(), self._worked)

    def _worked(self, _: Any, error: Exception | None) -> None:
        self.is_working = False
        if error is not None:
            self.schedule.violate(f"a client raised {type(error).__name__}: {error}")

    async def _work(self) -> None:
        cluster = self.cluster
        # After a pause these ids may have been forgotten.
        self._old_dedups.clear()
        for queue in cluster.profile.queues:
            await self._try("create", self.ask(CreateQueue(queue.name, queue.settings)))
        actions: list[Callable[[], ClientWork[None]]] = [self._push, self._push]
        actions += [self._pull, self._pull, self._delete, self._delete]
        actions += [self._extend, self._release, self._peek]
        if any(queue.source is not None for queue in cluster.profile.queues):
            actions.append(self._redrive)
        if any(queue.is_spread for queue in cluster.profile.queues):
            actions.append(self._spread)
        if cluster.profile.created_shards:
            actions.append(self._reshard)
        while not cluster.is_ending:
            await asyncio.sleep(self.schedule.below(2 * cluster.profile.think_ms) / 1_000)
            action = self.schedule.pick(actions)
            await self._try(action.__name__, action())

    async def _try(self, what: str, work: ClientWork[Any]) -> None:
        """Runs an operation; the expected errors of a request are only noted."""
        self.schedule.note(self.name, what)
        try:
            await work
        except (RequestError, BackendLost) as error:
            self.schedule.note(self.name, what, "failed", type(error).__name__)

    def _queue(self) -> SimulatedQueue:
        return self.schedule.pick([*self.cluster.profile.queues])

    async def _push(self) -> None:
        sources = [queue for queue in self.cluster.profile.queues if queue.source is None]
        queue: SimulatedQueue = self.schedule.pick(sources)
        name, dedup_id = queue.name, None
        self._count += 1
        body = f"{self.name}-{self._count}"
        group = f"{self.name}-{self.schedule.below(_GROUPS)}" if queue.is_fifo else None
        chance = self.schedule.chance()
        if chance < 0.3 and self._old_dedups:
            name, dedup_id, group = self.schedule.pick(self._old_dedups)
            if self._dedups_content(name):
                # The same content again, which is the dedup id.
                assert dedup_id is not None
                body, dedup_id = dedup_id, None
        elif chance < 0.8 or queue.is_fifo:
            self._old_dedups.append((name, body, group))
            dedup_id = None if queue.dedups_content else body
        is_delayed = not queue.is_fifo and self.schedule.chance() < 0.1
        delay_ms = self.schedule.below(300) if is_delayed else None
        push = Push(name, body.encode(), delay_ms, dedup_id=dedup_id, group=group)
        self.cluster.ledger.note_pushed(push, await self.ask(push))

    def _dedups_content(self, name: str) -> bool:
        return any(each.dedups_content for each in self.cluster.profile.queues if each.name == name)

    async def _pull(self) -> None:
        name = self._queue().name
        self._count += 1
        who = f"{self.name}-{self._count}"
        chance = self.schedule.chance()
        command = Pull(
            name,
            1 + self.schedule.below(3),
            visibility_ms=self.schedule.between(50, 1_500),
            wait_ms=self.schedule.below(400) if chance < 0.3 else 0,
            attempt_id=who if chance > 0.7 else None,
        )
        # Some pulls are cancelled: their claims are released, or end with their visibility.
        limit_s = self.schedule.below(60) / 1_000 if self.schedule.chance() < 0.1 else None
        try:
            async with asyncio.timeout(limit_s):
                claims = await self.ask(command)
        except TimeoutError:
            return
        for claim in claims:
            self.held.append(self.cluster.ledger.note_claimed(name, who, claim))

    def _some_claim(self) -> AnsweredClaim | None:
        """A claim to use: most often the newest, sometimes one that has ended."""
        if not self.held:
            return None
        if self.schedule.chance() < 0.7:
            return self.held.pop()
        return self.schedule.pick(self.held)

    async def _delete(self) -> None:
        held = self._some_claim()
        if held is not None:
            await self._delete_held(held)

    async def _delete_held(self, held: AnsweredClaim) -> None:
        ledger = self.cluster.ledger
        ledger.note_delete_sent(held)
        try:
            was_there = await self.ask(Delete(held.queue, held.claim.receipt))
        except StaleReceipt:
            ledger.note_delete_refused(held)
        else:
            ledger.note_deleted(held, was_there)

    async def _extend(self) -> None:
        held = self._some_claim()
        if held is not None:
            self.held.append(held)
            visibility_ms = self.schedule.between(50, 1_500)
            try:
                command = Extend(held.queue, held.claim.receipt, visibility_ms)
                deadline_ms = await self.ask(command)
            except StaleReceipt:
                self.cluster.ledger.note_refused(held)
            else:
                self.cluster.ledger.note_extended(held, deadline_ms)

    async def _release(self) -> None:
        held = self._some_claim()
        if held is not None:
            delay_ms = self.schedule.below(200) if self.schedule.chance() < 0.3 else 0
            try:
                await self.ask(Release(held.queue, held.claim.receipt, delay_ms))
            except StaleReceipt:
                self.cluster.ledger.note_refused(held)
            else:
                self.cluster.ledger.note_released(held)

    async def _peek(self) -> None:
        asked_ms = self.schedule.now_ms
        for message in await self.ask(Peek(self._queue().name, 20)):
            self.cluster.ledger.note_shown(message, asked_ms)

    async def _redrive(self) -> None:
        dead = [queue for queue in self.cluster.profile.queues if queue.source is not None]
        queue: SimulatedQueue = self.schedule.pick(dead)
        to = queue.source if self.schedule.chance() < 0.5 else None
        moved = await self.ask(Redrive(queue.name, to, self.schedule.between(1, 10)))
        self.schedule.note(self.name, "redrives", queue.name, moved)

    async def _spread(self) -> None:
        """Changes in which shards a queue is, as `penstock cluster spread` and `move-queue` do."""
        queues = [queue for queue in self.cluster.profile.queues if queue.is_spread]
        queue: SimulatedQueue = self.schedule.pick(queues)
        spread = (await self.opened_router()).spread
        count = spread.known.settings.shards
        if self.schedule.chance() < 0.5 and queue.may_be_in_several:
            shards = 1 + self.schedule.below(count)
            status = await spread.spread(queue.name, shards)
            self.schedule.note(self.name, "spreads", queue.name, shards, status.before)
        else:
            to = self.schedule.below(count)
            status = await spread.move(queue.name, [to])
            self.schedule.note(self.name, "moves", queue.name, to, status.before)

    async def _reshard(self) -> None:
        """Adds shards, as `penstock cluster reshard` does; the command may be killed."""
        router = await self.opened_router()
        known = router.spread.known
        shards = self.schedule.between(known.settings.shards, self.cluster.profile.shards + 1)
        limit_s = self.schedule.below(200) / 1_000 if self.schedule.chance() < 0.3 else None
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                known.settings = await self.connection.run(grow(shards))
                self.schedule.note(self.name, "grows", shards)
                resharding = Resharding(known, router.spread.changes)
                await resharding.wait_for_owners()
                await resharding.place_queues(partial(self.schedule.note, self.name, "placed"))

    # The end.

    async def drain(self, queue: str) -> None:
        """Pulls and deletes until all queues of the cluster were empty."""
        while not self.cluster.is_drained:
            self._count += 1
            who = f"{self.name}-{self._count}"
            try:
                pull = Pull(queue, 10, visibility_ms=2_000, wait_ms=500)
                for claim in await self.ask(pull):
                    held = self.cluster.ledger.note_claimed(queue, who, claim)
                    await self._delete_held(held)
            except PenstockError as error:
                self.schedule.note(self.name, "drain", type(error).__name__)
                await asyncio.sleep(0.1)
