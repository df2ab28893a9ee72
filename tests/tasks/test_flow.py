"""Chains and groups: how results are passed, what a failed member does, and what is refused."""

import pytest

from penstock.service import ListQueues, Peek, Push
from penstock.tasks import TaskApp, TaskError, TaskFailed, chain, current, group
from penstock.tasks.control import failed_tasks, retry_failed
from penstock.tasks.envelope import decode_envelope
from tests.server.conftest import serve

__all__ = ["serve"]


@pytest.fixture
def add(app):
    @app.task(result_ttl=600)
    def add(a: int, b: int) -> int:
        return a + b

    return add


@pytest.fixture
def total(app):
    @app.task(result_ttl=600, queue="totals")
    def total(values: list[int], start: int = 0) -> int:
        return start + sum(values)

    return total


def group_queues(app):
    return app.service.execute(ListQueues(f"{app.name}.group."))


def test_each_task_of_a_chain_gets_the_result_of_the_task_before(app, add):
    pushed = chain(add.prepare(1, 2), add.prepare(10), add.prepare(b=100)).push()
    assert app.run_until_empty() == 3
    assert pushed.get(0) == 113


def test_a_chain_may_be_delayed_and_may_have_one_task(app, add, clock):
    before_ms = clock.now_ms()
    pushed = chain(add.prepare(1, 2)).push_in(60)
    app.run_until_empty()
    assert pushed.get(0) == 3
    assert clock.now_ms() - before_ms == 60_000


def test_the_rest_of_a_chain_is_checked_before_its_first_task_is_pushed(app, add):
    with pytest.raises(TaskError, match="add: argument b: expected int, got str"):
        chain(add.prepare(1, 2), add.prepare("x")).push()
    with pytest.raises(TaskError, match="add: missing a required argument: 'b'"):
        chain(add.prepare(1, 2), add.prepare()).push()
    assert app.run_until_empty() == 0


def test_a_failed_task_ends_its_chain_and_a_retry_continues_it(app, add):
    is_broken = [True]

    @app.task(retries=0)
    def middle(a: int) -> int:
        if is_broken[0]:
            raise ValueError("broken")
        return a * 2

    pushed = chain(add.prepare(1, 2), middle.prepare(), add.prepare(1)).push()
    app.run_until_empty()
    with pytest.raises(TaskFailed, match="broken"):
        pushed.get(0)
    is_broken[0] = False
    app.run_steps(retry_failed(["tasks"]))
    app.run_until_empty()
    assert pushed.get(0) == 7


def test_the_final_task_of_a_group_gets_the_results_in_order(app, add, total):
    pushed = group(*(add.prepare(n, n) for n in range(20)), final=total.prepare(start=1_000)).push()
    assert app.run_until_empty() == 21
    assert pushed.get(0) == 1_000 + 2 * sum(range(20))
    assert group_queues(app) == []


def test_a_chain_may_be_a_member_of_a_group(app, add, total):
    members = [chain(add.prepare(1, 1), add.prepare(1)), add.prepare(5, 5)]
    pushed = group(*members, final=total.prepare()).push()
    app.run_until_empty()
    assert pushed.get(0) == 13


def test_a_group_without_a_final_task_runs_and_leaves_no_queue(app, add):
    group(add.prepare(1, 2), add.prepare(3, 4)).push()
    assert app.run_until_empty() == 2
    assert group_queues(app) == []


def test_the_final_task_waits_until_a_failed_member_was_retried(app, total):
    is_broken = [True]

    @app.task(retries=0)
    def member(number: int) -> int:
        if number == 1 and is_broken[0]:
            raise ValueError("broken")
        return number

    pushed = group(*(member.prepare(n) for n in range(3)), final=total.prepare()).push()
    app.run_until_empty()
    with pytest.raises(TaskFailed, match="broken"):
        pushed.get(0)
    is_broken[0] = False
    app.run_steps(retry_failed(["tasks"]))
    app.run_until_empty()
    assert pushed.get(0) == 3


def test_a_member_that_runs_twice_counts_once(app, total, clock):
    runs = []

    @app.task
    def member(number: int) -> int:
        runs.append(number)
        return number

    pushed = group(member.prepare(1), member.prepare(2), final=total.prepare()).push()
    first, _ = app.service.execute(Peek("tasks", 2))
    # As after a worker that was killed before it deleted its message: the task runs again.
    app.service.execute(Push("tasks", first.body))
    app.run_until_empty()
    assert runs == [1, 2, 1]
    assert pushed.get(0) == 3


def test_results_too_large_for_a_message_fail_the_final_task_with_the_reason(app, total):
    @app.task
    def large(number: int) -> str:
        return "x" * 400_000

    @app.task(result_ttl=60)
    def join(parts: list[str]) -> int:
        return len(parts)

    pushed = group(*(large.prepare(n) for n in range(4)), final=join.prepare()).push()
    app.run_until_empty()
    (failed,) = app.run_steps(failed_tasks(["tasks"]))
    assert failed.envelope.task == "join"
    assert "the results of its group cannot be pushed" in failed.envelope.failure.error
    with pytest.raises(TaskFailed, match="the results of its group cannot be pushed"):
        pushed.get(0)


def test_results_too_large_for_an_answer_of_a_server_fail_the_final_task(serve, caplog):
    server = serve()
    app = TaskApp(f"penstock://127.0.0.1:{server.port}")

    @app.task
    def large(number: int) -> str:
        return "x" * 900_000

    @app.task(result_ttl=60)
    def join(parts: list[str]) -> int:
        return len(parts)

    pushed = group(*(large.prepare(n) for n in range(10)), final=join.prepare()).push()
    app.run_until_empty()
    with pytest.raises(TaskFailed, match="the results of its group cannot be pushed"):
        pushed.get(0)
    assert "the final task of the group" in caplog.text
    app.close()


def test_wrong_members_of_a_chain_or_group_are_refused(app, add, total):
    other = TaskApp("memory:")

    @other.task
    def elsewhere(a: int) -> int:
        return a

    @app.task
    def nothing() -> None: ...

    for make, complaint in (
        (lambda: chain(), "chain: expected 1 to 1000 tasks, got 0"),
        (lambda: chain(add.push(1, 2)), "chain: expected task.prepare"),
        (lambda: chain(add.prepare(1, 2), elsewhere.prepare()), "belong to several apps"),
        (
            lambda: chain(add.prepare(1, 2), nothing.prepare()).push(),
            "has no first parameter with a name",
        ),
        (lambda: group(), "group: expected 1 to 1000 tasks, got 0"),
        (lambda: group(*[add.prepare(1, 2)] * 1_001), "group: expected 1 to 1000 tasks, got 1001"),
        (lambda: group(add.prepare(1, 2), final=total), "group: final: expected task.prepare"),
    ):
        with pytest.raises(TaskError, match=complaint):
            make()


def test_a_chain_is_one_message_that_contains_the_next_tasks(app, add):
    chain(add.prepare(1, 2), add.prepare(3)).push()
    (message,) = app.service.execute(Peek("tasks", 5))
    envelope = decode_envelope(message.body)
    assert [(step.task, step.first, bytes(step.args)) for step in envelope.then] == [
        ("add", "a", b'{"b":3}')
    ]
    assert app.run_until_empty() == 2
    with pytest.raises(TaskError):
        current()
