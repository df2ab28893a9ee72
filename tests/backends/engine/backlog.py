"""A program that measures a backlog, in a process of its own so that its memory can be measured.

    backlog.py fill DIRECTORY COUNT BODY_BYTES     pushes COUNT messages, and kills itself
    backlog.py open DIRECTORY COUNT                opens the store and pulls, then takes a snapshot;
                                                   prints the figures

The first pull is given in elapsed time and in processor time, the longest step of the snapshot in
processor time only, which other programs on the machine do not change.
"""

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

BATCH = 500


def resident_bytes():
    """The resident memory of this process, including mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("there is no VmRSS in /proc/self/status")


def fill(path, count, body_bytes):
    from penstock.backends.engine.store import open_engine
    from penstock.service import Batch, CreateQueue, Push

    engine = open_engine(path, durability="os")
    engine.submit(CreateQueue("q"))
    body = b"x" * (body_bytes - 12)
    for start in range(0, count, BATCH):
        numbers = range(start, min(start + BATCH, count))
        engine.submit(Batch([Push("q", b"%012d" % number + body) for number in numbers]))
    os.kill(os.getpid(), signal.SIGKILL)


def measure(path, count):
    from penstock.backends.engine.store import open_engine
    from penstock.service import Pull, Stats

    gc.collect()
    before = resident_bytes()
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    engine: Any = open_engine(path, durability="os")
    (claim,) = engine.submit(Pull("q"))
    first_pull_s = time.monotonic() - began_s
    first_pull_cpu_s = time.process_time() - began_cpu_s
    assert claim.body.startswith(b"00000000000")
    # A thread fills spare files through their maps, which count as memory until it has ended.
    engine.journal.segments.prepare()
    gc.collect()
    after = resident_bytes()
    assert engine.submit(Stats("q")).messages == count
    steps_s = [0.0]

    def exclusive(step):
        began_s = time.thread_time()
        reply = step()
        steps_s.append(time.thread_time() - began_s)
        return reply

    engine.upkeep._exclusive = exclusive
    engine.upkeep.run_pass()
    engine.close()
    figures = {
        "first_pull_s": round(first_pull_s, 3),
        "first_pull_cpu_s": round(first_pull_cpu_s, 3),
        "memory_bytes": after - before,
        "longest_step_ms": round(max(steps_s) * 1_000, 1),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    if sys.argv[1] == "fill":
        fill(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        measure(sys.argv[2], int(sys.argv[3]))
