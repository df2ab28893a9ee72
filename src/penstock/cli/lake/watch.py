"""`penstock pipeline run --watch`: the clean stop, audits, `--on-finding` and metrics.

The first round reads all that is there. From then on a query that goes on adds what comes, every so
often, and each round makes the tables of what was added. SIGTERM or Ctrl-C ends the wait between
two rounds at once, an ingest when its batch is committed, and anything else when it is complete; a
second Ctrl-C ends it at once. With `--on-finding`, each
round is audited, and if a check has more findings than after the round before, a command is run
with the findings as lines of JSON on its stdin. With `--metrics-port`, Prometheus reads how far the
lake is behind.

A round that fails because another process changes the lake, or because a disk is full, is repeated
at its next time: it has changed nothing, or is completed then.
"""

import ctypes
import dataclasses
import os
import signal
import subprocess
import threading
import time
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.cli.session import UsageError
from penstock.cli.values import read_count, read_duration, within
from penstock.output import report
from penstock.spark.session import require_packages

if TYPE_CHECKING:
    from penstock.spark.audit import Verdict
    from penstock.spark.bronze import Lag
    from penstock.spark.lake import Lake

# How long the command of --on-finding may run: the rounds wait for it.
COMMAND_TIMEOUT_S: Final = 600.0
_POLL_S: Final = 0.2
# The number of an option in malloc.h, and how many arenas the threads of a process share by it.
_M_ARENA_MAX: Final = -8
_ARENAS: Final = 2


class WatchStopped(Exception):
    """A signal asked for the end of the run."""


def add_watching(parser: ArgumentParser) -> None:
    """Adds the arguments of a run with --watch."""
    parser.add_argument("--watch", action="store_true", help="continue as the journals grow")
    parser.add_argument(
        "--every",
        metavar="DURATION",
        type=within(read_duration, "100ms", "30d"),
        default=30.0,
        help="with --watch: the time between two rounds (default: 30s)",
    )
    parser.add_argument(
        "--on-finding",
        metavar="COMMAND",
        help="with --watch: audit each round, and run this when a check has new findings, which "
        "it gets on stdin as lines of JSON",
    )
    parser.add_argument(
        "--metrics-port",
        metavar="PORT",
        type=within(read_count, "1", "65535"),
        help="with --watch: audit each round, and answer Prometheus on 127.0.0.1",
    )


def check_watching(arguments: Namespace) -> None:
    """Raises UsageError if an option that needs --watch is given without it.

    Raises SparkMissing if the package that metrics need is not installed.
    """
    for name in ("on_finding", "metrics_port"):
        if getattr(arguments, name) is not None and not arguments.watch:
            raise UsageError(f"--{name.replace('_', '-')}: needs --watch")
    if arguments.metrics_port is not None:
        require_packages("prometheus_client")


def share_freed_memory() -> None:
    """Has this process use again what threads that ended have freed.

    Each round starts new threads. Malloc has an arena for each of several threads, and Arrow's own
    allocator keeps memory of ended ones. An arena stays once it is there, and Arrow
    reads its setting once, so this is called before packages are imported that start threads.
    """
    # Libraries of C other than glibc have no arenas, and no such function.
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_ARENA_MAX, _ARENAS)
    # Not by `pyarrow.set_memory_pool`, which does not concern what Arrow allocates for itself.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")


class Watch:
    """The state of a run from round to round."""

    def __init__(self, arguments: Namespace) -> None:
        self.every_s = arguments.every
        self._command = arguments.on_finding
        self._counts: dict[str, int] = {}
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._metrics = None if arguments.metrics_port is None else _Metrics(arguments.metrics_port)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Watch":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._stop_by)
        return self

    def _stop_by(self, number: int, frame: object) -> None:
        if number == signal.SIGINT:
            # The next one ends the process at once.
            signal.signal(number, self._before[number])
        self._stop.set()
        self._wake.set()

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._metrics is not None:
            self._metrics.close()

    @property
    def audits(self) -> bool:
        """Whether each round is to be audited."""
        return self._command is not None or self._metrics is not None

    def wait(self) -> bool:
        """Waits for the next round, which `wake` begins early; False if there is to be none."""
        if not self._stop.is_set():
            self._wake.wait(self.every_s)
        self._wake.clear()
        return not self._stop.is_set()

    def wake(self) -> None:
        """Begins the next round."""
        self._wake.set()

    def check(self) -> None:
        """Raises WatchStopped if a signal asked for the end."""
        if self._stop.is_set():
            raise WatchStopped

    def show_failure(self, error: Exception) -> None:
        """Prints why a round failed that will be repeated, and counts it."""
        report(f"{' '.join(str(error).split())}; the next round repeats it")
        if self._metrics is not None:
            self._metrics.show_failure()

    def show_progress(self, lake: "Lake", lag: "Lag") -> None:
        """Updates the metrics of how far the lake is behind a journal, and of what came in."""
        if self._metrics is not None:
            from penstock.spark.bronze import events_table

            self._metrics.show_lag(lag)
            self._metrics.show_events(events_table(lake).rows())

    def end_round(self) -> None:
        """Begins the next round of the metrics."""
        if self._metrics is not None:
            self._metrics.end_round()

    def show_verdict(self, verdict: "Verdict") -> None:
        """Updates the metrics, and runs the command if a check has more findings than before."""
        if self._metrics is not None:
            self._metrics.show_verdict(verdict)
        more = [
            check for check, count in verdict.counts.items() if count > self._counts.get(check, 0)
        ]
        self._counts = dict(verdict.counts)
        if more and self._command is not None:
            found = [each for each in verdict.findings if each.check in more]
            lines = [msgspec.json.encode(dataclasses.asdict(each)) for each in found]
            self._run_command(b"\n".join(lines) + b"\n")

    def _run_command(self, given: bytes) -> None:
        """Runs the command; if it takes too long, or if the run is to end, it is killed."""
        command = subprocess.Popen(
            self._command, shell=True, stdin=subprocess.PIPE, start_new_session=True
        )
        end_s = time.monotonic() + COMMAND_TIMEOUT_S
        rest: bytes | None = given
        while True:
            try:
                command.communicate(rest, timeout=_POLL_S)
                break
            except subprocess.TimeoutExpired:
                # What is left of the input is kept by `communicate`.
                rest = None
                if self._stop.is_set() or time.monotonic() > end_s:
                    # The shell, and all that it has started.
                    os.killpg(command.pid, signal.SIGKILL)
        if command.returncode:
            report(f"--on-finding: ended with status {command.returncode}")


class _Metrics:
    """Figures for Prometheus, on a port of this machine only."""

    def __init__(self, port: int) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge

        from penstock.cli.metrics_page import MetricsPage

        registry = CollectorRegistry()

        def gauge(name: str, what: str, *labels: str) -> Gauge:
            return Gauge(f"penstock_lake_{name}", what, labels, registry=registry)

        self._bytes = gauge("behind_bytes", "Bytes of a journal that are not read yet.", "journal")
        self._seconds = gauge(
            "behind_seconds", "Seconds since all of a journal had been read.", "journal"
        )
        self._findings = gauge("findings", "Findings of the last audit.", "check")
        self._rate = gauge("events_per_second", "Events that came in since the round before.")
        self._events = Counter(
            "penstock_lake_events", "Events that came in since the start.", registry=registry
        )
        self._failures = Counter(
            "penstock_lake_failed_rounds", "Rounds that failed and are repeated.", registry=registry
        )
        self._started_s = time.monotonic()
        self._seen: int | None = None
        # How many events there were when the round before ended, and when that was.
        self._round = 0, self._started_s
        # Since when each journal has more than the lake; None if it has not.
        self._behind_since_s: dict[str, float | None] = {}
        try:
            self._page = MetricsPage(port, registry)
        except OSError as error:
            raise UsageError(f"--metrics-port: {port} cannot be used: {error.strerror}") from None

    def show_lag(self, lag: "Lag") -> None:
        """Updates the gauges of a journal; the seconds go on by themselves until the next call."""
        journal = lag.path
        if journal not in self._behind_since_s:
            # It was behind before this run began; since when is unknown.
            self._behind_since_s[journal] = self._started_s
            self._seconds.labels(journal).set_function(lambda: self._behind_s(journal))
        self._bytes.labels(journal).set(lag.behind_bytes)
        if not lag.behind_bytes:
            self._behind_since_s[journal] = None
        elif self._behind_since_s[journal] is None:
            self._behind_since_s[journal] = time.monotonic()

    def _behind_s(self, journal: str) -> float:
        since_s = self._behind_since_s[journal]
        return 0 if since_s is None else time.monotonic() - since_s

    def show_events(self, events: int) -> None:
        """Updates the count and the rate of events, of which the lake has so many now."""
        now_s = time.monotonic()
        if self._seen is None:
            self._seen, self._round = events, (events, self._started_s)
        self._events.inc(max(0, events - self._seen))
        self._seen = events
        begun, since_s = self._round
        self._rate.set(max(0, events - begun) / max(0.001, now_s - since_s))

    def end_round(self) -> None:
        """Begins the time over which the rate is measured anew."""
        self._round = self._seen or 0, time.monotonic()

    def show_failure(self) -> None:
        """Counts a round that failed."""
        self._failures.inc()

    def show_verdict(self, verdict: "Verdict") -> None:
        """Updates the gauges of findings."""
        for check, count in verdict.counts.items():
            self._findings.labels(check).set(count)

    def close(self) -> None:
        self._page.close()
