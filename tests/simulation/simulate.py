"""The cluster under faults that a seed decides: `make sim SEED=7`.

    make sim                        200 seeds, from a random one on; with FULL=1, 100,000
    make sim SEED=7                 one run; its result, and the hash of its trace, are printed
    make sim SEED=7 ARGS=--trace    the same, with every event of the run

A run is the real code of the cluster, with the network, the replicated log, the clocks and the
faults replaced by models. The same seed gives the same run, in every process. A seed that breaks a
rule is printed with the end of its trace and the command that repeats it.
"""

import argparse
import hashlib
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.simulation.cluster import SimulatedCluster
from tests.simulation.nodes import SimulatedNode

SEEDS: Final = 200
TRACE_LINES: Final = 60
_MEMORY: Final = Path("/dev/shm")


@dataclass(frozen=True)
class SimulatedRun:
    """The result of a seed."""

    seed: int
    # The rule that was broken; None if none was.
    violation: str | None
    steps: int
    answers: int
    terms: int
    trace: list[tuple[Any, ...]]

    @property
    def trace_hash(self) -> str:
        """A hash of the whole trace."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()

    def lines(self) -> list[str]:
        """The trace as text, one line for each event."""
        return [" ".join(map(str, each)) for each in self.trace]

    def report(self, lines_max: int = TRACE_LINES) -> str:
        """The end of the trace, the rule that was broken, and the command that repeats it."""
        return "\n".join(
            [
                *self.lines()[-lines_max:],
                f"seed {self.seed}: {self.violation}",
                f"to repeat it: make sim SEED={self.seed}",
            ]
        )


def run_seed(seed: int, node_class: type[SimulatedNode] = SimulatedNode) -> SimulatedRun:
    """Runs a seed to its end, or to the first rule that is broken."""
    parent = _MEMORY if _MEMORY.is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="penstock-sim-", dir=parent))
    cluster = SimulatedCluster(seed, directory, node_class)
    schedule = cluster.schedule
    try:
        cluster.run()
    except Exception as error:
        # Such as an assertion of the core, which must never fail.
        where = traceback.extract_tb(error.__traceback__)[-1]
        schedule.violate(f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    terms = sum(len(truth.opened_ms) for truth in cluster.truths)
    return SimulatedRun(
        seed, schedule.violation, schedule.steps, cluster.ledger.answers, terms, schedule.trace
    )


def first_violation(
    seeds: Sequence[int], node_class: type[SimulatedNode] = SimulatedNode
) -> SimulatedRun | None:
    """The first of these seeds that breaks a rule; None if none does."""
    for seed in seeds:
        run = run_seed(seed, node_class)
        if run.violation is not None:
            return run
    return None


def main(
    arguments: Sequence[str] | None = None, node_class: type[SimulatedNode] = SimulatedNode
) -> int:
    """Runs one seed or many; the exit status is 1 if a rule was broken."""
    parser = argparse.ArgumentParser(prog="simulate", description="Simulates a cluster by seeds.")
    parser.add_argument("--seed", type=int, help="run only this seed")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="without --seed: how many to run")
    parser.add_argument("--trace", action="store_true", help="print every event")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        run = run_seed(options.seed, node_class)
        if options.trace:
            _show("\n".join(run.lines()))
        if run.violation is not None:
            _show(run.report(0 if options.trace else TRACE_LINES))
            return 1
        _show(
            f"seed {run.seed}: no rule broken in {run.steps:,} steps, {run.answers:,} answers and "
            f"{run.terms:,} terms; the trace's hash is {run.trace_hash[:16]}"
        )
        return 0
    return _run_many(options.seeds, node_class)


def _show(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _run_many(count: int, node_class: type[SimulatedNode]) -> int:
    first = random.SystemRandom().randrange(10**9)
    _show(f"seeds {first} to {first + count - 1}")
    began_s = time.monotonic()
    steps = answers = terms = 0
    for seed in range(first, first + count):
        run = run_seed(seed, node_class)
        if run.violation is not None:
            _show(run.report())
            return 1
        steps, answers, terms = steps + run.steps, answers + run.answers, terms + run.terms
    _show(
        f"{count:,} seeds in {time.monotonic() - began_s:.1f} s: no rule broken in "
        f"{steps:,} steps, {answers:,} answers and {terms:,} terms"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
