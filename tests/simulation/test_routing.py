"""Row 9: routing, spread queues and dead letters between shards, in runs that are scripted.

Each is run with the code as it is, and with a fault planted into it that must be found.
"""

from functools import partial

import pytest

from penstock.cluster.placement import shard_for
from penstock.cluster.spread_rules import spread_of
from penstock.core.events import QueueRemoved
from penstock.errors import BackendLost
from penstock.service import (
    DEDUP_WINDOW_MS,
    ConfigureQueue,
    Delete,
    DeleteQueue,
    Peek,
    Pull,
    Purge,
    Push,
    Redrive,
    Stats,
)
from tests.simulation import planted
from tests.simulation.lineage import DEPARTED, GONE, IN_FLIGHT
from tests.simulation.nodes import SimulatedNode
from tests.simulation.queues import SimulatedQueue, name_in
from tests.simulation.script import ClusterScript
from tests.simulation.simulate import run_seed

QUEUE = name_in("q", 0, 2)
DEAD = name_in("dead", 1, 2)
DEAD_LETTERS = (
    SimulatedQueue(DEAD, {"visibility_ms": 500}, QUEUE),
    SimulatedQueue(QUEUE, {"dead_letter": DEAD, "max_receives": 1}),
)
FIFO = name_in("f", 0, 2)
GROUPS = (SimulatedQueue(FIFO, {"fifo": True, "dedup_per_group": True}),)
# A group that is in shard 0 if the queue is in one shard, and in shard 1 if it is in two.
GROUP = next(name for name in map(str, range(100)) if shard_for(name, [0, 1]) == 1)


def found(play, path, node_class, shards, queues):
    """The rule that a scripted run breaks; None if none."""
    path.mkdir()
    script = ClusterScript(path, node_class, shards, queues)
    play(script)
    script.close()
    return script.violation


def make_dead_letter(script, body):
    """Has a message received once and not deleted."""
    script.ask(Push(QUEUE, body, dedup_id=body.decode()))
    script.ask(Pull(QUEUE, visibility_ms=50))


def lives(script, shard):
    return [*script.truths[shard].lives.values()]


# Dead letters.


def the_source_crashes_before_the_departure_ends(script):
    """The push to the dead-letter queue is kept, and the owner that sent it gets no answer."""
    make_dead_letter(script, b"once")
    script.until(lambda: lives(script, 1))
    script.node.stop()
    assert lives(script, 0)[0].state == DEPARTED
    script.serve(script.third)
    script.until(lambda: lives(script, 0)[0].state == GONE)
    if script.violation is None:
        assert script.ask(Stats(DEAD)).messages == 1
        (claim,) = script.ask(Pull(DEAD))
        assert (claim.body, claim.source) == (b"once", QUEUE)


def the_target_does_not_answer(script):
    """The push to the dead-letter queue is lost, again and again, and its owner is replaced."""
    script.other.is_inbound_cut = True
    make_dead_letter(script, b"once")
    script.wait(2_000)
    if script.violation is None:
        assert lives(script, 0)[0].state == DEPARTED
        assert script.ask(Stats(QUEUE)).messages == 0
    script.serve(script.third, 1)
    script.until(lambda: lives(script, 0)[0].state == GONE)
    if script.violation is None:
        assert script.ask(Stats(DEAD)).messages == 1


def the_target_is_replaced_after_it_has_kept_the_push(script):
    """Its answer is lost with it: the source pushes again, to the next owner."""
    make_dead_letter(script, b"once")
    script.until(lambda: lives(script, 1))
    script.other.stop()
    script.serve(script.third, 1)
    script.until(lambda: lives(script, 0)[0].state == GONE)
    if script.violation is None:
        assert script.ask(Stats(DEAD)).messages == 1


@pytest.mark.parametrize(
    ("play", "planted_fault"),
    [
        (
            the_source_crashes_before_the_departure_ends,
            planted.RepeatsADepartureWithoutItsDedupId,
        ),
        (the_target_does_not_answer, planted.EndsADepartureBeforeItsPushIsAnswered),
        (the_target_is_replaced_after_it_has_kept_the_push, None),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_dead_letter_arrives_once_in_another_shard(play, planted_fault, quick_path):
    """Row 9: an owner crashes or does not answer while a dead letter is on its way."""
    assert found(play, quick_path / "real", SimulatedNode, 2, DEAD_LETTERS) is None
    if planted_fault is not None:
        assert found(play, quick_path / "planted", planted_fault, 2, DEAD_LETTERS) is not None


def a_redrive_is_broken_off_and_repeated(script):
    """The process that redrives is stopped after its push is kept, before it deletes."""
    make_dead_letter(script, b"once")
    script.until(lambda: lives(script, 0)[0].state == GONE)
    script.begin(Redrive(DEAD), script.late)
    script.until(lambda: len(lives(script, 0)) == 2)
    script.late.stop()
    script.wait(600)
    redriven = script.ask(Redrive(DEAD))
    if script.violation is None:
        assert redriven == 1
        assert script.ask(Stats(DEAD)).messages == 0
        assert script.ask(Stats(QUEUE)).messages == 1


def a_redrive_ends_with_its_process(script):
    """The process that redrives is stopped before it has done anything but its claim."""
    make_dead_letter(script, b"once")
    script.until(lambda: lives(script, 0)[0].state == GONE)
    script.begin(Redrive(DEAD), script.late)
    script.until(lambda: lives(script, 1)[0].state == IN_FLIGHT)
    script.node.is_inbound_cut = True
    script.wait(1_000)
    script.late.stop()
    script.node.is_inbound_cut = False
    script.wait(1_000)
    assert script.ask(Stats(DEAD)).messages == 1


def test_a_redrive_that_is_broken_off_before_its_push_loses_nothing(quick_path):
    """Row 9: a redrive deletes a dead letter only after its push is answered."""
    play = a_redrive_ends_with_its_process
    assert found(play, quick_path / "real", SimulatedNode, 2, DEAD_LETTERS) is None
    with pytest.raises(AssertionError, match="0 == 1"):
        found(play, quick_path / "planted", planted.RedriveDeletesBeforeItPushes, 2, DEAD_LETTERS)


def test_a_redrive_that_is_broken_off_and_repeated_brings_a_message_once(quick_path):
    """Row 9: the push of a redrive has the dedup id of the dead letter."""
    play = a_redrive_is_broken_off_and_repeated
    assert found(play, quick_path / "real", SimulatedNode, 2, DEAD_LETTERS) is None
    fault = planted.RedriveWithoutDedupIds
    assert found(play, quick_path / "planted", fault, 2, DEAD_LETTERS) is not None


# Spread queues.


def push(script, number, client=None):
    """Pushes the message of this number to the group."""
    name = str(number)
    return script.ask(Push(FIFO, name.encode(), group=GROUP, dedup_id=name), client)


def a_group_has_messages_when_k_changes(script):
    """It stays in its shard until it is empty there, and then moves."""
    push(script, 1)
    script.spread(FIFO, 2)
    push(script, 2)
    if script.violation is not None:
        return
    for expected in (b"1", b"2"):
        (claim,) = script.ask(Pull(FIFO))
        assert claim.body == expected
        assert script.ask(Delete(FIFO, claim.receipt))
    push(script, 3)
    assert [len(lives(script, shard)) for shard in (0, 1)] == [2, 1]
    # A push that is sent again finds the shard that knows it.
    assert push(script, 2).duplicate
    assert push(script, 3).duplicate
    script.spread(FIFO, 1)
    push(script, 4)
    assert [len(lives(script, shard)) for shard in (0, 1)] == [2, 2]


def a_router_goes_by_an_old_map(script):
    """It has not heard that the queue was spread, and that the group has moved."""
    push(script, 1, script.late)
    script.spread(FIFO, 2)
    (claim,) = script.ask(Pull(FIFO))
    assert script.ask(Delete(FIFO, claim.receipt))
    push(script, 2)
    push(script, 3, script.late)
    if script.violation is None:
        assert [len(lives(script, shard)) for shard in (0, 1)] == [1, 2]


@pytest.mark.parametrize(
    ("play", "planted_fault"),
    [
        (a_group_has_messages_when_k_changes, planted.GroupsMoveBeforeTheyAreEmpty),
        (a_router_goes_by_an_old_map, planted.TakesPushesByAnOldMap),
    ],
    ids=lambda each: each.__name__,
)
def test_a_group_is_in_one_shard_while_k_changes(play, planted_fault, quick_path):
    """Row 9: groups stay whole and in order."""
    assert found(play, quick_path / "real", SimulatedNode, 2, GROUPS) is None
    assert found(play, quick_path / "planted", planted_fault, 2, GROUPS) is not None


def the_owner_crashes_before_a_delete_is_kept(script):
    """The last message of a group was deleted in memory alone: the group must not move yet."""
    push(script, 1)
    script.spread(FIFO, 2)
    (claim,) = script.ask(Pull(FIFO))
    for client in (script.client, script.late):
        # The owner has just proved that it is the owner, and both know the map.
        script.ask(Stats(FIFO), client)
    script.cluster.streams.shards[0].change_leader(election_ms=1_000)
    script.begin(Delete(FIFO, claim.receipt))
    script.wait(10)
    script.begin(Push(FIFO, b"2", group=GROUP, dedup_id="2"), script.late)
    script.wait(100)
    if script.violation is None:
        assert not lives(script, 1)
    script.node.stop()
    script.serve(script.third)
    script.until(lambda: len(lives(script, 0)) + len(lives(script, 1)) == 2)


def a_dedup_id_is_in_another_shard_than_its_group(script):
    """k goes from 1 to 2, to 1, and to 2 again: the group moves, and its dedup id does not."""
    script.spread(FIFO, 2)
    push(script, 1)
    (claim,) = script.ask(Pull(FIFO))
    script.ask(Delete(FIFO, claim.receipt))
    script.spread(FIFO, 1)
    push(script, 2)
    script.spread(FIFO, 2)
    assert [len(lives(script, shard)) for shard in (0, 1)] == [1, 1]
    again = push(script, 1)
    if script.violation is None:
        assert again.duplicate


CONTENTS = (SimulatedQueue(FIFO, {**GROUPS[0].settings, "dedup_by_content": True}),)


def a_content_is_in_another_shard_than_its_group(script):
    """The same with pushes whose contents are their dedup ids."""

    def push_content(body):
        return script.ask(Push(FIFO, body, group=GROUP))

    script.spread(FIFO, 2)
    push_content(b"1")
    (claim,) = script.ask(Pull(FIFO))
    script.ask(Delete(FIFO, claim.receipt))
    script.spread(FIFO, 1)
    push_content(b"2")
    script.spread(FIFO, 2)
    assert [len(lives(script, shard)) for shard in (0, 1)] == [1, 1]
    again = push_content(b"1")
    if script.violation is None:
        assert again.duplicate


DEAD_FIFO = name_in("f-dead", 0, 2)
DEAD_GROUPS = (
    SimulatedQueue(DEAD_FIFO, {"fifo": True}, FIFO),
    SimulatedQueue(FIFO, {**GROUPS[0].settings, "dead_letter": DEAD_FIFO, "max_receives": 1}),
)


def a_redrive_is_sent_before_its_target_is_spread(script):
    """The group has moved to another shard since the router looked where the target is."""
    push(script, 1)
    script.ask(Pull(FIFO, visibility_ms=50))
    script.until(lambda: lives(script, 0)[0].queue.name == DEAD_FIFO)
    script.begin(Redrive(DEAD_FIFO, FIFO), script.late)
    router = script.late.router
    assert router is not None
    asked = router._shard_client._calls.values
    script.until(lambda: any(getattr(each.command, "queue", "") == FIFO for each in asked()))
    script.late.pause()
    script.wait(20)
    script.spread(FIFO, 2)
    push(script, 2)
    assert len(lives(script, 1)) == 1
    count = len(script.replies)
    script.late.resume()
    script.until_replied(count + 1)
    if script.violation is None:
        assert script.replies[-1] == 1


@pytest.mark.parametrize(
    ("play", "queues", "as_it_was", "rule"),
    [
        (
            a_dedup_id_is_in_another_shard_than_its_group,
            GROUPS,
            planted.OffersAPushBeforeItLooks,
            "was pushed before",
        ),
        (
            a_content_is_in_another_shard_than_its_group,
            CONTENTS,
            planted.OffersAContentBeforeItLooks,
            "was pushed before",
        ),
        (
            the_owner_crashes_before_a_delete_is_kept,
            GROUPS,
            planted.ShowsStateThatIsNotKept,
            "is of a group of which message",
        ),
        (
            a_redrive_is_sent_before_its_target_is_spread,
            DEAD_GROUPS,
            planted.RedriveIgnoresTheMapOfItsTarget,
            "is of a group of which message",
        ),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_fault_that_was_found_is_mended(play, queues, as_it_was, rule, quick_path):
    """Row 9: faults of the real code that these rules found (decisions 142 and 146)."""
    assert found(play, quick_path / "real", SimulatedNode, 2, queues) is None
    violation = found(play, quick_path / "as it was", as_it_was, 2, queues)
    assert violation is not None
    assert rule in violation


# Commands that concern all shards of a queue, while one of them moves.


SPREAD = (SimulatedQueue(QUEUE),)


class Moving(ClusterScript):
    """A queue in two shards, the second of which gets another owner during each command."""

    def __init__(self, path):
        super().__init__(path, shards=2, queues=SPREAD)
        self.spread(QUEUE, 2)
        for number in range(6):
            self.ask(Push(QUEUE, b"%d" % number))
        assert sorted(len(lives(self, shard)) for shard in (0, 1)) == [3, 3]
        for truth in self.truths:
            # The rules expect that nobody removes messages.
            vars(truth)["_check_removed"] = partial(emptied, truth)

    def owners(self):
        """The owner of the second shard, and the next one."""
        _, *others = self.cluster.nodes
        return sorted(others, key=lambda node: 1 not in node.owned)

    def ask_while_it_moves(self, command):
        owner, other = self.owners()
        count = len(self.replies)
        self.begin(command)
        taken = partial(self.cluster._taken_from, owner, other, 1)
        owner.run(lambda: owner.hand_over(1, taken))
        self.until_replied(count + 1)
        self.until(lambda: 1 in other.owned)
        return self.replies[-1]

    def ask_while_its_owner_crashes(self, command):
        owner, other = self.owners()
        count = len(self.replies)
        owner.pause()
        self.begin(command)
        self.wait(20)
        owner.stop()
        self.cluster._restart(self.cluster.nodes.index(owner))
        self.serve(other, 1)
        self.until_replied(count + 1)
        return self.replies[-1]


@pytest.mark.parametrize("is_crashed", [False, True], ids=["moves", "crashes"])
def test_commands_on_all_shards_of_a_queue_hold_while_one_of_them_moves(quick_path, is_crashed):
    """Row 9: what docs/how-to/cluster.md promises of stats, peek, purge, settings and removal."""
    script = Moving(quick_path)
    ask = script.ask_while_its_owner_crashes if is_crashed else script.ask_while_it_moves
    assert ask(Stats(QUEUE)).visible == 6
    assert {message.body for message in ask(Peek(QUEUE, 10))} == {b"%d" % n for n in range(6)}
    ask(ConfigureQueue(QUEUE, {"visibility_ms": 7_000}))
    for truth in script.truths:
        settings = truth.settings_of(QUEUE)
        assert settings is not None
        assert settings.visibility_ms == 7_000
    purged = ask(Purge(QUEUE))
    if is_crashed:
        # Whether it was done is unknown: it must be repeated.
        assert isinstance(purged, BackendLost)
        script.ask(Purge(QUEUE))
    else:
        assert purged == 6
    assert script.ask(Stats(QUEUE)).messages == 0
    removed = ask(DeleteQueue(QUEUE))
    if is_crashed and isinstance(removed, BackendLost):
        script.ask(DeleteQueue(QUEUE))
    assert not any(truth.settings_of(QUEUE) for truth in script.truths)
    script.close()
    assert script.violation is None


def emptied(truth, event):
    """Follows a purge or a removal, which the rules do not expect."""
    for life in truth.lives.values():
        life.state = GONE
    if type(event) is QueueRemoved:
        del truth.queues[event.queue]


def test_a_queue_that_was_moved_costs_nothing_once_its_old_shard_is_empty(quick_path):
    """Row 9: there may be thousands of them, and looking at one may append an extent."""
    script = ClusterScript(quick_path, SimulatedNode, 2)
    (queue,) = script.cluster.profile.queues
    router = script.client.router
    assert router is not None
    script.run(router.spread.move(queue.name, [1]))
    # Until its dedup ids have expired, and a while after that.
    script.wait(DEDUP_WINDOW_MS + 60_000)
    streams = script.cluster.streams.shards
    before = [len(each.messages) for each in streams]
    script.wait(60_000)
    assert sum(len(each.messages) for each in streams) - sum(before) <= 4
    for truth in script.truths:
        settings = truth.settings_of(queue.name)
        assert settings is not None
        assert spread_of(settings).before == ()
    script.close()
    assert script.violation is None


# Seeds.


def test_seeds_reach_routing_spread_queues_and_dead_letters():
    """Row 9: each of these happens in a few seeds; a run in which none does would pass, too."""
    counts = dict.fromkeys(("Departed", "Arrived", "Moved", "spreads", "redrives", "idle"), 0)
    for seed in range(100):
        if min(counts.values()):
            break
        run = run_seed(seed)
        assert run.violation is None, run.report()
        for _, what, *rest in run.trace:
            word = rest[1] if what == "event" else rest[0] if rest else what
            if word == "redrives" and rest[-1] == 0:
                continue
            if word in counts:
                counts[word] += 1
    assert min(counts.values()) > 0, counts
