"""Management of failed and waiting tasks: find, retry, cancel.

Each is a sequence of commands on any service. A failed task is a message in the queue
`QUEUE.failed`, with its arguments and its traceback; a cancelled one is an id in a queue that every
worker reads once a second.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import msgspec

from penstock.errors import ProtocolError, QueueNotFound, RequestError
from penstock.service import (
    BATCH_ITEMS_MAX,
    MINUTE_MS,
    PEEK_LIMIT_MAX,
    Batch,
    BatchItem,
    Claim,
    Delete,
    Message,
    Peek,
    Pull,
    Push,
    Release,
    State,
    check_id,
)
from penstock.tasks.commands import Commands, ensure_queue, push_creating, raise_unavailable
from penstock.tasks.envelope import Envelope, StoredResult, decode_envelope, encode
from penstock.tasks.names import (
    CANCELLED_QUEUE,
    CANCELLED_TTL_MS,
    TASK_QUEUE,
    cancelled_queue,
    failed_queue,
)
from penstock.tasks.results import find_result
from penstock.tasks.running import TaskOutcome
from penstock.tasks.tracing import kept_attributes

if TYPE_CHECKING:
    from penstock.tasks.app import TaskApp

# So few that their claims do not run out while they are pushed and deleted.
_PULL_MAX: Final = 100
_PULL_BYTES_MAX: Final = 8 * 1024 * 1024
_HELD_MS: Final = 5 * MINUTE_MS
_STATES: Final[tuple[State, ...]] = ("in_flight", "visible", "delayed")


class FoundTask(NamedTuple):
    """A task that was found: its state, its queue, its message and the decoded content."""

    id: str
    state: str
    queue: str
    message: Message | None
    envelope: Envelope | None
    result: StoredResult | None = None


class CancelledIds:
    """The ids of the cancelled tasks, as one process last read them."""

    OUTCOME: ClassVar[TaskOutcome] = TaskOutcome(is_cancelled=True)

    def __init__(self, app: str) -> None:
        self._queue = cancelled_queue(app)
        self._ids: frozenset[str] = frozenset()

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._ids

    def __iter__(self) -> Any:
        return iter(self._ids)

    def refresh(self) -> Commands[None]:
        """Reads them again."""
        try:
            messages = yield Peek(self._queue, PEEK_LIMIT_MAX)
        except RequestError:
            # The queue does not exist before the first cancel; some services cannot peek.
            messages = []
        self._ids = frozenset(message.body.decode(errors="replace") for message in messages)


def cancel(app: "TaskApp", task_id: str) -> Commands[None]:
    """Cancels a task: workers drop it when they pull it, and end it if they can while it runs.

    Raises QueueFull after 1,000 cancels within a week.
    """
    check_id("id", task_id)
    push = Push(
        cancelled_queue(app.name), task_id.encode(), ttl_ms=CANCELLED_TTL_MS, dedup_id=task_id
    )
    yield from push_creating(push, CANCELLED_QUEUE)


def failed_tasks(queues: Iterable[str], limit: int = PEEK_LIMIT_MAX) -> Commands[list[FoundTask]]:
    """The failed tasks of queues, up to `limit` of each."""
    found: list[FoundTask] = []
    for queue in queues:
        try:
            messages = yield Peek(failed_queue(queue), min(limit, PEEK_LIMIT_MAX))
        except QueueNotFound:
            continue
        found += [_found(queue, "failed", message) for message in messages]
    return found


def retry_failed(
    queues: Iterable[str], ids: set[str] | None = None, separator: str = "."
) -> Commands[list[str]]:
    """Pushes failed tasks to their queues again, with all attempts left; returns their ids.

    Without `ids`, all of them. Each is deleted from the failed queue after its push. Raises the
    error of the first that is refused, after the others; it stays failed.
    """
    retried: list[str] = []
    refused: RequestError | None = None
    for queue in queues:
        source = failed_queue(queue, separator)
        kept: dict[str, Claim] = {}
        pushed: set[str] = set()
        while True:
            try:
                claims: list[Claim] = yield Pull(
                    source, _PULL_MAX, _HELD_MS, wait_ms=0, bytes_max=_PULL_BYTES_MAX
                )
            except QueueNotFound:
                break
            # A claim that was seen before has run out: the loop has gone through all of them.
            claims = [claim for claim in claims if claim.id not in kept]
            if not claims:
                break
            chosen: list[tuple[Claim, Push]] = []
            done: list[BatchItem] = []
            for claim in claims:
                task = _found(queue, "failed", claim)
                wanted = ids is None or task.id in ids
                if claim.id in pushed:
                    # Its claim ran out between its push and its delete.
                    done.append(Delete(source, claim.proof))
                elif wanted and task.envelope is not None and task.envelope.task:
                    chosen.append((claim, _retry(queue, task.envelope, claim)))
                else:
                    kept[claim.id] = claim
            replies = yield from _push_all([push for _, push in chosen])
            for (claim, _), reply in zip(chosen, replies, strict=True):
                if isinstance(reply, RequestError):
                    refused = refused or reply
                    kept[claim.id] = claim
                    continue
                pushed.add(claim.id)
                done.append(Delete(source, claim.proof))
                retried.append(_found(queue, "failed", claim).id)
            if done:
                raise_unavailable((yield Batch(done)))
            if ids is not None and ids <= set(retried):
                break
        releases: list[BatchItem] = [Release(source, claim.proof) for claim in kept.values()]
        for at in range(0, len(releases), BATCH_ITEMS_MAX):
            yield Batch(releases[at : at + BATCH_ITEMS_MAX])
    if refused is not None:
        raise refused
    return retried


def _retry(queue: str, failed: Envelope, claim: Claim) -> Push:
    envelope = msgspec.structs.replace(failed, failures=0, failure=None, expires_at_ms=None)
    attributes = kept_attributes(claim.attributes)
    return Push(queue, encode(envelope), priority=claim.priority, attributes=attributes)


def _push_all(pushes: list[Push]) -> Commands[list[Any]]:
    """The reply to each push, or the RequestError that refused it. Raises UnavailableError."""
    if not pushes:
        return []
    replies: list[Any] = yield Batch([*pushes])
    raise_unavailable(replies)
    if any(isinstance(reply, QueueNotFound) for reply in replies):
        yield from ensure_queue(pushes[0].queue, TASK_QUEUE)
        replies = yield Batch([*pushes])
        raise_unavailable(replies)
    return replies


def find_task(app: "TaskApp", queues: Iterable[str], task_id: str) -> Commands[FoundTask | None]:
    """A task by its id: searched among the first messages of each queue, the failed tasks and
    the results."""
    result = yield from find_result(app.name, task_id)
    for queue in queues:
        for state in _STATES:
            try:
                messages = yield Peek(queue, PEEK_LIMIT_MAX, state)
            except QueueNotFound:
                break
            for message in messages:
                task = _found(queue, _SHOWN[state], message)
                if task.id == task_id:
                    return task._replace(result=result)
        for task in (yield from failed_tasks([queue])):
            if task.id == task_id:
                return task._replace(result=result)
    if result is None:
        return None
    return FoundTask(task_id, result.state, "", None, None, result)


_SHOWN: Final[dict[State, str]] = {
    "in_flight": "running",
    "visible": "waiting",
    "delayed": "delayed",
}


def _found(queue: str, state: str, message: Message) -> FoundTask:
    try:
        envelope = decode_envelope(message.body)
    except ProtocolError:
        return FoundTask(message.id, state, queue, message, None)
    return FoundTask(envelope.id or message.id, state, queue, message, envelope)
