"""Row 16 of the scorecard: the time and the memory that a restart with a long backlog takes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import FULL
from tests.measure import SLACK

MESSAGES = 10_000_000 if FULL else 500_000
PROGRAM = Path(__file__).parent / "backlog.py"
# Elapsed time on a machine without other load, and processor time on any other.
FIRST_PULL = "first_pull_s" if FULL else "first_pull_cpu_s"
FIRST_PULL_S_MAX = 5.0 * SLACK
MEMORY_BYTES_MAX = 300
# Windows and caches, whose memory is a notable part of that of a small backlog only.
FIXED_BYTES = 16 * 1024 * 1024
PAUSE_MS_MAX = 50.0 * SLACK
COMMAND_S_MAX = 3_000 if FULL else 280
pytestmark = [] if FULL else [pytest.mark.timeout(600)]


def run(*words, status=0):
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, words)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=COMMAND_S_MAX,
        check=False,
    )
    assert done.returncode == status
    return done.stdout


def measured(tmp_path, record_property, name, count, body_bytes):
    run("fill", tmp_path / "store", count, body_bytes, status=-9)
    for state in ("killed, no snapshot", "after a snapshot"):
        figures = json.loads(run("open", tmp_path / "store", count))
        figures["memory_bytes_each"] = figures["memory_bytes"] // count
        record_property(
            "figure",
            f"{name} of {count:,}, {state}: first pull after "
            f"{figures['first_pull_s']:.2f} s, {figures['memory_bytes_each']} B each, longest step "
            f"{figures['longest_step_ms']} ms",
        )
        yield figures


def test_a_long_backlog_is_served_soon_after_a_restart(tmp_path, record_property):
    for figures in measured(tmp_path, record_property, "backlog", MESSAGES, 256):
        assert figures[FIRST_PULL] <= FIRST_PULL_S_MAX
        assert figures["memory_bytes_each"] <= MEMORY_BYTES_MAX
        assert figures["longest_step_ms"] <= PAUSE_MS_MAX


def test_the_memory_of_a_message_does_not_grow_with_its_body(tmp_path, record_property):
    for figures in measured(tmp_path, record_property, "large bodies", 10_000, 20_000):
        assert figures["memory_bytes"] <= MEMORY_BYTES_MAX * 10_000 + FIXED_BYTES
