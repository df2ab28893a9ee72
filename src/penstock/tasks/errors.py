"""The errors of tasks: for code that pushes them, and for code that runs them."""

from penstock.errors import PenstockError, RequestError
from penstock.public import Seconds, to_seconds


class TaskError(RequestError):
    """A task, its arguments, a schedule or an app is not valid."""


class TaskFailed(PenstockError):
    """The task whose result was asked for has failed for the last time.

    `error` is its exception as one line, `traceback` the text of where it was raised.
    """

    def __init__(self, message: str, error: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.error = error
        self.traceback = traceback


class TaskCancelled(TaskFailed):
    """The task whose result was asked for was cancelled before it ended."""


class ResultTimeout(PenstockError):
    """The task has no result yet; it may still get one."""


class TaskTimeout(Exception):
    """A task ran for longer than its timeout; workers raise it, or kill the process."""


class RetryLater(Exception):
    """Raised by a task to be run again after `delay` seconds, instead of after the usual backoff.

    It counts as a failed attempt, so that the task is not run for ever.
    """

    def __init__(self, delay: Seconds, reason: str = "the task asked to be run again") -> None:
        super().__init__(reason)
        self.delay: float = to_seconds(delay)


class GiveUp(Exception):
    """Raised by a task to fail at once, without the attempts that are left."""
