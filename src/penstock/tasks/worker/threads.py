"""Runs sync tasks in threads: one shared line of waiting tasks, with as few wake-ups as possible.

A thread takes tasks until the line is empty and then waits for a token; `submit` adds any number of
tasks and at most one token for each thread. So a thousand short tasks cost a few wake-ups.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue

from penstock.clock import THREAD_PREFIX
from penstock.tasks.running import HeldTask, TaskOutcome, failure_of, take_all


class ThreadRunner:
    """Runs tasks in up to `limit` threads, which are started when there is work for them."""

    def __init__(
        self, limit: int, run: Callable[[HeldTask], None], done: Callable[[HeldTask], None]
    ) -> None:
        self.limit = limit
        self._run = run
        self._done = done
        self._waiting: deque[HeldTask] = deque()
        self._tokens: SimpleQueue[None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self.running: set[HeldTask] = set()

    @property
    def waiting(self) -> int:
        """How many tasks have not started."""
        return len(self._waiting)

    def submit(self, tasks: Iterable[HeldTask]) -> None:
        """Adds tasks to the line."""
        before = len(self._waiting)
        self._waiting.extend(tasks)
        added = len(self._waiting) - before
        while len(self._threads) < self.limit and len(self._threads) - len(self.running) < max(
            added, 1
        ):
            self._start_thread()
        for _ in range(min(max(added, 1), self.limit - self._tokens.qsize())):
            self._tokens.put(None)

    def remove_waiting(self) -> list[HeldTask]:
        """Removes and returns the tasks that have not started."""
        return take_all(self._waiting)

    def close(self) -> None:
        """Ends the threads, each after the task that it runs."""
        self._is_closed = True
        for _ in self._threads:
            self._tokens.put(None)

    def _start_thread(self) -> None:
        name = f"{THREAD_PREFIX}task-{len(self._threads)}"
        # Daemons: the second SIGTERM ends the process although tasks still run.
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        waiting, running, run, done = self._waiting, self.running, self._run, self._done
        while not self._is_closed:
            try:
                held = waiting.popleft()
            except IndexError:
                self._tokens.get()
                continue
            running.add(held)
            try:
                run(held)
            except BaseException as error:
                # No exception of a task may end its thread.
                held.outcome = TaskOutcome(failure=failure_of(error))
            finally:
                running.discard(held)
                done(held)
