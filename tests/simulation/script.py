"""Runs of the simulation that are scripted, not drawn."""

from dataclasses import replace
from functools import partial
from typing import Any

from penstock.service import CreateQueue
from tests.simulation.cluster import Profile, SimulatedCluster
from tests.simulation.nodes import SimulatedNode
from tests.simulation.queues import SimulatedQueue

QUIET = Profile(
    nodes=3,
    clients=2,
    shards=1,
    busy_ms=10_000,
    think_ms=20,
    loss=0.0,
    late=0.0,
    skew_ms_max=0,
    fault_every_ms=1_000,
    faults=(),
    queues=(SimulatedQueue("q0"),),
)


class ClusterScript:
    """A cluster in which nothing happens but what a test does."""

    def __init__(self, path, node_class=SimulatedNode, shards=1, queues=QUIET.queues, **changes):
        """The first node serves shard 0, and the second all others, unless the nodes choose.

        `changes` are of the profile.
        """
        profile = replace(QUIET, shards=shards, queues=queues, **changes)
        self.cluster = SimulatedCluster(1, path, node_class, profile)
        self.node, self.other, self.third = self.cluster.nodes
        self.client, self.late = self.cluster.clients
        self.slots = self.cluster.streams.shards[0].messages
        self.truths = self.cluster.truths
        self.replies: list[Any] = []
        if profile.is_placed:
            self.until(lambda: self.cluster.placement.misplaced() is None)
        else:
            self.until(lambda: all(node.is_ready for node in self.cluster.nodes))
            for shard in range(shards):
                self.serve(self.other if shard else self.node, shard)
        for queue in queues:
            self.ask(CreateQueue(queue.name, queue.settings))
        self.replies.clear()

    @property
    def violation(self):
        return self.cluster.schedule.violation

    def until(self, is_so):
        """Goes on until this is so, or until a rule is broken."""
        while not is_so() and self.violation is None:
            assert self.cluster.schedule.step()

    def wait(self, ms):
        self.cluster.schedule.after(ms, lambda: None)
        until_ms = self.cluster.schedule.now_ms + ms
        self.until(lambda: self.cluster.schedule.now_ms >= until_ms)

    def serve(self, node, shard=0):
        node.run(partial(node.take, shard))
        self.until(lambda: shard in node.owned)

    def run(self, work, client=None):
        """Begins a coroutine on a client; its reply or its error is added to `replies`."""
        client = client or self.client
        done = lambda reply, error: self.replies.append(error or reply)  # noqa: E731
        client.run(lambda: client.begin(work, done))

    def begin(self, command, client=None):
        client = client or self.client
        self.run(client.ask(command), client)

    def until_replied(self, count):
        self.until(lambda: len(self.replies) >= count)

    def until_kept(self, command):
        """Asks, and goes on until what was asked for is in the log."""
        before = len(self.slots)
        self.begin(command)
        self.until(lambda: len(self.slots) > before)

    def ask(self, command, client=None):
        count = len(self.replies)
        self.begin(command, client)
        self.until_replied(count + 1)
        return self.replies[-1]

    def spread(self, queue, shards):
        """Spreads a queue over so many shards."""
        count = len(self.replies)
        assert self.client.router is not None
        self.run(self.client.router.spread.spread(queue, shards))
        self.until_replied(count + 1)
        return self.replies[-1]

    def close(self):
        self.cluster.stop()
