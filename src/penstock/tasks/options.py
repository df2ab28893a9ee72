"""The options of a task, read and checked: retries, limits and times.

Pure: the random number of the jitter is an argument.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from penstock.public import to_ms
from penstock.service import (
    PRIORITY_MAX,
    TTL_MS_MAX,
    VISIBILITY_MS_MAX,
    check_name,
    check_number,
)
from penstock.tasks.errors import TaskError

RETRIES_MAX: Final = 1_000
CONCURRENCY_MAX: Final = 1_000
RATE_COUNT_MAX: Final = 1_000
_DOUBLINGS_MAX: Final = 30
_RATE: Final = re.compile(r"([0-9]{1,9})/([0-9]{0,9})(s|m|h)", re.ASCII)
_UNITS_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000}


class Backoff(msgspec.Struct, frozen=True):
    """How long a failed task waits: `first` seconds, then twice as long each time, up to `longest`.

    Each wait is shortened by a random part of up to `jitter`, so that tasks that failed together
    do not come back together.
    """

    first: float = 1.0
    longest: float = 600.0
    jitter: float = 0.25

    def delay_ms(self, failures: int, chance: float) -> int:
        """The wait after so many failures; `chance` is a random number from 0 to 1."""
        doublings = min(max(0, failures - 1), _DOUBLINGS_MAX)
        seconds = min(self.first * 2**doublings, self.longest)
        return int(seconds * (1 - self.jitter * chance) * 1_000)


class Rate(msgspec.Struct, frozen=True):
    """At most `count` starts within any `period_ms`, in all workers together."""

    count: int
    period_ms: int


class TaskOptions(msgspec.Struct, frozen=True):
    """Everything that can be set for a task, in the units of `service`."""

    queue: str = "tasks"
    priority: int = 0
    retries: int = 3
    backoff: Backoff = Backoff()
    timeout_ms: int | None = None
    ttl_ms: int | None = None
    unique: tuple[str, ...] | bool = False
    rate: Rate | None = None
    concurrency: int | None = None
    result_ttl_ms: int | None = None

    @property
    def is_limited(self) -> bool:
        """Whether a task may have to wait although a worker is free."""
        return self.rate is not None or self.concurrency is not None


def read_options(given: dict[str, Any], defaults: TaskOptions | None = None) -> TaskOptions:
    """The options as a task's decorator names them. Raises TaskError and InvalidField."""
    changes: dict[str, Any] = {}
    for name, value in given.items():
        reader = _READERS.get(name)
        if reader is None:
            raise TaskError(f"task: there is no option {name!r}; there are {', '.join(_READERS)}")
        field, read = reader
        changes[field] = read(name, value)
    return msgspec.structs.replace(defaults or TaskOptions(), **changes)


def read_rate(text: object) -> Rate:
    """A rate such as 100/m, 5/s or 10/30s. Raises TaskError."""
    found = _RATE.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise TaskError(f"rate: {text!r} is not a rate; use 5/s, 100/m, 10/30s or 1000/h")
    count = int(found[1])
    period_ms = int(found[2] or "1") * _UNITS_MS[found[3]]
    if not 1 <= count <= RATE_COUNT_MAX or not 1_000 <= period_ms <= VISIBILITY_MS_MAX:
        raise TaskError(
            f"rate: {text!r} is outside 1 to {RATE_COUNT_MAX} tasks in 1 s to 12 h; "
            "a high rate can be given for a shorter period: 6000/m is 100/s"
        )
    return Rate(count, period_ms)


def _name(field: str, value: Any) -> str:
    name = check_name(value, field)
    # It is a part of the names of other queues.
    if len(name) > 60 or "@" in name:
        raise TaskError(
            f"{field}: {name!r} is too long for a task queue, or has a scope: 60 of "
            "A-Z a-z 0-9 _ - . are allowed"
        )
    return name


def _backoff(field: str, value: Any) -> Backoff:
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = Backoff(first=float(value))
    if not isinstance(value, Backoff):
        raise TaskError(f"{field}: expected seconds or a Backoff, got {type(value).__name__}")
    for name in ("first", "longest"):
        to_ms("delay", getattr(value, name))
    if not 0 <= value.jitter <= 1:
        raise TaskError(f"{field}: jitter {value.jitter} is outside 0 to 1")
    return value


def _seconds(low_ms: int, high_ms: int) -> Any:
    def read(field: str, value: Any) -> int | None:
        if value is None:
            return None
        ms = to_ms(field, value)
        if not low_ms <= ms <= high_ms:
            raise TaskError(
                f"{field}: {value} s is outside {low_ms / 1_000:g} to {high_ms // 1_000} s"
            )
        return ms

    return read


def _number(low: int, high: int, optional: bool = False) -> Any:
    def read(field: str, value: Any) -> int | None:
        return None if optional and value is None else check_number(field, value, low, high)

    return read


def _unique(field: str, value: Any) -> tuple[str, ...] | bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, Sequence) and not isinstance(value, str):
        names = tuple(value)
        if names and all(isinstance(name, str) for name in names):
            return names
    raise TaskError(f"{field}: expected true, false or the names of arguments, got {value!r}")


_READERS: Final[dict[str, tuple[str, Any]]] = {
    "queue": ("queue", _name),
    "priority": ("priority", _number(0, PRIORITY_MAX)),
    "retries": ("retries", _number(0, RETRIES_MAX)),
    "backoff": ("backoff", _backoff),
    "timeout": ("timeout_ms", _seconds(1, VISIBILITY_MS_MAX)),
    "ttl": ("ttl_ms", _seconds(1, TTL_MS_MAX)),
    "unique": ("unique", _unique),
    "rate": ("rate", lambda _, value: None if value is None else read_rate(value)),
    "concurrency": ("concurrency", _number(1, CONCURRENCY_MAX, optional=True)),
    "result_ttl": ("result_ttl_ms", _seconds(1, TTL_MS_MAX)),
}
