"""The engine on files of this checkout beside that of another: `ARGS="--beside PATH"`.

Both are open at once, each in a process of its own, and do the same work in turn, in rounds whose
order alternates; the ratio of a round compares two times that lie next to each other.
"""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.harness import (
    Target,
    Void,
    disk_directory,
    filesystem_of,
    finish,
    interleave,
    is_quick,
    machine,
    print_table,
)

ROUNDS = 7
ROUND_S = 0.5
INTERVAL_MS = 50
# Of one figure; rounds of the same program differ by more, which is why the median counts.
RATIO_MIN = 0.97
HERE = Path(__file__).parents[1]
PLACES = {"embedded": "file:{path}?embedded=1&", "daemon": "file:{path}?"}
DURABILITIES = ("os", "interval", "sync")


class StoreLoad(NamedTuple):
    """Work that is measured."""

    name: str
    work: str
    threads: int
    batch: int


LOADS = (
    StoreLoad("lifecycles, one at a time", "cycle", 1, 1),
    StoreLoad("lifecycles, ten a call", "cycle", 1, 10),
    StoreLoad("16 producers, one a call", "push", 16, 1),
    StoreLoad("16 producers, ten a call", "push", 16, 10),
)


class LoadProcess:
    """A process that uses a store with the Penstock of one checkout."""

    def __init__(self, checkout: Path, url: str, path: Path) -> None:
        self._path = path
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("durable_load.py")), url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(checkout / "src")},
        )

    def run(self, load: StoreLoad, seconds: float) -> float:
        """Messages a second."""
        assert self._process.stdin is not None
        line = f"{load.work} {load.threads} {load.batch} {seconds}\n"
        self._process.stdin.write(line)
        self._process.stdin.flush()
        return float(self._answer())

    def close_and_check(self) -> None:
        """Ends it. Raises Void if its ledger is wrong."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._answer() != "sound":
            raise Void("not every body pushed was pulled exactly once")
        self.end()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise Void(f"a load process ended with status {self._process.wait()}")
        return line

    def end(self) -> None:
        """Ends it and the store's daemon, if there is one, also after an error."""
        self._process.kill()
        with self._process:  # closes its pipes
            pass
        pid = self._path / "daemon" / "pid"
        with suppress(FileNotFoundError, ProcessLookupError, ValueError):
            os.kill(int(pid.read_text()), signal.SIGTERM)


def compare(beside: Path) -> None:
    """Runs both checkouts and prints the ratios."""
    if not (beside / "src" / "penstock").is_dir():
        sys.exit(f"benchmark: {beside} is not a checkout of Penstock")
    directory = disk_directory()
    print(f"{machine()}; {filesystem_of(directory)} in {directory.parent}", flush=True)
    checkouts = {"here": HERE, "beside": beside.resolve()}
    rows: list[tuple[str, ...]] = []
    targets: list[Target] = []
    try:
        for place, url in PLACES.items():
            for durability in DURABILITIES:
                title = f"{place}, {durability}"
                options = f"durability={durability}&interval_ms={INTERVAL_MS}"
                found = _race(checkouts, directory / title, url + options)
                for load, rates in found.items():
                    pairs = zip(rates["here"], rates["beside"], strict=True)
                    ratio = median(one / other for one, other in pairs)
                    figures = [f"{median(rates[name]):,.0f}" for name in checkouts]
                    rows.append((title, load.name, *figures, f"{ratio:.2f}"))
                    targets.append(Target(f"{title}: {load.name}", ratio, RATIO_MIN))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    head = ("", "messages a second", *checkouts, "here / beside")
    print_table(f"medians of {ROUNDS} rounds", head, rows)
    ratios = {target.name: target.value for target in targets}
    finish("durable-beside", targets, {"beside": str(beside), "ratios": ratios})


def _race(
    checkouts: dict[str, Path], directory: Path, url: str
) -> dict[StoreLoad, dict[str, list[float]]]:
    seconds = 0.05 if is_quick() else ROUND_S
    with ExitStack() as stack:
        running: dict[str, LoadProcess] = {}
        for name, checkout in checkouts.items():
            path = directory / name
            path.mkdir(parents=True)
            running[name] = LoadProcess(checkout, url.format(path=path), path)
            stack.callback(running[name].end)
        found = {}
        for load in LOADS:
            runs = {name: partial(each.run, load, seconds) for name, each in running.items()}
            for run in runs.values():
                run()
            found[load] = interleave(ROUNDS, runs)
        for each in running.values():
            each.close_and_check()
    return found
