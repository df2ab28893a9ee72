"""The shards of a simulated node, for the real choice of owners; and the rules of a placement.

In a placed run each node runs `cluster.ownership`: it pings the others, reads the registers,
and takes, asks for and hands over shards. Clients move and drain as `penstock cluster` does.

- once all faults have ended, the first in rank of the nodes that take shards serves each shard, no
  other node believes that it does, and no owner changes any more
- in a run without faults no owner is ever fenced: shards only move by being handed over
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from penstock.cluster.membership import read_node, set_register
from penstock.cluster.placement import ranked
from penstock.cluster.replica import ShardReplica
from penstock.cluster.takeover import owner_key
from tests.simulation.network import NAME

if TYPE_CHECKING:
    from tests.simulation.cluster import SimulatedCluster
    from tests.simulation.nodes import OwnedPart, SimulatedNode

_READING_S: Final = 0.005
# Within this time after the last fault all shards have their owners, and keep them for the second.
PLACED_MS_MAX: Final = 30_000
RESTART_MS_MAX: Final = 3_000
COMMANDS_MS_MAX: Final = 20_000
_UNCHANGED_MS: Final = 4_000


class SimulatedHolder:
    """A node as the choice of owners sees it; `ownership.ShardHolder`."""

    def __init__(self, node: "SimulatedNode") -> None:
        self._node = node

    @property
    def owned(self) -> "dict[int, OwnedPart]":
        """The shards that the node serves."""
        return self._node.owned

    @property
    def has_new_standby(self) -> bool:
        """Never: each shard of a run is small."""
        return False

    def stand_by(self, shard: int) -> None:
        """Reads the shard's log to its end."""
        self._node.stand_by(shard)

    def resume_standby(self, replica: ShardReplica) -> None:
        """Makes the node a standby again."""
        self._node.resume_standby(replica)

    def is_standby(self, shard: int) -> bool:
        """Whether the node has a replica of a shard that it does not own."""
        return self._node.is_standby(shard)

    async def catch_up(self, shard: int) -> None:
        """Waits until the standby has read what the log had before this call."""
        await self._until_read(shard)
        self._node.stand_by(shard)
        await self._until_read(shard)

    async def _until_read(self, shard: int) -> None:
        while self._node.is_reading(shard):  # noqa: ASYNC110
            await asyncio.sleep(_READING_S)

    def reading_paused(self) -> AbstractContextManager[None]:
        """Nothing: reading takes no time of a simulated node."""
        return nullcontext()

    async def end_standby(self, shard: int) -> ShardReplica | None:
        """Ends a standby; its replica, if there is one."""
        return self._node.end_standby(shard)

    async def drop_standby(self, shard: int) -> None:
        """Ends a standby."""
        replica = self._node.end_standby(shard)
        if replica is not None:
            replica.close()

    async def take_over(
        self,
        shard: int,
        seen_revision: int,
        seen_slot: int = 0,
        replica: ShardReplica | None = None,
    ) -> None:
        """Takes a shard over. Raises PenstockError."""
        await self._result(
            lambda done: self._node.take(shard, seen_revision, seen_slot, replica, done)
        )

    async def hand_over(self, shard: int) -> tuple[int, int]:
        """Stops serving a shard; its term and its last slot. Raises PenstockError."""
        found: tuple[int, int] = await self._result(partial(self._node.hand_over, shard))
        return found

    async def _result(self, start: Callable[[Any], None]) -> Any:
        outcome = self._node.loop.create_future()

        def done(result: Any, error: Exception | None) -> None:
            if outcome.done():
                return
            if error is None:
                outcome.set_result(result)
            else:
                outcome.set_exception(error)

        start(done)
        return await outcome

    def status(self) -> dict[str, Any]:
        """Nothing: no run asks for it."""
        return {}


class PlacementRules:
    """Moves and drains in a run, and the rules of a placement."""

    def __init__(self, cluster: "SimulatedCluster") -> None:
        self._cluster = cluster
        # The node that is drained, by its number: one at a time, so that some take shards.
        self._drained: int | None = None
        # Whether it is to be restarted, and how many commands of the operator have not ended.
        self._restarts = False
        self._commands = 0

    def move(self) -> None:
        """Pins a shard to a node, as `penstock cluster move` does."""
        cluster = self._cluster
        shard = cluster.schedule.below(cluster.shards)
        node = cluster.schedule.pick(cluster.nodes).name
        cluster.schedule.note("pin", shard, node)
        client = cluster.clients[0]
        work = partial(client.connection.run, set_register(f"pin.{shard}", node.encode()))
        self._commands += 1
        client.run(lambda: client.begin(work(), self._ended))

    def drain(self) -> None:
        """Drains a node, as `penstock cluster drain` does; it may be restarted later."""
        cluster = self._cluster
        number = cluster.schedule.below(len(cluster.nodes))
        if self._drained is not None:
            return
        self._drained = number
        name = cluster.nodes[number].name
        cluster.schedule.note("drain", name)
        client = cluster.clients[0]
        work = partial(client.connection.request, f"{NAME}.node.{name}.ask", b"drain", 5.0)
        self._commands += 1
        client.run(lambda: client.begin(work(), self._ended))
        if cluster.schedule.chance() < 0.5:
            self._restarts = True
            cluster.schedule.after(cluster.schedule.between(500, RESTART_MS_MAX), self._restart)

    def _ended(self, _: Any, error: Exception | None) -> None:
        """A command has ended; if it failed, an operator would look at the status and repeat it."""
        self._commands -= 1

    def _restart(self) -> None:
        assert self._drained is not None
        number, self._drained, self._restarts = self._drained, None, False
        self._cluster.replace_node(number)

    def wanted(self, shard: int) -> str | None:
        """The node that should own a shard."""
        cluster = self._cluster
        takers = [each.name for each in cluster.nodes if each.choice and each.choice.state == "up"]
        pin = cluster.streams.register(f"pin.{shard}")
        order = ranked(shard, takers, None if pin is None else pin.value.decode())
        return order[0] if order else None

    def misplaced(self) -> str | None:
        """A shard that is not where it should be, in words; None if there is none."""
        for node in self._cluster.nodes:
            register = self._cluster.streams.register(f"node.{node.name}")
            state = None if register is None else read_node(register).state
            if not node.is_stopped and (node.choice is None or node.choice.state != state):
                return f"{node.name} has not announced its state"
        for shard in range(self._cluster.shards):
            wanted = self.wanted(shard)
            holders = [each.name for each in self._cluster.nodes if shard in each.owned]
            if wanted is not None and holders != [wanted]:
                return f"shard {shard} should be owned by {wanted}, and is by {holders}"
        return None

    def check_settled(self) -> None:
        """Checks, after all faults have ended, that all shards are placed, and stay so."""
        schedule = self._cluster.schedule
        self._step_until(COMMANDS_MS_MAX, lambda: not self._restarts and not self._commands)
        end_ms = schedule.now_ms + PLACED_MS_MAX
        while schedule.now_ms < end_ms and schedule.violation is None:
            self._step_until(end_ms - schedule.now_ms, lambda: self.misplaced() is None)
            terms = self._terms()
            # What a node has read from a replica that lags may move a shard once more.
            until_ms = schedule.now_ms + _UNCHANGED_MS
            while self._terms() == terms and schedule.now_ms < until_ms and schedule.step():
                pass
            if self._terms() == terms and self.misplaced() is None:
                return
        problem = self.misplaced() or "owners change though nothing happens"
        schedule.violate(f"{problem}, {PLACED_MS_MAX} ms after all faults have ended")

    def _terms(self) -> list[int]:
        shards = range(self._cluster.profile.shards)
        return [self._cluster.streams.registers.last_of(owner_key(shard)) for shard in shards]

    def _step_until(self, limit_ms: int, is_so: Callable[[], bool]) -> None:
        schedule = self._cluster.schedule
        end_ms = schedule.now_ms + limit_ms
        while schedule.now_ms < end_ms and not is_so() and schedule.step():
            pass
