"""A store with a mirror beside the same store without: `make bench NAME=mirror`.

The primary is a daemon on disk (durability sync), driven by eight threads of another process, each
push → pull → delete of one 256-byte message. Its mirror is `penstock mirror` to another daemon
(durability os), both processes of their own. In production that daemon would be on another machine.
Here it shares two cores with the primary and its clients, so it runs with the lowest priority, as
the mirror itself does. Measured are

    the primary's rate with the mirror beside it, as a share of its rate alone
    what the mirror and its daemon cost: processor time for each lifecycle, and how many lifecycles
    a second they do when nothing else runs, as after an outage
    how long it takes from an event to the mirror while the primary runs at half its full rate

While the primary uses every processor, the mirror falls behind, and its backlog stays in the
journal. At the end the mirror must have the messages of the primary, or the run is void.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import penstock
from benchmarks.harness import (
    Child,
    Target,
    Void,
    count_for,
    disk_directory,
    finish,
    interleave,
    is_quick,
    machine,
    percentile,
    print_table,
    ratio,
    run_benchmark,
    timed_in_threads,
)
from benchmarks.memory import run_lifecycles

THREADS = 8
ROUNDS = 7
ROUND_S = 2.0
PACED_S = 10.0
TIMEOUT_S = 60.0


def lifecycles(url: str, count: int) -> float:
    """Lifecycles on a store; lifecycles a second."""
    with penstock.connect(url) as queues:
        queues.create("bench")
        run = run_lifecycles(queues, max(THREADS, count), THREADS)
    return len(run.pushed) / run.took_s


def paced_lifecycles(url: str, rate: float, seconds: float) -> float:
    """Lifecycles at a rate for `seconds`; the rate that was reached."""
    each = max(1, int(rate * seconds / THREADS))
    with penstock.connect(url) as queues:

        def body(number: int) -> None:
            start_s = time.perf_counter()
            for i in range(each):
                ahead_s = start_s + i * THREADS / rate - time.perf_counter()
                if ahead_s > 0:
                    time.sleep(ahead_s)
                queues.push("bench", b"x" * 256)
                claim = queues.pull("bench")
                if claim is not None:
                    queues.delete(claim)

        took_s = timed_in_threads(THREADS, body)
    return each * THREADS / took_s


@contextmanager
def daemon(path: Path, durability: str, *before: str) -> Iterator[tuple[str, int]]:
    """A daemon of a data directory and its process, ended at the end of the block."""
    command = [sys.executable, "-m", "penstock.server.daemon", str(path), "--idle", "0"]
    process = subprocess.Popen([*before, *command, "--durability", durability])
    try:
        until_s = time.monotonic() + TIMEOUT_S
        while not (path / "daemon" / "socket").exists():
            if process.poll() is not None or time.monotonic() > until_s:
                sys.exit("benchmark: a daemon does not start")
            time.sleep(0.02)
        yield f"file:{path}?durability={durability}", process.pid
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


class Mirror:
    """`penstock mirror` as a process, and the lines of figures that it has printed."""

    def __init__(self, primary: str, copy: str) -> None:
        words = ["mirror", "--from", primary, "--to", copy, "--json", "--every", "0.2"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock", *words], stdout=subprocess.PIPE
        )
        self.lines: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(json.loads(line))

    def wait_until_started(self) -> None:
        """Waits for the first line of figures; ends the run if none comes."""
        while not self.lines:
            if self._process.poll() is not None:
                sys.exit("benchmark: the mirror does not start")
            time.sleep(0.05)

    def stop(self) -> None:
        """Ends it."""
        self._process.terminate()
        self._process.wait(TIMEOUT_S)
        self._thread.join()


def processor_s(pid: int | None = None) -> float:
    """Seconds of processor time that a process has used, or all children that have ended."""
    if pid is None:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def catch_up(primary: str, copy: str) -> tuple[float, float]:
    """Runs the mirror until it has caught up, and compares the two sides. Raises Void.

    Returns how long it took and the mirror's processor time, in seconds.
    """
    command = [sys.executable, "-m", "penstock", "mirror", "--from", primary, "--to", copy]
    began_s, used_s = time.perf_counter(), processor_s()
    subprocess.run([*command, "--once"], check=True, stdout=subprocess.DEVNULL)
    took_s, used_s = time.perf_counter() - began_s, processor_s() - used_s
    with penstock.connect(primary) as theirs, penstock.connect(copy) as ours:
        want, found = theirs.stats("bench").messages, ours.stats("bench").messages
    if want != found:
        raise Void(f"the primary has {want} messages and its mirror {found}")
    return took_s, used_s


class BacklogCost(NamedTuple):
    """The cost of mirroring lifecycles that were already in the journal.

    Processor time is in microseconds for each, that of the mirror and that of its daemon.
    """

    lifecycles: int
    per_s: float
    mirror_us: float
    daemon_us: float

    @property
    def row(self) -> tuple[str, ...]:
        """The figures as a row of a table."""
        return tuple(f"{each:,.0f}" for each in self[1:])


def mirror_backlog(
    primary: str, copy: str, pid: int, run: Callable[[], Any], count: int
) -> BacklogCost:
    """Calls `run`, which makes `count` lifecycles, and mirrors them afterwards. Raises Void."""
    catch_up(primary, copy)
    # The cost of a mirror with nothing to do: the interpreter, imports, the connection.
    idle_s, idle_used_s = catch_up(primary, copy)
    run()
    daemon_used_s = processor_s(pid)
    took_s, used_s = catch_up(primary, copy)
    daemon_used_s = processor_s(pid) - daemon_used_s
    each_us = 1e6 / count
    return BacklogCost(
        count,
        count / max(0.001, took_s - idle_s),
        each_us * (used_s - idle_used_s),
        each_us * daemon_used_s,
    )


def measure_lags(
    primary: str, copy: str, run: Callable[[float], float]
) -> tuple[float, list[float]]:
    """The rate that `run` reached beside a mirror, and how late events were there, in ms."""
    mirror = Mirror(primary, copy)
    reached = run(0.5 if is_quick() else PACED_S)
    mirror.stop()
    catch_up(primary, copy)
    return reached, sorted(line["late_ms"] for line in mirror.lines) or [0]


def main() -> None:
    """Measures the store alone and mirrored, and then the lag."""
    directory = disk_directory()
    child = Child()
    try:
        with ExitStack() as stack:
            primary, _ = stack.enter_context(daemon(directory / "primary", "sync"))
            copy, copy_pid = stack.enter_context(
                daemon(directory / "copy", "os", "nice", "-n", "19")
            )
            count = count_for(
                ROUND_S, lambda n: n / child.call(lifecycles, primary, n), 10 * THREADS
            )

            bare = primary.partition("?")[0]

            def mirrored() -> float:
                # The mirror must not have a backlog of an earlier round.
                catch_up(bare, copy)
                mirror = Mirror(bare, copy)
                try:
                    mirror.wait_until_started()
                    return child.call(lifecycles, primary, count)
                finally:
                    mirror.stop()

            figures = interleave(
                ROUNDS,
                {"alone": lambda: child.call(lifecycles, primary, count), "mirrored": mirrored},
            )
            backlog = mirror_backlog(
                bare, copy, copy_pid, lambda: child.call(lifecycles, primary, count), count
            )
            rate = median(figures["alone"]) / 2
            reached, lags_ms = measure_lags(
                bare, copy, lambda seconds: child.call(paced_lifecycles, primary, rate, seconds)
            )
    finally:
        child.close()
        shutil.rmtree(directory, ignore_errors=True)
    share = ratio(figures["mirrored"], figures["alone"])
    rows = [
        ("alone", f"{median(figures['alone']):,.0f}", ""),
        ("mirrored", f"{median(figures['mirrored']):,.0f}", f"{share:.2f}"),
    ]
    print_table(f"the primary, {THREADS} threads", ("store", "lifecycles/s", "÷ alone"), rows)
    print_table(
        f"a backlog of {backlog.lifecycles:,} lifecycles",
        ("lifecycles/s", "mirror, processor µs each", "its daemon, processor µs each"),
        [backlog.row],
    )
    shown = [f"{each:.0f}" for each in (median(lags_ms), percentile(lags_ms, 99))]
    print_table(
        f"the mirror at {reached:,.0f} lifecycles/s",
        ("", "median", "p99"),
        [("from the event to the mirror, ms", *shown)],
    )
    print(machine())
    finish(
        "mirror",
        [Target("the primary's rate with a mirror ÷ alone", share, 0.95)],
        {
            "lifecycles_per_s": {name: round(median(each)) for name, each in figures.items()},
            "backlog": [round(each) for each in backlog],
            "late_ms_median": median(lags_ms),
            "late_ms_p99": percentile(lags_ms, 99),
        },
    )


if __name__ == "__main__":
    run_benchmark(main)
