"""What every benchmark uses: interleaved rounds, a ledger, ratios, and the JSON line at the end.

The rules that make figures comparable:

- Each contestant runs in a child process of its own: its garbage collection delays no other.
- Rounds are interleaved, one contestant after the other, so that noise affects all equally.
  A ratio is the median of the ratios within each round, not a ratio of two medians.
- A run that loses, duplicates or adds a message is void: no figure is printed.
- Only the loop is timed; ids are stored in preallocated lists and checked afterwards.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, ParamSpec, TypeVar

from penstock.cli.show import table

# Outside of the tree, so that a clean checkout does not install them again.
PEERS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock-peers"
CALIBRATE_S = 0.05
# Set in the environment of a quick run.
_QUICK = "BENCHMARK_QUICK"

P = ParamSpec("P")
R = TypeVar("R")


class Void(Exception):
    """The run lost, duplicated or added a message, so its figures are invalid."""


class Target(NamedTuple):
    """A figure and its goal."""

    name: str
    value: float
    goal: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        """Whether the figure reaches the goal."""
        return self.value >= self.goal if self.at_least else self.value <= self.goal


class Child:
    """A process of its own in which one contestant runs; it keeps its globals between calls."""

    def __init__(self, peer: str | None = None) -> None:
        path = str(PEERS / peer) if peer else None
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), _add_peer, (path,))

    def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs a top-level function of a module in the child and returns its result."""
        return self._pool.submit(function, *args, **kwargs).result()

    def close(self) -> None:
        """Ends the process."""
        self._pool.shutdown()


def _add_peer(path: str | None) -> None:
    if path is not None:
        sys.path.insert(0, path)


def install_peer(name: str, requirements: Sequence[str]) -> None:
    """Installs a peer's packages into a directory of their own, once; ends the run if it cannot."""
    lack = peer_lack(name, requirements)
    if lack:
        sys.exit(f"benchmark: {lack}")


def peer_lack(name: str, requirements: Sequence[str], npm: bool = False) -> str:
    """Installs a peer from PyPI or npm, once; returns the reason if that fails, else ""."""
    if is_quick():
        return "not part of a quick run"
    where = PEERS / name
    if npm:
        wanted = " ".join(requirements)
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(where)]
    else:
        wanted = f"{sys.version_info[:2]} {' '.join(requirements)}"
        command = [sys.executable, "-m", "pip", "install", "--quiet"]
        command += ["--disable-pip-version-check", "--target", str(where)]
    stamp = PEERS / f"{name}.installed"
    if stamp.is_file() and stamp.read_text() == wanted:
        return ""
    if shutil.which(command[0]) is None:
        return f"cannot install {name}: there is no {command[0]}"
    print(f"installing {', '.join(requirements)} for comparison", flush=True)
    # The directory holds another version, or an incomplete one.
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
    done = subprocess.run([*command, *requirements], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"cannot install {name}: {done.stderr.strip()[-500:]}"
    stamp.write_text(wanted)
    return ""


def peer_version(name: str, package: str) -> str:
    """The version of a package that was installed for a peer."""
    module = PEERS / name / "node_modules" / package / "package.json"
    if module.is_file():
        return str(json.loads(module.read_text())["version"])
    prefix = package.replace("-", "_")
    (found,) = (PEERS / name).glob(f"{prefix}-*.dist-info")
    return found.name.removeprefix(f"{prefix}-").removesuffix(".dist-info")


def install_package(package: str, program: str) -> bool:
    """Installs a Debian package if its program is missing; returns False if that fails."""
    if shutil.which(program) is None:
        print(f"installing {package} for comparison", flush=True)
        root = Path(__file__).parent.parent
        script = f". {root}/tools/apt.sh && apt_install {package}"
        subprocess.run(["bash", "-c", script], capture_output=True, check=False)
    return shutil.which(program) is not None


def count_for(seconds: float, run: Callable[[int], float], start: int = 50) -> int:
    """The count with which `run` takes about `seconds`; `run(count)` returns its seconds."""
    if is_quick():
        return start
    count = start
    while (took_s := run(count)) < CALIBRATE_S:
        count *= 4
    return max(1, round(count * seconds / took_s))


def interleave(rounds: int, runs: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Runs every contestant once in each round; returns the results of each, round by round.

    Every other round runs in reverse order, so that none always follows the same other one.
    """
    figures: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(1 if is_quick() else rounds):
        order = list(runs.items())
        for name, run in order if number % 2 == 0 else reversed(order):
            figures[name].append(run())
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return figures


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median, over the rounds, of one contestant's figure divided by another's."""
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def percentile(sorted_values: Sequence[float], percent: float) -> float:
    """The value that this percentage of the values does not exceed."""
    index = round(len(sorted_values) * percent / 100)
    return sorted_values[min(len(sorted_values) - 1, index)]


def timed_in_threads(count: int, body: Callable[[int], None]) -> float:
    """Runs `body(number)` in `count` threads at once; returns the seconds until all have ended.

    Raises the exception of a thread that failed.
    """
    if count == 1:
        start_s = time.perf_counter()
        body(0)
        return time.perf_counter() - start_s
    errors: list[BaseException] = []
    ready = threading.Barrier(count + 1)

    def run(number: int) -> None:
        ready.wait()
        try:
            body(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    ready.wait()
    start_s = time.perf_counter()
    for thread in threads:
        thread.join()
    took_s = time.perf_counter() - start_s
    if errors:
        raise errors[0]
    return took_s


def check_ledger(pushed: Iterable[Any], pulled: Iterable[Any]) -> None:
    """Checks that each id pushed was pulled exactly once, and no other. Raises Void."""
    pushed_ids, pulled_ids = Counter(pushed), Counter(pulled)
    if pushed_ids == pulled_ids and set(pushed_ids.values()) <= {1} and None not in pushed_ids:
        return
    lost = (pushed_ids - pulled_ids).total()
    extra = (pulled_ids - pushed_ids).total()
    raise Void(
        f"of {pushed_ids.total()} messages pushed, {lost} were never pulled, and {extra} were "
        "pulled twice or never pushed"
    )


def check_deletes(answers: Iterable[Any]) -> None:
    """Checks that every delete succeeded. Raises Void."""
    failed = [answer for answer in answers if answer is not True]
    if failed:
        raise Void(f"{len(failed)} deletes deleted nothing; the first answered {failed[0]!r}")


def rss_bytes(kind: str = "VmRSS", pid: int | None = None) -> int:
    """The resident memory of a process, by default this one; `RssAnon` is without mapped files."""
    for line in Path(f"/proc/{pid or 'self'}/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc has no {kind}")


def written_bytes(pid: int | None = None) -> int:
    """Bytes that a process, by default this one, has written to the disk so far."""
    for line in Path(f"/proc/{pid or 'self'}/io").read_text().splitlines():
        if line.startswith("write_bytes:"):
            return int(line.split()[1])
    raise RuntimeError("/proc has no write_bytes")


def filesystem_of(path: Path, mounts: str | None = None) -> str:
    """The kind of filesystem of a directory: ext4, tmpfs, …"""
    found, kind = Path("/"), "unknown"
    for line in (mounts or Path("/proc/self/mounts").read_text()).splitlines():
        _, at, this_kind = line.split()[:3]
        mounted = Path(at.encode().decode("unicode_escape"))
        if path.resolve().is_relative_to(mounted) and mounted.is_relative_to(found):
            found, kind = mounted, this_kind
    return kind


def disk_directory() -> Path:
    """A new directory on a real disk, which the caller removes; ends the run if there is none."""
    for above in (Path(tempfile.gettempdir()), Path(__file__).parent):
        if filesystem_of(above) not in ("tmpfs", "ramfs", "unknown"):
            return Path(tempfile.mkdtemp(prefix="penstock-bench-", dir=above))
    sys.exit("benchmark: the temporary directory is in memory; set TMPDIR to one on a disk")


def machine() -> str:
    """One line about the machine and its load."""
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    return f"Python {platform.python_version()}, {cores} cores, {model}, load {load:.1f}"


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table for people."""
    print(f"\n{title}")
    print(table(head, rows))


def finish(bench: str, targets: Sequence[Target], figures: Mapping[str, Any]) -> None:
    """Prints the targets for people, and everything as one JSON object on the last line."""
    rows = [
        (
            target.name,
            f"{target.value:.3g}",
            f"{'≥' if target.at_least else '≤'} {target.goal:g}",
            "met" if target.met else "NOT MET",
        )
        for target in targets
    ]
    print_table("targets", ("target", "value", "goal", ""), rows)
    shown_targets = [
        {
            "name": target.name,
            "value": round(target.value, 4),
            "goal": target.goal,
            "met": target.met,
        }
        for target in targets
    ]
    print(json.dumps({"bench": bench, "targets": shown_targets, **figures}), flush=True)


def is_quick() -> bool:
    """Whether this run only checks that the benchmark works; its figures are invalid."""
    return os.environ.get(_QUICK) == "1"


def run_benchmark(
    main: Callable[[], None],
    compare: Callable[[Path], None] | None = None,
    has_options: bool = False,
) -> None:
    """Runs a benchmark; a void run prints the reason and ends with status 1.

    `compare` is run instead if another checkout is given. With `has_options` the benchmark parses
    the other words from sys.argv itself; without, they are refused before anything is measured.
    """
    parser = argparse.ArgumentParser(prog="make bench NAME=… ARGS=…", add_help=not has_options)
    parser.add_argument(
        "--quick", action="store_true", help="one short round without others; no figures to quote"
    )
    if compare is not None:
        parser.add_argument(
            "--beside", type=Path, metavar="CHECKOUT", help="compare with another checkout only"
        )
    given, sys.argv[1:] = parser.parse_known_args()
    if sys.argv[1:] and not has_options:
        parser.error(f"unrecognized arguments: {' '.join(sys.argv[1:])}")
    if given.quick:
        # In the environment, so that child processes of the benchmark have it, too.
        os.environ[_QUICK] = "1"
    # A benchmark that is terminated still stops the servers that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if compare is not None and given.beside is not None:
            compare(given.beside)
        else:
            main()
    except Void as void:
        sys.exit(f"benchmark: VOID: {void}")
    except KeyboardInterrupt:
        sys.exit(130)
