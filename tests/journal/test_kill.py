"""Row 1: a real process is killed while it writes; its answers are compared with the stream."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.journal.reader import JournalReader
from penstock.journal.segments import Segments
from tests.journal.child import body

CHILD = Path(__file__).parent / "child.py"


def run_and_kill(path, answers, size):
    """Kill a child after this many answers, and return the last id that it answered."""
    command = [sys.executable, str(CHILD), str(path), "1000000", str(size), "1"]
    answered = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            words = line.split()
            assert words[0] in ("reopened", "answered"), line
            if words[0] == "answered":
                answered = int(words[1])
                answers -= 1
                if answers == 0:
                    child.kill()
    return answered


@pytest.mark.parametrize("size", [100, 3000, 150_000])
def test_a_killed_writer_loses_nothing_that_it_answered(tmp_path, size):
    rng = random.Random(size)
    for _ in range(4):
        answered = run_and_kill(tmp_path / "stream", rng.randrange(1, 150), size)
        with JournalReader(tmp_path / "stream") as reader:
            # Only the process ended, not the system, so the last slot that it wrote is visible.
            assert reader.next_id - 1 >= answered - 1
        with Segments.open(tmp_path / "stream") as segments:
            assert segments.next_id - 1 >= answered
            assert segments.quarantined == []
            ids = []
            for entry in segments.entries():
                ids.append(entry.entry_id)
                assert entry.data == body(entry.entry_id, size)
            assert ids == list(range(1, segments.next_id))
