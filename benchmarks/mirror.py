"""A store with a mirror beside the same store without: `make bench NAME=mirror`.

The primary is a daemon on disk (durability sync), driven by eight threads of another process, each
push → pull → delete of one 256-byte message. Its mirror is `penstock mirror` to another daemon
(durability os), both processes of their own. Measured are the primary's rate with the mirror beside
it, as a share of its rate alone, and how long it takes from an event to the mirror while the
primary runs at half its full rate. At the end the mirror must have what the primary has, or the run
is void.
"""

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

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
PATIENCE_S = 60.0


def lifecycles(url: str, count: int) -> float:
    """Lifecycles on a store; lifecycles a second."""
    with penstock.connect(url) as queues:
        queues.create("bench")
        run = run_lifecycles(queues, max(THREADS, count), THREADS)
    return len(run.pushed) / run.took_s


def paced_lifecycles(url: str, rate: float, seconds: float) -> float:
    """Lifecycles at a rate for so long; the rate that was reached."""
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
def daemon(path: Path, durability: str) -> Iterator[str]:
    """A daemon of a data directory, ended at the end of the block."""
    command = [sys.executable, "-m", "penstock.server.daemon", str(path), "--idle", "0"]
    process = subprocess.Popen([*command, "--durability", durability])
    try:
        until_s = time.monotonic() + PATIENCE_S
        while not (path / "daemon" / "socket").exists():
            if process.poll() is not None or time.monotonic() > until_s:
                sys.exit("benchmark: a daemon does not start")
            time.sleep(0.02)
        yield f"file:{path}?durability={durability}"
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


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
        self._process.wait(PATIENCE_S)
        self._thread.join()


def catch_up(primary: str, copy: str) -> None:
    """Has the mirror do all that is left, and compares the two sides. Raises Void."""
    command = [sys.executable, "-m", "penstock", "mirror", "--from", primary, "--to", copy]
    subprocess.run([*command, "--once"], check=True, stdout=subprocess.DEVNULL)
    with penstock.connect(primary) as theirs, penstock.connect(copy) as ours:
        want, found = theirs.stats("bench").messages, ours.stats("bench").messages
    if want != found:
        raise Void(f"the primary has {want} messages and its mirror {found}")


def main() -> None:
    """Measures the store alone and mirrored, and then the lag."""
    directory = disk_directory()
    child = Child()
    try:
        with ExitStack() as stack:
            primary = stack.enter_context(daemon(directory / "primary", "sync"))
            copy = stack.enter_context(daemon(directory / "copy", "os"))
            count = count_for(
                ROUND_S, lambda n: n / child.call(lifecycles, primary, n), 10 * THREADS
            )

            def mirrored() -> float:
                mirror = Mirror(primary.partition("?")[0], copy)
                try:
                    mirror.wait_until_started()
                    return child.call(lifecycles, primary, count)
                finally:
                    mirror.stop()

            figures = interleave(
                ROUNDS,
                {"alone": lambda: child.call(lifecycles, primary, count), "mirrored": mirrored},
            )
            bare = primary.partition("?")[0]
            catch_up(bare, copy)
            mirror = Mirror(bare, copy)
            rate = median(figures["alone"]) / 2
            seconds = 0.5 if is_quick() else PACED_S
            reached = child.call(paced_lifecycles, primary, rate, seconds)
            mirror.stop()
            catch_up(bare, copy)
            lags_ms = sorted(line["late_ms"] for line in mirror.lines) or [0]
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
        f"the mirror at {reached:,.0f} lifecycles/s",
        ("", "median", "p99"),
        [
            (
                "from the event to the mirror, ms",
                f"{median(lags_ms):.0f}",
                f"{percentile(lags_ms, 99):.0f}",
            )
        ],
    )
    print(machine())
    finish(
        "mirror",
        [Target("the primary's rate with a mirror ÷ alone", share, 0.95)],
        {
            "lifecycles_per_s": {name: round(median(each)) for name, each in figures.items()},
            "late_ms_median": median(lags_ms),
            "late_ms_p99": percentile(lags_ms, 99),
        },
    )


if __name__ == "__main__":
    run_benchmark(main)
