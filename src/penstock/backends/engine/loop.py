"""The engine on an event loop: no lock, no thread, one timer and one notification for all.
Long, because every way in which a reply can wait is here.

The servers use `LoopEngine`; `AsyncEngine` awaits its replies. It waits for three things:

- the disk: a reply whose changes are not durable yet is deferred; one notification of the journal
  serves all replies that are deferred in one turn of the event loop
- a message: a pull that finds nothing is in the engine's waiting line; one timer wakes the engine
  for the whole line
- the end of a command: the engine wakes a waiting pull in the middle of a command that made a
  message visible. Its callback is not called there, where it could submit commands of its own, but
  in a later callback of the event loop
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Final, TypeVar, cast

from penstock.backends.engine.engine import Engine
from penstock.backends.engine.long_commands import MAY_BE_LONG, steps_of
from penstock.backends.engine.waiting import Waiter
from penstock.backends.loop import EventList, HistoryParts, Pending, Steps, code_of, each_by
from penstock.backends.scheduler import run_queue
from penstock.core.due import NEVER_MS
from penstock.errors import EngineClosed, InFlightLimit, JournalError, PenstockError
from penstock.service import (
    REDRIVE_MAX,
    Batch,
    Claim,
    Command,
    History,
    HistoryEvent,
    Pull,
    QueueInfo,
    Release,
)

R = TypeVar("R")
# How late a message may become visible on a server that has nothing else to do.
SWEEP_S: Final = 0.25
# How many claims are released in one turn of the event loop.
_RELEASED_MAX: Final = 200
# How many pulls that waited are answered in one turn of the event loop.
_WOKEN_MAX: Final = 200


class LoopEngine:
    """The `LoopService` over an engine that belongs to one event loop."""

    LACKS: ClassVar[Mapping[str, str]] = {}
    redrive_max: int = REDRIVE_MAX

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop` is the running event loop, unless a simulation has one of its own."""
        self.engine = engine
        # A pull of many settles more, in the steps of `long_commands`.
        engine.own_settle_max = engine.settle_max
        self.now_ms = engine.clock.now_ms
        self.failure: PenstockError | None = None
        self._submit = engine.submit
        self._journal = engine.journal
        self._names = engine.shard.names
        self._views: dict[str, QueueInfo] = {}
        self._listeners: list[Callable[[PenstockError], None]] = []
        self._loop = loop or asyncio.get_running_loop()
        self._run_queue = run_queue(self._loop)
        # Replies that wait for the disk, roughly in the order of their sequences.
        self._deferred: deque[EngineReply] = deque()
        self._wanted_sequence = 0
        self._notice_is_due = False
        # Whether the last notification served more than one reply.
        self._shares_syncs = False
        # Pulls whose wait has ended since the last turn of the event loop.
        self._woken: deque[EngineReply] = deque()
        # Claims that could not be delivered and are still to be released.
        self._abandoned: deque[Claim] = deque()
        self._must_plan = False
        self._turn_is_planned = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = NEVER_MS
        self._closed = False
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        self._unsubscribe = engine.clock.subscribe(self._on_time_moved)
        engine.arrange_ticks(self.plan_timer)
        if engine.upkeep is not None:
            engine.upkeep.start(self._exclusively, indexes=True)

    # Commands.

    def submit(self, command: Command[R]) -> R | Pending:
        if (
            type(command) in MAY_BE_LONG
            # Most pulls are for one message.
            and getattr(command, "limit", 0) != 1
            and steps_of(self.engine, command) is not None
        ):
            return self._run_long(command)
        try:
            reply = self.engine.submit(command)
        except InFlightLimit:
            if not self._may_wait(command):
                raise
            return self._wait(command, None) or cast(R, [])
        except Exception:
            self._check_failed()
            raise
        if not reply and type(command) is Pull:
            return self._wait(command, None) or reply
        sequence = self.engine.answer_sequence
        if sequence > self._journal.durable_sequence:
            pending = EngineReply(loop_engine=self, reply=reply, is_known=True, sequence=sequence)
            if type(command) is Pull:
                pending.pull, pending.claims = command, reply  # type: ignore[assignment]
            return self._answer_when_durable(pending)
        return reply

    def _run_long(self, command: Command[R]) -> R | Pending:
        reply = self.run(self._steps_of(command))
        if isinstance(reply, Pending) and type(command) is Pull and not reply.claims:
            # It may wait for a message, also while its steps are executed.
            reply.waits = self.engine.wait_ms(command) != 0
        return reply

    def _steps_of(self, command: Command[R]) -> Steps[R]:
        steps = steps_of(self.engine, command)
        if steps is None:
            return (yield command)  # type: ignore[no-any-return]
        reply: R = yield from steps
        return reply

    def run(self, steps: Steps[R]) -> R | Pending:
        try:
            command = next(steps)
            if type(command) in MAY_BE_LONG:
                steps, command = self._divide(steps, command)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        if command is None:
            return self._pause(steps, 0)
        reply, refused = self._submit_for_steps(command)
        sequence = self.engine.answer_sequence if refused is None else 0
        return self._continue_steps(steps, command, reply, refused, sequence)

    def _divide(
        self, steps: Steps[R], command: Command[Any] | None
    ) -> tuple[Steps[R], Command[Any] | None]:
        """The same steps, from this command on, with each long command in bounded steps."""
        if code_of(steps) in _DIVIDED or steps_of(self.engine, command) is None:
            return steps, command
        steps = self._divided(steps, command)
        return steps, next(steps)

    def _divided(self, steps: Steps[R], command: Command[Any] | None) -> Steps[R]:
        return (yield from each_by(steps, self._steps_of, command))

    def _continue_steps(
        self,
        steps: Steps[R],
        command: Command[Any] | None,
        reply: Any,
        error: Exception | None,
        sequence: int,
        waited: "EngineReply | None" = None,
    ) -> R | Pending:
        """Runs steps to their end, or to a pull that waits, once a command has been answered.

        `sequence` is the largest so far: a read-only command at the end does not make the changes
        before it durable. `waited` is the caller's Pending, if it was given one for a pull that
        waited or for a pause.
        """
        pull, claims = (None, ()) if waited is None else (waited.pull, waited.claims)
        is_new = waited is None
        try:
            while True:
                if type(error) is InFlightLimit and is_new and self._may_wait(command):
                    reply, error = [], None
                if type(command) is Pull and error is None:
                    pull = command
                    claims = [*claims, *reply] if claims else reply
                    waiting = None if reply or not is_new else self._wait(command, waited)
                    if waiting is not None:
                        waiting.pull, waiting.claims = pull, claims
                        waiting.steps = steps
                        waiting.sequence = sequence
                        return waiting
                command = steps.send(reply) if error is None else steps.throw(error)
                if type(command) in MAY_BE_LONG:
                    steps, command = self._divide(steps, command)
                if command is None:
                    return self._pause(steps, sequence, waited, pull, claims)
                is_new = True
                reply, error = self._submit_for_steps(command)
                sequence = max(sequence, self.engine.answer_sequence)
        except StopIteration as stop:
            if sequence <= self._journal.durable_sequence:
                return stop.value  # type: ignore[no-any-return]
            pending = waited or EngineReply(loop_engine=self)
            return self._defer(pending, stop.value, sequence, pull, claims)

    def _pause(
        self,
        steps: Steps[Any],
        sequence: int,
        waited: "EngineReply | None" = None,
        pull: Pull | None = None,
        claims: Sequence[Claim] = (),
    ) -> "EngineReply":
        """Continues the steps in a later turn of the event loop.

        `pull` is their last pull, and `claims` are those of all their pulls.
        """
        pending = waited or EngineReply(loop_engine=self)
        pending.note_claims(pull, claims)
        pending.runs = True
        self._run_queue.add(
            code_of(steps), partial(self._continue_paused, pending, steps, sequence)
        )
        return pending

    def _continue_paused(self, pending: "EngineReply", steps: Steps[Any], sequence: int) -> None:
        if pending.done is None:
            steps.close()
        else:
            self._resume(pending, steps, None, None, None, sequence)

    def _submit_for_steps(self, command: Command[Any]) -> tuple[Any, PenstockError | None]:
        """The reply, or the error that is to be thrown into the steps."""
        try:
            return self._submit(command), None
        except PenstockError as error:
            self._check_failed()
            return None, error
        except Exception:
            self._check_failed()
            raise

    def history(self, command: History, parts: HistoryParts | None = None) -> Pending:
        self.engine.check()
        pending = EngineReply(loop_engine=self)
        events = self.engine.history(command)
        self._plan_history(pending, events, parts or EventList())
        return pending

    def _plan_history(
        self,
        pending: "EngineReply",
        events: Iterator[HistoryEvent | None],
        parts: HistoryParts,
    ) -> None:
        read = partial(self._read_history, pending, events, parts)
        self._run_queue.add(History, read)

    def _read_history(
        self,
        pending: "EngineReply",
        events: Iterator[HistoryEvent | None],
        parts: HistoryParts,
    ) -> None:
        """Reads a part of the journal, and goes on in a later turn of the event loop."""
        if pending.done is None:
            return
        found: list[HistoryEvent] = []
        try:
            self.engine.check()
            for event in events:
                if event is None:
                    parts.add(found)
                    self._plan_history(pending, events, parts)
                    return
                found.append(event)
            parts.add(found)
            reply = parts.result()
        except Exception as error:
            pending.finish(None, error)
        else:
            pending.finish(reply, None)

    def view(self, name: str) -> QueueInfo | None:
        try:
            known = self._views[name]
            # Settings are replaced as a whole: the same object means that nothing has changed.
            if known.settings is self._names[name].settings:
                return known
        except KeyError:
            pass
        return self._look_up(name)

    def _look_up(self, name: str) -> QueueInfo | None:
        queue = self._names.get(name)
        if queue is None:
            self._views.pop(name, None)
            return None
        if len(self._views) > 2 * len(self._names):
            self._views.clear()
        known = self._views[name] = self.engine.shard.info(queue)
        return known

    def abandon(self, claims: Sequence[Claim]) -> None:
        """Releases some claims at once, and more in each turn of the event loop."""
        was_idle = not self._abandoned
        self._abandoned.extend(claims)
        if was_idle and claims:
            self._release_some()

    def _release_some(self) -> None:
        abandoned = self._abandoned
        if not abandoned:
            return
        some = [abandoned.popleft() for _ in range(min(len(abandoned), _RELEASED_MAX))]
        # A claim that cannot be released now returns when it runs out.
        with suppress(PenstockError):
            self._submit(Batch([Release(claim.queue, claim.proof) for claim in some]))
        if abandoned:
            self._loop.call_soon(self._release_some)

    # Waiting for a message.

    def _may_wait(self, command: Command[Any] | None) -> bool:
        return type(command) is Pull and self.engine.wait_ms(command) > 0

    def _wait(self, command: Any, pending: "EngineReply | None") -> "EngineReply | None":
        """Adds a pull that found nothing to the waiting line; None if it is not to wait."""
        pending = pending or EngineReply(loop_engine=self)
        pending.waiter = None
        waiter = self.engine.wait(command, pending.wake)
        if waiter is None:
            return None
        pending.waiter = waiter
        pending.waits = True
        if pending.runs:
            pending.end_run()
        return pending

    def watch(self, command: Pull) -> Pending:
        """A Pending without claims: it ends once a pull may find a message, or times out.

        Raises RequestError.
        """
        self.engine.check()
        pending = EngineReply(loop_engine=self)
        pending.waiter = self.engine.watch(command, pending.wake)
        pending.waits = True
        return pending

    def woken(self, pending: "EngineReply") -> None:
        """A wait has ended; its callback is called in the next turn."""
        pending.waits = False
        self._woken.append(pending)
        self._plan_turn()

    def plan_timer(self) -> None:
        """Sets the timer in the next turn: the instant of the next `tick` may have changed."""
        self._must_plan = True
        self._plan_turn()

    def cancel_wait(self, waiter: Waiter) -> None:
        """Removes a waiting pull that has no claims yet from the line."""
        with suppress(PenstockError):
            self.engine.cancel_wait(waiter)

    def _answer_woken(self, pending: "EngineReply") -> None:
        waiter = pending.waiter
        if waiter is None or pending.done is None:
            return
        claims, error, sequence = waiter.claims, waiter.error, waiter.sequence
        if pending.steps is not None:
            sequence = max(pending.sequence, sequence)
            self._resume(pending, pending.steps, waiter.command, claims, error, sequence)
        elif error is not None:
            pending.finish(None, error)
        elif sequence > self._journal.durable_sequence:
            self._defer(pending, claims, sequence, waiter.command, claims)
        else:
            pending.finish(claims, None)

    def _resume(
        self,
        pending: "EngineReply",
        steps: Steps[Any],
        command: Command[Any] | None,
        reply: Any,
        error: Exception | None,
        sequence: int,
    ) -> None:
        """Continues steps whose pull has waited, or that paused."""
        try:
            result = self._continue_steps(steps, command, reply, error, sequence, pending)
        except Exception as raised:
            pending.finish(None, raised)
            return
        if not isinstance(result, Pending):
            pending.finish(result, None)

    def _set_timer(self) -> None:
        """Sets the timer for the next instant at which a waiting pull may be served."""
        self._must_plan = False
        wake_ms = self.engine.next_wake_ms
        if self._timer is not None:
            if self._timer_ms == wake_ms:
                return
            self._timer.cancel()
            self._timer = None
        if wake_ms == NEVER_MS or not self.engine.has_waiters:
            return
        timeout_s = self.engine.clock.waiter_timeout_s(wake_ms, blocks_thread=False)
        if timeout_s is not None:
            self._timer_ms = wake_ms
            self._timer = self._loop.call_later(timeout_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._closed:
            return
        try:
            self.engine.tick()
        except PenstockError as error:
            self.fail(error)
        if self.engine.has_waiters:
            self.plan_timer()

    def _on_time_moved(self) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._catch_up)

    def _catch_up(self) -> None:
        """Settles everything that is due since a manual clock was set."""
        self._tick()
        while self.engine.has_due_work and self.failure is None and not self._closed:
            self._tick()

    def _sweep(self) -> None:
        """Settles, a step at a time, what is due while there is no command and no waiting pull."""
        pause_s = SWEEP_S
        if self.failure is None and self.engine.has_due_work:
            self._tick()
            if self.engine.has_due_work:
                pause_s = 0.0
        self._sweeper = self._loop.call_later(pause_s, self._sweep)

    # Waiting for the disk.

    def _defer(
        self, pending: "EngineReply", reply: Any, sequence: int, command: Any, claims: Any
    ) -> "EngineReply":
        """Answers when this sequence is durable; `claims` are those of the command, if a pull."""
        pending.steps = None
        if type(command) is Pull:
            pending.note_claims(command, claims)
        if pending.runs:
            pending.end_run()
        pending.reply = reply
        pending.is_known = True
        pending.sequence = sequence
        return self._answer_when_durable(pending)

    def _answer_when_durable(self, pending: "EngineReply") -> "EngineReply":
        sequence = pending.sequence
        self._deferred.append(pending)
        if sequence > self._wanted_sequence:
            self._wanted_sequence = sequence
            if self._shares_syncs:
                # In the next turn: all requests that are read in this one share the sync.
                self._plan_turn()
            elif not self._notice_is_due:
                # Mostly there is one request at a time: a turn of the event loop is saved.
                self._ask_for_notice()
        return pending

    def _plan_turn(self) -> None:
        if not self._turn_is_planned:
            self._turn_is_planned = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Answers pulls that were woken, sets the timer, asks the journal for a notification."""
        self._turn_is_planned = False
        if self._woken:
            try:
                for _ in range(min(len(self._woken), _WOKEN_MAX)):
                    self._answer_woken(self._woken.popleft())
            except BaseException:
                # A callback with a fault: those behind it have claims to be given to them.
                self._plan_turn()
                raise
            if self._woken:
                self._plan_turn()
        if self._must_plan:
            self._set_timer()
        if self._deferred and not self._notice_is_due:
            self._ask_for_notice()

    def _ask_for_notice(self) -> None:
        """Asks for one notification at a time: what is deferred meanwhile shares the next sync."""
        self._notice_is_due = True
        sequence = self._wanted_sequence
        self._journal.notify(sequence, partial(self._durable_from_any_thread, sequence))

    def _durable_from_any_thread(self, sequence: int) -> None:
        # Once for every sync: `suppress` would take several times as long.
        try:  # noqa: SIM105
            self._loop.call_soon_threadsafe(self._durable, sequence)
        except RuntimeError:
            # The loop may be closed already when the last entry becomes durable.
            pass

    def _durable(self, sequence: int) -> None:
        """The journal has reached this sequence, or never will."""
        self._notice_is_due = False
        if sequence > self._journal.durable_sequence:
            try:
                # It does not block here: it returns, or raises what has failed.
                self._journal.wait(sequence)
            except JournalError as error:
                self.fail(error)
                return
        try:
            self.answer_durable()
        finally:
            if self._deferred and not self._notice_is_due:
                self._ask_for_notice()

    def answer_durable(self) -> None:
        """Calls back with the deferred replies whose changes are durable by now."""
        durable = self._journal.durable_sequence
        deferred = self._deferred
        answered = 0
        while deferred and deferred[0].sequence <= durable:
            pending = deferred.popleft()
            answered += 1
            done, pending.done = pending.done, None
            if done is not None:
                done(pending.reply, None)
        if answered:
            self._shares_syncs = answered > 1

    # Ending.

    def on_failure(self, listener: Callable[[PenstockError], None]) -> None:
        self._listeners.append(listener)

    def _check_failed(self) -> None:
        """After a refused command: calls the failure listeners if the engine has stopped."""
        try:
            self.engine.check()
        except JournalError as error:
            self.fail(error)
        except PenstockError:
            pass

    def fail(self, error: PenstockError) -> None:
        """Calls the listeners, then fails the deferred replies: none will become durable."""
        if self.failure is not None or self._closed:
            return
        self.failure = error
        for listener in self._listeners:
            listener(error)
        while self._deferred:
            self._deferred.popleft().finish(None, error)

    @property
    def upkeep_error(self) -> Exception | None:
        upkeep = self.engine.upkeep
        return None if upkeep is None else upkeep.last_error

    def _exclusively(self, step: Callable[[], object]) -> object:
        """Runs a step for another thread in the event loop, between commands."""
        done: Future[object] = Future()

        def run() -> None:
            try:
                done.set_result(step())
            except BaseException as error:
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return done.result()

    async def close(self) -> None:
        """Ends all waits, makes everything durable, and closes the journal."""
        if self._closed:
            return
        self._unsubscribe()
        self._sweeper.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self.engine.upkeep is not None:
            await self._loop.run_in_executor(None, self.engine.upkeep.stop)
        self._closed = True
        while self._abandoned:
            self._release_some()
        self.engine.close()
        durable = self._journal.durable_sequence
        while self._deferred:
            pending = self._deferred.popleft()
            if pending.sequence <= durable:
                pending.finish(pending.reply, None)
            else:
                pending.finish(None, EngineClosed("the engine was closed"))
        self._turn()
        while self._woken:
            self._turn()


# Steps whose commands are bounded already.
_DIVIDED: Final = frozenset({LoopEngine._steps_of.__code__, LoopEngine._divided.__code__})


class EngineReply(Pending, kw_only=True):
    """The Pending of a command, or a generator of commands, to an engine in this process."""

    loop_engine: LoopEngine
    sequence: int = 0
    pull: Pull | None = None
    steps: Steps[Any] | None = None
    waiter: Waiter | None = None

    def note_claims(self, pull: Pull | None, claims: Sequence[Claim]) -> None:
        """Stores the claims that must be released if the reply cannot be delivered."""
        self.pull = pull
        self.claims = claims
        self.waiter = None
        if claims:
            self.waits = False

    def waits_on(self, queue: str) -> bool:
        """Whether this is a pull that waits on the queue."""
        return self.waits and self.waiter is not None and self.waiter.command.queue == queue

    def wake(self) -> None:
        """Called by the engine, within a command: the wait is over."""
        self.loop_engine.woken(self)

    def cancel(self) -> None:
        if self.done is None:
            return
        self.done = None
        self.waits = False
        self.end_run()
        claims: list[Claim] = []
        if self.pull is not None and self.pull.attempt_id is None:
            claims += self.claims
        self.claims = ()
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done:
            self.loop_engine.cancel_wait(waiter)
        elif waiter is not None and waiter.command.attempt_id is None:
            claims += waiter.claims
        self.loop_engine.abandon(claims)
