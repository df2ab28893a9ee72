"""Row 9 of the scorecard: the cluster simulated by seeds keeps its rules, and a seed replays.

Each planted fault (`planted`) must be found within some seeds that the real code passes. Faults of
the real code that the simulation found are scripted at the end, beside the code as it was.
"""

import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

from penstock.cluster.log import Pause
from penstock.errors import BackendLost
from penstock.service import Push, Stats
from tests.conftest import FULL
from tests.measure import IN_SCORE
from tests.simulation import planted, planted_places
from tests.simulation.cluster import FAULTS, SimulatedCluster, make_profile
from tests.simulation.nodes import SimulatedNode
from tests.simulation.schedule import RunSchedule
from tests.simulation.script import ClusterScript
from tests.simulation.simulate import first_violation, main, run_seed
from tests.simulation.streams import ModelStream
from tools.tidy import ROOT

BLOCKS = 4
SEEDS = 100_000 if FULL else 1_000 if IN_SCORE else 240
# Within how many seeds, from 0 on, each planted fault is found. The real code passes them all.
WITHIN = 500
PLANTED = [
    planted.TwoAppendsInFlight,
    planted.RefusalIsAFence,
    planted.RefusalIsIgnored,
    planted.RefusalMeansTheNextSlot,
    planted.ServesBeforeItHasReplayed,
    planted.TakesOverWithoutOpeningATerm,
    planted.SnapshotsOmitDedupIds,
    planted.ClaimsAreNotReplicated,
    planted.AnswersClaimsBeforeTheyAreKept,
    planted.PurgesBeforeItLists,
    planted.ListsSnapshotsOfWhatIsNotKept,
    planted.ReadsOverGaps,
    planted.AnswersAreNotConfirmed,
    planted.WaitsEndWithoutAProof,
    planted.EndsADepartureBeforeItsPushIsAnswered,
    planted.RepeatsADepartureWithoutItsDedupId,
    planted.DeadLettersGetNewIds,
    planted.GroupsMoveBeforeTheyAreEmpty,
    planted_places.ForgetsWhereAQueueWas,
    planted.TakesPushesByAnOldMap,
    planted_places.HomesAreThoseOfTheLargerCluster,
    planted.RedriveWithoutDedupIds,
    planted.ArchivesWhatIsNotKept,
    planted.TakesShardsWithoutAsking,
]
# These need several shards, and are only looked for in seeds that have them.
BETWEEN_SHARDS = PLANTED[PLANTED.index(planted.EndsADepartureBeforeItsPushIsAnswered) : -2]


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_rule_is_broken(block, record_property):
    """Row 9: seeds of all profiles, with every rule checked after every step."""
    count = SEEDS // BLOCKS
    steps = answers = terms = 0
    for seed in range(block * count, (block + 1) * count):
        run = run_seed(seed)
        assert run.violation is None, run.report()
        steps, answers, terms = steps + run.steps, answers + run.answers, terms + run.terms
    # A simulation in which nothing happens would pass as well.
    assert answers > 10 * count
    assert terms > 2 * count
    figure = (
        f"0 violations in {count:,} seeds, {steps:,} steps, {answers:,} answers, {terms:,} terms"
    )
    record_property("figure", figure)


def profile_of(seed):
    return make_profile(RunSchedule(seed))


def is_between_shards(seed):
    """Whether a seed has several shards and dead letters, and no long pause."""
    profile = profile_of(seed)
    has_dead = any(queue.source is not None for queue in profile.queues)
    return profile.shards > 1 and has_dead and not profile.idle_ms


@pytest.mark.parametrize("node_class", PLANTED, ids=lambda each: each.__name__)
def test_a_planted_fault_is_found(node_class):
    """Row 9: a simulation that finds nothing proves nothing."""
    seeds = [*range(WITHIN)]
    if node_class is planted_places.HomesAreThoseOfTheLargerCluster:
        seeds = [seed for seed in seeds if profile_of(seed).created_shards]
    elif node_class in BETWEEN_SHARDS:
        seeds = [seed for seed in range(3 * WITHIN) if is_between_shards(seed)]
    elif node_class is planted.ArchivesWhatIsNotKept:
        seeds = [seed for seed in seeds if profile_of(seed).archive == "all"]
    elif node_class is planted.TakesShardsWithoutAsking:
        seeds = [seed for seed in range(3 * WITHIN) if profile_of(seed).is_calm]
    found = first_violation(seeds, node_class)
    assert found is not None
    assert run_seed(found.seed).violation is None


def hashes(seeds, hash_seed):
    """The hashes of some seeds' traces, by a process with this seed for the hashes of objects."""
    code = (
        "from tests.simulation.simulate import run_seed\n"
        f"for seed in {list(seeds)}: print(run_seed(seed).trace_hash)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_a_seed_gives_the_same_run_in_every_process():
    """Row 9: a seed replays identically."""
    seeds = range(7, 22)
    first = hashes(seeds, 1)
    assert len(set(first)) == len(seeds)
    assert first == hashes(seeds, 2) == [run_seed(seed).trace_hash for seed in seeds]


def test_a_seed_that_fails_is_printed_with_the_command_that_repeats_it(capsys):
    found = first_violation(range(WITHIN), planted.ClaimsAreNotReplicated)
    assert found is not None
    assert main(["--seed", str(found.seed)], planted.ClaimsAreNotReplicated) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == f"to repeat it: make sim SEED={found.seed}"
    assert printed[-2] == f"seed {found.seed}: {found.violation}"
    assert found.lines()[-1] == printed[-3]


def test_many_seeds_end_with_the_first_that_fails(capsys):
    assert main(["--seeds", "50"], planted.ClaimsAreNotReplicated) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("seeds ")
    assert printed[-1].startswith("to repeat it: make sim SEED=")


def test_every_kind_of_fault_happens(quick_path):
    profiles = [SimulatedCluster(seed, quick_path).profile for seed in range(50)]
    assert {name for profile in profiles for name in profile.faults} == set(FAULTS)
    assert {profile.shards for profile in profiles} == {1, 2, 3}


# The model of a stream.


class Answers(list[Any]):
    """What was answered, as (reply, type of the error)."""

    def done(self, reply, error):
        self.append((reply, type(error)))


def note_kept(kept, *message):
    kept.append(message)


def run_all(schedule):
    while schedule.step():
        pass


def test_an_append_is_compared_with_what_is_accepted_and_not_kept_yet():
    """Error 10071 can be one's own earlier attempt."""
    schedule, answers = RunSchedule(1), Answers()
    kept: list[Any] = []
    stream = ModelStream(schedule, partial(note_kept, kept))
    stream.publish("", b"one", answers.done, after=0)
    assert kept == []
    stream.publish("", b"one", answers.done, after=0)
    assert [error.__name__ for _, error in answers] == ["Mismatch"]
    run_all(schedule)
    assert kept == [(1, "", b"one")]
    assert answers[1] == (1, type(None))


def test_what_is_accepted_may_vanish_when_the_leader_changes():
    fates = set()
    for seed in range(20):
        schedule, answers = RunSchedule(seed), Answers()
        kept: list[Any] = []
        stream = ModelStream(schedule, partial(note_kept, kept))
        stream.publish("", b"one", answers.done, after=0)
        stream.change_leader(0)
        run_all(schedule)
        assert answers == []
        fates.add(len(kept))
        # The next leader expects what is kept, and nothing else.
        stream.publish("", b"two", answers.done, after=len(kept))
        run_all(schedule)
        assert kept[-1][2] == b"two"
    assert fates == {0, 1}


def test_two_appends_at_once_are_no_fence():
    """The first is refused, and the second is accepted after the other writer's message."""
    schedule, old, new = RunSchedule(1), Answers(), Answers()
    stream = ModelStream(schedule, lambda *message: None)
    stream.publish("", b"new", new.done, after=0)
    stream.publish("", b"stale 1", old.done, after=0)
    stream.publish("", b"stale 2", old.done, after=1)
    run_all(schedule)
    assert [data for _, data in stream.messages] == [b"new", b"stale 2"]


def test_a_replica_that_stalls_answers_reads_from_before():
    schedule, answers = RunSchedule(1), Answers()
    stream = ModelStream(schedule, lambda *message: None)
    for replica in (1, 2):
        stream.stall(replica, 10_000)
    stream.publish("", b"one", answers.done, after=0)
    run_all(schedule)
    answers.clear()
    for _ in range(30):
        stream.read(1, 10, answers.done)
    assert {len(found) for found, _ in answers} == {0, 1}


# Runs that are scripted, not drawn.


@pytest.fixture
def script(quick_path):
    script = ClusterScript(quick_path)
    yield script
    script.close()
    assert script.violation is None


def test_a_command_whose_answer_was_lost_is_asked_again_of_the_same_owner(script):
    """The owner serves, and sends nothing more: the client waited without a limit."""
    script.until_kept(Push("q0", b"once", dedup_id="once"))
    script.client.is_inbound_cut = True
    script.wait(1_000)
    script.client.is_inbound_cut = False
    script.until(lambda: len(script.replies) == 1)
    assert script.replies[-1].duplicate
    assert script.ask(Stats("q0")).messages == 1


def test_a_push_without_a_dedup_id_whose_answer_was_lost_is_not_repeated(script):
    script.until_kept(Push("q0", b"once"))
    script.client.is_inbound_cut = True
    script.wait(1_000)
    script.client.is_inbound_cut = False
    script.until(lambda: len(script.replies) == 1)
    assert isinstance(script.replies[-1], BackendLost)
    assert script.ask(Stats("q0")).messages == 1


def test_an_owner_that_was_paused_answers_nothing_from_before(script):
    """It is resumed with a command in its backlog, after another owner has served."""
    script.ask(Push("q0", b"1", dedup_id="1"))
    script.node.pause()
    script.client.is_inbound_cut = True
    script.begin(Stats("q0"))
    script.serve(script.other)
    script.wait(2_000)
    script.client.is_inbound_cut = False
    script.node.resume()
    script.until(lambda: len(script.replies) == 2)
    assert script.replies[-1].messages == 1
    assert 0 not in script.node.owned


def answer_long_after_the_proof(script):
    """A command comes while the log has not confirmed the proof for an earlier one."""
    script.wait(300)
    script.begin(Stats("q0"))
    script.until(lambda: script.node.owned[0].journal.has_unsent)
    before = len(script.slots)
    script.node.is_inbound_cut = True
    script.until(lambda: len(script.slots) > before)
    script.wait(10)
    script.client.is_inbound_cut = script.late.is_inbound_cut = True
    script.serve(script.other)
    script.wait(200)
    script.node.is_inbound_cut = script.client.is_inbound_cut = script.late.is_inbound_cut = False
    script.begin(Stats("q0"), script.late)
    script.until(lambda: len(script.replies) == 2)


def answer_after_a_slow_takeover(script):
    """A new owner is replaced while it replays, and a client that does not know that asks it."""
    script.client.is_inbound_cut = True
    term = script.truths[0].term
    script.other.run(partial(script.other.take, 0))
    script.until(lambda: script.truths[0].term > term)
    script.third.is_slow = False
    script.serve(script.third)
    script.wait(200)
    script.client.is_inbound_cut = False
    script.until(lambda: 0 in script.other.owned)
    script.wait(10)
    script.begin(Stats("q0"))
    script.until(lambda: len(script.replies) == 1)


class SlowToServe(SimulatedNode):
    """Takes a second to replay."""

    is_slow = True

    def take_over(self, replica, claim_id, revision, seen_slot):
        journal = yield from super().take_over(replica, claim_id, revision, seen_slot)
        if self.is_slow:
            yield Pause(1_000)
        return journal


class SlowToServeAsItWas(planted.ATakeoverIsAProof, SlowToServe):
    """Takes a second to replay, and uses the end of the replay as a proof."""


@pytest.mark.parametrize(
    ("play", "node_class", "as_it_was"),
    [
        (answer_long_after_the_proof, SimulatedNode, planted.OneProofServesAllWhoWait),
        (answer_after_a_slow_takeover, SlowToServe, SlowToServeAsItWas),
    ],
    ids=lambda each: each.__name__,
)
def test_an_answer_needs_a_proof_that_is_as_young_as_itself(
    play, node_class, as_it_was, quick_path
):
    """Row 10: two ways in which a replaced owner gave answers from its old state."""
    for each in (node_class, as_it_was):
        script = ClusterScript(quick_path, each)
        play(script)
        script.close()
        is_stale = script.violation is not None and "was replaced at" in script.violation
        assert is_stale == (each is as_it_was), script.violation
