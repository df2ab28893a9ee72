"""The names of the queues that an app uses beside those of its tasks, and their settings."""

import zlib
from typing import Any, Final

from penstock.service import DAY_MS, HOUR_MS, TTL_MS_MAX
from penstock.url import read_url

DEFAULT_APP: Final = "tasks"
RESULT_QUEUES: Final = 256
# The behaviours that a service needs to keep results, by their names in LACKS.
RESULTS_NEED: Final = ("peek", "ttl")
# A task may be delayed for a year, and a message is dropped at the end of its queue's retention.
TASK_QUEUE: Final[dict[str, Any]] = {"retention_ms": TTL_MS_MAX}
# A failed task also has its traceback.
FAILED_QUEUE: Final[dict[str, Any]] = {"retention_ms": 30 * DAY_MS, "body_bytes_max": 2 << 20}
RESULT_QUEUE: Final[dict[str, Any]] = {"retention_ms": TTL_MS_MAX}
GROUP_QUEUE: Final[dict[str, Any]] = {"retention_ms": 30 * DAY_MS}
# As many as one peek returns; a further cancel is refused, because no worker would read it.
CANCELLED_QUEUE: Final[dict[str, Any]] = {"retention_ms": 30 * DAY_MS, "messages_max": 1_000}
CANCELLED_TTL_MS: Final = 7 * DAY_MS
TOKEN_TTL_MS: Final = TTL_MS_MAX - HOUR_MS


def separator_of(url: str) -> str:
    """What stands between the parts of a queue's name; names of Amazon SQS have no dots."""
    return "-" if read_url(url).scheme == "sqs" else "."


def failed_queue(queue: str, separator: str = ".") -> str:
    """The queue for tasks of a queue that have failed for the last time."""
    return f"{queue}{separator}failed"


def result_queue(app: str, task_id: str) -> str:
    """The queue of a task's result: one of 256, by the task's id."""
    return f"{app}.results.{zlib.crc32(task_id.encode()) % RESULT_QUEUES:02x}"


def group_queue(app: str, group_id: str) -> str:
    """The queue of the results of a group's members, until all of them have one."""
    return f"{app}.group.{group_id}"


def schedule_queue(app: str, schedule: str) -> str:
    """A queue that is always empty; its note is the schedule's last due time."""
    return f"{app}.schedule.{schedule}"


def cancelled_queue(app: str) -> str:
    """The queue of the ids of cancelled tasks."""
    return f"{app}.cancelled"


def rate_queue(app: str, task: str) -> str:
    """The tokens of a task's rate."""
    return f"{app}.rate.{task}"


def slot_queue(app: str, task: str) -> str:
    """The tokens of a task's concurrency."""
    return f"{app}.slots.{task}"
