"""Processor time of a call, independent of other load on the machine, and memory."""

import os
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Whether `make score` runs the tests, one at a time. Some use the scorecard's figures only then.
IN_SCORE = os.environ.get("PENSTOCK_SCORE") == "1"
# Limits by time hold as stated there. The suite runs several tests at a time on machines of any
# speed, and accepts times that are longer by this factor; what these tests are for takes much more.
SLACK = 1 if IN_SCORE else 4
ROUNDS = 5


def least_cpu_s(call: Callable[[], object], *errors: type[Exception]) -> float:
    """The least processor time that a call took in a few rounds; it may raise these errors."""
    least_s = float("inf")
    for _ in range(ROUNDS):
        began_s = time.process_time()
        with suppress(*errors):
            call()
        least_s = min(least_s, time.process_time() - began_s)
    return least_s


def cpu_s(pid: int) -> float:
    """The processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int) -> int:
    """The resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()
