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
    found = [memory(1, 1, 1)] * 19 + [memory(100, 50, 40)] + [memory(999, 9, 9)] * 179
    targets = watching.targets([*found, memory(111, 55, 20)], [1.0, 3.0, 9.0])
    assert {each.name.partition(", last")[0]: (each.value, each.met) for each in targets} == {
        "command": (1.11, False), "Java's heap": (1.1, True), "workers": (0.5, True),
        "a round with little new, seconds": (3.0, False),
    }  # fmt: skip


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
