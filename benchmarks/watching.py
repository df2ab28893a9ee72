"""The memory of a run that watches a growing journal: `make bench NAME=watching`.

`penstock pipeline run --watch --on-finding true` runs in a process of its own. Before the first
round the engine appends some messages, of the part that all rounds make again. In place of the time
between two rounds it appends some that are pushed, pulled and deleted, so that each round reads,
makes tables and audits little.

What is printed is the resident memory of the command, of Java and of Spark's Python workers after
some of the rounds, and Java's heap after a collection: Java takes more of its limit as it likes, so
its resident memory alone does not show whether it keeps more. And how long a round takes, from the
moment something new is durable until the round with it has been audited. The run is void if the
lake lacks an event or the audit finds anything.
"""

import argparse
import contextlib
import gc
import io
import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import (
    Child,
    Target,
    Void,
    disk_directory,
    filesystem_of,
    finish,
    is_quick,
    machine,
    print_table,
    rss_bytes,
    run_benchmark,
)

ROUNDS = 200
# How many messages there are before the first round, appended so many at a time.
FIRST_MESSAGES = 16_384
BATCH_MESSAGES = 1_024
# How many messages come between two rounds; each has three events.
MESSAGES = 20
EVENTS_EACH = 3
BODY_BYTES = 500
QUEUE = "growing"
# The memory at the end may differ from that after the first of the rounds shown by so much.
GROWTH_MAX = 1.1
ROUND_S_MAX = 2.0
EVERY = "100ms"
Memory = dict[str, int]


def grow(store: str, messages: int) -> None:
    """Appends so many messages that are pushed, pulled and deleted."""
    from penstock.backends.engine.store import open_engine
    from penstock.service import Batch, CreateQueue, Delete, Pull, Push

    engine = open_engine(store, durability="os", background=False)
    try:
        engine.submit(CreateQueue(QUEUE, {}))
        for at in range(0, messages, BATCH_MESSAGES):
            size = min(BATCH_MESSAGES, messages - at)
            engine.submit(Batch([Push(QUEUE, os.urandom(BODY_BYTES)) for _ in range(size)]))
            claims = engine.submit(Pull(QUEUE, size))
            engine.submit(Batch([Delete(QUEUE, claim.proof) for claim in claims]))
    finally:
        engine.close()


def memory_now(collects: bool) -> Memory:
    """The resident bytes of this process, and of those below it by what they are.

    Java's heap is 0 unless Java is to collect its garbage first.
    """
    found = {"command": rss_bytes(), "Java": 0, "Java's heap": 0, "workers": 0}
    if collects:
        from pyspark.sql import SparkSession

        spark = SparkSession.getActiveSession()
        if spark is not None:
            spark._jvm.System.gc()
            runtime = spark._jvm.Runtime.getRuntime()
            found["Java's heap"] = runtime.totalMemory() - runtime.freeMemory()
    for pid in _below(os.getpid()):
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            found["Java" if name == "java" else "workers"] += rss_bytes(pid=pid)
        except (OSError, RuntimeError):
            # It has ended, or is about to.
            continue
    return found


def _below(pid: int) -> list[int]:
    """Every process that descends from this one."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        children = [int(one) for each in tasks for one in (each / "children").read_text().split()]
    except OSError:
        return []
    return [*children, *(one for child in children for one in _below(child))]


def watch(directory: str, rounds: int) -> tuple[list[Memory], list[float]]:
    """Runs the command for so many rounds; the memory at the end of each, and their seconds.

    Raises Void.
    """
    from penstock import cli
    from penstock.cli.lake.watch import Watch, share_freed_memory

    # The command does it itself, but later than these imports.
    share_freed_memory()
    from penstock.spark.audit import audit
    from penstock.spark.bronze import lag
    from penstock.spark.lake import Lake

    store, lake = f"{directory}/store", f"{directory}/lake"
    found: list[Memory] = []
    took_s: list[float] = []
    began_s: list[float] = []
    grow(store, FIRST_MESSAGES)

    shown = shown_rounds(rounds)

    def wait(self: Watch) -> bool:
        took_s.extend(time.perf_counter() - each for each in began_s)
        gc.collect()
        found.append(memory_now(len(found) + 1 in shown))
        if len(found) < rounds:
            grow(store, MESSAGES)
            began_s[:] = [time.perf_counter()]
            while lag(Lake.open(lake), store).behind_bytes:
                threading.Event().wait(0.01)
        return len(found) < rounds

    Watch.wait = wait  # type: ignore[method-assign]
    words = ["pipeline", "run", "--watch", "--every", EVERY, "--on-finding", "true"]
    words += ["--lake", lake]
    with contextlib.redirect_stdout(io.StringIO()):
        status = cli.main([*words, "--journal", store])
    verdict = audit(_no_spark, Lake.open(lake))
    expected = (FIRST_MESSAGES + (rounds - 1) * MESSAGES) * EVENTS_EACH
    if status or not verdict.holds or verdict.events < expected:
        raise Void(f"status {status}, {verdict.events} events of {expected}, {verdict.counts}")
    return found, took_s


def _no_spark() -> Any:
    raise Void("the last round left something to judge")


def shown_rounds(rounds: int) -> list[int]:
    """The rounds whose memory is printed: a tenth, a half and all of them."""
    return sorted({max(1, rounds // 10), max(1, rounds // 2), rounds})


def growth(found: Sequence[Memory], who: str) -> float:
    """The memory after the last round by that after a tenth of them."""
    first = found[shown_rounds(len(found))[0] - 1]
    return found[-1][who] / first[who]


def targets(found: Sequence[Memory], took_s: Sequence[float]) -> list[Target]:
    """Memory does not grow with the rounds, and a round is short."""
    return [
        *(
            Target(f"{who}, last round / a tenth", growth(found, who), GROWTH_MAX, False)
            for who in ("command", "Java's heap", "workers")
        ),
        Target("a round with little new, seconds", median(took_s), ROUND_S_MAX, False),
    ]


def show(found: Sequence[Memory]) -> None:
    """Prints what was measured."""
    print_table(
        "resident MiB",
        ("round", *found[0]),
        [
            (str(at), *(f"{size >> 20}" for size in found[at - 1].values()))
            for at in shown_rounds(len(found))
        ],
    )


def main() -> None:
    """Runs it and prints what it needed."""
    parser = argparse.ArgumentParser(prog="make bench NAME=watching ARGS=…")
    parser.add_argument("--rounds", type=int, default=10 if is_quick() else ROUNDS)
    rounds = parser.parse_args(sys.argv[1:]).rounds
    start_s = time.monotonic()
    line, directory = machine(), disk_directory()
    print(f"{line}; {rounds} rounds of {MESSAGES * EVENTS_EACH} events")
    os.environ["SPARK_LOCAL_DIRS"] = str(directory)
    child = Child()
    try:
        found, took_s = child.call(watch, str(directory), rounds)
    finally:
        child.close()
        shutil.rmtree(directory, ignore_errors=True)
    show(found)
    all_s = round(time.monotonic() - start_s)
    disk = filesystem_of(directory.parent)
    shown = {str(at): found[at - 1] for at in shown_rounds(rounds)}
    finish(
        "watching", targets(found, took_s),
        {"machine": line, "filesystem": disk, "took_s": all_s, "rounds": rounds, "bytes": shown},
    )  # fmt: skip


if __name__ == "__main__":
    run_benchmark(main, has_options=True)
