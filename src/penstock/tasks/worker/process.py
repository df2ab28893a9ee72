"""One worker process: pulls tasks in batches, runs them, extends their claims, finishes them.

The event loop of the main thread only communicates with the store. Tasks run in threads, in
children and in a loop of their own, so that none of them delays the extension of claims. As many
tasks are pulled ahead as end in about a fifth of a second.
"""

import asyncio
import logging
import os
import platform
import signal
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from penstock.backends import open_async_service
from penstock.consumer.options import EXTENSIONS_PER_VISIBILITY, SOONER
from penstock.errors import BackendLost, PenstockError, QueueNotFound, RequestError
from penstock.output import logger, report
from penstock.service import (
    BATCH_ITEMS_MAX,
    AsyncQueueService,
    Batch,
    Claim,
    Extend,
    Pull,
    Release,
)
from penstock.steps import await_steps
from penstock.tasks.app import TaskApp
from penstock.tasks.commands import ensure_queue, raise_unavailable
from penstock.tasks.control import CancelledIds
from penstock.tasks.finishing import TaskFinisher
from penstock.tasks.names import TASK_QUEUE
from penstock.tasks.running import HeldTask, fail, hold, run_here
from penstock.tasks.schedule import ScheduleClock
from penstock.tasks.worker.children import TaskChild
from penstock.tasks.worker.counts import WorkerStatus
from penstock.tasks.worker.limits import LimitGate
from penstock.tasks.worker.loop import LoopRunner
from penstock.tasks.worker.options import WorkerOptions, load_app, queues_of
from penstock.tasks.worker.outages import OutageReporter
from penstock.tasks.worker.threads import ThreadRunner

PULL_MAX: Final = 1_000
AHEAD_MAX: Final = 1_000
AHEAD_S: Final = 0.2
WAIT_MS: Final = 5_000
STATUS_S: Final = 0.5
CANCELLED_S: Final = 1.0
SCHEDULE_S_MAX: Final = 10.0
RETRY_S_MAX: Final = 5.0
BURST_PAUSE_S: Final = 0.05
# How long a worker that starts pauses before it tries a store again that does not answer.
_START_PAUSE_S: Final = 0.2
# A task that was received so often may have crashed its workers: it is run in a child.
SUSPECT_RECEIVES: Final = 5
# The delay of a task that has to wait for a token, if too many are waiting already.
GATE_DELAY_MS: Final = 2_000
_logger: Final = logger("penstock.tasks")


def worker_holder(app: str) -> str:
    """The name by which claims name a worker process."""
    host = "".join(each for each in platform.node() if each.isprintable())
    return f"worker {app[:40]} on {host[:50] or 'this machine'} (pid {os.getpid()})"


class WorkerProcess:
    """The tasks that one process holds, from their pull to their delete."""

    def __init__(self, app: TaskApp, service: AsyncQueueService, options: WorkerOptions) -> None:
        self._app = app
        self._service = service
        self._options = options
        self._queues = queues_of(app, options)
        self._loop = asyncio.get_running_loop()
        self._finisher = TaskFinisher(app, service.LACKS)
        self._cancelled = CancelledIds(app.name)
        self._threads = ThreadRunner(options.threads, self._run_sync, self._end)
        self._coroutines = LoopRunner(options.coroutines, app.middleware, self._end)
        self._gates = {
            task.name: LimitGate(app, task, service, options.visibility_ms, self._start)
            for task in app.tasks.values()
            if task.options.is_limited
        }
        self._children = threading.local()
        self._busy_children: dict[HeldTask, TaskChild] = {}
        self._held: set[HeldTask] = set()
        # Tasks that have ended and are not finished yet; other threads append to it.
        self._ended: deque[HeldTask] = deque()
        self._is_collecting = False
        self._has_ended = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_emptied = asyncio.Event()
        self._stop_requested = asyncio.Event()
        # Whether a step ended by a fault in this program.
        self._is_faulty = False
        # Whether the last extension of all claims failed, or a part of it.
        self._extends_soon = False
        self._rate_per_s = 0.0
        self._finished = 0
        # The queues that a burst has found empty since it last pulled a task.
        self._empty: set[str] = set()
        self.status = WorkerStatus(pid=os.getpid())
        # How the claims of this process name it.
        self._holder = worker_holder(app.name)

    def stop(self) -> None:
        """Ends `run` when the tasks that run now have ended; the others are released."""
        self._stop_requested.set()
        self.status.is_draining = True

    async def run(self) -> None:
        """Works until `stop` is called. Raises PenstockError if the store cannot be used.

        A fault in this program is raised as it is.
        """
        for queue in self._queues:
            await self._make_queue(queue)
        pulling = [self._repeat(self._pull_from(queue)) for queue in self._queues]
        pulling += [self._repeat(gate.run_once) for gate in self._gates.values()]
        if self._app.schedules:
            pulling.append(self._run_schedules())
        finishing = [
            self._repeat(self._finish_ended),
            self._repeat(self._extend_held),
            self._repeat(self._read_cancelled),
            self._measure(),
        ]
        first = [self._loop.create_task(each) for each in pulling]
        second = [self._loop.create_task(each) for each in finishing]
        for each in (*first, *second):
            each.add_done_callback(self._end_if_faulty)
        try:
            await self._stop_requested.wait()
            await _cancel(first)
            await self._release(self._remove_waiting())
            while self._held and not self._is_faulty:
                self._has_emptied.clear()
                await self._has_emptied.wait()
        finally:
            await _cancel([*first, *second])
            self._threads.close()
            self._coroutines.close()

    def _end_if_faulty(self, step: "asyncio.Task[None]") -> None:
        """Ends `run` with what a step raised: without that step, this process would do nothing.

        The supervisor starts another process, and the claims of this one run out.
        """
        if not step.cancelled() and step.exception() is not None:
            self._is_faulty = True
            self._stop_requested.set()
            self._has_emptied.set()

    async def _make_queue(self, queue: str) -> None:
        """Makes a queue if it is missing, once the store answers."""
        while not self._stop_requested.is_set():
            try:
                await await_steps(self._service.execute, ensure_queue(queue, TASK_QUEUE))
            except BackendLost:
                # Reported once, as for the steps that are repeated.
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stop_requested.wait(), _START_PAUSE_S)
            else:
                return

    async def release_all(self) -> None:
        """Releases every claim at once; the process must end then, because tasks still run."""
        for child in list(self._busy_children.values()):
            child.kill()
        self._remove_waiting()
        await self._release(list(self._held))

    async def _repeat(self, step: Callable[[], Awaitable[None]]) -> None:
        """Repeats a step for ever; after a failure it pauses, each time longer."""
        pause_s = 0.0
        while True:
            try:
                await step()
                pause_s = 0.0
            except PenstockError as error:
                pause_s = min(max(0.05, pause_s * 2), RETRY_S_MAX)
                # An outage has been reported, once for all steps that fail.
                if not isinstance(error, BackendLost):
                    _logger.warning("%s; trying again in %.2g s", error, pause_s)
                await asyncio.sleep(pause_s)

    def _pull_from(self, queue: str) -> Callable[[], Awaitable[None]]:
        visibility_ms = self._options.visibility_ms
        wait_ms = 0

        async def pull() -> None:
            nonlocal wait_ms
            room = self._room(queue)
            if room <= 0:
                self._has_room.clear()
                await self._has_room.wait()
                return
            # A pull that waits asks for fewer: other pulls may use the room meanwhile.
            limit = min(room, PULL_MAX if not wait_ms else self._options.threads)
            try:
                claims = await self._service.execute(
                    Pull(queue, limit, visibility_ms, wait_ms, holder=self._holder)
                )
            except QueueNotFound:
                await await_steps(self._service.execute, ensure_queue(queue, TASK_QUEUE))
                return
            # Fewer than the limit: the queue is empty, so the next pull may wait.
            wait_ms = 0 if len(claims) == limit or self._options.burst else WAIT_MS
            if claims:
                self._empty.discard(queue)
                self._accept(claims)
            elif self._options.burst:
                await self._end_burst(queue)

        return pull

    async def _end_burst(self, queue: str) -> None:
        """Stops when every queue was found empty and nothing runs; tasks may push others."""
        self._empty.add(queue)
        if len(self._empty) == len(self._queues) and not self._held:
            self.stop()
        await asyncio.sleep(BURST_PAUSE_S)

    def _room(self, queue: str) -> int:
        """How many tasks to pull: as many as the runner with less room can start soon."""
        ahead = min(AHEAD_MAX, round(self._rate_per_s * AHEAD_S))
        kinds = {task.is_async for task in self._app.tasks.values() if task.options.queue == queue}
        runners: list[LoopRunner | ThreadRunner] = []
        if True in kinds:
            runners.append(self._coroutines)
        if False in kinds or not kinds:
            runners.append(self._threads)
        return ahead + min(each.limit - len(each.running) - each.waiting for each in runners)

    def _accept(self, claims: Sequence[Claim]) -> None:
        app, cancelled = self._app, self._cancelled
        limited: dict[str, list[HeldTask]] = {}
        ready: list[HeldTask] = []
        for claim in claims:
            held = hold(app, claim)
            self._held.add(held)
            if held.id in cancelled:
                held.outcome = cancelled.OUTCOME
            if held.outcome is not None:
                self._end(held)
            elif held.envelope.task in self._gates:
                limited.setdefault(held.envelope.task, []).append(held)
            else:
                ready.append(held)
        self._start(ready)
        for name, tasks in limited.items():
            surplus = self._gates[name].add(tasks)
            if surplus:
                self._loop.create_task(self._release(surplus, GATE_DELAY_MS))

    def _start(self, tasks: Iterable[HeldTask]) -> None:
        in_threads: list[HeldTask] = []
        in_loop: list[HeldTask] = []
        for held in tasks:
            assert held.task is not None
            is_apart = self._needs_child(held) and held.task.options.timeout_ms is None
            (in_loop if held.task.is_async and not is_apart else in_threads).append(held)
        if in_threads:
            self._threads.submit(in_threads)
        if in_loop:
            self._coroutines.submit(in_loop)

    def _needs_child(self, held: HeldTask) -> bool:
        assert held.task is not None
        options = held.task.options
        if options.timeout_ms is not None and not held.task.is_async:
            return True
        return held.claim.receives > SUSPECT_RECEIVES and not options.is_limited

    def _run_sync(self, held: HeldTask) -> None:
        """Runs a task in this thread, or in the child of this thread."""
        task, context = held.call
        if held.is_lost or held.outcome is not None:
            return
        if not self._needs_child(held):
            context.start(None)
            run_here(held, self._app.middleware)
            return
        timeout_ms = task.options.timeout_ms
        began_s = self._loop.time()
        child: TaskChild | None = None
        try:
            child = self._child()
            self._busy_children[held] = child
            held.outcome = child.run(held, timeout_ms)
        except Exception as error:
            if held.outcome is None:
                fail(held, error, self._app.middleware)
        finally:
            held.took_s = self._loop.time() - began_s
            self._busy_children.pop(held, None)
            if child is not None and child.is_over:
                child.close()
                self._children.child = None

    def _child(self) -> TaskChild:
        """The child of this thread, started if it has none."""
        child: TaskChild | None = getattr(self._children, "child", None)
        if child is None:
            child = self._children.child = TaskChild(self._options.app, self._app.url)
        return child

    def _end(self, held: HeldTask) -> None:
        """Called in any thread when a task has ended: the loop is woken once for many of them."""
        self._ended.append(held)
        if not self._is_collecting:
            self._is_collecting = True
            self._loop.call_soon_threadsafe(self._has_ended.set)

    async def _finish_ended(self) -> None:
        await self._has_ended.wait()
        self._has_ended.clear()
        # Before the loop below: a task that ends from now on wakes the event loop again.
        self._is_collecting = False
        tasks: list[HeldTask] = []
        while self._ended and len(tasks) < BATCH_ITEMS_MAX // 4:
            tasks.append(self._ended.popleft())
        if self._ended:
            self._has_ended.set()
        if not tasks:
            return
        self._has_room.set()
        ours = [held for held in tasks if not held.is_lost and held.outcome is not None]
        # Before the commands below, because only `ours` come again if these fail.
        self._drop(set(tasks).difference(ours))
        try:
            if ours:
                await await_steps(self._service.execute, self._finisher.finish(ours))
        except PenstockError:
            self._ended.extend(ours)
            self._has_ended.set()
            raise
        except Exception:
            # A fault in this program: the claims run out, and the tasks are run again.
            _logger.exception("%d tasks could not be finished", len(ours))
            self._drop(ours)
            return
        self._empty.clear()
        self.status.count(ours)
        _report_failures(ours)
        self._drop(ours)
        self._finished += len(tasks)
        if self._options.max_tasks is not None and self._finished >= self._options.max_tasks:
            self.stop()

    def _drop(self, tasks: Iterable[HeldTask]) -> None:
        self._held.difference_update(tasks)
        self._has_room.set()
        if not self._held:
            self._has_emptied.set()

    async def _extend_held(self) -> None:
        visibility_ms = self._options.visibility_ms
        part_s = visibility_ms / 1_000 / EXTENSIONS_PER_VISIBILITY
        await asyncio.sleep(part_s / SOONER if self._extends_soon else part_s)
        self._extends_soon = True
        tasks = list(self._held)
        claims = [(held, held.claim) for held in tasks]
        claims += [(held, held.slot) for held in tasks if held.slot is not None]
        for at in range(0, len(claims), BATCH_ITEMS_MAX):
            part = claims[at : at + BATCH_ITEMS_MAX]
            replies = await self._service.execute(
                Batch([Extend(claim.queue, claim.proof, visibility_ms) for _, claim in part])
            )
            for (held, claim), reply in zip(part, replies, strict=True):
                if isinstance(reply, RequestError) and claim is held.claim:
                    held.is_lost = held in self._held
            raise_unavailable(replies)
        self._extends_soon = False

    async def _read_cancelled(self) -> None:
        await asyncio.sleep(CANCELLED_S)
        await await_steps(self._service.execute, self._cancelled.refresh())
        ids = set(self._cancelled)
        for held in [each for each in self._held if each.id in ids] if ids else ():
            if held in self._busy_children:
                held.outcome = self._cancelled.OUTCOME
                self._busy_children[held].kill()
            elif held in self._coroutines.running:
                held.outcome = self._cancelled.OUTCOME
                self._coroutines.cancel(held)
            elif held not in self._threads.running and held.outcome is None:
                # It has not started: its runner skips a task with an outcome.
                held.outcome = self._cancelled.OUTCOME

    async def _run_schedules(self) -> None:
        if "dedup" in self._service.LACKS:
            _logger.error("schedules are not run: this store has no dedup ids")
            return
        schedules = ScheduleClock(self._app)
        step: Callable[[], Any] = schedules.begin
        while True:
            try:
                await await_steps(self._service.execute, step())
                step = schedules.push_due
            except PenstockError as error:
                if not isinstance(error, BackendLost):
                    _logger.warning("a schedule was not pushed: %s; trying again", error)
                await asyncio.sleep(1)
                continue
            due_ms = schedules.next_due_ms()
            assert due_ms is not None
            # Not for long: the wall clock may be set meanwhile.
            left_s = (due_ms - self._app.now_ms()) / 1_000
            await asyncio.sleep(min(max(0.001, left_s), SCHEDULE_S_MAX))

    async def _measure(self) -> None:
        """Keeps the rate at which tasks end, and writes the status."""
        before, written_s = 0, 0.0
        while True:
            began_s = self._loop.time()
            await asyncio.sleep(0.05)
            now_s = self._loop.time()
            rate = (self._finished - before) / (now_s - began_s)
            before = self._finished
            # It rises at once and falls slowly, because there are pauses between batches.
            self._rate_per_s = max(rate, self._rate_per_s * 0.9)
            self._has_room.set()
            if now_s - written_s >= STATUS_S:
                written_s = now_s
                self.write_status()

    def write_status(self) -> None:
        """Writes one line of JSON for the supervisor."""
        self.status.running = len(self._threads.running) + len(self._coroutines.running)
        self.status.waiting = len(self._held) - self.status.running
        fd = self._options.status_fd
        if fd is not None:
            with suppress(OSError):
                os.write(fd, msgspec.json.encode(self.status) + b"\n")

    def _remove_waiting(self) -> list[HeldTask]:
        taken = self._threads.remove_waiting() + self._coroutines.remove_waiting()
        for gate in self._gates.values():
            taken += gate.remove_waiting()
        return taken

    async def _release(self, tasks: list[HeldTask], delay_ms: int = 0) -> None:
        """Releases claims; those that cannot be released run out."""
        items: list[Any] = [Release(h.claim.queue, h.claim.proof, delay_ms) for h in tasks]
        items += [Release(h.slot.queue, h.slot.proof) for h in tasks if h.slot is not None]
        with suppress(PenstockError):
            for at in range(0, len(items), BATCH_ITEMS_MAX):
                await self._service.execute(Batch(items[at : at + BATCH_ITEMS_MAX]))
        self._drop(tasks)


def _report_failures(tasks: Iterable[HeldTask]) -> None:
    for held in tasks:
        failure = held.outcome.failure if held.outcome is not None else None
        if failure is None:
            continue
        name, attempt = held.envelope.task or "(not a task)", held.failures
        if held.is_final_failure:
            text = "task %s %s failed for the last time, attempt %d: %s"
            _logger.error(text, name, held.id, attempt, failure.error)
        else:
            text = "task %s %s failed, attempt %d, and is tried again: %s"
            _logger.warning(text, name, held.id, attempt, failure.error)


async def _cancel(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


async def run(app: TaskApp, options: WorkerOptions) -> int:
    """Works until SIGTERM or the end of the supervisor; a second SIGTERM releases the tasks."""
    service = OutageReporter(await open_async_service(app.url))
    process = WorkerProcess(app, service, options)
    loop = asyncio.get_running_loop()
    second_signal: asyncio.Future[None] = loop.create_future()

    def stop() -> None:
        if process.status.is_draining and not second_signal.done():
            second_signal.set_result(None)
        process.stop()

    loop.add_signal_handler(signal.SIGTERM, stop)
    # A Ctrl-C in the terminal reaches every process of the group; here the supervisor's SIGTERM
    # counts.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _watch_supervisor(loop, process.stop)
    work = loop.create_task(process.run())
    either: list[Coroutine[Any, Any, Any] | asyncio.Future[Any]] = [work, second_signal]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
    if second_signal.done() and not work.done():
        await process.release_all()
        process.write_status()
        await service.close()
        # Threads may still run tasks: this does not wait for them.
        os._exit(0)
    await work
    process.write_status()
    await service.close()
    return 0


def _watch_supervisor(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    """Stops this process when the other end of its stdin was closed."""

    def read() -> None:
        if not os.read(0, 1):
            loop.remove_reader(0)
            stop()

    with suppress(OSError, ValueError, PermissionError):
        loop.add_reader(0, read)


def main() -> int:
    """The entry of the process: its options are one line of JSON on stdin."""
    import uvloop

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    line = sys.stdin.buffer.readline()
    if not line:
        # The supervisor has ended.
        return 0
    options = msgspec.json.decode(line, type=WorkerOptions)
    if options.status_fd is not None:
        # A supervisor that hangs must not block this process.
        os.set_blocking(options.status_fd, False)
    try:
        app = load_app(options.app)
        if options.url is not None:
            app.use_url(options.url)
        return uvloop.run(run(app, options))
    except PenstockError as error:
        report(str(error), "penstock worker")
        return 3


if __name__ == "__main__":
    sys.exit(main())
