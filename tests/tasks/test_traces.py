"""The trace of the program that pushes: which later tasks belong to it."""

from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from penstock.tasks import GiveUp, chain, group
from penstock.tasks.control import retry_failed

TRACE_ID = 0xABC


def traced():
    return use_span(NonRecordingSpan(SpanContext(TRACE_ID, 0xDEF, False, TraceFlags(1))))


def trace_id():
    return trace.get_current_span().get_span_context().trace_id


def test_a_failed_task_that_is_retried_by_hand_keeps_its_trace(app):
    seen = []

    @app.task
    def work() -> None:
        seen.append(trace_id())
        if len(seen) == 1:
            raise GiveUp("not yet")

    with traced():
        pushed = work.push()
    app.run_until_empty()
    assert app.run_steps(retry_failed(["tasks"])) == [pushed.id]
    app.run_until_empty()
    assert seen == [TRACE_ID, TRACE_ID]


def test_the_tasks_of_a_chain_and_the_final_task_of_a_group_keep_the_trace(app):
    seen = []

    @app.task
    def load(number: int) -> int:
        seen.append(("load", trace_id()))
        return number

    @app.task
    def double(number: int) -> int:
        seen.append(("double", trace_id()))
        return 2 * number

    @app.task
    def total(numbers: list[int]) -> None:
        seen.append(("total", trace_id()))

    members = (chain(load.prepare(1), double.prepare()), load.prepare(2))
    with traced():
        group(*members, final=total.prepare()).push()
    app.run_until_empty()
    names = ("double", "load", "load", "total")
    assert sorted(seen) == [(name, TRACE_ID) for name in names]
    seen.clear()
    group(*members, final=total.prepare()).push()
    app.run_until_empty()
    assert sorted(seen) == [(name, 0) for name in names]
