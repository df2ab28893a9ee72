"""The context of a running task: `current().attempt`, `.deadline`, `.extend()`."""

import logging
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime

from penstock.clock import Clock
from penstock.public import Seconds, to_seconds
from penstock.service import Attributes
from penstock.tasks.errors import TaskError, TaskTimeout


class TaskContext:
    """One attempt of a task, for the task itself and for middleware."""

    __slots__ = (
        "_extend",
        "_logger",
        "attempt",
        "attributes",
        "deadline_ms",
        "id",
        "now_ms",
        "queue",
        "task",
    )

    def __init__(
        self,
        task: str,
        task_id: str,
        queue: str,
        attempt: int,
        attributes: Attributes,
        clock: Clock,
    ) -> None:
        self.task = task
        self.id = task_id
        self.queue = queue
        self.attempt = attempt
        self.attributes = attributes
        self.deadline_ms: int | None = None
        self.now_ms = clock.now_ms
        self._extend: Callable[[int], None] | None = None
        self._logger: logging.LoggerAdapter[logging.Logger] | None = None

    def start(self, timeout_ms: int | None, extended: Callable[[int], None] | None = None) -> None:
        """The task starts now; `extended(deadline_ms)` is called when its deadline moves."""
        self._extend = extended
        if timeout_ms is not None:
            self.deadline_ms = self.now_ms() + timeout_ms

    @property
    def deadline(self) -> datetime | None:
        """When the timeout ends this attempt; None for a task without a timeout."""
        if self.deadline_ms is None:
            return None
        return datetime.fromtimestamp(self.deadline_ms / 1_000, UTC)

    def extend(self, duration: Seconds) -> None:
        """Moves the deadline to `duration` seconds from now, if the task has a timeout.

        The worker extends the claim by itself for as long as the task runs.
        """
        seconds = to_seconds(duration)
        if not seconds > 0:
            raise TaskError(f"extend: expected a number of seconds above 0, got {seconds!r}")
        if self.deadline_ms is None:
            return
        self.deadline_ms = self.now_ms() + round(seconds * 1_000)
        if self._extend is not None:
            self._extend(self.deadline_ms)

    @property
    def logger(self) -> "logging.LoggerAdapter[logging.Logger]":
        """A logger whose entries have the task's name, id and attempt as extra fields."""
        if self._logger is None:
            fields = {"task": self.task, "task_id": self.id, "attempt": self.attempt}
            self._logger = logging.LoggerAdapter(
                logging.getLogger(f"penstock.tasks.{self.task}"), fields
            )
        return self._logger

    def check_deadline(self) -> None:
        """Raises TaskTimeout if the deadline has passed."""
        if self.deadline_ms is not None and self.now_ms() > self.deadline_ms:
            raise TaskTimeout(f"the task {self.task!r} ran for longer than its timeout")


_current: ContextVar[TaskContext] = ContextVar("penstock_task")
enter = _current.set
leave = _current.reset


def current() -> TaskContext:
    """The context of the task that runs in this thread or coroutine. Raises TaskError outside."""
    try:
        return _current.get()
    except LookupError:
        raise TaskError("current: no task runs here; it is for code within a task") from None
