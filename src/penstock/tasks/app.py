"""TaskApp: the tasks and schedules of a program, and the store through which workers get them."""

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, ParamSpec, TypeVar, overload

from penstock.backends import open_service
from penstock.client import check_results
from penstock.clock import Clock, SystemClock
from penstock.errors import BackendLost, InvalidField, MessageTooLarge, QueueNotFound
from penstock.forked import start_over_when_forked
from penstock.service import (
    Batch,
    DescribeQueue,
    Push,
    PushMany,
    PushReply,
    QueueService,
    QueueSettings,
)
from penstock.settings import URL_VARIABLE, url_in
from penstock.steps import run_steps
from penstock.tasks.commands import Commands, ensure_queue, push_creating
from penstock.tasks.errors import TaskError
from penstock.tasks.inline import run_until_empty
from penstock.tasks.middleware import Middleware
from penstock.tasks.names import DEFAULT_APP, TASK_QUEUE
from penstock.tasks.options import read_options
from penstock.tasks.schedule import Schedule, read_schedule
from penstock.tasks.task import PreparedTask, Task
from penstock.url import read_url

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_URL: Final = "redis://127.0.0.1:6379/0"
# A retry has the task's id and the beginning of the last attempt's error besides.
RETRY_BYTES: Final = 1024
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,39}", re.ASCII)


class TaskApp:
    """Registered tasks and schedules on one store; any URL of Penstock, Redis if none is given.

    Without a URL, the store is that of the variable PENSTOCK_URL, or else a Redis server on this
    machine. The app connects when it is first used, and again in a forked child. `name` is the
    prefix of the queues for results, groups, schedules and limits, so apps with different names do
    not share them. The other options are the defaults of every task.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        name: str = DEFAULT_APP,
        middleware: Iterable[Middleware] = (),
        clock: Clock | None = None,
        **defaults: Any,
    ) -> None:
        _check_name("name", name)
        if url is not None:
            read_url(url)
        self._url = url
        self.name = name
        self.middleware: list[Middleware] = list(middleware)
        for each in self.middleware:
            if not isinstance(each, Middleware):
                raise TaskError(f"middleware: {each!r} is not an instance of Middleware")
        self.tasks: dict[str, Task[..., Any]] = {}
        self.schedules: dict[str, Schedule] = {}
        self._defaults = read_options({"queue": name, **defaults})
        self._has_own_clock = clock is not None
        self.clock: Clock = clock or SystemClock()
        self._service: QueueService | None = None
        # The limits of queues to which tasks were pushed.
        self._body_bytes_max: dict[str, int] = {}
        self._lock = threading.Lock()
        start_over_when_forked(self)

    @property
    def url(self) -> str:
        """The URL of the store. Raises InvalidField if PENSTOCK_URL is refused."""
        return self._url or url_in(os.environ) or DEFAULT_URL

    def use_url(self, url: str) -> None:
        """Uses another store from now on. Raises InvalidField."""
        read_url(url)
        self.close()
        self._url = url

    def use_service(self, service: QueueService, clock: Clock) -> Callable[[], None]:
        """Uses this open service and its clock; returns a function that ends that.

        For tests: the service is not closed by the app.
        """
        before = self._service, self.clock, self._has_own_clock
        self._service, self.clock, self._has_own_clock = service, clock, True

        def leave() -> None:
            self._service, self.clock, self._has_own_clock = before

        return leave

    @property
    def service(self) -> QueueService:
        """The connection of this process. Raises what opening it raises."""
        service = self._service
        if service is None:
            with self._lock:
                service = self._service
                if service is None:
                    service = self._service = self._open()
        return service

    @contextmanager
    def using(self, service: QueueService) -> Iterator[None]:
        """Uses this connection to the store as long as the context lasts, and does not close it."""
        self.close()
        self._service = service
        try:
            yield
        finally:
            self._service = None

    def _open(self) -> QueueService:
        clock = self.clock if self._has_own_clock else None
        try:
            return open_service(self.url, clock)
        except BackendLost as error:
            if self._url is not None or os.environ.get(URL_VARIABLE):
                raise
            raise BackendLost(
                f"{error}; the app names no store, so it is a Redis server on this machine: start "
                f"one, or name another store with TaskApp(URL), {URL_VARIABLE} or --url"
            ) from None

    def start_over(self) -> None:
        """In a forked child: drops the connection and the lock, which belong to the parent."""
        self._lock = threading.Lock()
        # A new store in memory would take pushes for which there is no worker: the old one refuses.
        if self._service is not None and read_url(self.url).scheme != "memory":
            self._service = None

    def now_ms(self) -> int:
        """The wall clock, by which tasks are due and expire; or the clock that was given."""
        return self.clock.now_ms() if self._has_own_clock else time.time_ns() // 1_000_000

    @property
    def queues(self) -> list[str]:
        """The queues of the registered tasks, the app's default queue first if it is used."""
        return list(dict.fromkeys(task.options.queue for task in self.tasks.values()))

    def close(self) -> None:
        """Closes the connection; the next use opens another."""
        service, self._service = self._service, None
        if service is not None:
            service.close()

    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(
        self, /, *, name: str | None = None, **options: Any
    ) -> Callable[[Callable[P, R]], Task[P, R]]: ...
    def task(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        **options: Any,
    ) -> Any:
        """Registers a function, sync or async, as a task: `@app.task` or `@app.task(retries=5)`.

        Options: queue, priority (0 to 9), retries, backoff (seconds or a Backoff), timeout, ttl,
        result_ttl (seconds), unique (true or names of arguments), rate ("100/m"), concurrency.
        Raises TaskError for a name that is taken, a wrong option, a generator function, or a
        parameter whose type JSON cannot hold.
        """

        def register(function: Callable[..., Any]) -> Task[..., Any]:
            if isinstance(function, Task) or not hasattr(function, "__name__"):
                raise TaskError(f"task: expected a function, got {type(function).__name__}")
            return self._register(function, name or function.__name__, options)

        return register if function is None else register(function)

    def _register(
        self, function: Callable[..., Any], name: str, options: dict[str, Any]
    ) -> Task[..., Any]:
        _check_name("task", name)
        if name in self.tasks:
            raise TaskError(f"task: there is a task {name!r} already; give this one name=…")
        try:
            task = Task(self, name, function, read_options(options, self._defaults))
        except InvalidField as error:
            raise TaskError(f"task {name!r}: {error}") from None
        self.tasks[name] = task
        return task

    def schedule(
        self,
        name: str,
        when: str | float,
        call: PreparedTask | Task[..., Any],
        *,
        timezone: str = "UTC",
        missed: str = "once",
    ) -> Schedule:
        """Schedules a task: it is pushed once at each due time, however many workers run.

        `when` is a cron expression of five fields, or six with seconds first, read in `timezone`;
        or a number of seconds. Of the due times that were missed while no worker ran, the latest
        is pushed (`missed="once"`), or none (`"skip"`). Raises TaskError.
        """
        _check_name("schedule", name)
        if name in self.schedules:
            raise TaskError(f"schedule: there is a schedule {name!r} already")
        if isinstance(call, Task):
            call = call.prepare()
        schedule = self.schedules[name] = read_schedule(name, when, call, timezone, missed)
        return schedule

    def push(self, command: Push) -> PushReply:
        """Executes a push; the queue is created if it does not exist."""
        # The property costs a call, and this is done for every task.
        service = self._service or self.service
        self._check_room(command.queue, len(command.body))
        try:
            return service.execute(command)
        except QueueNotFound:
            return run_steps(self.service.execute, push_creating(command, TASK_QUEUE))

    def push_many(self, command: PushMany) -> Sequence[PushReply]:
        """Executes many pushes to one queue. Raises BatchRefused if some are refused."""
        self._check_room(command.queue, max(map(len, command.bodies), default=0))
        try:
            replies = self.service.execute(command)
        except QueueNotFound:
            replies = [QueueNotFound()]
        if replies and isinstance(replies[0], QueueNotFound):
            self.run_steps(ensure_queue(command.queue, TASK_QUEUE))
            replies = self.service.execute(command)
        return check_results(replies)

    def push_batch(self, pushes: Sequence[Push]) -> None:
        """Executes pushes to any queues. Raises BatchRefused if some are refused."""
        for queue in {push.queue for push in pushes}:
            self.run_steps(ensure_queue(queue, TASK_QUEUE))
        for push in pushes:
            self._check_room(push.queue, len(push.body))
        check_results(self.service.execute(Batch(list(pushes))))

    def _check_room(self, queue: str, size_bytes: int) -> None:
        """Raises MessageTooLarge for a task whose retry would be too large for its queue."""
        limit = self._body_bytes_max.get(queue)
        if limit is None:
            try:
                settings = self.service.execute(DescribeQueue(queue)).settings
            except QueueNotFound:
                # It is made by the push.
                settings = QueueSettings()
            limit = self._body_bytes_max[queue] = settings.body_bytes_max
        if size_bytes > limit - RETRY_BYTES:
            raise MessageTooLarge(
                f"task: its arguments make a message of {size_bytes} bytes; the queue {queue!r} "
                f"takes {limit}, of which {RETRY_BYTES} are kept for what a retry adds. Store the "
                "data elsewhere and push its address, or raise the queue's max_body_bytes"
            )

    def run_steps(self, steps: Commands[R]) -> R:
        """Executes a sequence of commands on the app's connection."""
        return run_steps(self.service.execute, steps)

    def run_until_empty(self, *queues: str) -> int:
        """Runs tasks in this thread until none is left to run; returns how many attempts ran.

        It is for tests and scripts, on `memory:` for example. Schedules that are due are pushed
        first. With a `ManualClock(auto_advance=True)` time moves to the next delayed task or
        retry, so that no task is left; with a plain ManualClock tasks that are not due stay; with
        the system's clock this waits for them. Timeouts are checked when a task returns; limits of
        rate and concurrency are not applied.
        """
        return run_until_empty(self, queues or tuple(self.queues))


def _check_name(field: str, name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise TaskError(
            f"{field}: {name!r} is not a valid name; use 1 to 40 of A-Z a-z 0-9 _ . - "
            "(name=… sets the name of a task)"
        )
