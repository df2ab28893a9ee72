"""Declaring and pushing tasks: options, arguments, times, and what is refused before the push."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any

import pytest

from penstock import ManualClock
from penstock.errors import InvalidField
from penstock.service import Stats
from penstock.tasks import Backoff, TaskApp, TaskError
from penstock.tasks.arguments import Arguments
from penstock.tasks.options import TaskOptions, read_rate


class Colour(Enum):
    RED = "red"


@dataclass
class Order:
    number: int
    colour: Colour


def waiting(app, queue="tasks"):
    return app.service.execute(Stats(queue)).messages


def test_a_pushed_task_runs_with_its_arguments(app):
    ran = []

    @app.task
    def add(a: int, b: int = 2, *rest: int, c: int = 3, **others: int) -> None:
        ran.append((a, b, rest, c, others))

    add.push(1)
    add.push(1, 5)
    add.push(1, c=9)
    add.push(1, 2, 3, 4, c=5, d=6)
    assert app.run_until_empty() == 4
    assert ran == [
        (1, 2, (), 3, {}),
        (1, 5, (), 3, {}),
        (1, 2, (), 9, {}),
        (1, 2, (3, 4), 5, {"d": 6}),
    ]


def test_calling_a_task_runs_it_in_this_process_and_pushes_nothing(app):
    @app.task
    def add(a: int, b: int) -> int:
        return a + b

    assert add(1, 2) == 3
    assert app.run_until_empty() == 0


def test_arguments_have_the_types_of_the_function_signature_when_the_task_runs(app):
    seen = []

    @app.task
    def ship(order: Order, when: datetime, tags: set[str]) -> None:
        seen.append((order, when, tags))

    when = datetime(2030, 1, 2, tzinfo=UTC)
    ship.push(Order(7, Colour.RED), when, {"a"})
    app.run_until_empty()
    assert seen == [(Order(7, Colour.RED), when, {"a"})]


@pytest.mark.parametrize(
    ("args", "kwargs", "complaint"),
    [
        (("x", 1), {}, "add: argument a: expected int, got str"),
        ((1, [1, "y"]), {}, r"add: argument b\[1\]: expected int, got str"),
        ((1,), {}, "add: missing a required argument: 'b'"),
        ((1, [], 3), {}, "add: too many positional arguments"),
        ((1, []), {"c": 1}, "add: got an unexpected keyword argument 'c'"),
        ((1, object()), {}, "add: an argument cannot become JSON"),
    ],
)
def test_wrong_arguments_are_refused_by_name_and_nothing_is_pushed(app, args, kwargs, complaint):
    @app.task
    def add(a: int, b: list[int]) -> None: ...

    add.push(1, [])
    with pytest.raises(TaskError, match=complaint):
        add.push(*args, **kwargs)
    with pytest.raises(TaskError, match=complaint):
        add.prepare(*args, **kwargs).push()
    assert waiting(app) == 1


@pytest.mark.parametrize("kind", [int, str, bool, float, int | None, list[int]])
def test_arguments_in_order_are_checked_as_those_by_name_are(kind):
    def function(first, second): ...

    function.__annotations__.update(first=kind, second=int)
    arguments = Arguments("task", function)

    def outcome(args, kwargs):
        try:
            return arguments.encode(args, kwargs)
        except TaskError as error:
            return str(error)

    values = [0, -1, 2**63, 2**64 - 1, 2**64, -(2**64), True, "", "é", "\ud800", 1.5, float("nan")]
    for value in [*values, None, b"x", [1], ["x"], object(), Colour.RED]:
        for pair in ((value, 1), (1, value)):
            by_name = dict(zip(("first", "second"), pair, strict=True))
            assert outcome(pair, {}) == outcome((), by_name), pair


def test_if_one_of_many_calls_is_wrong_all_are_refused_and_the_error_names_it(app):
    @app.task
    def add(a: int, b: int = 0) -> None: ...

    add.push(0)
    with pytest.raises(TaskError, match=r"calls\[1\]: add: argument a: expected int, got str"):
        add.push_many([(1, 2), ("x",)])
    with pytest.raises(TaskError, match=r"calls\[0\]: expected a tuple, list or dict"):
        add.push_many([5])
    assert waiting(app) == 1


def test_many_calls_are_pushed_by_order_or_by_name(app):
    ran = []

    @app.task
    def add(a: int, b: int = 0) -> None:
        ran.append((a, b))

    pushed = add.push_many([(1, 2), [3], {"b": 5, "a": 4}])
    assert len({each.id for each in pushed}) == 3
    app.run_until_empty()
    assert ran == [(1, 2), (3, 0), (4, 5)]


def test_more_calls_than_one_command_takes_are_pushed_in_several(app):
    @app.task
    def add(a: int) -> None: ...

    assert len(add.push_many([(number,) for number in range(10_001)])) == 10_001
    assert waiting(app) == 10_001


def test_a_delayed_task_is_not_run_before_its_time():
    clock = ManualClock()
    app = TaskApp("memory:", clock=clock)
    ran = []

    @app.task
    def work(name: str) -> None:
        ran.append(name)

    work.push_in(30, "in 30 s")
    now = datetime.fromtimestamp(clock.now_ms() / 1_000, UTC)
    work.push_at(now + timedelta(seconds=60), "in 60 s")
    work.push_at(now - timedelta(days=1), "yesterday")
    work.push_many([("in 90 s",)], delay=90)
    app.run_until_empty()
    assert ran == ["yesterday"]
    for step_s, count in ((29, 1), (1, 2), (29, 2), (1, 3), (30, 4)):
        clock.advance(seconds=step_s)
        app.run_until_empty()
        assert len(ran) == count
    assert ran == ["yesterday", "in 30 s", "in 60 s", "in 90 s"]


def test_a_time_without_a_zone_or_too_far_away_is_refused(app):
    @app.task
    def work() -> None: ...

    with pytest.raises(TaskError, match="push_at: expected a datetime with a time zone"):
        work.push_at(datetime(2030, 1, 1))
    with pytest.raises(TaskError, match="more than 366 days"):
        work.push_at(datetime(9000, 1, 1, tzinfo=UTC))
    with pytest.raises(InvalidField, match="delay"):
        work.push_in(-1)


def test_higher_priorities_run_first(app):
    ran = []

    @app.task(priority=2)
    def work(name: str) -> None:
        ran.append(name)

    work.push("two")
    work.with_options(priority=9).push("nine")
    work.with_options(priority=0).push("zero")
    app.run_until_empty()
    assert ran == ["nine", "two", "zero"]


def test_a_task_that_was_not_started_within_its_ttl_is_dropped():
    clock = ManualClock()
    app = TaskApp("memory:", clock=clock)
    ran = []

    @app.task(ttl=60)
    def work(name: str) -> None:
        ran.append(name)

    work.push("late")
    # The ttl counts from when a task is due.
    work.push_in(100, "delayed")
    clock.advance(seconds=61)
    app.run_until_empty()
    assert ran == []
    clock.advance(seconds=60)
    app.run_until_empty()
    assert ran == ["delayed"]


def test_a_call_of_a_unique_task_with_equal_arguments_is_a_duplicate(app, clock):
    ran: list[Any] = []

    @app.task(unique=True)
    def whole(a: int, b: int) -> None:
        ran.append((a, b))

    @app.task(unique=["user"])
    def part(user: str, text: str) -> None:
        ran.append((user, text))

    first = whole.push(1, 2)
    again = whole.push(b=2, a=1)
    assert (again.id, again.duplicate, first.duplicate) == (first.id, True, False)
    assert not whole.push(2, 1).duplicate
    part.push("anna", "one")
    assert part.push("anna", "two").duplicate
    assert [each.duplicate for each in part.push_many([("ben", "x"), ("ben", "y")])] == [
        False,
        True,
    ]
    app.run_until_empty()
    assert ran == [(1, 2), (2, 1), ("anna", "one"), ("ben", "x")]
    clock.advance(seconds=301)
    assert not whole.push(1, 2).duplicate


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"queue": "a b"}, "queue"),
        ({"queue": "a@b"}, "queue"),
        ({"priority": 10}, "priority: 10 is outside 0 to 9"),
        ({"retries": -1}, "retries: -1"),
        ({"backoff": "x"}, "backoff: expected seconds"),
        ({"backoff": Backoff(jitter=2)}, "jitter 2 is outside 0 to 1"),
        ({"timeout": 0}, "timeout: 0 s is outside"),
        ({"ttl": 10**9}, "task 'work': ttl: 1000000000 s is outside"),
        ({"unique": "user"}, "unique: expected true, false or the names"),
        ({"unique": ["unknown"]}, "unique: 'work' has no argument 'unknown'"),
        ({"rate": "fast"}, "rate: 'fast' is not a rate"),
        ({"rate": "0/s"}, "rate: '0/s' is outside"),
        ({"concurrency": 0}, "concurrency: 0"),
        ({"retry": 1}, "there is no option 'retry'; there are queue, priority"),
        ({"name": "ü"}, "'ü' is not a valid name"),
    ],
)
def test_a_wrong_option_is_refused_where_the_task_is_declared(app, options, complaint):
    def work(user: str) -> None: ...

    with pytest.raises(TaskError, match=complaint):
        app.task(**options)(work)
    assert app.tasks == {}


def test_every_documented_option_is_accepted(app):
    @app.task(
        queue="mail",
        priority=9,
        retries=5,
        backoff=Backoff(first=2, longest=60, jitter=0),
        timeout=10,
        ttl=3600,
        unique=True,
        rate="10/30s",
        concurrency=2,
        result_ttl=60,
    )
    def work() -> None: ...

    assert work.options == TaskOptions(
        queue="mail",
        priority=9,
        retries=5,
        backoff=Backoff(2, 60, 0),
        timeout_ms=10_000,
        ttl_ms=3_600_000,
        unique=True,
        rate=read_rate("10/30s"),
        concurrency=2,
        result_ttl_ms=60_000,
    )


def test_options_of_an_app_are_the_defaults_of_its_tasks():
    app = TaskApp("memory:", name="shop", retries=7)

    @app.task
    def work() -> None: ...

    @app.task(retries=1, name="other", queue="mail")
    def work_too() -> None: ...

    assert (work.options.queue, work.options.retries) == ("shop", 7)
    assert (work_too.name, work_too.options.queue, work_too.options.retries) == ("other", "mail", 1)
    assert app.queues == ["shop", "mail"]


def test_two_tasks_cannot_have_one_name(app):
    def work() -> None: ...

    app.task(work)
    with pytest.raises(TaskError, match="there is a task 'work' already"):
        app.task(work)


def test_a_parameter_that_json_cannot_hold_is_refused(app):
    class Thing:
        pass

    def work(thing: Thing | int | str) -> None: ...

    with pytest.raises(TaskError, match="task 'work': its parameters cannot be checked"):
        app.task(work)


def test_options_that_only_the_worker_uses_cannot_be_changed_by_a_push(app):
    @app.task
    def work() -> None: ...

    with pytest.raises(TaskError, match="with_options: 'prio' is no option; a push can change"):
        work.with_options(prio=9)
    with pytest.raises(TaskError, match="with_options: 'result_ttl' is decided where"):
        work.with_options(result_ttl=9)
    with pytest.raises(TaskError, match="with_options: 'retries' is decided where"):
        work.with_options(retries=9)


@pytest.mark.parametrize("url", ["nowhere", "gopher://x", 5])
def test_a_wrong_url_is_refused_before_anything_is_connected(url):
    with pytest.raises(InvalidField, match="url"):
        TaskApp(url)


def test_without_a_url_the_store_is_the_one_of_the_environment_or_redis(monkeypatch):
    app = TaskApp()
    monkeypatch.setenv("PENSTOCK_URL", "memory:")
    assert app.url == "memory:"
    monkeypatch.delenv("PENSTOCK_URL")
    assert app.url == "redis://127.0.0.1:6379/0"
