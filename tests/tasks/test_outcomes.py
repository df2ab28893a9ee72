"""Outcomes of tasks: retries, dead letters, results, middleware, the context, the trace."""

import asyncio
import logging
import random
from itertools import pairwise
from typing import Any

import pytest

from penstock import ManualClock
from penstock.errors import InvalidField, MessageTooLarge
from penstock.service import Batch, CreateQueue, Delete, Peek, Push, QueueSettings, Stats
from penstock.tasks import (
    Backoff,
    GiveUp,
    Middleware,
    ResultTimeout,
    RetryLater,
    TaskApp,
    TaskCancelled,
    TaskError,
    TaskFailed,
    current,
    group,
)
from penstock.tasks.app import RETRY_BYTES
from penstock.tasks.control import cancel, failed_tasks, find_task, retry_failed
from penstock.tasks.envelope import body_start, decode_envelope, encode


def test_a_failed_task_is_retried_after_delays_that_double(app, clock):
    starts_ms = []

    @app.task(retries=4, backoff=Backoff(first=2, longest=10, jitter=0))
    def work() -> None:
        starts_ms.append(clock.now_ms())
        raise ValueError("no")

    work.push()
    assert app.run_until_empty() == 5
    steps_s = [(b - a) / 1_000 for a, b in pairwise(starts_ms)]
    assert steps_s == [2, 4, 8, 10]


def test_jitter_shortens_a_delay_by_at_most_its_fraction():
    backoff = Backoff(first=8, longest=100, jitter=0.5)
    delays_ms = {backoff.delay_ms(1, random.Random(seed).random()) for seed in range(100)}
    assert len(delays_ms) > 50
    assert min(delays_ms) >= 4_000
    assert max(delays_ms) <= 8_000
    assert Backoff().delay_ms(10_000, 0) == 600_000


def test_after_its_last_attempt_a_task_is_kept_with_its_traceback(app):
    @app.task(retries=1, queue="mail", priority=3)
    def work(name: str) -> None:
        raise ValueError(f"no {name}\nsecond line")

    pushed = work.push("anna")
    app.run_until_empty()
    (found,) = app.run_steps(failed_tasks(["mail"]))
    assert found.id == pushed.id
    assert found.envelope.failures == 2
    assert found.envelope.failure.error == "ValueError: no anna second line"
    assert 'raise ValueError(f"no {name}' in found.envelope.failure.traceback
    assert found.envelope.failure.at_ms == app.now_ms()
    assert bytes(found.envelope.args) == b'{"name":"anna"}'
    assert found.message.priority == 3
    assert app.service.execute(Stats("mail")).messages == 0


def test_a_failed_task_that_is_retried_keeps_its_id_and_has_all_attempts_again(app):
    attempts = []
    is_broken = [True]

    @app.task(retries=1, result_ttl=600)
    def work(name: str) -> str:
        attempts.append((name, current().attempt))
        if is_broken[0]:
            raise ValueError
        return f"done {name}"

    pushed, other = work.push("a"), work.push("b")
    app.run_until_empty()
    assert app.run_steps(retry_failed(["tasks"], {pushed.id, "unknown"})) == [pushed.id]
    assert [task.id for task in app.run_steps(failed_tasks(["tasks"]))] == [other.id]
    is_broken[0] = False
    app.run_until_empty()
    assert pushed.get(0) == "done a"
    assert attempts[-1] == ("a", 1)
    assert app.run_steps(retry_failed(["tasks"])) == [other.id]
    app.run_until_empty()
    assert other.get(0) == "done b"
    assert app.run_steps(failed_tasks(["tasks"])) == []


def test_a_task_may_ask_for_a_retry_at_a_given_time_or_for_none(app, clock):
    starts_ms = []

    @app.task(retries=5)
    def later() -> None:
        starts_ms.append(clock.now_ms())
        if len(starts_ms) == 1:
            raise RetryLater(77)

    @app.task(retries=5)
    def never() -> None:
        raise GiveUp("wrong address")

    later.push()
    never.push()
    app.run_until_empty()
    assert starts_ms[1] - starts_ms[0] == 77_000
    (found,) = app.run_steps(failed_tasks(["tasks"]))
    assert (found.envelope.task, found.envelope.failures) == ("never", 1)


def test_a_task_whose_retry_would_be_after_its_ttl_fails_at_once(app):
    @app.task(retries=5, ttl=5, backoff=Backoff(first=60, jitter=0))
    def work() -> None:
        raise ValueError

    work.push()
    assert app.run_until_empty() == 1
    assert len(app.run_steps(failed_tasks(["tasks"]))) == 1


def test_a_result_is_kept_for_its_ttl_and_read_by_any_process():
    clock = ManualClock()
    app = TaskApp("memory:", clock=clock)

    @app.task(result_ttl=60)
    def add(a: int, b: int) -> dict[str, int]:
        return {"sum": a + b}

    pushed = add.push(1, 2)
    with pytest.raises(ResultTimeout, match="has no result after 0 s"):
        pushed.get(0)
    app.run_until_empty()
    assert pushed.get(0) == pushed.get(0) == {"sum": 3}
    clock.advance(seconds=61)
    with pytest.raises(ResultTimeout):
        pushed.get(0)


def test_a_result_can_be_awaited_and_comes_as_the_type_that_the_task_returns(app):
    @app.task(result_ttl=60)
    async def add(a: int) -> set[int]:
        await asyncio.sleep(0)
        return {a, a + 1}

    pushed = add.push(1)
    app.run_until_empty()

    async def ask():
        return await pushed, await pushed.wait(timeout=1)

    assert asyncio.run(ask()) == ({1, 2}, {1, 2})


def test_the_result_of_a_failed_task_raises_with_the_traceback(app):
    @app.task(result_ttl=60, retries=0)
    def work() -> None:
        raise ZeroDivisionError("division")

    pushed = work.push()
    app.run_until_empty()
    with pytest.raises(TaskFailed, match="task 'work' failed: ZeroDivisionError: division") as got:
        pushed.get(0)
    assert "raise ZeroDivisionError" in got.value.traceback


def test_the_result_of_a_task_without_result_ttl_is_refused(app):
    @app.task
    def work() -> int:
        return 1

    pushed = work.push()
    app.run_until_empty()
    with pytest.raises(TaskError, match="work: keeps no results; declare it with result_ttl"):
        pushed.get(0)


def test_a_result_that_cannot_become_json_fails_the_task(app):
    @app.task(result_ttl=60, retries=3)
    def work() -> object:
        return object()

    pushed = work.push()
    assert app.run_until_empty() == 1
    with pytest.raises(TaskFailed, match="the result cannot become JSON"):
        pushed.get(0)


def test_a_result_too_large_for_a_message_fails_the_task_with_the_reason(app):
    @app.task(result_ttl=60)
    def work() -> str:
        return "x" * 2_000_000

    pushed = work.push()
    assert app.run_until_empty() == 1
    with pytest.raises(TaskFailed, match="its outcome cannot be pushed to"):
        pushed.get(0)
    assert len(app.run_steps(failed_tasks(["tasks"]))) == 1


def test_a_task_whose_exception_cannot_be_shown_fails_like_any_other(app):
    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError

    @app.task(retries=0)
    def work() -> None:
        raise Unprintable

    work.push()
    app.run_until_empty()
    (found,) = app.run_steps(failed_tasks(["tasks"]))
    assert found.envelope.failure.error == "Unprintable: its text cannot be shown"


def test_each_of_many_tasks_has_its_own_result(app):
    @app.task(result_ttl=60)
    def same(a: int) -> int:
        return a

    pushed = same.push_many([(number,) for number in range(500)])
    app.run_until_empty()
    assert [each.get(0) for each in pushed] == list(range(500))


def test_middleware_is_called_for_every_attempt_in_order(app):
    seen: list[Any] = []

    class OutcomeWatch(Middleware):
        def __init__(self, name):
            self.name = name

        def before(self, context):
            seen.append((self.name, "before", context.task, context.attempt))

        def after(self, context, result):
            seen.append((self.name, "after", result))

        def failed(self, context, error, is_final):
            seen.append((self.name, "failed", type(error).__name__, is_final))

    app.middleware += [OutcomeWatch("a"), OutcomeWatch("b")]

    @app.task(retries=1)
    def work() -> int:
        if current().attempt == 1:
            raise KeyError("x")
        return 5

    work.push()
    app.run_until_empty()
    assert seen == [
        ("a", "before", "work", 1),
        ("b", "before", "work", 1),
        ("b", "failed", "KeyError", False),
        ("a", "failed", "KeyError", False),
        ("a", "before", "work", 2),
        ("b", "before", "work", 2),
        ("b", "after", 5),
        ("a", "after", 5),
    ]


def test_middleware_that_raises_before_fails_the_attempt_and_after_changes_nothing(app, caplog):
    class Strict(Middleware):
        def before(self, context):
            if context.attempt == 1:
                raise PermissionError("not yet")

        def after(self, context, result):
            raise RuntimeError("too late")

    app.middleware.append(Strict())
    ran = []

    @app.task(retries=1)
    def work() -> None:
        ran.append(current().attempt)

    work.push()
    with caplog.at_level(logging.ERROR, "penstock.tasks"):
        app.run_until_empty()
    assert ran == [2]
    assert "Strict.after raised" in caplog.text
    assert app.run_steps(failed_tasks(["tasks"])) == []


def test_an_object_that_is_not_a_middleware_is_refused():
    with pytest.raises(TaskError, match="middleware: 5 is not an instance of Middleware"):
        TaskApp("memory:", middleware=[5])  # type: ignore[list-item]


def test_the_context_has_the_attempt_and_its_deadline(app, clock, caplog):
    seen = []

    @app.task(timeout=10, retries=1, queue="mail")
    def work() -> None:
        context = current()
        assert context.deadline is not None
        left_s = context.deadline.timestamp() - clock.now_ms() / 1_000
        seen.append((context.task, context.queue, context.attempt, round(left_s)))
        clock.advance(seconds=8)
        context.extend(20)
        clock.advance(seconds=8 if context.attempt == 2 else 21)
        context.logger.warning("halfway")

    pushed = work.push()
    with caplog.at_level(logging.WARNING, "penstock.tasks.work"):
        app.run_until_empty()
    assert seen == [("work", "mail", 1, 10), ("work", "mail", 2, 10)]
    entry = caplog.records[-1]
    assert (entry.task_id, entry.attempt) == (pushed.id, 2)
    # The first attempt ran beyond the extended deadline.
    assert app.run_steps(failed_tasks(["mail"])) == []


def test_outside_a_task_there_is_no_context():
    with pytest.raises(TaskError, match="current: no task runs here"):
        current()


def test_a_cancelled_task_is_dropped_and_its_result_raises_task_cancelled(app):
    ran = []

    @app.task(result_ttl=60)
    def work(name: str) -> None:
        ran.append(name)

    kept, dropped = work.push("kept"), work.push_in(5, "dropped")
    app.run_steps(cancel(app, dropped.id))
    app.run_until_empty()
    assert ran == ["kept"]
    assert kept.get(0) is None
    with pytest.raises(TaskCancelled, match="task 'work' cancelled"):
        dropped.get(0)


def test_a_task_is_found_in_every_state(app):
    @app.task(result_ttl=7_200, retries=0)
    def work(good: bool) -> int:
        if not good:
            raise ValueError("bad")
        return 7

    def state_of(task_id):
        found = app.run_steps(find_task(app, app.queues, task_id))
        return None if found is None else found.state

    delayed = work.push_in(3600, True)
    waiting = work.push(True)
    assert (state_of(delayed.id), state_of(waiting.id)) == ("delayed", "waiting")
    bad = work.push(False)
    app.run_until_empty()
    found = app.run_steps(find_task(app, app.queues, waiting.id))
    assert (found.state, bytes(found.result.value)) == ("done", b"7")
    assert state_of(bad.id) == "failed"
    assert state_of("unknown") is None


def test_the_trace_of_the_pusher_is_the_parent_of_the_task(app):
    from opentelemetry import trace
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

    seen = []

    @app.task(retries=1)
    def work() -> None:
        seen.append(trace.get_current_span().get_span_context().trace_id)
        if len(seen) == 1:
            raise ValueError

    span = NonRecordingSpan(SpanContext(0xABC, 0xDEF, False, TraceFlags(1)))
    with use_span(span):
        work.push()
    work.push()
    (traced, plain) = app.service.execute(Peek("tasks", 2))
    assert traced.attributes["traceparent"].startswith(f"00-{0xABC:032x}-{0xDEF:016x}")
    assert plain.attributes == {}
    app.run_until_empty()
    # The second attempt belongs to the same trace.
    assert sorted(seen) == [0, 0xABC, 0xABC]


@pytest.mark.parametrize(
    "more",
    [
        '"group": {"id": "../x", "index": 0, "size": 1}',
        '"group": {"id": "x", "index": 7, "size": 1}',
        '"group": {"id": "x", "index": 0, "size": 1000000000}',
        '"then": [{"task": "unknown", "args": {}, "queue": "a b", "first": "x"}]',
        '"then": [{"task": "unknown", "args": {}, "queue": "tasks", "first": "x", "priority": 99}]',
        '"failures": 99999999999999999',
        '"id": "' + "x" * 10_000 + '"',
    ],
)
def test_an_envelope_with_invalid_follow_ups_affects_no_other_task(app, more):
    """Row 25: whatever a message contains, it is removed, and the other tasks run."""
    ran = []

    @app.task
    def work(name: str) -> None:
        ran.append(name)

    body = f'{{"task": "work", "args": {{"name": "odd"}}, {more}}}'
    work.push("before")
    app.service.execute(Push("tasks", body.encode()))
    work.push("after")
    app.run_until_empty()
    assert ran == ["before", "odd", "after"]
    assert app.service.execute(Stats("tasks")).messages == 0


def test_a_plain_envelope_has_the_same_bytes_by_both_encoders():
    plain = body_start("add") + b'{"a":1}' + b"}"
    assert plain == b'{"task":"add","args":{"a":1}}'
    assert encode(decode_envelope(plain)) == plain


HOSTILE = [
    b"",
    b"cos\nsystem\n(S'touch x'\ntR.",
    b"\x80\x04\x95",
    b"[1, 2",
    b'{"task": "os.system", "args": {"command": "touch x"}}',
    b'{"task": "os.system", "args": {"name": "these are the arguments of a registered task"}}',
    b'{"task": "", "args": {"name": "x"}}',
    b'{"task": "builtins.eval", "args": {"source": "1"}}',
    b'{"task": "__import__", "args": {}}',
    b'{"task": "work", "args": {"__class__": "x"}}',
    b'{"task": "work", "args": {"name": {"py/object": "os.system"}}}',
    b'{"task": "work", "args": ["x"]}',
    b'{"task": ["work"], "args": {}}',
    b'{"task": "work"}',
    b'{"task": "work", "args": ' + b"[" * 100_000,
    b'{"task": "work", "args": {"name": "\xff"}}',
    b'{"task": "work", "args": {"name": 1e999}}',
    b'{"task": "work", "args": {"name": "x"}, "expires_at_ms": "soon"}',
    b'{"task": "work", "args": {}, "then": [{"task": "os.system"}]}',
]


@pytest.mark.parametrize("body", HOSTILE, ids=range(len(HOSTILE)))
def test_a_message_that_names_code_runs_nothing_and_affects_no_other(
    app, body, tmp_path, monkeypatch
):
    """Row 25: a message names a registered task or fails; it is never imported or evaluated."""
    monkeypatch.chdir(tmp_path)
    ran = []

    @app.task
    def work(name: str) -> None:
        ran.append(name)

    work.push("good")
    app.service.execute(Push("tasks", body))
    app.run_until_empty()
    assert ran == ["good"]
    # Some of them would make a file.
    assert list(tmp_path.iterdir()) == []
    (failed,) = app.run_steps(failed_tasks(["tasks"]))
    assert failed.envelope.failure.error
    assert app.service.execute(Stats("tasks")).messages == 0


def test_a_task_that_returns_a_coroutine_has_failed_because_its_work_is_not_done(app):
    async def work(number):
        raise AssertionError("nothing awaits this")

    @app.task(retries=3)
    def plain(number: int):
        return work(number)

    @app.task(retries=3)
    async def forgotten(number: int):
        return work(number)

    pushed = [plain.push(1), forgotten.push(2)]
    assert app.run_until_empty() == 2
    found = app.run_steps(failed_tasks(["tasks"]))
    assert [task.id for task in found] == [each.id for each in pushed]
    for task in found:
        assert "returned a coroutine, which nothing awaits" in task.envelope.failure.error


def test_a_task_that_returns_a_generator_has_failed_because_its_work_is_not_done(app):
    def work(number):
        yield number

    @app.task
    def lazy(number: int):
        return work(number)

    lazy.push(1)
    assert app.run_until_empty() == 1
    (task,) = app.run_steps(failed_tasks(["tasks"]))
    assert "returned a generator, which nothing iterates over" in task.envelope.failure.error


def test_what_no_call_would_run_is_refused_where_it_is_declared(app):
    with pytest.raises(InvalidField, match=r"middleware Late\.after: it is async"):

        class Late(Middleware):
            async def after(self, context, result):  # type: ignore[override]
                raise AssertionError

    with pytest.raises(InvalidField, match=r"middleware Lazy\.before: it has a yield"):

        class Lazy(Middleware):
            def before(self, context):
                yield

    def generate():
        yield

    async def generate_awaited():
        yield

    for function in (generate, generate_awaited):
        with pytest.raises(
            TaskError, match=f"task '{function.__name__}': function: it has a yield"
        ):
            app.task(function)
    assert not app.tasks


@pytest.mark.parametrize("limit", [4_096, QueueSettings().body_bytes_max])
def test_a_task_so_large_that_its_retry_could_not_be_pushed_is_refused(app, limit):
    app.service.execute(CreateQueue("tasks", {"body_bytes_max": limit}))

    @app.task(retries=1, backoff=1)
    def send(text: str) -> None:
        raise ValueError("é" * 2_000)

    args = limit - RETRY_BYTES - len(b'{"task":"send","args":{"text":""}}')
    send.push("x" * args)
    for push in (
        lambda: send.push("x" * (args + 1)),
        lambda: send.push_many([("x" * (args + 1),)]),
        lambda: group(send.prepare("x" * (args + 1))).push(),
    ):
        with pytest.raises(MessageTooLarge, match="kept for what a retry adds"):
            push()
    # The largest that is accepted is tried as often as any other.
    assert app.run_until_empty() == 2
    (failed,) = app.run_steps(failed_tasks(["tasks"]))
    assert failed.envelope.failures == 2
    assert "é" * 80 in failed.envelope.failure.error


def fail_many(app, number):
    @app.task(retries=0)
    def fail(n: int) -> None:
        raise ValueError

    fail.push_many([(n,) for n in range(number)])
    app.run_until_empty()


def retry_slowly(app, clock, pause_of):
    """Retries all, with pauses before the commands; returns the ids."""
    steps = retry_failed(["tasks"])
    reply = None
    try:
        while True:
            command = steps.send(reply)
            clock.advance(seconds=pause_of(command))
            reply = app.service.execute(command)
    except StopIteration as ended:
        return sorted(ended.value)


def test_all_of_many_failed_tasks_are_retried_once_however_slow_the_store_is(app, clock):
    fail_many(app, 250)
    assert len(set(retry_slowly(app, clock, lambda command: 20))) == 250
    assert app.service.execute(Stats("tasks")).messages == 250
    assert app.service.execute(Stats("tasks.failed")).messages == 0


def test_a_retried_task_whose_claim_ran_out_before_its_delete_is_in_one_queue(app, clock):
    """Row 26: its push was done, and its delete is refused."""
    fail_many(app, 3)
    pauses = iter([400])

    def pause_of(command):
        first = command.items[0] if type(command) is Batch else command
        return next(pauses, 0) if type(first) is Delete else 0

    assert len(set(retry_slowly(app, clock, pause_of))) == 3
    assert app.service.execute(Stats("tasks")).messages == 3
    assert app.service.execute(Stats("tasks.failed")).messages == 0
