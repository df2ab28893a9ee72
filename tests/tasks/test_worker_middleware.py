"""Middleware and the trace in a real worker: in threads, the event loop and killable children."""

from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from tests.tasks.conftest import TIMEOUT_S, until

TASKS = """
    from opentelemetry import trace


    def trace_id():
        return f"{trace.get_current_span().get_span_context().trace_id:x}"


    class Watch(Middleware):
        def before(self, context):
            note(f"before {context.task} {context.attempt} {trace_id()}")
            (SEEN / f"pid {context.task}").write_text(str(os.getpid()))

        def after(self, context, result):
            note(f"after {context.task} {result}")

        def failed(self, context, error, is_final):
            note(f"failed {context.task} {context.attempt} {type(error).__name__} {is_final}")


    app.middleware.append(Watch())


    @app.task(result_ttl=600)
    def threaded(number: int) -> str:
        return trace_id()


    @app.task(result_ttl=600)
    async def awaited(number: int) -> str:
        await asyncio.sleep(0)
        return trace_id()


    @app.task(timeout=60, result_ttl=600)
    def apart(number: int) -> str:
        return trace_id()


    @app.task(timeout=60, retries=1, backoff=0.01)
    def broken() -> None:
        raise KeyError("x")


    @app.task(timeout=0.2, retries=0)
    def late() -> None:
        time.sleep(1000)


    @app.task(timeout=0.2, retries=0)
    async def late_awaited() -> None:
        await asyncio.sleep(1000)


    @app.task(timeout=60, retries=0)
    def crash() -> None:
        os.kill(os.getpid(), 9)
"""


def test_every_kind_of_task_runs_within_the_middleware_and_the_trace_of_its_pusher(
    make_shop, file_url
):
    shop = make_shop(file_url, TASKS)
    shop.start("--threads", "1")
    module = shop.app()
    tasks = (module.threaded, module.awaited, module.apart)
    span = NonRecordingSpan(SpanContext(0xABC, 0xDEF, False, TraceFlags(1)))
    with use_span(span):
        traced = [task.push(1) for task in tasks]
    assert [each.get(TIMEOUT_S) for each in traced] == ["abc"] * 3
    assert [each.push(1).get(TIMEOUT_S) for each in tasks] == ["0"] * 3
    names = [task.name for task in tasks]
    expected = {f"before {name} 1 {trace}" for name in names for trace in ("abc", "0")}
    expected |= {f"after {name} {trace}" for name in names for trace in ("abc", "0")}
    assert {name for name in shop.names() if not name.startswith("pid")} == expected
    pids = [(shop.seen / f"pid {name}").read_text() for name in names]
    # The task with a timeout runs in a process of its own, and its middleware there.
    assert pids[0] == pids[1] != pids[2]
    module.app.close()


def test_the_middleware_sees_failures_timeouts_and_crashes_of_children(make_shop, file_url):
    shop = make_shop(file_url, TASKS)
    shop.start("--threads", "1")
    module = shop.app()
    for task in (module.broken, module.late, module.late_awaited, module.crash):
        task.push()
    expected = {
        "failed broken 1 KeyError False",
        "failed broken 2 KeyError True",
        "failed late 1 TaskTimeout True",
        "failed late_awaited 1 TaskTimeout True",
        "failed crash 1 ChildEnded True",
    }
    until(lambda: {name for name in shop.names() if name.startswith("failed")} >= expected)
    assert all(shop.noted(name) == 1 for name in expected)
    assert {name for name in shop.names() if name.startswith("failed")} == expected
    module.app.close()
