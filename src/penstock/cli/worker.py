"""`penstock worker MODULE:APP`: run the tasks of an app in worker processes."""

import asyncio
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from shutil import get_terminal_size
from threading import Timer
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.session import Session, UsageError
from penstock.cli.values import read_count, read_duration
from penstock.errors import AddressInUse, BackendLost
from penstock.output import overwrite_line, printable, report
from penstock.service import check_number
from penstock.url import store_url, without_password

if TYPE_CHECKING:
    from penstock.tasks.app import TaskApp
    from penstock.tasks.worker.options import WorkerOptions
    from penstock.tasks.worker.supervisor import Supervisor

_RETRY_S_MAX: Final = 2.0
# How long a store that does not answer at the start is waited for without a word.
_SILENT_S: Final = 3.0
_SLOW: Final = "does not answer yet; waiting, stop it with Ctrl-C"
_METRICS_HOST: Final = "127.0.0.1"


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_app(parser)
    numbers = (
        ("--processes", 1, "worker processes"),
        ("--threads", 8, "sync tasks at a time, in each process"),
        ("--coroutines", 100, "async tasks at a time, in each process"),
    )
    for flag, default, what in numbers:
        parser.add_argument(
            flag, type=read_count, default=default, metavar="N", help=f"{what} (default: {default})"
        )
    parser.add_argument(
        "--queues", metavar="A,B", help="work on these queues only (default: those of the tasks)"
    )
    parser.add_argument(
        "--visibility-timeout",
        type=read_duration,
        default=30.0,
        metavar="DURATION",
        help="if a process dies, its tasks run in another after this (default: 30s)",
    )
    parser.add_argument(
        "--max-tasks", type=read_count, metavar="N", help="replace a process after N tasks"
    )
    parser.add_argument(
        "--burst", action="store_true", help="end when no task is waiting; delayed ones stay"
    )
    parser.add_argument(
        "--reload",
        action="store_true",
        help="restart when a .py file below the current directory changes",
    )
    parser.add_argument(
        "--metrics-port",
        type=read_count,
        metavar="PORT",
        help=f"serve figures for Prometheus on {_METRICS_HOST}:PORT",
    )


def add_app(parser: ArgumentParser) -> None:
    """Adds the argument that names an app."""
    parser.add_argument("app", metavar="MODULE:APP", help="such as shop.tasks:app")


def run(session: Session, arguments: Namespace) -> int:
    """Works until SIGTERM or Ctrl-C. Raises UsageError, TaskError and the errors of the store."""
    # Imported here: other commands need none of it.
    from penstock.tasks.worker.options import (
        PROCESSES_MAX,
        WorkerOptions,
        check_abilities,
        check_reachable,
        load_app,
        queues_of,
    )
    from penstock.tasks.worker.supervisor import Supervisor

    session.refuse_option(
        arguments, "json", "a worker prints no result; --metrics-port serves figures"
    )
    if session.in_shell:
        raise UsageError("a worker cannot be started within a shell")
    named = tuple(name for name in (arguments.queues or "").split(",") if name)
    if arguments.queues is not None and not named:
        raise UsageError(f"--queues {arguments.queues!r} names no queue; give one or more: a,b")
    options = WorkerOptions(
        arguments.app,
        None if arguments.url is None else store_url(arguments.url),
        named,
        arguments.threads,
        arguments.coroutines,
        round(arguments.visibility_timeout * 1_000),
        arguments.max_tasks,
        arguments.burst,
    )
    options.check()
    if options.burst and (options.max_tasks is not None or arguments.reload):
        raise UsageError("--burst ends by itself: it goes with neither --max-tasks nor --reload")
    check_number("processes", arguments.processes, 1, PROCESSES_MAX)
    app = load_app(arguments.app)
    use_url(app, arguments)
    check_reachable(app)
    queues = queues_of(app, options)
    # Before the processes start, so that an unreachable store gives one line and not several.
    _wait_for_store(app, options)
    check_abilities(app)
    app.run_steps(_ask(queues[0]))
    app.close()
    watched = Path.cwd() if arguments.reload else None
    supervisor = Supervisor(options, arguments.processes, _report, watched)
    if arguments.metrics_port is not None:
        _serve_metrics(supervisor, arguments.metrics_port)
    _show_start(app, arguments, queues)
    line = _StatusLine(supervisor, arguments.app)
    asyncio.run(supervisor.run(line.show))
    line.end()
    return 0


def use_url(app: "TaskApp", arguments: Namespace) -> None:
    """Sets the app's store to that of --url, if it is given."""
    if arguments.url is not None:
        app.use_url(store_url(arguments.url))


def _wait_for_store(app: "TaskApp", options: "WorkerOptions") -> None:
    """Waits until the store answers, and says so; with --burst an outage is an error at once."""
    from penstock.service import ListQueues
    from penstock.tasks.worker.outages import REMINDER_S

    pause_s, reported_s = 0.1, -REMINDER_S
    # A client may try for long itself before it says that it could not connect.
    slow = Timer(_SILENT_S, _report, (f"{without_password(app.url)}: {_SLOW}",))
    slow.daemon = True
    if not options.burst:
        slow.start()
    while True:
        try:
            app.service.execute(ListQueues(limit=1))
            slow.cancel()
            return
        except BackendLost as error:
            slow.cancel()
            if options.burst:
                raise
            if time.monotonic() - reported_s >= REMINDER_S:
                reported_s = time.monotonic()
                _report(f"{error}; waiting until the store answers, stop it with Ctrl-C")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _RETRY_S_MAX)


def _ask(queue: str) -> Any:
    from penstock.tasks.commands import ensure_queue
    from penstock.tasks.names import TASK_QUEUE

    return ensure_queue(queue, TASK_QUEUE)


def _report(text: str) -> None:
    """Prints one line on stderr."""
    report(text, "penstock worker")


def _show_start(app: "TaskApp", arguments: Namespace, queues: tuple[str, ...]) -> None:
    count = _counted(arguments.processes, "process", "es")
    mine = [task for task in app.tasks.values() if task.options.queue in queues]
    tasks = _counted(len(mine), "task", "s")
    _report(
        f"{arguments.app} on {without_password(app.url)}: {tasks} of {', '.join(queues)}; "
        f"{count} of {arguments.threads} threads; stop it with Ctrl-C"
    )
    for queue in queues:
        if queue not in app.queues:
            _report(f"no task of {arguments.app} is declared for the queue {queue!r}")


def _counted(count: int, noun: str, plural: str) -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"


class _StatusLine:
    """A line on stderr that is kept up to date, if stderr is a terminal."""

    def __init__(self, supervisor: "Supervisor", name: str) -> None:
        self._supervisor = supervisor
        self._name = name
        self._is_shown = sys.stderr.isatty()
        self._before: tuple[float, int] = (time.monotonic(), 0)
        self._rate = 0.0

    def show(self) -> None:
        """Writes the line again."""
        if not self._is_shown:
            return
        counts = [*self._supervisor.tasks.values()]
        done = sum(each.done for each in counts)
        failed = sum(each.failed for each in counts)
        retried = sum(each.retried for each in counts)
        running, waiting = self._supervisor.held
        now_s, (then_s, then_done) = time.monotonic(), self._before
        if now_s - then_s >= 1:
            self._rate = (done - then_done) / (now_s - then_s)
            self._before = (now_s, done)
        text = (
            f"{self._name} · {_counted(self._supervisor.processes, 'process', 'es')} · "
            f"{running:,} running · {waiting:,} waiting · {done:,} done · {retried:,} retried · "
            f"{failed:,} failed · {self._rate:,.0f}/s"
        )
        # A line that wraps could not be overwritten.
        width = get_terminal_size().columns - 1
        overwrite_line(printable(text)[:width])

    def end(self) -> None:
        """Prints the last numbers as a line of their own."""
        counts = [*self._supervisor.tasks.values()]
        _report(
            f"stopped after {sum(each.done for each in counts):,} done, "
            f"{sum(each.retried for each in counts):,} retried, "
            f"{sum(each.failed for each in counts):,} failed"
        )


def _serve_metrics(supervisor: "Supervisor", port: int) -> None:
    from prometheus_client import CollectorRegistry

    from penstock.cli.metrics_page import MetricsPage

    check_number("metrics_port", port, 1, 65_535)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WorkerMetrics(supervisor))  # type: ignore[arg-type]
    try:
        MetricsPage(port, registry)
    except OSError as error:
        raise AddressInUse(
            f"metrics_port: cannot listen on {_METRICS_HOST}:{port}: {error.strerror}"
        ) from None


class WorkerMetrics:
    """A collector of the figures of all processes of a worker."""

    def __init__(self, supervisor: "Supervisor") -> None:
        self._supervisor = supervisor

    def collect(self) -> Iterator[object]:
        """The figures, one family after another; called by the registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        attempts = CounterMetricFamily(
            "penstock_task_attempts", "Attempts, by how they ended.", labels=["task", "outcome"]
        )
        seconds = CounterMetricFamily(
            "penstock_task_seconds", "Time that attempts took.", labels=["task"]
        )
        for name, counts in sorted(self._supervisor.tasks.items()):
            for outcome in ("done", "failed", "retried", "cancelled"):
                attempts.add_metric([name, outcome], getattr(counts, outcome))
            seconds.add_metric([name], counts.seconds)
        held = GaugeMetricFamily(
            "penstock_worker_tasks", "Tasks held by the worker, by state.", labels=["state"]
        )
        running, waiting = self._supervisor.held
        held.add_metric(["running"], running)
        held.add_metric(["waiting"], waiting)
        processes = GaugeMetricFamily("penstock_worker_processes", "Worker processes that run.")
        processes.add_metric([], self._supervisor.processes)
        restarts = CounterMetricFamily(
            "penstock_worker_restarts", "Worker processes that ended by themselves."
        )
        restarts.add_metric([], self._supervisor.restarts)
        yield from (attempts, seconds, held, processes, restarts)
