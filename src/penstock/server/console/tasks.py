"""Tasks for the console: by function and state, failed ones with their tracebacks, schedules.

What an app has registered is not known here; its messages, queues and notes say enough. A queue is
one of tasks if its first message is a task, or if it has a queue for failed tasks.
"""

from typing import Any, Final

from penstock.backends.loop import LoopService, Steps
from penstock.errors import ProtocolError, QueueNotFound
from penstock.server.console.actions import Performed
from penstock.server.console.status import QueueStatus, Status
from penstock.server.console.visitor import Refused
from penstock.service import Message, Peek, PeekFrom, Push, State
from penstock.tasks.commands import push_creating
from penstock.tasks.control import retry_failed
from penstock.tasks.envelope import Envelope, decode_envelope
from penstock.tasks.names import (
    CANCELLED_QUEUE,
    CANCELLED_TTL_MS,
    DEFAULT_APP,
    cancelled_queue,
    failed_queue,
)
from penstock.tasks.schedule import NEXT_NOTE, NOTE, TASK_NOTE, WHEN_NOTE

# How many messages of a queue in one state are read, and how many tasks are listed.
READ_MAX: Final = 2_000
LISTED_MAX: Final = 200
QUEUES_MAX: Final = 500
_SLICE: Final = 200
_SLICE_BYTES: Final = 1024 * 1024
_STATES: Final[dict[State, str]] = {
    "visible": "waiting",
    "delayed": "delayed",
    "in_flight": "running",
}
_FAILED: Final = failed_queue("")
_OTHERS: Final = (".results.", ".group.", ".schedule.", ".rate.", ".slots.", ".cancelled")


class TaskViews:
    """Reads tasks of one service, retries and cancels them."""

    def __init__(self, service: LoopService, status: Status, *, mask: bool) -> None:
        self._service = service
        self._status = status
        self._mask = mask

    def overview(self) -> Steps[dict[str, Any]]:
        """The tasks of all queues, in the numbers that are read of each."""
        if "peek pages" in self._service.LACKS:
            raise Refused(400, f"Not shown: {self._service.LACKS['peek pages']}.")
        self._status.expire()
        yield from self._status.fresh()
        queues = yield from self._task_queues()
        functions: dict[tuple[str, str], dict[str, Any]] = {}
        listed: list[dict[str, Any]] = []
        for queue in queues:
            for state, shown in _STATES.items():
                messages = yield from self._read(queue, state)
                _count(functions, listed, queue, shown, messages)
            failed = yield from self._read(failed_queue(queue), "visible")
            for task in (self._failed(queue, message) for message in failed):
                function = _function(functions, queue, task["task"])
                function["failed"] += 1
                listed.append(task)
        # The newest failures first: they are what somebody looks for.
        failures = sorted(
            (task for task in listed if task["state"] == "failed"),
            key=lambda task: -task["failed_at_ms"],
        )
        others = [task for task in listed if task["state"] != "failed"]
        return {
            "queues": queues,
            "functions": [*functions.values()],
            "failures": failures[:LISTED_MAX],
            "tasks": others[:LISTED_MAX],
            "schedules": [*_schedules(self._status)],
            "now_ms": self._service.now_ms(),
        }

    def _task_queues(self) -> Steps[list[str]]:
        names = self._status.queues
        found: list[str] = []
        looked = 0
        for name, queue in list(names.items()):
            if name.endswith(_FAILED) or any(part in name for part in _OTHERS):
                continue
            if failed_queue(name) in names:
                found.append(name)
            elif queue.stats.messages and looked < QUEUES_MAX:
                looked += 1
                state: State = "visible" if queue.stats.visible else "in_flight"
                try:
                    first: list[Message] = yield Peek(name, 1, state)
                except QueueNotFound:
                    continue
                if first and _envelope(first[0]) is not None:
                    found.append(name)
                if looked % _SLICE == 0:
                    yield None
        return found

    def _read(self, queue: str, state: State) -> Steps[list[Message]]:
        """The first messages of a queue in one state."""
        messages: list[Message] = []
        while len(messages) < READ_MAX:
            after = messages[-1].sequence if messages else 0
            try:
                page: list[Message] = yield PeekFrom(queue, after, _SLICE, state, _SLICE_BYTES)
            except QueueNotFound:
                break
            messages += page
            if len(page) < _SLICE:
                break
            yield None
        return messages

    def _failed(self, queue: str, message: Message) -> dict[str, Any]:
        envelope = _envelope(message)
        failure = None if envelope is None else envelope.failure
        shown = _task(queue, "failed", message, envelope) | {
            "failed_at_ms": message.pushed_at_ms,
            "error": "",
            "traceback": "",
        }
        if failure is not None:
            shown["failed_at_ms"] = failure.at_ms or message.pushed_at_ms
            # A traceback and an error quote what the task worked on.
            if not self._mask:
                shown |= {"error": failure.error, "traceback": failure.traceback}
        return shown

    def retry(self, given: dict[str, Any], who: str) -> Steps[Performed]:
        """Pushes failed tasks of a queue again, with all attempts left."""
        queue, ids = given.get("queue"), given.get("ids")
        if type(queue) is not str or not (ids is None or type(ids) is list):
            raise Refused(400, "queue, ids: expected the name of a queue, and ids or nothing")
        retried = yield from retry_failed([queue], None if ids is None else set(map(str, ids)))
        told = f"retried {len(retried)} failed tasks of {queue}"
        return Performed({"count": len(retried)}, told)

    def cancel(self, given: dict[str, Any], who: str) -> Steps[Performed]:
        """Cancels a task for every app of this store: a worker drops it, or ends it if it can."""
        task_id, queue = given.get("id"), given.get("queue")
        if type(task_id) is not str or not 1 <= len(task_id) <= 128:
            raise Refused(400, "id: expected the id of a task")
        if not (queue is None or (type(queue) is str and queue in self._status.queues)):
            raise Refused(400, "queue: expected the queue of the task, or nothing")
        # The queue of an app's tasks has the app's name, unless they were given another one.
        for app in self._apps() | ({queue} if queue else set()) or {DEFAULT_APP}:
            push = Push(
                cancelled_queue(app), task_id.encode(), ttl_ms=CANCELLED_TTL_MS, dedup_id=task_id
            )
            yield from push_creating(push, CANCELLED_QUEUE)
        return Performed({}, f"cancelled task {task_id}")

    def _apps(self) -> set[str]:
        """The apps that have queues of their own here, by the names of those."""
        return {
            name.partition(part)[0]
            for name in self._status.queues
            for part in _OTHERS
            if part in name
        }


def _envelope(message: Message) -> Envelope | None:
    try:
        return decode_envelope(message.body)
    except ProtocolError:
        return None


def _function(
    functions: dict[tuple[str, str], dict[str, Any]], queue: str, task: str
) -> dict[str, Any]:
    return functions.setdefault(
        (queue, task),
        {
            "task": task,
            "queue": queue,
            "waiting": 0,
            "delayed": 0,
            "running": 0,
            "failed": 0,
            "retries": 0,
        },
    )


def _count(
    functions: dict[tuple[str, str], dict[str, Any]],
    listed: list[dict[str, Any]],
    queue: str,
    state: str,
    messages: list[Message],
) -> None:
    """Adds the tasks of a queue in one state to those of their functions."""
    for message in messages:
        envelope = _envelope(message)
        if envelope is None:
            continue
        function = _function(functions, queue, envelope.task)
        function[state] += 1
        function["retries"] += envelope.failures > 0
        if len(listed) < LISTED_MAX:
            listed.append(_task(queue, state, message, envelope))


def _task(queue: str, state: str, message: Message, envelope: Envelope | None) -> dict[str, Any]:
    return {
        "id": (envelope.id if envelope is not None else None) or message.id,
        "message": message.id,
        "task": envelope.task if envelope is not None else "",
        "queue": queue,
        "state": state,
        "failures": envelope.failures if envelope is not None else 0,
        "pushed_at_ms": message.pushed_at_ms,
    }


def _schedules(status: Status) -> list[dict[str, Any]]:
    """The schedules of all apps, from the notes of their queues."""
    return [
        {
            "app": name.partition(".schedule.")[0],
            "name": name.partition(".schedule.")[2],
            "task": _notes(queue).get(TASK_NOTE, ""),
            "when": _notes(queue).get(WHEN_NOTE, ""),
            "last_ms": _as_ms(_notes(queue).get(NOTE, "")),
            "next_ms": _as_ms(_notes(queue).get(NEXT_NOTE, "")),
        }
        for name, queue in status.queues.items()
        if ".schedule." in name
    ]


def _notes(queue: QueueStatus) -> dict[str, str]:
    return queue.settings.annotations


def _as_ms(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None
