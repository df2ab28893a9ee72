"""Instructions that the SQS endpoint executes for a message: `make bench NAME=instructions`.

callgrind counts the instructions of a server under load; with `ARGS="--beside PATH"` also those of
another checkout. Where the speed of the machine changes from minute to minute, this still shows a
difference of one part in a hundred. It is no time: tight loops and waiting for memory weigh
differently.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from benchmarks.harness import (
    Target,
    Void,
    disk_directory,
    finish,
    install_package,
    is_quick,
    machine,
    print_table,
    run_benchmark,
)
from benchmarks.sqs_beside import CONNECTIONS, HERE, RATIO_MIN, STORES, WORKS
from benchmarks.sqs_load import Work, run_wrk
from benchmarks.sqs_servers import Kind, PeerServer, penstock_command

COUNTED_S = 8
# callgrind takes some fifty times as long, and no request is to be taken for a slow one.
_START = """
import runpy, sys
try:
    from penstock.backends import scheduler
    from penstock.server import http
    scheduler.SLOW_S = http.SLOW_S = 3600
except ImportError:
    from penstock.server import turns  # an older checkout
    turns.SLOW_S = 3600
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def main() -> None:
    """Counts for this checkout."""
    report({"here": HERE})


def compare(beside: Path) -> None:
    """Counts for this checkout and another, and prints the ratios."""
    if not (beside / "src" / "penstock").is_dir():
        sys.exit(f"benchmark: {beside} is not a checkout of Penstock")
    report({"here": HERE, "beside": beside.resolve()})


def report(checkouts: Mapping[str, Path]) -> None:
    """Counts, prints a table for each store and kind of work, and checks the ratios."""
    for program in ("wrk", "valgrind"):
        if not install_package(program, program):
            sys.exit(f"benchmark: there is no {program}, and the package cannot be installed")
    print(machine(), flush=True)
    directory = disk_directory()
    targets: list[Target] = []
    figures: dict[str, dict[str, float]] = {}
    try:
        for label, store in STORES.items():
            found = {
                name: _count(f"{label}, {name}", checkout, store, directory / label / name)
                for name, checkout in checkouts.items()
            }
            for work in WORKS:
                title = f"{label}: {work}"
                counts = {name: each[work] for name, each in found.items()}
                rows = [(name, f"{count:,.0f}") for name, count in counts.items()]
                print_table(title, ("", "instructions a message"), rows)
                figures[title] = counts
                if "beside" in counts:
                    ratio = counts["beside"] / counts["here"]
                    targets.append(Target(f"{title}, beside / here", ratio, RATIO_MIN))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    finish("instructions", targets, {"instructions": figures})


def _count(name: str, checkout: Path, store: str, directory: Path) -> dict[Work, float]:
    """Instructions a message of each kind of work, on a server of its own."""
    seconds = 1 if is_quick() else COUNTED_S
    server = PeerServer(name, directory, Kind(partial(_command, checkout, store)))
    try:
        url = server.create_queue("bench")
        for work in WORKS:  # the first calls import modules and fill caches
            run_wrk(server, url, work, CONNECTIONS, 1)
        found: dict[Work, float] = {}
        for number, work in enumerate(WORKS, 1):
            _control(server, "-i", "on")
            cell = run_wrk(server, url, work, CONNECTIONS, seconds)
            _control(server, "-d")
            _control(server, "-i", "off")
            found[work] = _collected(directory / f"counted.{number}") / (cell.per_s * seconds)
        return found
    finally:
        server.stop()


def _control(server: PeerServer, *arguments: str) -> None:
    command = ["callgrind_control", *arguments, str(server.process_id)]
    subprocess.run(command, capture_output=True, check=True)


def _collected(path: Path) -> int:
    totals = re.search(r"^totals: (\d+)", path.read_text(errors="replace"), re.MULTILINE)
    if totals is None or totals[1] == "0":
        raise Void(f"callgrind counted nothing in {path.name}")
    return int(totals[1])


def _command(
    checkout: Path, store: str, port: int, directory: Path
) -> tuple[list[str], dict[str, str]]:
    command, environment = penstock_command(port, store.format(directory=directory))
    counting = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--log-file=/dev/null"]
    counting.append(f"--callgrind-out-file={directory}/counted")
    paths = {"PYTHONPATH": str(checkout / "src")}
    return [*counting, sys.executable, "-c", _START, *command], {**environment, **paths}


if __name__ == "__main__":
    run_benchmark(main, compare)
