"""The SQS endpoint of this checkout beside that of another: `ARGS="--beside PATH"`.

Both servers run at once and get the same load in turn, in rounds whose order alternates. They are
started several times, because the addresses of its memory make a process up to a tenth faster or
slower than another one of the same program. On a machine with other load, compare the processor
time of a request rather than the rate.
"""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.harness import (
    Target,
    disk_directory,
    filesystem_of,
    finish,
    install_package,
    is_quick,
    machine,
    print_table,
)
from benchmarks.sqs_load import QueueEmptied, Work, run_wrk
from benchmarks.sqs_servers import DURABLE, MEMORY, Kind, PeerServer, penstock_command

STARTS = 6
ROUNDS = 2
ROUND_S = 2
CONNECTIONS = 32
RATIO_MIN = 0.97
WORKS = (Work("send", 1), Work("receive", 1))
STORES = {MEMORY: "memory:", DURABLE: "file:{directory}/data"}
HERE = Path(__file__).parents[1]


class Round(NamedTuple):
    """The figures of one server in one round."""

    per_s: float
    cpu_us: float


class CheckoutServer:
    """The server of one checkout, with one queue."""

    def __init__(self, name: str, checkout: Path, store: str, directory: Path) -> None:
        kind = Kind(partial(_command, checkout, store))
        self.server = PeerServer(name, directory, kind)
        self._queue_url = self.server.create_queue("bench")

    def run(self, work: Work, seconds: int) -> Round:
        """Loads the server for `seconds`; if the queue becomes empty, fills it and repeats."""
        while True:
            before_s = self.server.cpu_s
            try:
                cell = run_wrk(self.server, self._queue_url, work, CONNECTIONS, seconds)
            except QueueEmptied:
                run_wrk(self.server, self._queue_url, Work("send", 10), CONNECTIONS, seconds)
                continue
            cpu_s = self.server.cpu_s - before_s
            return Round(cell.per_s, cpu_s / (cell.per_s * seconds) * 1e6)


def _command(
    checkout: Path, store: str, port: int, directory: Path
) -> tuple[list[str], dict[str, str]]:
    command, environment = penstock_command(port, store.format(directory=directory))
    return command, {**environment, "PYTHONPATH": str(checkout / "src")}


def _nothing(name: str, server: PeerServer) -> AbstractContextManager[object]:
    return nullcontext()


def compare(beside: Path) -> None:
    """Runs both checkouts and prints the ratios."""
    if not (beside / "src" / "penstock").is_dir():
        sys.exit(f"benchmark: {beside} is not a checkout of Penstock")
    race("sqs-beside", {"here": HERE, "beside": beside.resolve()}, {"beside": str(beside)})


def race(
    bench: str,
    checkouts: dict[str, Path],
    more: dict[str, str],
    opened: Callable[[str, PeerServer], AbstractContextManager[object]] = _nothing,
) -> None:
    """Runs the servers `here` and `beside`, each in a context of `opened`; prints the ratios."""
    if not install_package("wrk", "wrk"):
        sys.exit("benchmark: there is no wrk, and the Debian package cannot be installed")
    starts, rounds = (1, 1) if is_quick() else (STARTS, ROUNDS)
    directory = disk_directory()
    print(f"{machine()}; {filesystem_of(directory)} in {directory.parent}", flush=True)
    targets: list[Target] = []
    figures: dict[str, dict[str, float]] = {}
    try:
        for label, store in STORES.items():
            found: dict[tuple[Work, str], list[Round]] = {}
            for start in range(starts):
                place = directory / f"{label.split()[-1]}-{start}"
                for work, name, result in _run_once(label, store, checkouts, place, rounds, opened):
                    found.setdefault((work, name), []).append(result)
            for work in WORKS:
                here, other = found[work, "here"], found[work, "beside"]
                targets += _report(f"{label}: {work}", here, other, figures)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    finish(bench, targets, {**more, "medians": figures})


def _run_once(
    label: str,
    store: str,
    checkouts: dict[str, Path],
    place: Path,
    rounds: int,
    opened: Callable[[str, PeerServer], AbstractContextManager[object]],
) -> Iterator[tuple[Work, str, Round]]:
    """Starts both servers, warms them up, and runs the rounds."""
    seconds = 1 if is_quick() else ROUND_S
    with ExitStack() as stack:
        servers = {}
        for name, checkout in checkouts.items():
            servers[name] = CheckoutServer(f"{label}, {name}", checkout, store, place / name)
            stack.callback(servers[name].server.stop)
            stack.enter_context(opened(name, servers[name].server))
        for number in range(rounds + 1):
            order = list(servers) if number % 2 else list(servers)[::-1]
            for work in WORKS:
                for name in order:
                    result = servers[name].run(work, seconds)
                    if number:  # the first round warms up
                        yield work, name, result
    shutil.rmtree(place, ignore_errors=True)


def _report(
    title: str, here: list[Round], other: list[Round], figures: dict[str, dict[str, float]]
) -> list[Target]:
    rates = median(each.per_s for each in here), median(each.per_s for each in other)
    cpus = median(each.cpu_us for each in here), median(each.cpu_us for each in other)
    rows = [
        (name, f"{rate:,.0f}", f"{cpu:.1f}")
        for name, rate, cpu in zip(("here", "beside"), rates, cpus, strict=True)
    ]
    print_table(title, ("", "messages a second", "processor µs a message"), rows)
    # Ratios within a round: noise mostly affects both runs of a round.
    pairs = list(zip(here, other, strict=True))
    per_s = median(one.per_s / two.per_s for one, two in pairs)
    cpu = median(two.cpu_us / one.cpu_us for one, two in pairs)
    figures[title] = {"here": rates[0], "beside": rates[1], "rate": per_s, "processor": cpu}
    return [
        Target(f"{title}: rate, here / beside", per_s, RATIO_MIN),
        Target(f"{title}: processor time, beside / here", cpu, RATIO_MIN),
    ]
