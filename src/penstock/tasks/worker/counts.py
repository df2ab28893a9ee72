"""The counts of a worker process, which it sends to the supervisor as lines of JSON."""

from collections.abc import Iterable

import msgspec

from penstock.tasks.running import HeldTask


class TaskCounts(msgspec.Struct):
    """The attempts of one task: how they ended, and how long they took together."""

    done: int = 0
    failed: int = 0
    retried: int = 0
    cancelled: int = 0
    seconds: float = 0.0

    def add(self, other: "TaskCounts") -> None:
        """Adds the numbers of another."""
        self.done += other.done
        self.failed += other.failed
        self.retried += other.retried
        self.cancelled += other.cancelled
        self.seconds += other.seconds


class WorkerStatus(msgspec.Struct):
    """The status of a process: attempts since its start, and the tasks it holds now."""

    pid: int = 0
    running: int = 0
    waiting: int = 0
    tasks: dict[str, TaskCounts] = {}
    is_draining: bool = False

    def count(self, ended: Iterable[HeldTask]) -> None:
        """Counts attempts that have ended."""
        for held in ended:
            name = held.envelope.task if held.task is not None else "(unknown)"
            counts = self.tasks.get(name)
            if counts is None:
                counts = self.tasks[name] = TaskCounts()
            outcome = held.outcome
            assert outcome is not None
            counts.seconds += held.took_s
            if outcome.is_cancelled:
                counts.cancelled += 1
            elif outcome.failure is None:
                counts.done += 1
            elif held.is_final_failure:
                counts.failed += 1
            else:
                counts.retried += 1

    @property
    def total(self) -> TaskCounts:
        """The attempts of all tasks together."""
        total = TaskCounts()
        for counts in self.tasks.values():
            total.add(counts)
        return total
