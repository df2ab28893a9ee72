"""Faults that are planted into the moves of queues; `planted` has the others."""

from penstock.cluster.known_queues import KnownQueues
from penstock.cluster.placement import first_shard
from penstock.cluster.router import Router
from penstock.cluster.spread_changes import SpreadChanges
from penstock.service import check_name
from tests.simulation.nodes import SimulatedNode


class SpreadChangesAtOnce(SpreadChanges):
    async def _is_emptied(self, queue, info, spread):
        return True


class RouterForgettingAtOnce(Router):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.spread.changes.__class__ = SpreadChangesAtOnce


class ForgetsWhereAQueueWas(SimulatedNode):
    """After a move, forgets the earlier shards of a queue while they have messages of it."""

    router_class = RouterForgettingAtOnce


class KnownQueuesRehashing(KnownQueues):
    def home(self, queue):
        return first_shard(check_name(queue), self.settings.shards)


class RouterRehashing(Router):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.spread.known.__class__ = KnownQueuesRehashing


class HomesAreThoseOfTheLargerCluster(SimulatedNode):
    """After a growth, looks for the home of a queue among all shards."""

    router_class = RouterRehashing
