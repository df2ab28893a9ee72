"""Row 9: the choice of owners in runs that are scripted: each shard has one owner, and soon.

Pings, registers, moves and drains are those of `cluster.choice`, which real nodes run.
"""

import re

import pytest

from penstock.cluster.membership import NodeInfo, Peer, set_register
from penstock.cluster.placement import ranked
from penstock.service import Push, Stats
from penstock.testing.simulation.nodes import SimulatedNode
from tests.simulation import planted
from tests.simulation.script import ClusterScript

NODES = ["node0", "node1", "node2"]


class Placed(ClusterScript):
    """Three nodes that choose the owner of one shard by themselves."""

    def __init__(self, path, node_class=SimulatedNode, faults=(), **changes):
        path.mkdir()
        super().__init__(path, node_class, is_placed=True, faults=faults, **changes)

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
    scripts: list[Placed] = []

    def make(node_class=SimulatedNode, faults=(), **changes):
        script = Placed(quick_path / str(len(scripts)), node_class, faults, **changes)
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


def a_node_is_drained_while_it_announces_itself(script):
    """The message that says that it takes shards is lost, and repeated after it drains."""
    owner = script.owner
    number = script.cluster.nodes.index(owner)
    script.cluster.replace_node(number)
    node = script.cluster.nodes[number]
    subject = f"sim.node.{node.name}.ask"
    script.until(lambda: script.cluster.network._listening(subject))
    node.is_outbound_cut = True
    script.wait(30)
    node.is_outbound_cut = False
    script.run(script.client.connection.request(subject, b"drain", 10.0))
    script.wait(5_000)
    assert node.choice.state == "draining"
    # Now the others must not wait for it.
    (holder,) = (each for each in script.cluster.nodes if 0 in each.owned)
    holder.stop()
    assert holder is not node
    script.wait(5_000)
    if not any(0 in each.owned for each in script.cluster.nodes if each is not holder):
        script.cluster.schedule.violate("the shard has no owner")


def a_node_joins_that_reads_an_owner_and_not_its_register(script):
    """The replica that answers does not have the register of the owner's node yet."""
    registers = script.cluster.streams.registers
    look_all, owner = registers.look_all, script.owner
    second = script.node_named(ranked(0, NODES)[1])

    def look_late(prefix, answered):
        def without_owner(found, error):
            answered([each for each in found if each[0] != f"node.{owner.name}"], error)

        look_all(prefix, without_owner)

    registers.look_all = look_late
    script.cluster.replace_node(script.cluster.nodes.index(second))
    script.wait(1_500)
    registers.look_all = look_all
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
            a_node_is_drained_while_it_announces_itself,
            planted.AnnouncementsOvertakeEachOther,
            ("crash",),
            "the shard has no owner",
        ),
        (
            a_node_joins_that_reads_an_owner_and_not_its_register,
            planted.ANodeThatIsNotKnownYetCountsAsStopped,
            (),
            "its owner was replaced, and it was not asked",
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


def test_an_owner_is_not_replaced_because_the_registers_are_not_answered(play):
    """Row 9: pings go on meanwhile, of which some are lost."""
    for node_class, limit_ms in (
        (SimulatedNode, 30_000),
        (planted.PingsWaitForRegisters, 300_000),
    ):
        script = play(node_class, ("cut",), loss=0.2)
        # By then all nodes know each other and the owner.
        script.wait(5_000)
        script.cluster.streams.registers.look_all = lambda prefix, answered: None
        replaced_ms = script.replaced_after_ms(limit_ms)
        assert (replaced_ms is None) == (node_class is SimulatedNode)


def test_a_node_that_was_not_pinged_is_not_silent():
    """The node that pings may have been stopped itself, or have waited for the registers."""
    peer = Peer(NodeInfo("up"))
    assert peer.is_live(1_000.0)
    peer.ask(1_000.0)
    peer.answer()
    assert peer.is_live(2_000.0)
    peer.ask(2_000.0)
    peer.ask(2_001.5)
    assert peer.is_live(2_001.9)
    assert not peer.is_live(2_002.0)
    peer.answer()
    assert peer.is_live(2_003.0)
