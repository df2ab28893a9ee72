"""Schedules: when they are due, that each is pushed once, and how missed ones are treated."""

from datetime import UTC, datetime
from typing import Any

import pytest

from penstock import ManualClock
from penstock.errors import QueueNotFound
from penstock.service import ConfigureQueue, Stats
from penstock.tasks import TaskApp, TaskError
from penstock.tasks.names import schedule_queue
from penstock.tasks.schedule import LATE_MS_MAX, NOTE, ScheduleClock


def ms(year, month, day, hour, minute=0, second=0):
    return round(datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp() * 1_000)


NOON_MS = ms(2030, 6, 1, 12)


class NightlyApp:
    """An app with one schedule, and the times at which its task ran."""

    def __init__(self, start_ms=NOON_MS, when="0 3 * * *", **options):
        self.clock = ManualClock(start_ms)
        self.app = TaskApp("memory:", clock=self.clock)
        self.ran: list[Any] = []

        @self.app.task
        def report(kind: str) -> None:
            self.ran.append((kind, self.clock.now_ms()))

        self.app.schedule("nightly", when, report.prepare("short"), **options)

    def worker(self):
        """The schedules as one worker process knows them after its start."""
        known = ScheduleClock(self.app)
        self.app.run_steps(known.begin())
        return known

    def waiting(self):
        try:
            return self.app.service.execute(Stats("tasks")).messages
        except QueueNotFound:
            return 0


@pytest.fixture
def nightly():
    return NightlyApp()


def test_a_schedule_is_pushed_when_it_is_due_and_not_before(nightly):
    assert nightly.app.run_until_empty() == 0
    nightly.clock.advance(ms=ms(2030, 6, 2, 2, 59, 59) - nightly.clock.now_ms())
    assert nightly.app.run_until_empty() == 0
    nightly.clock.advance(seconds=1)
    assert nightly.app.run_until_empty() == 1
    assert nightly.ran == [("short", ms(2030, 6, 2, 3))]
    assert nightly.app.run_until_empty() == 0


def test_many_workers_push_a_schedule_once(nightly):
    workers = [nightly.worker() for _ in range(5)]
    for day in range(2, 12):
        nightly.clock.advance(ms=ms(2030, 6, day, 3) - nightly.clock.now_ms())
        for worker in workers:
            assert worker.next_due_ms() == nightly.clock.now_ms()
            nightly.app.run_steps(worker.push_due())
            nightly.app.run_steps(worker.push_due())
    nightly.app.schedules.clear()
    assert nightly.app.run_until_empty() == 10


def test_a_worker_that_was_suspended_does_not_push_again_what_another_pushed(nightly):
    running, suspended = nightly.worker(), nightly.worker()
    nightly.clock.advance(ms=ms(2030, 6, 2, 3) - nightly.clock.now_ms())
    nightly.app.run_steps(running.push_due())
    # Longer than the store keeps a dedup id.
    nightly.clock.advance(seconds=3_600)
    nightly.app.run_steps(suspended.push_due())
    assert nightly.waiting() == 1


@pytest.mark.parametrize(("missed", "count"), [("once", 1), ("skip", 0)])
def test_what_was_missed_while_no_worker_ran_is_pushed_once_or_not_at_all(missed, count):
    nightly = NightlyApp(missed=missed)
    nightly.worker()
    nightly.clock.advance(seconds=5 * 86_400)
    nightly.worker()
    nightly.worker()
    nightly.app.schedules.clear()
    assert nightly.app.run_until_empty() == count
    nightly = NightlyApp(missed=missed)
    nightly.worker()
    # A schedule that is late by no more than this is not missed, but pushed.
    nightly.clock.advance(ms=ms(2030, 6, 2, 3) + LATE_MS_MAX - nightly.clock.now_ms())
    nightly.worker()
    assert nightly.waiting() == 1


def note_pushed_at(nightly, due_ms):
    """What a worker leaves that has pushed the schedule for this due time."""
    queue = schedule_queue(nightly.app.name, "nightly")
    nightly.app.service.execute(ConfigureQueue(queue, {"annotations": {NOTE: str(due_ms)}}))


def test_a_schedule_goes_on_after_a_clock_that_was_ahead_with_a_warning(nightly, caplog):
    nightly.worker()
    note_pushed_at(nightly, ms(2031, 6, 1, 3))
    worker = nightly.worker()
    assert "schedule nightly: was pushed for a time 31503600 s ahead" in caplog.text
    assert worker.next_due_ms() == ms(2030, 6, 2, 3)
    assert nightly.waiting() == 0
    nightly.clock.advance(ms=worker.next_due_ms() - nightly.clock.now_ms())
    nightly.app.run_steps(worker.push_due())
    assert nightly.waiting() == 1
    # The note is of now again: the next worker has nothing to warn of.
    caplog.clear()
    assert nightly.worker().next_due_ms() == ms(2030, 6, 3, 3)
    assert (caplog.text, nightly.waiting()) == ("", 1)


def test_a_running_worker_is_not_silenced_by_a_note_of_a_clock_that_was_ahead(nightly):
    worker = nightly.worker()
    note_pushed_at(nightly, ms(2031, 6, 1, 3))
    # It reads the note when it is late, as after a suspension.
    nightly.clock.advance(ms=ms(2030, 6, 2, 4) - nightly.clock.now_ms())
    nightly.app.run_steps(worker.push_due())
    assert worker.next_due_ms() == ms(2030, 6, 3, 3)


def test_a_worker_goes_on_when_its_clock_is_set_back_after_it_was_ahead(nightly, caplog):
    worker = nightly.worker()
    nightly.clock.advance(seconds=366 * 86_400)
    nightly.app.run_steps(worker.push_due())
    assert nightly.waiting() == 1
    # The machine's clock is set to the right time; that of the store never goes back.
    nightly.app.clock = ManualClock(NOON_MS)
    nightly.app.run_steps(worker.push_due())
    assert "schedule nightly: was pushed for a time" in caplog.text
    assert worker.next_due_ms() == ms(2030, 6, 2, 3)
    nightly.app.clock.advance(ms=worker.next_due_ms() - NOON_MS)
    nightly.app.run_steps(worker.push_due())
    assert nightly.waiting() == 2


def test_clocks_that_differ_by_some_seconds_push_a_schedule_once(nightly, caplog):
    worker = nightly.worker()
    nightly.clock.advance(ms=ms(2030, 6, 2, 3) - 5_000 - nightly.clock.now_ms())
    note_pushed_at(nightly, ms(2030, 6, 2, 3))
    late = nightly.worker()
    nightly.clock.advance(seconds=5)
    nightly.app.run_steps(late.push_due())
    assert late.next_due_ms() == ms(2030, 6, 3, 3)
    assert (caplog.text, nightly.waiting()) == ("", 0)
    assert worker.next_due_ms() == ms(2030, 6, 2, 3)


def test_a_new_schedule_begins_with_its_next_due_time(nightly):
    worker = nightly.worker()
    assert worker.next_due_ms() == ms(2030, 6, 2, 3)
    assert nightly.app.run_until_empty() == 0


def test_a_schedule_follows_the_clocks_of_its_time_zone():
    # Summer time begins on 31 March 2030 at 01:00 UTC in Berlin.
    nightly = NightlyApp(ms(2030, 3, 29, 12), "30 8 * * *", timezone="Europe/Berlin")
    schedule = nightly.app.schedules["nightly"]
    due_ms = [schedule.next_due_ms(ms(2030, 3, day, 12)) for day in (28, 29, 30, 31)]
    assert due_ms == [
        ms(2030, 3, 29, 7, 30),
        ms(2030, 3, 30, 7, 30),
        ms(2030, 3, 31, 6, 30),
        ms(2030, 4, 1, 6, 30),
    ]
    # 02:30 does not exist on that night, and is due when the clocks have moved.
    skipped = NightlyApp(ms(2030, 3, 30, 12), "30 2 * * *", timezone="Europe/Berlin")
    assert skipped.app.schedules["nightly"].next_due_ms(ms(2030, 3, 30, 12)) == ms(2030, 3, 31, 1)


def test_a_period_has_the_same_due_times_in_every_process():
    nightly = NightlyApp(ms(2030, 6, 1, 12, 0, 7), 30)
    schedule = nightly.app.schedules["nightly"]
    assert schedule.next_due_ms(ms(2030, 6, 1, 12, 0, 7)) == ms(2030, 6, 1, 12, 0, 30)
    assert schedule.last_due_ms(ms(2030, 6, 1, 12, 0, 30)) == ms(2030, 6, 1, 12, 0, 30)
    assert schedule.next_due_ms(ms(2030, 6, 1, 12, 0, 30)) == ms(2030, 6, 1, 12, 1)


def test_the_last_due_time_of_a_cron_expression_may_be_now(nightly):
    schedule = nightly.app.schedules["nightly"]
    assert schedule.last_due_ms(ms(2030, 6, 2, 3)) == ms(2030, 6, 2, 3)
    assert schedule.last_due_ms(ms(2030, 6, 2, 3) - 1) == ms(2030, 6, 1, 3)


@pytest.mark.parametrize(
    ("when", "options", "complaint"),
    [
        ("61 * * * *", {}, "'61 .*' is not a cron expression: bad minute"),
        ("* * *", {}, "is not a cron expression: wrong number of fields"),
        ("0 0 31 2 *", {}, "is not a cron expression"),
        ("", {}, "is not a cron expression"),
        ("* * * * *", {"timezone": "Mars/Base"}, "there is no time zone 'Mars/Base'"),
        ("* * * * *", {"timezone": "../etc/passwd"}, "there is no time zone"),
        ("* * * * *", {"missed": "all"}, "missed='all' is not one of once, skip"),
        (0.5, {}, "0.5 s is outside 1 s to 366 days"),
        (True, {}, "expected a cron expression or seconds, got True"),
    ],
)
def test_an_invalid_schedule_is_refused_in_one_sentence(app, when, options, complaint):
    @app.task
    def work() -> None: ...

    with pytest.raises(TaskError, match=complaint) as refused:
        app.schedule("s", when, work, **options)
    assert "\n" not in str(refused.value)
    assert app.schedules == {}


def test_the_arguments_of_a_schedule_are_checked_when_it_is_declared(app):
    @app.task
    def work(count: int) -> None: ...

    with pytest.raises(TaskError, match="work: argument count: expected int, got str"):
        app.schedule("s", 60, work.prepare("x"))
    with pytest.raises(TaskError, match="missing a required argument"):
        app.schedule("s", 60, work)
    app.schedule("s", 60, work.prepare(1))
    with pytest.raises(TaskError, match="there is a schedule 's' already"):
        app.schedule("s", 60, work.prepare(1))
