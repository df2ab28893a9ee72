"""Flows of tasks: `chain`, one after another; `group`, in parallel, then a final task."""

from typing import Any, Final
from uuid import uuid4

from penstock.public import Seconds, to_ms
from penstock.service import PEEK_LIMIT_MAX, Push
from penstock.tasks.commands import ensure_queue
from penstock.tasks.envelope import Envelope, GroupPlace, Step
from penstock.tasks.errors import TaskError
from penstock.tasks.names import GROUP_QUEUE, group_queue
from penstock.tasks.results import PushedTask
from penstock.tasks.task import PreparedTask

MEMBERS_MAX: Final = PEEK_LIMIT_MAX
CHAIN_MAX: Final = 1_000


class TaskChain:
    """Tasks one after another: each gets the result of the one before as its first argument."""

    def __init__(self, calls: tuple[PreparedTask, ...]) -> None:
        if not 1 <= len(calls) <= CHAIN_MAX:
            raise TaskError(f"chain: expected 1 to {CHAIN_MAX} tasks, got {len(calls)}")
        _check_calls("chain", calls)
        self.calls = calls

    def push(self) -> PushedTask[Any]:
        """Pushes the first task; the result is that of the last. Raises TaskError."""
        return self._push(None)

    def push_in(self, delay: Seconds) -> PushedTask[Any]:
        """The same, with the first task delayed."""
        return self._push(to_ms("delay", delay))

    def _push(self, delay_ms: int | None) -> PushedTask[Any]:
        last_id = str(uuid4())
        push = _first_push(self, last_id, None, delay_ms)
        reply = self.calls[0].task.app.push(push)
        task_id = last_id if len(self.calls) > 1 else reply.id
        return PushedTask(self.calls[-1].task, task_id)

    def steps(self, last_id: str | None) -> list[Step]:
        """The tasks after the first one."""
        last = len(self.calls) - 1
        return [
            call.as_step(last_id if number == last else None)
            for number, call in enumerate(self.calls)
            if number
        ]


class TaskGroup:
    """Tasks in parallel, and a final one that gets the list of their results."""

    def __init__(
        self, members: tuple[PreparedTask | TaskChain, ...], final: PreparedTask | None
    ) -> None:
        if not 1 <= len(members) <= MEMBERS_MAX:
            raise TaskError(f"group: expected 1 to {MEMBERS_MAX} tasks, got {len(members)}")
        self._chains = [
            member if isinstance(member, TaskChain) else TaskChain((member,)) for member in members
        ]
        if final is not None:
            _check_calls("group: final", (final,))
        self._final = final

    def push(self) -> PushedTask[Any]:
        """Pushes the members; the result is that of the final task. Raises TaskError.

        The final task runs once every member has succeeded. A member that fails for the last time
        keeps it from running, until that member is retried and succeeds.
        """
        group_id = str(uuid4())
        final_id = str(uuid4())
        final = None if self._final is None else self._final.as_step(final_id)
        size = len(self._chains)
        pushes = [
            _first_push(chain, None, GroupPlace(group_id, index, size, final), None)
            for index, chain in enumerate(self._chains)
        ]
        app = self._chains[0].calls[0].task.app
        if "peek" in app.service.LACKS:
            raise TaskError(f"group: not on this store: {app.service.LACKS['peek']}")
        app.run_steps(ensure_queue(group_queue(app.name, group_id), GROUP_QUEUE))
        app.push_batch(pushes)
        last = self._final or self._chains[0].calls[-1]
        return PushedTask(last.task, final_id)


def chain(*calls: PreparedTask) -> TaskChain:
    """Tasks to be run one after another: `chain(load.prepare(7), send.prepare()).push()`.

    Raises TaskError.
    """
    return TaskChain(calls)


def group(*members: PreparedTask | TaskChain, final: PreparedTask | None = None) -> TaskGroup:
    """Tasks to be run in parallel: `group(*(f.prepare(n) for n in range(9)), final=g.prepare())`.

    A member may be a chain. Raises TaskError.
    """
    return TaskGroup(members, final)


def _check_calls(where: str, calls: tuple[Any, ...]) -> None:
    for call in calls:
        if not isinstance(call, PreparedTask):
            raise TaskError(
                f"{where}: expected task.prepare(…), got {type(call).__name__}; "
                "prepare does not run or push anything"
            )
    if len({id(call.task.app) for call in calls}) > 1:
        raise TaskError(f"{where}: the tasks belong to several apps")


def _first_push(
    chained: TaskChain, last_id: str | None, place: GroupPlace | None, delay_ms: int | None
) -> Push:
    """The push of a chain's first task, which contains the tasks after it."""
    first = chained.calls[0]
    envelope = Envelope(first.task.name, first.encoded(), then=chained.steps(last_id), group=place)
    return first.task.push_of(envelope, delay_ms)
