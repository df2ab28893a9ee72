"""A standalone Spark cluster on this machine: two workers of one core beside `local[2]`.

    make bench NAME=spark_cluster ARGS="--events 1000000 --rounds 1"

The command line does a run and an audit of the same store, in turns in one process and on the
cluster. Both have two cores and one JVM's memory for each task, so the difference is what a cluster
costs here: executors that start with each command, and rows that pass through sockets. What it
gains is more machines, which this cannot show.

The second table is of Spark's event logs: how much processor time the tasks of each step took. It
leaves out the driver, which plans, lists and commits, and the Python of the source, which decodes
the journal. Each command has a new JVM, in which the first events cost several times what later
ones do: with a few hundred thousand events the figures say more of Java than of the queries.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pyspark

from benchmarks import chaos
from benchmarks.harness import (
    Child,
    Void,
    disk_directory,
    finish,
    interleave,
    is_quick,
    machine,
    print_table,
    ratio,
    run_benchmark,
)
from penstock.spark.session import prepare_environment

WORKERS = 2
ACTIONS = ("run", "audit --all")
# Steps whose tasks take less than this of an event are shown as one.
STEP_US_MIN = 0.02
_SPARK = Path(pyspark.__file__).parent


@contextlib.contextmanager
def started(directory: Path, pattern: str, *words: str) -> Iterator[str]:
    """A process of the cluster, and what the pattern finds in its output."""
    process = subprocess.Popen(
        [_SPARK / "bin" / "spark-class", *words], cwd=directory, text=True,
        env={**os.environ, "SPARK_HOME": str(_SPARK), "SPARK_WORKER_DIR": str(directory),
             "SPARK_CONF_DIR": str(directory)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        found = next(filter(None, (re.search(pattern, line) for line in process.stdout)), None)
        if found is None:
            raise Void(f"{words[0]} did not start")
        # The pipe must be read, or the process would block when it is full.
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield found[1]
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def cluster(directory: Path) -> Iterator[str]:
    """The URL of a master with its workers."""
    directory.mkdir()
    here = ("--host", "127.0.0.1", "--webui-port", "0")
    package = "org.apache.spark.deploy"
    with contextlib.ExitStack() as stack:
        words = (f"{package}.master.Master", *here, "--port", "0")
        url = stack.enter_context(started(directory, r"(spark://127\.0\.0\.1:\d+)", *words))
        for _ in range(WORKERS):
            words = (f"{package}.worker.Worker", *here, "--cores", "1", "--memory", "2g", url)
            stack.enter_context(started(directory, "(registered with master)", *words))
        yield url


def seconds_of(store: str, lake: Path, master: str, history: Path) -> dict[str, float]:
    """The seconds of each command on a new lake. Raises Void if one fails."""
    shutil.rmtree(lake, ignore_errors=True)
    settings = {
        "spark.executor.memory": "1800m", "spark.cores.max": "2",
        "spark.eventLog.enabled": "true", "spark.eventLog.dir": history.as_uri(),
        "spark.eventLog.rolling.enabled": "false", "spark.eventLog.compress": "false",
    }  # fmt: skip
    took_s = {}
    for action in ACTIONS:
        words = [*action.split(), *(["--journal", store] if action == "run" else [])]
        words += [f"--conf={name}={value}" for name, value in settings.items()]
        start_s = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "penstock", "pipeline", *words, "--lake", lake,
             "--master", master, "--quiet"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        took_s[action] = time.perf_counter() - start_s
        if done.returncode:
            raise Void(f"`{action}` at {master} ended with {done.returncode}: {done.stderr}")
    return took_s


def processor_s(history: Path) -> Counter[str]:
    """The seconds of processor time that the tasks of each step took, by all event logs there."""
    found: Counter[str] = Counter()
    for log in history.iterdir():
        steps: dict[int, str] = {}
        for line in log.read_text().splitlines():
            event = json.loads(line)
            if event["Event"] == "SparkListenerJobStart":
                step = event["Properties"].get("spark.job.description") or "other"
                # What reads a journal is described by the ids of its query.
                name = "events" if step.startswith(("\n", "id = ")) else step
                steps |= dict.fromkeys(event["Stage IDs"], name)
            elif event["Event"] == "SparkListenerTaskEnd":
                spent_ns = (event.get("Task Metrics") or {}).get("Executor CPU Time", 0)
                found[steps.get(event["Stage ID"], "other")] += spent_ns / 1e9
    return found


def measure(directory: Path, events: int, rounds: int) -> dict[str, Any]:
    """The seconds of each action in each round, and of processor time of each step, by place."""
    made = Child()
    store = str(made.call(chaos.make_store, directory / "store", 0, events).path)
    made.close()
    found: dict[str, dict[str, list[float]]] = {
        place: {action: [] for action in ACTIONS} for place in ("local[2]", "cluster")
    }
    prepare_environment()
    with cluster(directory / "cluster") as url:
        masters = {"local[2]": "local[2]", "cluster": url}
        for place in masters:
            (directory / f"history-{place}").mkdir()

        def one(place: str) -> float:
            history = directory / f"history-{place}"
            took_s = seconds_of(store, directory / "lake", masters[place], history)
            for action, seconds in took_s.items():
                found[place][action].append(seconds)
            return sum(took_s.values())

        interleave(rounds, {place: lambda place=place: one(place) for place in masters})
    steps = {
        place: {
            step: seconds / rounds * 1e6 / events
            for step, seconds in processor_s(directory / f"history-{place}").items()
        }
        for place in masters
    }
    return {"seconds": found, "processor_us": steps}


def show_steps(steps: dict[str, dict[str, float]]) -> None:
    """Prints the processor time of each step; of the small ones, their sum."""
    every = {name for of in steps.values() for name in of}
    most = {name: max(of.get(name, 0) for of in steps.values()) for name in every}
    large = sorted((name for name in every if most[name] >= STEP_US_MIN), key=lambda n: -most[n])
    lines = {name: [of.get(name, 0) for of in steps.values()] for name in large}
    small = every - set(large)
    lines[f"{len(small)} more"] = [sum(of.get(name, 0) for name in small) for of in steps.values()]
    lines["all"] = [sum(of.values()) for of in steps.values()]
    rows = [(name, *(f"{us:.2f}" for us in of)) for name, of in lines.items()]
    print_table("µs of processor time an event, in tasks", ("", *steps), rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench NAME=spark_cluster ARGS=…")
    parser.add_argument("--events", type=int, default=50_000 if is_quick() else 3_000_000)
    parser.add_argument("--rounds", type=int, default=1 if is_quick() else 2)
    given = parser.parse_args()
    print(f"two workers beside local[2], {given.events:,} events, on {machine()}")
    with tempfile.TemporaryDirectory(dir=disk_directory()) as directory:
        measured = measure(Path(directory), given.events, given.rounds)
    found = measured["seconds"]
    ratios: dict[str, Any] = {
        action: ratio(found["cluster"][action], found["local[2]"][action]) for action in ACTIONS
    }
    rows = [
        (action, *(f"{median(found[place][action]):.1f} s" for place in found),
         f"{ratios[action]:.2f}")
        for action in ACTIONS
    ]  # fmt: skip
    print_table("seconds of a command, median", ("", *found, "cluster / local[2]"), rows)
    show_steps(measured["processor_us"])
    finish("spark_cluster", [], {**measured, "ratios": ratios})


if __name__ == "__main__":
    run_benchmark(main, has_options=True)
