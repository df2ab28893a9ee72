"""Time, randomness and order of a simulation: a heap of actions, and the hosts that run them.

Everything random comes from one generator with the run's seed, and nothing iterates over a set, so
the same seed gives the same run in every process. A *step* is one action of the heap.

A host is a process of the simulated cluster: while it is paused, its actions wait; after it was
stopped, they are dropped. Two kinds of code run on it: steps (`LogSteps`), which are resumed by
replies, or by `Unanswered`, as `jetstream` does it; and coroutines, on the host's own event loop,
whose time is that of the schedule and which does no I/O.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import Any, Final, cast

from penstock.backends.scheduler import run_queue
from penstock.cluster.log import LogRequest, LogSteps, Pause

Action = Callable[[], object]
Done = Callable[[Any, Exception | None], None]
# A run that has more steps than this counts as one that never ends.
STEPS_MAX: Final = 200_000
# How often the tasks of a stopped host are cancelled before one of them counts as endless.
_CANCELLATIONS_MAX: Final = 20
# A thread begins, and its result comes, within this time.
_THREAD_MS: Final = 20


class Timer:
    """An action that is to run at an instant, unless it is cancelled."""

    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def cancel(self) -> None:
        """Cancels the action."""
        self.action = None


class RunSchedule:
    """The current instant, the actions to come, and the trace."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.chance = self.random.random
        self.now_ms = 0
        self.steps = 0
        self.violation: str | None = None
        self.trace: list[tuple[Any, ...]] = []
        self._heap: list[tuple[int, float, int, Timer]] = []
        self._count = 0

    def after(self, delay_ms: int, action: Action) -> Timer:
        """Runs an action after a delay; of several at one instant any may be the first."""
        timer = Timer(action)
        self._count += 1
        heappush(self._heap, (self.now_ms + delay_ms, self.chance(), self._count, timer))
        return timer

    def below(self, limit: int) -> int:
        """A number from 0 to below the limit."""
        return int(self.chance() * limit)

    def between(self, low: int, high: int) -> int:
        """A number from `low` to below `high`."""
        return low + int(self.chance() * (high - low))

    def pick(self, items: "list[Any]") -> Any:
        """One of these."""
        return items[int(self.chance() * len(items))]

    def note(self, *what: Any) -> None:
        """Adds a line to the trace."""
        self.trace.append((self.now_ms, *what))

    def violate(self, text: str) -> None:
        """A rule was broken: the run ends after this step."""
        if self.violation is None:
            self.violation = text
            self.note("VIOLATION", text)

    def step(self) -> bool:
        """Runs the next action; false if there is none, or if the run has ended."""
        while self._heap and self.violation is None:
            self.now_ms, _, _, timer = heappop(self._heap)
            action = timer.action
            if action is not None:
                self.steps += 1
                action()
                if self.steps >= STEPS_MAX:
                    self.violate(f"the run has not ended after {STEPS_MAX} steps")
                return True
        return False


class SimulatedLoop:
    """The event loop of one host: tasks, futures and timers on the schedule, without any I/O."""

    def __init__(self, host: "Host") -> None:
        self._host = host
        self._ready: deque[Timer] = deque()
        # In the order in which they were made: a set would have none.
        self._tasks: dict[asyncio.Task[Any], None] = {}
        # By a clock on which each step of the run queue takes a whole turn.
        run_queue(cast(asyncio.AbstractEventLoop, self), itertools.count().__next__)

    def time(self) -> float:
        """The instant, in seconds."""
        return self._host.schedule.now_ms / 1_000

    def get_debug(self) -> bool:
        """No debugging: for futures."""
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """An exception that was not retrieved: the code that made the task may ignore it."""

    def create_future(self) -> "asyncio.Future[Any]":
        """A future of this loop."""
        return asyncio.Future(loop=cast(asyncio.AbstractEventLoop, self))

    def create_task(
        self, coroutine: Coroutine[Any, Any, Any], *, name: str | None = None, context: Any = None
    ) -> "asyncio.Task[Any]":
        """A task of this loop; its first step is run when the current action has ended."""
        task = asyncio.Task(coroutine, loop=cast(asyncio.AbstractEventLoop, self), name=name)
        self._tasks[task] = None
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.pop(task, None)

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> Timer:
        """Calls it when the current action has ended."""
        timer = Timer(partial(callback, *args) if args else callback)
        self._ready.append(timer)
        return timer

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> Timer:
        """The same: there are no threads."""
        return self.call_soon(callback, *args)

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> Timer:
        """Calls it so many seconds later."""
        action = partial(callback, *args) if args else callback
        return self._host.later(max(1, round(delay * 1_000)), action)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> Timer:
        """Calls it at this instant."""
        return self.call_later(when - self.time(), callback, *args)

    def run_in_executor(self, executor: None, work: Callable[[], Any]) -> "asyncio.Future[Any]":
        """Calls it as a thread of this host would: after a while, and its result comes later.

        If the host is stopped in between, it was called, and nobody gets the result.
        """
        outcome = self.create_future()
        self._host.later(self._host.schedule.below(_THREAD_MS), partial(self._work, work, outcome))
        return outcome

    def _work(self, work: Callable[[], Any], outcome: "asyncio.Future[Any]") -> None:
        finish: Action
        try:
            finish = partial(outcome.set_result, work())
        except Exception as error:
            finish = partial(outcome.set_exception, error)
        delay_ms = self._host.schedule.below(_THREAD_MS)
        self._host.later(delay_ms, partial(_unless_done, outcome, finish))

    def run(self, action: Action) -> None:
        """Runs an action as the running loop, then callbacks until none is left."""
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(cast(asyncio.AbstractEventLoop, self))
        try:
            action()
            ready = self._ready
            while ready:
                _unless_cancelled(ready.popleft())
        finally:
            asyncio._set_running_loop(outer)

    def end_tasks(self) -> None:
        """Cancels all tasks until they have ended, as a crash does not: so that none is left to
        the garbage collector, which would end it at any time."""
        for _ in range(_CANCELLATIONS_MAX):
            if not self._tasks:
                return
            self.run(self._cancel_all)
        raise AssertionError(f"{self._host.name}: {[*self._tasks]} cannot be cancelled")

    def _cancel_all(self) -> None:
        for task in [*self._tasks]:
            task.cancel()


class Host:
    """A process of the simulated cluster."""

    def __init__(self, schedule: RunSchedule, name: str) -> None:
        self.schedule = schedule
        self.name = name
        self.loop = SimulatedLoop(self)
        self.is_stopped = False
        self.is_paused = False
        # Whether everything it sends is lost, and everything that is sent to it.
        self.is_outbound_cut = False
        self.is_inbound_cut = False
        self._backlog: list[Action] = []
        self._under_way: dict[Process, None] = {}

    @property
    def event_loop(self) -> asyncio.AbstractEventLoop:
        """The loop, for code that expects a whole one."""
        return cast(asyncio.AbstractEventLoop, self.loop)

    def run(self, action: Action) -> None:
        """Runs an action on the host: later if it is paused, never if it was stopped."""
        if self.is_stopped:
            return
        if self.is_paused:
            self._backlog.append(action)
            return
        self.loop.run(action)

    def later(self, delay_ms: int, action: Action) -> Timer:
        """Runs an action on the host after a delay."""
        timer = Timer(action)
        if self.is_stopped:
            return timer
        self.schedule.after(delay_ms, partial(self.run, partial(_unless_cancelled, timer)))
        return timer

    def pause(self) -> None:
        """Suspends the host: its actions wait, and time goes on."""
        self.is_paused = True

    def resume(self) -> None:
        """Resumes the host, with all actions that have waited."""
        if not self.is_paused:
            return
        self.is_paused = False
        backlog, self._backlog = self._backlog, []
        for action in backlog:
            self.run(action)

    def stop(self) -> None:
        """Ends the host as a crash would."""
        self.is_stopped = True
        under_way, self._under_way = self._under_way, {}
        for process in under_way:
            process.end()
        self.loop.end_tasks()

    def begin(self, work: Coroutine[Any, Any, Any], done: Done) -> "asyncio.Task[Any]":
        """Runs a coroutine on this host; `done` gets what it returns or raises, if it ends."""
        task = self.loop.create_task(work)
        task.add_done_callback(partial(_give_outcome, done))
        return task

    def start(self, what: str, steps: LogSteps[Any], done: Done) -> "Process":
        """Runs steps on this host; `done` gets what they return or raise."""
        process = Process(self, what, steps, done)
        self._under_way[process] = None
        process.resume(None, None)
        return process

    def ended(self, process: "Process") -> None:
        """Steps have ended."""
        self._under_way.pop(process, None)

    def execute(self, process: "Process", request: LogRequest[Any]) -> None:
        """Executes a request of some steps; a plain host can only execute Pause."""
        assert type(request) is Pause, f"{self.name} cannot carry out {request}"
        delay_ms = max(request.ms, 1)
        self.later(delay_ms, partial(process.resume, None, None))


class Process:
    """Steps that run on a host."""

    __slots__ = ("_done", "_steps", "host", "is_over", "what")

    def __init__(self, host: Host, what: str, steps: LogSteps[Any], done: Done) -> None:
        self.host = host
        self.what = what
        self.is_over = False
        self._steps = steps
        self._done = done

    def resume(self, reply: Any, error: Exception | None) -> None:
        """Sends the reply or the error to the steps, and executes their next request."""
        if self.is_over or self.host.is_stopped:
            return
        try:
            request = self._steps.send(reply) if error is None else self._steps.throw(error)
        except StopIteration as stop:
            self.is_over = True
            self.host.ended(self)
            self._done(stop.value, None)
        except Exception as raised:
            self.is_over = True
            self.host.ended(self)
            self._done(None, raised)
        else:
            self.host.execute(self, request)

    def end(self) -> None:
        """Ends the steps where they are; their `finally` blocks run."""
        self.is_over = True
        self._steps.close()


def _unless_done(outcome: "asyncio.Future[Any]", finish: Action) -> None:
    if not outcome.done():
        finish()


def _unless_cancelled(timer: Timer) -> None:
    if timer.action is not None:
        timer.action()


def _give_outcome(done: Done, task: "asyncio.Task[Any]") -> None:
    if not task.cancelled():
        error = task.exception()
        assert error is None or isinstance(error, Exception)
        done(None if error is not None else task.result(), error)
