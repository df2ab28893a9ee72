"""Schedules: when a task is due by cron or by a period, and how it is pushed exactly once.

Every worker process computes the same due times and pushes the due tasks with a dedup id made of
the schedule's name and the due time, so that only one of the pushes adds a message. A note on the
schedule's own queue has the last due time that was pushed: from it a worker that starts computes
what was missed while none ran. See decision 111.
"""

from datetime import UTC, datetime, tzinfo
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from penstock.errors import MissingExtra, QueueExists, QueueNotFound
from penstock.output import logger
from penstock.service import ConfigureQueue, CreateQueue, DescribeQueue, Push
from penstock.tasks.commands import Commands, push_creating
from penstock.tasks.envelope import Envelope
from penstock.tasks.errors import TaskError
from penstock.tasks.names import TASK_QUEUE, schedule_queue
from penstock.tasks.task import PreparedTask

if TYPE_CHECKING:
    from penstock.tasks.app import TaskApp

# A due time that is longer ago counts as missed; the dedup window is five minutes.
LATE_MS_MAX: Final = 60_000
# Clocks of workers may differ by this much.
AHEAD_MS_MAX: Final = 60_000
PERIOD_S_MIN: Final = 1
PERIOD_S_MAX: Final = 366 * 86_400
NOTE: Final = ".fired"
NEXT_NOTE: Final = ".next"
WHEN_NOTE: Final = ".when"
TASK_NOTE: Final = ".task"
_MISSED: Final = ("once", "skip")
_logger: Final = logger("penstock.tasks")


class Schedule(NamedTuple):
    """When a call is pushed: by a cron expression in a time zone, or every so many milliseconds."""

    name: str
    call: PreparedTask
    cron: str | None
    period_ms: int
    zone: tzinfo
    pushes_missed: bool

    def next_due_ms(self, after_ms: int) -> int:
        """The first due time after an instant."""
        if self.cron is None:
            return (after_ms // self.period_ms + 1) * self.period_ms
        return _to_ms(next(_cron(self.cron, self._local(after_ms))))

    def last_due_ms(self, now_ms: int) -> int:
        """The last due time at or before an instant."""
        if self.cron is None:
            return now_ms // self.period_ms * self.period_ms
        # One second later, because CronSim does not return the instant at which it starts.
        return _to_ms(next(_cron(self.cron, self._local(now_ms + 1_000), reverse=True)))

    def _local(self, ms: int) -> datetime:
        return datetime.fromtimestamp(ms // 1_000, self.zone)

    @property
    def shown(self) -> str:
        """When it is due, for people."""
        if self.cron is None:
            return f"every {self.period_ms / 1_000:g} s"
        return f"{self.cron} {self.zone}"


def read_schedule(name: str, when: Any, call: PreparedTask, timezone: str, missed: str) -> Schedule:
    """A schedule, checked, with the arguments of its call. Raises TaskError or MissingExtra."""
    if not isinstance(call, PreparedTask):
        raise TaskError(f"schedule {name!r}: expected a task or task.prepare(…), got {call!r}")
    if missed not in _MISSED:
        raise TaskError(f"schedule {name!r}: missed={missed!r} is not one of {', '.join(_MISSED)}")
    call.encoded()
    zone = _zone(name, timezone)
    if isinstance(when, str):
        try:
            next(_cron(when, datetime.now(zone)))
        except StopIteration:
            raise TaskError(f"schedule {name!r}: {when!r} is never due") from None
        except ValueError as error:
            raise TaskError(
                f"schedule {name!r}: {when!r} is not a cron expression: {error}; use five fields, "
                "minute hour day month weekday, such as '30 3 * * mon-fri'"
            ) from None
        return Schedule(name, call, when, 0, zone, missed == "once")
    if isinstance(when, bool) or not isinstance(when, int | float):
        raise TaskError(f"schedule {name!r}: expected a cron expression or seconds, got {when!r}")
    if not PERIOD_S_MIN <= when <= PERIOD_S_MAX:
        raise TaskError(f"schedule {name!r}: {when} s is outside {PERIOD_S_MIN} s to 366 days")
    return Schedule(name, call, None, round(when * 1_000), zone, missed == "once")


def _zone(name: str, timezone: str) -> tzinfo:
    if timezone == "UTC":
        return UTC
    try:
        return ZoneInfo(timezone)
    except (ZoneInfoNotFoundError, ValueError, TypeError, OSError):
        raise TaskError(
            f"schedule {name!r}: there is no time zone {timezone!r}; "
            "use a name of the IANA database, such as Europe/Berlin"
        ) from None


def _cron(expression: str, start: datetime, reverse: bool = False) -> Any:
    try:
        from cronsim import CronSim, CronSimError
    except ModuleNotFoundError:
        raise MissingExtra(
            "schedule: cron expressions need the package 'cronsim'; "
            "install it with pip install 'PATH-OF-THE-CLONE[tasks]'"
        ) from None
    try:
        return CronSim(expression, start, reverse=reverse)
    except CronSimError as error:
        raise ValueError(str(error).lower()) from None


def _to_ms(when: datetime) -> int:
    return round(when.timestamp() * 1_000)


class ScheduleClock:
    """Which schedules of an app are due, for one process that may push them."""

    def __init__(self, app: "TaskApp") -> None:
        self._app = app
        # The last due time of each schedule that was pushed, by this process or another.
        self._pushed_ms: dict[str, int] = {}

    def begin(self) -> Commands[None]:
        """Reads the last pushed due time of each schedule, and pushes what was missed since."""
        now_ms = self._app.now_ms()
        for schedule in self._app.schedules.values():
            self._pushed_ms[schedule.name] = yield from self._read_note(schedule, now_ms)
        yield from self.push_due()

    def next_due_ms(self) -> int | None:
        """When to call `push_due` next; None without schedules."""
        due = [
            self._app.schedules[name].next_due_ms(pushed_ms)
            for name, pushed_ms in self._pushed_ms.items()
        ]
        return min(due, default=None)

    def push_due(self) -> Commands[None]:
        """Pushes what is due now, and what was missed if the schedule says so."""
        now_ms = self._app.now_ms()
        for name, pushed_ms in list(self._pushed_ms.items()):
            schedule = self._app.schedules[name]
            due_ms = schedule.last_due_ms(now_ms)
            if pushed_ms > now_ms + AHEAD_MS_MAX:
                # The clock of this machine was ahead while this process ran, and was set back.
                pushed_ms = self._pushed_ms[name] = yield from self._read_note(schedule, now_ms)
            if due_ms <= pushed_ms:
                continue
            if now_ms - due_ms > LATE_MS_MAX:
                # This process may have been suspended while another pushed it.
                pushed_ms = yield from self._read_note(schedule, now_ms)
            is_missed = now_ms - due_ms > LATE_MS_MAX
            if due_ms > pushed_ms and (schedule.pushes_missed or not is_missed):
                yield from self._push(schedule, due_ms)
            self._pushed_ms[name] = max(pushed_ms, due_ms)

    def _push(self, schedule: Schedule, due_ms: int) -> Commands[None]:
        call = schedule.call
        push = call.task.push_of(Envelope(call.task.name, call.encoded()))
        reply = yield from push_creating(
            Push(
                push.queue,
                push.body,
                priority=push.priority,
                ttl_ms=push.ttl_ms,
                dedup_id=f"schedule/{self._app.name}/{schedule.name}/{due_ms}",
            ),
            TASK_QUEUE,
        )
        if not reply.duplicate:
            yield from self._write_note(schedule, due_ms)

    def _read_note(self, schedule: Schedule, now_ms: int) -> Commands[int]:
        """The last due time that was pushed; of a new schedule, the last one before now.

        The same if the note is of a time to come: a clock was ahead when it was written. Until then
        nothing would be pushed.
        """
        queue = schedule_queue(self._app.name, schedule.name)
        try:
            info = yield DescribeQueue(queue)
            pushed_ms = int(info.settings.annotations.get(NOTE, ""))
            if pushed_ms <= now_ms + AHEAD_MS_MAX:
                return pushed_ms
            _logger.warning(
                "schedule %s: was pushed for a time %d s ahead of this clock, so a clock is or was "
                "wrong; it goes on with its next due time",
                schedule.name,
                (pushed_ms - now_ms) // 1_000,
            )
        except (QueueNotFound, ValueError):
            pass
        due_ms = schedule.last_due_ms(now_ms)
        yield from self._write_note(schedule, due_ms)
        return due_ms

    def _write_note(self, schedule: Schedule, due_ms: int) -> Commands[None]:
        queue = schedule_queue(self._app.name, schedule.name)
        notes = {
            NOTE: str(due_ms),
            # For those who look: a console knows no app.
            NEXT_NOTE: str(schedule.next_due_ms(due_ms)),
            WHEN_NOTE: schedule.shown,
            TASK_NOTE: schedule.call.task.name,
        }
        settings = {"annotations": notes}
        try:
            yield ConfigureQueue(queue, settings)
        except QueueNotFound:
            try:
                yield CreateQueue(queue, settings)
            except QueueExists:
                return
