"""Finishes tasks that have an outcome: pushes results, next tasks and retries, then deletes.

The follow-ups of an outcome are pushed first, and the message of the task is deleted last. If a
worker dies in between, the message stays and the task is run again; the dedup ids of the pushes are
made from the message's id, so that no follow-up is pushed twice.
"""

import random
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from penstock.errors import MessageTooLarge, ProtocolError, QueueNotFound, RequestError
from penstock.output import logger
from penstock.service import (
    PEEK_LIMIT_MAX,
    Attributes,
    Batch,
    Delete,
    DeleteQueue,
    Peek,
    Push,
    Release,
    Stats,
)
from penstock.tasks.arguments import with_first
from penstock.tasks.commands import Commands, push_creating, raise_unavailable
from penstock.tasks.envelope import (
    CANCELLED,
    DONE,
    FAILED,
    Envelope,
    Failure,
    GroupPlace,
    Step,
    StoredResult,
    decode_result,
    encode,
)
from penstock.tasks.names import (
    FAILED_QUEUE,
    RESULT_QUEUE,
    RESULTS_NEED,
    TASK_QUEUE,
    failed_queue,
    group_queue,
    result_queue,
    separator_of,
)
from penstock.tasks.running import HeldTask, TaskOutcome
from penstock.tasks.tracing import kept_attributes

if TYPE_CHECKING:
    from penstock.tasks.app import TaskApp

_logger: Final = logger("penstock.tasks")
# The delay of a task whose follow-ups cannot be pushed, because a queue is full for example.
_REFUSED_DELAY_MS: Final = 10_000
# Of the error of a retry that would be too large with all of it.
_SMALL_ERROR_CHARS: Final = 100


class _FollowUp(NamedTuple):
    """A push that follows from an outcome, and the settings with which its queue is created."""

    held: HeldTask
    push: Push
    settings: dict[str, Any] | None
    # Pushed instead if the other is too large for its queue.
    smaller: Push | None = None


class TaskFinisher:
    """Finishes the tasks of one app, as steps; it uses only random jitter and the app's clock."""

    def __init__(self, app: "TaskApp", lacks: Container[str]) -> None:
        """`lacks` names what the service cannot do."""
        self._app = app
        self._separator = separator_of(app.url)
        self._has_dedup = "dedup" not in lacks
        self._keeps_results = not any(name in lacks for name in RESULTS_NEED)

    def finish(self, tasks: Sequence[HeldTask]) -> Commands[None]:
        """Finishes tasks that have outcomes. Raises UnavailableError, and may then be repeated."""
        kept = yield from self._push_all(tasks, self._follow_ups)
        # A result or a next task that cannot be pushed fails its task.
        kept = yield from self._push_all(kept, self._follow_ups)
        for held in kept:
            _logger.error("the outcome of task %s cannot be stored; it is tried again", held.id)
        ended = [held for held in tasks if held not in kept] if kept else tasks
        for place, attributes in _completed_groups(ended):
            yield from self._finish_group(place, attributes)
        items: list[Any] = [Delete(held.claim.queue, held.claim.proof) for held in ended]
        items += [Release(held.claim.queue, held.claim.proof, _REFUSED_DELAY_MS) for held in kept]
        items += [Release(held.slot.queue, held.slot.proof) for held in tasks if held.slot]
        # If an item is refused, its claim was lost: another worker runs that task.
        raise_unavailable((yield Batch(items)))

    def _push_all(self, tasks: Iterable[HeldTask], follow_ups_of: Any) -> Commands[list[HeldTask]]:
        """Pushes what the tasks lead to; returns those of which a push was refused."""
        follow_ups: list[_FollowUp] = [each for held in tasks for each in follow_ups_of(held)]
        if not follow_ups:
            return []
        replies: list[Any] = yield Batch([each.push for each in follow_ups])
        raise_unavailable(replies)
        refused: dict[int, HeldTask] = {}
        for each, reply in zip(follow_ups, replies, strict=True):
            error = reply if isinstance(reply, RequestError) else None
            if isinstance(error, MessageTooLarge) and each.smaller is not None:
                try:
                    yield each.smaller
                    error = None
                except RequestError as second:
                    error = second
            if isinstance(error, QueueNotFound) and each.settings is not None:
                try:
                    yield from push_creating(each.push, each.settings)
                    error = None
                except RequestError as second:
                    error = second
            if error is None or (isinstance(error, QueueNotFound) and each.settings is None):
                continue
            refused[id(each.held)] = each.held
            reason = f"its outcome cannot be pushed to {each.push.queue!r}: {error}"
            each.held.outcome = TaskOutcome(failure=Failure(reason, is_final=True))
        return list(refused.values())

    def _follow_ups(self, held: HeldTask) -> Iterable[_FollowUp]:
        outcome = held.outcome
        assert outcome is not None
        if outcome.failure is not None:
            return self._follow_ups_of_failure(held, outcome.failure)
        if not held.needs_value and not outcome.is_cancelled:
            return ()
        return self._follow_ups_of_end(held, outcome)

    def _follow_ups_of_end(self, held: HeldTask, outcome: TaskOutcome) -> Iterable[_FollowUp]:
        envelope = held.envelope
        if outcome.is_cancelled:
            yield from self._results_of(held, CANCELLED, Failure("it was cancelled"))
            return
        value = msgspec.Raw(outcome.value)
        ttl_ms = held.task.options.result_ttl_ms if held.task is not None else None
        if ttl_ms is not None and self._keeps_results:
            yield self._result(held, StoredResult(held.id, DONE, value), ttl_ms)
        if envelope.then:
            yield _FollowUp(
                held, self._next(held, envelope.then, envelope.group, value), TASK_QUEUE
            )
        elif envelope.group is not None:
            place = envelope.group
            result = StoredResult(held.id, DONE, value, index=place.index)
            push = Push(
                group_queue(self._app.name, place.id),
                encode(result),
                dedup_id=self._dedup_id(f"{place.id}/{place.index}"),
            )
            # Without settings: the queue of a group that has ended is not created again.
            yield _FollowUp(held, push, None)

    def _follow_ups_of_failure(self, held: HeldTask, failure: Failure) -> Iterable[_FollowUp]:
        claim, now_ms = held.claim, self._app.now_ms()
        failure = msgspec.structs.replace(failure, at_ms=now_ms, queue=claim.queue)
        delay_ms = self._retry_delay_ms(held, failure)
        left_ms = _ttl_left_ms(held.envelope, now_ms)
        if delay_ms is None or (left_ms is not None and left_ms <= delay_ms):
            yield from self._results_of(held, FAILED, failure)
            body = self._failed_body(held, failure)
            push = Push(
                failed_queue(claim.queue, self._separator),
                body,
                priority=claim.priority,
                dedup_id=self._dedup_id(f"{claim.id}/failed"),
                attributes=kept_attributes(claim.attributes),
            )
            yield _FollowUp(held, push, FAILED_QUEUE)
            return
        push = Push(
            claim.queue,
            self._retried(held, failure),
            delay_ms=delay_ms,
            priority=claim.priority,
            ttl_ms=left_ms,
            dedup_id=self._dedup_id(f"{claim.id}/retry"),
            attributes=kept_attributes(claim.attributes),
        )
        body = self._retried(held, failure, _SMALL_ERROR_CHARS)
        smaller = msgspec.structs.replace(push, body=body)
        yield _FollowUp(held, push, TASK_QUEUE, smaller)

    def _retried(self, held: HeldTask, failure: Failure, chars_max: int | None = None) -> bytes:
        """The message of a retry, with at most so much of the error.

        With `_SMALL_ERROR_CHARS` it is larger than that of the call by `RETRY_BYTES` at most.
        """
        short = msgspec.structs.replace(failure, traceback="", error=failure.error[:chars_max])
        return encode(
            msgspec.structs.replace(
                held.envelope, id=held.id, failures=held.failures, failure=short
            )
        )

    def _retry_delay_ms(self, held: HeldTask, failure: Failure) -> int | None:
        """How long the task waits for its next attempt; None if it has none left."""
        if held.task is None or held.is_final_failure:
            return None
        if failure.retry_ms is not None:
            return failure.retry_ms
        return held.task.options.backoff.delay_ms(held.failures, random.random())

    def _failed_body(self, held: HeldTask, failure: Failure) -> bytes:
        if held.envelope.task:
            envelope = msgspec.structs.replace(
                held.envelope, id=held.id, failures=held.failures, failure=failure
            )
        else:
            # Not a task: its body is kept as text, for inspection.
            shown = held.claim.body[:10_000].decode(errors="replace")
            envelope = Envelope("", msgspec.Raw(encode({"body": shown})), held.id, failure=failure)
        return encode(envelope)

    def _results_of(self, held: HeldTask, state: str, failure: Failure) -> Iterable[_FollowUp]:
        """The results of a task that has ended, and of those after it that will not be pushed."""
        envelope = held.envelope
        ended = [(held.id, envelope.task)]
        last = envelope.then[-1] if envelope.then else None
        final = envelope.group.final if envelope.group is not None else None
        ended += [(step.id, step.task) for step in (last, final) if step is not None and step.id]
        for task_id, name in ended:
            task = self._app.tasks.get(name)
            ttl_ms = task.options.result_ttl_ms if task is not None else None
            if ttl_ms is not None and self._keeps_results:
                result = StoredResult(task_id, state, failure=failure)
                yield self._result(held, result, ttl_ms)

    def _result(self, held: HeldTask, result: StoredResult, ttl_ms: int) -> _FollowUp:
        return _FollowUp(held, self._result_push(result, ttl_ms), RESULT_QUEUE)

    def _result_push(self, result: StoredResult, ttl_ms: int) -> Push:
        queue = result_queue(self._app.name, result.id)
        return Push(queue, encode(result), ttl_ms=ttl_ms)

    def _next(
        self, held: HeldTask, then: list[Step], group: GroupPlace | None, value: msgspec.Raw
    ) -> Push:
        step = then[0]
        args = with_first(step.args, step.first, bytes(value))
        return self._step_push(
            step, args, f"{held.claim.id}/next", then[1:], group, held.claim.attributes
        )

    def _step_push(
        self,
        step: Step,
        args: msgspec.Raw,
        dedup_id: str,
        then: list[Step],
        group: GroupPlace | None,
        attributes: Any,
    ) -> Push:
        now_ms = self._app.now_ms()
        expires_at_ms = None if step.ttl_ms is None else now_ms + step.ttl_ms
        envelope = Envelope(step.task, args, step.id, 0, expires_at_ms, then, group)
        return Push(
            step.queue,
            encode(envelope),
            priority=step.priority,
            ttl_ms=step.ttl_ms,
            dedup_id=self._dedup_id(dedup_id),
            attributes=kept_attributes(attributes),
        )

    def _finish_group(self, place: GroupPlace, attributes: Attributes) -> Commands[None]:
        """Pushes the final task if every member has its result, and removes the group's queue.

        `attributes` are those of the member that has succeeded last.
        """
        queue = group_queue(self._app.name, place.id)
        try:
            stats = yield Stats(queue)
            if stats.messages < place.size:
                return
            messages = yield Peek(queue, PEEK_LIMIT_MAX)
            results = [decode_result(message.body) for message in messages]
        except QueueNotFound:
            return
        except (RequestError, ProtocolError) as error:
            _logger.error("the group %s cannot be ended: %s", place.id, error)
            return
        # A member that ran twice has two results.
        values = {result.index: bytes(result.value) for result in results}
        is_whole = len(messages) >= stats.messages
        if is_whole and any(index not in values for index in range(place.size)):
            return
        if place.final is not None and is_whole:
            every = b"[" + b",".join(values[index] for index in range(place.size)) + b"]"
            yield from self._push_final(place.id, place.final, every, attributes)
        elif place.final is not None:
            why = "they are larger, together, than one answer of the store may be"
            yield from self._fail_final(place.id, place.final, why, attributes)
        try:
            yield DeleteQueue(queue)
        except QueueNotFound:
            return

    def _push_final(
        self, group_id: str, final: Step, every: bytes, attributes: Attributes
    ) -> Commands[None]:
        args = with_first(final.args, final.first, every)
        push = self._step_push(final, args, f"{group_id}/final", [], None, attributes)
        try:
            yield from push_creating(push, TASK_QUEUE)
        except RequestError as error:
            # Most likely the results are larger, together, than a message may be.
            yield from self._fail_final(group_id, final, str(error), attributes)

    def _fail_final(
        self, group_id: str, final: Step, why: str, attributes: Attributes
    ) -> Commands[None]:
        """Ends a group whose results cannot be given to its final task: that task has failed."""
        reason = f"the results of its group cannot be pushed to {final.queue!r}: {why}"
        _logger.error("the final task of the group %s failed: %s", group_id, reason)
        failure = Failure(reason, "", self._app.now_ms(), final.queue, True)
        task = self._app.tasks.get(final.task)
        ttl_ms = task.options.result_ttl_ms if task is not None else None
        if final.id and ttl_ms is not None and self._keeps_results:
            result = StoredResult(final.id, FAILED, failure=failure)
            yield from push_creating(self._result_push(result, ttl_ms), RESULT_QUEUE)
        push = Push(
            failed_queue(final.queue, self._separator),
            encode(Envelope(final.task, final.args, final.id, failure=failure)),
            dedup_id=self._dedup_id(f"{group_id}/failed"),
            attributes=kept_attributes(attributes),
        )
        yield from push_creating(push, FAILED_QUEUE)

    def _dedup_id(self, text: str) -> str | None:
        return text if self._has_dedup else None


def _completed_groups(tasks: Iterable[HeldTask]) -> list[tuple[GroupPlace, Attributes]]:
    """The groups of which a member has just succeeded, each with that member's attributes."""
    places: dict[str, tuple[GroupPlace, Attributes]] = {}
    for held in tasks:
        place, outcome = held.envelope.group, held.outcome
        assert outcome is not None
        if place is None or held.envelope.then or outcome.failure or outcome.is_cancelled:
            continue
        places[place.id] = (place, held.claim.attributes)
    return list(places.values())


def _ttl_left_ms(envelope: Envelope, now_ms: int) -> int | None:
    """How long a task that is tried again may still wait to be started."""
    if envelope.expires_at_ms is None:
        return None
    return max(1, envelope.expires_at_ms - now_ms)
