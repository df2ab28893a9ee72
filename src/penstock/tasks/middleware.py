"""Middleware: code that runs before and after a task, and when it fails."""

import inspect
from typing import Any

from penstock.consumer.options import refuse_generator
from penstock.errors import InvalidField
from penstock.tasks.context import TaskContext


class Middleware:
    """Subclass it, and give an instance to `TaskApp(middleware=[…])`.

    The methods run where the task runs: in its thread, its process, or the event loop of async
    tasks, so they should not block there. They run in the order of the list, `after` and `failed`
    in the opposite one. An exception in `before` fails the attempt, and the task is not called; one
    in `after` or `failed` is reported to `logging` and changes nothing. They are plain functions; a
    class with async ones raises InvalidField.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for method in (cls.before, cls.after, cls.failed):
            where = f"middleware {cls.__name__}.{method.__name__}"
            refuse_generator(where, method)
            if inspect.iscoroutinefunction(method):
                raise InvalidField(f"{where}: it is async, and nothing awaits it; use a plain def")

    def before(self, context: TaskContext) -> None:
        """Called before each attempt."""

    def after(self, context: TaskContext, result: Any) -> None:
        """Called after an attempt that succeeded."""

    def failed(self, context: TaskContext, error: BaseException, is_final: bool) -> None:
        """Called after an attempt that failed; `is_final` if it was the last."""
