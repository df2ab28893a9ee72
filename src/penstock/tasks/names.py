"""The names of the queues that an app uses beside those of its tasks, and their settings."""

import zlib
from typing import Any, Final

from penstock.service import DAY_MS, HOUR_MS, TTL_MS_MAX

RESULT_QUEUES: Final = 256
# What a service must be able to do for results to be kept, as its LACKS names it.
RESULTS_NEED: Final = ("peek", "ttl")
# A task may be delayed for a year, and what is in a queue for longer than its retention is dropped.
TASK_QUEUE: Final[dict[str, Any]] = {"retention_ms": TTL_MS_MAX}
# A failed task is larger than the task was: by its traceback.
FAILED_QUEUE: Final[dict[str, Any]] = {"retention_ms": 30 * DAY_MS, "body_bytes_max": 2 << 20}
RESULT_QUEUE: Final[dict[str, Any]] = {"retention_ms": TTL_MS_MAX}
GROUP_QUEUE: Final[dict[str, Any]] = {"retention_ms": 30 * DAY_MS}
# As many as one peek shows; a further cancel is refused, because no worker would see it.
CANCELLED_QUEUE: Final[dict[str, Any]] = {"retention_ms": 30 * DAY_MS, "messages_max": 1_000}
CANCELLED_TTL_MS: Final = 7 * DAY_MS
TOKEN_TTL_MS: Final = TTL_MS_MAX - HOUR_MS


def failed_queue(queue: str) -> str:
    """Where the tasks of a queue go that have failed for the last time."""
    return f"{queue}.failed"


def result_queue(app: str, task_id: str) -> str:
    """Where the result of a task is: one of 256 queues, by the task's id."""
    return f"{app}.results.{zlib.crc32(task_id.encode()) % RESULT_QUEUES:02x}"


def group_queue(app: str, group_id: str) -> str:
    """Where the results of a group's members are until all are there."""
    return f"{app}.group.{group_id}"


def schedule_queue(app: str, schedule: str) -> str:
    """The queue that is always empty and whose note says when the schedule was last due."""
    return f"{app}.schedule.{schedule}"


def cancelled_queue(app: str) -> str:
    """Where the ids of cancelled tasks are."""
    return f"{app}.cancelled"


def rate_queue(app: str, task: str) -> str:
    """The tokens of a task's rate."""
    return f"{app}.rate.{task}"


def slot_queue(app: str, task: str) -> str:
    """The tokens of a task's concurrency."""
    return f"{app}.slots.{task}"
