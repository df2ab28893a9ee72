"""Real workers: processes that run, are stopped, killed, recycled and reloaded."""

import os
import pty
import signal
import time
import urllib.request
from contextlib import suppress

import pytest

from penstock.service import Stats
from tests.ports import lasting_port
from tests.tasks.conftest import EXECUTABLE, TIMEOUT_S, until

PLAIN = """
    @app.task(result_ttl=600)
    def add(a: int, b: int) -> int:
        note(f"add-{a}")
        return a + b

    @app.task(result_ttl=600)
    async def wait_async(s: float) -> str:
        await asyncio.sleep(s)
        note("async")
        return "waited"

    @app.task
    def block(name: str) -> None:
        note(f"began-{name}")
        while not (SEEN / f"go-{name}").exists():
            time.sleep(0.01)
        note(f"ended-{name}")
"""


def counts(module, queue="tasks"):
    stats = module.app.service.execute(Stats(queue))
    return stats.visible, stats.delayed, stats.in_flight


def test_a_worker_runs_blocking_and_async_tasks_and_finishes_them_on_sigterm(make_shop, store_url):
    shop = make_shop(store_url, PLAIN)
    worker = shop.start("--threads", "2")
    module = shop.app()
    added = module.add.push_many([(number, 1) for number in range(50)])
    waited = module.wait_async.push(0.01)
    assert [each.get(TIMEOUT_S) for each in added] == list(range(1, 51))
    assert waited.get(TIMEOUT_S) == "waited"
    # Two tasks run and two are claimed: the former are finished, the latter released at once.
    for name in "abcd":
        module.block.push(name)
    until(lambda: shop.noted("began-a") and shop.noted("began-b"))
    worker.send_signal(signal.SIGTERM)
    until(lambda: "stopping" in shop.printed())
    until(lambda: counts(module) == (2, 0, 2))
    (shop.seen / "go-a").touch()
    (shop.seen / "go-b").touch()
    assert worker.wait(TIMEOUT_S) == 0
    assert shop.noted("ended-a") == shop.noted("ended-b") == 1
    assert counts(module) == (2, 0, 0)
    assert "53 done, 0 retried, 0 failed" in shop.printed()
    module.app.close()


def test_a_second_sigterm_releases_the_running_tasks_at_once(make_shop, store_url):
    shop = make_shop(store_url, PLAIN)
    worker = shop.start()
    module = shop.app()
    module.block.push("a")
    until(lambda: shop.noted("began-a"))
    worker.send_signal(signal.SIGTERM)
    until(lambda: "stopping" in shop.printed())
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(TIMEOUT_S) == 0
    assert counts(module) == (1, 0, 0)
    assert shop.noted("ended-a") == 0
    module.app.close()


def test_the_tasks_of_a_worker_killed_by_sigkill_are_run_by_another(make_shop, store_url):
    """Rows 12 and 25 of the scorecard: another worker runs them after the visibility timeout."""
    shop = make_shop(store_url, PLAIN)
    worker = shop.start("--visibility-timeout", "1s", "--threads", "4")
    module = shop.app()
    module.block.push("a")
    added = module.add.push_many([(number, 1) for number in range(100)])
    until(lambda: shop.noted("began-a"))
    os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
    shop.start("--visibility-timeout", "1s", "--threads", "4")
    (shop.seen / "go-a").touch()
    assert [each.get(TIMEOUT_S) for each in added] == list(range(1, 101))
    until(lambda: shop.noted("ended-a") == 1)
    until(lambda: counts(module) == (0, 0, 0))
    module.app.close()


def test_workers_killed_at_random_under_load_lose_no_task(make_shop, store_url):
    """Row 12: every pushed task runs at least once, and none is stuck."""
    shop = make_shop(store_url, PLAIN)
    worker = shop.start("--visibility-timeout", "1s", "--processes", "2", "--threads", "4")
    module = shop.app()
    for part in range(6):
        module.add.push_many([(number, 1) for number in range(part * 200, part * 200 + 200)])
        until(lambda part=part: len(shop.names()) > part * 200)
        processes = until(lambda: shop.processes(worker))
        os.kill(processes[part % len(processes)], signal.SIGKILL)
    until(lambda: len(shop.names()) == 1_200)
    until(lambda: counts(module) == (0, 0, 0))
    assert "ended with SIGKILL; starting another" in shop.printed()
    module.app.close()


def test_a_claim_is_extended_for_as_long_as_its_task_runs(make_shop, store_url):
    shop = make_shop(store_url, PLAIN)
    shop.start("--visibility-timeout", "2s")
    module = shop.app()
    module.block.push("a")
    until(lambda: shop.noted("began-a"))
    began_ms = module.app.now_ms()
    until(lambda: module.app.now_ms() - began_ms > 4_500)
    assert counts(module) == (0, 0, 1)
    (shop.seen / "go-a").touch()
    until(lambda: counts(module) == (0, 0, 0))
    assert shop.noted("began-a") == 1
    module.app.close()


# The timeouts leave a busy machine time to start a process and to extend a deadline.
TIMEOUTS = """
    import signal, subprocess

    @app.task(timeout=1.5, retries=1, backoff=0.01, result_ttl=600)
    def hang(name: str) -> None:
        note(f"began-{name}-{current().attempt}")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "1000"])
        (SEEN / "child").write_text(str(child.pid))
        while True:
            time.sleep(1)

    @app.task(timeout=0.5, retries=0, result_ttl=600)
    async def hang_async() -> None:
        await asyncio.sleep(1000)

    @app.task(timeout=1.5, retries=0, result_ttl=600)
    def extend() -> str:
        for _ in range(20):
            current().extend(1.5)
            time.sleep(0.1)
        return f"in time {os.getpid()}"

    @app.task(timeout=1.5, retries=0, result_ttl=600)
    async def extend_async() -> str:
        current().extend(60)
        await asyncio.sleep(1.7)
        return "in time"

    @app.task(timeout=30, retries=0, result_ttl=600)
    def crash(number: int) -> None:
        os.kill(os.getpid(), number)

    @app.task(timeout=30, retries=0, result_ttl=600)
    def fails() -> None:
        raise KeyError("kept")

    @app.task(timeout=30, retries=0, result_ttl=600)
    def push_another() -> str:
        return extend.push().id
"""


def failure_of(pushed):
    found = until(pushed.peek)
    return found.failure


def test_a_task_that_exceeds_its_timeout_is_killed_with_its_child_processes(make_shop, file_url):
    shop = make_shop(file_url, TIMEOUTS)
    worker = shop.start("--threads", "3")
    module = shop.app()
    hung, hung_async = module.hang.push("x"), module.hang_async.push()
    in_time, in_time_async = module.extend.push(), module.extend_async.push()
    assert "ran for longer than 1.5 s, and its process was killed" in failure_of(hung).error
    assert shop.noted("began-x-1") == shop.noted("began-x-2") == 1
    child = int((shop.seen / "child").read_text())
    until(lambda: not is_running(child))
    assert "TaskTimeout: the task ran for longer than 0.5 s" in failure_of(hung_async).error
    assert in_time.get(TIMEOUT_S).startswith("in time")
    assert in_time_async.get(TIMEOUT_S) == "in time"
    # If the process of a task ends by a signal, the next task gets another process.
    assert "ended by SIGSEGV" in failure_of(module.crash.push(signal.SIGSEGV)).error
    failure = failure_of(module.fails.push())
    assert failure.error == "KeyError: 'kept'"
    assert 'raise KeyError("kept")' in failure.traceback
    pushed_id = module.push_another.push().get(TIMEOUT_S)
    until(lambda: shop.run("tasks", "inspect", "shop:app", pushed_id)[1].count("in time"))
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(TIMEOUT_S) == 0
    module.app.close()


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_the_children_of_a_killed_worker_end_too(make_shop, file_url):
    shop = make_shop(
        file_url,
        """
        @app.task(timeout=1000)
        def hang() -> None:
            (SEEN / "pid").write_text(str(os.getpid()))
            time.sleep(1000)
        """,
    )
    worker = shop.start()
    module = shop.app()
    module.hang.push()
    pid = int(until(lambda: (shop.seen / "pid").exists() and (shop.seen / "pid").read_text()))
    (process,) = shop.processes(worker)
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    # Its worker process notices that the supervisor has ended, and finishes its task.
    assert is_running(process)
    os.kill(process, signal.SIGKILL)
    until(lambda: not is_running(pid))
    module.app.close()


def test_a_task_that_kills_its_worker_is_run_in_a_child_and_fails(make_shop, file_url):
    shop = make_shop(
        file_url,
        """
        @app.task(retries=0, result_ttl=600)
        def poison() -> None:
            note("poison")
            os.kill(os.getpid(), 9)

        @app.task(result_ttl=600)
        def other() -> str:
            return "done"
        """,
    )
    module = shop.app()
    poisoned, other = module.poison.push(), module.other.push()
    shop.start("--visibility-timeout", "1s", "--processes", "2", "--threads", "1")
    failure = failure_of(poisoned)
    assert "the process of the task was ended by SIGKILL" in failure.error
    assert other.get(TIMEOUT_S) == "done"
    assert shop.noted("poison") == 6
    module.app.close()


def test_a_worker_process_is_replaced_after_max_tasks(make_shop, file_url):
    shop = make_shop(
        file_url,
        """
        @app.task
        def note_pid(number: int) -> None:
            note(f"pid-{os.getpid()}")
        """,
    )
    module = shop.app()
    module.note_pid.push_many([(number,) for number in range(30)])
    worker = shop.start("--max-tasks", "10", "--threads", "1")
    until(lambda: counts(module) == (0, 0, 0))
    assert len(shop.names()) >= 2
    assert sum(shop.noted(name) for name in shop.names()) == 30
    assert "starting another" not in shop.printed()
    worker.send_signal(signal.SIGTERM)
    worker.wait(TIMEOUT_S)
    module.app.close()


def test_a_changed_source_file_restarts_the_processes(make_shop, file_url):
    source = """
        @app.task(result_ttl=600)
        def version() -> int:
            return 1
    """
    shop = make_shop(file_url, source)
    shop.start("--reload")
    module = shop.app()
    assert module.version.push().get(TIMEOUT_S) == 1
    # Of another size: by size and second of its source, Python knows whether a .pyc file is old.
    shop.write(source.replace("return 1", "return 22"))
    until(lambda: "a source file has changed" in shop.printed())
    until(lambda: module.version.push().get(TIMEOUT_S) == 22)
    module.app.close()


def test_the_metrics_of_all_processes_are_served_for_prometheus(make_shop, file_url):
    shop = make_shop(file_url, PLAIN)
    port = lasting_port()
    shop.start("--processes", "2", "--metrics-port", str(port))
    module = shop.app()
    module.add.push_many([(number, 1) for number in range(20)])

    def page():
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                return answer.read().decode()
        except OSError:
            return ""

    until(lambda: 'penstock_task_attempts_total{outcome="done",task="add"} 20.0' in page())
    # The other process may not have begun yet, and the last report may be older than the end.
    until(lambda: "penstock_worker_processes 2.0" in page())
    until(lambda: 'penstock_worker_tasks{state="running"} 0.0' in page())
    code, _, err = shop.run("worker", "shop:app", "--metrics-port", str(port))
    assert code == 7
    assert f"metrics_port: cannot listen on 127.0.0.1:{port}" in err
    module.app.close()


def test_limits_of_rate_and_concurrency_hold_across_processes(make_shop, store_url):
    shop = make_shop(
        store_url,
        """
        import glob

        @app.task(concurrency=2, queue="narrow")
        def narrow(number: int) -> None:
            mine = SEEN / f"running-{number}"
            mine.touch()
            here = len(glob.glob(str(SEEN / "running-*")))
            note(f"together-{here}")
            time.sleep(0.05)
            mine.unlink()
            note("narrow-done")

        @app.task(rate="4/3s", queue="slow")
        def slow(number: int) -> None:
            (SEEN / f"start-{time.time_ns()}").touch()
        """,
    )
    module = shop.app()
    module.narrow.push_many([(number,) for number in range(24)])
    module.slow.push_many([(number,) for number in range(8)])
    shop.start("--processes", "2", "--threads", "8")
    until(lambda: shop.noted("narrow-done") == 24)
    assert {n for n in shop.names() if n.startswith("together")} <= {"together-1", "together-2"}

    def starts():
        return sorted(int(n.split("-")[1]) for n in shop.names() if n.startswith("start-"))

    until(lambda: len(starts()) == 8)
    # Of any five starts, the last has its token at least a period after the first. On a busy
    # machine a task may start some time after it got its token.
    gaps_s = [(b - a) / 1e9 for a, b in zip(starts(), starts()[4:], strict=False)]
    assert min(gaps_s) > 1.2
    module.app.close()


def test_a_cancelled_task_is_ended_while_it_runs(make_shop, file_url):
    shop = make_shop(
        file_url,
        """
        @app.task(timeout=1000, result_ttl=600)
        def hang() -> None:
            note("began")
            time.sleep(1000)

        @app.task(result_ttl=600)
        async def hang_async() -> None:
            note("began")
            await asyncio.sleep(1000)
        """,
    )
    shop.start()
    module = shop.app()
    pushed = [module.hang.push(), module.hang_async.push()]
    until(lambda: shop.noted("began") == 2)
    code, out, _ = shop.run("tasks", "cancel", "shop:app", *(each.id for each in pushed))
    assert (code, out.count("is dropped")) == (0, 2)
    assert [until(each.peek).state for each in pushed] == ["cancelled"] * 2
    until(lambda: counts(module) == (0, 0, 0))
    module.app.close()


def test_a_schedule_is_run_once_by_many_processes(make_shop, file_url):
    shop = make_shop(
        file_url,
        """
        @app.task
        def tick() -> None:
            (SEEN / f"tick-{time.time_ns()}").touch()

        app.schedule("ticks", "* * * * * *", tick)
        """,
    )
    began_s = int(time.time())
    shop.start("--processes", "3")
    until(lambda: len(shop.names()) >= 3)
    assert len(shop.names()) <= int(time.time()) - began_s + 1


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (["nowhere:app"], 3, "app: there is no module 'nowhere' in"),
        (["shop"], 3, "app: 'shop' is not of the form MODULE:NAME"),
        (["shop.py:app"], 3, "app: 'shop.py:app' is not of the form MODULE:NAME"),
        (["shop:other"], 3, "app: 'other' in 'shop' is not a TaskApp; there is app"),
        (["broken:app"], 3, "app: importing 'broken' failed: ZeroDivisionError: division by zero"),
        (["importing:app"], 3, "app: 'importing' needs the module 'no_such_package'"),
        (["empty:app"], 3, "app: 'empty:app' has no tasks, so there is no queue to work on"),
        (["inside:app"], 3, "url: 'memory:' is a store within one process"),
        (["shop:app", "--threads", "0"], 3, "threads: 0 is outside 1 to 1000"),
        (["shop:app", "--processes", "x"], 2, "'x' is not a whole number"),
        (["shop:app", "--queues", "a b"], 3, "queues: 'a b' is not a queue name"),
        (["shop:app", "--url", "gopher:x"], 3, "unknown URL scheme 'gopher'"),
        (["shop:app", "--burst", "--url", "penstock://127.0.0.1:9"], 4, "127.0.0.1:9"),
    ],
)
def test_wrong_options_of_a_worker_are_an_error_of_one_line(
    make_shop, file_url, words, code, complaint
):
    shop = make_shop(file_url, PLAIN)
    (shop.directory / "broken.py").write_text("1 / 0\n")
    (shop.directory / "importing.py").write_text("import no_such_package\n")
    head = "from penstock.tasks import TaskApp\n"
    (shop.directory / "empty.py").write_text(f"{head}app = TaskApp({file_url!r})\n")
    inside = f"{head}app = TaskApp('memory:')\n@app.task\ndef f() -> None: ...\n"
    (shop.directory / "inside.py").write_text(inside)
    ended, out, err = shop.run("worker", *words)
    assert (ended, out) == (code, "")
    assert complaint in err
    assert err.startswith("penstock: ")
    assert len(err.splitlines()) == 1


def test_a_burst_ends_when_no_task_is_waiting_and_leaves_the_delayed_ones(make_shop, file_url):
    shop = make_shop(
        file_url,
        """
        @app.task
        def push_another(left: int) -> None:
            note("ran")
            if left:
                push_another.push(left - 1)
        """,
    )
    module = shop.app()
    module.push_another.push_many([(3,), (0,)])
    module.push_another.push_in(600, 0)
    code, _, err = shop.run("worker", "shop:app", "--burst", "--processes", "2")
    assert code == 0
    assert shop.noted("ran") == 5
    assert counts(module) == (0, 1, 0)
    assert "stopped after 5 done, 0 retried, 0 failed" in err
    code, _, err = shop.run("worker", "shop:app", "--burst", "--max-tasks", "5")
    assert (code, "--burst ends by itself" in err) == (2, True)
    module.app.close()


def test_a_terminal_shows_a_status_line_and_ctrl_c_ends_the_worker(make_shop, file_url):
    shop = make_shop(file_url, PLAIN)
    module = shop.app()
    module.add.push(1, 2)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(shop.directory)
        os.execv(EXECUTABLE, [str(EXECUTABLE), "worker", "shop:app"])
    shown = b""
    while b"1 done" not in shown:
        shown += os.read(terminal, 4_096)
    assert b"shop:app \xc2\xb7 1 process \xc2\xb7 0 running" in shown
    os.write(terminal, b"\x03")
    with suppress(OSError):
        while part := os.read(terminal, 4_096):
            shown += part
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert b"stopped after 1 done, 0 retried, 0 failed" in shown
    os.close(terminal)
    module.app.close()
