"""A replicated log that keeps nothing for a while, because it is full or does not answer."""

import pytest

from penstock.cluster.retry import COMMAND_TIMEOUT_S
from penstock.errors import BackendLost, StoreFull
from penstock.service import Peek, Pull, Push, Stats
from tests.simulation.script import ClusterScript

LIMIT_MS = 1_000 * COMMAND_TIMEOUT_S + 1_000
OUTAGE_MS = 200_000


def fill(script):
    script.cluster.streams.shards[0].is_full = True


def make_room(script):
    script.cluster.streams.shards[0].is_full = False


def silence(script):
    script.cluster.streams.shards[0].change_leader(OUTAGE_MS)


def wait_out(script):
    script.wait(OUTAGE_MS)


@pytest.fixture(params=[(fill, make_room), (silence, wait_out)], ids=["full", "silent"])
def outage(request, quick_path):
    script = ClusterScript(quick_path)
    begin, end = request.param
    yield script, begin, end
    script.close()
    assert script.violation is None


def ask_in_time(script, command):
    """The reply or the error of a command, which comes within the documented time."""
    now_ms = script.cluster.schedule.now_ms
    reply = script.ask(command)
    assert script.cluster.schedule.now_ms - now_ms <= LIMIT_MS
    return reply


def test_commands_fail_in_time_while_the_log_keeps_nothing(outage):
    script, begin, _ = outage
    script.ask(Push("q0", b"kept"))
    begin(script)
    for command in (Push("q0", b"a"), Pull("q0"), Stats("q0"), Push("q0", b"b", dedup_id="b")):
        reply = ask_in_time(script, command)
        assert isinstance(reply, BackendLost | StoreFull)
        assert "shard 0" in str(reply)


def test_the_shard_continues_by_itself_once_the_log_does(outage):
    script, begin, end = outage
    begin(script)
    assert isinstance(ask_in_time(script, Push("q0", b"a", dedup_id="a")), BackendLost)
    assert script.node.owned[0].server.stall is not None
    end(script)
    script.until(lambda: script.node.owned[0].server.stall is None)
    # The first push was accepted before, so it was kept; the repeated one adds nothing.
    script.ask(Push("q0", b"a", dedup_id="a"))
    assert [each.body for each in script.ask(Peek("q0", 10))] == [b"a"]


def test_a_push_that_a_full_shard_refuses_is_not_done(quick_path):
    script = ClusterScript(quick_path)
    try:
        fill(script)
        assert isinstance(ask_in_time(script, Push("q0", b"unknown")), BackendLost)
        assert isinstance(ask_in_time(script, Push("q0", b"refused")), StoreFull)
        make_room(script)
        script.until(lambda: script.node.owned[0].server.stall is None)
        assert [each.body for each in script.ask(Peek("q0", 10))] == [b"unknown"]
    finally:
        script.close()


def test_claims_that_nobody_got_while_the_log_was_full_are_released(quick_path):
    script = ClusterScript(quick_path)
    try:
        script.ask(Push("q0", b"a"))
        fill(script)
        assert isinstance(ask_in_time(script, Pull("q0", visibility_ms=3_600_000)), BackendLost)
        make_room(script)
        script.until(lambda: script.node.owned[0].server.stall is None)
        assert [each.body for each in script.ask(Pull("q0", wait_ms=1_000))] == [b"a"]
    finally:
        script.close()


def test_a_pull_that_waits_for_a_message_outlasts_a_full_log(quick_path):
    script = ClusterScript(quick_path)
    try:
        fill(script)
        script.begin(Pull("q0", wait_ms=20_000), script.late)
        script.wait(10_000)
        make_room(script)
        script.until(lambda: script.node.owned[0].server.stall is None)
        script.ask(Push("q0", b"a"))
        script.until_replied(2)
        assert [[each.body for each in reply] for reply in script.replies if type(reply) is list]
    finally:
        script.close()
