"""A program that measures a backlog, in a process of its own so that memory can be told apart.

    backlog.py fill DIRECTORY COUNT BODY_BYTES     pushes so many messages, and is killed
    backlog.py open DIRECTORY COUNT                opens the store and pulls, then takes a snapshot;
                                                   prints the figures

The longest step of the snapshot is given in time on the processor, which other programs on the
machine do not change.
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
    """The memory of this process, what is mapped from files included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the system does not tell")


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
    begun = time.monotonic()
    engine: Any = open_engine(path, durability="os")
    (claim,) = engine.submit(Pull("q"))
    first_pull_s = time.monotonic() - begun
    assert claim.body.startswith(b"00000000000")
    # Spare files are being filled beside this, through their maps: that is over soon.
    engine.journal.segments.prepare()
    gc.collect()
    after = resident_bytes()
    assert engine.submit(Stats("q")).messages == count
    steps_s = [0.0]

    def exclusive(step):
        begun = time.thread_time()
        reply = step()
        steps_s.append(time.thread_time() - begun)
        return reply

    engine.upkeep._exclusive = exclusive
    engine.upkeep.run_pass()
    engine.close()
    figures = {
        "first_pull_s": round(first_pull_s, 3),
        "memory_bytes": after - before,
        "longest_step_ms": round(max(steps_s) * 1_000, 1),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    if sys.argv[1] == "fill":
        fill(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        measure(sys.argv[2], int(sys.argv[3]))
