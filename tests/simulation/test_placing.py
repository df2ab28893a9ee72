"""Row 9: the choice of owners in runs that are scripted: each shard has one owner, and soon.

Pings, registers, moves and drains are those of `cluster.choice`, which real nodes run.
"""

import re

import pytest

from penstock.cluster.membership import set_register
from penstock.cluster.placement import ranked
from penstock.service import Push, Stats
from penstock.testing.simulation.nodes import SimulatedNode
from tests.simulation import planted
from tests.simulation.script import Script

NODES = ["node0", "node1", "node2"]


class Placed(Script):
    """Three nodes that choose the owner of one shard by themselves."""

    def __init__(self, path, node_class=SimulatedNode, faults=()):
        path.mkdir()
        super().__init__(path, node_class, is_placed=True, faults=faults)

    def node_named(self, name):
        return next(node for node in self.cluster.nodes if node.name == name)

    @property
    def owner(self):
        """The node of highest rank; after the start it owns the shard."""
        return self.node_named(ranked(0, NODES)[0])

    def replaced_after_ms(self, limit_ms):
        """After which time another node than the owner serves the shard; None if none does."""
        began_ms = self.cluster.schedule.now_ms
        others = [node for node in self.cluster.nodes if node is not self.owner]
        while self.violation is None and self.cluster.schedule.now_ms < began_ms + limit_ms:
            if any(0 in node.owned for node in others):
                return self.cluster.schedule.now_ms - began_ms
            self.wait(10)
        return None


@pytest.fixture
def play(quick_path):
    scripts = []

    def make(node_class=SimulatedNode, faults=()):
        script = Placed(quick_path / str(len(scripts)), node_class, faults)
        scripts.append(script)
        return script

    yield make
    for script in scripts:
        script.close()


@pytest.mark.parametrize(("stop", "limit_ms"), [("stop", 1_000), ("pause", 3_000)])
def test_an_owner_that_stops_is_replaced_by_its_standby(play, stop, limit_ms):
    """Row 10: three pings are refused, or none is answered for two seconds."""
    for node_class in (SimulatedNode, planted.NoNodeEverCountsAsStopped):
        script = play(node_class, ("crash", "pause"))
        getattr(script.owner, stop)()
        replaced_ms = script.replaced_after_ms(10_000)
        assert script.violation is None
        if node_class is SimulatedNode:
            assert replaced_ms is not None
            assert replaced_ms < limit_ms
            assert script.ask(Push("q0", b"x", dedup_id="x")).id
        else:
            assert replaced_ms is None


def an_operator_moves_the_shard(script):
    """It is handed over: the owner before is asked, and not fenced."""
    second = ranked(0, NODES)[1]
    script.run(script.client.connection.run(set_register("pin.0", second.encode())))
    script.until(lambda: 0 in script.node_named(second).owned)
    script.cluster.placement.check_settled()


def the_owner_is_drained(script):
    """Another node takes its shard, and it gets no shard back while it drains."""
    owner = script.owner
    subject = f"sim.node.{owner.name}.ask"
    script.run(script.client.connection.request(subject, b"drain", 10.0))
    script.wait(10_000)
    script.cluster.placement.check_settled()
    if script.violation is None:
        assert not owner.owned
        assert script.ask(Stats("q0")).messages == 0


def the_owner_is_suspended_and_resumed(script):
    """It serves a shard of which another node is the owner, and nothing asks it to append."""
    owner = script.owner
    owner.pause()
    assert script.replaced_after_ms(10_000)
    owner.resume()
    script.wait(500)
    script.cluster.placement.check_settled()


def nothing_happens(script):
    """The owner stays."""
    script.cluster.placement.check_settled()


@pytest.mark.parametrize(
    ("scenario", "planted_fault", "faults", "rule"),
    [
        (
            an_operator_moves_the_shard,
            planted.TakesShardsWithoutAsking,
            (),
            "its owner was replaced, and it was not asked",
        ),
        (the_owner_is_drained, planted.DrainedNodesTakeShards, (), "should be owned by"),
        (
            the_owner_is_suspended_and_resumed,
            planted.DoesNotNoticeThatItWasReplaced,
            ("pause",),
            "should be owned by",
        ),
        (
            nothing_happens,
            planted.EachNodeRanksItselfFirst,
            (),
            "should be owned by|owners change",
        ),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_shard_has_one_owner_that_all_nodes_agree_on(play, scenario, planted_fault, faults, rule):
    """Row 9: one owner, the first in rank, and no change without a reason."""
    script = play(SimulatedNode, faults)
    scenario(script)
    assert script.violation is None
    script = play(planted_fault, faults)
    scenario(script)
    assert re.search(rule, script.violation or "")
