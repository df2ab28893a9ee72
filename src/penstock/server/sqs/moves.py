"""The SQS actions on move tasks: dead letters brought back, a few at a time.

A task steps through its queue with short redrives, so that nobody else waits for it, and no faster
than it was asked to. What was asked for, and how it ended, is noted with the queue; a task that
runs when the server stops goes on when it starts again.
"""

import asyncio
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn
from uuid import uuid4

import msgspec

from penstock.core.queue import QueueState
from penstock.errors import InvalidField, PenstockError
from penstock.server.sqs.store import Caller, Store, refusal_of
from penstock.service import Redrive
from penstock.wire.sqs import errors as faults
from penstock.wire.sqs import model as model
from penstock.wire.sqs.address import read_arn
from penstock.wire.sqs.errors import Refusal

RATE_MAX: Final = 500
RESULTS_MAX: Final = 10
TASKS_KEPT_MAX: Final = 10
STEP_MAX: Final = 1_000
TICK_S: Final = 0.1
RUNNING: Final = "RUNNING"
COMPLETED: Final = "COMPLETED"
CANCELLED: Final = "CANCELLED"
FAILED: Final = "FAILED"
# The note of a queue's tasks.
NOTE: Final = ".moves"
NO_SOURCE: Final = "CouldNotDetermineMessageSource"


class MoveTask(msgspec.Struct):
    """One task: from where to where, how fast, and how far it is."""

    id: str
    source: str
    to: str | None
    rate: int | None
    started_at_ms: int
    to_move: int
    status: str = RUNNING
    moved: int = 0
    failure: str | None = None


class MoveActions:
    """The actions on move tasks."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._engine = store.engine
        # By the queue's number, oldest first.
        self._tasks: dict[int, list[MoveTask]] = {}
        self._workers: dict[str, asyncio.Task[None]] = {}
        for queue in store.names.values():
            for task in self._of(queue):
                if task.status == RUNNING:
                    task.moved = max(0, task.to_move - len(queue.deliveries))
                    self._work(task, queue)

    def _of(self, queue: QueueState) -> list[MoveTask]:
        """The tasks of a queue, as they run here or were noted."""
        tasks = self._tasks.get(queue.number)
        if tasks is None:
            noted = queue.settings.annotations.get(NOTE)
            if noted is None:
                return []
            tasks = self._tasks[queue.number] = msgspec.json.decode(noted, type=list[MoveTask])
        return tasks

    def _keep(self, queue: QueueState, tasks: Sequence[MoveTask]) -> None:
        """Notes the tasks of a queue with it. Raises Refusal."""
        self._store.note(queue, NOTE, msgspec.json.encode(tasks).decode())

    def _work(self, task: MoveTask, source: QueueState) -> None:
        name = f"move {task.id}"
        worker = asyncio.get_running_loop().create_task(self._run(task, source), name=name)
        self._workers[task.id] = worker
        worker.add_done_callback(lambda _: self._workers.pop(task.id, None))

    def start(
        self, asked: model.StartMessageMoveTaskRequest, caller: Caller
    ) -> model.StartMoveResult:
        """StartMessageMoveTask."""
        source = self._queue(asked.source_arn, "SourceArn", caller)
        to = None
        if asked.destination_arn is not None:
            to = self._queue(asked.destination_arn, "DestinationArn", caller)
        rate = asked.max_number_of_messages_per_second
        if rate is not None and not 1 <= rate <= RATE_MAX:
            raise _refused(
                "Value for parameter MaxNumberOfMessagesPerSecond is invalid. Reason: You must "
                f"enter a number that's between 1 and {RATE_MAX}."
            )
        if not self._store.sources_of(source.name):
            raise _refused("Source queue must be configured as a Dead Letter Queue.")
        if to is source:
            raise _refused("Source queue arn and destination queue arn cannot be the same.")
        if to is not None and to.settings.fifo != source.settings.fifo:
            raise _refused("The source queue and destination queue must be of the same queue type.")
        tasks = [*self._of(source)]
        if any(task.status == RUNNING for task in tasks):
            raise _refused(
                "There is already a task running. Only one active task is allowed for a source "
                "queue arn at a given time."
            )
        to_name = None if to is None else to.name
        to_move = len(source.deliveries)
        now_ms = self._store.now_ms()
        task = MoveTask(str(uuid4()), source.name, to_name, rate, now_ms, to_move)
        tasks = [*tasks, task][-TASKS_KEPT_MAX:]
        self._keep(source, tasks)
        self._tasks[source.number] = tasks
        self._work(task, source)
        return model.StartMoveResult(self._show_id(task))

    def cancel(
        self, asked: model.CancelMessageMoveTaskRequest, caller: Caller
    ) -> model.CancelMoveResult:
        """CancelMessageMoveTask."""
        task_id, arn = _read_id(asked.task or "")
        source = self._queue(arn, "SourceArn", caller)
        tasks = self._of(source)
        for task in tasks:
            if task.id == task_id:
                if task.status != RUNNING:
                    raise Refusal(
                        faults.UNSUPPORTED_OPERATION, "Only active tasks can be cancelled."
                    )
                task.status = CANCELLED
                self._workers[task.id].cancel()
                self._keep(source, tasks)
                return model.CancelMoveResult(task.moved)
        raise Refusal(faults.RESOURCE_NOT_FOUND, "Task does not exist.")

    def list(
        self, asked: model.ListMessageMoveTasksRequest, caller: Caller
    ) -> model.MoveTasksResult:
        """ListMessageMoveTasks: the latest first."""
        source = self._queue(asked.source_arn, "SourceArn", caller)
        limit = asked.max_results
        if limit is not None and not 1 <= limit <= RESULTS_MAX:
            raise _refused(
                "Value for parameter MaxResults is invalid. Reason: You must enter a number that's "
                f"between 1 and {RESULTS_MAX}."
            )
        latest = list(reversed(self._of(source)))[: limit or 1]
        return model.MoveTasksResult([self._shown(task) for task in latest])

    def _shown(self, task: MoveTask) -> model.MoveTaskEntry:
        return model.MoveTaskEntry(
            task.status,
            self._store.arn(task.source),
            task.moved,
            self._show_id(task) if task.status == RUNNING else None,
            None if task.to is None else self._store.arn(task.to),
            task.rate,
            task.to_move,
            task.failure,
            task.started_at_ms,
        )

    def _queue(self, arn: str | None, parameter: str, caller: Caller) -> QueueState:
        address = read_arn(arn)
        if address is None:
            raise _refused(
                f"You must use this format to specify the {parameter}: "
                "arn:<partition>:<service>:<region>:<account-id>:<resource-id>"
            )
        queue = self._store.find(address.owner, address.name)
        if queue is None or not caller.may_reach(address.owner):
            raise Refusal(
                faults.RESOURCE_NOT_FOUND,
                f"The resource that you specified for the {parameter} parameter doesn't exist.",
            )
        return queue

    def _show_id(self, task: MoveTask) -> str:
        told = {"taskId": task.id, "sourceArn": self._store.arn(task.source)}
        return urlsafe_b64encode(msgspec.json.encode(told)).decode()

    async def _run(self, task: MoveTask, source: QueueState) -> None:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        moved_before = task.moved
        try:
            while task.status == RUNNING and task.moved < task.to_move:
                if self._store.names.get(task.source) is not source:
                    # Deleted; another queue that has its name by now is none of ours.
                    return
                step = min(STEP_MAX, task.to_move - task.moved)
                if task.rate is not None:
                    # As many as are due by now; the first of them at once.
                    due = 1 + int((loop.time() - started_s) * task.rate)
                    step = min(step, due - (task.moved - moved_before))
                if step > 0 and self._step(task, step) == 0:
                    break
                await asyncio.sleep(0 if task.rate is None else TICK_S)
            if task.status == RUNNING:
                task.status = COMPLETED
        except InvalidField:
            # None of those left came from a queue that still exists: they stay.
            task.status = FAILED
            task.failure = NO_SOURCE
        except PenstockError as error:
            task.status = FAILED
            task.failure = refusal_of(error).fault.query_code
        if self._store.names.get(task.source) is source:
            with suppress(Refusal):
                self._keep(source, self._of(source))

    def _step(self, task: MoveTask, limit: int) -> int:
        moved = self._engine.submit(Redrive(task.source, task.to, limit))
        task.moved += moved
        return moved

    async def close(self) -> None:
        """Lets go of the tasks that run; they go on when the server starts again."""
        workers = list(self._workers.values())
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def _read_id(text: str) -> tuple[str, str]:
    try:
        told: Any = msgspec.json.decode(urlsafe_b64decode(text.encode("ascii")))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        _bad_id()
    if not isinstance(told, dict):
        _bad_id()
    task_id, arn = told.get("taskId"), told.get("sourceArn")
    if not isinstance(task_id, str) or read_arn(arn) is None:
        _bad_id()
    return task_id, str(arn)


def _bad_id() -> NoReturn:
    raise _refused("Value for parameter TaskHandle is invalid.")


def _refused(reason: str) -> Refusal:
    return Refusal(faults.INVALID_PARAMETER_VALUE, reason)
