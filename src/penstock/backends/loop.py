"""The interface of a queue service for servers on an event loop.

A server takes requests in callbacks of its event loop, where nothing can be awaited. It submits
commands to a `LoopService`, which answers at once if it can; if not, it returns a `Pending` and
calls back later. Two classes have this interface:

    LoopEngine       over an engine in this process (`engine.loop`): answers at once whenever the
                     reply is durable already
    AwaitedService   over any other AsyncQueueService: each command is awaited in a task

Several commands that belong together are a generator (`Steps`): it yields commands and is sent the
replies, and errors are thrown into it. With a local engine it runs to its end within the call,
unless it yields nothing: that is the end of a bounded step, and the rest waits in the run queue
(`scheduler`). State that was read before may have changed then; if the reply is cancelled, claims
that were made are released. An action of one command may be that command and a function that makes
the result from its reply or its error (`Single`), which costs less than a generator.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import suppress
from types import CodeType, GeneratorType
from typing import Any, Final, Protocol, TypeVar, cast

import msgspec

from penstock.backends.scheduler import run_queue
from penstock.clock import Clock, SystemClock
from penstock.errors import EngineClosed, PenstockError, QueueNotFound
from penstock.service import (
    AsyncQueueService,
    Claim,
    Command,
    ConfigureQueue,
    CreateQueue,
    DeleteQueue,
    DescribeQueue,
    History,
    HistoryEvent,
    Pull,
    QueueInfo,
    Release,
)

R = TypeVar("R")
Done = Callable[[Any, Exception | None], None]
Steps = Generator[Command[Any] | None, Any, R]
# The command; `finish(context, reply, error)`, which returns the result or raises; the context.
Finish = Callable[[Any, Any, PenstockError | None], Any]
Single = tuple[Command[Any], Finish, Any]


# How long the description of a queue of another service is used before it is asked for again.
VIEW_S: Final = 1.0
_VIEWS_MAX: Final = 10_000
_HISTORY_EVENTS: Final = 1_000
# Claims that are released at the same time.
_RELEASED_MAX: Final = 200
_CHANGES_QUEUE: Final = frozenset({CreateQueue, ConfigureQueue, DeleteQueue})


class Pending(msgspec.Struct, eq=False, kw_only=True):
    """A reply that will come later.

    The caller sets a callback by `then`, before control returns to the event loop. `waits` is true
    while it waits for a message, which may take long, and not only for a disk or a network. If
    `is_known`, `reply` is set and only its changes are not durable yet: the response can be made
    meanwhile, but not sent. `claims` are those of a pull, as far as they are known.

    `runs` is true between the bounded steps of what takes long; `ran` is called when that is over:
    before it waits for a message, or when it was executed, and only its changes may not be durable.
    """

    done: Done | None = None
    ran: Callable[[], None] | None = None
    runs: bool = False
    waits: bool = False
    is_known: bool = False
    reply: Any = None
    claims: Sequence[Claim] = ()

    def then(self, done: Done) -> None:
        """Sets the callback `done(reply, error)`: called once, by the loop, never in a command."""
        self.done = done

    def cancel(self) -> None:
        """Removes the callback: a wait ends, and claims that were made are released.

        Claims of a pull with an attempt id stay: its client will repeat the pull.
        """
        raise NotImplementedError

    def end_run(self) -> None:
        """Notes that no further step follows."""
        self.runs = False
        ran, self.ran = self.ran, None
        if ran is not None:
            ran()

    def finish(self, reply: Any, error: Exception | None) -> None:
        """Calls back, unless that was cancelled or done before."""
        if self.runs:
            self.end_run()
        done, self.done = self.done, None
        if done is not None:
            done(reply, error)


class HistoryParts(Protocol):
    """Takes the events of a history as they are read, in parts."""

    def add(self, events: list[HistoryEvent]) -> None:
        """Takes the next events. What it raises ends the history."""
        ...

    def result(self) -> Any:
        """The reply, when all events have been added."""
        ...


class EventList:
    """The `HistoryParts` whose reply is the events."""

    def __init__(self) -> None:
        self._events: list[HistoryEvent] = []
        self.add = self._events.extend

    def result(self) -> list[HistoryEvent]:
        """All events."""
        return self._events


class LoopService(Protocol):
    """A queue service as servers on an event loop use it."""

    redrive_max: int
    now_ms: Callable[[], int]

    @property
    def LACKS(self) -> Mapping[str, str]:  # noqa: N802
        """Each behaviour of the contract that this service cannot give, with the reason."""
        ...

    def submit(self, command: Command[R]) -> R | Pending:
        """The reply if it can be shown at once, or a Pending. Raises PenstockError."""
        ...

    def history(self, command: History, parts: HistoryParts | None = None) -> Pending:
        """`submit` for the one command whose work grows with the journal: done in slices.

        With `parts`, the reply is its result.
        """
        ...

    def run(self, steps: Steps[R]) -> R | Pending:
        """What the generator returns, once all its commands are durable; or a Pending.

        Raises what the generator raises.
        """
        ...

    def view(self, name: str) -> QueueInfo | None:
        """The queue of this name, if known without a command; None may also mean "not known"."""
        ...

    def abandon(self, claims: Sequence[Claim]) -> None:
        """Releases claims that could not be delivered."""
        ...

    def on_failure(self, listener: Callable[[PenstockError], None]) -> None:
        """Calls `listener(error)` if the service stops because its storage failed."""
        ...

    @property
    def upkeep_error(self) -> Exception | None:
        """The error of the last upkeep of the storage; None if it succeeded."""
        ...

    async def close(self) -> None:
        """Releases everything; what is pending fails with EngineClosed."""
        ...


def code_of(steps: Steps[Any]) -> CodeType:
    """What the steps execute: the line in which they wait, and what they are known by."""
    return cast("GeneratorType[Any, Any, Any]", steps).gi_code


def each_by(
    steps: Steps[R],
    execute: Callable[[Command[Any]], Steps[Any]],
    command: Command[Any] | None,
) -> Steps[R]:
    """The same steps, from this command on, each command by the steps of `execute`."""
    try:
        while True:
            try:
                reply = (yield None) if command is None else (yield from execute(command))
            except PenstockError as error:
                command = steps.throw(error)
            else:
                command = steps.send(reply)
    except StopIteration as stop:
        return cast(R, stop.value)
    finally:
        # If these are closed before their end.
        steps.close()


async def result_of(reply: R | Pending) -> R:
    """The reply, awaited if it is a Pending. Raises the error of the callback."""
    if not isinstance(reply, Pending):
        return reply
    answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()

    def done(given: R, error: Exception | None) -> None:
        if not answer.done():
            if error is None:
                answer.set_result(given)
            else:
                answer.set_exception(error)

    reply.then(done)
    try:
        return await answer
    except asyncio.CancelledError:
        reply.cancel()
        raise


class AwaitedService:
    """The `LoopService` over an AsyncQueueService: one task for each command or generator.

    Descriptions of queues are kept for a second, and dropped when a command of this process
    changes the queue or finds it gone.
    """

    def __init__(self, service: AsyncQueueService, clock: Clock | None = None) -> None:
        self.LACKS = service.LACKS
        self.redrive_max = service.redrive_max
        self.now_ms = (clock or SystemClock()).now_ms
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._run_queue = run_queue(self._loop)
        self._views: dict[str, tuple[float, QueueInfo]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def submit(self, command: Command[R]) -> R | Pending:
        waits = type(command) is Pull and command.wait_ms != 0
        pending = AwaitedReply(service=self, waits=waits)
        pending.start(self._execute(command, pending))
        return pending

    def history(self, command: History, parts: HistoryParts | None = None) -> Pending:
        pending = AwaitedReply(service=self)
        pending.start(self._history(command, parts or EventList(), pending))
        return pending

    async def _history(self, command: History, parts: HistoryParts, pending: "AwaitedReply") -> Any:
        events = await self._execute(command, pending)
        for start in range(0, len(events), _HISTORY_EVENTS):
            parts.add(events[start : start + _HISTORY_EVENTS])
            await asyncio.sleep(0)
        return parts.result()

    def run(self, steps: Steps[R]) -> R | Pending:
        try:
            command = next(steps)
        except StopIteration as stop:
            return cast(R, stop.value)
        pending = AwaitedReply(service=self)
        pending.start(self._run(steps, command, pending))
        return pending

    async def _run(
        self, steps: Steps[R], command: Command[Any] | None, pending: "AwaitedReply"
    ) -> R:
        try:
            while True:
                pending.waits = type(command) is Pull and command.wait_ms != 0
                try:
                    reply = None
                    if command is None:
                        pending.runs = True
                        await self._run_queue.wait(code_of(steps))
                    else:
                        if pending.runs and pending.waits:
                            pending.end_run()
                        reply = await self._execute(command, pending)
                except PenstockError as error:
                    command = steps.throw(error)
                else:
                    command = steps.send(reply)
        except StopIteration as stop:
            return cast(R, stop.value)

    async def _execute(self, command: Command[R], pending: "AwaitedReply") -> R:
        kind = type(command)
        queue = getattr(command, "queue", "")
        if kind in _CHANGES_QUEUE:
            self._views.pop(queue, None)
        try:
            reply = await self._service.execute(command)
        except QueueNotFound:
            self._views.pop(queue, None)
            raise
        if kind is Pull:
            pending.note_claims(cast(Pull, command), cast("list[Claim]", reply))
        elif kind is DescribeQueue:
            if len(self._views) >= _VIEWS_MAX:
                self._views.clear()
            self._views[queue] = (self._loop.time() + VIEW_S, cast(QueueInfo, reply))
        elif kind in _CHANGES_QUEUE:
            # Another request may have asked for the description while this one changed it.
            self._views.pop(queue, None)
        return reply

    def view(self, name: str) -> QueueInfo | None:
        known = self._views.get(name)
        return None if known is None or known[0] < self._loop.time() else known[1]

    def abandon(self, claims: Sequence[Claim]) -> None:
        if claims:
            self.start(self._release_all(claims))

    async def _release_all(self, claims: Sequence[Claim]) -> None:
        """Releases the claims, some at a time: a lost connection may have had thousands."""
        for start in range(0, len(claims), _RELEASED_MAX):
            some = claims[start : start + _RELEASED_MAX]
            await asyncio.gather(*map(self._release, some))

    async def _release(self, claim: Claim) -> None:
        # A claim that cannot be released now returns when it runs out.
        with suppress(PenstockError):
            await self._service.execute(Release(claim.queue, claim.proof))

    def on_failure(self, listener: Callable[[PenstockError], None]) -> None:
        """Never calls it: a remote service may become available again."""

    @property
    def upkeep_error(self) -> Exception | None:
        return None

    def start(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Runs it in a task, which `close` cancels."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._service.close()


class AwaitedReply(Pending, kw_only=True):
    """The Pending of a command, or a generator of commands, that a task awaits."""

    service: AwaitedService
    task: asyncio.Task[Any] | None = None

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Begins to await it."""
        self.task = self.service.start(work)
        self.task.add_done_callback(self._finish)

    def note_claims(self, pull: Pull, claims: list[Claim]) -> None:
        """Stores the claims that must be released if the reply cannot be delivered."""
        self.waits = False
        if pull.attempt_id is None:
            self.claims = [*self.claims, *claims]

    def _finish(self, task: "asyncio.Task[Any]") -> None:
        if task.cancelled():
            self.finish(None, EngineClosed("the service was closed"))
            return
        error = task.exception()
        if error is not None and not isinstance(error, Exception):
            raise error
        if self.done is None:
            self._abandon()
        self.finish(None if error is not None else task.result(), error)

    def cancel(self) -> None:
        self.done = None
        self.waits = False
        self.end_run()
        if self.task is not None and not self.task.done():
            self.task.cancel()
            # A pull whose claims have arrived is past the await that the service can cancel.
            self._abandon()

    def _abandon(self) -> None:
        claims, self.claims = self.claims, []
        self.service.abandon(claims)
