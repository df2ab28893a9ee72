"""Row 1 of the scorecard: an engine under load is killed, and no answer of it is lost.

Some kills come from this process, at any moment; others from within the engine: half-way through an
entry, while a file is created, synced, archived or dropped, when a snapshot gets its final name,
and during recovery.
"""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.backends.engine.store import open_engine
from tests.backends.engine.random_store import exact_replay, first_difference, plain_state
from tests.conftest import FULL

CHILD = Path(__file__).parent / "child.py"
# Elapsed time on a machine without other load, and processor time on any other.
READY_S_MAX = 2.0
pytestmark = pytest.mark.timeout(600)


class Account:
    """The commands to the child and its answers, over all its runs."""

    def __init__(self):
        self.pushed = set()
        self.deleting = set()
        self.deleted = set()
        self.deadlines = {}
        self.openings = 0
        self.answers = 0

    def run(self, path, kill_point, lines_max):
        """Runs a child until it is killed, at its kill point or after `lines_max` lines."""
        command = [sys.executable, str(CHILD), str(path), *([kill_point] if kill_point else [])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                kind, word, *rest = line.split()
                if kind == "ready":
                    assert float(word if FULL else rest[0]) < READY_S_MAX
                    self.openings += 1
                    continue
                self.answers += 1
                number = int(word)
                if kind == "pulled":
                    assert number not in self.deleted, "an answered delete came back"
                    self.note_claim(number, *map(int, rest))
                else:
                    getattr(self, kind).add(number)
                lines_max -= 1
                if lines_max == 0:
                    child.kill()
        assert child.returncode == -9

    def note_claim(self, number, epoch, since_ms, until_ms):
        """Checks that each claim has its own epoch and begins after the claim before it."""
        claims = self.deadlines.setdefault(number, {})
        assert epoch not in claims, "two claims of a message have the same epoch"
        assert since_ms >= claims.get(epoch - 1, 0), "two claims of a message were valid at once"
        claims[epoch] = until_ms

    def verify(self, root, copy):
        """Opens a copy: opening repairs a store, and the next child must do that itself."""
        shutil.copytree(root, copy)
        engine = open_engine(copy / "store", file_bytes=32_768)
        exact = plain_state(exact_replay(copy))
        assert first_difference(plain_state(engine.shard, engine.journal.load), exact) is None
        held = set()
        for queue in engine.shard.queues.values():
            for delivery in queue.deliveries.values():
                assert isinstance(delivery.content, int)
                held.add(int(engine.journal.load(delivery.content).body.split()[0]))
        engine.close()
        shutil.rmtree(copy)
        assert self.pushed - self.deleting <= held, "an answered push was lost"
        assert not self.deleted & held, "an answered delete came back"


# Ten kills in each.
@pytest.mark.parametrize("group", range(100 if FULL else 2))
def test_a_killed_engine_loses_no_answered_push_and_restores_no_deleted_message(quick_path, group):
    rng = random.Random(group)
    account = Account()
    kill_points = [
        "",
        f"write:{rng.randrange(20, 600)}",
        f"sync:{rng.randrange(20, 200)}",
        f"open:{rng.randrange(1, 40)}",
        "",
        f"create:{rng.randrange(9, 24)}",
        f"replace:{rng.randrange(1, 4)}",
        f"open:{rng.randrange(1, 25)}",
        f"archive:{rng.randrange(1, 6)}",
        f"remove:{rng.randrange(1, 6)}",
    ]
    for kill_point in kill_points:
        account.run(
            quick_path / "root", kill_point, rng.randrange(50, 400) if not kill_point else 30_000
        )
        if (quick_path / "root" / "store").exists():
            account.verify(quick_path / "root", quick_path / "copy")
    assert account.openings >= 6
    assert len(account.deleted) > 100
    assert any(len(claims) > 1 for claims in account.deadlines.values())
