"""Row 9: the choice of owners in runs that are scripted: each shard has one owner, and soon.

Pings, registers, moves and drains are those of `cluster.ownership`, which real nodes run.
"""

import re
from contextlib import contextmanager

import pytest

from penstock.cluster.membership import NodeInfo, Peer, set_register
from penstock.cluster.placement import ranked
from penstock.service import Push, Stats
from tests.simulation import planted
from tests.simulation.nodes import SimulatedNode
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


def test_whole_logs_are_read_after_all_moves_and_not_while_a_shard_has_no_owner(play):
    """Row 10: a new standby would delay the moves of its node, for which clients wait."""
    script = play(shards=8)
    owner = script.owner
    others = [node for node in script.cluster.nodes if node is not owner]
    paused = {node.name: 0 for node in script.cluster.nodes}
    steps = []

    def left(node):
        names = [each.name for each in others]
        return {s for s in range(8) if ranked(s, names)[0] == node.name} - {*node.owned}

    def observe(node):
        holder = node.choice._holder
        stand_by = holder.stand_by

        @contextmanager
        def reading_paused():
            paused[node.name] += 1
            yield
            paused[node.name] -= 1

        def note_standby(shard):
            if not holder.is_standby(shard) and shard not in left(node):
                steps.append(("follow", not left(node)))
            stand_by(shard)

        def note(step, work):
            def observed(*arguments):
                steps.append((step, paused[node.name] > 0))
                return work(*arguments)

            return observed

        holder.reading_paused = reading_paused
        holder.stand_by = note_standby
        holder.take_over = note("take", holder.take_over)
        holder.hand_over = note("hand over", holder.hand_over)
        node.choice._ask_to_yield = note("ask", node.choice._ask_to_yield)

    for node in script.cluster.nodes:
        observe(node)
    subject = f"sim.node.{owner.name}.ask"
    script.run(script.client.connection.request(subject, b"drain", 10.0))
    script.until(lambda: not any(map(left, others)))
    script.wait(2_000)
    assert script.violation is None
    assert {step for step, _ in steps} == {"follow", "ask", "hand over", "take"}
    assert [each for each in steps if not each[1]] == []
    assert not any(paused.values())


class LostOnce:
    """Loses the first request for a shard, or the answer to it; nothing else is lost."""

    def __init__(self, script, what):
        self.script = script
        self.what = what
        self.lost_ms = None
        self._answers_to = set()
        self._publish = script.cluster.network.publish
        script.cluster.network.publish = self.publish

    def publish(self, sender, subject, data, reply):
        is_request = data.startswith(b"yield ")
        if is_request:
            self._answers_to.add(reply)
        is_it = is_request if self.what == "request" else subject in self._answers_to
        if is_it and self.lost_ms is None:
            self.lost_ms = self.script.cluster.schedule.now_ms
        else:
            self._publish(sender, subject, data, reply)


def move_with_a_loss(script, what):
    """Moves the shard to its standby, whose first request, or the answer to it, is lost."""
    lost = LostOnce(script, what)
    next_owner = script.node_named(ranked(0, NODES)[1])
    script.run(script.client.connection.run(set_register("pin.0", next_owner.name.encode())))
    script.until(lambda: lost.lost_ms is not None)
    return lost.lost_ms, next_owner


def test_a_shard_is_taken_soon_if_the_answer_of_its_last_owner_was_lost(play, monkeypatch):
    """Row 10: that node has stopped serving it, and answers pings, so that it counts as live."""
    for ask_again_s in (None, 15.0):
        if ask_again_s is not None:
            # As it was.
            monkeypatch.setattr("penstock.cluster.ownership._YIELD_S", ask_again_s)
        script = play()
        owner = script.owner
        lost_ms, next_owner = move_with_a_loss(script, "answer")
        assert not owner.owned
        script.until(lambda node=next_owner: 0 in node.owned)
        without_owner_ms = script.cluster.schedule.now_ms - lost_ms
        assert script.violation is None
        assert (without_owner_ms < 4_000) == (ask_again_s is None)
        assert script.ask(Push("q0", b"x", dedup_id="x")).id


def test_an_owner_that_was_not_reached_by_a_request_keeps_its_shard_until_it_is_asked(play):
    """Row 9: it answers pings and serves; only the request for its shard was lost."""
    script = play()
    owner = script.owner
    lost_ms, next_owner = move_with_a_loss(script, "request")
    while script.cluster.schedule.now_ms < lost_ms + 2_500:
        script.wait(100)
        assert 0 in owner.owned
        assert script.ask(Stats("q0")).messages == 0
    # It is asked again, and hands the shard over.
    script.until(lambda: 0 in next_owner.owned)
    script.cluster.placement.check_settled()
    assert script.violation is None

    script = play(planted.AnOwnerThatDoesNotAnswerIsReplaced)
    move_with_a_loss(script, "request")
    script.wait(10_000)
    assert "its owner was replaced, and it was not asked" in (script.violation or "")


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
