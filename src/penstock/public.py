"""What people see of a queue, in their words and units: translated here, and nowhere else.

In Python, on the command line and in a configuration file a thing has one name. A duration is in
seconds, a number or a timedelta, and comes back in seconds under the name that it was given by;
an instant is a whole number of milliseconds since 1970, and its name ends in `_ms`. The commands of
`service`, the wire and the journal have whole milliseconds, in fields that are named with the unit.
"""

import re
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final

import msgspec

from penstock.errors import InvalidField, RequestError
from penstock.service import (
    DELAY_MS_MAX,
    TTL_MS_MAX,
    VISIBILITY_MS_MAX,
    WAIT_MS_MAX,
    Claim,
    QueueCounts,
    QueueInfo,
    QueueSettings,
    QueueStats,
)

Seconds = float | timedelta

_SECONDS_MAX: Final = 10**12
_LIMITS_MS: Final = {
    "delay": (0, DELAY_MS_MAX),
    "ttl": (1, TTL_MS_MAX),
    "wait": (0, WAIT_MS_MAX),
    "visibility_timeout": (0, VISIBILITY_MS_MAX),
    "retention": (1, TTL_MS_MAX),
    "priority_age": (1, TTL_MS_MAX),
    "duration": (1, VISIBILITY_MS_MAX),
}

# The settings of a queue: the name here, and the field of QueueSettings.
_SETTINGS_IN_SECONDS: Final = {
    "visibility_timeout": "visibility_ms",
    "delay": "delay_ms",
    "wait": "wait_ms",
    "retention": "retention_ms",
    "priority_age": "priority_age_ms",
}
_OPTIONAL_SECONDS: Final = frozenset({"priority_age"})
_SETTINGS_UNCHANGED: Final = {
    "max_body_bytes": "body_bytes_max",
    "max_messages": "messages_max",
    "max_bytes": "bytes_max",
    "max_in_flight": "in_flight_max",
    "dead_letter": "dead_letter",
    "max_receives": "max_receives",
    "fifo": "fifo",
    "dedup_by_content": "dedup_by_content",
    "dedup_per_group": "dedup_per_group",
    "annotations": "annotations",
    "paused": "paused",
}
_PUBLIC_NAMES: Final = {
    inside: word
    for word, inside in (_SETTINGS_IN_SECONDS | _SETTINGS_UNCHANGED).items()
    if word != inside
}
_INTERNAL_NAME: Final = re.compile(rf"\b(?:{'|'.join(_PUBLIC_NAMES)})\b")


class Settings(msgspec.Struct, frozen=True, gc=False):
    """The settings of a queue, as `create` and `configure` take them; `None` means no limit.

    `create(other, **settings)` makes a queue with the same ones. Durations are seconds. A message
    that arrived `priority_age` ago or earlier is pulled before younger ones, whatever their
    priorities; with `None` priority is strict. Of a `paused` queue pulls get nothing. `annotations`
    are kept for programs, and not interpreted.
    """

    visibility_timeout: float
    delay: float
    wait: float
    retention: float
    priority_age: float | None
    max_body_bytes: int
    max_messages: int | None
    max_bytes: int | None
    max_in_flight: int | None
    dead_letter: str | None
    max_receives: int | None
    fifo: bool
    dedup_by_content: bool
    dedup_per_group: bool
    annotations: dict[str, str]
    paused: bool

    def keys(self) -> Iterable[str]:
        """The names of the settings: with them, `**settings` gives all as keyword arguments."""
        return self.__struct_fields__

    def __getitem__(self, name: str) -> Any:
        if name not in self.__struct_fields__:
            raise KeyError(name)
        return getattr(self, name)


class QueueDescription(msgspec.Struct, frozen=True, gc=False):
    """A queue's name, settings and dates.

    `also_created` names the dead-letter queue that the answered call created.
    """

    queue: str
    settings: Settings
    created_at_ms: int
    configured_at_ms: int
    also_created: list[str]


class QueueStatistics(msgspec.Struct, frozen=True, gc=False):
    """A queue's depth, the age of its oldest message, and its counts if the backend keeps any.

    `stored_bytes` and `oldest_age`, in seconds, are None if the backend does not know them. Pulls
    get nothing while the queue is `paused`.
    """

    queue: str
    visible: int
    delayed: int
    in_flight: int
    stored_bytes: int | None
    oldest_age: float | None
    waiting_pulls: int
    counts: QueueCounts | None
    paused: bool

    @property
    def messages(self) -> int:
        """Every message the queue holds, whatever its state."""
        return self.visible + self.delayed + self.in_flight


class ClaimRef(msgspec.Struct, frozen=True, gc=False):
    """A claim by its queue and receipt, for a program that has stored or sent only these."""

    queue: str
    receipt: str


AnyClaim = Claim | ClaimRef


def claimed(claim: object) -> tuple[str, Any]:
    """The queue and the proof of a claim. Raises InvalidField."""
    if isinstance(claim, Claim):
        return claim.queue, claim.proof
    if isinstance(claim, ClaimRef):
        return claim.queue, claim.receipt
    raise InvalidField(
        f"claim: expected a Claim or a ClaimRef(queue, receipt), got {type(claim).__name__}"
    )


def to_seconds(duration: Any) -> Any:
    """The seconds of a timedelta; anything else as it is."""
    return duration.total_seconds() if isinstance(duration, timedelta) else duration


def to_ms(field: str, duration: object) -> int:
    """A duration as whole milliseconds, within the limits of that field. Raises InvalidField."""
    seconds = to_seconds(duration)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise InvalidField(f"{field}: expected a number of seconds, got {type(seconds).__name__}")
    low_ms, high_ms = _LIMITS_MS.get(field, (0, _SECONDS_MAX * 1_000))
    # Compared as seconds, because a float may be too large to become a number of milliseconds.
    if not low_ms / 1_000 <= seconds <= high_ms / 1_000:
        shown = f"{seconds} s" if -_SECONDS_MAX < seconds < _SECONDS_MAX else "that long"
        raise InvalidField(
            f"{field}: {shown} is outside {low_ms / 1_000:g} to {high_ms // 1_000} s"
        )
    return round(seconds * 1_000)


def optional_ms(field: str, duration: Seconds | None) -> int | None:
    """The same for a duration that need not be given. Raises InvalidField."""
    return None if duration is None else to_ms(field, duration)


def to_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Settings with the names and units of QueueSettings. Raises InvalidField."""
    settings: dict[str, Any] = {}
    for name, value in given.items():
        if name in _SETTINGS_IN_SECONDS:
            is_none = value is None and name in _OPTIONAL_SECONDS
            settings[_SETTINGS_IN_SECONDS[name]] = None if is_none else to_ms(name, value)
        elif name in _SETTINGS_UNCHANGED:
            settings[_SETTINGS_UNCHANGED[name]] = value
        else:
            known = ", ".join([*_SETTINGS_IN_SECONDS, *_SETTINGS_UNCHANGED])
            raise InvalidField(f"settings: there is no setting {name!r}; there are {known}")
    return settings


def public_settings(settings: QueueSettings) -> Settings:
    """All settings of a queue with the names and units of `create`."""
    return Settings(
        **{
            name: _seconds(getattr(settings, field)) for name, field in _SETTINGS_IN_SECONDS.items()
        },
        **{name: getattr(settings, field) for name, field in _SETTINGS_UNCHANGED.items()},
    )


def public_info(info: QueueInfo) -> QueueDescription:
    """The reply of `create`, `configure` and `describe`."""
    return QueueDescription(
        info.queue,
        public_settings(info.settings),
        info.created_at_ms,
        info.configured_at_ms,
        info.also_created,
    )


def public_stats(stats: QueueStats) -> QueueStatistics:
    """The reply of `stats`."""
    return QueueStatistics(
        stats.queue,
        stats.visible,
        stats.delayed,
        stats.in_flight,
        stats.stored_bytes,
        _seconds(stats.oldest_age_ms),
        stats.waiting_pulls,
        stats.counts,
        stats.paused,
    )


def _seconds(ms: int | None) -> Any:
    return None if ms is None else ms / 1_000


def with_public_names(error: RequestError) -> RequestError:
    """The error with settings named as `create` and `configure` name them."""
    text = _INTERNAL_NAME.sub(lambda found: _PUBLIC_NAMES[found[0]], str(error))
    return error if text == str(error) else type(error)(text)
