"""Results of tasks: how they are stored, found by the task's id, and waited for.

A result is a message with a ttl in one of 256 queues, chosen by the task's id. It is read without
claiming it, so any number of processes can read it. See decision 111.
"""

import asyncio
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec

from penstock.errors import ProtocolError, QueueNotFound
from penstock.service import PEEK_LIMIT_MAX, Peek
from penstock.tasks.commands import Commands
from penstock.tasks.envelope import CANCELLED, DONE, Failure, StoredResult, decode_result
from penstock.tasks.errors import ResultTimeout, TaskCancelled, TaskError, TaskFailed
from penstock.tasks.names import RESULTS_NEED, result_queue

if TYPE_CHECKING:
    from penstock.tasks.task import Task

R = TypeVar("R")
_POLL_S_FIRST: Final = 0.002
_POLL_S_MAX: Final = 0.1


class PushedTask(Generic[R]):
    """A task that was pushed: its id, and its result once it has ended.

    `duplicate` if the task is unique and an equal one had been pushed: the id is that one's.
    """

    __slots__ = ("_task", "duplicate", "id")

    def __init__(self, task: "Task[..., R]", task_id: str, duplicate: bool = False) -> None:
        self._task = task
        self.id = task_id
        self.duplicate = duplicate

    def __repr__(self) -> str:
        return f"<PushedTask {self._task.name!r} {self.id}>"

    def get(self, timeout: float = 30.0) -> R:
        """The result, waiting up to `timeout` seconds for it.

        Raises ResultTimeout if there is none by then, TaskFailed if the task failed for the last
        time, TaskCancelled if it was cancelled, TaskError if the task keeps no results.
        """
        self._check()
        end_s = time.monotonic() + timeout
        pause_s = _POLL_S_FIRST
        while True:
            found = self.peek()
            if found is not None:
                return self._value(found)
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise self._late(timeout)
            time.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 2, _POLL_S_MAX)

    async def wait(self, timeout: float = 30.0) -> R:
        """The same for asyncio: it does not block the event loop."""
        self._check()
        end_s = time.monotonic() + timeout
        pause_s = _POLL_S_FIRST
        while True:
            found = await asyncio.to_thread(self.peek)
            if found is not None:
                return self._value(found)
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise self._late(timeout)
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 2, _POLL_S_MAX)

    def __await__(self) -> Generator[Any, None, R]:
        return self.wait().__await__()

    def peek(self) -> StoredResult | None:
        """How the task ended, if it has, without waiting."""
        app = self._task.app
        return app.run_steps(find_result(app.name, self.id))

    def _check(self) -> None:
        if self._task.options.result_ttl_ms is None:
            raise TaskError(
                f"{self._task.name}: keeps no results; declare it with result_ttl=SECONDS"
            )
        lacks = self._task.app.service.LACKS
        missing = [name for name in RESULTS_NEED if name in lacks]
        if missing:
            raise TaskError(f"{self._task.name}: this store keeps no results: {lacks[missing[0]]}")

    def _value(self, found: StoredResult) -> R:
        if found.state == DONE:
            try:
                return self._task.arguments.result.decode(found.value)  # type: ignore[no-any-return]
            except msgspec.ValidationError as error:
                raise TaskError(
                    f"{self._task.name}: the result is not what the task says it returns: {error}"
                ) from None
        kind = TaskCancelled if found.state == CANCELLED else TaskFailed
        failure = found.failure or Failure("")
        raise kind(
            f"task {self._task.name!r} {found.state}: {failure.error}",
            failure.error,
            failure.traceback,
        )

    def _late(self, timeout: float) -> ResultTimeout:
        return ResultTimeout(
            f"task {self._task.name!r} {self.id} has no result after {timeout:g} s"
        )


def find_result(app: str, task_id: str) -> Commands[StoredResult | None]:
    """The newest result of a task: one that was retried may have several."""
    try:
        messages = yield Peek(result_queue(app, task_id), PEEK_LIMIT_MAX)
    except QueueNotFound:
        return None
    found: StoredResult | None = None
    for message in messages:
        if task_id.encode() not in message.body:
            continue
        try:
            result = decode_result(message.body)
        except ProtocolError:
            continue
        if result.id == task_id:
            found = result
    return found
