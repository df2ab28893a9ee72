"""The benchmark of a watching run: which rounds are compared, and what counts as growth."""

import os
import subprocess
import sys
from typing import Any

import pytest

watching = pytest.importorskip("benchmarks.watching", reason="the source archive has no benchmarks")


def memory(command, heap, workers):
    return {"command": command, "Java": 999, "Java's heap": heap, "workers": workers}


def test_the_last_round_is_compared_with_a_tenth_of_them():
    assert watching.shown_rounds(200) == [20, 100, 200]
    assert watching.shown_rounds(5) == [1, 2, 5]
    users = [memory(1, 0, 0)] * 19 + [memory(100, 0, 0)] + [memory(999, 0, 0)] * 179
    tasks = [memory(200, 50, 40)] * 199
    users, tasks = [*users, memory(111, 0, 0)], [*tasks, memory(200, 60, 20)]
    found = watching.targets(dict(zip(watching.RUNS, (users, tasks), strict=True)))
    assert {target.name.partition(", last")[0]: (target.value, target.met) for target in found} == {
        "command": (1.11, False),
        "command, tasks of Spark": (1.0, True),
        "Java's heap": (1.2, False),
        "workers": (0.5, True),
    }


def test_the_memory_of_processes_below_this_one_is_counted():
    words = [sys.executable, "-c", "x = bytearray(64 << 20); print(flush=True); input()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        output: Any = child.stdout
        output.readline()
        found = watching.memory_now(collects=False)
        assert child.pid in watching._below(os.getpid())
        child.communicate(b"\n")
    assert found["workers"] > 64 << 20
    assert found["command"] > 0 == found["Java's heap"]
