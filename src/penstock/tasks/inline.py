"""Tasks run in the calling thread, one after another: for tests and scripts."""

from typing import TYPE_CHECKING, Final

from penstock.clock import ManualClock
from penstock.errors import QueueNotFound
from penstock.service import DAY_MS, Claim, Pull, Stats
from penstock.tasks.control import CancelledIds
from penstock.tasks.finishing import TaskFinisher
from penstock.tasks.running import HeldTask, fail, hold, run_to_end
from penstock.tasks.schedule import ScheduleClock

if TYPE_CHECKING:
    from penstock.tasks.app import TaskApp

_PULL_MAX: Final = 100
_WAIT_MS: Final = 100


def run_until_empty(app: "TaskApp", queues: tuple[str, ...]) -> int:
    """Runs tasks until none is left to run; returns the number of attempts."""
    finisher = TaskFinisher(app, app.service.LACKS)
    if app.schedules:
        app.run_steps(ScheduleClock(app).begin())
    cancelled = CancelledIds(app.name)
    ran = 0
    while True:
        app.run_steps(cancelled.refresh())
        tasks = [hold(app, claim) for queue in queues for claim in _pull(app, queue, 0)]
        if not tasks and not (tasks := _wait(app, queues)):
            return ran
        for held in tasks:
            if held.id in cancelled:
                held.outcome = cancelled.OUTCOME
            elif held.outcome is None:
                ran += 1
                _run(app, held)
            # One by one, so that the finished tasks stay finished if this process fails.
            app.run_steps(finisher.finish([held]))


def _run(app: "TaskApp", held: HeldTask) -> None:
    task, context = held.call
    context.start(task.options.timeout_ms)
    run_to_end(held, app.middleware)
    try:
        context.check_deadline()
    except Exception as error:
        fail(held, error, app.middleware)


def _wait(app: "TaskApp", queues: tuple[str, ...]) -> list[HeldTask]:
    """The tasks that become due next; none if there are none, or if time stands still."""
    clock = app.clock
    # Without auto_advance only the caller moves the clock.
    if isinstance(clock, ManualClock) and not clock.auto_advance:
        return []
    for queue in queues:
        while _count(app, queue):
            wait_ms = DAY_MS if isinstance(clock, ManualClock) else _WAIT_MS
            claims = _pull(app, queue, wait_ms)
            if claims:
                return [hold(app, claim) for claim in claims]
    return []


def _pull(app: "TaskApp", queue: str, wait_ms: int) -> list[Claim]:
    try:
        return app.service.execute(Pull(queue, _PULL_MAX, wait_ms=wait_ms))
    except QueueNotFound:
        return []


def _count(app: "TaskApp", queue: str) -> int:
    try:
        return app.service.execute(Stats(queue)).messages
    except QueueNotFound:
        return 0
