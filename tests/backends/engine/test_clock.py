"""Row 7 of the scorecard: the wall clock jumps, and every timer still ends at the right time."""

import time

import pytest

from penstock.backends.engine.store import open_engine
from penstock.journal.codec import decode
from penstock.service import TTL_MS_MAX, ConfigureQueue, CreateQueue, Peek, Pull, Push, Stats

HOUR_S = 3_600
DAY_S = 24 * HOUR_S
NOW_S = 1_790_000_000
JUMPS = {
    "an hour back": -HOUR_S,
    "an hour ahead": HOUR_S,
    "a day back": -DAY_S,
    "a day ahead": DAY_S,
    "back to 1970": -NOW_S,
}


class MachineClocks:
    """The two clocks of a machine: the wall clock, which can be set, and the monotonic one."""

    def __init__(self, monkeypatch):
        self.wall_s = NOW_S
        self.steady_s = 5_000.0
        monkeypatch.setattr(time, "time_ns", lambda: int(self.wall_s * 1e9))
        monkeypatch.setattr(time, "monotonic_ns", lambda: int(self.steady_s * 1e9))

    def wait(self, seconds):
        self.wall_s += seconds
        self.steady_s += seconds

    def reboot(self):
        """Restarts the monotonic clock."""
        self.steady_s = 3.0


@pytest.fixture
def machine(monkeypatch):
    return MachineClocks(monkeypatch)


def opened(path):
    return open_engine(path / "store", file_bytes=65_536)


def bodies(engine):
    return [claim.body for claim in engine.submit(Pull("q", 10, visibility_ms=3_600_000))]


def fill(engine):
    """One message in flight for 30 s, one delayed by 60 s, one with a time to live of 90 s."""
    engine.submit(CreateQueue("q", {"delay_ms": 0}))
    engine.submit(Push("q", b"claimed"))
    assert len(engine.submit(Pull("q", visibility_ms=30_000))) == 1
    engine.submit(Push("q", b"delayed", delay_ms=60_000))
    engine.submit(Push("q", b"expires", ttl_ms=90_000, delay_ms=80_000))


@pytest.mark.parametrize("jump", JUMPS)
def test_a_clock_jump_while_the_engine_runs_changes_no_timer(quick_path, machine, jump):
    engine = opened(quick_path)
    fill(engine)
    machine.wait(10)
    machine.wall_s += JUMPS[jump]
    machine.wait(19)
    assert bodies(engine) == []
    machine.wait(1.1)
    assert bodies(engine) == [b"claimed"]
    machine.wait(28.8)
    assert bodies(engine) == []
    machine.wait(1.2)
    assert bodies(engine) == [b"delayed"]
    machine.wait(31)
    assert bodies(engine) == []
    assert engine.submit(Stats("q")).in_flight == 2
    assert engine.submit(Stats("q")).messages == 2
    engine.close()


@pytest.mark.parametrize("kind", ["restart", "reboot"])
@pytest.mark.parametrize("jump", JUMPS)
def test_after_a_clock_jump_between_two_processes_every_message_becomes_visible(
    quick_path, machine, jump, kind
):
    engine = opened(quick_path)
    fill(engine)
    machine.wait(10)
    engine.close()
    machine.wall_s += JUMPS[jump]
    if kind == "reboot":
        machine.reboot()
    engine = opened(quick_path)
    ahead = JUMPS[jump] > 0
    # The time between the processes is that of the wall clock, or none if that went back.
    assert bodies(engine) == ([b"claimed", b"delayed"] if ahead else [])
    if not ahead:
        machine.wait(31)
        assert bodies(engine) == [b"claimed"]
        machine.wait(30)
        assert bodies(engine) == [b"delayed"]
        machine.wait(21)
        assert [each.body for each in engine.submit(Peek("q"))] == [b"expires"]
        machine.wait(10)
    assert engine.submit(Stats("q")).messages == 2
    engine.close()


@pytest.mark.parametrize("jump", JUMPS)
def test_after_a_wrong_clock_is_corrected_every_message_becomes_visible(quick_path, machine, jump):
    machine.wall_s += JUMPS[jump]
    engine = opened(quick_path)
    fill(engine)
    if jump == "back to 1970":
        # By the wall clock more than 50 years pass now, which is longer than any retention.
        engine.submit(ConfigureQueue("q", {"retention_ms": TTL_MS_MAX}))
        engine.close()
        machine.wall_s -= JUMPS[jump]
        engine = opened(quick_path)
        assert engine.submit(Stats("q")).messages == 0
        engine.close()
        return
    engine.close()
    machine.wall_s -= JUMPS[jump]
    engine = opened(quick_path)
    machine.wait(31)
    found = bodies(engine)
    machine.wait(30)
    assert sorted(found + bodies(engine)) == [b"claimed", b"delayed"]
    engine.close()


def test_the_times_of_journal_events_never_decrease(quick_path, machine):
    for jump_s in (0, -DAY_S, -NOW_S, HOUR_S, -HOUR_S):
        machine.wall_s += jump_s
        engine = opened(quick_path)
        engine.submit(CreateQueue("q"))
        engine.submit(Push("q", b"x"))
        machine.wait(1)
        engine.submit(Push("q", b"y"))
        engine.close()
    engine = opened(quick_path)
    times = [
        event.at_ms
        for entry in engine.journal.replayed(None)
        for event, _ in decode(entry.data, entry.data_offset)
    ]
    assert times == sorted(times)
    assert len(times) == 11
    engine.close()
