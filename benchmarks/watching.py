"""The memory of a run that watches a growing journal: `make bench NAME=watching`.

`penstock pipeline run --watch --on-finding true` runs in a process of its own. Before the first
round the engine appends as many messages as an open part has at most, so that no later round has
more to do. In place of the time between two rounds it appends some messages that are pushed, pulled
and deleted, so that each round reads, makes tables and audits little. Two runs:

    as users have it   so little is done in the command itself, and Java is not started
    tasks of Spark     every piece of work is a task, as with many new events

What is printed is the resident memory of the command, of Java and of Spark's Python workers after
some of the rounds, and Java's heap after a collection: Java takes more of its limit as it likes, so
its resident memory alone does not show whether it keeps more. The run is void if the lake lacks an
event or the audit finds anything.
"""

import argparse
import contextlib
import gc
import io
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
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
# How many messages there are before the first round, appended so many at a time: a quarter of a
# range, which is closed once all of them have ended.
FIRST_MESSAGES = 16_384
BATCH_MESSAGES = 1_024
# How many messages come between two rounds; each has three events.
MESSAGES = 20
EVENTS_EACH = 3
BODY_BYTES = 500
QUEUE = "growing"
# The memory at the end may differ from that after the first of the rounds shown by so much.
GROWTH_MAX = 1.1
RUNS = ("as users have it", "tasks of Spark")
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


def watch(directory: str, rounds: int, by_tasks: bool) -> list[Memory]:
    """Runs the command for so many rounds; the memory at the end of each. Raises Void."""
    from penstock import cli
    from penstock.cli.lake.watch import Watch, share_freed_memory

    # The command does it itself, but later than these imports.
    share_freed_memory()
    from penstock.spark import distribute, ingest
    from penstock.spark.audit import audit
    from penstock.spark.lake import Lake

    if by_tasks:
        distribute.LOCAL_MAX = ingest._FEW_SPANS = 0
    store, lake = f"{directory}/store", f"{directory}/lake"
    found: list[Memory] = []
    grow(store, FIRST_MESSAGES)

    shown = shown_rounds(rounds)

    def wait(self: Watch) -> bool:
        gc.collect()
        found.append(memory_now(by_tasks and len(found) + 1 in shown))
        if len(found) < rounds:
            grow(store, MESSAGES)
        return len(found) < rounds

    Watch.wait = wait  # type: ignore[method-assign]
    words = ["pipeline", "run", "--watch", "--on-finding", "true", "--lake", lake]
    with contextlib.redirect_stdout(io.StringIO()):
        status = cli.main([*words, "--journal", store])
    verdict = audit(_no_spark, Lake.open(lake))
    expected = (FIRST_MESSAGES + (rounds - 1) * MESSAGES) * EVENTS_EACH
    if status or not verdict.holds or verdict.events < expected:
        raise Void(f"status {status}, {verdict.events} events of {expected}, {verdict.counts}")
    if by_tasks and not found[-1]["Java"]:
        raise Void("Java was not started")
    return found


def _no_spark() -> Any:
    raise Void("the last round left something to judge")


def shown_rounds(rounds: int) -> list[int]:
    """The rounds whose memory is printed: a tenth, a half and all of them."""
    return sorted({max(1, rounds // 10), max(1, rounds // 2), rounds})


def growth(found: Sequence[Memory], who: str) -> float:
    """The memory after the last round by that after a tenth of them."""
    first = found[shown_rounds(len(found))[0] - 1]
    return found[-1][who] / first[who]


def targets(runs: Mapping[str, Sequence[Memory]]) -> list[Target]:
    """Memory does not grow with the rounds."""
    users, tasks = (runs[name] for name in RUNS)
    found = {
        "command": growth(users, "command"),
        "command, tasks of Spark": growth(tasks, "command"),
        "Java's heap": growth(tasks, "Java's heap"),
        "workers": growth(tasks, "workers"),
    }
    return [
        Target(f"{who}, last round / a tenth", grown, GROWTH_MAX, False)
        for who, grown in found.items()
    ]


def show(runs: Mapping[str, Sequence[Memory]]) -> None:
    """Prints what was measured."""
    for name, found in runs.items():
        print_table(
            f"resident MiB, {name}",
            ("round", *found[0]),
            [
                (str(at), *(f"{size >> 20}" for size in found[at - 1].values()))
                for at in shown_rounds(len(found))
            ],
        )


def main() -> None:
    """Runs both and prints them."""
    parser = argparse.ArgumentParser(prog="make bench NAME=watching ARGS=…")
    parser.add_argument("--rounds", type=int, default=10 if is_quick() else ROUNDS)
    rounds = parser.parse_args(sys.argv[1:]).rounds
    start_s = time.monotonic()
    line, directory = machine(), disk_directory()
    print(f"{line}; {rounds} rounds of {MESSAGES * EVENTS_EACH} events")
    os.environ["SPARK_LOCAL_DIRS"] = str(directory)
    runs = {}
    try:
        for name in RUNS:
            place = directory / name.replace(" ", "-")
            place.mkdir()
            child = Child()
            try:
                runs[name] = child.call(watch, str(place), rounds, name == RUNS[1])
            finally:
                child.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    show(runs)
    took_s = round(time.monotonic() - start_s)
    disk = filesystem_of(directory.parent)
    shown = {
        name: {str(at): found[at - 1] for at in shown_rounds(rounds)}
        for name, found in runs.items()
    }
    finish(
        "watching", targets(runs),
        {"machine": line, "filesystem": disk, "took_s": took_s, "rounds": rounds, "bytes": shown},
    )  # fmt: skip


if __name__ == "__main__":
    run_benchmark(main, has_options=True)
