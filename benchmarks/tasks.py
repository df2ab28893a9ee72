"""Tasks beside dramatiq, RQ, huey, arq, Celery and taskiq: `make bench NAME=tasks`.

All use one redis-server and one worker process each, with the settings that their documentation
recommends for speed. The calls are enqueued first; then the worker is started, and the time from
the first call that runs to the last is measured, without its start. A ledger counts the runs of
each call: a run that loses a call, or runs one twice, is void. The slower queues get fewer calls.
Each peer is installed into a directory of its own; one that cannot be is an error.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from benchmarks.harness import (
    PEERS,
    Child,
    Target,
    Void,
    finish,
    install_package,
    interleave,
    is_quick,
    machine,
    peer_lack,
    percentile,
    print_table,
    ratio,
    run_benchmark,
)
from benchmarks.task_apps.ledger import LEDGER, REDIS, CallLedger, make_ledger

ROOT = Path(__file__).parent.parent
ROUNDS = 3
TIMEOUT_S = 300.0
NOTHING = 20_000
SLEEPS = 2_000
SLEEP_S = 0.01
ENQUEUE = 10_000
MANY = 100_000
TIMED = 1_000
TIMED_S = 5.0
_REDIS: Final = "redis[hiredis]>=5.2,<8"
PARTS: Final = ("nothing", "sleep_10ms", "enqueue", "delayed")


class TaskPeer(NamedTuple):
    """A task queue: its module, and the commands of its worker for short and for waiting tasks."""

    name: str
    package: str
    nothing: Sequence[str]
    sleep_10ms: Sequence[str]
    # What is installed into its directory; nothing for Penstock, which is there.
    requirements: Sequence[str] = ()
    share: float = 1.0

    @property
    def directory(self) -> str | None:
        """The name of the directory with its packages, if it has one."""
        return self.package if self.requirements else None

    @property
    def module(self) -> str:
        """The module of its tasks."""
        return f"benchmarks.task_apps.{self.package}_app"


def _peers() -> list[TaskPeer]:
    penstock = ["penstock", "worker", "benchmarks.task_apps.penstock_app:app"]
    dramatiq = ["dramatiq", "benchmarks.task_apps.dramatiq_app", "--processes", "1", "--threads"]
    rq = ["rq", "worker", "--worker-class", "rq.worker.SimpleWorker", "--logging_level", "ERROR"]
    huey = ["huey_consumer", "benchmarks.task_apps.huey_app.huey", "-k", "thread", "-q", "-w"]
    arq = ["arq", "benchmarks.task_apps.arq_app.WorkerSettings"]
    celery = ["celery", "-A", "benchmarks.task_apps.celery_app", "worker", "-l", "ERROR"]
    celery += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    taskiq = ["taskiq", "worker", "benchmarks.task_apps.taskiq_app:broker", "--workers", "1"]
    taskiq += ["--max-async-tasks", "100", "--log-level", "ERROR"]
    return [
        TaskPeer("penstock", "penstock", penstock, penstock),
        TaskPeer(
            "dramatiq",
            "dramatiq",
            [*dramatiq, "8"],
            [*dramatiq, "100"],
            ["dramatiq[redis]>=1.17,<3"],
        ),
        TaskPeer(
            "taskiq", "taskiq", taskiq, taskiq, ["taskiq>=0.11,<1", "taskiq-redis>=1,<2"], share=0.5
        ),
        TaskPeer("arq", "arq", arq, arq, ["arq>=0.26,<1"], share=0.5),
        TaskPeer("huey", "huey", [*huey, "8"], [*huey, "100"], ["huey>=2.5,<4", _REDIS]),
        TaskPeer(
            "celery",
            "celery",
            [*celery, "-P", "solo"],
            [*celery, "-P", "threads", "-c", "100"],
            ["celery>=5.5,<6", "redis[hiredis]>=6.1,<7"],
            share=0.25,
        ),
        TaskPeer("rq", "rq", rq, rq, ["rq>=2,<3", _REDIS], share=0.05),
    ]


class TaskBench:
    """One redis-server and one ledger, for all rounds of all contestants."""

    def __init__(self, directory: Path, port: int) -> None:
        self.url = f"redis://127.0.0.1:{port}/0"
        self.path = directory / "ledger"
        self.environment = {
            **os.environ,
            LEDGER: str(self.path),
            REDIS: self.url,
            "RQ_REDIS_URL": self.url,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        os.environ.update({LEDGER: str(self.path), REDIS: self.url})

    def environment_of(self, peer: TaskPeer) -> dict[str, str]:
        """The environment of a peer's worker."""
        if peer.directory is None:
            return self.environment
        packages = PEERS / peer.directory
        return {
            **self.environment,
            "PYTHONPATH": os.pathsep.join([str(packages), self.environment["PYTHONPATH"]]),
            "PATH": os.pathsep.join([str(packages / "bin"), self.environment["PATH"]]),
        }

    def lack_of(self, peer: TaskPeer) -> str:
        """The reason why a peer is not available; empty if it is."""
        lack = peer_lack(peer.package, peer.requirements) if peer.requirements else ""
        if lack:
            return lack
        self.clear(1)
        try:
            self.call(peer, "enqueue", "nothing", range(1))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def clear(self, size: int) -> CallLedger:
        """Empties the store; returns a new ledger for `size` calls."""
        import redis

        redis.Redis.from_url(self.url).flushall()
        return make_ledger(self.path, size)

    def call(self, peer: TaskPeer, function: str, *arguments: Any) -> float:
        """Calls a function of the peer's module in a process of its own; the seconds it took."""
        child = Child(peer.directory)
        try:
            return child.call(timed_call, peer.module, function, arguments)
        finally:
            child.close()

    def run(self, peer: TaskPeer, task: str, count: int) -> float:
        """Calls a second that one worker process runs. Raises Void."""
        ledger = self.clear(count)
        self.call(peer, "enqueue", task, range(count))
        command = peer.nothing if task == "nothing" else peer.sleep_10ms
        worker = subprocess.Popen(
            command,
            env=self.environment_of(peer),
            cwd=self.path.parent,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return count / _timed_run(
                ledger, count, worker, SLEEP_S if task == "sleep_10ms" else 0.0
            )
        finally:
            _end(worker)
            if ledger.missing(count) or ledger.repeated(count):
                raise Void(f"{peer.name}: {ledger.repeated(count)} calls ran more than once")

    def enqueue(self, peer: TaskPeer, function: str, count: int) -> float:
        """Calls a second that one process enqueues."""
        self.clear(count)
        child = Child(peer.directory)
        try:
            # Connecting is not part of the rate.
            child.call(timed_call, peer.module, function, ("nothing", range(1)))
            return count / child.call(timed_call, peer.module, function, ("nothing", range(count)))
        finally:
            child.close()

    def lateness_ms(self, peer: TaskPeer, count: int) -> list[int]:
        """How late delayed calls run, sorted."""
        ledger = self.clear(2 * count)
        worker = subprocess.Popen(
            peer.nothing, env=self.environment, start_new_session=True, stderr=subprocess.DEVNULL
        )
        try:
            # The worker has started when it has run a first call.
            self.call(peer, "enqueue_timed", 1, 0.0, 0.0)
            _wait_for(ledger, 1)
            ledger.clear()
            self.call(peer, "enqueue_timed", count, 2.0, 0.2 if is_quick() else TIMED_S)
            late_ms = _wait_for(ledger, count)
        finally:
            _end(worker)
        if len(late_ms) != count:
            raise Void(f"{len(late_ms)} of {count} delayed calls ran")
        return late_ms


def _end(worker: "subprocess.Popen[bytes]") -> None:
    os.killpg(worker.pid, signal.SIGTERM)
    try:
        worker.wait(3)
    except subprocess.TimeoutExpired:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()


def _wait_for(ledger: CallLedger, count: int) -> list[int]:
    """How late the calls ran, once `count` have run or after the time limit."""
    end_s = time.monotonic() + TIMEOUT_S
    while len(ledger.late_ms()) < count and time.monotonic() < end_s:
        time.sleep(0.1)
    return ledger.late_ms()


def timed_call(module: str, function: str, arguments: Sequence[Any]) -> float:
    """Seconds that a function of a module takes; its import does not count."""
    call: Callable[..., None] = getattr(import_module(module), function)
    start_s = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start_s


def _timed_run(
    ledger: CallLedger, count: int, worker: "subprocess.Popen[bytes]", each_s: float
) -> float:
    """Seconds from the beginning of the first call, which takes `each_s`, to the last one's end."""
    end_s = time.monotonic() + TIMEOUT_S
    while ledger.missing(count) == count:
        _check(worker, end_s)
        time.sleep(0.001)
    done = count - ledger.missing(count)
    start_s = time.perf_counter() - each_s
    while ledger.missing(count):
        _check(worker, end_s)
        time.sleep(0.002)
    took_s = time.perf_counter() - start_s
    # Calls that had ended at the first check are not in the measured time.
    return took_s if each_s or done == count else took_s * count / (count - done)


def _check(worker: "subprocess.Popen[bytes]", end_s: float) -> None:
    if worker.poll() is not None:
        raise Void(f"a worker ended with status {worker.returncode}")
    if time.monotonic() > end_s:
        raise Void(f"the calls did not run within {TIMEOUT_S:g} s")


@contextmanager
def redis_server(directory: Path) -> Iterator[int]:
    """A redis-server without persistence, at a free port."""
    import socket

    if not install_package("redis-server", "redis-server"):
        sys.exit("benchmark: there is no redis-server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--save", "", "--appendonly", "no"]
    server = subprocess.Popen(
        [*command, "--bind", "127.0.0.1", "--dir", str(directory)], stdout=subprocess.DEVNULL
    )
    try:
        end_s = time.monotonic() + 10
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if time.monotonic() > end_s:
                sys.exit("benchmark: redis-server does not answer")
            time.sleep(0.01)
        yield port
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    """Runs everything and prints it."""
    parser = argparse.ArgumentParser(prog="make bench NAME=tasks")
    parser.add_argument("--only", metavar="A,B", help="these contestants only")
    parser.add_argument("--parts", metavar="A,B", default=",".join(PARTS), help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--scale", type=float, default=1.0, help="part of the usual counts")
    given = parser.parse_args()
    line = machine()
    print(line)
    scale = 0.005 if is_quick() else given.scale
    only = given.only.split(",") if given.only else (["penstock"] if is_quick() else None)
    peers = [peer for peer in _peers() if only is None or peer.name in only]
    if unknown := sorted({*(only or ())}.difference(peer.name for peer in peers)):
        parser.error(f"--only: {unknown[0]!r} is none of {', '.join(e.name for e in _peers())}")
    directory = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        with redis_server(directory) as port:
            bench = TaskBench(directory, port)
            for peer in peers:
                lack = bench.lack_of(peer)
                if lack:
                    sys.exit(f"benchmark: {peer.name}: {lack}; --only names those to compare")
            _compare(bench, peers, given.parts.split(","), given.rounds, scale, line)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _compare(
    bench: TaskBench, peers: list[TaskPeer], parts: list[str], rounds: int, scale: float, line: str
) -> None:
    figures: dict[str, dict[str, list[float]]] = {}
    for part in parts:
        if part in ("nothing", "sleep_10ms", "enqueue"):
            figures[part] = interleave(rounds, _runs(bench, peers, part, scale))
    for title, rates in figures.items():
        rows = [
            (name, f"{median(values):,.0f}", f"{min(values):,.0f}", f"{max(values):,.0f}")
            for name, values in rates.items()
        ]
        print_table(f"{title}: calls a second", ("", "median", "lowest", "highest"), rows)
    targets = [*_targets(figures)]
    if "delayed" in parts:
        late_ms = bench.lateness_ms(peers[0], max(50, round(TIMED * scale)))
        p99_ms = percentile(late_ms, 99)
        print(f"\ndelayed calls run {percentile(late_ms, 50)} ms late (median), {p99_ms} ms (p99)")
        targets.append(Target("delayed calls, p99, ms", p99_ms, 100, at_least=False))
    medians = {
        title: {name: round(median(values), 1) for name, values in rates.items()}
        for title, rates in figures.items()
    }
    finish("tasks", targets, {"machine": line, "rates_per_s": medians})


def _runs(
    bench: TaskBench, peers: list[TaskPeer], part: str, scale: float
) -> dict[str, Callable[[], float]]:
    """What each contestant does in a round."""
    if part != "enqueue":
        count = NOTHING if part == "nothing" else SLEEPS
        return {
            peer.name: _run(bench.run, peer, part, max(50, round(count * scale * peer.share)))
            for peer in peers
        }
    runs = {
        peer.name: _run(
            bench.enqueue, peer, "enqueue", max(50, round(ENQUEUE * scale * max(0.2, peer.share)))
        )
        for peer in peers
    }
    bare = max(50, round(ENQUEUE * scale))
    # What is the limit: our script without our client, and a round trip without our script.
    runs["penstock's bytes, bare socket"] = _run(bench.enqueue, peers[0], "enqueue_bare", bare)
    runs["penstock's body, bare LPUSH"] = _run(bench.enqueue, peers[0], "enqueue_lpush", bare)
    many = max(50, round(MANY * scale))
    runs["penstock, push_many"] = _run(bench.enqueue, peers[0], "enqueue_many", many)
    return runs


def _run(call: Callable[..., float], *arguments: Any) -> Callable[[], float]:
    return lambda: call(*arguments)


def _targets(figures: dict[str, dict[str, list[float]]]) -> Iterator[Target]:
    for title, rates in figures.items():
        others = {name: values for name, values in rates.items() if "penstock" not in name}
        if not others:
            continue
        fastest = max(others, key=lambda name: median(others[name]))
        yield Target(f"{title} / {fastest}", ratio(rates["penstock"], others[fastest]), 1.5)
        if title == "enqueue":
            many = ratio(rates["penstock, push_many"], others[fastest])
            yield Target(f"push_many / {fastest}", many, 10)


if __name__ == "__main__":
    run_benchmark(main, has_options=True)
