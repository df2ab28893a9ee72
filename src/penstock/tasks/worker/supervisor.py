"""The parent of the worker processes: starts, watches, restarts, reloads and stops them."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from penstock.tasks.worker.counts import TaskCounts, WorkerStatus
from penstock.tasks.worker.endings import ending_of
from penstock.tasks.worker.options import WorkerOptions

# After a process that ended with an error before this time, the next start is delayed, each time
# for longer.
EARLY_END_S: Final = 5.0
PAUSE_S_MAX: Final = 30.0
TICK_S: Final = 0.25
WATCH_S: Final = 0.5
_NOT_WATCHED: Final = frozenset({"node_modules", "__pycache__", "site-packages"})


class WorkerChild:
    """One of the worker processes, which is started again when it ends."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self.process: subprocess.Popen[bytes] | None = None
        self.status = WorkerStatus()
        self.start_at_s = 0.0
        self.is_finished = False
        self._started_s = 0.0
        self._pause_s = 0.0
        self._status_fd = -1
        self._unread = b""

    def start(self) -> None:
        """Starts a process."""
        self._status_fd, theirs = os.pipe()
        os.set_blocking(self._status_fd, False)
        options = msgspec.structs.replace(self._options, status_fd=theirs)
        # The name of the app is for those who list the processes; they must not see the options,
        # because the URL may have a password.
        command = [sys.executable, "-m", "penstock.tasks.worker.process", options.app]
        try:
            # Its stdin is closed when this process ends, by which it notices that.
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[theirs])
        finally:
            os.close(theirs)
        assert self.process.stdin is not None
        # A process that has ended already is noticed by `ended`.
        with suppress(BrokenPipeError):
            self.process.stdin.write(msgspec.json.encode(options) + b"\n")
            self.process.stdin.flush()
        self.status = WorkerStatus(self.process.pid)
        self._started_s = time.monotonic()
        self._unread = b""

    def read_status(self) -> None:
        """Reads the newest line that the process has written."""
        with suppress(BlockingIOError):
            while part := os.read(self._status_fd, 65_536):
                self._unread += part
        *lines, self._unread = self._unread.split(b"\n")
        if lines:
            with suppress(msgspec.MsgspecError):
                self.status = msgspec.json.decode(lines[-1], type=WorkerStatus)

    def ended(self) -> int | None:
        """The exit status of a process that has ended, once; it may then be started again."""
        if self.process is None or self.process.poll() is None:
            return None
        code = self.process.returncode
        self.read_status()
        os.close(self._status_fd)
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        self.process = None
        now_s = time.monotonic()
        if code == 0 or now_s - self._started_s > EARLY_END_S:
            self._pause_s = 0.0
        else:
            self._pause_s = min(max(0.5, self._pause_s * 2), PAUSE_S_MAX)
        self.start_at_s = now_s + self._pause_s
        return code

    def signal(self, number: int) -> None:
        """Sends the process a signal, if there is one."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)


class Supervisor:
    """Keeps `processes` worker processes running until `stop` is called."""

    def __init__(
        self,
        options: WorkerOptions,
        processes: int,
        report: Callable[[str], None],
        watched: Path | None = None,
    ) -> None:
        self._report = report
        self._watched = watched
        self._children = [WorkerChild(options) for _ in range(processes)]
        self._is_burst = options.burst
        self._stops = 0
        self._ended_counts: dict[str, TaskCounts] = {}
        self.restarts = 0

    @property
    def tasks(self) -> dict[str, TaskCounts]:
        """The attempts of every task, in all processes that run or ran."""
        totals: dict[str, TaskCounts] = {}
        counted = [self._ended_counts, *(child.status.tasks for child in self._children)]
        for counts in counted:
            for name, each in counts.items():
                totals.setdefault(name, TaskCounts()).add(each)
        return totals

    @property
    def held(self) -> tuple[int, int]:
        """How many tasks run and wait in all processes."""
        found = [child.status for child in self._children if child.process is not None]
        return sum(each.running for each in found), sum(each.waiting for each in found)

    @property
    def processes(self) -> int:
        """How many processes run."""
        return sum(child.process is not None for child in self._children)

    async def run(self, show: Callable[[], None]) -> None:
        """Works until stopped by SIGTERM or SIGINT; `show` is called a few times a second."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        seen = self._newest()
        checked_s = 0.0
        while True:
            self._keep_running()
            if not self.processes and (
                self._stops or all(child.is_finished for child in self._children)
            ):
                return
            show()
            await asyncio.sleep(TICK_S)
            if self._stops > 1:
                # Two signals close together may reach a process as one, so it is sent again.
                self._signal_all()
            if self._watched is not None and time.monotonic() - checked_s > WATCH_S:
                checked_s = time.monotonic()
                newest = self._newest()
                if newest != seen and not self._stops:
                    seen = newest
                    self._report("a source file has changed: the processes are restarted")
                    self._signal_all()

    def stop(self) -> None:
        """Lets the processes finish their running tasks; called again, release them at once."""
        self._stops += 1
        if self._stops == 1:
            self._report("stopping: running tasks are finished; Ctrl-C again releases them")
        self._signal_all()

    def _signal_all(self) -> None:
        for child in self._children:
            child.signal(signal.SIGTERM)

    def _keep_running(self) -> None:
        for child in self._children:
            if child.process is not None:
                child.read_status()
            code = child.ended()
            if code is not None:
                self._count_ended(child)
                if code and not self._stops:
                    self.restarts += 1
                    how = ending_of(code)
                    self._report(f"process {child.status.pid} ended with {how}; starting another")
            # In a burst, a process that ends without an error has found no more tasks.
            child.is_finished = child.is_finished or (self._is_burst and code == 0)
            if child.process is None and self._may_start(child):
                child.start()

    def _may_start(self, child: WorkerChild) -> bool:
        is_over = self._stops or child.is_finished
        return not is_over and time.monotonic() >= child.start_at_s

    def _count_ended(self, child: WorkerChild) -> None:
        for name, counts in child.status.tasks.items():
            self._ended_counts.setdefault(name, TaskCounts()).add(counts)
        child.status = WorkerStatus(child.status.pid)

    def _newest(self) -> tuple[float, int]:
        """When a watched source file was last changed, and how many there are."""
        if self._watched is None:
            return 0.0, 0
        times = [*_source_times(self._watched)]
        return max(times, default=0.0), len(times)


def _source_times(directory: Path) -> Iterator[float]:
    with suppress(OSError):
        for entry in os.scandir(directory):
            if entry.name.startswith(".") or entry.name in _NOT_WATCHED:
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _source_times(Path(entry.path))
            elif entry.name.endswith(".py"):
                with suppress(OSError):
                    yield entry.stat().st_mtime
