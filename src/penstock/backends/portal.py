"""A blocking service made of one that is written for asyncio: one thread runs its event loop.

    caller → waiting requests → (one wake-up of the loop for all of them) → loop → caller's own lock

Adapters to other queue systems are written once, for asyncio; `connect` uses them through this.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

from penstock.errors import BackendLost, EngineClosed, PenstockError
from penstock.forked import start_over_when_forked
from penstock.service import (
    BATCH_ITEMS_MAX,
    AsyncQueueService,
    Batch,
    Command,
    Release,
    unseen_claims,
)

R = TypeVar("R")


class _Request:
    """A call of one thread; `done` is a lock that is released when the reply is set.

    The loop makes the coroutine: one that a caller made, and lost by an interrupt, would warn that
    nobody awaited it.
    """

    __slots__ = ("arguments", "done", "error", "function", "reply", "task")

    def __init__(
        self, function: Callable[..., Coroutine[Any, Any, Any]], arguments: tuple[Any, ...]
    ) -> None:
        self.function = function
        self.arguments = arguments
        self.reply: Any = None
        self.error: BaseException | None = None
        self.task: asyncio.Task[Any] | None = None
        self.done = threading.Lock()
        self.done.acquire()


class Portal:
    """A `QueueService` made of an `AsyncQueueService`. Safe for many threads."""

    LACKS: ClassVar[Mapping[str, str]] = {}

    def __init__(self, open_service: Callable[[], Awaitable[AsyncQueueService]]) -> None:
        """Opens the service in a loop of its own. Raises what opening it raises."""
        self._loop = asyncio.new_event_loop()
        self._waiting: deque[_Request] = deque()
        self._closed = False
        # Whether every command would be refused: closed, or in a forked child.
        self.is_unusable = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="penstock-portal", daemon=True)
        self._thread.start()
        try:
            self._service: AsyncQueueService = self._call(_awaited, open_service)
        except BaseException:
            self._end_loop()
            raise
        # In the protocol it is a class attribute; here it depends on the opened service.
        vars(self)["LACKS"] = self._service.LACKS
        self.redrive_max = self._service.redrive_max
        start_over_when_forked(self)

    def start_over(self) -> None:
        """In a forked child: refuses every command, because the loop runs in the parent."""
        self.is_unusable = True

    def execute(self, command: Command[R]) -> R:
        """Executes the command."""
        # Without another call, in which an interrupt could come: the reply may be claims.
        return self._call(self._service.execute, command)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Closes the service and ends its thread; once more if an interrupt ended the first."""
        try:
            if not self.is_unusable:
                self._call(self._service.close)
        finally:
            self._closed = self.is_unusable = True
            self._end_loop()

    def _call(self, function: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> Any:
        if self.is_unusable:
            if self._closed:
                raise EngineClosed("this service was closed")
            raise BackendLost(
                "this process was forked from the one that connected; connect again here"
            )
        request = _Request(function, arguments)
        try:
            self._waiting.append(request)
            # Only the first wakes the loop: the others are found by the same wake-up.
            with suppress(IndexError):
                if self._waiting[0] is request:
                    self._loop.call_soon_threadsafe(self._take_all)
            request.done.acquire()
        except BaseException:
            # The interrupt may have come before the wake-up, for which other callers wait too.
            self._loop.call_soon_threadsafe(self._cancel, request)
            raise
        if request.error is not None:
            raise request.error
        return request.reply

    def _take_all(self) -> None:
        waiting = self._waiting
        while waiting:
            request = waiting.popleft()
            request.task = self._loop.create_task(_finish(request))
            self._tasks.add(request.task)
            request.task.add_done_callback(self._tasks.discard)

    def _cancel(self, request: _Request) -> None:
        """Cancels a call whose caller was interrupted; claims that it has made are released."""
        self._take_all()
        if request.task is not None:
            request.task.add_done_callback(lambda _: self._release_unseen(request))
            request.task.cancel()

    def _release_unseen(self, request: _Request) -> None:
        releases = unseen_claims(request.arguments[0], request.reply) if request.arguments else []
        if releases and not self._closed:
            task = self._loop.create_task(self._release(releases))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _release(self, releases: list[Release]) -> None:
        # A claim that cannot be released now runs out.
        with suppress(PenstockError):
            for at in range(0, len(releases), BATCH_ITEMS_MAX):
                await self._service.execute(Batch([*releases[at : at + BATCH_ITEMS_MAX]]))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
            with suppress(BaseException):
                self._loop.run_until_complete(task)
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def _end_loop(self) -> None:
        # RuntimeError: the loop has ended already. In a forked child there is no thread.
        with suppress(RuntimeError):
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


async def _awaited(make: Callable[[], Awaitable[AsyncQueueService]]) -> AsyncQueueService:
    return await make()


async def _finish(request: _Request) -> None:
    try:
        request.reply = await request.function(*request.arguments)
    except asyncio.CancelledError:
        request.error = EngineClosed("this service was closed")
    except BaseException as error:
        request.error = error
    finally:
        request.done.release()
