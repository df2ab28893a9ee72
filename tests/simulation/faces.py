"""An engine behind each of its faces, driven step by step: the engine itself, threads, a loop.

Each face runs commands, makes pulls that may wait (`Call`), and `settles`: it lets everything
happen that can happen without another command and without time.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from penstock.backends.engine.asynchronous import AsyncEngine
from penstock.backends.engine.blocking import BlockingEngine
from penstock.backends.engine.engine import Engine
from penstock.backends.engine.waiting import Waiter
from penstock.backends.loop import Pending, Steps, result_of
from penstock.clock import ManualClock
from penstock.errors import InFlightLimit, PenstockError
from penstock.service import Claim, Command, Pull

PLAIN, STEPS, TASK = "plain", "steps", "task"


class StoppableClock(ManualClock):
    """A manual clock that can also move while nobody is told, as while a process is stopped."""

    def pass_unnoticed(self, ms: int) -> None:
        self._now_ms += ms


@dataclass(eq=False)
class Call:
    """A pull that may wait, and what became of it; `then` is what its caller does next."""

    pull: Pull
    joined: int
    deadline_ms: int
    how: str
    then: str
    may_overtake: bool
    claims: list[Claim] = field(default_factory=list)
    error: BaseException | None = None
    done: bool = False
    # What the face keeps of it.
    waits: Any = None

    @property
    def holder(self) -> object:
        """Who holds its claims: calls with the same attempt id are one caller."""
        return self.pull.attempt_id or self.joined


Ended = Callable[[Call], None]


class Face(Protocol):
    """One way to use an engine. `ended` is called for each call that has ended, once."""

    engine: Engine
    cancels: bool

    def run(self, command: Command[Any]) -> Any:
        """The reply. Raises PenstockError."""
        ...

    def send(self, command: Command[Any]) -> None:
        """Submits a command from within `ended`, whose reply nobody waits for."""
        ...

    def pull(self, call: Call) -> None: ...

    def cancel(self, call: Call) -> bool:
        """Whether it was cancelled; else it has its answer, which `ended` will be told."""
        ...

    def catch_up(self) -> None:
        """Everything due is settled, and the line is served, without any callback."""
        ...

    def settle(self) -> None: ...

    def close(self) -> None: ...


class EngineFace:
    """The engine as its faces use it."""

    cancels = True

    def __init__(self, engine: Engine, ended: Ended) -> None:
        self.engine = engine
        self.ended = ended
        self.calls: list[Call] = []

    def run(self, command: Command[Any]) -> Any:
        return self.engine.submit(command)

    def send(self, command: Command[Any]) -> None:
        self.engine.submit(command)

    def pull(self, call: Call) -> None:
        self.calls.append(call)
        try:
            call.claims = self.engine.submit(call.pull)
            if not call.claims:
                call.waits = self.engine.wait(call.pull, lambda: None)
        except InFlightLimit:
            call.waits = self.engine.wait(call.pull, lambda: None)
        except PenstockError as error:
            call.error = error

    def cancel(self, call: Call) -> bool:
        self.calls.remove(call)
        self.engine.cancel_wait(call.waits)
        return True

    def catch_up(self) -> None:
        self.engine.catch_up()

    def settle(self) -> None:
        self.catch_up()
        while (call := next(filter(_has_ended, self.calls), None)) is not None:
            self.calls.remove(call)
            waiter: Waiter | None = call.waits
            if waiter is not None:
                call.claims, call.error = waiter.claims, waiter.error
            self.ended(call)
            self.catch_up()

    def close(self) -> None:
        self.engine.close()
        for call in self.calls:
            self.ended(call)


def _has_ended(call: Call) -> bool:
    return call.waits is None or call.waits.done


class ThreadsFace:
    """The blocking face: each pull is a thread."""

    cancels = False

    def __init__(self, engine: Engine, ended: Ended) -> None:
        self.engine = engine
        self.ended = ended
        self.blocking = BlockingEngine(engine)
        self.threads: dict[Call, threading.Thread] = {}

    def run(self, command: Command[Any]) -> Any:
        return self.blocking.execute(command)

    def send(self, command: Command[Any]) -> None:
        self.blocking.execute(command)

    def pull(self, call: Call) -> None:
        thread = threading.Thread(target=partial(self._pull, call), daemon=True)
        self.threads[call] = thread
        thread.start()
        self._until_quiet()

    def _pull(self, call: Call) -> None:
        try:
            call.claims = self.blocking.execute(call.pull)
        except BaseException as error:
            call.error = error

    def cancel(self, call: Call) -> bool:
        return False

    def _until_quiet(self) -> None:
        """Waits until every thread has ended, or its pull is in the waiting line."""
        while sum(thread.is_alive() for thread in self.threads.values()) != self._waiting():
            os.sched_yield()

    def _waiting(self) -> int:
        with self.blocking._lock:
            return sum(map(self.engine._line.count, list(self.engine._line.queues)))

    def catch_up(self) -> None:
        self.blocking._on_time_moved()

    def settle(self) -> None:
        self.catch_up()
        self._until_quiet()
        while ended := [call for call, thread in self.threads.items() if not thread.is_alive()]:
            self.threads.pop(ended[0]).join()
            self.ended(ended[0])
            self._until_quiet()

    def close(self) -> None:
        self.blocking.close()
        for call, thread in self.threads.items():
            thread.join()
            self.ended(call)


class LoopFace:
    """The face on an event loop: callbacks, generators of commands, and tasks."""

    cancels = True

    def __init__(self, engine: Engine, ended: Ended) -> None:
        self.engine = engine
        self.ended = ended
        self.loop = asyncio.new_event_loop()
        self.escaped: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.escaped.append(context))
        self.awaited = self.loop.run_until_complete(self._make(engine))
        self.service = self.awaited._loop_engine
        self.calls: set[Call] = set()

    async def _make(self, engine: Engine) -> AsyncEngine:
        return AsyncEngine(engine)

    def run(self, command: Command[Any]) -> Any:
        return self.loop.run_until_complete(self._execute(command))

    async def _execute(self, command: Command[Any]) -> Any:
        # Submitted within the loop: a reply that became durable before its callback is set is lost.
        return await result_of(self.service.submit(command))

    def send(self, command: Command[Any]) -> None:
        reply = self.service.submit(command)
        if isinstance(reply, Pending):
            reply.then(lambda *_: None)

    def pull(self, call: Call) -> None:
        self.calls.add(call)
        done = partial(self._done, call)
        if call.how == TASK:
            call.waits = self.loop.create_task(self.awaited.execute(call.pull))
            call.waits.add_done_callback(partial(self._task_done, call))
            return
        steps = call.how == STEPS
        try:
            run = self.service.run
            reply = run(self._steps(call.pull)) if steps else self.service.submit(call.pull)
        except PenstockError as error:
            done([], error)
            return
        if isinstance(reply, Pending):
            call.waits = reply
            reply.then(done)
        else:
            done(reply, None)

    @staticmethod
    def _steps(pull: Pull) -> Steps[list[Claim]]:
        claims = yield pull
        yield None
        return claims

    def _done(self, call: Call, claims: list[Claim] | None, error: Exception | None) -> None:
        call.claims, call.error = claims or [], error
        self.calls.remove(call)
        self.ended(call)

    def _task_done(self, call: Call, task: "asyncio.Task[list[Claim]]") -> None:
        if task.cancelled():
            self.calls.discard(call)
        else:
            error = task.exception()
            self._done(call, None if error else task.result(), error)  # type: ignore[arg-type]

    def cancel(self, call: Call) -> bool:
        if call.how == TASK:
            return bool(call.waits.cancel())
        self.calls.remove(call)
        call.waits.cancel()
        return True

    def catch_up(self) -> None:
        self.engine.catch_up()

    def settle(self) -> None:
        self.loop.run_until_complete(self._until_quiet())
        assert self.escaped == [], self.escaped

    async def _until_quiet(self) -> None:
        self.service._on_time_moved()
        quiet_turns = 0
        while quiet_turns < 4:
            await asyncio.sleep(0)
            service = self.service
            is_busy = service._deferred or service._woken or service._turn_is_planned
            quiet_turns = 0 if is_busy or self.engine.has_due_work else quiet_turns + 1

    def close(self) -> None:
        self.loop.run_until_complete(self.awaited.close())
        self.loop.run_until_complete(self._until_done())
        self.loop.close()
        assert self.calls == set()
        assert self.escaped == [], self.escaped

    async def _until_done(self) -> None:
        # The tasks of the last calls end in these turns.
        for _ in range(4):
            await asyncio.sleep(0)


FACES: dict[str, Callable[[Engine, Ended], Face]] = {
    "engine": EngineFace,
    "threads": ThreadsFace,
    "loop": LoopFace,
}
