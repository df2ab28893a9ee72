"""A registered task: a function and its options, and how calls of it are pushed."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, TypeVar

import msgspec

from penstock.consumer.options import refuse_generator
from penstock.public import Seconds, optional_ms, to_ms
from penstock.service import BATCH_ITEMS_MAX, DELAY_MS_MAX, Push, PushMany
from penstock.tasks.arguments import Arguments
from penstock.tasks.envelope import Envelope, Step, body_start, encode
from penstock.tasks.errors import TaskError
from penstock.tasks.options import TaskOptions, read_options
from penstock.tasks.results import PushedTask
from penstock.tasks.tracing import trace_attributes

if TYPE_CHECKING:
    from penstock.tasks.app import TaskApp

P = ParamSpec("P")
R = TypeVar("R")
# The options that a push can change. The worker uses the others, from the task's declaration.
_PUSH_OPTIONS: Final = frozenset({"queue", "priority", "ttl", "unique"})


class Task(Generic[P, R]):
    """A function that workers run. Calling it runs it here; `push` sends it to a worker."""

    def __init__(
        self, app: "TaskApp", name: str, function: Callable[P, R], options: TaskOptions
    ) -> None:
        self.app = app
        self.name = name
        refuse_generator("function", function)
        self.function: Callable[..., Any] = function
        self.options = options
        self.arguments = Arguments(name, function)
        self.is_async = inspect.iscoroutinefunction(function)
        self.__doc__ = function.__doc__
        if isinstance(options.unique, tuple):
            unknown = [each for each in options.unique if each not in self.arguments.names]
            if unknown:
                raise TaskError(f"unique: {name!r} has no argument {unknown[0]!r}")
        self._start = body_start(name)
        # For `_push`: fields of a struct cost more to read than attributes.
        self._queue, self._priority = options.queue, options.priority
        self._is_plain = options.ttl_ms is None and not options.unique

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function in this thread, as if it were no task."""
        return self.function(*args, **kwargs)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"<Task {self.name!r} of queue {self.options.queue!r}>"

    def push(self, *args: P.args, **kwargs: P.kwargs) -> "PushedTask[R]":
        """Pushes a call; it is durable when this returns. Raises TaskError for wrong arguments."""
        return self._push(None, self.arguments.encode(args, kwargs))

    def push_in(self, delay: Seconds, /, *args: P.args, **kwargs: P.kwargs) -> "PushedTask[R]":
        """Pushes a call that is not run before `delay` seconds have passed."""
        return self._push(to_ms("delay", delay), self.arguments.encode(args, kwargs))

    def push_at(self, when: datetime, /, *args: P.args, **kwargs: P.kwargs) -> "PushedTask[R]":
        """Pushes a call that is not run before that instant; one that has passed is due now.

        Raises TaskError for a datetime without a time zone.
        """
        if getattr(when, "tzinfo", None) is None:
            raise TaskError(
                f"push_at: expected a datetime with a time zone, got {when!r}; "
                "for example datetime.now(UTC) + timedelta(hours=1)"
            )
        delay_ms = max(0, round(when.timestamp() * 1_000) - self.app.now_ms())
        if delay_ms > DELAY_MS_MAX:
            raise TaskError(f"push_at: {when} is more than 366 days from now")
        return self._push(delay_ms, self.arguments.encode(args, kwargs))

    def push_many(
        self, calls: Iterable[Sequence[Any] | Mapping[str, Any]], *, delay: Seconds | None = None
    ) -> list["PushedTask[R]"]:
        """Pushes several calls in as few round trips as possible; all are checked before any.

        A call is its arguments: a tuple or list of them in order, or a dict by name.
        """
        encoded = [self._encode_item(number, call) for number, call in enumerate(calls)]
        start, attributes = self._start, trace_attributes()
        delay_ms = optional_ms("delay", delay)
        options = self.options
        pushed: list[PushedTask[R]] = []
        for at in range(0, len(encoded), BATCH_ITEMS_MAX):
            part = encoded[at : at + BATCH_ITEMS_MAX]
            if options.ttl_ms is None:
                bodies = [start + args + b"}" for args in part]
            else:
                bodies = [self._body(args, delay_ms) for args in part]
            command = PushMany(
                options.queue,
                bodies,
                dedup_ids=[self._dedup_id(args) for args in part] if options.unique else None,
                delay_ms=delay_ms,
                priority=options.priority,
                ttl_ms=self._ttl_ms(delay_ms),
                attributes=attributes,
            )
            pushed += [
                PushedTask(self, reply.id, reply.duplicate) for reply in self.app.push_many(command)
            ]
        return pushed

    def prepare(self, *args: Any, **kwargs: Any) -> "PreparedTask":
        """A call to be pushed later, as part of a chain or a group, or by a schedule."""
        return PreparedTask(self, args, kwargs)

    def with_options(self, **options: Any) -> "Task[P, R]":
        """The same task with other options for pushes: queue, priority, ttl or unique."""
        for name in options:
            if name not in _PUSH_OPTIONS:
                declared = {name, f"{name}_ms"} & {*TaskOptions.__struct_fields__}
                why = "is decided where the task is declared" if declared else "is no option"
                raise TaskError(
                    f"with_options: {name!r} {why}; "
                    f"a push can change {', '.join(sorted(_PUSH_OPTIONS))}"
                )
        return Task(self.app, self.name, self.function, read_options(options, self.options))

    def push_of(self, envelope: Envelope, delay_ms: int | None = None) -> Push:
        """The command that pushes an envelope of this task."""
        options = self.options
        ttl_ms = self._ttl_ms(delay_ms)
        if ttl_ms is not None:
            expires_at_ms = self.app.now_ms() + ttl_ms
            envelope = msgspec.structs.replace(envelope, expires_at_ms=expires_at_ms)
        return Push(
            options.queue,
            encode(envelope),
            delay_ms,
            options.priority,
            ttl_ms,
            attributes=trace_attributes(),
        )

    def _encode_item(self, number: int, call: Any) -> bytes:
        try:
            # First, because the check for a Mapping takes longer than all others.
            if type(call) is tuple:
                return self.arguments.encode(call, {})
            if isinstance(call, list | tuple):
                return self.arguments.encode(tuple(call), {})
            if isinstance(call, Mapping):
                return self.arguments.encode((), dict(call))
        except TaskError as error:
            raise TaskError(f"calls[{number}]: {error}; nothing was pushed") from None
        raise TaskError(
            f"calls[{number}]: expected a tuple, list or dict of arguments, got "
            f"{type(call).__name__}; nothing was pushed"
        )

    def _push(self, delay_ms: int | None, args: bytes) -> "PushedTask[R]":
        ttl_ms = dedup_id = None
        if self._is_plain:
            body = self._start + args + b"}"
        else:
            body, ttl_ms = self._body(args, delay_ms), self._ttl_ms(delay_ms)
            dedup_id = self._dedup_id(args) if self.options.unique else None
        queue, priority = self._queue, self._priority
        command = Push(queue, body, delay_ms, priority, ttl_ms, dedup_id, None, trace_attributes())
        reply = self.app.push(command)
        return PushedTask(self, reply.id, reply.duplicate)

    def _ttl_ms(self, delay_ms: int | None) -> int | None:
        """The message's ttl, which counts from the push; the task's counts from its due time."""
        ttl_ms = self.options.ttl_ms
        return ttl_ms if ttl_ms is None else ttl_ms + (delay_ms or 0)

    def _body(self, args: bytes, delay_ms: int | None) -> bytes:
        ttl_ms = self._ttl_ms(delay_ms)
        expires_at_ms = None if ttl_ms is None else self.app.now_ms() + ttl_ms
        return encode(Envelope(self.name, msgspec.Raw(args), expires_at_ms=expires_at_ms))

    def _dedup_id(self, args: bytes) -> str:
        """An id that calls have in common if their arguments, or the named ones, are equal."""
        names = self.options.unique
        if isinstance(names, tuple):
            given = msgspec.json.decode(args)
            args = encode([given.get(name) for name in names])
        else:
            # Keyword arguments may come in any order.
            args = msgspec.json.encode(msgspec.json.decode(args), order="sorted")
        return f"unique/{sha256(self.name.encode() + b'/' + args).hexdigest()}"


class PreparedTask:
    """A task with its arguments, not pushed yet."""

    def __init__(self, task: Task[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.task = task
        self.args = args
        self.kwargs = kwargs

    def push(self) -> "PushedTask[Any]":
        """Pushes the call."""
        return self.task.push(*self.args, **self.kwargs)

    def encoded(self) -> msgspec.Raw:
        """All its arguments. Raises TaskError."""
        return msgspec.Raw(self.task.arguments.encode(self.args, self.kwargs))

    def as_step(self, task_id: str | None = None) -> Step:
        """The call as a step after another, whose result it gets first. Raises TaskError."""
        options = self.task.options
        return Step(
            self.task.name,
            msgspec.Raw(self.task.arguments.encode_rest(self.args, self.kwargs)),
            options.queue,
            self.task.arguments.names[0],
            options.priority,
            options.ttl_ms,
            task_id,
        )
