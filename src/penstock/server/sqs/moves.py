"""The SQS actions on move tasks: dead letters are moved back, a bounded number at a time.

A task moves messages by redrives of at most `redrive_max`, between which other commands run, and
no faster than its rate. The tasks of a queue are stored in its annotations; a task that runs when
the server stops continues when it starts again. If a service cannot store so long an annotation,
its tasks last until the server ends.
"""

import asyncio
from base64 import urlsafe_b64encode
from contextlib import suppress
from typing import Any, Final, NoReturn
from uuid import uuid4

import msgspec

from penstock.backends.loop import Steps, result_of
from penstock.errors import InvalidField, PenstockError, QueueNotFound, RequestError
from penstock.server.sqs.lookup import (
    Caller,
    QueueLookup,
    annotated,
    decode_opaque,
    refusal_of,
)
from penstock.service import Command, DescribeQueue, QueueInfo, QueueStats, Redrive, Stats
from penstock.wire.sqs import errors as faults
from penstock.wire.sqs import model as model
from penstock.wire.sqs.address import read_arn
from penstock.wire.sqs.errors import Refusal

RATE_MAX: Final = 500
RESULTS_MAX: Final = 10
TASKS_KEPT_MAX: Final = 10
TICK_S: Final = 0.1
RUNNING: Final = "RUNNING"
COMPLETED: Final = "COMPLETED"
CANCELLED: Final = "CANCELLED"
FAILED: Final = "FAILED"
# The annotation that keeps a queue's tasks.
NOTE: Final = ".moves"
NO_SOURCE: Final = "CouldNotDetermineMessageSource"


class MoveTask(msgspec.Struct):
    """One task: its queues, its rate, and its progress."""

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

    def __init__(self, lookup: QueueLookup) -> None:
        self._lookup = lookup
        self._service = lookup.service
        # By the queue's name and when it was created, the oldest task first.
        self._tasks: dict[tuple[str, int], list[MoveTask]] = {}
        self._workers: dict[str, asyncio.Task[None]] = {}
        self._time_moved = asyncio.Event()

    def time_moved(self) -> None:
        """A manual clock was advanced: tasks with a rate go on in the next turn of the loop."""
        moved, self._time_moved = self._time_moved, asyncio.Event()
        moved.set()

    def resume(self) -> Steps[None]:
        """Continues the tasks that ran when the server was stopped.

        Requests may be served meanwhile. A task that one of them starts is run by `start`, and a
        task whose queue is deleted ends.
        """
        for queue in (
            yield from self._lookup.select(lambda each: NOTE in each.settings.annotations)
        ):
            kept = {task.id for task in _read_note(queue)}
            for task in self._of(queue):
                if task.status != RUNNING or task.id not in kept or task.id in self._workers:
                    continue
                try:
                    stats: QueueStats = yield Stats(queue.queue)
                except QueueNotFound:
                    break
                # It may have been cancelled during the command.
                if task.status == RUNNING and task.id not in self._workers:
                    task.moved = max(0, task.to_move - stats.messages)
                    self._work(task, queue)

    def _of(self, queue: QueueInfo) -> list[MoveTask]:
        """The tasks of a queue: those of this process, or those stored with the queue."""
        key = (queue.queue, queue.created_at_ms)
        tasks = self._tasks.get(key)
        if tasks is None:
            tasks = _read_note(queue)
            if tasks:
                self._tasks[key] = tasks
        return tasks

    def _store(self, queue: QueueInfo) -> Steps[None]:
        """Stores the tasks of a queue in its annotations, if the service can.

        Another request may store a later list during these commands, and this one may then
        overwrite it. So it is written again until the list did not change meanwhile.
        """
        kept: list[tuple[str, str]] | None = None
        try:
            while kept != (current := [(task.id, task.status) for task in self._of(queue)]):
                kept = current
                described: QueueInfo = yield DescribeQueue(queue.queue)
                tasks = msgspec.json.encode(self._of(queue)).decode()
                yield annotated(described, NOTE, tasks)
        except RequestError:
            if not self._service.LACKS:
                raise

    def _work(self, task: MoveTask, source: QueueInfo) -> None:
        """Runs a task, unless it is running already."""
        if task.id in self._workers:
            return
        name = f"move {task.id}"
        worker = asyncio.get_running_loop().create_task(self._run(task, source), name=name)
        self._workers[task.id] = worker
        worker.add_done_callback(lambda _: self._workers.pop(task.id, None))

    def start(
        self, asked: model.StartMessageMoveTaskRequest, caller: Caller
    ) -> Steps[model.StartMoveResult]:
        """StartMessageMoveTask."""
        source = yield from self._queue(asked.source_arn, "SourceArn", caller)
        to = None
        if asked.destination_arn is not None:
            to = yield from self._queue(asked.destination_arn, "DestinationArn", caller)
        rate = asked.max_number_of_messages_per_second
        if rate is not None and not 1 <= rate <= RATE_MAX:
            raise _refused(
                "Value for parameter MaxNumberOfMessagesPerSecond is invalid. Reason: You must "
                f"enter a number that's between 1 and {RATE_MAX}."
            )
        if not (yield from self._lookup.sources_of(source.queue)):
            raise _refused("Source queue must be configured as a Dead Letter Queue.")
        if to is not None and to.queue == source.queue:
            raise _refused("Source queue arn and destination queue arn cannot be the same.")
        if to is not None and to.settings.fifo != source.settings.fifo:
            raise _refused("The source queue and destination queue must be of the same queue type.")
        stats: QueueStats = yield Stats(source.queue)
        tasks = [*self._of(source)]
        if any(task.status == RUNNING for task in tasks):
            raise _refused(
                "There is already a task running. Only one active task is allowed for a source "
                "queue arn at a given time."
            )
        to_name = None if to is None else to.queue
        now_ms = self._lookup.now_ms()
        task = MoveTask(str(uuid4()), source.queue, to_name, rate, now_ms, stats.messages)
        tasks = [*tasks, task][-TASKS_KEPT_MAX:]
        # Before the next command: a second request that arrives during it must find the task.
        self._tasks[source.queue, source.created_at_ms] = tasks
        try:
            yield from self._store(source)
        except BaseException:
            tasks.remove(task)
            raise
        self._work(task, source)
        return model.StartMoveResult(self._show_id(task))

    def cancel(
        self, asked: model.CancelMessageMoveTaskRequest, caller: Caller
    ) -> Steps[model.CancelMoveResult]:
        """CancelMessageMoveTask."""
        task_id, arn = _read_id(asked.task or "")
        source = yield from self._queue(arn, "SourceArn", caller)
        tasks = self._of(source)
        for task in tasks:
            if task.id == task_id:
                if task.status != RUNNING:
                    raise Refusal(
                        faults.UNSUPPORTED_OPERATION, "Only active tasks can be cancelled."
                    )
                task.status = CANCELLED
                worker = self._workers.get(task.id)
                if worker is not None:
                    worker.cancel()
                yield from self._store(source)
                return model.CancelMoveResult(task.moved)
        raise Refusal(faults.RESOURCE_NOT_FOUND, "Task does not exist.")

    def list(
        self, asked: model.ListMessageMoveTasksRequest, caller: Caller
    ) -> Steps[model.MoveTasksResult]:
        """ListMessageMoveTasks: the latest first."""
        source = yield from self._queue(asked.source_arn, "SourceArn", caller)
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
            self._lookup.arn(task.source),
            task.moved,
            self._show_id(task) if task.status == RUNNING else None,
            None if task.to is None else self._lookup.arn(task.to),
            task.rate,
            task.to_move,
            task.failure,
            task.started_at_ms,
        )

    def _queue(self, arn: str | None, parameter: str, caller: Caller) -> Steps[QueueInfo]:
        address = read_arn(arn)
        if address is None:
            raise _refused(
                f"You must use this format to specify the {parameter}: "
                "arn:<partition>:<service>:<region>:<account-id>:<resource-id>"
            )
        queue = None
        if caller.may_reach(address.owner):
            queue = yield from self._lookup.find(address.owner, address.name)
        if queue is None:
            raise Refusal(
                faults.RESOURCE_NOT_FOUND,
                f"The resource that you specified for the {parameter} parameter doesn't exist.",
            )
        return queue

    def _show_id(self, task: MoveTask) -> str:
        named = {"taskId": task.id, "sourceArn": self._lookup.arn(task.source)}
        return urlsafe_b64encode(msgspec.json.encode(named)).decode()

    async def _run(self, task: MoveTask, source: QueueInfo) -> None:
        started_ms = self._lookup.now_ms()
        moved_before = task.moved
        try:
            while task.status == RUNNING and task.moved < task.to_move:
                if not await self._still_exists(source):
                    return
                step = min(self._service.redrive_max, task.to_move - task.moved)
                if task.rate is not None:
                    # As many as the rate allows by now; the first of them at once.
                    passed_ms = self._lookup.now_ms() - started_ms
                    due = 1 + passed_ms * task.rate // 1_000
                    step = min(step, due - (task.moved - moved_before))
                if step > 0:
                    moved: int = await self._ask(Redrive(task.source, task.to, step))
                    task.moved += moved
                    if moved == 0:
                        break
                if task.rate is None or step > 0:
                    await asyncio.sleep(0)
                    continue
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._time_moved.wait(), TICK_S)
            if task.status == RUNNING:
                task.status = COMPLETED
        except InvalidField:
            # None of the remaining messages came from a queue that still exists: they stay.
            task.status = FAILED
            task.failure = NO_SOURCE
        except PenstockError as error:
            task.status = FAILED
            task.failure = refusal_of(error).fault.query_code
        await self._store_ended(source)

    async def _ask(self, command: Command[Any]) -> Any:
        return await result_of(self._service.submit(command))

    async def _still_exists(self, source: QueueInfo) -> bool:
        """Whether the queue still exists: one of the same name may have been created since."""
        try:
            queue: QueueInfo = await self._ask(DescribeQueue(source.queue))
        except QueueNotFound:
            return False
        return queue.created_at_ms == source.created_at_ms

    async def _store_ended(self, source: QueueInfo) -> None:
        try:
            if await self._still_exists(source):
                await result_of(self._service.run(self._store(source)))
        except PenstockError:
            # The task has ended all the same; after a restart it has nothing left to move.
            return

    async def close(self) -> None:
        """Stops the running tasks; they continue when the server starts again."""
        workers = list(self._workers.values())
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def _read_note(queue: QueueInfo) -> list[MoveTask]:
    """The tasks in a queue's annotations; none if another client has written something else."""
    kept = queue.settings.annotations.get(NOTE)
    if kept is None:
        return []
    try:
        return msgspec.json.decode(kept, type=list[MoveTask])
    except msgspec.DecodeError:
        return []


def _read_id(text: str) -> tuple[str, str]:
    try:
        named: Any = msgspec.json.decode(decode_opaque(text))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        _bad_id()
    if not isinstance(named, dict):
        _bad_id()
    task_id, arn = named.get("taskId"), named.get("sourceArn")
    if not isinstance(task_id, str) or read_arn(arn) is None:
        _bad_id()
    return task_id, str(arn)


def _bad_id() -> NoReturn:
    raise _refused("Value for parameter TaskHandle is invalid.")


def _refused(reason: str) -> Refusal:
    return Refusal(faults.INVALID_PARAMETER_VALUE, reason)
