"""Tasks: functions that workers run, on any store that Penstock can reach.

from penstock.tasks import TaskApp

app = TaskApp("redis://127.0.0.1:6379/0")


@app.task(retries=5, timeout=60)
def send(address: str, text: str) -> None: ...


send.push("anna@example.com", "hello")

A worker runs them: `penstock worker MODULE:app`.
"""

from penstock.tasks.app import TaskApp
from penstock.tasks.context import TaskContext, current
from penstock.tasks.errors import (
    GiveUp,
    ResultTimeout,
    RetryLater,
    TaskCancelled,
    TaskError,
    TaskFailed,
    TaskTimeout,
)
from penstock.tasks.flow import chain, group
from penstock.tasks.middleware import Middleware
from penstock.tasks.options import Backoff
from penstock.tasks.results import PushedTask
from penstock.tasks.task import PreparedTask, Task

__all__ = [
    "Backoff",
    "GiveUp",
    "Middleware",
    "PreparedTask",
    "PushedTask",
    "ResultTimeout",
    "RetryLater",
    "Task",
    "TaskApp",
    "TaskCancelled",
    "TaskContext",
    "TaskError",
    "TaskFailed",
    "TaskTimeout",
    "chain",
    "current",
    "group",
]
