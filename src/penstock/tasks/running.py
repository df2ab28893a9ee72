"""One attempt of a task: its claim, the call of its function, and the outcome.

`run_here` calls a function in this thread, `run_awaited` awaits a coroutine function; both do the
same around it: middleware, the trace, the context variable.
"""

import asyncio
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from penstock.consumer.options import unfinished
from penstock.errors import ProtocolError
from penstock.output import logger
from penstock.service import Claim
from penstock.tasks.context import TaskContext, enter, leave
from penstock.tasks.envelope import (
    ERROR_CHARS_MAX,
    TRACEBACK_CHARS_MAX,
    Envelope,
    Failure,
    decode_envelope,
    encode,
    shortened,
)
from penstock.tasks.errors import GiveUp, RetryLater, TaskError
from penstock.tasks.middleware import Middleware
from penstock.tasks.tracing import span_of

if TYPE_CHECKING:
    from penstock.tasks.app import TaskApp
    from penstock.tasks.task import Task

_NULL: Final = b"null"
_logger: Final = logger("penstock.tasks")


class TaskOutcome(NamedTuple):
    """How an attempt ended: the result as JSON, or the failure."""

    value: bytes = _NULL
    failure: Failure | None = None
    is_cancelled: bool = False


SUCCESS: Final = TaskOutcome()


class HeldTask:
    """A task whose message is claimed by this process."""

    __slots__ = (
        "claim",
        "context",
        "envelope",
        "id",
        "is_lost",
        "outcome",
        "slot",
        "task",
        "took_s",
    )

    def __init__(self, claim: Claim, envelope: Envelope, task: "Task[..., Any] | None") -> None:
        self.claim = claim
        self.envelope = envelope
        self.task = task
        self.id: str = envelope.id or claim.id
        self.context: TaskContext | None = None
        self.outcome: TaskOutcome | None = None
        self.took_s = 0.0
        # Whether the claim was lost to another worker.
        self.is_lost = False
        # The claim of a token, for a task with a limit of concurrency.
        self.slot: Claim | None = None

    @property
    def call(self) -> "tuple[Task[..., Any], TaskContext]":
        """The task and the context of one that can be run."""
        assert self.task is not None
        assert self.context is not None
        return self.task, self.context

    @property
    def needs_value(self) -> bool:
        """Whether the task's return value is stored or passed on."""
        return (
            bool(self.envelope.then)
            or self.envelope.group is not None
            or (self.task is not None and self.task.options.result_ttl_ms is not None)
        )

    @property
    def failures(self) -> int:
        """How many attempts have failed, this one included if it did."""
        assert self.outcome is not None
        return self.envelope.failures + (self.outcome.failure is not None)

    @property
    def is_final_failure(self) -> bool:
        """Whether the attempt failed and no attempt is left."""
        if self.outcome is None or self.outcome.failure is None:
            return False
        retries = 0 if self.task is None else self.task.options.retries
        return self.outcome.failure.is_final or self.failures > retries


_NO_TASK: Final = Envelope("", msgspec.Raw(b"{}"))


def hold(app: "TaskApp", claim: Claim) -> HeldTask:
    """The task of a claim; one that cannot be run has its outcome already."""
    try:
        envelope = decode_envelope(claim.body)
    except ProtocolError as error:
        held = HeldTask(claim, _NO_TASK, None)
        held.outcome = TaskOutcome(failure=Failure(str(error), is_final=True))
        return held
    task = app.tasks.get(envelope.task)
    held = HeldTask(claim, envelope, task)
    if task is None:
        known = ", ".join(sorted(app.tasks)) or "none"
        reason = f"no task is registered as {envelope.task!r}; there are {known}"
        held.outcome = TaskOutcome(
            failure=Failure(shortened(reason, ERROR_CHARS_MAX), is_final=True)
        )
    elif envelope.expires_at_ms is not None and envelope.expires_at_ms <= app.now_ms():
        # It was claimed shortly before its ttl ended.
        held.outcome = TaskOutcome(is_cancelled=True)
    else:
        held.context = TaskContext(
            task.name, held.id, claim.queue, envelope.failures + 1, claim.attributes, app.clock
        )
    return held


def failure_of(error: BaseException) -> Failure:
    """An exception as a Failure: one line, the traceback, and whether to retry."""
    name = type(error).__name__
    try:
        line = " ".join(str(error).split())
    except Exception:
        line = "its text cannot be shown"
    text = "".join(traceback.format_exception(error))
    return Failure(
        shortened(f"{name}: {line}" if line else name, ERROR_CHARS_MAX),
        shortened(text, TRACEBACK_CHARS_MAX),
        # Wrong arguments fail again, and GiveUp asks for no retry.
        is_final=isinstance(error, GiveUp | TaskError),
        retry_ms=max(0, round(error.delay * 1_000)) if isinstance(error, RetryLater) else None,
    )


def take_all(waiting: deque[HeldTask]) -> list[HeldTask]:
    """Removes and returns waiting tasks; a thread that takes one meanwhile keeps it."""
    taken: list[HeldTask] = []
    while waiting:
        try:
            taken.append(waiting.popleft())
        except IndexError:
            break
    return taken


def run_here(held: HeldTask, middleware: Sequence[Middleware]) -> None:
    """Calls the task's function in this thread; the outcome is set, whatever happens.

    Exceptions other than Exception, such as SystemExit, fail the attempt too; KeyboardInterrupt
    is raised.
    """
    task, context = held.call
    token = enter(context)
    began_s = perf_counter()
    try:
        args, kwargs = task.arguments.decode(held.envelope.args)
        with _span(context):
            if middleware:
                _before(middleware, context)
            value = task.function(*args, **kwargs)
        held.outcome = _success(held, value)
        if middleware:
            _after(middleware, context, value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        fail(held, error, middleware)
    finally:
        held.took_s = perf_counter() - began_s
        leave(token)


async def run_awaited(held: HeldTask, middleware: Sequence[Middleware]) -> None:
    """The same for a coroutine function, within the running loop; CancelledError is raised."""
    task, context = held.call
    token = enter(context)
    began_s = perf_counter()
    try:
        args, kwargs = task.arguments.decode(held.envelope.args)
        with _span(context):
            if middleware:
                _before(middleware, context)
            value = await task.function(*args, **kwargs)
        held.outcome = _success(held, value)
        if middleware:
            _after(middleware, context, value)
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise
    except BaseException as error:
        fail(held, error, middleware)
    finally:
        held.took_s = perf_counter() - began_s
        leave(token)


def run_to_end(held: HeldTask, middleware: Sequence[Middleware]) -> None:
    """Runs a task of either kind in this thread, a coroutine function in a loop made for it."""
    task, _ = held.call
    if not task.is_async:
        run_here(held, middleware)
        return
    try:
        asyncio.run(run_awaited(held, middleware))
    except asyncio.CancelledError as error:
        fail(held, error, middleware)


_NO_SPAN: Final = nullcontext()


def _span(context: TaskContext) -> AbstractContextManager[None]:
    return span_of(context) if "traceparent" in context.attributes else _NO_SPAN


def _success(held: HeldTask, value: Any) -> TaskOutcome:
    """The outcome of a call that returned.

    Raises TaskError if the value is a coroutine or a generator, so that the work is not done, or if
    it is needed and cannot become JSON.
    """
    if value is None:
        return SUCCESS
    what = unfinished(value)
    if what is not None:
        advice = "nothing awaits: declare the function, and decorators around it, with async def"
        if what == "a generator":
            advice = "nothing iterates over: use a function without a yield"
        raise TaskError(
            f"{held.envelope.task}: its work is not done: it returned {what}, which {advice}"
        )
    if not held.needs_value:
        return SUCCESS
    try:
        return TaskOutcome(encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TaskError(f"the result cannot become JSON: {error}") from None


def fail(held: HeldTask, error: BaseException, middleware: Sequence[Middleware]) -> None:
    """Sets an exception as the outcome, and calls the middleware."""
    held.outcome = TaskOutcome(failure=failure_of(error))
    for each in reversed(middleware):
        try:
            assert held.context is not None
            each.failed(held.context, error, held.is_final_failure)
        except Exception:
            _logger.exception("%s.failed raised", type(each).__name__)


def _before(middleware: Sequence[Middleware], context: TaskContext) -> None:
    for each in middleware:
        each.before(context)


def _after(middleware: Sequence[Middleware], context: TaskContext, value: Any) -> None:
    for each in reversed(middleware):
        try:
            each.after(context, value)
        except Exception:
            _logger.exception("%s.after raised", type(each).__name__)
